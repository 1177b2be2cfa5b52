//! The laws on a store of any algorithm's limits: the store agrees with the pure step, which the other laws
//! judge.

use std::cell::RefCell;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{TestCaseError, TestError, TestRunner};
use ratelimit_core::{
    Algorithm, Batch, Check, ErrorKind, Limit, Now, Op, ReservationId, Store, StoreError,
    Timestamp, Verdict,
};

use crate::algorithm::AlgorithmHarness;
use crate::capability::{Able, Capability};
use crate::harness::{Harness, StoreClock, join_all};
use crate::law::{Law, Violation};
use crate::laws::own_clock::{HINT, WAIT_US, how_wrong, vanishes_within};
use crate::pure::PureStore;
use crate::suite::guard::note_request;

/// A broken law, and the case that broke it.
type Broken = (Violation, String);

/// The harness of the reference store: a map and the pure step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl<A: Algorithm> Harness<A> for Reference {
    type Store = PureStore<A>;

    fn new() -> Self {
        Self
    }

    fn store(&self) -> PureStore<A> {
        PureStore::new()
    }

    fn clock(&self, store: &PureStore<A>) -> StoreClock {
        store.clock().into()
    }

    async fn state(&self, store: &PureStore<A>, limit: &Limit<A>, key: &str) -> Option<A::State> {
        store.state(limit, key)
    }

    /// The reference store keeps expired states on purpose.
    async fn leaks(&self, _: &PureStore<A>, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

/// A batch at one moment.
#[derive(Clone)]
struct Request {
    at: Timestamp,
    op: Op,
    id: Option<ReservationId>,
    /// The position of the limit, the key and the cost.
    asks: Vec<(usize, &'static str, u64)>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {} {}", self.at.as_us(), self.op)?;
        for (place, (limit, key, cost)) in self.asks.iter().enumerate() {
            write!(f, "{} {cost} of {key:?} in l{limit}", if place > 0 { "," } else { "" })?;
        }
        self.id.map_or(Ok(()), |id| write!(f, " under {id}"))
    }
}

/// An unresolved request: times in units of a limit's recovery, costs in units of its capacity.
#[derive(Clone, Debug)]
struct Draft {
    back: bool,
    /// Thousandths of the recovery time, plus microseconds.
    part: u64,
    us: u64,
    op: Op,
    id: Option<ReservationId>,
    asks: Vec<(Index, &'static str, u8)>,
}

fn drafts(able: Able) -> impl Strategy<Value = (u64, Vec<Draft>)> {
    let ops = [
        (10, Op::Acquire, false),
        (3, Op::Acquire, true),
        (2, Op::Peek, false),
        (2, Op::Refund, false),
        (1, Op::Force, false),
        (1, Op::Reset, false),
        (2, Op::Settle, true),
        (1, Op::Renew, true),
    ];
    let can =
        |op, reserves: bool| able.can_do(op) && (!reserves || able.can(Capability::Reservations));
    let ops: Vec<_> = ops
        .into_iter()
        .filter(|(_, op, reserves)| can(*op, *reserves))
        .map(|(weight, op, reserves)| {
            (weight, Just((op, reserves.then_some(ReservationId::new(7)))))
        })
        .collect();
    let most = if able.can(Capability::Batches) { 4 } else { 1 };
    let keys = if able.can(Capability::SeveralKeys) { &["a", "b"][..] } else { &["a"] };
    let ask = (any::<Index>(), select(keys), 0_u8..=8);
    let part = prop_oneof![4 => Just(0_u64), 2 => 0_u64..=300, 1 => Just(1_000)];
    let draft = (
        prop::bool::weighted(0.1),
        part,
        0_u64..=2,
        prop::strategy::Union::new_weighted(ops),
        prop::collection::vec(ask, 1..=most),
    )
        .prop_map(|(back, part, us, (op, id), asks)| Draft { back, part, us, op, id, asks });
    let begin = select(&[1_795_218_392_123_456, 1_795_218_390_000_000][..]);
    (begin, prop::collection::vec(draft, 1..=30))
}

/// The limits of a harness, each with a name.
fn limits<T: AlgorithmHarness>() -> Vec<Limit<T::Algorithm>> {
    let limits = T::limits().into_iter().enumerate();
    let named = |(n, instance): (usize, crate::Instance<T::Algorithm>)| {
        Limit::new(&format!("l{n}"), instance.algorithm).expect("the testkit's names are plain")
    };
    limits.map(named).collect()
}

/// The time that a limit takes to recover from empty, or a fallback where it reports none.
fn full_us<A: Algorithm>(limit: &Limit<A>, at: Timestamp) -> u64 {
    let algorithm = limit.algorithm();
    let left = algorithm.step(None, at, 0).decision.remaining;
    let us = algorithm.step(None, at, left).decision.reset_after_us;
    if (1..1 << 46).contains(&us) { us } else { 1_000_000 }
}

fn resolve<A: Algorithm>(
    limits: &[Limit<A>],
    begin_us: u64,
    drafts: &[Draft],
    back: bool,
) -> Vec<Request> {
    let mut at_us = begin_us;
    let requests = drafts.iter().map(|draft| {
        let begin = Timestamp::saturating_from_us(begin_us);
        let first = &limits[draft.asks[0].0.index(limits.len())];
        let by_us = full_us(first, begin) / 1_000 * draft.part + draft.us;
        at_us = if draft.back && back { at_us.saturating_sub(by_us) } else { at_us + by_us };
        let mut asks: Vec<(usize, &'static str, u64)> = Vec::new();
        for (limit, key, cost) in &draft.asks {
            let limit = limit.index(limits.len());
            let capacity = limits[limit].algorithm().capacity();
            let cost = match cost {
                0..=4 => u64::from(*cost),
                5 => capacity.div_ceil(2),
                6 => capacity,
                7 => capacity.saturating_add(1),
                _ => u64::MAX,
            };
            if !asks.iter().any(|(known, other, _)| *known == limit && other == key) {
                asks.push((limit, key, cost));
            }
        }
        let at = Timestamp::saturating_from_us(at_us.min(Timestamp::MAX.as_us() - 10));
        Request { at, op: draft.op, id: draft.id, asks }
    });
    requests.collect()
}

/// A store's answer to a request: a verdict or a kind of error.
type Said = Result<Verdict, ErrorKind>;

/// How often a request is repeated while the store reports contention.
const CONTENDED: usize = 1_000;

async fn ask<A: Algorithm, S: Store<A>>(
    store: &S,
    limits: &[Limit<A>],
    request: &Request,
    now: Now,
) -> Result<Said, String> {
    let check = |(limit, key, cost): &(usize, &'static str, u64)| Check {
        limit: &limits[*limit],
        key,
        cost: *cost,
    };
    let checks: Vec<_> = request.asks.iter().map(check).collect();
    let batch = Batch::new(&checks).map_err(|error| error.to_string())?.op(request.op).now(now);
    let batch = request.id.map_or(batch, |id| batch.id(id));
    for _ in 0..CONTENDED {
        note_request();
        match store.apply(&batch).await.map_err(|error| error.kind()) {
            Err(ErrorKind::Contended) => {}
            said => return Ok(said),
        }
    }
    Err(format!("{request:?} was contended {CONTENDED} times, although no other request was made"))
}

/// Tries a law on traces, each in a fresh store.
#[allow(clippy::needless_pass_by_value, reason = "a law is a function")]
fn on_traces<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    law: Law,
    mut runner: TestRunner,
    back: bool,
    tried: impl AsyncFn(&H::Store, &[Limit<T::Algorithm>], &[Request]) -> Result<(), String>,
) -> Result<(), Broken> {
    let (able, limits) = (Able::of::<T::Algorithm, H>(), limits::<T>());
    let back = back && able.can(Capability::PastTimes);
    let shown: RefCell<String> = RefCell::default();
    let outcome = runner.run(&drafts(able), |(begin_us, drafts)| {
        let trace = resolve(&limits, begin_us, &drafts, back);
        let store = harness.store();
        harness.block_on(tried(&store, &limits, &trace)).map_err(|message| {
            let lines = trace.iter().map(|request| format!("{request:?}\n"));
            shown.replace(lines.collect());
            TestCaseError::fail(message)
        })
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Abort(reason) | TestError::Fail(reason, _)) => {
            let mut case = String::new();
            for (n, limit) in T::limits().into_iter().enumerate() {
                // Writing to a string cannot fail.
                let _ = writeln!(case, "limit l{n}: {}", limit.text);
            }
            case.push_str(&shown.into_inner());
            Err((Violation { law, message: reason.to_string() }, case))
        }
    }
}

/// Law 10, and with it laws 4, 7 and 8: the store agrees with the pure step, errors included, and executes a
/// request with an id once however often it is sent.
pub(crate) fn one_answer_everywhere<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    law: Law,
    runner: TestRunner,
) -> Result<(), Broken> {
    on_traces::<T, H>(harness, law, runner, true, async |store, limits, trace| {
        let pure = PureStore::new();
        for request in trace {
            for _ in 0..if request.id.is_some() { 2 } else { 1 } {
                follows(store, &pure, limits, request, Now::At(request.at)).await?;
            }
        }
        Ok(())
    })
}

/// Checks that the store answers as the pure step does, and that every key then peeks the same.
async fn follows<A: Algorithm, S: Store<A>>(
    store: &S,
    pure: &PureStore<A>,
    limits: &[Limit<A>],
    request: &Request,
    now: Now,
) -> Result<(), String> {
    let got = ask(store, limits, request, now).await?;
    let due = ask(pure, limits, request, Now::At(request.at)).await?;
    if got != due {
        return Err(format!("{request:?} got {got:?}; the pure step says {due:?}"));
    }
    for (limit, key, _) in &request.asks {
        let asks = vec![(*limit, *key, 0)];
        let peek = Request { at: request.at, op: Op::Peek, id: None, asks };
        let (got, due) = (
            ask(store, limits, &peek, now).await?,
            ask(pure, limits, &peek, Now::At(request.at)).await?,
        );
        if got != due {
            return Err(format!(
                "after {request:?}, {peek:?} got {got:?}; the pure step says {due:?}"
            ));
        }
    }
    Ok(())
}

const THREADS: u64 = 4;
const TASKS_PER_THREAD: u64 = 16;
const ASKS_PER_TASK: u64 = 4;

/// Law 1 under concurrency: of many tasks on several threads that ask for 1 unit of one key at one moment, the
/// store admits as many as the pure step admits in sequence.
pub(crate) fn many_tasks_are_admitted_as_one<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    law: Law,
    _: TestRunner,
) -> Result<(), Broken> {
    let limits = limits::<T>();
    let at = Timestamp::saturating_from_us(1_795_218_392_123_456);
    for (n, instance) in T::limits().into_iter().enumerate() {
        let request = Request { at, op: Op::Acquire, id: None, asks: vec![(n, "shared", 1)] };
        let broken =
            |message: String| (Violation { law, message }, format!("limit {}\n", instance.text));
        let store = harness.store();
        let admitted = AtomicU64::new(0);
        let task = async || -> Result<(), String> {
            for _ in 0..ASKS_PER_TASK {
                let said = ask(&store, &limits, &request, Now::At(at)).await?;
                let verdict =
                    said.map_err(|error| format!("{request:?} got the error {error:?}"))?;
                admitted.fetch_add(u64::from(verdict.allowed()), Ordering::SeqCst);
            }
            Ok(())
        };
        let outcomes = thread::scope(|scope| {
            let run = || harness.block_on(join_all((0..TASKS_PER_THREAD).map(|_| task())));
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
            threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect::<Vec<_>>()
        });
        outcomes.into_iter().collect::<Result<Vec<()>, _>>().map_err(broken)?;
        let (mut due, mut state) = (0, None);
        for _ in 0..THREADS * TASKS_PER_THREAD * ASKS_PER_TASK {
            let step = instance.algorithm.step(state.as_ref(), at, 1);
            due += u64::from(step.decision.allowed);
            state = step.write.after(state.as_ref()).cloned();
        }
        let admitted = admitted.into_inner();
        if admitted != due {
            return Err(broken(format!(
                "{admitted} were admitted at one moment, and {due} by the pure step"
            )));
        }
    }
    Ok(())
}

/// How much longer than needed a store may keep a state.
const SLACK: Duration = Duration::from_secs(2);

/// Law 9: everything that is written disappears by itself soon after it has expired.
pub(crate) fn nothing_leaks<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    law: Law,
    runner: TestRunner,
) -> Result<(), Broken> {
    on_traces::<T, H>(harness, law, runner, false, async |store, limits, trace| {
        let pure = PureStore::new();
        for request in trace {
            follows(store, &pure, limits, request, Now::At(request.at)).await?;
        }
        // The longest time to expiry of all states, taken from the steps that may have written them.
        let mut longest_us = ratelimit_core::Reservation::LIFE_US;
        for limit in limits {
            let algorithm = limit.algorithm();
            let at = trace[0].at;
            let left = algorithm.step(None, at, 0).decision.remaining;
            if let ratelimit_core::Write::Put { expires, .. } = algorithm.step(None, at, left).write
            {
                if expires == Timestamp::MAX {
                    // A state that never expires may stay forever.
                    return Ok(());
                }
                let span_us = expires.saturating_us_since(at).max(full_us(limit, at));
                longest_us =
                    longest_us.max(2 * span_us).max(algorithm.reservation_us().unwrap_or(0));
            }
        }
        let within = Duration::from_micros(longest_us + Now::PADDING_US) + SLACK;
        let leaks = harness.leaks(store, within).await;
        if leaks.is_empty() {
            return Ok(());
        }
        let message = leaks.join("; ");
        Err(format!("after {within:?} nothing can matter, and still there is: {message}"))
    })
}

/// The time to which a settable clock is set first: later than the beginning of any store's clock.
const BEGIN_US: u64 = 3_499_200_000_000_000;

/// Law 14: a store with a settable clock decides at its own time as the pure step does at that time. With any
/// clock, what is charged at the store's own time counts.
pub(crate) fn decides_by_its_own_clock<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    law: Law,
    runner: TestRunner,
) -> Result<(), Broken> {
    let store = harness.store();
    let StoreClock::Settable(_) = harness.clock(&store) else {
        return harness.block_on(counts::<T, H>(harness, &store, law));
    };
    on_traces::<T, H>(harness, law, runner, false, async |store, limits, trace| {
        let StoreClock::Settable(set) = harness.clock(store) else {
            return Err("the harness has clocks that can be set, and others".to_owned());
        };
        let (pure, begin_us) = (PureStore::new(), trace[0].at.as_us());
        for (place, request) in trace.iter().enumerate() {
            let us = request.at.as_us() - begin_us;
            let at = Timestamp::saturating_from_us(BEGIN_US).saturating_add_us(us);
            set(at);
            let request = Request { at, ..request.clone() };
            let now = if place % 4 == 3 { Now::At(at) } else { Now::Store };
            follows(store, &pure, limits, &request, now).await?;
        }
        Ok(())
    })
}

/// How often the clock is sampled after a charge, and again after the wait.
const LOOKS: usize = 3;

/// Law 14 on a running clock: a charge at the store's own time counts, and it is returned when the decision
/// promised. Only limits that take longer to recover than the test runs can show this.
async fn counts<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    store: &H::Store,
    law: Law,
) -> Result<(), Broken> {
    let limits = limits::<T>();
    let begun = Instant::now();
    let now_us = || u64::try_from(begun.elapsed().as_micros()).expect("no test takes ages");
    // Per limit: the moments before and after the request, and when the limit is to be full again.
    let mut looks: Vec<Vec<(u64, u64, u64)>> = limits.iter().map(|_| Vec::new()).collect();
    for look in 0..=2 * LOOKS {
        if look == LOOKS + 1 {
            thread::sleep(Duration::from_micros(WAIT_US));
        }
        let (op, cost) = if look == 0 { (Op::Acquire, 1) } else { (Op::Peek, 0) };
        for (n, instance) in T::limits().into_iter().enumerate() {
            let broken = |message: String| {
                (Violation { law, message }, format!("limit {}\n", instance.text))
            };
            let request =
                Request { at: Timestamp::ZERO, op, id: None, asks: vec![(n, "own", cost)] };
            let from_us = now_us();
            let said = ask(store, &limits, &request, Now::Store).await.map_err(broken)?;
            let said = said.map_err(|error| {
                broken(format!("{op} {cost} at the store's own time got the error {error:?}"))
            })?;
            let (to_us, reset_us) = (now_us(), said.summary().reset_after_us);
            for (from_before_us, to_before_us, before_us) in &looks[n] {
                let between_us = (from_us.saturating_sub(*to_before_us), to_us - from_before_us);
                if let Some(how) = how_wrong((*before_us, reset_us), between_us, false) {
                    return Err(broken(format!(
                        "the store's own clock: {how}. All was to be back in {before_us} µs and then, at least {} µs \
                         and at most {} µs later, in {reset_us} µs{HINT}",
                        between_us.0, between_us.1
                    )));
                }
            }
            looks[n].push((from_us, to_us, reset_us));
        }
    }
    let mut longest: Option<(u64, String)> = None;
    for (n, instance) in T::limits().into_iter().enumerate() {
        let asks = vec![(n, "kept", instance.algorithm.capacity())];
        let request = Request { at: Timestamp::ZERO, op: Op::Acquire, id: None, asks };
        let said = ask(store, &limits, &request, Now::Store).await;
        let Ok(Ok(said)) = said else { continue };
        let reset_us = said.summary().reset_after_us;
        if longest.as_ref().is_none_or(|(longest_us, _)| *longest_us < reset_us) {
            longest = Some((reset_us, instance.text));
        }
    }
    let Some((reset_us, text)) = longest else { return Ok(()) };
    match vanishes_within(harness, store, reset_us).await {
        None => Ok(()),
        Some(within) => {
            let message = format!(
                "at the store's own time it is full in {reset_us} µs, and the store keeps nothing for {within:?}: its \
                 states vanish too early"
            );
            Err((Violation { law, message }, format!("limit {text}\n")))
        }
    }
}
