//! The laws, each as a function of a store and a trace.
//!
//! They use the terms of the contract, not of any implementation: what was admitted, what was promised, what is
//! left. Laws that compare answers compare them with the [pure store](crate::PureStore) and the
//! [oracle](crate::NaiveStore).

mod agreement;
mod batches;
mod bounds;
mod capabilities;
mod change;
mod concurrency;
mod denial;
pub(crate) mod own_clock;
mod reservations;
mod safety;
mod similar;
mod small;
mod time;
pub(crate) mod untrusted_keys;
mod waiting;

pub use agreement::{
    one_answer_after_a_limit_was_changed, one_answer_everywhere, two_names_one_machine,
};
pub use batches::{all_or_nothing, cost_zero_is_a_peek};
pub use capabilities::it_can_do_what_it_claims;
pub use change::changing_a_limit_is_safe;
pub use concurrency::many_tasks_are_admitted_exactly_the_limit;
pub use denial::{a_denial_charges_nothing, every_attempt_is_charged};
pub use own_clock::{
    decides_by_a_clock_that_runs, decides_by_its_own_clock, its_own_clock_keeps_time,
};
pub use reservations::{a_reservation_is_settled_once, reservations_agree};
pub use safety::{never_admits_more_than_its_bound, no_false_denial};
pub use similar::similar_keys_never_meet;
pub use small::every_small_trace_agrees_with_the_oracle;
pub use time::{expired_is_absent, nothing_leaks, time_going_back_mints_nothing};
pub use untrusted_keys::{UntrustedKeys, different_keys_never_meet};
pub use waiting::retry_after_is_honest;

use ratelimit_core::{
    Check, Decision, ErrorKind, Limit, Now, Op, Policy, PolicyState, Store, StoreError, Timestamp,
    Verdict,
};

use crate::capability::{Able, Capability};
use crate::harness::Harness;
use crate::law::{Law, Violation};
use crate::seeds::AlgorithmKind;
use crate::suite::guard::note_request;
use crate::trace::{Ask, Request, Trace};

/// How often a request is repeated while the store reports contention.
const CONTENDED: usize = 1_000;

/// The outcome of a law: `Ok`, or how the store broke it.
pub type Kept = Result<(), Violation>;

/// A store's answer to a request: a verdict, or a kind of error and its message.
pub(crate) type Said = Result<Verdict, (ErrorKind, String)>;

/// A store under test for one law.
#[derive(Debug)]
pub struct Subject<'a, H: Harness> {
    /// The law under test.
    pub law: Law,
    /// The harness of the backend.
    pub harness: &'a H,
    /// The store, which is fresh.
    pub store: &'a H::Store,
}

impl<H: Harness> Subject<'_, H> {
    /// Reports that the store broke the law, and how.
    pub(crate) fn broken<T>(&self, message: impl Into<String>) -> Result<T, Violation> {
        Err(Violation { law: self.law, message: message.into() })
    }

    /// The store's capabilities.
    #[allow(clippy::unused_self, reason = "of this subject")]
    pub(crate) const fn able(&self) -> Able {
        Able::of::<Policy, H>()
    }

    /// The caller's metadata that is sent with a request.
    pub(crate) fn metadata(&self, request: &Request) -> Vec<u8> {
        if self.able().can(Capability::Metadata) { request.metadata() } else { Vec::new() }
    }

    /// Fails with this message unless the condition is true.
    pub(crate) fn ensure(&self, holds: bool, message: impl FnOnce() -> String) -> Kept {
        if holds { Ok(()) } else { self.broken(message()) }
    }

    /// Executes a request and checks the shape of the answer.
    pub(crate) async fn ask(
        &self,
        limits: &[Limit<Policy>],
        request: &Request,
    ) -> Result<Verdict, Violation> {
        self.ask_at(limits, request, Now::At(request.at)).await
    }

    /// As [`ask`](Self::ask), at another time.
    pub(crate) async fn ask_at(
        &self,
        limits: &[Limit<Policy>],
        request: &Request,
        now: Now,
    ) -> Result<Verdict, Violation> {
        match self.answer_at(limits, request, now).await? {
            Ok(verdict) => Ok(verdict),
            Err((_, error)) => self.broken(format!("{request:?} failed: {error}")),
        }
    }

    /// The store's answer to a request: a verdict of the right shape, or an error.
    pub(crate) async fn answer(
        &self,
        limits: &[Limit<Policy>],
        request: &Request,
    ) -> Result<Said, Violation> {
        self.answer_at(limits, request, Now::At(request.at)).await
    }

    /// As [`answer`](Self::answer), at another time.
    pub(crate) async fn answer_at(
        &self,
        limits: &[Limit<Policy>],
        request: &Request,
        now: Now,
    ) -> Result<Said, Violation> {
        let (checks, metadata) = (checks(limits, &request.asks), self.metadata(request));
        let batch = match request.batch(&checks, &metadata) {
            Ok(batch) => batch.now(now),
            Err(error) => return self.broken(format!("{request:?} was refused: {error}")),
        };
        let mut asked = 0;
        let verdict = loop {
            asked += 1;
            note_request();
            match self.store.apply(&batch).await {
                Ok(verdict) => break verdict,
                // Contention charges nothing, and callers ask again.
                Err(error) if error.kind() == ErrorKind::Contended && asked < CONTENDED => {}
                Err(error) => return Ok(Err((error.kind(), error.to_string()))),
            }
        };
        let count = verdict.decisions().len();
        self.ensure(count == checks.len(), || {
            format!("{request:?} has {} checks and got {count} decisions", checks.len())
        })?;
        Ok(Ok(verdict))
    }

    /// The decision that a single limit would make for a key.
    pub(crate) async fn peek(
        &self,
        limits: &[Limit<Policy>],
        ask: &Ask,
        cost: u64,
        at: Timestamp,
    ) -> Result<Decision, Violation> {
        self.one(limits, ask, Op::Peek, cost, at).await
    }

    /// Performs an operation on a single key of a single limit.
    pub(crate) async fn one(
        &self,
        limits: &[Limit<Policy>],
        ask: &Ask,
        op: Op,
        cost: u64,
        at: Timestamp,
    ) -> Result<Decision, Violation> {
        let asks = vec![Ask { cost, ..ask.clone() }];
        Ok(*self.ask(limits, &Request { at, op, asks, id: None }).await?.summary())
    }

    /// The remaining units of each of these keys, from peeks at cost 0.
    pub(crate) async fn accounts(
        &self,
        limits: &[Limit<Policy>],
        asks: &[Ask],
        at: Timestamp,
    ) -> Result<Vec<Decision>, Violation> {
        let mut accounts = Vec::new();
        for ask in asks {
            accounts.push(self.peek(limits, ask, 0, at).await?);
        }
        Ok(accounts)
    }

    /// The stored state of each of these keys, as far as the harness reports it.
    pub(crate) async fn states(
        &self,
        limits: &[Limit<Policy>],
        asks: &[Ask],
    ) -> Vec<Option<PolicyState>> {
        let mut states = Vec::new();
        if self.able().can(Capability::States) {
            for ask in asks {
                states.push(self.state(&limits[ask.limit], &ask.key).await);
            }
        }
        states
    }

    /// The stored state of a key. A state written by another algorithm counts as absent.
    pub(crate) async fn state(&self, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
        as_read(self.harness.state(self.store, limit, key).await?, limit.algorithm())
    }

    /// Executes a whole trace.
    pub(crate) async fn run(&self, trace: &Trace) -> Kept {
        for request in &trace.requests {
            let _ = self.ask(&trace.limits, request).await?;
        }
        Ok(())
    }
}

/// The part of a state that matters to this limit: nothing if another algorithm wrote it, and of a log the
/// entries that had not expired when its newest entry was made. A store may keep more, or sweep it at leisure.
pub(crate) fn as_read(state: PolicyState, policy: &Policy) -> Option<PolicyState> {
    match (policy.by_admissions(), state) {
        (Policy::SlidingLog(log), PolicyState::SlidingLog(mut state)) => {
            let newest = state.entries.last()?.timestamp;
            let counts = |us: u64| us + log.window_us() > newest.as_us();
            state.entries.retain(|entry| counts(entry.timestamp.as_us()));
            Some(PolicyState::SlidingLog(state))
        }
        (policy, state) => is_of(&state, &policy).then_some(state),
    }
}

/// Whether this algorithm wrote the state.
fn is_of(state: &PolicyState, policy: &Policy) -> bool {
    match state {
        PolicyState::Gcra(_) => AlgorithmKind::of(policy) == AlgorithmKind::Gcra,
        PolicyState::TokenBucket(_) => AlgorithmKind::of(policy) == AlgorithmKind::TokenBucket,
        PolicyState::FixedWindow(_) => AlgorithmKind::of(policy) == AlgorithmKind::FixedWindow,
        PolicyState::FirstRequestWindow(_) => {
            AlgorithmKind::of(policy) == AlgorithmKind::FirstRequestWindow
        }
        PolicyState::BucketedWindow(_) => {
            AlgorithmKind::of(policy) == AlgorithmKind::BucketedWindow
        }
        PolicyState::SlidingCounter(_) => {
            AlgorithmKind::of(policy) == AlgorithmKind::SlidingCounter
        }
        PolicyState::SlidingLog(_) => AlgorithmKind::of(policy) == AlgorithmKind::SlidingLog,
        PolicyState::WindowLog(_) => AlgorithmKind::of(policy) == AlgorithmKind::WindowLog,
        PolicyState::Concurrency(_) => AlgorithmKind::of(policy) == AlgorithmKind::Concurrency,
    }
}

/// Converts asks into the checks of a batch.
pub(crate) fn checks<'a>(limits: &'a [Limit<Policy>], asks: &'a [Ask]) -> Vec<Check<'a, Policy>> {
    asks.iter()
        .map(|ask| Check { limit: &limits[ask.limit], key: &ask.key, cost: ask.cost })
        .collect()
}

/// The time `us` microseconds later, if it can be represented.
pub(crate) fn later(at: Timestamp, us: u64) -> Option<Timestamp> {
    at.as_us().checked_add(us).and_then(Timestamp::from_us)
}

/// The units that the limit of an ask admits at once.
pub(crate) fn capacity_of(trace: &Trace, ask: &Ask) -> u64 {
    crate::trace::capacity(&trace.limits[ask.limit])
}
