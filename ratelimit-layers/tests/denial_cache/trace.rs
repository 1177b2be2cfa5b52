//! One trace by a store that merges, by one that does not, through a cache, and in memory: the same decisions, field by field.
//!
//! The requests of a burst come while none of them has been answered. A store on Redis decides those of one key in the
//! order in which they came, as memory does. It decides by the server's clock: each request also charges a fixed window of
//! about a month, whose `reset_after` tells the time of the decision, and memory decides at that time.
//!
//! An answer of the cache may be from before other requests of its burst: an order of all requests explains it.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use ratelimit_core::{
    Batch, Check, Decision, Limit, ManualClock, Op, Policy, Source, Store, SyncStore, Timestamp,
    Verdict,
};
use ratelimit_layers::DenialCache;
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{Client, RedisStore};
use ratelimit_testkit::{Calendar, Event, History, RedisServer};
use tokio::task::JoinSet;

use crate::limit;

/// Keys are new in each round: the checker, which keeps at most 128 requests, has to know all charges.
const ROUNDS: usize = 6;
const KEYS: usize = 3;
const REQUESTS: usize = 100;
/// A round is repeated for new keys until the server knows all of its scripts.
const MOST_REPETITIONS: usize = 20;
/// The position of the limit that tells the time.
const CALENDAR: usize = 0;

/// A request: a key, and positions of limits with costs.
#[derive(Clone, Debug)]
struct Ask {
    key: usize,
    costs: Vec<(usize, u64)>,
}

/// The limits of the trace, none of which refills while a test runs.
struct Limits {
    limits: Vec<Limit<Policy>>,
    calendar: Calendar,
}

impl Limits {
    fn new() -> Self {
        let calendar = Calendar::now();
        let fixed = |name, count| limit(name, &format!("fixed-window {}", calendar.rate(count)));
        let limits = vec![
            fixed("calendar", 1_000_000),
            fixed("fixed", 11),
            limit("gcra", "gcra 9/30d burst 9"),
            limit("bucket", "token-bucket 7/30d burst 7"),
            limit("first", "first-request-window 8/30d"),
            limit("counter", &format!("sliding-counter {}", calendar.rate(10))),
        ];
        Self { limits, calendar }
    }

    fn checks<'c>(&'c self, ask: &Ask, key: &'c str) -> Vec<Check<'c, Policy>> {
        let check =
            |(place, cost): &(usize, u64)| Check { limit: &self.limits[*place], key, cost: *cost };
        ask.costs.iter().map(check).collect()
    }

    /// When this was decided.
    fn time_of(&self, decisions: &[Decision]) -> Timestamp {
        assert!(decisions[CALENDAR].reset_after_us > 0, "the window was charged at first");
        self.calendar.time_of(&decisions[CALENDAR..=CALENDAR])
    }
}

/// The bursts of a round. At first each key is charged by itself, so that the first limit tells the time of each
/// later decision, also of a denial.
fn bursts(random: &mut Rng) -> Vec<Vec<Ask>> {
    let mut bursts: Vec<_> =
        (0..KEYS).map(|key| vec![Ask { key, costs: vec![(CALENDAR, 1)] }]).collect();
    let mut left = REQUESTS - KEYS;
    while left > 0 {
        let size = [1, 1, 2, 5, 12][random.usize(..5)].min(left);
        left -= size;
        bursts.push((0..size).map(|_| ask(random, size == 1)).collect());
    }
    bursts
}

fn ask(random: &mut Rng, is_alone: bool) -> Ask {
    let mut costs = vec![(CALENDAR, 1)];
    for _ in 0..random.usize(..4) {
        let place = random.usize(1..6);
        if costs.iter().all(|(other, _)| *other != place) {
            costs.push((place, random.u64(..4)));
        }
    }
    // A cost above the capacity goes alone, also when others wait.
    if is_alone && random.u8(..) < 20 {
        let place = random.usize(..costs.len());
        costs[place].1 = 2_000_000;
    }
    Ask { key: random.usize(..KEYS), costs }
}

/// What a store decided about a burst. The runtime has one thread, so that requests come in their order.
async fn burst<S>(
    store: &S,
    limits: &'static Limits,
    names: &[String],
    asks: &[Ask],
) -> Vec<Verdict>
where
    S: Store<Policy> + Clone + 'static,
{
    let mut tasks = JoinSet::new();
    for (place, ask) in asks.iter().enumerate() {
        let (store, ask, name) = (store.clone(), ask.clone(), names[ask.key].clone());
        tasks.spawn(async move {
            let checks = limits.checks(&ask, &name);
            let verdict = store.apply(&Batch::new(&checks).expect("distinct")).await;
            (place, verdict.unwrap_or_else(|error| panic!("{ask:?}: {error}")))
        });
    }
    let mut verdicts = tasks.join_all().await;
    verdicts.sort_unstable_by_key(|(place, _)| *place);
    verdicts.into_iter().map(|(_, verdict)| verdict).collect()
}

/// The events of a round, as the checker knows them.
struct Recorded(Vec<Event>);

impl Recorded {
    fn add(&mut self, limits: &Limits, asks: &[Ask], verdicts: &[Verdict]) {
        let before = u64::try_from(2 * self.0.len()).expect("few");
        let all = u64::try_from(asks.len()).expect("few");
        for ((ask, verdict), number) in asks.iter().zip(verdicts).zip(0..) {
            self.0.push(Event {
                op: Op::Acquire,
                asks: ask.costs.iter().map(|(limit, cost)| (*limit, ask.key, *cost)).collect(),
                id: None,
                // All are asked before the first is answered.
                asked: before + number,
                answered: before + all + number,
                clock: [limits.time_of(verdict.decisions()); 2],
                answer: Ok(verdict.decisions().to_vec()),
            });
        }
    }

    fn explain(self, limits: &Limits) -> Result<(), String> {
        match History::at_their_times(&limits.limits, self.0).explain() {
            Ok(true) => Ok(()),
            Ok(false) => Err("the search ran out of steps".into()),
            Err(unexplained) => Err(unexplained.to_string()),
        }
    }
}

/// Memory that decides at the times of another store.
struct Memory(MemoryStore<Policy, ManualClock>, ManualClock);

impl Memory {
    fn new() -> Self {
        let clock = ManualClock::default();
        Self(MemoryStore::builder().clock(clock.clone()).build(), clock)
    }

    /// Compares the store's decisions with those of memory, in the order in which the requests came, and returns the first
    /// that differ. Those of the cache are compared by what they decide.
    fn compare(
        &self,
        limits: &Limits,
        names: &[String],
        asks: &[Ask],
        got: &[Verdict],
    ) -> Result<(), String> {
        let mut same = Ok(());
        for (ask, got) in asks.iter().zip(got) {
            self.1.set(limits.time_of(got.decisions()));
            let checks = limits.checks(ask, &names[ask.key]);
            let due = self.0.apply_now(&Batch::new(&checks).expect("distinct")).expect("decides");
            let is_same = match got.source() {
                Source::Cache => !got.allowed() && !due.allowed(),
                _ => got.decisions() == due.decisions(),
            };
            if !is_same && same.is_ok() {
                same = Err(format!("{ask:?}: {:?} for {:?}", got.decisions(), due.decisions()));
            }
        }
        same
    }
}

/// The decisions without what depends on their time: of each wait, whether there is one.
fn told(verdicts: &[Verdict]) -> Vec<Decision> {
    let told = |decision: &Decision| Decision {
        retry_after_us: decision.retry_after_us.map(|us| us.min(1)),
        replenish_after_us: decision.replenish_after_us.min(1),
        reset_after_us: decision.reset_after_us.min(1),
        ..*decision
    };
    verdicts.iter().flat_map(Verdict::decisions).map(told).collect()
}

fn limits() -> &'static Limits {
    Box::leak(Box::new(Limits::new()))
}

type Cached = Arc<DenialCache<RedisStore, Policy>>;

/// The stores on Redis, each with keys of its own.
struct Stores {
    plain: RedisStore,
    merged: RedisStore,
    cached: Cached,
}

impl Stores {
    async fn new(server: &RedisServer, client: Client) -> Self {
        Self {
            plain: connect(server, client, "plain", "off").await,
            merged: connect(server, client, "merged", "on").await,
            cached: Arc::new(
                DenialCache::builder()
                    .max_age(Duration::MAX)
                    .build(connect(server, client, "cached", "on").await),
            ),
        }
    }

    /// What each of them decided about each burst.
    async fn decide(
        &self,
        limits: &'static Limits,
        names: &[String],
        bursts: &[Vec<Ask>],
    ) -> Vec<[Vec<Verdict>; 3]> {
        let mut decided = Vec::new();
        for asks in bursts {
            decided.push([
                burst(&self.plain, limits, names, asks).await,
                burst(&self.merged, limits, names, asks).await,
                burst(&self.cached, limits, names, asks).await,
            ]);
        }
        decided
    }
}

async fn connect(server: &RedisServer, client: Client, name: &str, merge: &str) -> RedisStore {
    let url = format!("{}?client={client}&merge={merge}", server.url());
    let builder = RedisStore::builder().prefix(&format!("{client}-{name}"));
    builder.deadline(Duration::from_secs(20)).connect(&url).await.expect("it is up")
}

#[tokio::test]
async fn a_trace_has_the_same_decisions_merged_plain_cached_and_in_memory() {
    let server = RedisServer::start().expect("redis-server");
    let limits = limits();
    for client in Client::ALL {
        let stores = Stores::new(&server, *client).await;
        for round in 0..ROUNDS {
            let bursts = bursts(&mut Rng::with_seed(round as u64));
            // A script that the server does not know is sent once more, by its text, and later than requests that came
            // after it. So a round counts only if the server knew all of its scripts.
            let repeated = (0..MOST_REPETITIONS).map(|attempt| {
                (0..KEYS).map(|key| format!("{round}-{attempt}-{key}")).collect::<Vec<_>>()
            });
            let mut counted = None;
            for names in repeated {
                let before = server.calls("eval").expect("it is up");
                let decided = stores.decide(limits, &names, &bursts).await;
                if server.calls("eval").expect("it is up") == before {
                    counted = Some((names, decided));
                    break;
                }
            }
            let (names, decided) = counted.expect("the server knows the scripts by now");
            let memories = [Memory::new(), Memory::new(), Memory::new()];
            let mut recorded = Recorded(Vec::new());
            for (asks, decided) in bursts.iter().zip(&decided) {
                for (got, memory) in decided.iter().zip(&memories) {
                    let same = memory.compare(limits, &names, asks, got);
                    assert_eq!(same, Ok(()), "{client}, round {round}");
                }
                let [plain, merged, cached] = decided;
                assert_eq!(told(plain), told(merged), "{client}, round {round}");
                let allowed =
                    |all: &[Verdict]| all.iter().map(Verdict::allowed).collect::<Vec<_>>();
                assert_eq!(allowed(plain), allowed(cached), "{client}, round {round}");
                recorded.add(limits, asks, cached);
            }
            assert_eq!(recorded.explain(limits), Ok(()), "{client}, round {round}");
        }
        let counts = stores.cached.counts();
        assert!(counts.answered > 20 && counts.asked > 100, "{counts:?}");
    }
}

/// Each way to be wrong is found: two requests of a burst that have each other's answer, a charge that is lost, and one too
/// many.
#[tokio::test]
async fn a_shifted_answer_and_a_charge_more_or_less_are_caught() {
    let server = RedisServer::start().expect("redis-server");
    let limits = limits();
    let store = connect(&server, Client::ALL[0], "merged", "on").await;
    let names = ["alice", "bob"].map(str::to_owned);
    let ask = |key| Ask { key, costs: vec![(CALENDAR, 1), (1, 1)] };
    let (memories, mut recorded) = ([(); 4].map(|()| Memory::new()), Recorded(Vec::new()));
    let mut wrong = Vec::new();
    for (key, size) in [(0, 1), (0, 4), (0, 1)] {
        let asks = vec![ask(key); size];
        let got = burst(&store, limits, &names, &asks).await;
        let mut shifted = got.clone();
        shifted.rotate_left(1);
        let (lost, more) = (&asks[1..], [&asks[..], &asks[..1]].concat());
        let is_burst = size > 1;
        assert_eq!(memories[0].compare(limits, &names, &asks, &got), Ok(()));
        let others = [
            memories[1].compare(limits, &names, &asks, &shifted),
            memories[2].compare(
                limits,
                &names,
                if is_burst { lost } else { &asks },
                if is_burst { &got[1..] } else { &got },
            ),
            memories[3].compare(
                limits,
                &names,
                if is_burst { &more } else { &asks },
                &if is_burst { [&got[..], &got[..1]].concat() } else { got.clone() },
            ),
        ];
        wrong.push(others.map(|same| same.is_err()));
        recorded.add(limits, &asks, if is_burst { &shifted } else { &got });
    }
    assert_eq!(wrong, [[false; 3], [true; 3], [false, true, true]]);
    // Requests of a burst have no order of their own.
    assert_eq!(recorded.explain(limits), Ok(()));
    let mut lost = Recorded(Vec::new());
    for _ in 0..2 {
        let asks = vec![ask(1)];
        lost.add(limits, &asks, &burst(&store, limits, &names, &asks).await);
    }
    lost.0[1].answer = lost.0[0].answer.clone();
    assert!(lost.explain(limits).is_err());
}
