//! What a script answers: its time, a line that says what it did, and what it read. From that,
//! [`decide`] derives the verdict.

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Now, Op, Reservation, Snapshot, States, decide};
use ratelimit_core::{Timestamp, Verdict};
use smallvec::SmallVec;

use super::call::Call;
use crate::codec::take_sized;
use crate::connection::Connection;
use crate::error::Result;
use crate::program::{LuaProgram, Stored, Twin};
use crate::reservation;

/// What a script read for a batch. [`decide`] leaves in it the states that the script left.
pub(crate) struct Seen<S> {
    pub(crate) snapshot: Snapshot<S>,
    reservations: Vec<Option<Reservation>>,
    fingerprint: u64,
}

impl<S> States<S> for Seen<S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.snapshot.get(position)
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        self.snapshot.put(position, write);
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        self.reservations.get(position)?.clone()
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The script wrote it.
    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {}
}

impl<A: LuaProgram, C: Connection> Call<'_, A, C> {
    /// Parses the states and reservations that a script read. `None` if its twins did not write
    /// them.
    pub(super) fn seen(&self, now: Timestamp, mut seen: &[u8]) -> Option<Seen<A::State>> {
        let checks = self.batch.checks();
        let mut states = Vec::with_capacity(checks.len());
        let mut stored: SmallVec<[_; 1]> = SmallVec::new();
        for twins in self.twins.chunk_by(|one, next| one.position == next.position) {
            stored.clear();
            for check in twins {
                stored.push(self::stored(&check.twin, take_sized(&mut seen)?).ok()?);
            }
            let algorithm = checks[twins[0].position].limit.algorithm();
            states.push(state(algorithm, &stored).ok()?);
        }
        let mut reservations = Vec::new();
        for twin in self.twins.iter().filter(|twin| twin.reservation != 0) {
            let found = match take_sized(&mut seen)? {
                [] => None,
                stored => Some(reservation::decode(stored)?),
            };
            // The twins of a limit share it.
            reservations.truncate(twin.position);
            reservations.push(found);
        }
        let (snapshot, fingerprint) = (Snapshot { now, states }, self.fingerprint);
        seen.is_empty().then_some(Seen { snapshot, reservations, fingerprint })
    }

    /// The verdict on what a script read, if the script did what follows from it.
    pub(super) fn verdict(&self, line: &str, seen: &mut Seen<A::State>) -> Result<Verdict> {
        let decided = decide(self.batch, seen.snapshot.now, seen);
        let agrees = match (&decided, line) {
            // Each attempt is charged whatever the others are.
            (Ok(_), "0") if self.batch.is_denied_elsewhere() => true,
            (Ok(verdict), "1") => verdict.allowed(),
            (Ok(verdict), "0") => !verdict.allowed(),
            // A script charges nothing for what costs nothing or never fits, or for what an id
            // refuses.
            (Ok(_), "=") => {
                self.batch.operation() == Op::Peek
                    || self.batch.reservation_id().is_none()
                    || self.is_blocked()
            }
            (Err(_), line) => line == "=",
            _ => false,
        };
        if agrees {
            return Ok(decided?);
        }
        let denied = decided.ok().and_then(|verdict| verdict.denied_by().next());
        Err(self.inner.peer.disagrees(self.batch.checks()[denied.unwrap_or_default()].limit.name()))
    }
}

/// Parses the time and the line of an answer about one request, and what follows.
pub(super) fn of_one(time: Now, answer: &[u8]) -> Option<(Timestamp, &str, &[u8])> {
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

/// Parses a time: seconds and microseconds.
pub(super) fn time(text: &str) -> Option<Timestamp> {
    let (seconds, us) = text.split_once(' ')?;
    let seconds = seconds.parse::<u64>().ok()?;
    let us = seconds.checked_mul(1_000_000)?.checked_add(us.parse().ok()?)?;
    // The end of time is refused by name.
    Some(Timestamp::saturating_from_us(us))
}

/// Parses what a twin stored: nothing, if it is new. An error if that is no state.
pub(super) fn stored(twin: &Twin, text: &[u8]) -> Result<Option<Stored>, NoState> {
    if text.is_empty() {
        return Ok(None);
    }
    Stored::of(twin.program, text).map(Some).ok_or(NoState)
}

/// The state of which a limit's twins stored these parts: nothing, if it is new to each. An error
/// if that is no state.
pub(super) fn state<A: LuaProgram>(
    algorithm: &A,
    stored: &[Option<Stored>],
) -> Result<Option<A::State>, NoState> {
    if stored.iter().all(Option::is_none) {
        return Ok(None);
    }
    algorithm.decode(stored).map(Some).ok_or(NoState)
}

/// No twin wrote this.
pub(super) struct NoState;
