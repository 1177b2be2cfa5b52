//! Requests and changes of records at one moment.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use futures_util::future::join_all;
use ratelimit_core::StoreError as _;

use super::*;
use crate::linearizability::plan::Lcg;
use crate::linearizability::{ConcurrentRun, Event, History, RecordChange, meet};

/// Each thread of a race has so many tasks of so many requests: few, because the orders of all of
/// them are searched.
const TASKS_PER_THREAD: usize = 4;
const ASKS_PER_TASK: usize = 5;

/// The steps of the search for an order, most of which take some hundreds.
const STEPS: usize = 20_000;

/// Two limits of each race, in turn, with numbers that both could have.
const PAIRS: [([&str; 2], [&str; 2]); 3] = [
    (["fixed-window 6/365d", "fixed-window 3/365d"], ["9/365d", "1/365d"]),
    (["gcra 1/365d burst 6", "gcra 1/365d burst 3"], ["1/365d burst 9", "1/365d burst 1"]),
    (["sliding-log 6/365d", "sliding-log 3/365d count attempts"], ["9/365d", "1/365d"]),
];

/// What a task did.
type Done = (Vec<Event>, Vec<RecordChange>);

/// Every other race has one thread, whose tasks meet only where the store waits: so it is the same
/// each time.
pub(super) fn answers<H: Harness<Any, Store: RecordStore<Any>>>(
    harness: &H,
    tried: &Tried<H::Store>,
) -> Held {
    let mut plan = Lcg::new(1);
    for race in 0..usize::try_from(cases(H::CASES)).unwrap_or(1) {
        let (words, others) = PAIRS[race % PAIRS.len()];
        let limits = [0, 1].map(|n| limit_in_words(&format!("l{n}"), words[n]).overridable());
        let numbers = |words| numbers(&limits[0], words);
        let (blocked, exempt) = (Record::blocked().forever(), Record::exempt().forever());
        let records = [blocked, exempt, numbers(others[0])?, numbers(others[1])?];
        let race = Race {
            tried,
            now: tried.time(tried.begin),
            limits: &limits,
            records: &records,
            key: format!("race {race}"),
            order: AtomicU64::new(0),
            threads: 1 + race % 2,
        };
        race.is_in_order(harness, &mut plan)?;
    }
    Ok(())
}

struct Race<'r, S> {
    tried: &'r Tried<S>,
    now: Now,
    limits: &'r [Limit<Any>; 2],
    records: &'r [Record<Any>],
    key: String,
    order: AtomicU64,
    threads: usize,
}

impl<S: RecordStore<Any>> Race<'_, S> {
    fn is_in_order<H: Harness<Any, Store = S>>(&self, harness: &H, plan: &mut Lcg) -> Held {
        let run = ConcurrentRun { keys: 1, batch: 2, ..ConcurrentRun::new(self.limits) };
        let mut task = || -> Vec<(Event, Option<RecordChange>)> {
            let mut next = || (plan.next(&run).0, plan.change(&run, self.records.len()));
            (0..ASKS_PER_TASK).map(|_| next()).collect()
        };
        let arrived = AtomicUsize::new(0);
        let outcomes = thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|_| {
                    let tasks = [(); TASKS_PER_THREAD].map(|()| task());
                    let arrived = &arrived;
                    scope.spawn(move || {
                        meet(arrived, self.threads);
                        harness.block_on(join_all(tasks.into_iter().map(|task| self.run(task))))
                    })
                })
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join().expect("no panic"));
            joined.flatten().collect::<Result<Vec<_>, String>>()
        });
        let (events, changes): (Vec<_>, Vec<_>) = outcomes?.into_iter().unzip();
        let (mut events, changes) = (events.concat(), changes.concat());
        // What the last of them left.
        let look = |limit| {
            let (asks, order) = (vec![(limit, 0, 0)], 0);
            let (clock, answer) = ([self.tried.begin; 2], Ok(Vec::new()));
            let look = Event {
                op: Op::Peek,
                asks,
                id: None,
                asked: order,
                answered: order,
                clock,
                answer,
            };
            (look, None)
        };
        events.extend(harness.block_on(self.run([0, 1].map(look).to_vec()))?.0);
        let history = History::at_their_times(self.limits, events);
        let explained = history.explain_with_records(self.records, &changes, STEPS);
        explained.map(drop).map_err(|error| format!("among many tasks, {error}"))
    }

    /// Asks, or changes a record in place of the request, one after the other.
    async fn run(&self, planned: Vec<(Event, Option<RecordChange>)>) -> Result<Done, String> {
        let (mut events, mut changes) = Done::default();
        for (event, change) in planned {
            match change {
                Some(change) => changes.push(self.change(change).await?),
                None => events.push(self.ask(event).await),
            }
        }
        Ok((events, changes))
    }

    async fn ask(&self, mut event: Event) -> Event {
        let check = |&(limit, _, cost): &(usize, usize, u64)| Check {
            limit: &self.limits[limit],
            key: &self.key,
            cost,
        };
        let checks: Vec<_> = event.asks.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(event.op).now(self.now);
        let batch = event.id.map_or(batch, |id| batch.id(id));
        event.asked = self.order.fetch_add(1, Ordering::SeqCst);
        let answer = self.tried.store.apply(&batch).await;
        event.answered = self.order.fetch_add(1, Ordering::SeqCst);
        event.answer =
            answer.map(|verdict| verdict.decisions().to_vec()).map_err(|error| error.kind());
        event.clock = [self.tried.begin; 2];
        event
    }

    async fn change(&self, mut change: RecordChange) -> Result<RecordChange, String> {
        let said = |error: S::Error| format!("it cannot set a record: {error}");
        let (store, limit) = (&self.tried.store, &self.limits[change.limit]);
        change.asked = self.order.fetch_add(1, Ordering::SeqCst);
        let stands = store.record(limit, &self.key).await.map_err(said)?;
        change.before =
            stands.and_then(|stands| self.records.iter().position(|record| *record == stands));
        let [before, after] =
            [change.before, change.after].map(|record| record.map(|record| &self.records[record]));
        let done = store.exchange_record(limit, &self.key, before, after).await;
        change.is_done = done.map_err(said)?;
        change.answered = self.order.fetch_add(1, Ordering::SeqCst);
        change.clock = [self.tried.begin; 2];
        Ok(change)
    }
}
