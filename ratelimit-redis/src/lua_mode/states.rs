//! Look-ups: the stored states and reservations of a limit, and its keys on the server. And what is done to states from the
//! future.

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{Limit, Limits};

use super::answer::{self, NoState};
use super::call::{Call, field_of, key_of};
use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{LEFT, RedisError, Result, WRONG_TYPE};
use crate::mode::Lua;
use crate::program::{Keeps, LuaProgram, Stored, Twin};
use crate::store::{KeepsState, RedisStore};

/// How often a state from the future is looked at again, if it changes meanwhile.
const HEALS: usize = 4;

impl<C: Connection> RedisStore<Lua, C> {
    /// The key on the server of a limit's state for a caller's key. The limits of a stack share one key,
    /// unless they are logs: then it is the key of the first.
    #[must_use]
    pub fn key<A: LuaProgram>(&self, limit: &Limit<A>, key: &str) -> String {
        let twins = limit.algorithm().twins();
        let first = twins.first().map(|twin| key_of(&self.inner.keys, limit, twin, key));
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
}

impl<A: LuaProgram, C: Connection> KeepsState<A> for RedisStore<Lua, C> {
    async fn state_within(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<A::State>> {
        let twins = limit.algorithm().twins();
        let mut found = Vec::with_capacity(twins.len());
        for twin in &twins {
            found.push(self.stored(limit, twin, key, deadline).await?);
        }
        let corrupt = |_| RedisError::corrupt(limit, &self.key(limit, key), LEFT);
        answer::state(limit.algorithm(), &found).map_err(corrupt)
    }

    async fn heal_key(
        &self,
        limits: &Limits<A>,
        key: &str,
        dry_run: bool,
    ) -> Result<Vec<(usize, u64)>> {
        let full = limits.iter().map(|limit| (limit, limit.algorithm().capacity()));
        let checks: Vec<_> = full.map(|(limit, cost)| Check { limit, key: "", cost }).collect();
        let batch = Batch::new(&checks)?.op(Op::Peek);
        let mut call = Call::of(&self.inner, &batch, self.inner.deadline())?;
        call.narrow_to(key);
        let mut healed = Vec::new();
        for _ in 0..HEALS {
            if call.twins.is_empty() {
                return Ok(healed);
            }
            call.deadline = self.inner.deadline();
            let answer = call.run("peek", &[]).await?;
            let ahead = call.ahead(&answer);
            let (found, texts) = ahead
                .ok_or_else(|| self.inner.peer.unexpected(&Reply::Text(answer.seen.clone())))?;
            if dry_run {
                return Ok(found);
            }
            let is_found = |position| found.iter().any(|(found, _)| *found == position);
            let mut texts = texts.into_iter();
            let mut given = Vec::new();
            call.twins.retain(|check| {
                let text = texts.next().unwrap_or_default();
                let heals = is_found(check.position) && !text.is_empty();
                given.extend(heals.then_some(Argument::Bytes(text)));
                heals
            });
            if call.twins.is_empty() {
                return Ok(healed);
            }
            let cut = call.run("heal", &given).await?;
            // What others changed meanwhile is looked at again.
            let mut is_cut = cut.notes.iter().map(|note| note == "1");
            call.twins.retain(|_| !is_cut.next().unwrap_or_default());
            let is_left = |position| call.twins.iter().any(|check| check.position == position);
            healed.extend(found.into_iter().filter(|(position, _)| !is_left(*position)));
        }
        Err(RedisError::Contended { attempts: HEALS })
    }
}

/// Members and scores of a reply that alternates them or, in RESP3, pairs them.
fn members(reply: &Reply) -> Option<Vec<(String, u64)>> {
    let text = |bytes| std::str::from_utf8(bytes).ok();
    let strings = reply.strings()?;
    let pairs = strings.chunks(2).map(|pair| {
        let [member, score] = pair else { return None };
        Some((text(member)?.to_owned(), score_us(text(score)?)?))
    });
    pairs.collect()
}

/// Parses a score. Servers write large ones as `1.7e+15`.
pub(crate) fn score_us(text: &str) -> Option<u64> {
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
