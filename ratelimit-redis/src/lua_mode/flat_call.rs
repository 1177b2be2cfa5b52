//! Calls a [script](crate::flat) for one request, as a group of one: an acquire or a peek, without an id,
//! of limits whose state is a few numbers. The script returns the states that it read, and the step in Rust
//! derives the decision.

use std::sync::{Arc, LazyLock};

use ratelimit_core::store::{Batch, Now, Op, Snapshot, decide};
use ratelimit_core::{Timestamp, Verdict};

use super::call::{Call, TwinCheck};
use crate::connection::{Argument, Connection, Reply, TryAgain, refused_in_part};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::flat::{self, MOST_CHECKS, READ, Role};
use crate::mode::Lua;
use crate::program::{LuaProgram, Stored, Twin};
use crate::script::Script;
use crate::store::{RedisStore, evalsha};

/// Returns states, and writes nothing.
static READING: LazyLock<Arc<Script>> = LazyLock::new(|| Arc::new(Script::from_text(READ)));

impl<C: Connection> RedisStore<Lua, C> {
    /// Decides a batch by a flat script. Returns `None`, with nothing written, for anything else: an id,
    /// a state of variable length, or a value that no limit wrote.
    pub(super) async fn apply_flat<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        deadline: Deadline,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Option<Verdict>, RedisError> {
        let Some(flat) = self.flat_call(batch, call)? else { return Ok(None) };
        let FlatCall { script, mut words, reads_only } = flat;
        let answer = match self
            .inner
            .eval(&call.keys[0], &script, &mut words, TryAgain::Wait, deadline)
            .await
        {
            Ok(Reply::Text(answer)) => answer,
            Ok(other) => return Err(self.inner.unexpected(&other)),
            // The driver reports which key it is.
            Err(error) if error.is_wrong_type() => return Ok(None),
            Err(error) if reads_only => return Err(error.of_a_lookup()),
            Err(error) => return Err(call.explain(batch, error)),
        };
        // The driver decides on what the script did not understand.
        let Some((now, line, seen)) = of_one(batch.time(), &answer) else { return Ok(None) };
        if let Some(refused) = line.strip_prefix('!') {
            return Err(refused_in_part(self.inner.connection.address(), refused));
        }
        let Some(states) = states(batch, call, seen) else {
            // The script understood every state that it admitted.
            if line == "1" {
                return Err(self.inner.unexpected(&Reply::Text(answer)));
            }
            return Ok(None);
        };
        let mut seen = Snapshot { now, states };
        let verdict = decide(batch, now, &mut seen)?;
        let agrees = match line {
            "1" => verdict.allowed(),
            "0" => !verdict.allowed(),
            "=" => true,
            _ => return Ok(None),
        };
        if !agrees {
            let place = verdict.denied_by().next().unwrap_or_default();
            return Err(self.inner.disagrees(batch.checks()[place].limit.name()));
        }
        if let Some(left) = left
            && call.has_few_numbers()
        {
            *left = Some(seen);
        }
        Ok(Some(verdict))
    }

    /// The call of a flat script for this batch, if it has one.
    fn flat_call<'w, A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &'w Call<'_>,
    ) -> Result<Option<FlatCall<'w>>, RedisError> {
        let peeks = batch.operation() == Op::Peek;
        let plain = peeks || batch.operation() == Op::Acquire;
        if !plain || batch.is_part() {
            return Ok(None);
        }
        let given = given(batch.time());
        if let [check] = &*call.twins
            && !peeks
            && let Some(script) = flat::alone(check.twin.program, given.is_some())
        {
            return Ok(words_alone(batch, call, check, given).map(|words| FlatCall {
                script: Arc::clone(script),
                words,
                reads_only: false,
            }));
        }
        if batch.reservation_id().is_some() || !call.has_few_numbers() {
            return Ok(None);
        }
        let shapes = call.shapes(batch);
        let never_fits = || call.twins.iter().any(|check| check.cost(batch) > check.twin.capacity);
        let attempts = || shapes.iter().any(|shape| shape.role == Role::Attempt);
        let reads_only = peeks
            || shapes.iter().all(|shape| shape.role == Role::Look)
            || (!attempts() && never_fits());
        if reads_only {
            let registered = self.inner.scripts.register(call.twins.iter().map(|c| c.twin.program));
            registered.map_err(|program| call.misnamed(batch, program))?;
            // One key per field.
            let mut words = evalsha(call.twins.iter().map(|check| &*call.keys[check.key - 1]));
            words.extend(call.twins.iter().map(|check| Argument::Text(&check.field)));
            return Ok(Some(FlatCall { script: Arc::clone(&READING), words, reads_only }));
        }
        if shapes.len() > MOST_CHECKS {
            return Ok(None);
        }
        let script = self.inner.scripts.deciding(&[&shapes], given.is_some());
        let script = script.map_err(|program| call.misnamed(batch, program))?;
        let Some((script, kinds)) = script else { return Ok(None) };
        let mut words = evalsha(call.keys.iter().map(String::as_str));
        words.extend(given.iter().flatten().copied().map(Argument::Number));
        words.extend([kinds[0] as u64, 1, 1].map(Argument::Number));
        for (check, shape) in call.twins.iter().zip(&shapes) {
            // Any charge above the capacity fails; the cap prevents an overflow.
            let cost = check.cost(batch).min(check.twin.capacity + 1);
            push_check(&mut words, &check.field, &check.twin, shape.role, cost);
        }
        Ok(Some(FlatCall { script, words, reads_only }))
    }
}

/// Adds the arguments about a check: its field and, unless it costs nothing, the numbers of its limit and its charge.
pub(super) fn push_check<'w>(
    words: &mut Vec<Argument<'w>>,
    field: &'w str,
    twin: &'w Twin,
    role: Role,
    cost: u64,
) {
    words.push(Argument::Text(field));
    if role != Role::Look {
        words.push(Argument::Number(twin.capacity * twin.unit));
        words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
        words.push(Argument::Number(cost * twin.unit));
    }
}

/// The call for a single check whose state has variable length, if the program's script serves it.
fn words_alone<'w, A: LuaProgram>(
    batch: &Batch<'_, A>,
    call: &'w Call<'_>,
    check: &'w TwinCheck<'_>,
    given: Option<[u64; 2]>,
) -> Option<Vec<Argument<'w>>> {
    let (twin, cost) = (&check.twin, check.cost(batch));
    let alone = twin.program.alone?;
    let reservations = batch.reservation_id().is_some();
    if cost == 0 || twin.attempts || (reservations && !alone.reservations) {
        return None;
    }
    let positions = [check.key, check.reservation];
    let keys = &positions[..if reservations { 2 } else { 1 }];
    let mut words = evalsha(keys.iter().map(|position| &*call.keys[position - 1]));
    words.extend(given.iter().flatten().copied().map(Argument::Number));
    words.push(Argument::Text(&check.field));
    words.push(Argument::Number(cost.min(twin.capacity + 1)));
    words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
    words.extend(reservations.then_some(Argument::Number(check.life_us)));
    Some(words)
}

/// A given time, and by how many milliseconds it extends the life of keys.
fn given(time: Now) -> Option<[u64; 2]> {
    match time {
        Now::Store => None,
        Now::At(now) => Some([now.as_us(), time.padding_us() / 1_000]),
    }
}

/// The call of a flat script for a batch.
struct FlatCall<'w> {
    script: Arc<Script>,
    words: Vec<Argument<'w>>,
    reads_only: bool,
}

/// Parses the reply about one request: the time, the line of its group, and the states after it.
fn of_one(time: Now, answer: &[u8]) -> Option<(Timestamp, &str, &[u8])> {
    let (line, rest) = first_line(answer)?;
    let now = match time {
        Now::At(now) => now,
        Now::Store => self::time(line)?,
    };
    let (line, seen) = first_line(rest)?;
    Some((now, line, seen))
}

/// The first line of an answer, and what follows.
pub(super) fn first_line(answer: &[u8]) -> Option<(&str, &[u8])> {
    let end = answer.iter().position(|byte| *byte == b'\n')?;
    Some((std::str::from_utf8(&answer[..end]).ok()?, &answer[end + 1..]))
}

/// Takes the next state from an answer: its length, a colon, and the state.
pub(super) fn next_state<'s>(seen: &mut &'s [u8]) -> Option<&'s [u8]> {
    let colon = seen.iter().position(|byte| *byte == b':')?;
    let length: usize = std::str::from_utf8(&seen[..colon]).ok()?.parse().ok()?;
    let (state, rest) = seen[colon + 1..].split_at_checked(length)?;
    *seen = rest;
    Some(state)
}

/// Parses a time in a reply: seconds and microseconds.
pub(super) fn time(text: &str) -> Option<Timestamp> {
    let (seconds, us) = text.split_once(' ')?;
    let seconds = seconds.parse::<u64>().ok()?;
    let us = seconds.checked_mul(1_000_000)?.checked_add(us.parse().ok()?)?;
    // The end of time is refused by name.
    Some(Timestamp::saturating_from_us(us))
}

/// Parses the state of each twin. `None` if a twin did not write its state.
pub(super) fn states<A: LuaProgram>(
    batch: &Batch<'_, A>,
    call: &Call<'_>,
    mut seen: &[u8],
) -> Option<Vec<Option<A::State>>> {
    let mut stored = Vec::with_capacity(call.twins.len());
    for check in &call.twins {
        stored.push(match next_state(&mut seen)? {
            [] => None,
            state => match Stored::from_field(state)? {
                // The limit had another algorithm before, whose state means nothing to this one.
                Stored::Numbers(writer, _) if writer != check.twin.program.name => None,
                stored => Some(stored),
            },
        });
    }
    if !seen.is_empty() {
        return None;
    }
    let mut states = Vec::with_capacity(batch.checks().len());
    let mut rest = &stored[..];
    for twins in call.twins.chunk_by(|one, next| one.position == next.position) {
        let (of_check, others) = rest.split_at_checked(twins.len())?;
        rest = others;
        states.push(if of_check.iter().all(Option::is_none) {
            None
        } else {
            Some(batch.checks()[twins[0].position].limit.algorithm().decode(of_check)?)
        });
    }
    Some(states)
}
