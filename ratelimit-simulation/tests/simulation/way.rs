//! Requests that share calls are not slower than requests that are sent alone, however long the way
//! to the server is. In this model the client does all work in no time, so that only the server's
//! work and the way count.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{AnyAlgorithm, Limit, Store};
use ratelimit_redis::{Argument, Connection, Deadline, RedisError, RedisStore, Reply};
use ratelimit_simulation::{ModelConnection, ModelServer, Network};
use tokio::runtime::Builder;
use tokio::sync::Mutex;
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep};

/// All times are a hundred times as long as on a network, since timers count milliseconds: what a
/// call costs the server, and what each key in it costs more.
const PER_CALL: Duration = Duration::from_micros(700);
const PER_KEY: Duration = Duration::from_micros(300);
const TASKS: u32 = 200;
/// How many turns a task makes at first, in which the store learns the way, and then.
const LEARNS: u32 = 24;
const TURNS: u32 = 8;
/// The shortest time in which it learns: a busy store measures the way more than once.
const LEARNS_FOR: Duration = Duration::from_secs(11);

/// A way of this length to a server that executes one call after the other. The way holds no call
/// back.
struct Way {
    inner: ModelConnection,
    there: Duration,
    server: Mutex<()>,
}

impl Connection for Way {
    async fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        sleep(self.there).await;
        let busy = self.server.lock().await;
        let keys = match words.get(2) {
            Some(Argument::Number(keys)) => u32::try_from(*keys).expect("few"),
            _ => 1,
        };
        sleep(PER_CALL + PER_KEY * keys).await;
        drop(busy);
        let reply = self.inner.send(key, words, deadline).await;
        sleep(self.there).await;
        reply
    }

    async fn transaction(
        &self,
        _: &str,
        _: &[Vec<Argument<'_>>],
        _: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        unreachable!("no mode of transactions")
    }

    async fn send_to_each(
        &self,
        _: &[Argument<'_>],
        _: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        unreachable!("no look at its health")
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        self.inner.address()
    }
}

/// How many requests are decided over this way in a time, once the store knows the way.
fn count_decided(merges: bool, way: Duration, limits: &[&str]) -> u32 {
    let limits: Vec<Limit<AnyAlgorithm>> = (0..)
        .zip(limits)
        .map(|(n, text)| {
            Limit::new(&format!("limit{n}"), text.parse().expect("a limit")).expect("a name")
        })
        .collect();
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    LocalSet::new().block_on(&runtime, async {
        let network = Network::new(vec![ModelServer::new(1_795_218_392_000_000, 0)], 0);
        let inner = ModelConnection::new(&network);
        let connection = Way { inner, there: way / 2, server: Mutex::default() };
        let builder = RedisStore::builder().merge(merges).deadline(Duration::from_secs(600));
        let store = Rc::new(builder.over(connection).expect("a plain prefix"));
        let (turn, limits) = (way + TASKS * (PER_KEY + PER_CALL / 4), Rc::new(limits));
        let (begin, decided) =
            (Instant::now() + LEARNS_FOR.max(turn * LEARNS), Rc::new(Cell::new(0)));
        let end = begin + turn * TURNS;
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let (store, limits, decided) =
                    (Rc::clone(&store), Rc::clone(&limits), Rc::clone(&decided));
                tokio::task::spawn_local(async move {
                    let own = format!("caller{task}");
                    while Instant::now() < end {
                        let keys = [&*own, "all", &*own];
                        let check = |(limit, key)| Check { limit, key, cost: 1 };
                        let checks: Vec<_> = limits.iter().zip(keys).map(check).collect();
                        let verdict = store.apply(&Batch::new(&checks).expect("a batch")).await;
                        assert!(verdict.expect("it decides").allowed());
                        if (begin..end).contains(&Instant::now()) {
                            decided.set(decided.get() + 1);
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
        decided.get()
    })
}

#[test]
fn sharing_calls_is_not_slower_than_going_alone_on_any_way() {
    const ONE: &[&str] = &["gcra 100000000/s burst 100000000"];
    const THREE: &[&str] =
        &[ONE[0], "gcra 100000000/s burst 100000000", "fixed-window 100000000/d"];
    // 0.1, 1, 4 and 20 ms on a network.
    for (way_ms, limits) in [(10, ONE), (100, THREE), (400, ONE), (2_000, ONE)] {
        let way = Duration::from_millis(way_ms);
        let [merged, alone] = [true, false].map(|merges| count_decided(merges, way, limits));
        let told = format!("{way:?}, {} limits: {merged} shared, {alone} alone", limits.len());
        println!("{told}");
        // A call ends when its last request is decided: some requests wait for a few others.
        assert!(merged * 10 >= alone * 9, "{told}");
    }
}
