//! A few checks at the store's own time, whose states are all found in lines: nothing is locked before all
//! is decided, and then for a moment.

use ratelimit_core::{Algorithm, Batch, Clock, Hold, States, Tick, Verdict, Write, decide};
use smallvec::SmallVec;

use super::one::{Missed, is_plain};
use super::{MemoryError, MemoryStore};
use crate::hash::CallerHash;
use crate::lines::{Address, Entry, Line, Lines, Locked, Route, Seen};
use crate::sync::wait;

/// As many as a request comes with, as a rule.
const FEW: usize = 4;
/// How often to try again, waiting longer each time.
const TRIES: u32 = if cfg!(loom) { 1 } else { 4 };

type Few<T> = SmallVec<[T; FEW]>;

/// A state that was seen in a line, and what becomes of it.
struct Found<'b, S> {
    route: Route<'b>,
    line: &'b Line,
    seen: Seen,
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
        let begun: Few<_> = routes.iter().map(|route| route.begun()).collect();
        let now = self.clock.now();
        // Filled where it lies: to collect it would be to move it.
        let mut noted = Noted(Few::new());
        for (route, begun) in routes.into_iter().zip(begun) {
            let (line, seen) = route.find(begun).ok_or(Missed::More)?;
            let state = A::from_small(lines.unpack(seen.entry.state()));
            noted.0.push(Found { route, line, seen, state, write: Write::Keep });
        }
        let decided = match decide(batch, now, &mut noted) {
            Ok(verdict) => verdict,
            Err(refusal) => return Ok(Err(refusal.into())),
        };
        if noted.0.iter().all(|found| matches!(found.write, Write::Keep)) {
            // What was seen, and is there still, was all there at one moment.
            let is_still = |found: &Found<'_, A::State>| found.line.is_still(&found.seen);
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

/// Locks the lines of all that was found, sees that it is there still, and writes what is to be written.
/// Waits for none of them, so that the order does not matter.
fn write_all<A: Algorithm>(lines: &Lines, found: &[Found<'_, A::State>]) -> Result<(), Missed> {
    let mut entries = Few::new();
    for Found { route, seen, write, .. } in found {
        entries.push(match write {
            Write::Keep => seen.entry,
            Write::Remove => return Err(Missed::More),
            Write::Put { state, .. } => {
                let state = A::to_small(state).and_then(|small| lines.pack(small));
                Entry::new(route.tag(), state.ok_or(Missed::More)?)
            }
        });
    }
    let mut locked: Few<Locked<'_>> = Few::new();
    // For each the position of its line among those that are locked.
    let mut positions = Few::new();
    for (at, Found { line, seen, .. }) in found.iter().enumerate() {
        let same = found[..at].iter().position(|other| std::ptr::eq(other.line, *line));
        positions.push(if let Some(other) = same {
            positions[other]
        } else {
            locked.push(line.try_lock_seen(seen).ok_or(Missed::Busy)?);
            locked.len() - 1
        });
    }
    let is_still =
        |(at, found): (usize, &Found<'_, A::State>)| locked[positions[at]].is_still(&found.seen);
    if !found.iter().enumerate().all(is_still) {
        return Err(Missed::Busy);
    }
    for (at, entry) in entries.into_iter().enumerate() {
        locked[positions[at]].set(found[at].seen.slot, entry);
    }
    Ok(())
}
