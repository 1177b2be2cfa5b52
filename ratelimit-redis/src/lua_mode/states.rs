//! Look-ups: the stored states and reservations of a limit, and its keys on the server. And what is
//! done to states from the future.

use ratelimit_core::Limit;
use ratelimit_core::store::{Batch, Check, Op};

use super::answer::{self, NoState};
use super::call::{Call, field_of, key_of};
use crate::codec::number_before;
use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{LEFT, RedisError, Result, WRONG_TYPE};
use crate::mode::Lua;
use crate::program::{Keeps, LuaProgram, Stored, Twin, newest_of};
use crate::store::{NewestAt, RedisStore, StatesAt, TimesIn};

impl<C: Connection> RedisStore<Lua, C> {
    /// The key on the server of a limit's state for a caller's key. The limits of a stack share one
    /// key, unless they are logs: then it is the key of the first.
    #[must_use]
    pub fn key<A: LuaProgram>(&self, limit: &Limit<A>, key: &str) -> String {
        let first = limit.algorithm().twins().into_iter().next();
        let first = first.map(|twin| key_of(&self.inner.keys, limit, &twin, key));
        first.unwrap_or_else(|| self.inner.keys.shared(key))
    }

    /// The value that one twin stored.
    async fn stored<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        twin: &Twin,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<Stored>> {
        let key = key_of(&self.inner.keys, limit, twin, key);
        let field = field_of(limit, twin);
        let keeps = twin.program.keeps;
        let words = match keeps {
            Keeps::Numbers => vec!["HGET", &key, &field],
            Keeps::SortedSet => vec!["ZRANGE", &key, "0", "-1", "WITHSCORES"],
            Keeps::List => vec!["LRANGE", &key, "0", "-1"],
        };
        let words: Vec<_> = words.into_iter().map(Argument::Text).collect();
        let reply = self.inner.connection.send(&key, &words, deadline).await;
        let reply = reply.map_err(|error| match error {
            error if error.is_wrong_type() => RedisError::corrupt(limit, &key, WRONG_TYPE),
            error => error,
        })?;
        let found = match (reply, keeps) {
            (Reply::Nil, _) => return Ok(None),
            (Reply::Array(items), _) if items.is_empty() => return Ok(None),
            (reply @ Reply::Array(_), Keeps::SortedSet) => {
                members(&reply).map(Stored::SortedSet).map(Some).ok_or(NoState)
            }
            (reply @ Reply::Array(_), Keeps::List) => {
                let elements = reply.strings().ok_or(NoState);
                elements
                    .map(|all| Some(Stored::List(all.into_iter().map(<[u8]>::to_vec).collect())))
            }
            (Reply::Text(field), Keeps::Numbers) => answer::stored(twin, &field),
            (other, _) => return Err(self.inner.peer.unexpected(&other)),
        };
        found.map_err(|_| RedisError::corrupt(limit, &key, LEFT))
    }

    /// The stored state of a limit for an identifier.
    pub(super) async fn stored_state<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        identifier: &str,
        deadline: Deadline,
    ) -> Result<Option<A::State>> {
        let twins: Vec<_> = limit.algorithm().twins().into_iter().collect();
        let mut found = Vec::with_capacity(twins.len());
        for twin in &twins {
            found.push(self.stored(limit, twin, identifier, deadline).await?);
        }
        let corrupt = |_| RedisError::corrupt(limit, &self.key(limit, identifier), LEFT);
        answer::state(limit.algorithm(), &found).map_err(corrupt)
    }

    /// The states of these limits under a key, and what each of their twins stored there. Those of
    /// a limit's twins that lie under another key count as new.
    pub(super) async fn states_at<A: LuaProgram>(
        &self,
        limits: &[&Limit<A>],
        key: &str,
        deadline: Deadline,
    ) -> Result<StatesAt<A::State>> {
        let checks = full_checks(limits);
        let batch = Batch::new(&checks)?.op(Op::Peek);
        let mut call = Call::of(&self.inner, &batch, &[], deadline)?;
        call.narrow_to(key);
        let answer = call.run("peek", &[]).await?;
        let states = call.states_in(&answer);
        states.ok_or_else(|| self.inner.peer.unexpected(&Reply::Text(answer.seen)))
    }

    /// Fills the states of some of these limits under a key, each twin's if it still is as read.
    pub(super) async fn fill_at<A: LuaProgram>(
        &self,
        limits: &[&Limit<A>],
        key: &str,
        (read, fills): (Vec<Vec<u8>>, Vec<bool>),
        deadline: Deadline,
    ) -> Result<()> {
        let checks = full_checks(limits);
        let batch = Batch::new(&checks)?.op(Op::Peek);
        let mut call = Call::of(&self.inner, &batch, &[], deadline)?;
        call.narrow_to(key);
        let mut texts = read.iter();
        let mut given = Vec::new();
        call.twins.retain(|check| {
            let text = texts.next().filter(|text| fills[check.position] && !text.is_empty());
            given.extend(text.map(|text| Argument::Bytes(text)));
            text.is_some()
        });
        if !call.twins.is_empty() {
            call.run("heal", &given).await?;
        }
        Ok(())
    }
}

/// Checks at each limit's capacity: all entries of a long state matter to them.
fn full_checks<'a, A: LuaProgram>(limits: &[&'a Limit<A>]) -> Vec<Check<'a, A>> {
    let full = limits.iter().map(|limit| (*limit, limit.algorithm().capacity()));
    full.map(|(limit, cost)| Check { limit, key: "", cost }).collect()
}

/// How to read when the newest charges of states were made under a key, by what that says about its
/// limit.
pub(super) fn newest_at(limit: &str) -> Option<NewestAt> {
    const LAST: &[&str] = &["-1", "-1"];
    const SCORED: &[&str] = &["-1", "-1", "WITHSCORES"];
    let in_hash: TimesIn = |fields| fields.iter().skip(1).step_by(2).filter_map(in_field).collect();
    let in_list: TimesIn = |items| items.iter().filter_map(in_element).collect();
    let in_sorted_set: TimesIn = |items| items.iter().skip(1).filter_map(in_score).collect();
    let (command, arguments, times) = match limit.split_once('+') {
        None if limit.is_empty() => ("HGETALL", &[][..], in_hash),
        None if !limit.contains(['#', '!']) => ("ZRANGE", SCORED, in_sorted_set),
        Some((_, "")) => ("LRANGE", LAST, in_list),
        _ => return None,
    };
    Some(NewestAt { command, arguments, times })
}

fn in_field(field: &&[u8]) -> Option<u64> {
    let (name, numbers) = Stored::parse(field)?;
    newest_of(name, &numbers)
}

/// An element begins with its time.
fn in_element(element: &&[u8]) -> Option<u64> {
    Some(number_before(element, b' ')?.0)
}

fn in_score(score: &&[u8]) -> Option<u64> {
    score_us(std::str::from_utf8(score).ok()?)
}

/// Members and scores of a reply that alternates them or, in RESP3, pairs them. A member of a
/// negative score is a sum.
fn members(reply: &Reply) -> Option<Vec<(String, u64)>> {
    let text = |bytes| std::str::from_utf8(bytes).ok();
    let strings = reply.strings()?;
    let pairs = strings.chunks(2).filter(|pair| !pair[pair.len() - 1].starts_with(b"-"));
    let pairs = pairs.map(|pair| {
        let [member, score] = pair else { return None };
        Some((text(member)?.to_owned(), score_us(text(score)?)?))
    });
    pairs.collect()
}

/// Parses a score. Servers write large ones as `1.7e+15`.
fn score_us(text: &str) -> Option<u64> {
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let (mantissa, exponent) = text.split_once("e+")?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let zeros = exponent.parse::<usize>().ok()?.checked_sub(fraction.len())?;
    format!("{whole}{fraction}{}", "0".repeat(zeros.min(20))).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_read_in_every_form_a_server_writes() {
        assert_eq!(score_us("1795218392123456"), Some(1_795_218_392_123_456));
        assert_eq!(score_us("1.7e+15"), Some(1_700_000_000_000_000));
        assert_eq!(score_us("2e+3"), Some(2_000));
        assert_eq!(score_us("1.5"), None);
        assert_eq!(score_us("nan"), None);
        assert_eq!(score_us("1.25e+1"), None);
    }
}
