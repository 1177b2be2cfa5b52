//! Callers and their runtimes stop at any moment, and cost the other callers nothing.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::store::Op;
use ratelimit_redis::{Cas, Client, Multi, RedisStore};
use ratelimit_servers::{FaultProxy, RedisSentinels, RedisServer};
use tokio::runtime::{Handle, Runtime};
use tokio::task::yield_now;
use tokio::time::timeout;

use super::traffic::{Asks, DEADLINE};
use super::{Row, on_both};
use crate::common::{
    acquire, apply, aside, left, prefix, seldom, server, server_with, tell, with_client,
};

type Asked = Pin<Box<dyn Future<Output = ()>>>;

/// How many kinds of requests there are.
const KINDS: usize = 6;

/// Another request for keys of the traffic: alone, with another limit, with an id, across slots, and in each other mode.
fn request(asks: &Arc<Asks>, kind: usize) -> Asked {
    let asks = Arc::clone(asks);
    Box::pin(async move {
        let (store, limits) = (&asks.store, &asks.limits);
        let hot = (&limits.ledger, "hot", 1);
        let checks = match kind {
            0 | 2 => vec![hot],
            1 => vec![hot, (&limits.own, "hot", 1)],
            3 => vec![hot, (&limits.ledger, "key-1", 1)],
            4 => vec![(&limits.own, "of cas", 1)],
            _ => vec![(&limits.attempts, "of multi", 1)],
        };
        for (limit, key, _) in &checks {
            if limit.name() == "ledger" {
                asks.gave_up(key);
            }
        }
        let id = (kind == 2).then(|| asks.id());
        // Only the neighbours must not fail.
        let _ = match kind {
            4 => apply(&store.in_mode::<Cas>(), &checks, Op::Acquire, id).await,
            5 => apply(&store.in_mode::<Multi>(), &checks, Op::Acquire, id).await,
            _ => apply(store, &checks, Op::Acquire, id).await,
        };
    })
}

/// Polls a request as often as that, whenever it asks for it. Returns whether it is complete.
async fn polled(asked: &mut Asked, mut times: usize) -> bool {
    poll_fn(|context| {
        if times == 0 {
            return Poll::Ready(false);
        }
        times -= 1;
        match asked.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(true),
            Poll::Pending if times == 0 => Poll::Ready(false),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Stops each kind of request at each of its awaits, and does this with what is left of it.
async fn stopped_at_each_await(
    client: Client,
    name: &'static str,
    rounds: usize,
    with: impl Fn(Asked),
) {
    let row = Row { deadline: 2 * DEADLINE, ..Row::unnoticed(name) };
    on_both(client, row, async |_, traffic| {
        for kind in (0..KINDS).cycle().take(rounds * KINDS) {
            for times in 0.. {
                let mut asked = request(traffic.asks(), kind);
                if polled(&mut asked, times).await {
                    break;
                }
                with(asked);
                traffic.answers(1).await;
            }
        }
    })
    .await;
}

async fn a_request_that_is_dropped_at_any_await_costs_no_other_anything(client: Client) {
    stopped_at_each_await(client, "future dropped", 3, drop).await;
}

async fn a_request_that_is_kept_at_any_await_costs_no_other_anything(client: Client) {
    let kept = RefCell::new(Vec::new());
    stopped_at_each_await(client, "future kept", 1, |asked| kept.borrow_mut().push(asked)).await;
}

/// A runtime of one thread, which runs its tasks only while a thread drives it.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Begins a request on this runtime, which hangs, and leaves it there.
fn begins_on(runtime: &Runtime, store: &RedisStore, proxy: &FaultProxy) {
    proxy.hang(true);
    let brief = Duration::from_millis(10);
    let begun = async { timeout(brief, acquire(store, &seldom(), "a")).await };
    runtime.block_on(begun).expect_err("it hangs");
    proxy.hang(false);
}

/// A task of the store begins on a runtime that then stands still, or ends: `begin` begins it. The traffic comes from
/// another runtime, and notices after half of its deadline that the first one stands still.
async fn begun_elsewhere(
    client: Client,
    name: &'static str,
    url: &str,
    proxy: &Arc<FaultProxy>,
    shares: Option<Handle>,
    begin: fn(&Runtime, &RedisStore, &FaultProxy),
) {
    let row = Row::unnoticed(name);
    for ends in [false, true] {
        let mut builder = RedisStore::builder().prefix(&prefix()).deadline(row.deadline);
        if let Some(runtime) = &shares {
            builder = builder.runtime(runtime.clone());
        }
        let store = builder.connect_lazy(&with_client(url, client)).expect("a URL");
        let (first, proxy) = (store.clone(), Arc::clone(proxy));
        let elsewhere = aside(move || {
            let elsewhere = runtime();
            begin(&elsewhere, &first, &proxy);
            if ends { None } else { Some(elsewhere) }
        })
        .await;
        let on = if ends { "runtime ends" } else { "runtime stands still" };
        row.measure_on(client, on, store, async |traffic| traffic.answers(50).await).await;
        aside(move || drop(elsewhere)).await;
    }
}

fn behind_proxy() -> (RedisServer, Arc<FaultProxy>) {
    let server = server();
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    (server, Arc::new(proxy))
}

async fn a_connection_of_a_stopped_runtime_is_replaced(client: Client) {
    let (_server, proxy) = behind_proxy();
    begun_elsewhere(
        client,
        "runtime of a connection",
        &proxy.url(),
        &proxy,
        None,
        |runtime, store, _| {
            assert_eq!(runtime.block_on(left(store, &seldom(), "a")), 2);
        },
    )
    .await;
}

async fn a_connector_of_a_stopped_runtime_is_replaced(client: Client) {
    let (_server, proxy) = behind_proxy();
    begun_elsewhere(client, "runtime of the connector", &proxy.url(), &proxy, None, begins_on)
        .await;
}

async fn a_look_up_on_a_stopped_runtime_starts_again(client: Client) {
    let node = server_with(&["--cluster-enabled", "yes"]);
    tell(&node, &["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let sentinels = aside(|| RedisSentinels::start().expect("sentinels")).await;
    for (kind, port) in [("redis-cluster:", node.port()), ("redis-sentinel:", sentinels.ports()[0])]
    {
        let proxy = Arc::new(FaultProxy::start(port).expect("a proxy"));
        let url = proxy.url().replace("redis:", kind);
        begun_elsewhere(client, "runtime of a look-up", &url, &proxy, None, begins_on).await;
    }
}

async fn flights_of_a_stopped_runtime_are_overtaken(client: Client) {
    let (_server, proxy) = behind_proxy();
    // With and without its connection on the same runtime.
    for (name, shares) in
        [("runtime of a flight", Some(Handle::current())), ("runtime of all", None)]
    {
        begun_elsewhere(client, name, &proxy.url(), &proxy, shares, flies_on).await;
    }
}

/// Begins requests on this runtime: two in flight, and some that wait for them.
fn flies_on(runtime: &Runtime, store: &RedisStore, proxy: &FaultProxy) {
    assert_eq!(runtime.block_on(left(store, &seldom(), "a")), 2);
    proxy.hang(true);
    runtime.block_on(async {
        for n in 0..6 {
            let store = store.clone();
            tokio::spawn(async move { acquire(&store, &seldom(), &format!("a{n}")).await });
            yield_now().await;
        }
    });
    proxy.hang(false);
}

with_each_client! {
    a_request_that_is_dropped_at_any_await_costs_no_other_anything,
    a_request_that_is_kept_at_any_await_costs_no_other_anything,
    a_connection_of_a_stopped_runtime_is_replaced,
    a_connector_of_a_stopped_runtime_is_replaced,
    a_look_up_on_a_stopped_runtime_starts_again,
    flights_of_a_stopped_runtime_are_overtaken,
}
