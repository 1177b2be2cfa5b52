//! Runs a property on a harness: on generated cases, or on a given one.

use std::io::Write as _;

use proptest::strategy::BoxedStrategy;
use proptest::test_runner::{
    Config, FileFailurePersistence, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};
use ratelimit_core::{Algorithm, AnyAlgorithm};

use crate::algorithm::AlgorithmHarness;
use crate::capability::{Able, Capability};
use crate::harness::{AnyHarness, Harness, StoreClock};
use crate::law::{Failure, Law, LawResult};
use crate::laws::agreement::agrees;
use crate::laws::capabilities::it_can_do_what_it_claims;
use crate::laws::changes::{
    a_changed_limit_is_safe, pairs_in_turn, two_limits_in_turn_admit_their_sum,
};
use crate::laws::concurrency::{
    dropped_futures_stop_no_other, limits_of, many_tasks_are_admitted_at_the_stores_own_time,
    many_tasks_are_admitted_exactly_the_limit, many_tasks_are_answered_in_some_order,
    with_own_numbers,
};
use crate::laws::identifiers::two_identifiers_never_meet;
use crate::laws::kept::{nothing_leaks, nothing_vanishes};
use crate::laws::own_clock::{
    SHORT_US, decides_by_a_clock_that_runs, decides_by_its_own_clock, its_own_clock_keeps_time,
};
use crate::laws::small::every_small_trace_agrees;
use crate::laws::{Difference, Subject, difference};
use crate::seeds::{Scope, rate};
use crate::trace::Trace;
use crate::trace::made::{Instance, Pool, TraceShape, limit};

pub(crate) mod guard;
mod macros;

/// A property of a store. What an algorithm keeps by itself, such as that a wait is honest, follows
/// for a store that agrees with its pure step, and is a property of the
/// [algorithm](crate::AlgorithmProperty).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Property {
    /// Law 10: every answer and every state is that of the pure step, errors with their messages,
    /// over traces of all operations: generated ones, with times at the promised wait and around
    /// it, and all small ones. A request with an id is sent twice.
    Agrees,
    /// Law 11: the same while limits change, and while each request has numbers of its own, one
    /// beside the other; and two limits of one name in turn admit their sum at most.
    AgreesAfterAChange,
    /// Law 1: many tasks at once are admitted exactly the limit, at a given time and at the store's
    /// own. Of tasks that use all operations, some order explains every answer, also where requests
    /// have other numbers of one limit. A future that is
    /// dropped at its first await charges once or not at all, and stops no later request.
    ManyTasksAreAdmittedExactlyTheLimit,
    /// Law 9: what is kept lasts as long as it matters by the store's clock, and no longer.
    KeepsWhatMatters,
    /// Law 14: at its own time the store decides as the pure step does at that time, and its clock
    /// keeps time.
    DecidesByItsOwnClock,
    /// Law 10: two identifiers never share a state, however little they differ.
    IdentifiersNeverMeet,
    /// Law 10: the store supports what its harness does not list as lacking, and refuses the rest.
    ItCanDoWhatItClaims,
}

impl Property {
    /// All properties.
    pub const ALL: [Self; 7] = [
        Self::Agrees,
        Self::AgreesAfterAChange,
        Self::ManyTasksAreAdmittedExactlyTheLimit,
        Self::KeepsWhatMatters,
        Self::DecidesByItsOwnClock,
        Self::IdentifiersNeverMeet,
        Self::ItCanDoWhatItClaims,
    ];

    /// The law that the property tries.
    #[must_use]
    pub const fn law(self) -> Law {
        match self {
            Self::Agrees | Self::IdentifiersNeverMeet | Self::ItCanDoWhatItClaims => {
                Law::OneAnswerEverywhere
            }
            Self::AgreesAfterAChange => Law::ChangingALimit,
            Self::ManyTasksAreAdmittedExactlyTheLimit => Law::Safety,
            Self::KeepsWhatMatters => Law::NothingLeaks,
            Self::DecidesByItsOwnClock => Law::OwnClock,
        }
    }

    /// The first capability without which the store cannot be tried on limits of this scope.
    fn lacks(self, scope: Scope, able: Able) -> Option<Capability> {
        able.lacks(match scope {
            // Refusals are tried whatever the store lacks.
            _ if self == Self::ItCanDoWhatItClaims => Vec::new(),
            Scope::One(kind) => vec![Capability::Algorithm(kind), Capability::Admissions],
            Scope::Attempts(kind) => vec![Capability::Algorithm(kind), Capability::Attempts],
            Scope::Mixed => vec![Capability::Batches],
            Scope::Reservations => vec![Capability::Reservations, Capability::Batches],
        })
    }
}

/// The most attempts to shrink a failing case, and the most time: enough, and bounded on a slow
/// server.
const MAX_SHRINK_ITERS: u32 = 4_096;
const MAX_SHRINK_MS: u32 = 20_000;

/// A harness with fewer cases has a slow store and gets shorter traces at the store's own time.
const MANY_CASES: u32 = 64;

/// How many cases are tried: so many, unless the environment asks for others.
pub(crate) fn cases(cases: u32) -> u32 {
    let more = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    more.unwrap_or(cases)
}

/// The configuration of a test that persists its failing cases under this path.
pub(crate) fn config(cases: u32, regressions: &'static str) -> Config {
    Config {
        cases: self::cases(cases),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(regressions))),
        max_shrink_iters: MAX_SHRINK_ITERS,
        max_shrink_time: MAX_SHRINK_MS,
        ..Config::default()
    }
}

/// A runner that draws the same cases every time.
pub(crate) fn same(cases: u32) -> TestRunner {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

/// Prints a line about the test of this name that the test runner does not capture, as it does the
/// output of a passing test.
pub(crate) fn announce(name: &str, message: &str) {
    // The test runner names a test without its crate.
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    // A single write keeps the lines of concurrent tests whole. A failure cannot be reported
    // anywhere.
    let _ = std::io::stderr().write_all(format!("{name}{message}\n").as_bytes());
}

/// Prints what the store of this test lacks, if anything.
pub(crate) fn announce_lacking(name: &str, able: Able) {
    let lacking = able.lacking();
    if !lacking.is_empty() {
        announce(name, &format!(": the store lacks {lacking:?}, and no law here asks for it"));
    }
}

/// The body of a test of this name: creates a harness and panics if one of the properties does not
/// hold for it on limits of one of the scopes. If the store lacks what all of them need, the
/// function reports on standard error that the test is skipped, and why.
///
/// The seeds of failing cases are kept in the file `regressions` and tried first from then on. The
/// harness, or `PROPTEST_CASES` in the environment, sets the number of new cases.
///
/// # Panics
/// If a property does not hold, if the store does not answer a request within a minute, or if the
/// test takes ten. Once one test has ended so, the others of the process end after two seconds
/// without an answer.
pub fn test<H: Harness + 'static>(
    properties: &'static [Property],
    scopes: &[Scope],
    name: &'static str,
    regressions: &'static str,
) {
    let able = Able::for_store::<AnyAlgorithm, H>();
    let all = scopes.iter().flat_map(|scope| properties.iter().map(|property| (*property, *scope)));
    let lacking = |(property, scope): &(Property, Scope)| property.lacks(*scope, able);
    let (tried, skipped): (Vec<_>, Vec<_>) = all.partition(|each| lacking(each).is_none());
    if let (true, Some(lacking)) = (tried.is_empty(), skipped.iter().find_map(lacking)) {
        announce(name, &format!(" is skipped: the store lacks {lacking:?}"));
        return;
    }
    if properties.contains(&Property::ItCanDoWhatItClaims) {
        announce_lacking(name, able);
    }
    // Several algorithms share the cases, of which each gets some.
    let shared_by = if scopes.len() > 2 { scopes.len() } else { 1 };
    let cases = H::CASES.div_ceil(u32::try_from(shared_by).unwrap_or(1)).max(H::CASES.min(4));
    guard::run(move || {
        for (property, scope) in tried {
            let cases = Cases::Drawn(TestRunner::new(config(cases, regressions)).into());
            if let Err(failure) = try_on_any_algorithm(&H::new(), property, scope, cases) {
                panic!("{scope:?}: {failure}\n(kept in {regressions})");
            }
        }
    });
}

/// The body of a regression test made from a [`Failure`]: tries a property on a case given as text.
///
/// The text has the form that a failure shows: one line per limit, in the words of its policy, and
/// one line per request. A limit that is named again is changed from there on.
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::{Limit, AnyAlgorithm};
/// # use ratelimit_core::algorithm::AnyState;
/// # use ratelimit_testkit::{Harness, PureStore};
/// use ratelimit_testkit::{Property, regression};
/// # struct Mine;
/// # impl Harness for Mine {
/// #     type Store = PureStore;
/// #     fn new() -> Self { Mine }
/// #     fn store(&self) -> PureStore { PureStore::new() }
/// #     async fn state(&self, store: &PureStore, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
/// #         store.state(limit, key)
/// #     }
/// #     async fn leaks(&self, _: &PureStore, _within: Duration) -> Vec<String> { vec![] }
/// # }
/// regression::<Mine>(Property::Agrees, r#"
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
    // The scope only matters for generated cases, of which there are none.
    if let Err(failure) =
        try_on_any_algorithm(&H::new(), property, Scope::Mixed, Cases::Given(case))
    {
        panic!("{failure}");
    }
}

/// Tries a property on the same `cases` cases every time, if the store has what it needs.
///
/// # Errors
/// The case on which the property does not hold.
pub fn try_same<H: Harness>(
    harness: &H,
    property: Property,
    scope: Scope,
    cases: u32,
) -> Result<(), Failure> {
    if property.lacks(scope, harness.able()).is_some() {
        return Ok(());
    }
    try_on_any_algorithm(harness, property, scope, Cases::Drawn(same(cases).into()))
}

/// Tries a property of a store of instances. Not generic: compiled once, in this crate.
fn try_on_any_algorithm(
    harness: &dyn AnyHarness<AnyAlgorithm>,
    property: Property,
    scope: Scope,
    cases: Cases<'_>,
) -> CaseResult {
    let pool = scope.pool(harness.able());
    let named = Box::new(|text: &str| text.parse().map_err(|error| format!("{error}")));
    LawTrial { harness, property, pool, difference: Some(difference), named }
        .run_on_any_algorithm(scope, cases)
}

/// Tries a property of a store that keeps limits of any algorithm, on cases that the runner
/// generates.
pub(crate) fn try_on<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    property: Property,
    runner: TestRunner,
) -> CaseResult {
    let pool = T::pool(Able::for_store::<T::Algorithm, H>());
    let named = Box::new(crate::algorithm::find_limit::<T>);
    LawTrial { harness, property, pool, difference: None, named }.run(Cases::Drawn(runner.into()))
}

/// Tries a law on traces that the runner draws. Not generic in the law: the runner is large.
///
/// # Errors
/// What the law says of the smallest trace on which it fails, and the text of that trace.
pub(crate) fn try_drawn<A: Algorithm + 'static>(
    mut runner: TestRunner,
    traces: &BoxedStrategy<Trace<A>>,
    law: &dyn Fn(&Trace<A>) -> LawResult,
) -> Result<(), (String, String)> {
    match runner.run(traces, |trace| law(&trace).map_err(TestCaseError::fail)) {
        Ok(()) => Ok(()),
        Err(TestError::Abort(reason)) => Err((reason.to_string(), String::new())),
        Err(TestError::Fail(reason, trace)) => Err((reason.to_string(), trace.to_string())),
    }
}

/// The pairs of scopes for whose limits tasks compete.
fn pairs(scope: Scope, able: Able) -> Vec<[Scope; 2]> {
    if scope.is_single() {
        return vec![[scope, scope]];
    }
    let singles = Scope::singles().into_iter();
    let singles = singles.filter(|single| Property::Agrees.lacks(*single, able).is_none());
    let (attempts, admissions): (Vec<_>, Vec<_>) =
        singles.partition(|single| matches!(single, Scope::Attempts(_)));
    // One attempt-counting limit beside those that count admissions; all of them where there are
    // none.
    let most = if admissions.is_empty() { attempts.len() } else { 1 };
    let all: Vec<_> = admissions.into_iter().chain(attempts.into_iter().take(most)).collect();
    all.windows(2).map(|pair| [pair[0], pair[1]]).collect()
}

/// The cases on which a property is tried.
enum Cases<'c> {
    /// Cases that the runner generates.
    Drawn(Box<TestRunner>),
    /// A case given as text.
    Given(&'c str),
}

type CaseResult = Result<(), Failure>;

/// Reads a limit.
type ReadLimit<A> = Box<dyn Fn(&str) -> Result<Instance<A>, String>>;

struct LawTrial<'h, A: Algorithm> {
    harness: &'h dyn AnyHarness<A>,
    property: Property,
    pool: Pool<A>,
    difference: Option<Difference<A>>,
    named: ReadLimit<A>,
}

impl LawTrial<'_, AnyAlgorithm> {
    /// The properties of a store of instances, on the limits that suit each.
    fn run_on_any_algorithm(mut self, scope: Scope, cases: Cases<'_>) -> CaseResult {
        let (able, drawn) = (self.pool.able, matches!(cases, Cases::Drawn(_)));
        if drawn && self.property == Property::AgreesAfterAChange {
            for pair in pairs_in_turn(scope, able) {
                self.once_async(async |subject| {
                    two_limits_in_turn_admit_their_sum(subject, pair).await
                })?;
            }
        }
        let is_real = || matches!(self.harness.open().clock(), StoreClock::Real);
        match self.property {
            Property::Agrees if drawn && scope.is_single() => {
                let full = self.harness.small_trace_requests();
                self.once_async(async |subject| {
                    every_small_trace_agrees(subject, scope, full).await
                })?;
                self.run(cases)
            }
            Property::Agrees if drawn => {
                self.on_each(&scope.seldom(able), agrees)?;
                self.run(cases)
            }
            Property::AgreesAfterAChange if !able.can(Capability::Changes) => {
                self.pool = self.pool.with_changed_limit();
                self.on(cases, TraceShape::FORWARD, a_changed_limit_is_safe)
            }
            Property::ManyTasksAreAdmittedExactlyTheLimit => {
                let together = able.can(Capability::Batches);
                pairs(scope, able).into_iter().try_for_each(|pair| {
                    self.once(|subject| {
                        let limits = limits_of(pair, "given", [41, 53], 1_000_000);
                        many_tasks_are_admitted_exactly_the_limit(subject, &limits, together)?;
                        dropped_futures_stop_no_other(subject, &limits)
                    })?;
                    self.once(|subject| {
                        many_tasks_are_admitted_at_the_stores_own_time(subject, pair)
                    })?;
                    if !able.can(Capability::TimesInOrder) {
                        return Ok(());
                    }
                    let few = limits_of(pair, "few", [5, 7], 1_000_000);
                    let races = (self.harness.cases() / 2).clamp(4, 24);
                    self.once(|subject| {
                        many_tasks_are_answered_in_some_order(subject, &few, races)
                    })?;
                    if !able.can(Capability::Changes) {
                        return Ok(());
                    }
                    let own = with_own_numbers(pair[0], [3, 7], 1_000_000);
                    self.once(|subject| {
                        many_tasks_are_answered_in_some_order(subject, &own, races / 2)
                    })
                })
            }
            Property::DecidesByItsOwnClock if drawn => {
                let at = |us: u64| -> Vec<_> {
                    let instances = scope.at_rate(rate(3, us), 3).into_iter().enumerate();
                    let kept = instances.filter(|(_, instance)| able.can_keep(instance));
                    kept.map(|(n, instance)| limit(&format!("{us}-{n}"), instance)).collect()
                };
                let (long, short) = (at(3_600_000_000), at(SHORT_US));
                self.once_async(async |subject| {
                    its_own_clock_keeps_time(subject, &long, &short).await
                })?;
                if !is_real() {
                    if !scope.is_single() {
                        self.on_each(&scope.seldom(able), decides_by_its_own_clock)?;
                    }
                    return self.run(cases);
                }
                self.pool = scope.slow(able);
                let requests = if self.harness.cases() < MANY_CASES { 30 } else { 100 };
                let shape = TraceShape { slow: true, requests, ..TraceShape::FORWARD };
                self.on(cases, shape, decides_by_a_clock_that_runs)
            }
            Property::DecidesByItsOwnClock if is_real() => {
                self.on(cases, TraceShape::FORWARD, decides_by_a_clock_that_runs)
            }
            Property::KeepsWhatMatters if drawn && scope.is_single() => {
                for (us, reserves) in [(3_600_000_000, false), (SHORT_US, true)] {
                    let instance = &scope.at_rate(rate(3, us), 3)[0];
                    let reserves = reserves && able.can(Capability::Reservations);
                    self.once_async(async |subject| {
                        nothing_vanishes(subject, instance.clone(), reserves).await
                    })?;
                }
                self.run(cases)
            }
            Property::IdentifiersNeverMeet => {
                let instances = scope.at_rate(rate(2, 3_600_000_000), 2);
                let instance = instances.into_iter().find(|instance| able.can_keep(instance));
                let instance =
                    instance.expect("a scope of which the store can keep nothing is not tried");
                self.once_async(async |subject| two_identifiers_never_meet(subject, instance).await)
            }
            Property::ItCanDoWhatItClaims => {
                self.once_async(async |subject| it_can_do_what_it_claims(subject, scope).await)
            }
            _ => self.run(cases),
        }
    }
}

impl<A: Algorithm + 'static> LawTrial<'_, A> {
    /// The properties of a store of any algorithm's limits.
    fn run(mut self, cases: Cases<'_>) -> CaseResult {
        match self.property {
            Property::Agrees => self.on(cases, TraceShape::ANY, agrees),
            Property::AgreesAfterAChange => {
                // So many instances there are that chance finds such changes.
                if self.difference.is_none() {
                    self.on_each(&self.pool.full_ones_changed(), agrees)?;
                }
                self.pool = self.pool.with_changed_limit();
                self.on(cases, TraceShape::ANY, agrees)
            }
            Property::KeepsWhatMatters => {
                for instance in (self.pool.make)().into_iter().filter(|_| self.difference.is_none())
                {
                    self.once_async(async |subject| {
                        nothing_vanishes(subject, instance, false).await
                    })?;
                }
                let shape = TraceShape { requests: 20, ..TraceShape::FORWARD };
                self.on(cases, shape, nothing_leaks)
            }
            Property::DecidesByItsOwnClock => {
                if self.difference.is_none() {
                    for instance in (self.pool.make)() {
                        let limits = [limit("kept", instance)];
                        self.once_async(async |subject| {
                            its_own_clock_keeps_time(subject, &limits, &[]).await
                        })?;
                    }
                }
                let requests = if self.harness.cases() < MANY_CASES { 30 } else { 100 };
                let shape = TraceShape { requests, ..TraceShape::FORWARD };
                self.on(cases, shape, decides_by_its_own_clock)
            }
            Property::ManyTasksAreAdmittedExactlyTheLimit => {
                let instances = (self.pool.make)().into_iter().zip((self.pool.make)());
                for (one, other) in instances {
                    let limits = [limit("first", one), limit("second", other)];
                    self.once(|subject| {
                        many_tasks_are_admitted_exactly_the_limit(subject, &limits, false)
                    })?;
                }
                Ok(())
            }
            Property::IdentifiersNeverMeet | Property::ItCanDoWhatItClaims => Ok(()),
        }
    }

    fn failure(&self, message: String, case: String) -> Failure {
        let again = format!("regression::<MyHarness>(Property::{:?}", self.property);
        Failure { law: self.property.law(), message, case, again }
    }

    /// Tries a law on cases, each in a fresh store: on given ones, or on drawn ones of this shape.
    fn on(
        &self,
        cases: Cases<'_>,
        shape: TraceShape,
        law: impl AsyncFn(&Subject<'_, A>, &Trace<A>) -> LawResult,
    ) -> CaseResult {
        let outcome = match cases {
            Cases::Drawn(runner) => try_drawn(*runner, &self.pool.traces(shape), &|trace| {
                self.in_a_store(|subject| subject.block_on(law(subject, trace)))
            }),
            Cases::Given(text) => match Trace::read(text, &self.named) {
                Ok(trace) => return self.on_each(&[trace], law),
                Err(message) => Err((message, String::new())),
            },
        };
        outcome.map_err(|(message, case)| self.failure(message, case))
    }

    /// Tries a law on each of these traces, in a fresh store.
    #[allow(clippy::needless_pass_by_value, reason = "a law is a function by name")]
    fn on_each(
        &self,
        traces: &[Trace<A>],
        law: impl AsyncFn(&Subject<'_, A>, &Trace<A>) -> LawResult,
    ) -> CaseResult {
        traces.iter().try_for_each(|trace| {
            let outcome = self.in_a_store(|subject| subject.block_on(law(subject, trace)));
            outcome.map_err(|message| self.failure(message, trace.to_string()))
        })
    }

    /// Tries a law that has no generated input.
    fn once(&self, law: impl FnOnce(&Subject<'_, A>) -> LawResult) -> CaseResult {
        self.in_a_store(law).map_err(|message| self.failure(message, String::new()))
    }

    /// As `once`, for an async law.
    fn once_async(&self, law: impl AsyncFnOnce(&Subject<'_, A>) -> LawResult) -> CaseResult {
        self.once(|subject| subject.block_on(law(subject)))
    }

    fn in_a_store(&self, law: impl FnOnce(&Subject<'_, A>) -> LawResult) -> LawResult {
        let (store, able) = (self.harness.open(), self.harness.able());
        law(&Subject { store: &*store, able, difference: self.difference })
    }
}
