//! Serves almost all requests: an acquire or a peek, without an id, of limits whose state is a few
//! numbers. A [flat script](crate::flat) returns the states that it saw, and the step in Rust derives
//! the decision.

use ratelimit_core::{Batch, Now, Op, Reservation, States, Timestamp, Verdict, Write, decide};

use super::Call;
use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::flat::{MOST_CHECKS, Part, Shape};
use crate::program::{Alone, LuaProgram, Stored};
use crate::script::Found;
use crate::store::{Lua, RedisStore};

impl<C: Connection> RedisStore<Lua, C> {
    /// Decides a batch by a flat script. Returns `None`, with nothing written, for anything else: an id,
    /// a state of variable length, or a value that no limit wrote.
    pub(super) async fn apply_flat<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        deadline: Deadline,
    ) -> Result<Option<Verdict>, RedisError> {
        let Some(asked) = self.asked_flat(batch, call)? else { return Ok(None) };
        let Asked { script, mut words, reads_only } = asked;
        words[1] = Argument::Text(&script.sha);
        let answer = match self.inner.eval(&call.keys[0], &script, &mut words, deadline).await {
            Ok(answer) => answer,
            // The driver reports which key it is.
            Err(RedisError::Server { code, message, .. })
                if code == "WRONGTYPE" || message.contains("WRONGTYPE") =>
            {
                return Ok(None);
            }
            Err(error) if reads_only => return Err(error.of_a_lookup()),
            Err(error) => return Err(call.described(batch, error)),
        };
        let Reply::Text(answer) = &answer else { return Err(self.inner.unexpected(&answer)) };
        let (sign, told) = answer.split_first().unwrap_or((&b'?', &[]));
        let seen = std::str::from_utf8(told).ok().and_then(|told| Seen::of(batch, call, told));
        let Some(mut seen) = seen else {
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
            return Ok(Some(verdict));
        }
        let place = verdict.denied_by().next().unwrap_or_default();
        Err(RedisError::Disagrees {
            limit: batch.checks()[place].limit.name().into(),
            address: self.inner.connection.address().clone(),
        })
    }

    /// The call of a flat script for this batch, if it has one.
    fn asked_flat<'w, A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &'w Call<'_>,
    ) -> Result<Option<Asked<'w>>, RedisError> {
        let peeks = batch.operation() == Op::Peek;
        let plain =
            peeks || (batch.operation() == Op::Acquire && !self.inner.connection.may_repeat());
        if !plain || batch.is_part() || call.parts.len() > MOST_CHECKS {
            return Ok(None);
        }
        if let [part] = &*call.parts
            && let Some(alone) = part.twin.program.alone
            && !peeks
        {
            return self.asked_alone(batch, call, part, &alone);
        }
        if batch.reservation_id().is_some()
            || call.parts.iter().any(|part| part.twin.program.numbers.is_none())
        {
            return Ok(None);
        }
        let cost = |part: &super::Part<'_>| batch.checks()[part.check].cost;
        let shapes: Vec<_> = (call.parts.iter())
            .map(|part| Shape {
                program: part.twin.program,
                part: match (cost(part), part.twin.attempts) {
                    (0, _) => Part::Look,
                    (_, true) => Part::Attempt,
                    (_, false) => Part::Charge,
                },
                key: part.key,
            })
            .collect();
        let never_fits = || call.parts.iter().any(|part| cost(part) > part.twin.capacity);
        let attempts = || shapes.iter().any(|shape| shape.part == Part::Attempt);
        let reads_only = peeks
            || shapes.iter().all(|shape| shape.part == Part::Look)
            || (!attempts() && never_fits());
        if reads_only {
            let script = self.inner.scripts.reading(&shapes);
            let script = script.map_err(|program| call.miscalled(batch, program))?;
            // One key per field.
            let mut words = evalsha(call.parts.iter().map(|part| &*call.keys[part.key - 1]));
            words.extend(call.parts.iter().map(|part| Argument::Text(&part.name)));
            return Ok(Some(Asked { script, words, reads_only }));
        }
        let given = given(batch.time());
        let script = self.inner.scripts.acquiring(&shapes, given.is_some());
        let script = script.map_err(|program| call.miscalled(batch, program))?;
        let Some(script) = script else { return Ok(None) };
        let mut words = evalsha(call.keys.iter().map(String::as_str));
        words.extend(given.iter().flatten().copied().map(Argument::Number));
        for (part, shape) in call.parts.iter().zip(&shapes) {
            words.push(Argument::Text(&part.name));
            if shape.part != Part::Look {
                let twin = &part.twin;
                // Any charge above the capacity fails; the cap prevents an overflow.
                let charge = cost(part).min(twin.capacity + 1) * twin.unit;
                words.extend([charge, twin.capacity * twin.unit].map(Argument::Number));
                words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
            }
        }
        Ok(Some(Asked { script, words, reads_only }))
    }
}

impl<C: Connection> RedisStore<Lua, C> {
    /// The same for a single check whose state has variable length.
    fn asked_alone<'w, A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &'w Call<'_>,
        part: &'w super::Part<'_>,
        alone: &Alone,
    ) -> Result<Option<Asked<'w>>, RedisError> {
        let (twin, cost) = (&part.twin, batch.checks()[part.check].cost);
        let reservations = batch.reservation_id().is_some();
        if cost == 0 || twin.attempts || (reservations && !alone.reservations) {
            return Ok(None);
        }
        let given = given(batch.time());
        let shape = Shape { program: twin.program, part: Part::Charge, key: 1 };
        let script = self.inner.scripts.acquiring(&[shape], given.is_some());
        let script = script.map_err(|program| call.miscalled(batch, program))?;
        let Some(script) = script else { return Ok(None) };
        let positions = [part.key, part.reservation];
        let keys = &positions[..if reservations { 2 } else { 1 }];
        let mut words = evalsha(keys.iter().map(|position| &*call.keys[position - 1]));
        words.extend(given.iter().flatten().copied().map(Argument::Number));
        words.push(Argument::Text(&part.name));
        words.push(Argument::Number(cost.min(twin.capacity + 1)));
        words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
        words.extend(reservations.then_some(Argument::Number(part.life_us)));
        Ok(Some(Asked { script, words, reads_only: false }))
    }
}

/// The arguments before a script's own; the second is the hash, filled in later.
fn evalsha<'w>(keys: impl ExactSizeIterator<Item = &'w str>) -> Vec<Argument<'w>> {
    let count = keys.len();
    let mut words = Vec::with_capacity(16 * count);
    words.extend([Argument::Text("EVALSHA"), Argument::Text(""), Argument::Number(count as u64)]);
    words.extend(keys.map(Argument::Text));
    words
}

/// A given time, and by how many milliseconds it extends the life of keys.
fn given(time: Now) -> Option<[u64; 2]> {
    match time {
        Now::Store => None,
        Now::At(now) => Some([now.as_us(), time.padding_us() / 1_000]),
    }
}

/// The call of a flat script for a batch.
struct Asked<'w> {
    script: Found,
    words: Vec<Argument<'w>>,
    reads_only: bool,
}

/// What a script read: the time, and the state of each check.
struct Seen<S> {
    now: Timestamp,
    states: Vec<Option<S>>,
}

impl<S> Seen<S> {
    /// Parses the lines of the reply: the time, and the state of each twin. `None` if a twin did not
    /// write it.
    fn of<A: LuaProgram<State = S>>(
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        told: &str,
    ) -> Option<Self> {
        let mut lines = told.split('\n');
        let time = lines.next()?;
        let now = match batch.time() {
            Now::At(now) => now,
            Now::Store => {
                let (seconds, us) = time.split_once(' ')?;
                let seconds = seconds.parse::<u64>().ok()?;
                Timestamp::from_us(seconds.checked_mul(1_000_000)?.checked_add(us.parse().ok()?)?)?
            }
        };
        let mut stored = Vec::with_capacity(call.parts.len());
        for part in &call.parts {
            stored.push(match lines.next()? {
                "" => None,
                line => match Stored::from_text(line)? {
                    // The limit had another algorithm before, whose state means nothing to this one.
                    Stored::Numbers(writer, _) if writer != part.twin.program.name => None,
                    stored => Some(stored),
                },
            });
        }
        if lines.next().is_some() {
            return None;
        }
        let mut states = Vec::with_capacity(batch.checks().len());
        let mut rest = &stored[..];
        for parts in call.parts.chunk_by(|one, next| one.check == next.check) {
            let (of_check, others) = rest.split_at_checked(parts.len())?;
            rest = others;
            states.push(if of_check.iter().all(Option::is_none) {
                None
            } else {
                Some(batch.checks()[parts[0].check].limit.algorithm().decode(of_check)?)
            });
        }
        Some(Self { now, states })
    }
}

impl<S> States<S> for Seen<S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.states.get(position)?.as_ref()
    }

    fn put(&mut self, _position: usize, _write: Write<S>) {}

    fn reservation(&self, _position: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(
        &mut self,
        _position: usize,
        _reservation: Reservation,
        _expires: Timestamp,
    ) {
    }
}
