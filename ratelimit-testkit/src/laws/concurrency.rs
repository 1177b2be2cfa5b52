//! Law 1 under concurrency.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ratelimit_core::{Algorithm, Limit, Now, Op, Policy, Timestamp};

use crate::capability::Capability;
use crate::harness::{Harness, StoreClock, join_all};
use crate::law::Violation;
use crate::laws::own_clock::{BEGIN_US, MONTH_US, Running, Time};
use crate::laws::{Kept, Subject};
use crate::seeds::{Scale, limit, rate};
use crate::trace::{Ask, Request, Scope};

const THREADS: u64 = 4;
const TASKS_PER_THREAD: u64 = 16;

/// How many tasks ask, at which time, and the capacities of the limits.
struct Rush {
    /// The names of the two limits.
    names: [&'static str; 2],
    /// The capacity per key; far below the demand.
    capacities: [u64; 2],
    period_us: u64,
    asks_per_task: u64,
    now: Now,
}

const AT: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// All tasks at one given moment.
const AT_ONE_MOMENT: Rush = Rush {
    names: ["first", "second"],
    capacities: [61, 83],
    period_us: 1_000_000,
    asks_per_task: 4,
    now: Now::At(AT),
};

/// At the store's own time, on limits that do not refill during the test.
const AT_ITS_OWN_TIME: Rush = Rush {
    names: ["first-own", "second-own"],
    capacities: [29, 37],
    period_us: 2_592_000_000_000,
    asks_per_task: 2,
    now: Now::Store,
};

/// At the store's own time, which moves on before each request if it can be set.
const WHILE_IT_MOVES: Rush = Rush {
    names: ["first-moving", "second-moving"],
    capacities: [1, 1],
    period_us: 1_000,
    asks_per_task: 4,
    now: Now::Store,
};

/// By how much the clock moves on.
const MOVES_US: u64 = 100;

/// Law 1 under concurrency: many tasks on several threads ask for one key at one moment, and exactly the limit
/// is admitted. The same holds at the store's own time, on limits too slow to refill during the test. If the
/// store supports batches, some tasks ask for two limits at once, in either order. A limit that counts attempts
/// has admitted what it would alone, even in a batch that the other limit denied.
///
/// While the clock moves, no task waits for longer than a limit takes to recover: a store that read its clock before it
/// had the key would decide some at a time before the state's.
///
/// This function is not a future: it runs its own tasks.
///
/// # Errors
/// How the store breaks the law.
pub fn many_tasks_are_admitted_exactly_the_limit<H: Harness>(
    subject: &Subject<'_, H>,
    pair: [Scope; 2],
) -> Kept {
    let limits = AT_ONE_MOMENT.limits(pair);
    let admitted = AT_ONE_MOMENT.admitted(subject, &limits, || {})?;
    AT_ONE_MOMENT.is_exact(subject, &limits, &admitted)?;

    let limits = AT_ITS_OWN_TIME.limits(pair);
    let time = Time::of(subject.harness.clock(subject.store));
    let run = subject.harness.block_on(Running::begin(subject, &limits, time))?;
    let admitted = AT_ITS_OWN_TIME.admitted(subject, &limits, || {})?;
    // If a window ended during the run, or the run took hours, more may have been admitted.
    if run.is_steady(&run.passed()) {
        AT_ITS_OWN_TIME.is_exact(subject, &limits, &admitted)?;
    }

    let now_us = Mutex::new(BEGIN_US + MONTH_US);
    let clock = subject.harness.clock(subject.store);
    let moves = || {
        let StoreClock::Settable(set) = &clock else { return };
        let mut now_us = now_us.lock().unwrap_or_else(PoisonError::into_inner);
        *now_us += MOVES_US;
        set(Timestamp::saturating_from_us(*now_us));
    };
    WHILE_IT_MOVES.admitted(subject, &WHILE_IT_MOVES.limits(pair), moves).map(drop)
}

impl Rush {
    fn limits(&self, pair: [Scope; 2]) -> [Limit<Policy>; 2] {
        [0, 1].map(|n| {
            let capacity = self.capacities[n];
            let policies = pair[n].at_rate(rate(capacity, self.period_us), capacity);
            limit(self.names[n], policies[0])
        })
    }

    /// The number of requests that each of the limits admits, if none of them waits for too long. `before` runs before
    /// each of them.
    fn admitted<H: Harness>(
        &self,
        subject: &Subject<'_, H>,
        limits: &[Limit<Policy>; 2],
        before: impl Fn() + Sync,
    ) -> Result<[u64; 2], Violation> {
        let full_us = limits.each_ref().map(|limit| Scale::of(limit.algorithm()).full_us);
        let admitted = [AtomicU64::new(0), AtomicU64::new(0)];
        let batches = subject.able().can(Capability::Batches);
        let ask = |limit| Ask { limit, key: "shared".to_owned(), cost: 1 };

        let task = async |number: u64| -> Result<(), Violation> {
            for round in 0..self.asks_per_task {
                let asks = match (number + round) % 4 {
                    turn if !batches => vec![ask(usize::from(turn % 2 == 1))],
                    0 => vec![ask(0)],
                    1 => vec![ask(1)],
                    2 => vec![ask(0), ask(1)],
                    _ => vec![ask(1), ask(0)],
                };
                let request = Request { at: AT, op: Op::Acquire, asks, id: None };
                before();
                let verdict = subject.ask_at(limits, &request, self.now).await?;
                for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
                    let (full_us, reset_us) = (full_us[ask.limit], decision.reset_after_us);
                    let any_order = !subject.able().can(Capability::TimesInOrder);
                    subject.ensure(any_order || reset_us <= full_us, || {
                        format!(
                            "among many tasks, {} is to be full again in {reset_us} µs and takes {full_us} µs from \
                             empty: the request was decided at a time that another had left behind; read the clock \
                             once the key is locked",
                            limits[ask.limit].algorithm()
                        )
                    })?;
                    let attempts = limits[ask.limit].algorithm().charges_denials();
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
                subject.harness.block_on(join_all(tasks))
            };
            let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || run(n))).collect();
            threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect::<Vec<_>>()
        });
        outcomes.into_iter().collect::<Result<Vec<()>, _>>()?;
        Ok(admitted.map(AtomicU64::into_inner))
    }

    /// Fails unless each of the limits has admitted exactly its capacity.
    fn is_exact<H: Harness>(
        &self,
        subject: &Subject<'_, H>,
        limits: &[Limit<Policy>; 2],
        admitted: &[u64; 2],
    ) -> Kept {
        let when = match self.now {
            Now::Store => "at the store's own time",
            Now::At(_) => "at one moment",
        };
        for (limit, (admitted, capacity)) in limits.iter().zip(admitted.iter().zip(self.capacities))
        {
            subject.ensure(*admitted == capacity, || {
                format!("{admitted} were admitted {when} by {}, not {capacity}", limit.algorithm())
            })?;
        }
        Ok(())
    }
}
