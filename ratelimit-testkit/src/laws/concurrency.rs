//! Law 1 under concurrency.

use std::future::poll_fn;
use std::iter::repeat_with;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::thread;

use futures_util::future::join_all;
use ratelimit_core::store::{Now, Op};
use ratelimit_core::{Algorithm, AnyAlgorithm, Limit, Timestamp};

use crate::capability::Capability;
use crate::harness::StoreClock;
use crate::law::{LawResult, ensure};
use crate::laws::Subject;
use crate::laws::own_clock::{BEGIN_US, MONTH_US, RunningStore, Time};
use crate::linearizability::plan::Lcg;
use crate::linearizability::{ConcurrentRun, Event, History, meet};
use crate::seeds::{Scope, full_us, rate};
use crate::trace::made::limit;
use crate::trace::{Ask, TraceRequest};

const THREADS: u64 = 4;
const TASKS_PER_THREAD: u64 = 8;
const ASKS_PER_TASK: u64 = 4;

/// Futures that are dropped.
const DROPPED: u64 = 3;

const AT: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// By how much a clock that can be set moves on before each request.
const MOVES_US: u64 = 100;

/// Two limits of these scopes, with these capacities per so many microseconds.
pub(crate) fn limits_of(
    pair: [Scope; 2],
    what: &str,
    capacities: [u64; 2],
    us: u64,
) -> [Limit<AnyAlgorithm>; 2] {
    [("first", 0), ("second", 1)].map(|(name, n)| {
        let instances = pair[n].at_rate(rate(capacities[n], us), capacities[n]);
        limit(&format!("{name}-{what}"), instances[0].clone())
    })
}

/// A limit of this scope at two numbers, as two customers have them.
pub(crate) fn with_own_numbers(
    scope: Scope,
    capacities: [u64; 2],
    us: u64,
) -> [Limit<AnyAlgorithm>; 2] {
    capacities.map(|capacity| {
        let instances = scope.at_rate(rate(capacity, us), capacity);
        limit("own-numbers", instances[0].clone())
    })
}

/// Law 1 under concurrency, linearizability in short: many tasks on several threads ask for one key
/// at one moment, and as many are admitted as the pure step admits one after the other. If they ask
/// together, some tasks ask for two limits at once, in either order. A limit that counts attempts
/// has admitted what it would alone, even in a batch that the other denied.
///
/// This function is not a future: it runs its own tasks.
pub(crate) fn many_tasks_are_admitted_exactly_the_limit<A: Algorithm>(
    subject: &Subject<'_, A>,
    limits: &[Limit<A>; 2],
    together: bool,
) -> LawResult {
    let rush = Rush { subject, limits, together, now: Now::At(AT) };
    rush.is_exact(rush.admitted(|| {}, |_| None)?)
}

/// The same at the store's own time, on limits that do not refill during the test. Then the clock
/// moves before each request, if it can be set, and no task waits for longer than a limit takes to
/// recover: a store that read its clock before it had the key would decide some at a time before
/// the state's.
pub(crate) fn many_tasks_are_admitted_at_the_stores_own_time(
    subject: &Subject<'_, AnyAlgorithm>,
    pair: [Scope; 2],
) -> LawResult {
    let slow = limits_of(pair, "slow", [29, 37], MONTH_US);
    let time = Time::from_clock(subject.store.clock());
    let run = subject.block_on(RunningStore::begin(subject, &slow, time))?;
    let together = subject.able.can(Capability::Batches);
    let rush = Rush { subject, limits: &slow, together, now: Now::Store };
    let admitted = rush.admitted(|| {}, |_| None)?;
    // If a window ended during the run, or the run took hours, more may have been admitted.
    if run.is_steady(&run.elapsed()) {
        rush.is_exact(admitted)?;
    }
    if !subject.able.can(Capability::TimesInOrder) {
        return Ok(());
    }
    let now_us = Mutex::new(BEGIN_US + MONTH_US);
    let clock = subject.store.clock();
    let moves = || {
        let StoreClock::Settable(set) = &clock else { return };
        let mut now_us = now_us.lock().unwrap_or_else(PoisonError::into_inner);
        *now_us += MOVES_US;
        set(Timestamp::saturating_from_us(*now_us));
    };
    let quick = limits_of(pair, "quick", [1, 1], 1_000);
    let full_us = |limit: &Limit<AnyAlgorithm>| Some(full_us(limit.algorithm()));
    Rush { limits: &quick, ..rush }.admitted(moves, full_us).map(drop)
}

/// The same after futures that were dropped at their first await: each has charged once or not at
/// all, and stops no later request. Timeouts and callers that hang up drop futures.
pub(crate) fn dropped_futures_stop_no_other<A: Algorithm>(
    subject: &Subject<'_, A>,
    limits: &[Limit<A>],
) -> LawResult {
    let ask = Ask { limit: 0, key: "dropped".to_owned(), cost: 1 };
    let request = TraceRequest::one(AT, Op::Acquire, ask);
    let (capacity, mut admitted) = (limits[0].algorithm().capacity(), 0);
    subject.block_on(async {
        for _ in 0..DROPPED {
            let mut dropped = pin!(subject.ask(limits, &request, Now::At(AT)));
            poll_fn(|context| Poll::Ready(dropped.as_mut().poll(context).is_ready())).await;
        }
        while admitted <= capacity && subject.ask(limits, &request, Now::At(AT)).await?.allowed() {
            admitted += 1;
        }
        ensure((capacity.saturating_sub(DROPPED)..=capacity).contains(&admitted), || {
            format!("{DROPPED} futures were dropped, and then {admitted} of {capacity} admitted")
        })
    })
}

/// So many threads run a race, each with so many tasks of so many requests: few, because the orders
/// of all of them are searched.
const RACE_THREADS: usize = 2;
const RACERS_PER_THREAD: usize = 4;
const ASKS_PER_RACER: usize = 4;

/// The steps of the search for an order, most of which take some hundreds.
const STEPS: usize = 20_000;

/// The same for all operations, also under ids: of tasks that charge, return, settle, extend and
/// forget at one moment, each is answered as if all had come one after the other, in some order,
/// and so are peeks at what they left. Each race is on a key of its own: the limits of one key are
/// never apart, as several keys may be in a cluster. Limits of one name are asked one at a time.
pub(crate) fn many_tasks_are_answered_in_some_order(
    subject: &Subject<'_, AnyAlgorithm>,
    limits: &[Limit<AnyAlgorithm>; 2],
    races: u32,
) -> LawResult {
    let able = subject.able;
    let is_one = limits[0].state_name() == limits[1].state_name();
    let batch = if able.can(Capability::Batches) && !is_one { 2 } else { 1 };
    let reservations = able.can(Capability::Reservations);
    let run = ConcurrentRun { keys: 1, batch, reservations, ..ConcurrentRun::new(limits) };
    let mut plan = Lcg::new(run.seed);
    for race in 0..races {
        let order = AtomicU64::new(0);
        let task = async |events: Vec<Event>| -> Result<Vec<Event>, String> {
            let mut seen = Vec::new();
            for mut event in events {
                let ask = |&(limit, _, cost)| Ask { limit, key: format!("race {race}"), cost };
                let asks = event.asks.iter().map(ask).collect();
                let request = TraceRequest { at: AT, op: event.op, asks, id: event.id };
                event.asked = order.fetch_add(1, Ordering::SeqCst);
                let answer = subject.answer(limits, &request, Now::At(AT)).await?;
                event.answered = order.fetch_add(1, Ordering::SeqCst);
                event.answer = answer.map(|all| all.decisions().to_vec()).map_err(|(kind, _)| kind);
                event.clock = [AT; 2];
                seen.push(event);
            }
            Ok(seen)
        };
        let mut planned = || -> Vec<Event> {
            let events = repeat_with(|| plan.next(&run).0).filter(|event| able.can_do(event.op));
            events.take(ASKS_PER_RACER).collect()
        };
        let arrived = AtomicUsize::new(0);
        let outcomes = thread::scope(|scope| {
            let threads: Vec<_> = (0..RACE_THREADS)
                .map(|_| {
                    let all = [(); RACERS_PER_THREAD].map(|()| planned());
                    let (task, arrived) = (&task, &arrived);
                    scope.spawn(move || {
                        meet(arrived, RACE_THREADS);
                        subject.block_on(join_all(all.into_iter().map(task)))
                    })
                })
                .collect();
            threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect::<Vec<_>>()
        });
        let mut events = outcomes.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
        let looks = [0, 1].map(|limit| Event {
            op: Op::Peek,
            asks: vec![(limit, 0, 0)],
            id: None,
            ..events[0].clone()
        });
        events.extend(subject.block_on(task(looks.to_vec()))?);
        let explained = History::at_their_times(limits, events).explain_within(STEPS);
        explained.map_err(|error| format!("among many tasks, {error}"))?;
    }
    Ok(())
}

/// Many tasks that ask for one key of two limits.
struct Rush<'a, A: Algorithm> {
    subject: &'a Subject<'a, A>,
    limits: &'a [Limit<A>; 2],
    /// Whether some of them ask for both at once.
    together: bool,
    now: Now,
}

impl<A: Algorithm> Rush<'_, A> {
    /// The number of requests that each of the limits admits, if none of them waits for longer than
    /// it may. `before` runs before each.
    fn admitted(
        &self,
        before: impl Fn() + Sync,
        full_us: impl Fn(&Limit<A>) -> Option<u64>,
    ) -> Result<[u64; 2], String> {
        let Self { subject, limits, together, now } = self;
        let full_us = limits.each_ref().map(full_us);
        let admitted = [AtomicU64::new(0), AtomicU64::new(0)];
        let ask = |limit| Ask { limit, key: "shared".to_owned(), cost: 1 };

        let task = async |number: u64| -> Result<(), String> {
            for round in 0..ASKS_PER_TASK {
                let asks = match (number + round) % 4 {
                    turn if !together => vec![ask(usize::from(turn % 2 == 1))],
                    0 => vec![ask(0)],
                    1 => vec![ask(1)],
                    2 => vec![ask(0), ask(1)],
                    _ => vec![ask(1), ask(0)],
                };
                let request = TraceRequest { at: AT, op: Op::Acquire, asks, id: None };
                before();
                let verdict = subject.ask(&limits[..], &request, *now).await?;
                for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
                    let (full_us, reset_us) = (full_us[ask.limit], decision.reset_after_us);
                    ensure(full_us.is_none_or(|full_us| reset_us <= full_us), || {
                        format!(
                            "among many tasks, l{} is to be full again in {reset_us} µs and takes {full_us:?} µs from empty: the \
                             request was decided at a time that another had left behind; read the clock once the key is locked",
                            ask.limit
                        )
                    })?;
                    let attempts = limits[ask.limit].counts_attempts();
                    if if attempts { decision.allowed } else { verdict.allowed() } {
                        admitted[ask.limit].fetch_add(ask.cost, Ordering::SeqCst);
                    }
                }
            }
            Ok(())
        };
        let outcomes = thread::scope(|scope| {
            let run = |thread: u64| {
                let tasks = (0..TASKS_PER_THREAD).map(|n| task(thread + n));
                subject.block_on(join_all(tasks))
            };
            let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || run(n))).collect();
            threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect::<Vec<_>>()
        });
        outcomes.into_iter().collect::<Result<Vec<()>, _>>()?;
        Ok(admitted.map(AtomicU64::into_inner))
    }

    /// Fails unless each of the limits has admitted as much as the pure step admits of as many
    /// requests one after the other.
    fn is_exact(&self, admitted: [u64; 2]) -> LawResult {
        let asked = THREADS * TASKS_PER_THREAD * if self.together { 3 } else { 2 };
        for (position, (limit, admitted)) in self.limits.iter().zip(admitted).enumerate() {
            let (mut due, mut state) = (0, None);
            for _ in 0..asked {
                let step = limit.algorithm().step(state.as_ref(), AT, 1);
                due += u64::from(step.decision.allowed);
                state = step.write.after(state.as_ref()).cloned();
            }
            ensure(admitted == due, || {
                format!(
                    "{admitted} were admitted of l{position} to many tasks at one moment, and {due} by the pure step"
                )
            })?;
        }
        Ok(())
    }
}
