//! Requests that share calls while tasks drop others at random: a sequential order explains every answer, and what
//! was charged.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, ErrorKind, FixedWindow, Limit, Verdict};
use ratelimit_redis::{Client, RedisStore};
use ratelimit_testkit::{Calendar, Event, History, charges};
use tokio::task::{JoinSet, yield_now};

use crate::common::{apply, named, server, store};

/// Two keys per round, of which batches may join both.
const KEYS: usize = 2;
const ROUNDS: usize = 48;
/// So few per round that the checker tries every order: a request that was dropped may have been charged at any time after,
/// or never.
const TASKS: usize = 4;
const REQUESTS: usize = 5;

struct Run {
    store: RedisStore,
    limits: [Limit<FixedWindow>; 2],
    calendar: Calendar,
    /// The counter that orders all events of a round.
    order: AtomicU64,
}

impl Run {
    /// A random request. A third of them are dropped after some turns of the runtime, if they have no answer by then.
    async fn ask(&self, round: usize, random: &mut Rng) -> Event {
        let mut asks: Vec<(usize, usize, u64)> = Vec::new();
        for _ in 0..[1, 1, 1, 2, 3][random.usize(..5)] {
            let (limit, key) = (random.usize(..2), random.usize(..KEYS));
            if !asks.iter().any(|(l, k, _)| (*l, *k) == (limit, key)) {
                asks.push((limit, key, [1, 1, 1, 2, 3][random.usize(..5)]));
            }
        }
        let turns = if random.usize(..3) == 0 { random.usize(..300) } else { usize::MAX };
        let asked = self.order.fetch_add(1, Ordering::SeqCst);
        let answer = tokio::select! {
            biased;
            verdict = self.apply(round, &asks, Op::Acquire) => Some(verdict),
            () = pass(turns) => None,
        };
        self.event(Op::Acquire, asks, asked, answer)
    }

    async fn apply(&self, round: usize, asks: &[(usize, usize, u64)], op: Op) -> Verdict {
        let names: Vec<_> = (0..KEYS).map(|key| format!("{round}-{key}")).collect();
        let check =
            |(limit, key, cost): &(usize, usize, u64)| (&self.limits[*limit], &*names[*key], *cost);
        let checks: Vec<_> = asks.iter().map(check).collect();
        apply(&self.store, &checks, op, None).await.expect("the server is up")
    }

    /// What is recorded of a request. The answer says when the server decided.
    fn event(
        &self,
        op: Op,
        asks: Vec<(usize, usize, u64)>,
        asked: u64,
        verdict: Option<Verdict>,
    ) -> Event {
        let answer = verdict.map(|verdict| verdict.decisions().to_vec());
        let clock = self.calendar.time_of(answer.as_deref().unwrap_or_default());
        Event {
            op,
            asks,
            id: None,
            asked,
            answered: self.order.fetch_add(1, Ordering::SeqCst),
            clock: [clock; 2],
            answer: answer.ok_or(ErrorKind::Indeterminate),
        }
    }
}

async fn pass(turns: usize) {
    for _ in 0..turns {
        yield_now().await;
    }
}

async fn an_order_explains_all_answers_while_others_are_dropped(client: Client) {
    let server = server();
    let calendar = Calendar::now();
    let limit = |name, count| named(name, FixedWindow::new(calendar.rate(count)).expect("a limit"));
    let run = Arc::new(Run {
        store: store(&server.url(), client).await,
        limits: [limit("few", 9), limit("many", 18)],
        calendar,
        order: AtomicU64::new(0),
    });
    let (mut dropped, mut unused) = (0, 0);
    for round in 0..ROUNDS {
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let run = Arc::clone(&run);
            let mut random = Rng::with_seed((round * TASKS + task) as u64);
            tasks.spawn(async move {
                let mut events = Vec::new();
                for _ in 0..REQUESTS {
                    events.push(run.ask(round, &mut random).await);
                }
                events
            });
        }
        let mut events: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
        let places = [(0, 0), (0, 1), (1, 0), (1, 1)];
        for place in places {
            let asks = vec![(place.0, place.1, 0)];
            let asked = run.order.fetch_add(1, Ordering::SeqCst);
            let verdict = run.apply(round, &asks, Op::Peek).await;
            let charged = run.limits[place.0].algorithm().capacity() - verdict.remaining();
            let due = charges(&events, place);
            assert!(due.contains(&charged), "{due:?}: {charged}");
            unused += due.end() - charged;
            events.push(run.event(Op::Peek, asks, asked, Some(verdict)));
        }
        dropped += events.iter().filter(|event| event.answer.is_err()).count();
        match History::at_their_times(&run.limits, events).explain() {
            Ok(decided) => assert!(decided, "round {round}: the search ran out of steps"),
            Err(unexplained) => panic!("round {round}: {unexplained}"),
        }
    }
    assert!(dropped > 0, "some were dropped");
    assert!(unused > 0, "some that were dropped were taken back, or denied");
    let calls = usize::try_from(server.calls("evalsha").expect("it is up")).expect("a count");
    assert!(calls > 0, "scripts");
    // Requests of one key share calls. Each round ends with four peeks.
    assert!(calls < ROUNDS * (TASKS * REQUESTS + 4), "{calls} calls");
}

with_each_client!(an_order_explains_all_answers_while_others_are_dropped);
