//! A node: its clock, its layers, its callers, and what befalls servers.

use std::convert::Infallible;
use std::future::Future;
use std::num::NonZeroU64;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::{HeaderName, Request, Response};
use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{
    AnyAlgorithm, Clock, DynError, DynStore, ErrorKind, RateLimiter, ReservationId, Store,
    StoreError, Timestamp, Verdict,
};
use ratelimit_layers::{Allotments, DenialCache, Fallback, OnRecovery};
use ratelimit_redis::RedisStore;
use ratelimit_simulation::{ModelConnection, SimulatedClock};
use ratelimit_tower::{RateLimitLayer, Waiter, header};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt};

use super::{DEADLINE, FALLBACK_DEADLINE, MAX_WAIT, TENANT, World, caller};
use crate::{TICK, befall, chance};

const PROBE_AFTER: Duration = Duration::from_millis(200);
const USER: HeaderName = HeaderName::from_static("x-user");

/// What a request asked of a limit for a key, when, by the clock of the key's server and by that of
/// the node, and what came of it.
pub(super) struct Record {
    pub(super) node: u64,
    pub(super) op: Op,
    pub(super) asked: Vec<(&'static str, String, u64)>,
    pub(super) id: Option<ReservationId>,
    pub(super) server_us: Vec<[Timestamp; 2]>,
    pub(super) node_us: [Timestamp; 2],
    pub(super) answer: Result<Verdict, ErrorKind>,
}

/// The store of a node, whose answers are recorded.
#[derive(Clone)]
pub(super) struct Recorded {
    node: u64,
    /// The store of the node, with the layers that it has.
    layers: Arc<dyn DynStore<AnyAlgorithm>>,
    clock: SimulatedClock,
    world: Arc<World>,
}

impl Store<AnyAlgorithm> for Recorded {
    type Error = DynError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, DynError> {
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
        let answer = self.layers.apply(batch).await;
        let took = begin.elapsed();
        if took > world.plan.patience() + 2 * TICK {
            world.breaks(format!("{} took {took:?}", batch.operation()));
        }
        if let Err(error) = &answer {
            let kind = error.kind();
            // Some limits have no reservations.
            let is_due = match kind {
                ErrorKind::Unavailable | ErrorKind::Indeterminate => world.is_disturbed(),
                ErrorKind::Unsupported | ErrorKind::Invalid | ErrorKind::Ended => {
                    batch.reservation_id().is_some()
                }
                // Between two slots, others may charge what was still left a moment ago, again and
                // again.
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

/// A node that crashes and starts again until the run ends.
pub(super) async fn node(world: Arc<World>, mut random: Rng) {
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
            callers.join_all().await;
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
                    let status = response.status().as_u16();
                    if ![200, 429, 503].contains(&status) {
                        world.breaks(format!("answered {status}"));
                    }
                }
                9..11 => {
                    let reserved = limiter.request(&who).id(id).cost(cost + 2).check().await;
                    if reserved.is_ok_and(|verdict| verdict.allowed()) {
                        sleep(max_wait).await;
                        let _ = limiter.request(&who).id(id).cost(cost).settle().await;
                    }
                }
                11 => drop(limiter.request(&who).cost(cost).peek().await),
                12 if max_wait.as_millis() < 40 && !world.plan.is_quiet => {
                    drop(limiter.request(&who).reset().await);
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
pub(super) async fn disturb(world: Arc<World>, mut random: Rng) {
    let at =
        |server: usize| Timestamp::saturating_from_us(world.network.servers()[server].now_us());
    let mut replicated: Vec<_> = (0..world.plan.servers).map(at).collect();
    while Instant::now() < world.end {
        sleep(Duration::from_millis(random.u64(..400))).await;
        let number = random.usize(..world.plan.servers);
        let server = &world.network.servers()[number];
        match random.u64(..10) {
            0..6 => befall(&world.network, number, &mut random).await,
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
                    server.restart();
                } else {
                    server.fail_over();
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

impl World {
    pub(super) fn store(
        self: &Arc<Self>,
        connection: ModelConnection,
        random: &mut Rng,
    ) -> Recorded {
        let node = self.started.fetch_add(1, SeqCst);
        let (offset_us, drift_ppm) = (random.u64(..3_600_000_000), random.i64(-500..500));
        let clock = SimulatedClock { base: Instant::now(), offset_us, drift_ppm };
        let redis = RedisStore::builder().deadline(DEADLINE).over(connection).expect("a prefix");
        let age = if self.plan.has_cache { Duration::from_millis(500) } else { Duration::ZERO };
        let cache =
            DenialCache::builder().clock(clock).capacity(64).max_age(age).max_wait(MAX_WAIT);
        let divisor = if self.plan.lifetime_us.is_some() { 1 + random.u64(..8) } else { 1 << 40 };
        let lifetime_us = self.plan.lifetime_us.unwrap_or(1_000);
        let allotments = Allotments::builder().clock(clock).capacity(64).divisor(divisor);
        let saving =
            allotments.lifetime(Duration::from_micros(lifetime_us)).build(cache.build(redis));
        let layers: Arc<dyn DynStore<AnyAlgorithm>> = if self.plan.has_fallback {
            let on_recovery =
                if self.plan.charges_on_recovery { OnRecovery::Charge } else { OnRecovery::Forget };
            let nodes = NonZeroU64::new(self.plan.nodes as u64).expect("some");
            let settings = Fallback::builder().deadline(FALLBACK_DEADLINE).failures(3).nodes(nodes);
            let settings = settings.capacity(64).probe_after(PROBE_AFTER);
            let settings = settings.on_recovery(on_recovery).clock(clock);
            Arc::new(settings.build(saving, &self.plan.limits()).expect("choices"))
        } else {
            Arc::new(saving)
        };
        Recorded { node, layers, clock, world: self.clone() }
    }
}
