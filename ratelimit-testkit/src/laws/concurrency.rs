//! Law 1 under concurrency.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use ratelimit_core::{Algorithm, Op, Policy, Tick};

use crate::capability::Capability;
use crate::harness::{Harness, join_all};
use crate::law::Violation;
use crate::laws::{Kept, Subject};
use crate::seeds::{limit, rate};
use crate::trace::{Ask, Request, Scope};

const THREADS: u64 = 4;
const TASKS_PER_THREAD: u64 = 16;
const ASKS_PER_TASK: u64 = 4;
/// What two limits of every key hold; far less than is asked for.
const CAPACITY: u64 = 61;
const OTHER_CAPACITY: u64 = 83;

/// Law 1, under concurrency: many tasks on several threads ask for one key at one moment, and are
/// admitted exactly the limit. Some ask for two limits at once, in either order, if the store knows batches. One that counts
/// attempts has admitted what it would have, also in a batch that the other denied.
///
/// Not a future: it runs its own.
///
/// # Errors
/// How the law is broken.
pub fn many_tasks_are_admitted_exactly_the_limit<H: Harness>(
    subject: &Subject<'_, H>,
    [first, second]: [Scope; 2],
) -> Kept {
    let limits = [("first", first, CAPACITY), ("second", second, OTHER_CAPACITY)]
        .map(|(name, scope, count)| limit(name, scope.at_rate(rate(count, 1_000_000), count)[0]));
    let at = Tick::saturating_from_us(1_795_218_392_123_456);
    let admitted = [AtomicU64::new(0), AtomicU64::new(0)];
    let batches = subject.able().can(Capability::Batches);
    let ask = |limit| Ask { limit, key: "shared".to_owned(), cost: 1 };

    let task = async |number: u64| -> Result<(), Violation> {
        for round in 0..ASKS_PER_TASK {
            let asks = match (number + round) % 4 {
                turn if !batches => vec![ask(usize::from(turn % 2 == 1))],
                0 => vec![ask(0)],
                1 => vec![ask(1)],
                2 => vec![ask(0), ask(1)],
                _ => vec![ask(1), ask(0)],
            };
            let request = Request { at, op: Op::Acquire, asks, id: None };
            let verdict = subject.ask(&limits, &request).await?;
            for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
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
    exact(subject, &limits[0], &admitted[0], CAPACITY)?;
    exact(subject, &limits[1], &admitted[1], OTHER_CAPACITY)
}

fn exact<H: Harness>(
    subject: &Subject<'_, H>,
    limit: &ratelimit_core::Limit<Policy>,
    admitted: &AtomicU64,
    capacity: u64,
) -> Kept {
    let admitted = admitted.load(Ordering::SeqCst);
    subject.holds(admitted == capacity, || {
        format!("{admitted} were admitted at one moment by {}, not {capacity}", limit.algorithm())
    })
}
