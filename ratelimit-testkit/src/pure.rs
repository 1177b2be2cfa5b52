//! [`PureStore`]: a map of states and the pure step.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{
    Batch, Check, Now, RecordStore, Reservation, Standing, States, decide,
};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, Clock, Limit, ManualClock, Record, Refusal, ReservationId, Store,
    Timestamp, Verdict,
};

use crate::trace::TraceRequest;

/// The state name of a limit, and a key.
type StateKey = (String, String);

/// The smallest possible store, for any algorithm. Other stores must agree with it, field by field
/// and state by state. Its own clock is set by hand and starts at the epoch. It never removes
/// expired states.
#[derive(Debug)]
pub struct PureStore<A: Algorithm = AnyAlgorithm> {
    contents: Mutex<PureContents<A::State>>,
    records: Mutex<HashMap<StateKey, Record<A>>>,
    clock: ManualClock,
}

/// The contents of the store.
#[derive(Clone, Debug)]
struct PureContents<S> {
    states: HashMap<StateKey, S>,
    reservations: HashMap<(StateKey, ReservationId), Reservation>,
}

impl<A: Algorithm> PureStore<A> {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> Self {
        let contents = PureContents { states: HashMap::new(), reservations: HashMap::new() };
        Self {
            contents: Mutex::new(contents),
            records: Mutex::default(),
            clock: ManualClock::default(),
        }
    }

    /// The store's own clock.
    #[must_use]
    pub const fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn contents(&self) -> MutexGuard<'_, PureContents<A::State>> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of a limit's key.
    #[must_use]
    pub fn state(&self, limit: &Limit<A>, key: &str) -> Option<A::State> {
        self.contents().states.get(&(limit.state_name().to_owned(), key.to_owned())).cloned()
    }

    /// The reservation of a limit's key under an id.
    #[must_use]
    pub fn reservation(
        &self,
        limit: &Limit<A>,
        key: &str,
        id: ReservationId,
    ) -> Option<Reservation> {
        self.contents()
            .reservations
            .get(&((limit.state_name().to_owned(), key.to_owned()), id))
            .cloned()
    }

    /// Decides a batch.
    ///
    /// # Errors
    /// The request is invalid or unsupported.
    pub fn decide(&self, batch: &Batch<'_, A>) -> Result<Verdict, Refusal> {
        self.decide_by(batch, || self.records())
    }

    /// Decides a batch by these records, which are read once the states are locked.
    pub(crate) fn decide_by<R: Deref<Target = HashMap<StateKey, Record<A>>>>(
        &self,
        batch: &Batch<'_, A>,
        records: impl FnOnce() -> R,
    ) -> Result<Verdict, Refusal> {
        let mut contents = self.contents();
        let now = match batch.time() {
            Now::Store => self.clock.now(),
            Now::At(now) => now,
        };
        let mut view =
            PureView { keys: keys(batch), id: batch.reservation_id(), contents: &mut contents };
        let records = records();
        let standing = |check: &Check<'_, A>| {
            let record = records.get(&key_of(check.limit, check.key));
            check.limit.standing(record.filter(|_| check.limit.is_overridable()), now)
        };
        let standings: Vec<Standing<A>> = batch.checks().iter().map(standing).collect();
        let checks = batch.checks_by(&standings);
        decide(&batch.with_checks(&checks).standing_so(&standings), now, &mut view)
    }

    /// Locked after the contents.
    pub(crate) fn records(&self) -> MutexGuard<'_, HashMap<StateKey, Record<A>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer to a request of a trace.
    pub(crate) fn answer(
        &self,
        limits: &[Limit<A>],
        request: &TraceRequest,
        metadata: &[u8],
    ) -> Result<Verdict, Refusal> {
        let checks = request.checks(limits);
        self.decide(&request.batch(&checks, metadata).expect("no trace names a key twice"))
    }
}

impl<A: Algorithm> Default for PureStore<A> {
    fn default() -> Self {
        Self::new()
    }
}

fn keys<A: Algorithm>(batch: &Batch<'_, A>) -> Vec<StateKey> {
    batch.checks().iter().map(|check| key_of(check.limit, check.key)).collect()
}

fn key_of<A: Algorithm>(limit: &Limit<A>, key: &str) -> StateKey {
    (limit.state_name().to_owned(), key.to_owned())
}

/// A hash of these values that ignores their order.
pub(crate) fn fingerprint<T: Hash>(all: &[T]) -> u64 {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    all.iter().map(|one| hasher.hash_one(one)).fold(0, u64::wrapping_add)
}

struct PureView<'a, S> {
    keys: Vec<StateKey>,
    id: Option<ReservationId>,
    contents: &'a mut PureContents<S>,
}

impl<S> States<S> for PureView<'_, S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.contents.states.get(&self.keys[position])
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        let key = self.keys[position].clone();
        match write {
            Write::Keep => {}
            Write::Put { state, .. } => {
                self.contents.states.insert(key, state);
            }
            Write::Remove => {
                self.contents.states.remove(&key);
            }
        }
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        self.contents.reservations.get(&(self.keys[position].clone(), self.id?)).cloned()
    }

    fn fingerprint(&self) -> u64 {
        fingerprint(&self.keys)
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, _expires: Timestamp) {
        if let Some(id) = self.id {
            self.contents.reservations.insert((self.keys[position].clone(), id), reservation);
        }
    }
}

/// The clone has the same states and a clock of its own.
impl<A: Algorithm> Clone for PureStore<A> {
    fn clone(&self) -> Self {
        let contents = Mutex::new(self.contents().clone());
        let records = Mutex::new(self.records().clone());
        Self { contents, records, clock: ManualClock::new(self.clock.now()) }
    }
}

impl<A: Algorithm> Store<A> for PureStore<A> {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, Refusal> {
        self.decide(batch)
    }
}

impl<A: Algorithm + PartialEq> RecordStore<A> for PureStore<A> {
    async fn record(&self, limit: &Limit<A>, key: &str) -> Result<Option<Record<A>>, Refusal> {
        let record = self.records().get(&key_of(limit, key)).cloned();
        Ok(record.filter(|record| record.stands_at(self.clock.now())))
    }

    async fn exchange_record(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> Result<bool, Refusal> {
        limit.takes_record(next, self.clock.now())?;
        let (mut records, key) = (self.records(), key_of(limit, key));
        let stands = records.get(&key).filter(|record| record.stands_at(self.clock.now()));
        if stands != standing {
            return Ok(false);
        }
        match next {
            Some(next) => drop(records.insert(key, next.clone())),
            None => drop(records.remove(&key)),
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ratelimit_core::store::Op;

    use super::*;
    use crate::capability::Able;
    use crate::seeds::Scope;
    use crate::suite::same;
    use crate::trace::made::TraceShape;

    /// Law 13, of the pure step, which every store agrees with: what was done under an id and is
    /// sent again, at any later time at which it is remembered, changes nothing; a repeated
    /// extension makes its reservation live longer. A renewal, which starts anew each time, is left
    /// out.
    #[test]
    fn a_request_under_an_id_counts_once_however_late_it_is_repeated() {
        let (repeated, traces) =
            (Cell::new(0), Scope::Reservations.pool(Able::ALL).traces(TraceShape::FORWARD));
        let ran = same(2_000).run(&traces, |trace| {
            let store = PureStore::new();
            let is_known = |request: &TraceRequest| {
                let is_live = |check: &Check<'_, AnyAlgorithm>| {
                    let life_us = check.limit.algorithm().reservation_us();
                    let known = store.reservation(check.limit, check.key, request.id?)?;
                    Some(known.is_live(request.at, life_us.unwrap_or(Reservation::LIFE_US)))
                };
                request.checks(&trace.limits).iter().all(|check| is_live(check) == Some(true))
            };
            let mut done: Vec<&TraceRequest> = Vec::new();
            for request in &trace.requests {
                // An id that was forgotten begins anew.
                if !is_known(request) {
                    done.retain(|done| done.id != request.id);
                }
                let answer = store.answer(&trace.limits, request, &[]);
                let is_done = answer.is_ok_and(|verdict| verdict.allowed());
                if is_done && request.id.is_some() && request.op != Op::Renew {
                    done.push(request);
                }
                for done in &done {
                    let again = TraceRequest { at: request.at, ..(*done).clone() };
                    if is_known(&again) {
                        let before = store.contents().clone();
                        let answer = store.answer(&trace.limits, &again, &[]);
                        let mut after = store.contents().clone();
                        if again.op == Op::Extend {
                            for (id, reservation) in &mut after.reservations {
                                let known = before.reservations.get(id);
                                reservation.since = known.map_or(reservation.since, |it| it.since);
                            }
                        }
                        assert_eq!(before.states, after.states, "{again:?} got {answer:?}");
                        assert_eq!(before.reservations, after.reservations, "{again:?}");
                        repeated.set(repeated.get() + 1);
                    }
                }
            }
            Ok(())
        });
        ran.expect("a case that was made up");
        assert!(repeated.get() > 10_000, "{repeated:?}");
    }
}
