//! Calls a [flat script](crate::flat), which serves almost all requests: an acquire or a peek, without an id,
//! of limits whose state is a few numbers. The script returns the states that it read, and the step in Rust
//! derives the decision.

use ratelimit_core::{Batch, Now, Op, Snapshot, Timestamp, Verdict, decide};

use super::call::{Call, TwinCheck};
use crate::connection::{Argument, Connection, Reply, TryAgain};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::flat::{MOST_CHECKS, Role, Shape};
use crate::mode::Lua;
use crate::program::{Alone, LuaProgram, Stored};
use crate::scripts::Found;
use crate::store::{RedisStore, evalsha};

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
            Ok(answer) => answer,
            // The driver reports which key it is.
            Err(error) if error.is_wrong_type() => return Ok(None),
            Err(error) if reads_only => return Err(error.of_a_lookup()),
            Err(error) => return Err(call.explain(batch, error)),
        };
        let Reply::Text(answer) = &answer else { return Err(self.inner.unexpected(&answer)) };
        let (sign, lines) = answer.split_first().unwrap_or((&b'?', &[]));
        let Some(mut seen) = snapshot(batch, call, lines) else {
            // The script understood every state that it admitted.
            if *sign == b'+' {
                return Err(self.inner.unexpected(&Reply::Text(answer.clone())));
            }
            return Ok(None);
        };
        let verdict = decide(batch, seen.now, &mut seen)?;
        let agrees = match sign {
            b'+' => verdict.allowed(),
            b'-' => !verdict.allowed(),
            b'=' => true,
            _ => return Ok(None),
        };
        if agrees {
            if let Some(left) = left
                && call.has_few_numbers()
            {
                *left = Some(seen);
            }
            return Ok(Some(verdict));
        }
        let place = verdict.denied_by().next().unwrap_or_default();
        Err(self.inner.disagrees(batch.checks()[place].limit.name()))
    }

    /// The call of a flat script for this batch, if it has one.
    fn flat_call<'w, A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &'w Call<'_>,
    ) -> Result<Option<FlatCall<'w>>, RedisError> {
        let peeks = batch.operation() == Op::Peek;
        let plain = peeks || batch.operation() == Op::Acquire;
        if !plain || batch.is_part() || call.twins.len() > MOST_CHECKS {
            return Ok(None);
        }
        if let [check] = &*call.twins
            && let Some(alone) = check.twin.program.alone
            && !peeks
        {
            return self.single_check_call(batch, call, check, &alone);
        }
        if batch.reservation_id().is_some()
            || call.twins.iter().any(|check| check.twin.program.numbers.is_none())
        {
            return Ok(None);
        }
        let cost = |check: &TwinCheck<'_>| batch.checks()[check.position].cost;
        let shapes: Vec<_> = (call.twins.iter())
            .map(|check| Shape {
                program: check.twin.program,
                role: match (cost(check), check.twin.attempts) {
                    (0, _) => Role::Look,
                    (_, true) => Role::Attempt,
                    (_, false) => Role::Charge,
                },
                key: check.key,
            })
            .collect();
        let never_fits = || call.twins.iter().any(|check| cost(check) > check.twin.capacity);
        let attempts = || shapes.iter().any(|shape| shape.role == Role::Attempt);
        let reads_only = peeks
            || shapes.iter().all(|shape| shape.role == Role::Look)
            || (!attempts() && never_fits());
        if reads_only {
            let script = self.inner.scripts.reading(&shapes);
            let script = script.map_err(|program| call.misnamed(batch, program))?;
            // One key per field.
            let mut words = evalsha(call.twins.iter().map(|check| &*call.keys[check.key - 1]));
            words.extend(call.twins.iter().map(|check| Argument::Text(&check.field)));
            return Ok(Some(FlatCall { script, words, reads_only }));
        }
        let given = given(batch.time());
        let script = self.inner.scripts.acquiring(&shapes, given.is_some());
        let script = script.map_err(|program| call.misnamed(batch, program))?;
        let Some(script) = script else { return Ok(None) };
        let mut words = evalsha(call.keys.iter().map(String::as_str));
        words.extend(given.iter().flatten().copied().map(Argument::Number));
        for (check, shape) in call.twins.iter().zip(&shapes) {
            words.push(Argument::Text(&check.field));
            if shape.role != Role::Look {
                let twin = &check.twin;
                // Any charge above the capacity fails; the cap prevents an overflow.
                let charge = cost(check).min(twin.capacity + 1) * twin.unit;
                words.extend([charge, twin.capacity * twin.unit].map(Argument::Number));
                words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
            }
        }
        Ok(Some(FlatCall { script, words, reads_only }))
    }

    /// The same for a single check whose state has variable length.
    fn single_check_call<'w, A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &'w Call<'_>,
        check: &'w TwinCheck<'_>,
        alone: &Alone,
    ) -> Result<Option<FlatCall<'w>>, RedisError> {
        let (twin, cost) = (&check.twin, batch.checks()[check.position].cost);
        let reservations = batch.reservation_id().is_some();
        if cost == 0 || twin.attempts || (reservations && !alone.reservations) {
            return Ok(None);
        }
        let given = given(batch.time());
        let shape = Shape { program: twin.program, role: Role::Charge, key: 1 };
        let script = self.inner.scripts.acquiring(&[shape], given.is_some());
        let script = script.map_err(|program| call.misnamed(batch, program))?;
        let Some(script) = script else { return Ok(None) };
        let positions = [check.key, check.reservation];
        let keys = &positions[..if reservations { 2 } else { 1 }];
        let mut words = evalsha(keys.iter().map(|position| &*call.keys[position - 1]));
        words.extend(given.iter().flatten().copied().map(Argument::Number));
        words.push(Argument::Text(&check.field));
        words.push(Argument::Number(cost.min(twin.capacity + 1)));
        words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
        words.extend(reservations.then_some(Argument::Number(check.life_us)));
        Ok(Some(FlatCall { script, words, reads_only: false }))
    }
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
    script: Found,
    words: Vec<Argument<'w>>,
    reads_only: bool,
}

/// Parses the reply: a line of the time, and the state of each twin. `None` if a twin did not write its state.
fn snapshot<A: LuaProgram>(
    batch: &Batch<'_, A>,
    call: &Call<'_>,
    answer: &[u8],
) -> Option<Snapshot<A::State>> {
    let (line, seen) = first_line(answer)?;
    let now = match batch.time() {
        Now::At(now) => now,
        Now::Store => time(line)?,
    };
    Some(Snapshot { now, states: states(batch, call, seen)? })
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
