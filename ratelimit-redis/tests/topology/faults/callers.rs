//! Callers and their runtimes stop at any moment, and cost the other callers nothing.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use tokio::runtime::Handle;

use super::traffic::{Asks, DEADLINE};
use super::{Row, on_both};
use crate::common::prelude::*;

type Asked = Pin<Box<dyn Future<Output = ()>>>;

/// How many kinds of requests there are.
const KINDS: usize = 6;

/// Another request for keys of the traffic: alone, with another limit, with an id, across slots,
/// and in each other mode.
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

/// What begins a task of the store on a runtime: a connection, a connector, or calls.
type Begins = fn(&Runtime, &RedisStore, &FaultProxy);

fn connects_on(runtime: &Runtime, store: &RedisStore, _: &FaultProxy) {
    assert_eq!(runtime.block_on(remaining_after_acquire(store, &seldom(), "a")), 2);
}

/// Begins a request on this runtime, which hangs, and leaves it there.
fn begins_on(runtime: &Runtime, store: &RedisStore, proxy: &FaultProxy) {
    proxy.hang(true);
    let brief = Duration::from_millis(10);
    let begun = async { timeout(brief, acquire(store, &seldom(), "a")).await };
    runtime.block_on(begun).expect_err("it hangs");
    proxy.hang(false);
}

/// Begins requests on this runtime: two that are out, and some that wait for them.
fn calls_on(runtime: &Runtime, store: &RedisStore, proxy: &FaultProxy) {
    connects_on(runtime, store, proxy);
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

/// A task of the store begins on a runtime that then stands still, or ends. The traffic comes from
/// another runtime, and the store moves to a thread of its own, unless the traffic's was named.
async fn begun_elsewhere(
    client: Client,
    name: &'static str,
    (kind, port): (&str, u16),
    shares: Option<Handle>,
    begins: Begins,
) {
    let (row, proxy) = (Row::unnoticed(name), Arc::new(proxy_of(port)));
    let url = with_client(&proxy.url().replace("redis:", kind), client);
    for ends in [false, true] {
        let mut builder = RedisStore::builder().prefix(&prefix()).deadline(row.deadline);
        if let Some(runtime) = &shares {
            builder = builder.runtime(runtime.clone());
        }
        let store = builder.connect_lazy(&url).expect("a URL");
        let (first, proxy) = (store.clone(), Arc::clone(&proxy));
        let elsewhere = aside(move || {
            let elsewhere = runtime();
            begins(&elsewhere, &first, &proxy);
            if ends { None } else { Some(elsewhere) }
        })
        .await;
        let on = if ends { "runtime ends" } else { "runtime stands still" };
        row.measure_on(client, on, store, async |traffic| traffic.answers(50).await).await;
        aside(move || drop(elsewhere)).await;
    }
}

async fn what_begins_on_a_runtime_that_stops_begins_anew(client: Client) {
    let server = server();
    let rows: [(_, _, Begins); 4] = [
        ("runtime of a connection", None, connects_on),
        ("runtime of the connector", None, begins_on),
        // With and without its connection on the same runtime.
        ("runtime of requests that wait", Some(Handle::current()), calls_on),
        ("runtime of all", None, calls_on),
    ];
    for (name, shares, begins) in rows {
        begun_elsewhere(client, name, ("redis:", server.port()), shares, begins).await;
    }
}

async fn a_look_up_on_a_stopped_runtime_starts_again(client: Client) {
    let node = server_with(&["--cluster-enabled", "yes"]);
    tell(&node, &["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    // It refuses everything for two seconds after its start.
    until(async || {
        let info = tell(&node, &["CLUSTER", "INFO"]).to_string();
        info.contains("cluster_state:ok").then_some(()).ok_or("it does not serve")
    })
    .await;
    let sentinels = aside(|| RedisSentinels::start().expect("sentinels")).await;
    for place in [("redis-cluster:", node.port()), ("redis-sentinel:", sentinels.ports()[0])] {
        begun_elsewhere(client, "runtime of a look-up", place, None, begins_on).await;
    }
}

with_each_client! {
    a_request_that_is_dropped_at_any_await_costs_no_other_anything,
    a_request_that_is_kept_at_any_await_costs_no_other_anything,
    what_begins_on_a_runtime_that_stops_begins_anew,
    a_look_up_on_a_stopped_runtime_starts_again,
}
