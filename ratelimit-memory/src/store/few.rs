//! A few checks at the store's own time, whose states are all found in lines: nothing is locked before all
//! is decided, and then for a moment.

use ratelimit_core::{Algorithm, Batch, Clock, Hold, States, Tick, Verdict, Write, decide};
use smallvec::SmallVec;

use super::one::{Missed, is_plain};
use super::{MemoryError, MemoryStore};
use crate::hash::CallerHash;
use crate::lines::{Address, Lines, LockedEntry, Route, Seen};
use crate::sync::wait;

/// As many as a request comes with, as a rule.
const FEW: usize = 4;
/// How often to try again, waiting longer each time.
const TRIES: u32 = if cfg!(loom) { 1 } else { 4 };

type Few<T> = SmallVec<[T; FEW]>;

/// A state that was seen in a line, and what becomes of it.
struct Found<'b, S> {
    seen: Seen<'b>,
    state: Option<S>,
    write: Write<S>,
}

/// The states of a batch as they were seen. What is written is only noted.
struct Noted<'b, S>(Few<Found<'b, S>>);

impl<S> States<S> for Noted<'_, S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.0[position].state.as_ref()
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        self.0[position].write = write;
    }

    // There is no id.
    fn hold(&self, _: usize) -> Option<Hold> {
        None
    }

    fn put_hold(&mut self, _: usize, _: Hold, _: Tick) {}
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Decides several checks, if all of them have states in lines and there is no more to it.
    pub(super) fn decide_few(&self, batch: &Batch<'_, A>) -> Option<Result<Verdict, MemoryError>> {
        let lines = self.lines.as_ref()?;
        let is_simple = is_plain(batch)
            && (2..=FEW).contains(&batch.checks().len())
            && batch.checks().iter().all(|check| check.limit.algorithm().is_small());
        if !is_simple {
            return None;
        }
        let mut waited = 0;
        loop {
            match self.try_few(lines, batch) {
                Ok(decided) => return Some(decided),
                Err(Missed::Busy) if waited < TRIES => wait(&mut waited),
                Err(_) => return None,
            }
        }
    }

    fn try_few(
        &self,
        lines: &Lines,
        batch: &Batch<'_, A>,
    ) -> Result<Result<Verdict, MemoryError>, Missed> {
        let mut routes = Few::new();
        self.add_routes(lines, batch, &mut routes);
        routes.iter().for_each(|route| route.prefetch());
        let now = self.clock.now();
        // Filled where it lies: to collect it would be to move it.
        let mut noted = Noted(Few::new());
        for route in routes {
            let seen = route.find().ok_or(Missed::More)?;
            let state = A::from_small(lines.unpack(seen.state().ok_or(Missed::Busy)?));
            noted.0.push(Found { seen, state, write: Write::Keep });
        }
        let decided = match decide(batch, now, &mut noted) {
            Ok(verdict) => verdict,
            Err(refusal) => return Ok(Err(refusal.into())),
        };
        if noted.0.iter().all(|found| matches!(found.write, Write::Keep)) {
            // What was seen, and is there still, was all there at one moment.
            let is_still = |found: &Found<'_, A::State>| found.seen.is_still();
            return if noted.0.iter().all(is_still) { Ok(Ok(decided)) } else { Err(Missed::Busy) };
        }
        write_all::<A>(lines, &noted.0)?;
        Ok(Ok(decided))
    }

    /// Adds where the checks of a batch lie. A key is hashed once for all limits that follow each other.
    fn add_routes<'b>(&self, lines: &'b Lines, batch: &Batch<'_, A>, routes: &mut Few<Route<'b>>) {
        let mut last: Option<(&str, CallerHash)> = None;
        for check in batch.checks() {
            let hash = match last {
                Some((key, hash)) if std::ptr::eq(key, check.key) => hash,
                _ => self.hasher.hash(check.key),
            };
            last = Some((check.key, hash));
            routes.push(lines.route(Address::new(hash.under(check.limit.fingerprint()))));
        }
    }
}

/// Locks all that was found, if it is there still, and writes what is to be written. Waits for none of them,
/// so that the order does not matter.
fn write_all<A: Algorithm>(lines: &Lines, found: &[Found<'_, A::State>]) -> Result<(), Missed> {
    let mut states = Few::new();
    for Found { seen, write, .. } in found {
        states.push(match write {
            Write::Keep => seen.state().ok_or(Missed::Busy)?,
            Write::Remove => return Err(Missed::More),
            Write::Put { state, .. } => {
                let small = A::to_small(state).ok_or(Missed::More)?;
                lines.pack(small).ok_or(Missed::More)?
            }
        });
    }
    let mut locked: Few<LockedEntry<'_>> = Few::new();
    for Found { seen, .. } in found {
        locked.push(seen.try_lock().ok_or(Missed::Busy)?);
    }
    for (entry, state) in locked.iter_mut().zip(states) {
        entry.set(state);
    }
    Ok(())
}
