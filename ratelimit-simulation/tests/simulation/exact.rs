//! A few nodes without layers: some order explains every answer, field by field, whatever the
//! network does meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use fastrand::Rng;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, DynStore, ErrorKind, Limit, ReservationId, Store, StoreError, Timestamp,
};
use ratelimit_redis::{Cas, RedisStore};
use ratelimit_simulation::{BEGIN, Faults, ModelConnection, ModelServer, Network, may_repeat};
use ratelimit_testkit::{Event, History};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::{Counts, TICK, befall, chance, simulate};

const KEYS: [&str; 2] = ["hot", "other"];
const DEADLINE: Duration = Duration::from_millis(300);
/// By when a request without an answer has arrived, if it does.
const LATEST_US: u64 = 2_500_000;
/// Enough for nearly all histories.
const STEPS: usize = 4_000;

/// What a run is about.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    servers: usize,
    limits: [&'static str; 2],
    nodes: usize,
    tasks: usize,
    requests: usize,
    is_disturbed: bool,
    /// Whether nodes compare and set, and run no scripts that decide.
    compares: bool,
    /// Whether the server forgets some of what it wrote, as none should.
    forgets: bool,
}

const ALGORITHMS: [&str; 13] = [
    "gcra 10/s burst 4",
    "gcra 3/m burst 5",
    "gcra 2/s burst 3 debt 4",
    "token-bucket 7/s burst 3",
    "fixed-window 4/s",
    "fixed-window 8/h",
    "first-request-window 5/s",
    "sliding-counter 6/s",
    "sliding-log 5/s",
    "window-log 6/s",
    "bucketed-window bucket 100ms rates 3/300ms, 6/s",
    "concurrency 3/2s",
    "lockout 4/s block 2s factor 2 longest 5s forget 9s",
];

impl Plan {
    /// The same on servers that forget some of what they wrote.
    pub(crate) fn forgetting(self) -> Self {
        Self { forgets: true, ..self }
    }

    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut algorithm = || ALGORITHMS[random.usize(..ALGORITHMS.len())];
        let limits = [algorithm(), algorithm()];
        let (nodes, tasks) = (random.usize(1..4), random.usize(1..4));
        Self {
            seed,
            servers: [1, 1, 3][random.usize(..3)],
            limits,
            nodes,
            tasks,
            requests: random.usize(1..=18 / (nodes * tasks)),
            is_disturbed: !seed.is_multiple_of(3),
            compares: seed % 5 == 4,
            forgets: false,
        }
    }
}

struct World {
    plan: Plan,
    network: Arc<Network>,
    limits: Vec<Limit<AnyAlgorithm>>,
    order: AtomicU64,
}

/// Runs a plan.
///
/// # Errors
/// What is wrong with the answers.
pub(crate) fn run(plan: &Plan) -> Result<Counts, String> {
    simulate(plan.seed, begin(plan.clone()))
}

async fn begin(plan: Plan) -> Result<Counts, String> {
    let mut random = Rng::with_seed(plan.seed ^ 0x5eed);
    let begin_us = BEGIN.as_us() + random.u64(..3_000_000);
    let server = |_| {
        let server = ModelServer::new(begin_us, 0);
        server.set_command_us(7);
        if plan.forgets {
            server.forget_every(8);
        }
        server
    };
    let network = Network::new((0..plan.servers).map(server).collect(), random.u64(..));
    // Where nodes compare and set, callers of a key take turns, of several trips each, within the
    // deadline.
    let most_ms = if plan.compares { 12 } else { 40 };
    let way = Duration::from_millis(random.u64(..most_ms));
    let mut faults = Faults { way, ..Faults::default() };
    if plan.is_disturbed {
        let (refused, lost_request, lost_reply) = (50, 30, 30);
        let most =
            Faults { refused, lost_request, lost_reply, cut: 30, repeated: 100, late: 30, way };
        faults = most.drawn(&mut random);
    }
    network.set(faults);
    let named =
        |(name, text): (&str, &&str)| Limit::new(name, text.parse().expect(text)).expect("a name");
    let limits = ["a", "b"].into_iter().zip(&plan.limits).map(named).collect();
    let world = Arc::new(World { plan, network, limits, order: AtomicU64::new(0) });
    let mut tasks = JoinSet::new();
    for _ in 0..world.plan.nodes {
        let store = world.store();
        for _ in 0..world.plan.tasks {
            tasks.spawn(caller(world.clone(), store.clone(), Rng::with_seed(random.u64(..))));
        }
    }
    if world.plan.is_disturbed {
        tasks.spawn(disturb(world.clone(), Rng::with_seed(random.u64(..))));
    }
    let mut events = Vec::new();
    for told in tasks.join_all().await {
        events.extend(told?);
    }
    // What is late arrives, and then the servers tell what was charged.
    world.network.set(Faults::default());
    sleep(Duration::from_secs(3)).await;
    let store = world.store();
    for (limit, key) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        events.extend(
            world.ask(&*store, Op::Peek, vec![(limit, key, 1)], None, Duration::MAX).await?,
        );
    }
    world.explain(events)
}

impl World {
    /// The store of a node.
    fn store(&self) -> Arc<dyn DynStore<AnyAlgorithm>> {
        let connection = ModelConnection::new(&self.network);
        let store = RedisStore::builder().deadline(DEADLINE).over(connection).expect("a prefix");
        if self.plan.compares { Arc::new(store.in_mode::<Cas>()) } else { Arc::new(store) }
    }

    /// What the clock of a key's server shows.
    fn now(&self, key: usize) -> Timestamp {
        let server = self.network.server_of(&format!("{{{}}}", KEYS[key]));
        Timestamp::saturating_from_us(self.network.servers()[server].now_us())
    }

    /// What is recorded of a request, whose caller gives up after some time; nothing if it was
    /// certainly not charged.
    async fn ask(
        &self,
        store: &dyn DynStore<AnyAlgorithm>,
        op: Op,
        asks: Vec<(usize, usize, u64)>,
        id: Option<ReservationId>,
        patience: Duration,
    ) -> Result<Vec<Event>, String> {
        let is_repeated = Arc::new(AtomicBool::new(false));
        let limits = &self.limits;
        let check = |&(limit, key, cost)| Check { limit: &limits[limit], key: KEYS[key], cost };
        let checks: Vec<_> = asks.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(op);
        let batch = id.map_or(batch, |id| batch.id(id));
        let (begin, clock, asked) =
            (Instant::now(), self.now(asks[0].1), self.order.fetch_add(1, SeqCst));
        let asking = store.apply(&batch);
        let answer = timeout(patience, async {
            if id.is_some() { may_repeat(is_repeated.clone(), asking).await } else { asking.await }
        });
        let answer = match answer.await {
            Err(_) => Err(ErrorKind::Indeterminate),
            Ok(Ok(verdict)) => Ok(verdict.decisions().to_vec()),
            Ok(Err(error)) => {
                let kind = error.kind();
                if kind.is_outage() && !self.plan.is_disturbed {
                    return Err(format!("an error, though nothing failed: {error}"));
                }
                match kind {
                    ErrorKind::Contended if self.plan.nodes * self.plan.tasks > 1 => {
                        return Ok(Vec::new());
                    }
                    ErrorKind::Unavailable if !is_repeated.load(SeqCst) => return Ok(Vec::new()),
                    ErrorKind::Unavailable => Err(ErrorKind::Indeterminate),
                    ErrorKind::Indeterminate
                    | ErrorKind::Invalid
                    | ErrorKind::Ended
                    | ErrorKind::Unsupported => Err(kind),
                    _ => return Err(format!("{kind:?}: {error}")),
                }
            }
        };
        if begin.elapsed() > DEADLINE + TICK
            && patience > Duration::from_secs(1)
            && !matches!(op, Op::Peek)
        {
            return Err(format!("{op} took {:?}", begin.elapsed()));
        }
        let answered = self.order.fetch_add(1, SeqCst);
        let event = |answer| {
            let is_unknown = answer == Err(ErrorKind::Indeterminate);
            let until =
                if is_unknown { clock.saturating_add_us(LATEST_US) } else { self.now(asks[0].1) };
            Event { op, asks: asks.clone(), id, asked, answered, clock: [clock, until], answer }
        };
        // What is executed again is a request without an answer.
        let again = is_repeated.load(SeqCst).then(|| event(Err(ErrorKind::Indeterminate)));
        Ok([event(answer)].into_iter().chain(again).collect())
    }

    fn explain(&self, events: Vec<Event>) -> Result<Counts, String> {
        let mut counts = Counts::default();
        for event in &events {
            match &event.answer {
                Ok(decisions) => {
                    counts.add("decisions", 1);
                    counts.add("admitted", decisions.iter().all(|each| each.allowed).into());
                }
                Err(kind) => counts.add("unknown", (*kind == ErrorKind::Indeterminate).into()),
            }
        }
        let times = self.network.servers().iter().flat_map(ModelServer::times_us);
        // A request that the store refuses by itself is decided at a time at which no server
        // executes anything.
        let asked = events.iter().map(|event| event.clock[0]);
        let mut times: Vec<_> = times.map(Timestamp::saturating_from_us).chain(asked).collect();
        times.sort_unstable();
        times.dedup();
        match (History { limits: &self.limits, events, times }).explain_within(STEPS) {
            Ok(is_decided) => counts.add("undecided", (!is_decided).into()),
            Err(unexplained) => return Err(unexplained.to_string()),
        }
        Ok(counts)
    }
}

/// Sends requests, one after the other.
async fn caller(
    world: Arc<World>,
    store: Arc<dyn DynStore<AnyAlgorithm>>,
    mut random: Rng,
) -> Result<Vec<Event>, String> {
    let mut events = Vec::new();
    for _ in 0..world.plan.requests {
        let key = usize::from(chance(&mut random, 300));
        let id = ReservationId::new(1 + random.u128(..3));
        let (op, id) = match random.u64(..24) {
            0..2 => (Op::Peek, None),
            2..4 => (Op::Refund, chance(&mut random, 500).then_some(id)),
            4 => (Op::Force, chance(&mut random, 500).then_some(id)),
            5 => (Op::Reset, chance(&mut random, 500).then_some(id)),
            6..9 => (Op::Settle, Some(id)),
            9 => (Op::Extend, Some(id)),
            10 => (Op::Renew, Some(id)),
            11..15 => (Op::Acquire, Some(id)),
            _ => (Op::Acquire, None),
        };
        let limits = [vec![0], vec![1], vec![0, 1]];
        let cost = [0, 1, 1, 1, 2, 3, 20][random.usize(..7)];
        let asks = limits[random.usize(..3)].iter().map(|limit| (*limit, key, cost)).collect();
        let patience = if chance(&mut random, 80) && world.plan.is_disturbed {
            Duration::from_millis(random.u64(..60))
        } else {
            Duration::from_secs(60)
        };
        events.extend(world.ask(&*store, op, asks, id, patience).await?);
        if chance(&mut random, 600) {
            sleep(Duration::from_millis(random.u64(..400))).await;
        }
    }
    Ok(events)
}

/// What befalls servers without a loss of data.
async fn disturb(world: Arc<World>, mut random: Rng) -> Result<Vec<Event>, String> {
    for _ in 0..3 {
        sleep(Duration::from_millis(random.u64(..600))).await;
        befall(&world.network, random.usize(..world.plan.servers), &mut random).await;
    }
    Ok(Vec::new())
}
