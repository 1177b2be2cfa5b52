//! A network that fails under a cache: a sequential order explains every answer and what was
//! charged. So none is admitted above the limit, and none is denied that the store would have admitted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{Algorithm, ErrorKind, Limit, Policy, Source, Store, StoreError};
use ratelimit_layers::DenialCache;
use ratelimit_redis::{Client, RedisStore};
use ratelimit_servers::{FaultProxy, RedisServer};
use ratelimit_testkit::{Calendar, Event, History, charges};
use tokio::task::JoinSet;

use crate::common::limit;

/// Two keys per round, of which batches may join both.
const KEYS: usize = 2;
const ROUNDS: usize = 24;
const TASKS: usize = 4;
/// The checker keeps at most 128 events.
const REQUESTS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(20);

struct Run {
    store: DenialCache<RedisStore>,
    proxy: FaultProxy,
    limits: [Limit<Policy>; 2],
    calendar: Calendar,
    /// The counter that orders all events of a round.
    order: AtomicU64,
    /// How many answers came from the cache.
    cached: AtomicU64,
}

impl Run {
    fn new(store: DenialCache<RedisStore>, proxy: FaultProxy) -> Arc<Self> {
        let calendar = Calendar::now();
        let limit = |name, count| limit(name, &format!("fixed-window {}", calendar.rate(count)));
        Arc::new(Self {
            store,
            proxy,
            limits: [limit("few", 6), limit("many", 12)],
            calendar,
            order: AtomicU64::new(0),
            cached: AtomicU64::new(0),
        })
    }

    /// A random request, before some of which the network fails. `None` if it was certainly not charged.
    async fn ask(&self, round: usize, random: &mut Rng) -> Option<Event> {
        let mut asks: Vec<(usize, usize, u64)> = Vec::new();
        for _ in 0..[1, 1, 1, 2][random.usize(..4)] {
            let (limit, key) = (random.usize(..2), random.usize(..KEYS));
            if !asks.iter().any(|(l, k, _)| (*l, *k) == (limit, key)) {
                asks.push((limit, key, [1, 1, 2, 3][random.usize(..4)]));
            }
        }
        match random.u8(..) {
            0..8 => self.proxy.swallow_matching("EVALSHA", 1),
            8..16 => self.proxy.cut_matching("EVALSHA", 1),
            16..20 => self.proxy.cut_all(),
            _ => {}
        }
        self.event(round, Op::Acquire, asks).await
    }

    async fn event(&self, round: usize, op: Op, asks: Vec<(usize, usize, u64)>) -> Option<Event> {
        let names: Vec<_> = (0..KEYS).map(|key| format!("{round}-{key}")).collect();
        let check = |(limit, key, cost): &(usize, usize, u64)| Check {
            limit: &self.limits[*limit],
            key: &names[*key],
            cost: *cost,
        };
        let checks: Vec<_> = asks.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(op);
        let asked = self.order.fetch_add(1, Ordering::SeqCst);
        let answer = match self.store.apply(&batch).await {
            Ok(verdict) => {
                let is_cached = verdict.source() == Source::Cache;
                self.cached.fetch_add(u64::from(is_cached), Ordering::Relaxed);
                Ok(verdict.decisions().to_vec())
            }
            Err(error) => match error.kind() {
                ErrorKind::Indeterminate => Err(ErrorKind::Indeterminate),
                ErrorKind::Unavailable => return None,
                kind => panic!("{kind:?}: {error}"),
            },
        };
        let clock = self.calendar.time_of(answer.as_deref().unwrap_or_default());
        let answered = self.order.fetch_add(1, Ordering::SeqCst);
        Some(Event { op, asks, id: None, asked, answered, clock: [clock; 2], answer })
    }

    /// What was charged, by the server, once the network works again.
    async fn charged(&self, round: usize, limit: usize, key: usize) -> (u64, Event) {
        self.proxy.heal();
        loop {
            let Some(event) = self.event(round, Op::Peek, vec![(limit, key, 0)]).await else {
                continue;
            };
            // A connection that was cut before may be noticed by this request.
            if let Ok(decisions) = &event.answer {
                let capacity = self.limits[limit].algorithm().capacity();
                return (capacity - decisions[0].remaining, event);
            }
        }
    }

    async fn round(self: &Arc<Self>, round: usize) -> Vec<Event> {
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let run = Arc::clone(self);
            let mut random = Rng::with_seed((round * TASKS + task) as u64);
            tasks.spawn(async move {
                let mut events = Vec::new();
                for _ in 0..REQUESTS {
                    events.extend(run.ask(round, &mut random).await);
                }
                events
            });
        }
        tasks.join_all().await.into_iter().flatten().collect()
    }

    /// Runs all rounds. Returns how many requests have no known outcome.
    async fn is_explained(self: &Arc<Self>) -> usize {
        let (mut unknown, mut undecided) = (0, 0);
        for round in 0..ROUNDS {
            let mut events = self.round(round).await;
            unknown += events.iter().filter(|event| event.answer.is_err()).count();
            for (limit, key) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let (charged, peek) = self.charged(round, limit, key).await;
                let due = charges(&events, (limit, key));
                assert!(due.contains(&charged), "{due:?}: {charged}");
                events.push(peek);
            }
            match History::at_their_times(&self.limits, events).explain() {
                // Where the outcomes of many are unknown, the search may run out of steps.
                Ok(decided) => undecided += usize::from(!decided),
                Err(unexplained) => panic!("round {round}: {unexplained}"),
            }
        }
        assert!(
            undecided < ROUNDS / 4,
            "{undecided} of {ROUNDS} rounds could not be explained in time"
        );
        unknown
    }
}

#[tokio::test]
async fn an_order_explains_all_answers_of_a_cache() {
    let server = RedisServer::start().expect("redis-server");
    for client in Client::ALL {
        let proxy = FaultProxy::start(server.port()).expect("a proxy");
        let url = format!("{}?client={client}", proxy.url());
        let redis = RedisStore::builder().prefix(client.name()).deadline(PATIENCE);
        let redis = redis.connect(&url).await.expect("it is up");
        let store = DenialCache::builder().max_age(Duration::MAX).build(redis);
        let run = Run::new(store, proxy);
        let unknown = run.is_explained().await;
        let cached = run.cached.load(Ordering::Relaxed);
        assert!(unknown > ROUNDS / 2 && cached > 20, "{client}: {unknown}, {cached}");
    }
}
