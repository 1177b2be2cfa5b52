//! The Lua mode: one script per batch, run where the states are.

use std::borrow::Cow;

use ratelimit_core::{
    Batch, Decision, EntryStore, KeepsEntries, Limit, Now, Op, Refusal, Reservation, ReservationId,
    Store, Timestamp, Verdict, WindowEntry,
};

use crate::connection::{Argument, Connection, Reply, server_error};
use crate::deadline::Deadline;
use crate::error::{LEFT, RedisError, WRONG_TYPE};
use crate::key::Keys;
use crate::program::{Keeps, LuaProgram, Program, Stored, Twin};
use crate::reservation;
use crate::slots::SingleSlot;
use crate::store::{Lua, RedisStore, ReplyCache};

mod cross_slot;
mod plain;

/// How many integers the script returns per twin.
const ANSWERS_PER_TWIN: usize = 6;

impl<C: Connection> RedisStore<Lua, C> {
    /// The key on the server of a limit's state for a caller's key. The limits of a stack share one key,
    /// unless they are logs: then it is the key of the first.
    #[must_use]
    pub fn key<A: LuaProgram>(&self, limit: &Limit<A>, key: &str) -> String {
        let twins = limit.algorithm().twins();
        let first = twins.first().map(|twin| key_of(&self.inner.keys, limit, twin, key));
        first.unwrap_or_else(|| self.inner.keys.shared(key))
    }

    /// The key on the server of a limit's reservation for a caller's key under an id.
    #[must_use]
    pub fn reservation_key<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
        id: ReservationId,
    ) -> String {
        self.inner.keys.of_reservation(limit.name(), id, key)
    }

    /// The stored state of a limit for a key; `None` also if a limit of this name with another algorithm
    /// wrote the value.
    ///
    /// # Errors
    /// The server does not answer, or no limit wrote the value.
    pub async fn state<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<A::State>, RedisError> {
        self.state_within(limit, key, self.inner.deadline()).await
    }

    async fn state_within<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<A::State>, RedisError> {
        let twins = limit.algorithm().twins();
        let mut found = Vec::with_capacity(twins.len());
        for twin in &twins {
            found.push(self.stored(limit, twin, key, deadline).await?);
        }
        if found.iter().all(Option::is_none) {
            return Ok(None);
        }
        let state = limit.algorithm().decode(&found);
        let corrupt =
            || RedisError::corrupt(limit, &self.key(limit, key), "numbers that no limit writes");
        state.map(Some).ok_or_else(corrupt)
    }

    /// The reservation of a limit for a key under an id, if the server still has it.
    ///
    /// # Errors
    /// The server does not answer, or no limit wrote the value.
    pub async fn reservation<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
        id: ReservationId,
    ) -> Result<Option<Reservation>, RedisError> {
        let deadline = self.inner.deadline();
        self.inner.reservation(limit, &self.reservation_key(limit, key, id), deadline).await
    }

    /// The value that one twin stored.
    async fn stored<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        twin: &Twin,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<Stored>, RedisError> {
        let key = key_of(&self.inner.keys, limit, twin, key);
        let field = name_of(limit, twin);
        let keeps = twin.program.keeps;
        let all = |command| {
            vec![
                Argument::Text(command),
                Argument::Text(&key),
                Argument::Text("0"),
                Argument::Text("-1"),
            ]
        };
        let words = match keeps {
            Keeps::Numbers => {
                vec![Argument::Text("HGET"), Argument::Text(&key), Argument::Text(&field)]
            }
            Keeps::SortedSet => [all("ZRANGE"), vec![Argument::Text("WITHSCORES")]].concat(),
            Keeps::List => all("LRANGE"),
        };
        let reply = self.inner.connection.send(&key, &words, deadline).await;
        let reply = reply.map_err(|error| match &error {
            RedisError::Server { code, .. } if code == "WRONGTYPE" => {
                RedisError::corrupt(limit, &key, WRONG_TYPE)
            }
            _ => error,
        })?;
        let stored = match (reply, keeps) {
            (Reply::Nil, _) => return Ok(None),
            (Reply::Array(items), _) if items.is_empty() => return Ok(None),
            (Reply::Array(items), Keeps::SortedSet) => members(&items).map(Stored::SortedSet),
            (Reply::Array(items), Keeps::List) => elements(items).map(Stored::List),
            (Reply::Text(text), Keeps::Numbers) => {
                std::str::from_utf8(&text).ok().and_then(Stored::from_text)
            }
            (other, _) => return Err(self.inner.unexpected(&other)),
        };
        match stored {
            Some(Stored::Numbers(writer, _)) if writer != twin.program.name => Ok(None),
            Some(stored) => Ok(Some(stored)),
            None => Err(RedisError::corrupt(limit, &key, "not a state at all")),
        }
    }
}

impl<A: LuaProgram, C: Connection> Store<A> for RedisStore<Lua, C> {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, RedisError> {
        batch.validate()?;
        if batch.checks().is_empty() {
            return match (batch.reservation_id(), batch.operation()) {
                (Some(id), Op::Settle | Op::Renew) => {
                    Err(Refusal::UnknownReservation { id }.into())
                }
                _ => Ok(Verdict::several(Vec::new())),
            };
        }
        let deadline = self.inner.deadline();
        match self.inner.parts(batch)? {
            None => self.apply_in_slot(batch, deadline).await,
            // Boxed, so the future of all other batches stays small.
            Some(parts) => Box::pin(self.apply_cross_slot(batch, &parts, deadline)).await,
        }
    }
}

impl<A: LuaProgram, C: Connection> SingleSlot<A> for RedisStore<Lua, C> {
    async fn apply_in_slot(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<Verdict, RedisError> {
        supported(batch)?;
        let call = Call::of(&self.inner.keys, batch);
        call.checked(batch)?;
        if let Some(verdict) = self.apply_flat(batch, &call, deadline).await? {
            return Ok(verdict);
        }
        let parts: Vec<_> = call.parts.iter().map(|part| (part, None)).collect();
        let answer = self.run(batch, &call, operation(batch.operation()), &parts, deadline).await;
        let answer = answer.map_err(|error| match batch.operation() {
            Op::Peek => call.described(batch, error).of_a_lookup(),
            _ => call.described(batch, error),
        })?;
        call.verdict(batch, &answer).ok_or_else(|| self.inner.unexpected(&answer))
    }

    async fn try_in_slot(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<(), RedisError> {
        let call = Call::of(&self.inner.keys, batch);
        let parts: Vec<_> = call.parts.iter().map(|part| (part, None)).collect();
        let trying = format!("try-{}", operation(batch.operation()));
        let answer = self.run(batch, &call, &trying, &parts, deadline).await;
        answer.map(drop).map_err(|error| call.described(batch, error))
    }
}

impl<C: Connection> RedisStore<Lua, C> {
    /// Runs the script of a batch for these twins of its call.
    async fn run<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        operation: &str,
        parts: &[(&Part<'_>, Option<Receipt>)],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let programs = parts.iter().map(|(part, _)| part.twin.program);
        let script = self.inner.scripts.of(programs.collect());
        let script = script.map_err(|program| call.miscalled(batch, program))?;
        let reply_cache = self.inner.reply_cache(&call.keys[0]);
        let mut words = vec![Argument::Text("EVALSHA"), Argument::Text(&script.sha)];
        call.say(batch, operation, parts, reply_cache.as_ref(), &mut words);
        self.inner.eval(&call.keys[0], &script, &mut words, deadline).await
    }
}

impl<A: LuaProgram + KeepsEntries, C: Connection> EntryStore<A> for RedisStore<Lua, C> {
    async fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, RedisError> {
        let deadline = self.inner.deadline();
        let state = self.state_within(limit, key, deadline).await?;
        self.inner.entries(limit, &self.key(limit, key), state, now, deadline).await
    }
}

/// The name of a limit's twin: the limit's name, and in a stack its place.
fn name_of<'a, A: LuaProgram>(limit: &'a Limit<A>, twin: &Twin) -> Cow<'a, str> {
    match &*twin.place {
        "" => limit.name().into(),
        place => format!("{}{place}", limit.name()).into(),
    }
}

/// The key on the server of a twin's state.
fn key_of<A: LuaProgram>(keys: &Keys, limit: &Limit<A>, twin: &Twin, key: &str) -> String {
    match twin.program.keeps {
        Keeps::Numbers => keys.shared(key),
        Keeps::SortedSet => keys.of_limit(&name_of(limit, twin), key),
        Keeps::List => keys.of_list(&name_of(limit, twin), key),
    }
}

/// What is needed to return a reserved charge: the time at which it counts as made, and its mark.
#[derive(Clone, Copy)]
struct Receipt {
    at_us: i64,
    mark: i64,
}

/// The call of the script for a batch.
struct Call<'a> {
    keys: Vec<String>,
    parts: Vec<Part<'a>>,
    /// The text of the reservations' group.
    group: String,
}

/// One twin of a check.
struct Part<'a> {
    /// The check's position in the batch.
    check: usize,
    twin: Twin,
    name: Cow<'a, str>,
    /// The index of its key, from 1 as in Lua.
    key: usize,
    /// The index of its reservation's key; 0 for none.
    reservation: usize,
    life_us: u64,
}

impl<'a> Call<'a> {
    fn of<A: LuaProgram>(keys: &Keys, batch: &Batch<'a, A>) -> Self {
        let group = reservation::group_text(reservation::group(keys, batch).as_ref());
        let mut call = Self { keys: Vec::new(), parts: Vec::new(), group };
        for (check, asked) in batch.checks().iter().enumerate() {
            let (limit, key) = (asked.limit, asked.key);
            let reservation_key = |id| keys.of_reservation(limit.name(), id, key);
            let reservation =
                batch.reservation_id().map_or(0, |id| call.position(reservation_key(id)));
            for twin in limit.algorithm().twins() {
                let key = call.position(key_of(keys, limit, &twin, key));
                let life_us = limit.algorithm().reservation_us().unwrap_or(Reservation::LIFE_US);
                let name = name_of(limit, &twin);
                call.parts.push(Part { check, twin, name, key, reservation, life_us });
            }
        }
        call
    }

    /// The index of a key, adding it if it is new.
    fn position(&mut self, key: String) -> usize {
        let known = self.keys.iter().position(|known| *known == key);
        known.unwrap_or_else(|| {
            self.keys.push(key);
            self.keys.len() - 1
        }) + 1
    }

    /// The arguments after the script's: keys and arguments, as `driver.lua` reads them.
    fn say<'w, A: LuaProgram>(
        &'w self,
        batch: &'w Batch<'_, A>,
        operation: &'w str,
        parts: &[(&'w Part<'_>, Option<Receipt>)],
        reply_cache: Option<&'w ReplyCache>,
        words: &mut Vec<Argument<'w>>,
    ) {
        let count = self.keys.len() + usize::from(reply_cache.is_some());
        words.push(Argument::Number(count as u64));
        words.extend(self.keys.iter().map(|key| Argument::Text(key)));
        words.extend(reply_cache.map(|reply_cache| Argument::Text(&reply_cache.key)));
        let padding_ms = batch.time().padding_us() / 1_000;
        let now = match batch.time() {
            Now::Store => Argument::Text(""),
            Now::At(now) => Argument::Number(now.as_us()),
        };
        words.extend([Argument::Text(operation), now, Argument::Number(padding_ms)]);
        words.push(Argument::Bytes(metadata(batch)));
        // The reply cache's key is the last one.
        let (place, life_ms) = reply_cache.map_or((0, 0), |kept| (count as u64, kept.life_ms));
        words.extend([
            Argument::Number(place),
            Argument::Number(life_ms),
            Argument::Text(&self.group),
        ]);
        for (part, receipt) in parts {
            let Twin { program, parameters, capacity, unit, attempts, .. } = &part.twin;
            words.extend([
                Argument::Text(program.name),
                Argument::Number(part.key as u64),
                Argument::Text(&part.name),
                Argument::Number(batch.checks()[part.check].cost),
                Argument::Number(if *attempts { *capacity } else { 0 }),
                Argument::Number(part.reservation as u64),
                Argument::Number(part.life_us),
            ]);
            if program.numbers.is_some() {
                words.extend([capacity * unit, *unit].map(Argument::Number));
            }
            words.extend(parameters.as_slice().iter().map(|number| Argument::Number(*number)));
            words.extend(
                receipt
                    .iter()
                    .flat_map(|receipt| [receipt.at_us, receipt.mark])
                    .map(Argument::Integer),
            );
        }
    }

    /// Parses the script's reply: a decision per check, each number validated.
    fn verdict<A: LuaProgram>(&self, batch: &Batch<'_, A>, answer: &Reply) -> Option<Verdict> {
        let Reply::Array(items) = answer else { return None };
        if items.len() != self.parts.len() * ANSWERS_PER_TWIN {
            return None;
        }
        let items = items.chunks_exact(ANSWERS_PER_TWIN);
        let cost = |part: &Part<'_>| batch.checks()[part.check].cost;
        let of_twins = self.parts.iter().zip(items);
        let of_twins = of_twins.map(|(part, items)| decision(&part.twin, cost(part), items));
        Some(Verdict::several(self.by_check(of_twins.collect::<Option<_>>()?)))
    }

    /// Joins the decisions of each check's twins.
    fn by_check(&self, of_twins: Vec<Decision>) -> Vec<Decision> {
        let mut of_twins = of_twins.into_iter();
        let of_check =
            |parts: &[Part<'_>]| match &*of_twins.by_ref().take(parts.len()).collect::<Vec<_>>() {
                [decision] => *decision,
                several => *Verdict::several(several.to_vec()).summary(),
            };
        self.parts.chunk_by(|one, next| one.check == next.check).map(of_check).collect()
    }

    /// Attributes an error of the script to the check that caused it.
    fn described<A: LuaProgram>(&self, batch: &Batch<'_, A>, error: RedisError) -> RedisError {
        let RedisError::Server { address, code, message } = &error else { return error };
        if code == "RLPART" {
            let (code, message) = message.split_once(' ').unwrap_or((message, ""));
            return server_error(address, code, message).in_part();
        }
        if code == "RLOTHERS" {
            return self.of_others(batch, message).unwrap_or(error);
        }
        let mut numbers = message.split_whitespace().map_while(|word| word.parse::<u64>().ok());
        self.told(batch, code, &mut numbers).unwrap_or(error)
    }

    /// Refuses a twin whose number of parameters differs from its program's.
    fn checked<A: LuaProgram>(&self, batch: &Batch<'_, A>) -> Result<(), RedisError> {
        for Part { twin, check, .. } in &self.parts {
            let named = twin.program.parameters().len();
            let given = twin.parameters.as_slice().len();
            if twin.program.numbers.is_some() && named != given {
                return Err(RedisError::Config(format!(
                    "limit {:?}: the twin has {given} parameters, and the program {:?} names {named}; give it as many",
                    batch.checks()[*check].limit.name(),
                    twin.program.name
                )));
            }
        }
        Ok(())
    }

    /// The error for a program whose name belongs to another one or is not allowed in scripts.
    fn miscalled<A: LuaProgram>(&self, batch: &Batch<'_, A>, program: &Program) -> RedisError {
        let part = self.parts.iter().find(|part| std::ptr::eq(part.twin.program, program));
        let limit = part.map_or("", |part| batch.checks()[part.check].limit.name());
        if !program.has_plain_name() {
            return RedisError::Config(format!(
                "limit {limit:?}: the program {:?} needs a name of ASCII letters, digits, '-' and '_'",
                program.name
            ));
        }
        RedisError::Config(format!(
            "limit {limit:?}: the program {:?} is not the one that the store knows by this name, and what \
             either stores would be taken for the other's; give it another name",
            program.name
        ))
    }

    /// The error for a reservation that was made together with others: the check's position, then their
    /// limits.
    fn of_others<A: LuaProgram>(&self, batch: &Batch<'_, A>, message: &str) -> Option<RedisError> {
        let (place, reserved) = message.split_once(' ')?;
        let part = self.parts.get(place.parse::<usize>().ok()?.checked_sub(1)?)?;
        let limit = batch.checks()[part.check].limit.name();
        let reserved = if reserved.is_empty() { limit } else { reserved };
        let id = batch.reservation_id()?;
        Some(Refusal::OtherChecks { limit: limit.into(), id, reserved: reserved.into() }.into())
    }

    fn told<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        code: &str,
        numbers: &mut impl Iterator<Item = u64>,
    ) -> Option<RedisError> {
        if code == "RLUNKNOWN" {
            return Some(Refusal::UnknownReservation { id: batch.reservation_id()? }.into());
        }
        let mut place = || usize::try_from(numbers.next()?).ok()?.checked_sub(1);
        let part = self.parts.get(place()?)?;
        let limit = batch.checks()[part.check].limit;
        let (name, op) = (limit.name().into(), batch.operation());
        Some(match code {
            "RLCORRUPT" => {
                let told = if op == Op::Peek { LEFT } else { "it has been removed" };
                RedisError::corrupt(limit, self.keys.get(place()?)?, told)
            }
            "RLWRONGTYPE" => RedisError::corrupt(limit, self.keys.get(place()?)?, WRONG_TYPE),
            "RLSETTLED" => {
                Refusal::Settled { limit: name, id: batch.reservation_id()?, at: numbers.next()? }
                    .into()
            }
            "RLHELD" => {
                Refusal::Held { limit: name, id: batch.reservation_id()?, at: numbers.next()? }
                    .into()
            }
            "RLPENDING" => Refusal::Pending { limit: name, id: batch.reservation_id()? }.into(),
            "RLUNSUPPORTED" if op == Op::Settle => Refusal::CannotReserve { limit: name }.into(),
            "RLUNSUPPORTED" => Refusal::Unsupported { limit: name, op }.into(),
            _ => return None,
        })
    }
}

/// Refuses operations that an algorithm lacks, whatever the state.
fn supported<A: LuaProgram>(batch: &Batch<'_, A>) -> Result<(), RedisError> {
    for check in batch.checks() {
        let (algorithm, op) = (check.limit.algorithm(), batch.operation());
        let step = match op {
            Op::Refund => algorithm.refund(None, Timestamp::ZERO, 0),
            Op::Force => algorithm.force(None, Timestamp::ZERO, 0),
            _ => continue,
        };
        if step.is_none() {
            let limit = check.limit.name().into();
            return Err(Refusal::Unsupported { limit, op }.into());
        }
    }
    Ok(())
}

fn operation(op: Op) -> &'static str {
    match op {
        Op::Acquire => "acquire",
        Op::Peek => "peek",
        Op::Force => "force",
        Op::Refund => "refund",
        Op::Reset => "reset",
        Op::Settle => "settle",
        Op::Renew => "renew",
    }
}

/// The metadata for the script: empty if no limit of the batch stores any.
fn metadata<'b, A: LuaProgram>(batch: &'b Batch<'_, A>) -> &'b [u8] {
    let charges = matches!(batch.operation(), Op::Acquire | Op::Force);
    let kept = || batch.checks().iter().any(|c| c.limit.algorithm().metadata_bytes().is_some());
    if charges && kept() { batch.metadata_given() } else { &[] }
}

/// Parses a twin's answer.
fn decision(twin: &Twin, cost: u64, items: &[Reply]) -> Option<Decision> {
    let &[
        Reply::Integer(allowed @ (0 | 1)),
        Reply::Integer(limit),
        Reply::Integer(remaining),
        Reply::Integer(retry_after),
        Reply::Integer(replenish_after),
        Reply::Integer(reset_after),
    ] = items
    else {
        return None;
    };
    let limit = match limit {
        -1 => twin.capacity,
        limit => u64::try_from(limit).ok()?,
    };
    Some(Decision {
        allowed: allowed == 1,
        cost,
        limit,
        remaining: u64::try_from(remaining).ok().filter(|remaining| *remaining <= limit)?,
        retry_after_us: match retry_after {
            -1 => None,
            us => Some(u64::try_from(us).ok()?),
        },
        replenish_after_us: u64::try_from(replenish_after).ok()?,
        reset_after_us: u64::try_from(reset_after).ok()?,
    })
}

/// The elements of a list.
fn elements(items: Vec<Reply>) -> Option<Vec<Vec<u8>>> {
    let element = |item| match item {
        Reply::Text(bytes) => Some(bytes),
        _ => None,
    };
    items.into_iter().map(element).collect()
}

/// Members and scores of a reply that alternates them or, in RESP3, pairs them.
fn members(items: &[Reply]) -> Option<Vec<(String, u64)>> {
    let pair = |member: &Reply, score: &Reply| match (member, score) {
        (Reply::Text(member), Reply::Text(score)) => {
            let member = String::from_utf8(member.clone()).ok()?;
            Some((member, score_us(std::str::from_utf8(score).ok()?)?))
        }
        _ => None,
    };
    if items.iter().all(|item| matches!(item, Reply::Array(_))) {
        let paired = items.iter().map(|item| match item {
            Reply::Array(parts) => match &parts[..] {
                [member, score] => pair(member, score),
                _ => None,
            },
            _ => None,
        });
        return paired.collect();
    }
    let alternating = items.chunks(2).map(|parts| match parts {
        [member, score] => pair(member, score),
        _ => None,
    });
    alternating.collect()
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
