//! Whole services: flights, a denial cache, allotments, a fallback, waiters and HTTP layers on
//! every node, up to hundreds of nodes. What the limits promise of all of them together holds in
//! every interval, and all is well again after the faults.

mod check;
mod node;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use ratelimit_core::{AnyAlgorithm, Limits, OnOutage, ReservationId, Timestamp};
use ratelimit_simulation::{BEGIN, Faults, ModelServer, Network};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{Counts, simulate};
use node::{Record, Recorded, disturb, node};

const DEADLINE: Duration = Duration::from_millis(300);
const FALLBACK_DEADLINE: Duration = Duration::from_millis(500);
const MAX_WAIT: Duration = Duration::from_millis(50);
/// All callers share this identifier.
const TENANT: &str = "tenant";

/// What a run is about.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a choice by itself")]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    servers: usize,
    nodes: usize,
    callers: usize,
    users: usize,
    run: Duration,
    /// A limit per user, and one that all share.
    limits: [&'static str; 2],
    on_outage: OnOutage,
    has_fallback: bool,
    charges_on_recovery: bool,
    /// The lifetime of allotments, if there are any.
    lifetime_us: Option<u64>,
    has_cache: bool,
    is_disturbed: bool,
    /// Whether every caller waits for its answer, and none resets.
    is_quiet: bool,
    /// Whether the server forgets some of what it wrote, as none should.
    forgets: bool,
}

const PER_USER: [&str; 7] = [
    "gcra 20/s burst 12",
    "token-bucket 30/s burst 40",
    "gcra 60/m burst 16",
    "fixed-window 30/s",
    "fixed-window 64/h",
    "sliding-counter 20/s",
    "sliding-log 16/s",
];
const SHARED: [&str; 4] = [
    "gcra 200/s burst 100",
    "fixed-window 300/s",
    "token-bucket 100/s burst 64",
    "fixed-window 5000/h",
];

impl Plan {
    /// The same on servers that forget some of what they wrote.
    pub(crate) fn forgetting(self) -> Self {
        Self { forgets: true, ..self }
    }

    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let is_large = seed % 100 == 99;
        let has_fallback = random.bool();
        let lifetime_us = random.bool().then(|| random.u64(20..400) * 1_000);
        Self {
            seed,
            servers: [1, 1, 3][random.usize(..3)],
            nodes: if is_large { random.usize(100..300) } else { random.usize(1..6) },
            callers: random.usize(1..4),
            users: random.usize(1..8),
            run: Duration::from_millis(if is_large { 400 } else { random.u64(500..1_200) }),
            limits: [
                PER_USER[random.usize(..PER_USER.len())],
                SHARED[random.usize(..SHARED.len())],
            ],
            on_outage: [OnOutage::Open, OnOutage::Closed, OnOutage::Local, OnOutage::Local]
                [random.usize(..4)],
            has_fallback,
            charges_on_recovery: random.bool(),
            lifetime_us,
            has_cache: random.bool(),
            is_disturbed: !seed.is_multiple_of(3),
            is_quiet: seed.is_multiple_of(6),
            forgets: false,
        }
    }

    /// Of hundreds of nodes a share would admit nothing.
    fn on_outage(&self) -> OnOutage {
        if self.nodes > 8 { OnOutage::Closed } else { self.on_outage }
    }

    fn limits(&self) -> Limits<AnyAlgorithm> {
        let [user, shared] = self.limits;
        let on_outage = self.on_outage();
        let limits = Limits::builder().limit("user", user).by(["user"]).on_outage(on_outage);
        limits.limit("shared", shared).by(["tenant"]).on_outage(on_outage).build().expect("limits")
    }

    /// How long a request may take.
    fn patience(&self) -> Duration {
        // A draw that comes to nothing leaves its request to the store.
        let asks = if self.lifetime_us.is_some() { 2 } else { 1 };
        let store = DEADLINE * asks + MAX_WAIT;
        if self.has_fallback { store.min(FALLBACK_DEADLINE) } else { store }
    }
}

/// What all nodes share.
struct World {
    plan: Plan,
    network: Arc<Network>,
    records: Mutex<Vec<Record>>,
    /// What reservations were settled at, if the settlements arrived.
    settled: Mutex<BTreeMap<ReservationId, u64>>,
    /// The key of each reset, and when it may have arrived by the clock of the key's server.
    resets: Mutex<Vec<(String, [Timestamp; 2])>>,
    /// When servers lost what they knew: which server, and from when to when by its clock.
    losses: Mutex<Vec<(usize, [Timestamp; 2])>>,
    broken: Mutex<Option<String>>,
    /// The nodes that have not crashed, which give back what they drew in advance.
    alive: Mutex<Vec<Recorded>>,
    /// How many nodes have started. One that starts again has forgotten what it admitted by itself.
    started: AtomicU64,
    /// What services did because a request was admitted.
    served: AtomicU64,
    end: Instant,
}

/// Runs a plan.
///
/// # Errors
/// What does not hold.
pub(crate) fn run(plan: &Plan) -> Result<Counts, String> {
    simulate(plan.seed, begin(plan.clone()))
}

async fn begin(plan: Plan) -> Result<Counts, String> {
    let mut random = Rng::with_seed(plan.seed ^ 0x5eed);
    let begin_us = BEGIN.as_us() + random.u64(..3_000_000);
    let servers = (0..plan.servers).map(|_| {
        let server = ModelServer::new(begin_us + random.u64(..5_000_000), random.i64(-200..200));
        server.set_command_us(7);
        if plan.forgets {
            server.forget_every(3);
        }
        server
    });
    let network = Network::new(servers.collect(), plan.seed);
    let way = Duration::from_millis(random.u64(1..20));
    let mut faults = Faults { way, ..Faults::default() };
    if plan.is_disturbed {
        let (refused, lost_request, lost_reply) = (60, 60, 60);
        let most =
            Faults { refused, lost_request, lost_reply, cut: 60, repeated: 0, late: 30, way };
        faults = most.drawn(&mut random);
    }
    network.set(faults);
    let end = Instant::now() + plan.run;
    let world = Arc::new(World {
        plan,
        network,
        records: Mutex::default(),
        settled: Mutex::default(),
        resets: Mutex::default(),
        losses: Mutex::default(),
        broken: Mutex::default(),
        alive: Mutex::default(),
        started: AtomicU64::new(0),
        served: AtomicU64::new(0),
        end,
    });
    let mut tasks = JoinSet::new();
    for _ in 0..world.plan.nodes {
        tasks.spawn(node(world.clone(), Rng::with_seed(random.u64(..))));
    }
    if world.plan.is_disturbed {
        tasks.spawn(disturb(world.clone(), Rng::with_seed(random.u64(..))));
    }
    tasks.join_all().await;
    world.is_well_again().await;
    let counts = world.check();
    let broken = world.broken.lock().expect("no panic").take();
    broken.map_or(counts, Err)
}

impl World {
    fn breaks(&self, what: String) {
        self.broken.lock().expect("no panic").get_or_insert(what);
    }

    /// Whether faults may show.
    fn is_disturbed(&self) -> bool {
        self.plan.is_disturbed && Instant::now() < self.end + Duration::from_secs(4)
    }

    fn server_us(&self, key: &str) -> Timestamp {
        let server = self.network.server_of(&format!("{{{key}}}"));
        Timestamp::saturating_from_us(self.network.servers()[server].now_us())
    }
}

fn caller(user: usize) -> [(&'static str, String); 2] {
    [("user", format!("u{user}")), ("tenant", TENANT.to_owned())]
}
