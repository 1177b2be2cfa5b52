//! The laws of a store, with allotments around a store in memory.
//!
//! A limit that is not served keeps every law. One that is served keeps those that speak of what is allowed. Those that
//! compare whole decisions do not hold, because `remaining` and the waits of a request that was served are estimates; nor does
//! the law that nothing leaks, because each draw leaves a reservation for an hour.

use std::time::Duration;

use ratelimit_core::{Limit, ManualClock, Policy, PolicyState};
use ratelimit_layers::Allotments;
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::{AlgorithmKind, Harness, Property, Scope, StoreClock};

use crate::greedy;
use crate::memory::{BEGIN, Memory, Plain, leaks_of};

struct Laws(ManualClock);

impl Harness for Laws {
    type Store = Plain<Allotments<Memory, Policy, ManualClock>>;

    const CASES: u32 = 32;
    const SMALL_TRACE_REQUESTS: u32 = 2;

    fn new() -> Self {
        Self(ManualClock::new(BEGIN))
    }

    fn store(&self) -> Self::Store {
        self.0.set(BEGIN);
        let memory = MemoryStore::builder().shards(4).clock(self.0.clone()).build();
        Plain(greedy(&self.0).capacity(8).build(memory))
    }

    fn clock(&self, _: &Self::Store) -> StoreClock {
        StoreClock::from(&self.0)
    }

    async fn state(
        &self,
        store: &Self::Store,
        limit: &Limit<Policy>,
        key: &str,
    ) -> Option<PolicyState> {
        store.0.store().state(limit.name(), key)
    }

    async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
        let memory = store.0.store();
        leaks_of(memory, memory, &self.0, within)
    }
}

fn keeps(properties: &[Property], scopes: &[Scope]) {
    for scope in scopes {
        for property in properties {
            let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/proptest-regressions/allotments.txt");
            ratelimit_testkit::test::<Laws>(*property, *scope, "allotments::laws", seeds);
        }
    }
}

const SERVED: [Scope; 3] = [
    Scope::One(AlgorithmKind::FixedWindow),
    Scope::One(AlgorithmKind::Gcra),
    Scope::One(AlgorithmKind::TokenBucket),
];

const NOT_SERVED: [Scope; 6] = [
    Scope::One(AlgorithmKind::SlidingLog),
    Scope::One(AlgorithmKind::SlidingCounter),
    Scope::One(AlgorithmKind::FirstRequestWindow),
    Scope::One(AlgorithmKind::BucketedWindow),
    Scope::One(AlgorithmKind::Concurrency),
    Scope::Attempts(AlgorithmKind::Gcra),
];

#[test]
fn limits_that_are_not_served_keep_the_laws() {
    use Property as P;
    let laws = [
        P::NeverAdmitsMoreThanItsBound,
        P::ManyTasksAreAdmittedExactlyTheLimit,
        P::NoFalseDenial,
        P::RetryAfterIsHonest,
        P::ExpiredIsAbsent,
        P::TimeGoingBackMintsNothing,
        P::CostZeroIsAPeek,
        P::NothingLeaks,
        P::OneAnswerEverywhere,
        P::OneAnswerAfterALimitWasChanged,
        P::DifferentKeysNeverMeet,
        P::ChangingALimitIsSafe,
        P::DecidesByItsOwnClock,
        P::ItCanDoWhatItClaims,
    ];
    keeps(&laws, &NOT_SERVED);
}

/// Tests of the limits that are served, one per law.
macro_rules! served {
    ($($name:ident: $law:ident),+ $(,)?) => { $(
        #[test]
        fn $name() {
            keeps(&[Property::$law], &SERVED);
        }
    )+ };
}

served! {
    many_tasks_are_admitted_exactly_the_limit: ManyTasksAreAdmittedExactlyTheLimit,
    time_going_back_mints_nothing: TimeGoingBackMintsNothing,
    cost_zero_is_a_peek: CostZeroIsAPeek,
    different_keys_never_meet: DifferentKeysNeverMeet,
    a_reservation_is_settled_once: AReservationIsSettledOnce,
    reservations_agree: ReservationsAgree,
    reservations_leak_nothing: ReservationsLeakNothing,
    it_can_do_what_it_claims: ItCanDoWhatItClaims,
}

/// A fixed window admits exactly its limit, and denies nothing that fits.
#[test]
fn fixed_windows_keep_their_bound_and_deny_nothing_that_fits() {
    use Property as P;
    let laws = [P::NeverAdmitsMoreThanItsBound, P::NoFalseDenial, P::RetryAfterIsHonest];
    keeps(&laws, &[Scope::One(AlgorithmKind::FixedWindow)]);
}
