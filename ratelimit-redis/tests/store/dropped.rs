//! What is dropped while it waits, or while the server fails: futures before their message has
//! left, reservations, stores and runtimes. Nothing stays charged that can be given back, and
//! nothing is held.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use ratelimit_core::{OwnedReservation, RateLimiter, Reserved};
use tokio::sync::Semaphore;

use crate::common::prelude::*;
use crate::ends::{Any, in_mode, turns};

/// What stops before its message has left: requests of each mode, of one key or two in slots of
/// their own, and a reservation.
const STOPPED: [&str; 8] =
    ["alone", "several", "with an id", "across slots", "cas", "cas across slots", "multi", "owned"];

/// A store whose commands wait until the test lets them go.
struct Gated {
    store: Arc<RedisStore<Lua, MeddlingConnection>>,
    open: Arc<Semaphore>,
    /// The commands that wait, or went.
    calls: Arc<AtomicUsize>,
}

impl Gated {
    async fn new(server: &RedisServer, kind: &str) -> Self {
        let (open, calls) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut connection = meddling_connection(server).await;
        if kind.ends_with("slots") {
            connection = connection.clustered();
        }
        let needed = (Arc::clone(&open), Arc::clone(&calls));
        let connection = connection.before_with(needed, |(open, calls), _| async move {
            calls.fetch_add(1, Ordering::SeqCst);
            open.acquire().await.expect("never closed").forget();
            Fate::Sent
        });
        let builder = RedisStore::builder().deadline(PATIENCE).prefix(&prefix());
        Self { store: Arc::new(over(builder, connection)), open, calls }
    }

    /// A request of this kind under a key, at a cost of 1.
    fn asked(&self, kind: &'static str, key: &str) -> BoxFuture<'static, ()> {
        let (store, key) = (Arc::clone(&self.store), key.to_owned());
        Box::pin(async move {
            let limits = match kind {
                "multi" => [attempts(), limit("more", "fixed-window 9/3650d count attempts")],
                _ => [seldom(), limit("more", "gcra 9/3650d")],
            };
            let other = if kind.ends_with("slots") { format!("{key}{key}") } else { key.clone() };
            let both = [(&limits[0], &*key, 1), (&limits[1], &*other, 1)];
            let checks = if kind.starts_with("several") || kind.ends_with("slots") {
                &both[..]
            } else {
                &both[..1]
            };
            let id = kind.ends_with("id").then_some(8);
            let _ = match kind {
                "cas" | "cas across slots" => {
                    apply(&store.in_mode::<Cas>(), checks, Op::Acquire, None).await
                }
                "multi" => apply(&store.in_mode::<Multi>(), checks, Op::Acquire, None).await,
                "owned" => {
                    let limits = Limits::new([limits[0].clone()]).expect("limits");
                    let limiter = Arc::new(RateLimiter::new(limits, Arc::clone(&store)));
                    if let Ok(Reserved::Granted(mut owned)) = limiter.reserve(key, 1).await {
                        owned.set_cost(0);
                    }
                    return;
                }
                _ => apply(&*store, checks, Op::Acquire, id).await,
            };
        })
    }

    /// Begins as many requests as that under keys of their own. Returns them, and how many more
    /// commands wait.
    async fn begins(&self, kind: &'static str, count: usize) -> (Vec<JoinHandle<()>>, usize) {
        let before = self.calls.load(Ordering::SeqCst);
        let mut tasks = Vec::new();
        for _ in 0..count {
            tasks.push(tokio::spawn(self.asked(kind, &prefix())));
            turns().await;
        }
        (tasks, self.calls.load(Ordering::SeqCst) - before)
    }
}

/// Drops requests that have sent so many commands, beside others in flight: what had not left
/// charges nothing, what was reserved is given back, and no place among the calls, nor a turn at a
/// key, stays taken.
#[tokio::test]
async fn a_future_that_is_dropped_before_its_message_has_left_charges_nothing_and_holds_no_place() {
    const PROBES: usize = 4;
    let server = server();
    let quiet = RedisStore::builder().deadline(PATIENCE);
    for kind in STOPPED {
        let fresh = Gated::new(&server, kind).await;
        let (tasks, due) = fresh.begins(kind, PROBES).await;
        tasks.iter().for_each(JoinHandle::abort);
        for (polls, sent) in [(0, 0), (1, 0), (2, 0), (9, 0), (9, 1), (9, 2), (9, 3)] {
            for busy in [0, 2] {
                let case = format!("{kind}, {polls} polls, {sent} sent, {busy} in flight");
                let gated = Gated::new(&server, kind).await;
                let (in_flight, _) = gated.begins(kind, busy).await;
                let keys: Vec<_> = (0..3).map(|n| format!("stopped{n}")).collect();
                let mut stopped: Vec<_> =
                    keys.iter().chain(&keys).map(|key| gated.asked(kind, key).fuse()).collect();
                if sent > 0 {
                    gated.open.add_permits(sent + in_flight.len());
                }
                for _ in 0..polls {
                    for asked in &mut stopped {
                        let _ = asked.now_or_never();
                    }
                    turns().await;
                }
                drop(stopped);
                turns().await;
                gated.open.forget_permits(Semaphore::MAX_PERMITS);
                if busy == 0 && sent == 0 && kind != "owned" {
                    let (tasks, calls) = gated.begins(kind, PROBES).await;
                    assert_eq!(calls, due, "{case}");
                    tasks.iter().for_each(JoinHandle::abort);
                }
                gated.open.add_permits(10_000);
                for task in in_flight {
                    task.await.expect("no panic");
                }
                let (probes, _) = gated.begins(kind, PROBES).await;
                for task in probes {
                    timeout(PATIENCE / 8, task).await.expect(&case).expect("no panic");
                }
                let quiet = quiet.clone().prefix(gated.store.prefix());
                let quiet = quiet.connect(&server.url()).await.expect("it is up");
                if sent > 0 && kind != "owned" {
                    continue;
                }
                for key in &keys {
                    until(async || {
                        let left = match kind {
                            "multi" => peek(&quiet.in_mode::<Multi>(), &attempts(), key).await,
                            "cas" | "cas across slots" => {
                                peek(&quiet.in_mode::<Cas>(), &seldom(), key).await
                            }
                            _ => peek(&quiet, &seldom(), key).await,
                        };
                        let is_sure = sent == 0 || left == 3;
                        assert!(is_sure || kind == "owned", "{case}: {left}");
                        if left == 3 { Ok(()) } else { Err(format!("{case}: {left} left")) }
                    })
                    .await;
                }
            }
        }
    }
}

/// What fails when a value is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    RequestsHeld,
    RepliesHeld,
    /// Once, at the next request.
    Cut,
    ReplyLost,
    Refused,
    /// The server stands still, and its connections stay open.
    Hangs,
}

const FAULTS: [Fault; 6] = [
    Fault::RequestsHeld,
    Fault::RepliesHeld,
    Fault::Cut,
    Fault::ReplyLost,
    Fault::Refused,
    Fault::Hangs,
];

impl Fault {
    fn begins(self, server: &RedisServer, proxy: &FaultProxy) {
        match self {
            Self::RequestsHeld => proxy.hold_requests(""),
            Self::RepliesHeld => proxy.hold_replies(""),
            Self::Cut => proxy.cut_matching("", 1),
            Self::ReplyLost => proxy.swallow_matching("", 1),
            Self::Refused => {
                proxy.refuse(true);
                proxy.cut_all();
            }
            Self::Hangs => server.pause().expect("it runs"),
        }
    }

    fn ends(self, server: &RedisServer, proxy: &FaultProxy) {
        if self == Self::Hangs {
            server.resume().expect("it runs");
        }
        proxy.heal();
    }
}

type Limiter = Arc<RateLimiter<Any>>;

async fn reserved(limiter: &Limiter) -> OwnedReservation<Any, AnyAlgorithm, &'static str> {
    match until(async || limiter.reserve("a", 2).await).await {
        Reserved::Granted(mut reservation) => {
            reservation.set_cost(0);
            reservation
        }
        Reserved::Denied(verdict) => panic!("denied: {verdict:?}"),
    }
}

/// Runs what a client asks of a server that fails meanwhile, on a runtime of its own. Nothing is
/// left of it afterwards: no task on the runtime.
fn leaves_nothing<T>(case: &str, work: impl Future<Output = T>) -> T {
    let runtime = runtime();
    let done = runtime.block_on(async {
        let done = work.await;
        until(async || match runtime.metrics().num_alive_tasks() {
            0 => Ok(()),
            tasks => Err(format!("{case}: {tasks} tasks")),
        })
        .await;
        done
    });
    drop(runtime);
    done
}

/// How far a reservation is when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its future has been polled, and the client is not connected.
    Connecting,
    Reserving,
    Granted,
    Committing,
}

const STAGES: [Stage; 4] = [Stage::Connecting, Stage::Reserving, Stage::Granted, Stage::Committing];

/// Drops a reservation at this stage while this fails, and the store with it.
async fn dropped(
    limiter: Limiter,
    (server, proxy): (&RedisServer, &FaultProxy),
    (stage, fault): (Stage, Fault),
) {
    let granted = match stage {
        Stage::Connecting => None,
        Stage::Reserving => {
            let _ = until(async || limiter.request("a").cost(0).peek().await).await;
            None
        }
        Stage::Granted | Stage::Committing => Some(reserved(&limiter).await),
    };
    fault.begins(server, proxy);
    match granted {
        None => {
            let mut asked = Box::pin(limiter.reserve("a", 2));
            for _ in 0..4 {
                // Where the fault is over by then, it is granted.
                match (&mut asked).now_or_never() {
                    None => turns().await,
                    // The fault is over by then, or it has failed.
                    Some(Ok(Reserved::Granted(mut reservation))) => {
                        reservation.set_cost(0);
                        break;
                    }
                    Some(_) => break,
                }
            }
        }
        Some(reservation) if stage == Stage::Granted => drop(reservation),
        Some(reservation) => {
            let mut commits = Box::pin(reservation.settle(0));
            let _ = (&mut commits).now_or_never();
            turns().await;
        }
    }
    // Whatever was sent meets the fault, and one attempt ends by its deadline.
    let other = limiter.request("b").cost(0).peek().await;
    let is_once = matches!(fault, Fault::Cut | Fault::ReplyLost);
    assert!(is_once || other.is_err(), "{stage:?}, {fault:?}: {other:?}");
    fault.ends(server, proxy);
}

/// Each case has a server of its own, and waits most of its time.
#[test]
fn what_is_dropped_while_the_server_fails_is_given_back_and_holds_nothing() {
    std::thread::scope(|scope| {
        for (client, is_cas) in [("redis", false), ("redis", true), ("fred", false), ("fred", true)]
        {
            for stage in STAGES {
                scope.spawn(move || {
                    for fault in FAULTS {
                        is_given_back(client, is_cas, stage, fault);
                    }
                });
            }
        }
    });
}

fn is_given_back(client: &str, is_cas: bool, stage: Stage, fault: Fault) {
    let case = format!("{client}, cas: {is_cas}, {stage:?}, {fault:?}");
    let (server, proxy) = server_behind_proxy();
    let url = with_option(&proxy.url(), &format!("client={client}"));
    leaves_nothing(&case, async {
        let builder = RedisStore::builder().deadline(Duration::from_millis(200));
        let store = in_mode(builder.connect_lazy(&url).expect("a URL"), is_cas);
        let limits = Limits::new([seldom()]).expect("limits");
        let limiter = Arc::new(RateLimiter::new(limits, store));
        dropped(limiter, (&server, &proxy), (stage, fault)).await;
    });
    runtime().block_on(async {
        let quiet = in_mode(plain(&server).await, is_cas);
        assert_eq!(peek(&quiet, &seldom(), "a").await, 3, "{case}");
    });
}

/// Nothing drives it any more, so that the reservation expires.
#[test]
fn a_reservation_whose_runtime_has_ended_is_dropped_in_another_without_a_panic() {
    let server = server();
    for is_cas in [false, true] {
        let (made_on, other) = (runtime(), runtime());
        let limiter = made_on.block_on(async {
            let limits = Limits::new([seldom()]).expect("limits");
            Arc::new(RateLimiter::new(limits, in_mode(plain(&server).await, is_cas)))
        });
        let reservation = made_on.block_on(reserved(&limiter));
        drop(made_on);
        let left = other.block_on(async {
            drop(reservation);
            limiter.request("a").cost(0).peek().await.expect("it is up").remaining()
        });
        assert_eq!(left, 1);
    }
}
