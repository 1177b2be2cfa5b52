//! One run: a plan, its nodes, and what they do.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{AnyAlgorithm, Clock, Limit, Source, Store, SyncStore, Timestamp};
use ratelimit_layers::Allotments;
use ratelimit_memory::MemoryStore;
use ratelimit_simulation::SimulatedClock;
use ratelimit_testkit::limit_in_words as limit;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::check::Outcome;
use super::network::{DECIDED, Faults, Network, Server};
use crate::simulate;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Gcra,
    TokenBucket,
    FixedWindow,
    /// A bucket and a window in one batch.
    Both,
}

/// What a run is about.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) kind: Kind,
    pub(super) nodes: usize,
    /// How many a second the limit admits.
    pub(super) rate: u64,
    pub(super) lifetime_us: u64,
    pub(super) faults: Faults,
    /// The chance of a node to crash in a pause, per thousand.
    pub(super) crash: u64,
    /// The chance of a caller to go away, per thousand.
    pub(super) goes_away: u64,
    pub(super) divisor: u64,
}

const RUN: Duration = Duration::from_secs(6);
const KEY: &str = "shared";
/// The clocks of nodes drift by up to this.
const DRIFT_PPM: i64 = 1_000;
/// Calm and busy times alternate, out of step with the windows: what was drawn in a calm one is
/// spent in a busy one.
const PHASE: Duration = Duration::from_millis(1_700);

impl Plan {
    /// The plan of a seed: its kind and whether there are faults by its number, the rest at random.
    pub(super) fn from_seed(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let kinds = [Kind::Gcra, Kind::FixedWindow, Kind::TokenBucket, Kind::Both];
        let kind = kinds[usize::try_from(seed % 4).expect("small")];
        let is_disturbed = seed / 4 % 2 == 1;
        let mut chance = |most: u64| if is_disturbed { random.u64(0..=most) } else { 0 };
        let faults = Faults {
            lost_request: chance(60),
            lost_reply: chance(60),
            unsent: chance(30),
            way_ms: 0,
        };
        let (crash, goes_away) = (chance(20), chance(60));
        let nodes = random.usize(100..300);
        // From less than what the nodes ask for to more than that.
        let rate = nodes as u64 * random.u64(20..70);
        Self {
            seed,
            kind,
            nodes,
            rate,
            lifetime_us: random.u64(50..1_000) * 1_000,
            faults: Faults { way_ms: random.u64(1..40), ..faults },
            crash,
            goes_away,
            divisor: random.u64(1..12),
        }
    }

    pub(super) fn limits(&self) -> Vec<Limit<AnyAlgorithm>> {
        let Self { rate, .. } = self;
        let burst = rate / 2 + 1;
        let (bucket, window) =
            (format!("gcra {rate}/s burst {burst}"), format!("fixed-window {}/2s", 2 * rate));
        match self.kind {
            Kind::Gcra => vec![limit("bucket", &bucket)],
            Kind::TokenBucket => {
                vec![limit("bucket", &format!("token-bucket {rate}/s burst {burst}"))]
            }
            Kind::FixedWindow => vec![limit("window", &window)],
            Kind::Both => vec![limit("bucket", &bucket), limit("window", &window)],
        }
    }

    pub(super) const fn is_disturbed(&self) -> bool {
        let Faults { lost_request, lost_reply, unsent, .. } = self.faults;
        lost_request + lost_reply + unsent + self.crash + self.goes_away > 0
    }
}

type Nodes = Allotments<Network, AnyAlgorithm, SimulatedClock>;

/// What all nodes share.
struct World {
    plan: Plan,
    limits: Vec<Limit<AnyAlgorithm>>,
    server: Arc<Server>,
    /// What the nodes have done so far.
    outcome: Mutex<Outcome>,
    end: Instant,
}

/// Runs a plan.
pub(super) fn run(plan: &Plan) -> Outcome {
    simulate(plan.seed, fleet(plan.clone()))
}

async fn fleet(plan: Plan) -> Outcome {
    let base = Instant::now();
    let clock = SimulatedClock { base, offset_us: 0, drift_ppm: 0 };
    let random = Mutex::new(fastrand::Rng::with_seed(plan.seed ^ 0x5eed));
    let server = Arc::new(Server {
        store: MemoryStore::builder().shards(4).clock(clock).build(),
        clock,
        random,
        faults: plan.faults,
    });
    let world = Arc::new(World {
        limits: plan.limits(),
        server: server.clone(),
        outcome: Mutex::new(Outcome::new(plan.clone())),
        end: base + RUN,
        plan,
    });
    let mut nodes = JoinSet::new();
    for _ in 0..world.plan.nodes {
        nodes.spawn(node(world.clone()));
    }
    let nodes = nodes.join_all().await;
    // A lifetime, the delay of a task, and a trip later all that was not used is back.
    let back = 2 * Duration::from_millis(world.plan.faults.way_ms + 1);
    sleep(Duration::from_micros(world.plan.lifetime_us) + back).await;
    let left = |limit| {
        let check = Check { limit, key: KEY, cost: 0 };
        let peek = server.store.apply_now(&Batch::one(&check).op(Op::Peek));
        peek.expect("decides").remaining()
    };
    let left = world.limits.iter().map(left).collect();
    let (end, mut late) = (clock.now(), 0);
    for node in &nodes {
        let before = node.counts();
        node.give_back().await;
        let after = node.counts();
        late += after.given_back + after.forfeited - before.given_back - before.forfeited;
    }
    let world = Arc::into_inner(world).expect("all have ended");
    Outcome { left, end, late, ..world.outcome.into_inner().expect("no panic") }
}

/// A node that crashes and starts again until the run ends. Returns the last one.
async fn node(world: Arc<World>) -> Nodes {
    let (plan, server) = (&world.plan, &world.server);
    loop {
        let (offset_us, drift_ppm) = {
            let mut random = server.random.lock().expect("no panic");
            (random.u64(..3_600_000_000), random.i64(-DRIFT_PPM..=DRIFT_PPM))
        };
        let clock = SimulatedClock { base: server.clock.base, offset_us, drift_ppm };
        let is_up = Arc::new(AtomicBool::new(true));
        let network = Network { server: server.clone(), is_up: is_up.clone() };
        let store = Allotments::builder()
            .lifetime(Duration::from_micros(plan.lifetime_us))
            .divisor(plan.divisor)
            .clock(clock)
            .build(network);
        let mut callers = JoinSet::new();
        for _ in 0..2 {
            callers.spawn(caller(world.clone(), store.clone()));
        }
        let mut crashes = false;
        while Instant::now() < world.end && !crashes {
            sleep(Duration::from_millis(100)).await;
            crashes = server.happens(plan.crash);
        }
        if crashes {
            // What is in flight arrives, and nothing more is sent.
            is_up.store(false, Ordering::SeqCst);
            callers.shutdown().await;
        } else {
            while callers.join_next().await.is_some() {}
        }
        let counts = store.counts();
        {
            let mut all = world.outcome.lock().expect("no panic");
            all.served += counts.served;
            all.asked += counts.asked;
        }
        if !crashes {
            return store;
        }
        sleep(server.up_to_ms(200)).await;
    }
}

/// Sends requests, in bursts with pauses, until the run ends.
async fn caller(world: Arc<World>, store: Nodes) {
    let (plan, server) = (&world.plan, &world.server);
    while Instant::now() < world.end {
        let (burst, pause_ms, cost, gap_ms) = {
            let mut random = server.random.lock().expect("no panic");
            let is_busy = server.clock.base.elapsed().as_millis() / PHASE.as_millis() % 2 == 1;
            let pause_ms = random.u64(0..if is_busy { 200 } else { 4_000 });
            (random.u64(1..20), pause_ms, random.u64(1..4), random.u64(0..30))
        };
        for _ in 0..burst {
            let check = |limit| Check { limit, key: KEY, cost };
            let checks: Vec<_> = world.limits.iter().map(check).collect();
            let batch = Batch::new(&checks).expect("distinct");
            let asked = DECIDED.scope(Cell::new(Timestamp::ZERO), async {
                let said = store.apply(&batch).await;
                (said, DECIDED.with(Cell::get))
            });
            let patience = if server.happens(plan.goes_away) {
                server.up_to_ms(2 * plan.faults.way_ms)
            } else {
                Duration::from_secs(60)
            };
            if let Ok((Ok(verdict), decided)) = timeout(patience, asked).await
                && verdict.allowed()
            {
                let is_served = verdict.source() == Source::Allotment;
                let at = if is_served { server.clock.now() } else { decided };
                world.outcome.lock().expect("no panic").admitted.push((at, cost));
            }
            sleep(Duration::from_millis(gap_ms)).await;
        }
        sleep(Duration::from_millis(pause_ms)).await;
    }
}
