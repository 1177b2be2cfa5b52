//! A store of your own under the laws: a map under one lock.
//!
//! `cargo run -p ratelimit-testkit --example own_store` asks it; `cargo test -p ratelimit-testkit
//! --example own_store` runs all laws on it.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Mutex, PoisonError};

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Now, Reservation, States, decide};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, Clock, ErrorKind, Gcra, Limit, Limits, RateLimiter, Refusal,
    ReservationId, Store, StoreError, SyncStore, SystemClock, Timestamp, Verdict,
};

/// A limit's state name and a caller's key. As a pair, so that no two pairs become one text.
type Key = (String, String);

/// States and reservations in maps, each with the time at which it expires.
pub struct MapStore<A: Algorithm = AnyAlgorithm, C = SystemClock> {
    kept: Mutex<Kept<A::State>>,
    clock: C,
}

struct Kept<S> {
    states: HashMap<Key, (S, Timestamp)>,
    reservations: HashMap<(Key, ReservationId), (Reservation, Timestamp)>,
}

impl<A: Algorithm, C: Clock> MapStore<A, C> {
    /// An empty store on this clock.
    pub fn new(clock: C) -> Self {
        let kept = Kept { states: HashMap::new(), reservations: HashMap::new() };
        Self { kept: Mutex::new(kept), clock }
    }
}

/// What one batch sees of the store: the keys of its checks, in their order, and its id.
struct View<'a, S> {
    kept: &'a mut Kept<S>,
    keys: Vec<Key>,
    id: Option<ReservationId>,
    /// The time of the decision.
    now: Timestamp,
    /// The store's own time, by which states expire.
    clock: Timestamp,
    /// A decision at a given time says nothing about the store's clock: what it writes is kept for
    /// an hour longer.
    grace_us: u64,
}

impl<S> View<'_, S> {
    fn by_own_clock(&self, expires: Timestamp) -> Timestamp {
        let matters_us = expires.saturating_us_since(self.now);
        self.clock.saturating_add_us(matters_us).saturating_add_us(self.grace_us)
    }
}

impl<S> States<S> for View<'_, S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.kept.states.get(&self.keys[position]).map(|(state, _)| state)
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        let key = self.keys[position].clone();
        match write {
            Write::Keep => {}
            Write::Put { state, expires } => {
                let expires = self.by_own_clock(expires);
                self.kept.states.insert(key, (state, expires));
            }
            Write::Remove => {
                self.kept.states.remove(&key);
            }
        }
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        let key = (self.keys[position].clone(), self.id?);
        self.kept.reservations.get(&key).map(|(reservation, _)| reservation.clone())
    }

    fn fingerprint(&self) -> u64 {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        self.keys.iter().map(|key| hasher.hash_one(key)).fold(0, u64::wrapping_add)
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp) {
        let expires = self.by_own_clock(expires);
        if let Some(id) = self.id {
            let key = (self.keys[position].clone(), id);
            self.kept.reservations.insert(key, (reservation, expires));
        }
    }
}

impl<A: Algorithm, C: Clock> SyncStore<A> for MapStore<A, C> {
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, MapError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock, so that decisions come in the order of their times.
        let clock = self.clock.now();
        let (now, grace_us) = match batch.time() {
            Now::Store => (clock, 0),
            Now::At(given) => (given, 3_600_000_000),
        };
        // The simplest sweep: every call looks at all states. A store for many keys looks at a few.
        if batch.time() == Now::Store {
            kept.states.retain(|_, (_, expires)| clock < *expires);
            kept.reservations.retain(|_, (_, expires)| clock < *expires);
        }
        let key = |limit: &Limit<A>, key: &str| (limit.state_name().to_owned(), key.to_owned());
        let keys = batch.checks().iter().map(|check| key(check.limit, check.key)).collect();
        let mut view =
            View { kept: &mut kept, keys, id: batch.reservation_id(), now, clock, grace_us };
        decide(batch, now, &mut view).map_err(MapError)
    }
}

impl<A: Algorithm, C: Clock> Store<A> for MapStore<A, C> {
    type Error = MapError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, MapError> {
        self.apply_now(batch)
    }
}

/// All that can go wrong in a map: a request that no store can decide.
#[derive(Debug)]
pub struct MapError(Refusal);

impl std::fmt::Display for MapError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for MapError {}

impl From<Refusal> for MapError {
    fn from(refusal: Refusal) -> Self {
        Self(refusal)
    }
}

impl StoreError for MapError {
    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
    let limiter = RateLimiter::new(limits, MapStore::new(SystemClock::new()));
    let verdict = limiter.check_now("alice")?;
    println!("{} of {} left", verdict.remaining(), verdict.limit());
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use ratelimit_core::ManualClock;
    use ratelimit_core::algorithm::AnyState;
    use ratelimit_core::store::{Check, Op};
    use ratelimit_testkit::{
        AlsoSync, ByOwnClock, ConcurrentRun, Harness, StoreClock, conformance,
    };

    use super::*;

    /// When every store begins to live.
    const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

    /// Gives the laws access to the store.
    struct Mine(ManualClock);

    impl Harness for Mine {
        type Store = MapStore<AnyAlgorithm, ManualClock>;

        // 3 instead of 4, because every call looks at all states.
        const SMALL_TRACE_REQUESTS: u32 = 3;

        fn new() -> Self {
            Self(ManualClock::new(BEGIN))
        }

        fn store(&self) -> Self::Store {
            self.0.set(BEGIN);
            MapStore::new(self.0.clone())
        }

        fn clock(&self, _: &Self::Store) -> StoreClock {
            StoreClock::from(&self.0)
        }

        async fn state(
            &self,
            store: &Self::Store,
            limit: &Limit<AnyAlgorithm>,
            key: &str,
        ) -> Option<AnyState> {
            let kept = store.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (limit.state_name().to_owned(), key.to_owned());
            kept.states.get(&key).map(|(state, _)| state.clone())
        }

        /// Moves the clock on. Any call sweeps, and then nothing may be left.
        async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
            self.0.advance(within);
            let other = Limit::new("other", Gcra::new("1/s".parse().unwrap(), 1).unwrap().into());
            let check = Check { limit: &other.unwrap(), key: "other", cost: 1 };
            let _ = store.apply_now(&Batch::one(&check).op(Op::Peek).now(Now::Store)).unwrap();
            let kept = store.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let states = kept.states.keys().map(|key| format!("{key:?}"));
            states.chain(kept.reservations.keys().map(|key| format!("{key:?}"))).collect()
        }
    }

    // map::agrees_on::gcra, map::many_tasks_are_admitted_exactly_the_limit, and so on.
    conformance!(map, AlsoSync<Mine>);
    // The same at the store's own time, as in production.
    conformance!(map_own_clock, ByOwnClock<AlsoSync<Mine>>);

    #[test]
    fn some_order_explains_the_answers_to_many_threads() -> Result<(), Box<dyn std::error::Error>> {
        let gcra = AnyAlgorithm::from(Gcra::new("10/s".parse()?, 5)?);
        let (limits, clock) = ([Limit::new("login", gcra)?], ManualClock::new(BEGIN));
        ConcurrentRun::new(&limits).run(&MapStore::new(clock.clone()), &clock)?;
        Ok(())
    }

    #[test]
    fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
        main()
    }
}
