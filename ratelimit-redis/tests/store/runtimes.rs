//! A store lives on one runtime, and moves to a thread of its own when a request could not rely on
//! that one.

use crate::common::prelude::*;

type Asked = JoinHandle<Result<Verdict, RedisError>>;

/// How many requests wait for a call, beside two that are out.
const WAIT: usize = 100;

fn lazy(url: &str, client: Client) -> RedisStore {
    built(RedisStore::builder(), url, client)
}

fn built(builder: Builder, url: &str, client: Client) -> RedisStore {
    let builder = builder.client(client).deadline(PATIENCE).prefix(&prefix());
    builder.connect_lazy(url).expect("a URL")
}

fn many() -> Limit<AnyAlgorithm> {
    limit("many", "gcra 1000/3650d")
}

/// As a static store under several `#[tokio::test]`s: each has a runtime that ends.
async fn one_runtime_after_another_is_served(client: Client) {
    let (server, limit) = (server(), many());
    let store = lazy(&server.url(), client);
    for turn in 1..=8 {
        let (store, limit) = (store.clone(), limit.clone());
        let asked = move || runtime().block_on(remaining_after_acquire(&store, &limit, "a"));
        assert_eq!(aside(asked).await, 1_000 - turn);
    }
}

/// Each thread drives its runtime for its own requests only.
async fn threads_that_block_now_and_then_are_served(client: Client) {
    let (server, limit) = (server(), many());
    let store = lazy(&server.url(), client);
    let threads: Vec<_> = (0..16)
        .map(|_| {
            let (store, limit) = (store.clone(), limit.clone());
            std::thread::spawn(move || {
                let own = runtime();
                for _ in 0..20 {
                    own.block_on(remaining_after_acquire(&store, &limit, "a"));
                }
            })
        })
        .collect();
    aside(move || threads.into_iter().for_each(|thread| thread.join().expect("served"))).await;
    assert_eq!(peek(&store, &limit, "a").await, 1_000 - 16 * 20);
}

/// So many turns of a runtime that each task runs until it waits.
async fn turns() {
    for _ in 0..10 * WAIT {
        yield_now().await;
    }
}

/// So many requests on this runtime, for three keys.
fn begin(
    on: &Runtime,
    store: &RedisStore,
    limit: &Limit<AnyAlgorithm>,
    requests: usize,
) -> Vec<Asked> {
    let ask = |n: usize| {
        let (store, limit) = (store.clone(), limit.clone());
        on.spawn(async move { acquire(&store, &limit, &format!("k{}", n % 3)).await })
    };
    (0..requests).map(ask).collect()
}

/// What remains of the three keys, together.
async fn remain(store: &RedisStore, limit: &Limit<AnyAlgorithm>) -> u64 {
    peek(store, limit, "k0").await + peek(store, limit, "k1").await + peek(store, limit, "k2").await
}

/// Waits until the runtime has so many tasks more: the one that sends, and one for each call that
/// is out.
async fn runs(runtime: &Runtime, before: usize, more: usize) {
    let tasks = || runtime.metrics().num_alive_tasks();
    until(async || if tasks() >= before + more { Ok(()) } else { Err(tasks()) }).await;
}

/// Each request is decided or in doubt, and no more is charged than that.
async fn are_accounted_for(store: &RedisStore, limit: &Limit<AnyAlgorithm>, asked: Vec<Asked>) {
    let (mut decided, mut in_doubt) = (0, 0);
    for answer in asked {
        match answer.await.expect("no panic") {
            Ok(_) => decided += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
                in_doubt += 1;
            }
        }
    }
    let charged = 3_000 - remain(store, limit).await;
    let told = format!("{decided} decided, {in_doubt} in doubt, {charged} charged");
    assert!((decided..=decided + in_doubt).contains(&charged), "{told}");
    // Two calls were out, of one request each; all others waited.
    assert!(in_doubt <= 2, "{told}");
}

/// What was sent on the runtime is in doubt; what waited is sent anew. Others are served at once.
async fn what_waits_on_a_runtime_that_ends_is_sent_anew(client: Client) {
    let ((_server, proxy), limit) = (server_behind_proxy(), many());
    let (first, others) = (driven_runtime(), driven_runtime());
    let store = lazy(&proxy.url(), client);
    let (on_first, its_limit) = (store.clone(), limit.clone());
    let first = aside(move || {
        first.block_on(remaining_after_acquire(&on_first, &its_limit, "warm"));
        first
    })
    .await;
    let before = first.metrics().num_alive_tasks();
    proxy.hang(true);
    let mut asked = Vec::new();
    for calls in 1..=2 {
        asked.extend(begin(&others, &store, &limit, 1));
        runs(&first, before, 1 + calls).await;
    }
    asked.extend(begin(&others, &store, &limit, WAIT));
    // Its one thread runs them in turn: then all of them wait.
    others.spawn(turns()).await.expect("no panic");
    aside(move || drop(first)).await;
    proxy.hang(false);
    assert_eq!(remaining_after_acquire(&store, &limit, "other").await, 999);
    are_accounted_for(&store, &limit, asked).await;
    others.shutdown_background();
}

/// A runtime of one thread has requests out and waiting, and no thread drives it any more. Others
/// are served at once, and so are its own requests when it is driven again.
async fn a_runtime_that_stands_still_holds_no_other_back(client: Client) {
    let ((_server, proxy), limit) = (server_behind_proxy(), many());
    let store = lazy(&proxy.url(), client);
    let (its_store, its_limit) = (store.clone(), limit.clone());
    let begun = move || {
        let still = runtime();
        still.block_on(remaining_after_acquire(&its_store, &its_limit, "warm"));
        proxy.hang(true);
        let asked = begin(&still, &its_store, &its_limit, WAIT + 2);
        still.block_on(turns());
        proxy.hang(false);
        (still, asked, proxy)
    };
    let (still, asked, _proxy) = aside(begun).await;
    for turn in 1..=WAIT as u64 {
        assert_eq!(remaining_after_acquire(&store, &limit, "other").await, 1_000 - turn);
    }
    aside(move || {
        still.block_on(async {
            for answer in asked {
                let _ = answer.await.expect("no panic").expect("it was driven in time");
            }
        });
    })
    .await;
    assert_eq!(remain(&store, &limit).await, 3_000 - WAIT as u64 - 2);
}

/// The error of a request that relies on a runtime which the user named tells what to do.
async fn a_named_runtime_that_does_not_run_is_named_in_the_error(client: Client) {
    let ((server, proxy), limit) = (server_behind_proxy(), many());
    let named = runtime();
    let named_in = |deadline| {
        RedisStore::builder().runtime(named.handle().clone()).deadline(deadline).client(client)
    };
    let brief = Duration::from_millis(50);
    let store = named_in(brief).connect_lazy(&proxy.url()).expect("a URL");
    let what = "does the runtime that Builder::runtime names run?";
    fails(acquire(&store, &limit, "a").await, ErrorKind::Unavailable, what);
    // Once it has ended, the store leaves it.
    let store = named_in(PATIENCE).connect_lazy(&server.url()).expect("a URL");
    let (its_store, its_limit) = (store.clone(), limit.clone());
    aside(move || {
        drop((named.block_on(remaining_after_acquire(&its_store, &its_limit, "a")), named));
    })
    .await;
    assert_eq!(remaining_after_acquire(&store, &limit, "a").await, 998);
}

/// A store with a thread of its own from the start depends on no caller.
async fn a_store_on_its_own_thread_is_served_by_it(client: Client) {
    let (server, limit) = (server(), many());
    let store = built(RedisStore::builder().own_thread(), &server.url(), client);
    assert_eq!(remaining_after_acquire(&store, &limit, "a").await, 999);
    let (elsewhere, its_limit) = (store.clone(), limit.clone());
    let asked = move || runtime().block_on(remaining_after_acquire(&elsewhere, &its_limit, "a"));
    assert_eq!(aside(asked).await, 998);
    assert_eq!(remaining_after_acquire(&store, &limit, "a").await, 997);
}

with_each_client! {
    one_runtime_after_another_is_served,
    threads_that_block_now_and_then_are_served,
    what_waits_on_a_runtime_that_ends_is_sent_anew,
    a_runtime_that_stands_still_holds_no_other_back,
    a_named_runtime_that_does_not_run_is_named_in_the_error,
    a_store_on_its_own_thread_is_served_by_it,
}
