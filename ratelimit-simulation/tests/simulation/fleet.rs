//! Whole services: flights, a denial cache, allotments, a fallback, waiters and HTTP layers on every node, up to hundreds of
//! nodes. What the limits promise of all of them together holds in every interval, and all is well again after the faults.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::num::NonZeroU64;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::{HeaderName, Request, Response, StatusCode};
use ratelimit_core::algorithm::Share;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    Algorithm, Clock, ErrorKind, Gcra, Limits, OnOutage, Policy, RateLimiter, Refusal,
    ReservationId, Source, Store, StoreError, Timestamp, TokenBucket, Verdict,
};
use ratelimit_layers::{Allotments, DenialCache, Fallback, FallbackError, OnRecovery};
use ratelimit_redis::{Lua, RedisError, RedisStore};
use ratelimit_simulation::{Faults, ModelConnection, ModelServer, Network};
use ratelimit_testkit::Admissions;
use ratelimit_tower::{RateLimitLayer, Waiter, header};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt};

use crate::{BEGIN_US, TICK, chance, paused};

const DEADLINE: Duration = Duration::from_millis(300);
const FALLBACK_DEADLINE: Duration = Duration::from_millis(500);
const PROBE_AFTER: Duration = Duration::from_millis(200);
const MAX_WAIT: Duration = Duration::from_millis(50);
const USER: HeaderName = HeaderName::from_static("x-user");
/// All callers share this identifier.
const TENANT: &str = "tenant";

/// What a run is about.
#[derive(Clone, Debug)]
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
    pub(crate) lifetime_us: Option<u64>,
    has_cache: bool,
    is_disturbed: bool,
    /// Whether every caller waits for its answer, and none resets.
    is_quiet: bool,
    /// How much longer allotments live than they say.
    pub(crate) excess_lifetime: u64,
    /// Whether the server forgets some of what it wrote, as none should.
    pub(crate) forgets: bool,
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
    pub(crate) fn of(seed: u64) -> Self {
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
            run: Duration::from_millis(if is_large { 400 } else { random.u64(500..1_500) }),
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
            is_disturbed: seed % 3 > 0,
            is_quiet: seed % 6 == 0,
            excess_lifetime: 1,
            forgets: false,
        }
    }

    /// Of hundreds of nodes a share would admit nothing.
    fn on_outage(&self) -> OnOutage {
        if self.nodes > 8 { OnOutage::Closed } else { self.on_outage }
    }

    fn limits(&self) -> Limits<Policy> {
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

/// A node's clock over tokio's time, which is off and drifts.
#[derive(Clone, Copy, Debug)]
struct NodeClock {
    base: Instant,
    offset_us: u64,
    drift_ppm: i64,
}

impl Clock for NodeClock {
    fn now(&self) -> Timestamp {
        let passed_us = i128::try_from(self.base.elapsed().as_micros()).expect("a short run");
        let drifted = passed_us * i128::from(1_000_000 + self.drift_ppm) / 1_000_000;
        Timestamp::saturating_from_us(self.offset_us + u64::try_from(drifted).expect("positive"))
    }
}

type Redis = RedisStore<Lua, ModelConnection>;
type Saving = Allotments<DenialCache<Redis, Policy, NodeClock>, Policy, NodeClock>;

/// The store of a node, with the layers that it has.
#[derive(Clone)]
enum Layers {
    Saving(Saving),
    Fallback(Fallback<Saving, Policy, NodeClock>),
}

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum NodeError {
    Redis(#[from] RedisError),
    Fallback(#[from] FallbackError<RedisError>),
}

impl From<Refusal> for NodeError {
    fn from(refusal: Refusal) -> Self {
        RedisError::from(refusal).into()
    }
}

impl StoreError for NodeError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Redis(error) => error.kind(),
            Self::Fallback(error) => error.kind(),
        }
    }
}

/// What a request asked of a limit for a key, when, by the clock of the key's server and by that of the node, and what came of it.
struct Record {
    node: u64,
    op: Op,
    asked: Vec<(&'static str, String, u64)>,
    id: Option<ReservationId>,
    server_us: Vec<[Timestamp; 2]>,
    node_us: [Timestamp; 2],
    answer: Result<Verdict, ErrorKind>,
}

/// The store of a node, whose answers are recorded.
#[derive(Clone)]
struct Recorded {
    node: u64,
    layers: Layers,
    clock: NodeClock,
    world: Arc<World>,
}

impl Store<Policy> for Recorded {
    type Error = NodeError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, NodeError> {
        let world = &self.world;
        let server_us = || -> Vec<_> {
            batch.checks().iter().map(|check| world.server_us(check.key)).collect()
        };
        let (begin, node_before, before) = (Instant::now(), self.clock.now(), server_us());
        let mut resets = Vec::new();
        match (batch.operation(), batch.reservation_id()) {
            // Whether the answer comes or not.
            (Op::Settle, Some(id)) => {
                let cost = batch.checks()[0].cost;
                world.settled.lock().expect("no panic").insert(id, cost);
            }
            (Op::Reset, _) => {
                let mut all = world.resets.lock().expect("no panic");
                for (check, begin) in batch.checks().iter().zip(&before) {
                    resets.push(all.len());
                    all.push((check.key.to_owned(), [*begin, Timestamp::MAX]));
                }
            }
            _ => {}
        }
        let answer = match &self.layers {
            Layers::Saving(store) => store.apply(batch).await.map_err(NodeError::from),
            Layers::Fallback(store) => store.apply(batch).await.map_err(NodeError::from),
        };
        let took = begin.elapsed();
        if took > world.plan.patience() + 2 * TICK {
            world.breaks(format!("{} took {took:?}", batch.operation()));
        }
        if let Err(error) = &answer {
            let kind = error.kind();
            // Some limits have no reservations.
            let is_due = match kind {
                ErrorKind::Unavailable | ErrorKind::Indeterminate => world.is_disturbed(),
                ErrorKind::Unsupported | ErrorKind::Invalid => batch.reservation_id().is_some(),
                // Between two slots, others may charge what was still left a moment ago, again and again.
                ErrorKind::Contended => world.plan.servers > 1,
                _ => false,
            };
            if !is_due {
                world.breaks(format!("{} failed: {kind:?}: {error}", batch.operation()));
            }
        }
        if answer.is_ok() {
            for (reset, end) in resets.into_iter().zip(server_us()) {
                let (_, between) = &mut world.resets.lock().expect("no panic")[reset];
                *between = [between[0].min(end), between[0].max(end)];
            }
        }
        let between =
            |(before, after): (Timestamp, Timestamp)| [before.min(after), before.max(after)];
        let name = |limit: &str| if limit == "user" { "user" } else { "shared" };
        let record = Record {
            node: self.node,
            op: batch.operation(),
            asked: batch
                .checks()
                .iter()
                .map(|check| (name(check.limit.name()), check.key.to_owned(), check.cost))
                .collect(),
            id: batch.reservation_id(),
            server_us: before.into_iter().zip(server_us()).map(between).collect(),
            node_us: between((node_before, self.clock.now())),
            answer: answer.as_ref().map(Verdict::clone).map_err(StoreError::kind),
        };
        world.records.lock().expect("no panic").push(record);
        answer
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

/// What a run showed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) decisions: u64,
    pub(crate) admitted: u64,
    pub(crate) errors: u64,
    pub(crate) by_allotments: u64,
    pub(crate) by_caches: u64,
    pub(crate) by_fallbacks: u64,
}

impl std::ops::AddAssign for Outcome {
    fn add_assign(&mut self, other: Self) {
        self.decisions += other.decisions;
        self.admitted += other.admitted;
        self.errors += other.errors;
        self.by_allotments += other.by_allotments;
        self.by_caches += other.by_caches;
        self.by_fallbacks += other.by_fallbacks;
    }
}

/// Runs a plan.
///
/// # Errors
/// What does not hold.
pub(crate) fn run(plan: &Plan) -> Result<Outcome, String> {
    fastrand::seed(plan.seed);
    paused().block_on(simulated(plan.clone()))
}

async fn simulated(plan: Plan) -> Result<Outcome, String> {
    let mut random = Rng::with_seed(plan.seed ^ 0x5eed);
    let begin_us = BEGIN_US + random.u64(..3_000_000);
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
        let mut most = |per_mille| random.u64(..=per_mille);
        let (refused, lost_request, lost_reply) = (most(60), most(60), most(60));
        faults = Faults {
            refused,
            lost_request,
            lost_reply,
            cut: most(60),
            repeated: 0,
            late: most(30),
            way,
        };
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
    let outcome = world.check();
    let broken = world.broken.lock().expect("no panic").take();
    broken.map_or(outcome, Err)
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

    fn store(self: &Arc<Self>, connection: ModelConnection, random: &mut Rng) -> Recorded {
        let node = self.started.fetch_add(1, SeqCst);
        let (offset_us, drift_ppm) =
            (BEGIN_US + random.u64(..3_600_000_000), random.i64(-500..500));
        let clock = NodeClock { base: Instant::now(), offset_us, drift_ppm };
        let redis = RedisStore::builder().deadline(DEADLINE).over(connection).expect("a prefix");
        let age = if self.plan.has_cache { Duration::from_millis(500) } else { Duration::ZERO };
        let cache =
            DenialCache::builder().clock(clock).capacity(64).max_age(age).max_wait(MAX_WAIT);
        let divisor = if self.plan.lifetime_us.is_some() { 1 + random.u64(..8) } else { 1 << 40 };
        let lifetime_us = self.plan.lifetime_us.unwrap_or(1_000) * self.plan.excess_lifetime;
        let allotments = Allotments::builder().clock(clock).capacity(64).divisor(divisor);
        let saving =
            allotments.lifetime(Duration::from_micros(lifetime_us)).build(cache.build(redis));
        let layers = if self.plan.has_fallback {
            let on_recovery =
                if self.plan.charges_on_recovery { OnRecovery::Charge } else { OnRecovery::Forget };
            let nodes = NonZeroU64::new(self.plan.nodes as u64).expect("some");
            let settings = Fallback::builder().deadline(FALLBACK_DEADLINE).failures(3).nodes(nodes);
            let settings = settings
                .capacity(64)
                .probe_after(PROBE_AFTER)
                .on_recovery(on_recovery)
                .clock(clock);
            Layers::Fallback(settings.build(saving, &self.plan.limits()).expect("choices"))
        } else {
            Layers::Saving(saving)
        };
        Recorded { node, layers, clock, world: self.clone() }
    }

    /// After the faults, the store decides every request again, and after the longest recovery each key has room.
    async fn is_well_again(self: &Arc<Self>) {
        self.network.set(Faults { way: Duration::from_millis(1), ..Faults::default() });
        sleep(Duration::from_secs(4)).await;
        self.is_idle().await;
        self.alive.lock().expect("no panic").clear();
        let mut random = Rng::with_seed(self.plan.seed);
        let store = self.store(ModelConnection::new(&self.network), &mut random);
        let limiter = RateLimiter::new(self.plan.limits(), store);
        let recoveries = self
            .plan
            .limits()
            .iter()
            .map(|limit| {
                limit
                    .algorithm()
                    .step(None, Timestamp::ZERO, limit.algorithm().capacity())
                    .decision
                    .reset_after_us
            })
            .max();
        // A sliding counter forgets at the end of the window after the last.
        sleep(Duration::from_micros(2 * recoveries.unwrap_or_default())).await;
        for user in 0..self.plan.users {
            match limiter.check(&caller(user)).await {
                Ok(verdict) if verdict.allowed() && verdict.source() != Source::Fallback => {}
                other => self.breaks(format!("not well again: {user}: {other:?}")),
            }
        }
    }

    /// What was drawn in advance and not used is back by itself: of a window that lasts, all is left that was not admitted.
    async fn is_idle(&self) {
        let limits = self.plan.limits();
        let lasts = |policy: &Policy| matches!(policy, Policy::FixedWindow(window) if window.window_us() > 60_000_000);
        if !self.plan.is_quiet {
            return;
        }
        let redis =
            RedisStore::builder().over(ModelConnection::new(&self.network)).expect("a prefix");
        for limit in limits.iter().filter(|limit| lasts(limit.algorithm())) {
            let mut admitted: BTreeMap<String, u64> = BTreeMap::new();
            {
                let settled = self.settled.lock().expect("no panic");
                for record in self.records.lock().expect("no panic").iter() {
                    let is_admitted = record.answer.as_ref().is_ok_and(Verdict::allowed);
                    for (_, key, cost) in
                        record.asked.iter().filter(|(name, ..)| *name == limit.name())
                    {
                        let cost = record.id.and_then(|id| settled.get(&id)).unwrap_or(cost);
                        if record.op == Op::Acquire && is_admitted {
                            *admitted.entry(key.clone()).or_default() += cost;
                        }
                    }
                }
            }
            for (key, admitted) in admitted {
                let check = Check { limit, key: &key, cost: 0 };
                let left = redis
                    .apply(&Batch::one(&check).op(Op::Peek))
                    .await
                    .map(|verdict| verdict.remaining());
                if left.as_ref().ok() != Some(&(limit.algorithm().capacity() - admitted)) {
                    self.breaks(format!(
                        "{left:?} are left of {} after {admitted} of {key}",
                        limit.algorithm()
                    ));
                }
            }
        }
    }

    /// Holds what was admitted against the bounds.
    fn check(&self) -> Result<Outcome, String> {
        let records = self.records.lock().expect("no panic");
        let limits = self.plan.limits();
        let policy = |name: &str| {
            let limit = limits.iter().find(|limit| limit.name() == name).expect("one of both");
            *limit.algorithm()
        };
        let nodes = NonZeroU64::new(self.plan.nodes as u64).expect("some");
        let (mut outcome, mut all, mut local) =
            (Outcome::default(), BTreeMap::new(), BTreeMap::new());
        let widened = |name: &str| widened(policy(name), self.plan.lifetime_us.unwrap_or(0));
        let settled = self.settled.lock().expect("no panic");
        let mut given_back: BTreeMap<String, u64> = BTreeMap::new();
        for record in records.iter() {
            let Ok(verdict) = &record.answer else {
                outcome.errors += 1;
                continue;
            };
            outcome.decisions += 1;
            let source = verdict.source();
            outcome.by_allotments += u64::from(source == Source::Allotment);
            outcome.by_caches += u64::from(source == Source::Cache);
            outcome.by_fallbacks += u64::from(source == Source::Fallback);
            let is_charged = record.op == Op::Acquire && verdict.allowed();
            outcome.admitted += u64::from(is_charged);
            for ((name, key, cost), server_us) in record.asked.iter().zip(&record.server_us) {
                let settled = record.id.and_then(|id| settled.get(&id));
                let less = settled.map_or(0, |settled| cost.saturating_sub(*settled));
                *given_back.entry(key.clone()).or_default() += less;
                let cost = cost - less;
                if source == Source::Fallback {
                    let share = || policy(name).share(nodes).map(Admissions::new);
                    match self.plan.on_outage() {
                        OnOutage::Local if is_charged => local
                            .entry((record.node, *name, key))
                            .or_insert_with(|| share().expect("a share"))
                            .add(record.node_us, cost),
                        OnOutage::Closed if is_charged => {
                            return Err("admitted, though it is closed".to_owned());
                        }
                        _ => {}
                    }
                    continue;
                }
                let admissions =
                    all.entry((*name, key)).or_insert_with(|| Admissions::new(widened(name)));
                if is_charged {
                    admissions.add(*server_us, cost);
                }
            }
        }
        for ((name, key), admissions) in &mut all {
            for (reset, [begin, end]) in self.resets.lock().expect("no panic").iter() {
                if reset == *key {
                    let until = end.saturating_add_us(self.plan.lifetime_us.unwrap_or(0));
                    // What was reserved before is given back by the reset, and later by its settlement once more.
                    let twice = given_back.get(*key).copied().unwrap_or_default();
                    admissions.allow([*begin, until], policy(name).capacity());
                    admissions.allow([*begin, Timestamp::MAX], twice);
                }
            }
            let server = self.network.server_of(&format!("{{{key}}}"));
            for (lost, between) in self.losses.lock().expect("no panic").iter() {
                if *lost == server {
                    admissions.allow(*between, policy(name).capacity());
                }
            }
        }
        let checked = all.iter().map(|((name, key), admissions)| (*name, *key, admissions));
        let shares = local.iter().map(|((_, name, key), admissions)| (*name, *key, admissions));
        for (name, key, admissions) in checked.chain(shares) {
            admissions.check().map_err(|excess| format!("{name} of {key}: {excess}"))?;
        }
        if self.served.load(SeqCst) > outcome.admitted {
            return Err(format!(
                "{} served, {} admitted",
                self.served.load(SeqCst),
                outcome.admitted
            ));
        }
        if !self.plan.is_disturbed && outcome.by_fallbacks > 0 {
            return Err("a fallback decided, though nothing failed".to_owned());
        }
        Ok(outcome)
    }
}

/// The limit that admits in an interval of length `x` what this one admits in one of length `x + L`.
fn widened(policy: Policy, lifetime_us: u64) -> Policy {
    let more = |rate: ratelimit_core::Rate| (rate.count() * lifetime_us).div_ceil(rate.period_us());
    match policy {
        Policy::Gcra(gcra) => {
            let refill = gcra.refill();
            Gcra::new(refill.rate(), refill.burst + more(refill.rate())).expect("a bucket").into()
        }
        Policy::TokenBucket(bucket) => {
            let refill = bucket.refill();
            TokenBucket::new(refill.rate(), refill.burst + more(refill.rate()))
                .expect("a bucket")
                .into()
        }
        other => other,
    }
}

fn caller(user: usize) -> [(&'static str, String); 2] {
    [("user", format!("u{user}")), ("tenant", TENANT.to_owned())]
}

/// A node that crashes and starts again until the run ends.
async fn node(world: Arc<World>, mut random: Rng) {
    while Instant::now() < world.end {
        let connection = ModelConnection::new(&world.network);
        let store = world.store(connection.clone(), &mut random);
        let limiter = Arc::new(RateLimiter::new(world.plan.limits(), store.clone()));
        let mut callers = JoinSet::new();
        for _ in 0..world.plan.callers {
            callers.spawn(calls(limiter.clone(), world.clone(), Rng::with_seed(random.u64(..))));
        }
        let crashes = world.plan.is_disturbed && chance(&mut random, 300);
        if crashes {
            sleep(Duration::from_millis(random.u64(..1_500))).await;
            connection.crash();
            callers.shutdown().await;
            sleep(Duration::from_millis(random.u64(..200))).await;
        } else {
            while let Some(ended) = callers.join_next().await {
                ended.expect("no panic");
            }
            world.alive.lock().expect("no panic").push(store);
        }
    }
}

/// Sends requests of all kinds. Some are given up, and some are never polled again.
async fn calls(limiter: Arc<RateLimiter<Recorded>>, world: Arc<World>, mut random: Rng) {
    let waiter = Waiter::new(limiter.clone());
    let served = world.clone();
    let service = tower::service_fn(move |_: Request<()>| {
        served.served.fetch_add(1, SeqCst);
        async { Ok::<_, Infallible>(Response::new(Bytes::new())) }
    });
    let layer = RateLimitLayer::new(limiter.clone()).by("user", header(USER));
    let layer = layer
        .by("tenant", ratelimit_tower::from_fn(|_: &http::request::Parts| Ok(Some(TENANT.into()))));
    let service = layer.layer(service);
    let is_quiet = world.plan.is_quiet;
    let mut kept: Vec<Pin<Box<dyn Future<Output = ()> + Send>>> = Vec::new();
    while Instant::now() < world.end {
        // The first user is the busiest.
        let user = if random.bool() { 0 } else { random.usize(..world.plan.users) };
        let (who, cost) = (caller(user), [1, 1, 1, 2, 3][random.usize(..5)]);
        let (limiter, waiter, service, world) =
            (limiter.clone(), waiter.clone(), service.clone(), world.clone());
        let kind = random.u64(..20);
        let id = ReservationId::new(random.u128(..));
        let max_wait = Duration::from_millis(random.u64(..400));
        let mut call: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            match kind {
                0..4 => {
                    let begin = Instant::now();
                    let _ = waiter.until_n_allowed(&who, cost, max_wait).await;
                    let most = max_wait + 2 * world.plan.patience() + 4 * TICK;
                    if begin.elapsed() > most {
                        world.breaks(format!("waited {:?}, more than {most:?}", begin.elapsed()));
                    }
                }
                4..9 => {
                    let request =
                        Request::builder().header(USER, &who[0].1).body(()).expect("a request");
                    let response = service.oneshot(request).await.expect("infallible");
                    let due = [
                        StatusCode::OK,
                        StatusCode::TOO_MANY_REQUESTS,
                        StatusCode::SERVICE_UNAVAILABLE,
                    ];
                    if !due.contains(&response.status()) {
                        world.breaks(format!("answered {}", response.status()));
                    }
                }
                9..11 => {
                    if limiter
                        .reserve(&who, id, cost + 2)
                        .await
                        .is_ok_and(|verdict| verdict.allowed())
                    {
                        sleep(max_wait).await;
                        let _ = limiter.commit(&who, id, cost).await;
                    }
                }
                11 => drop(limiter.peek(&who, cost).await),
                12 if max_wait.as_millis() < 40 && !world.plan.is_quiet => {
                    drop(limiter.reset(&who).await)
                }
                _ => drop(limiter.check_n(&who, cost).await),
            }
        });
        match random.u64(..20) {
            _ if is_quiet => call.await,
            0 => drop(timeout(max_wait / 4, call).await),
            1 => {
                let turns = random.usize(..4);
                for _ in 0..turns {
                    if pin!(&mut call).poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                        break;
                    }
                    sleep(Duration::from_millis(random.u64(..20))).await;
                }
                kept.push(call);
            }
            _ => call.await,
        }
        let most_ms = if chance(&mut random, 700) { 20 } else { 300 };
        sleep(Duration::from_millis(random.u64(..most_ms))).await;
    }
}

/// What befalls servers.
async fn disturb(world: Arc<World>, mut random: Rng) {
    let at =
        |server: usize| Timestamp::saturating_from_us(world.network.servers()[server].now_us());
    let mut replicated: Vec<_> = (0..world.plan.servers).map(at).collect();
    while Instant::now() < world.end {
        sleep(Duration::from_millis(random.u64(..400))).await;
        let number = random.usize(..world.plan.servers);
        let server = &world.network.servers()[number];
        match random.u64(..10) {
            0 | 1 => world.network.hang(number, Duration::from_millis(random.u64(..800))),
            2 => server.flush_scripts(),
            3 | 4 => {
                world.network.set_reachable(number, false);
                sleep(Duration::from_millis(random.u64(..600))).await;
                world.network.set_reachable(number, true);
            }
            5 => {
                server.refuse(Some("OOM command not allowed when used memory > 'maxmemory'."));
                sleep(Duration::from_millis(random.u64(..300))).await;
                server.refuse(None);
            }
            6 | 7 => {
                server.replicate();
                replicated[number] = at(number);
            }
            // An allotment assumes that the store's clock does not jump.
            8 if world.plan.lifetime_us.is_none() => {
                server.jump(random.i64(-500_000..3_600_000_000));
            }
            _ => {
                let is_restart = random.bool();
                let from = if is_restart { Timestamp::ZERO } else { replicated[number] };
                world.losses.lock().expect("no panic").push((number, [from, at(number)]));
                if is_restart {
                    server.restart()
                } else {
                    server.fail_over()
                }
                replicated[number] = at(number);
            }
        }
    }
    for (number, server) in world.network.servers().iter().enumerate() {
        world.network.set_reachable(number, true);
        server.refuse(None);
    }
}
