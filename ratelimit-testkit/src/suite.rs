//! Runs a property on a harness: on generated cases, or on a given one.

use std::cell::RefCell;
use std::fmt;
use std::io::Write as _;

use proptest::prop_oneof;
use proptest::strategy::{BoxedStrategy, Strategy as _};
use proptest::test_runner::{
    Config, FileFailurePersistence, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};

use ratelimit_core::Policy;

use crate::capability::{Able, Capability};
use crate::harness::{Harness, StoreClock};
use crate::law::{Law, Violation};
use crate::laws::untrusted_keys::untrusted_keys;
use crate::laws::{self, Kept, Subject};
use crate::seeds::AlgorithmKind;
use crate::trace::Scope;
use crate::trace::made::{Makes, Shape};
use crate::trace::text::{Case, raw};

pub(crate) mod guard;
mod macros;

/// A property: a law, or a special case of one, as a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Property {
    /// [`laws::never_admits_more_than_its_bound`]
    NeverAdmitsMoreThanItsBound,
    /// [`laws::many_tasks_are_admitted_exactly_the_limit`]
    ManyTasksAreAdmittedExactlyTheLimit,
    /// [`laws::no_false_denial`]
    NoFalseDenial,
    /// [`laws::retry_after_is_honest`]
    RetryAfterIsHonest,
    /// [`laws::a_denial_charges_nothing`]
    ADenialChargesNothing,
    /// [`laws::every_attempt_is_charged`], for limits that count attempts.
    EveryAttemptIsCharged,
    /// [`laws::expired_is_absent`]
    ExpiredIsAbsent,
    /// [`laws::time_going_back_mints_nothing`]
    TimeGoingBackMintsNothing,
    /// [`laws::all_or_nothing`]
    AllOrNothing,
    /// [`laws::cost_zero_is_a_peek`]
    CostZeroIsAPeek,
    /// [`laws::nothing_leaks`]
    NothingLeaks,
    /// [`laws::one_answer_everywhere`]
    OneAnswerEverywhere,
    /// [`laws::one_answer_after_a_limit_was_changed`]
    OneAnswerAfterALimitWasChanged,
    /// [`laws::every_small_trace_agrees_with_the_oracle`]
    EverySmallTraceAgreesWithTheOracle,
    /// [`laws::different_keys_never_meet`]
    DifferentKeysNeverMeet,
    /// [`laws::changing_a_limit_is_safe`]
    ChangingALimitIsSafe,
    /// [`laws::two_names_one_machine`], for buckets only.
    TwoNamesOneMachine,
    /// [`laws::a_reservation_is_settled_once`], for limits whose charges can be reserved.
    AReservationIsSettledOnce,
    /// [`laws::reservations_agree`], for limits whose charges can be reserved.
    ReservationsAgree,
    /// [`laws::nothing_leaks`], for limits whose charges can be reserved.
    ReservationsLeakNothing,
    /// [`laws::similar_keys_never_meet`]
    SimilarKeysNeverMeet,
    /// [`laws::its_own_clock_keeps_time`], then [`laws::decides_by_its_own_clock`] for a settable clock or
    /// [`laws::decides_by_a_clock_that_runs`] for a running one.
    DecidesByItsOwnClock,
    /// [`laws::it_can_do_what_it_claims`]
    ItCanDoWhatItClaims,
}

impl Property {
    /// All properties.
    pub const ALL: [Self; 23] = [
        Self::NeverAdmitsMoreThanItsBound,
        Self::ManyTasksAreAdmittedExactlyTheLimit,
        Self::NoFalseDenial,
        Self::RetryAfterIsHonest,
        Self::ADenialChargesNothing,
        Self::EveryAttemptIsCharged,
        Self::ExpiredIsAbsent,
        Self::TimeGoingBackMintsNothing,
        Self::AllOrNothing,
        Self::CostZeroIsAPeek,
        Self::NothingLeaks,
        Self::OneAnswerEverywhere,
        Self::OneAnswerAfterALimitWasChanged,
        Self::EverySmallTraceAgreesWithTheOracle,
        Self::DifferentKeysNeverMeet,
        Self::ChangingALimitIsSafe,
        Self::TwoNamesOneMachine,
        Self::AReservationIsSettledOnce,
        Self::ReservationsAgree,
        Self::ReservationsLeakNothing,
        Self::SimilarKeysNeverMeet,
        Self::DecidesByItsOwnClock,
        Self::ItCanDoWhatItClaims,
    ];

    /// The law that the property tries.
    #[must_use]
    pub const fn law(self) -> Law {
        match self {
            Self::NeverAdmitsMoreThanItsBound | Self::ManyTasksAreAdmittedExactlyTheLimit => {
                Law::Safety
            }
            Self::NoFalseDenial => Law::NoFalseDenial,
            Self::RetryAfterIsHonest => Law::HonestRetry,
            Self::ADenialChargesNothing | Self::EveryAttemptIsCharged => Law::DenialChargesNothing,
            Self::ExpiredIsAbsent => Law::ExpiredIsAbsent,
            Self::TimeGoingBackMintsNothing => Law::TimeGoingBack,
            Self::AllOrNothing => Law::AllOrNothing,
            Self::CostZeroIsAPeek => Law::CostZeroIsAPeek,
            Self::NothingLeaks | Self::ReservationsLeakNothing => Law::NothingLeaks,
            Self::OneAnswerEverywhere
            | Self::OneAnswerAfterALimitWasChanged
            | Self::EverySmallTraceAgreesWithTheOracle
            | Self::DifferentKeysNeverMeet
            | Self::SimilarKeysNeverMeet
            | Self::ItCanDoWhatItClaims
            | Self::ReservationsAgree => Law::OneAnswerEverywhere,
            Self::ChangingALimitIsSafe => Law::ChangingALimit,
            Self::TwoNamesOneMachine => Law::TwoNamesOneMachine,
            Self::AReservationIsSettledOnce => Law::SettledOnce,
            Self::DecidesByItsOwnClock => Law::OwnClock,
        }
    }

    /// The capabilities without which the property cannot be tried on limits of this scope.
    fn needs(self, scope: Scope) -> Vec<Capability> {
        let mut needs = match scope {
            // Refusals are tried whatever the store lacks.
            _ if self == Self::ItCanDoWhatItClaims => return Vec::new(),
            Scope::One(kind) => vec![Capability::Algorithm(kind)],
            Scope::Attempts(kind) => vec![Capability::Attempts, Capability::Algorithm(kind)],
            Scope::Mixed => vec![Capability::Batches],
            Scope::MixedAttempts => vec![Capability::Attempts, Capability::Batches],
        };
        needs.extend(match self {
            Self::EveryAttemptIsCharged => Some(Capability::Attempts),
            Self::TimeGoingBackMintsNothing => Some(Capability::PastTimes),
            Self::AllOrNothing => Some(Capability::Batches),
            Self::OneAnswerAfterALimitWasChanged => Some(Capability::States),
            Self::AReservationIsSettledOnce
            | Self::ReservationsAgree
            | Self::ReservationsLeakNothing => Some(Capability::Reservations),
            _ => None,
        });
        if self == Self::TwoNamesOneMachine {
            needs.extend(
                [AlgorithmKind::Gcra, AlgorithmKind::TokenBucket].map(Capability::Algorithm),
            );
        }
        needs
    }

    /// Whether the property applies to limits of this scope.
    #[must_use]
    pub fn applies(self, scope: Scope) -> bool {
        let (one, kind) = match scope {
            Scope::One(kind) | Scope::Attempts(kind) => (true, Some(kind)),
            Scope::Mixed | Scope::MixedAttempts => (false, None),
        };
        match self {
            Self::TwoNamesOneMachine => kind.is_some_and(AlgorithmKind::is_bucket),
            Self::EverySmallTraceAgreesWithTheOracle => one,
            Self::ADenialChargesNothing | Self::AllOrNothing => {
                matches!(scope, Scope::One(_) | Scope::Mixed)
            }
            Self::EveryAttemptIsCharged => !matches!(scope, Scope::One(_)),
            // Once per way to keep a state; limits that count attempts only where a store keeps no others.
            Self::SimilarKeysNeverMeet => matches!(scope, Scope::One(_)),
            Self::AReservationIsSettledOnce
            | Self::ReservationsAgree
            | Self::ReservationsLeakNothing => match scope {
                Scope::One(kind) => AlgorithmKind::RESERVATIONS.contains(&kind),
                scope => scope == Scope::Mixed,
            },
            _ => true,
        }
    }
}

/// A property that a store breaks: how, and on which case.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The broken law, and how it was broken.
    pub violation: Violation,
    /// The smallest failing case, in text that [`regression`] reads; empty if the property has no input.
    pub case: String,
    property: Property,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.violation)?;
        if self.case.is_empty() {
            return Ok(());
        }
        write!(
            f,
            "\n\non the case\n{}\nTo keep it as a test, with your harness:\n\n\
             ratelimit_testkit::regression::<Harness>(Property::{:?}, {});\n",
            self.case,
            self.property,
            raw(&self.case)
        )
    }
}

/// The most attempts to shrink a failing case, and the most time: enough, and bounded on a slow server.
pub(crate) const MAX_SHRINK_ITERS: u32 = 4_096;
pub(crate) const MAX_SHRINK_MS: u32 = 20_000;

/// A harness with fewer cases has a slow store and gets shorter traces at the store's own time.
const MANY_CASES: u32 = 64;

/// The body of a test of this name: creates a harness and panics if the property does not hold for it. If the
/// store lacks what the property needs, the function reports on standard error that the test is skipped, and
/// why.
///
/// The seeds of failing cases are kept in the file `regressions` and tried first from then on. The harness, or
/// `PROPTEST_CASES` in the environment, sets the number of new cases.
///
/// # Panics
/// If the property does not hold, if the store does not answer a request within a minute, or if the test takes ten. Once
/// one test has ended so, the others of the process end after two seconds without an answer.
pub fn test<H: Harness + 'static>(
    property: Property,
    scope: Scope,
    name: &'static str,
    regressions: &'static str,
) {
    let able = Able::of::<Policy, H>();
    // The test runner names a test without its crate.
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    if let Some(lacking) = able.lacks(property.needs(scope)) {
        announce(&format!("{name} is skipped: the store lacks {lacking}"));
        return;
    }
    if property == Property::ItCanDoWhatItClaims && !able.lacking().is_empty() {
        let lacking: Vec<_> = able.lacking().iter().map(ToString::to_string).collect();
        let lacking = lacking.join(", ");
        announce(&format!("{name}: the store lacks {lacking}, and no law here asks for it"));
    }
    let persistence = FileFailurePersistence::Direct(regressions);
    let more = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let config = Config {
        cases: more.unwrap_or(H::CASES),
        failure_persistence: Some(Box::new(persistence)),
        max_shrink_iters: MAX_SHRINK_ITERS,
        max_shrink_time: MAX_SHRINK_MS,
        ..Config::default()
    };
    guard::run(move || {
        if let Err(failure) = try_property(&H::new(), property, scope, TestRunner::new(config)) {
            panic!("{failure}\n(kept in {regressions})");
        }
    });
}

/// Prints a line that the test runner does not capture, as it does the output of a passing test.
pub(crate) fn announce(message: &str) {
    // A single write keeps the lines of concurrent tests whole. A failure cannot be reported anywhere.
    let _ = std::io::stderr().write_all(format!("{message}\n").as_bytes());
}

/// The body of a regression test made from a [`Failure`]: tries a property on a case given as text.
///
/// The text has the form that a failure shows: one line per limit, in the words of its policy, and one line per
/// request or per key. For a property that is tried on two traces, a line `then` separates them.
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::{Limit, Policy, PolicyState};
/// # use ratelimit_testkit::{Harness, PureStore};
/// use ratelimit_testkit::{Property, regression};
/// # struct Mine;
/// # impl Harness for Mine {
/// #     type Store = PureStore;
/// #     fn new() -> Self { Mine }
/// #     fn store(&self) -> PureStore { PureStore::new() }
/// #     async fn state(&self, store: &PureStore, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
/// #         store.state(limit, key)
/// #     }
/// #     async fn leaks(&self, _: &PureStore, _within: Duration) -> Vec<String> { vec![] }
/// # }
/// regression::<Mine>(Property::RetryAfterIsHonest, r#"
///     limit l0: gcra 10/s burst 20
///     limit l1: fixed-window 2/m count attempts
///     at 1795218392123456 acquire 3 of "a" in l0, 1 of "a" in l1
///     at 1795218392123457 acquire 20 of "a" in l0
/// "#);
/// ```
///
/// # Panics
/// If the property does not hold for the case, or if the text is not a case of the property.
pub fn regression<H: Harness>(property: Property, case: &str) {
    let trial = Trial { harness: &H::new(), property, cases: Cases::Given(case) };
    // The scope only matters for generated cases, of which there are none.
    if let Err(failure) = trial.run(Scope::Mixed) {
        panic!("{failure}");
    }
}

/// Tries a property on the same `cases` cases every time.
///
/// # Errors
/// The case on which the property does not hold.
pub fn try_same<H: Harness>(
    harness: &H,
    property: Property,
    scope: Scope,
    cases: u32,
) -> Result<(), Failure> {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    try_property(harness, property, scope, TestRunner::new_with_rng(config, rng))
}

/// Tries a property on cases that the runner generates.
///
/// # Errors
/// The smallest case found on which the property does not hold.
pub fn try_property<H: Harness>(
    harness: &H,
    property: Property,
    scope: Scope,
    runner: TestRunner,
) -> Result<(), Failure> {
    Trial { harness, property, cases: Cases::Drawn(Box::new(runner)) }.run(scope)
}

/// The pairs of limits for which tasks compete.
fn pairs(scope: Scope, able: Able) -> Vec<[Scope; 2]> {
    match scope {
        Scope::One(_) | Scope::Attempts(_) => vec![[scope, scope]],
        Scope::Mixed | Scope::MixedAttempts => {
            let admissions = |single: &Scope| matches!(single, Scope::One(_));
            let can_keep = |single: &Scope| single.seeds().iter().all(|seed| able.can_keep(seed));
            let singles = scope.singles().into_iter().filter(can_keep);
            let (admissions, attempts): (Vec<_>, Vec<_>) = singles.partition(admissions);
            // One attempt-counting limit beside those that count admissions; all of them where there are none.
            let most = if admissions.is_empty() { attempts.len() } else { 1 };
            let all: Vec<_> =
                admissions.into_iter().chain(attempts.into_iter().take(most)).collect();
            all.windows(2).map(|pair| [pair[0], pair[1]]).collect()
        }
    }
}

/// The cases on which a property is tried.
enum Cases<'c> {
    /// Cases that the runner generates.
    Drawn(Box<TestRunner>),
    /// A case given as text.
    Given(&'c str),
}

struct Trial<'h, H> {
    harness: &'h H,
    property: Property,
    cases: Cases<'h>,
}

impl<H: Harness> Trial<'_, H> {
    fn run(self, scope: Scope) -> Result<(), Failure> {
        let able = Able::of::<Policy, H>();
        if let (Some(_), Cases::Drawn(_)) = (able.lacks(self.property.needs(scope)), &self.cases) {
            return Ok(());
        }
        let makes = Makes { scope, able };
        match self.property {
            Property::NeverAdmitsMoreThanItsBound => self
                .on(|| makes.traces(Shape::CHARGES_ONLY), laws::never_admits_more_than_its_bound),
            Property::NoFalseDenial => {
                self.on(|| makes.traces(Shape::CHARGES_ONLY), laws::no_false_denial)
            }
            Property::RetryAfterIsHonest => {
                self.on(|| makes.traces(Shape::ANY), laws::retry_after_is_honest)
            }
            Property::ADenialChargesNothing => {
                self.on(|| makes.traces(Shape::ANY), laws::a_denial_charges_nothing)
            }
            Property::EveryAttemptIsCharged => {
                self.on(|| makes.attempts(Shape::ANY), laws::every_attempt_is_charged)
            }
            Property::ExpiredIsAbsent => {
                self.on(|| makes.twice(Shape::FORWARD), laws::expired_is_absent)
            }
            Property::TimeGoingBackMintsNothing => {
                self.on(|| makes.traces(Shape::SHORT), laws::time_going_back_mints_nothing)
            }
            Property::AllOrNothing => self.on(|| makes.traces(Shape::ANY), laws::all_or_nothing),
            Property::CostZeroIsAPeek => {
                self.on(|| makes.traces(Shape::ANY), laws::cost_zero_is_a_peek)
            }
            Property::NothingLeaks => self.on(|| makes.traces(Shape::FORWARD), laws::nothing_leaks),
            Property::OneAnswerEverywhere => {
                self.on(|| makes.traces(Shape::TO_THE_END), laws::one_answer_everywhere)
            }
            Property::OneAnswerAfterALimitWasChanged => {
                self.on(|| makes.changes(), laws::one_answer_after_a_limit_was_changed)
            }
            Property::DifferentKeysNeverMeet => {
                self.on(|| untrusted_keys(makes.one_limit()), laws::different_keys_never_meet)
            }
            Property::ChangingALimitIsSafe => {
                self.on(|| makes.changes(), laws::changing_a_limit_is_safe)
            }
            Property::AReservationIsSettledOnce => {
                self.on(|| makes.reservations(Shape::ANY), laws::a_reservation_is_settled_once)
            }
            Property::ReservationsAgree => {
                self.on(|| makes.reservations(Shape::ANY), laws::reservations_agree)
            }
            Property::ReservationsLeakNothing => {
                self.on(|| makes.reservations(Shape::FORWARD), laws::nothing_leaks)
            }
            Property::TwoNamesOneMachine => {
                self.on(|| makes.traces(Shape::ANY), laws::two_names_one_machine)
            }
            Property::DecidesByItsOwnClock => {
                self.awaited(async |subject| laws::its_own_clock_keeps_time(subject, scope).await)?;
                let requests = if H::CASES < MANY_CASES { 30 } else { 100 };
                if let StoreClock::Real = self.harness.clock(&self.harness.store()) {
                    return self.on(|| makes.slow(requests), laws::decides_by_a_clock_that_runs);
                }
                let traces = || makes.traces(Shape { requests, ..Shape::FORWARD });
                let reservations = Property::ReservationsAgree;
                if reservations.applies(scope) && able.can(Capability::Reservations) {
                    let both = || prop_oneof![makes.reservations(Shape::FORWARD), traces()].boxed();
                    self.on(both, laws::decides_by_its_own_clock)
                } else {
                    self.on(traces, laws::decides_by_its_own_clock)
                }
            }
            Property::SimilarKeysNeverMeet => {
                self.awaited(async |subject| laws::similar_keys_never_meet(subject, scope).await)
            }
            Property::ItCanDoWhatItClaims => {
                self.awaited(async |subject| laws::it_can_do_what_it_claims(subject, scope).await)
            }
            Property::ManyTasksAreAdmittedExactlyTheLimit => {
                pairs(scope, able).into_iter().try_for_each(|pair| {
                    self.once(|subject| {
                        laws::many_tasks_are_admitted_exactly_the_limit(subject, pair)
                    })
                })
            }
            Property::EverySmallTraceAgreesWithTheOracle => self.awaited(async |subject| {
                laws::every_small_trace_agrees_with_the_oracle(subject, scope).await
            }),
        }
    }

    fn failure(&self, violation: Violation, case: String) -> Failure {
        Failure { violation, case, property: self.property }
    }

    /// The violation of the law with this description.
    fn broken(&self, message: impl fmt::Display) -> Violation {
        Violation { law: self.property.law(), message: message.to_string() }
    }

    /// Tries a law on cases, each in a fresh store.
    #[allow(clippy::needless_pass_by_value, reason = "a law is a function")]
    fn on<C: Case>(
        mut self,
        made: impl FnOnce() -> BoxedStrategy<C>,
        law: impl AsyncFn(&Subject<'_, H>, &C) -> Kept,
    ) -> Result<(), Failure> {
        let (harness, name) = (self.harness, self.property.law());
        let tried = |case: &C| {
            let store = harness.store();
            let subject = Subject { law: name, harness, store: &store };
            harness.block_on(law(&subject, case))
        };
        let runner = match &mut self.cases {
            Cases::Drawn(runner) => runner,
            Cases::Given(text) => {
                let case = C::read(text)
                    .map_err(|error| self.failure(self.broken(error), String::new()))?;
                return tried(&case).map_err(|violation| self.failure(violation, case.text()));
            }
        };
        // While proptest shrinks, the last failure stored is that of the smallest case.
        let last_seen: RefCell<Option<Violation>> = RefCell::default();
        let outcome = runner.run(&made(), |case| {
            tried(&case).map_err(|violation| {
                let reason = violation.to_string();
                last_seen.replace(Some(violation));
                TestCaseError::fail(reason)
            })
        });
        match outcome {
            Ok(()) => Ok(()),
            Err(TestError::Abort(reason)) => Err(self.failure(self.broken(reason), String::new())),
            Err(TestError::Fail(reason, case)) => {
                let last =
                    last_seen.into_inner().filter(|last| last.to_string() == reason.message());
                let violation = last.unwrap_or_else(|| self.broken(&reason));
                Err(self.failure(violation, case.text()))
            }
        }
    }

    /// Tries a law that has no generated input.
    fn once(&self, law: impl FnOnce(&Subject<'_, H>) -> Kept) -> Result<(), Failure> {
        let store = self.harness.store();
        let subject = Subject { law: self.property.law(), harness: self.harness, store: &store };
        law(&subject).map_err(|violation| self.failure(violation, String::new()))
    }

    /// As `once`, for an async law.
    fn awaited(&self, law: impl AsyncFnOnce(&Subject<'_, H>) -> Kept) -> Result<(), Failure> {
        self.once(|subject| self.harness.block_on(law(subject)))
    }
}
