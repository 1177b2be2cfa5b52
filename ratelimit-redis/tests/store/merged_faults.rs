//! A network that fails under requests that share a call: what each of them learns, and what was charged.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, ErrorKind, FixedWindow, Gcra, Limit, Policy, Store, StoreError, Verdict,
};
use ratelimit_redis::{Client, RedisError, RedisStore};
use ratelimit_testkit::{FaultProxy, RedisServer};
use tokio::task::{JoinHandle, yield_now};

type Task = JoinHandle<Result<Verdict, RedisError>>;

/// What happens to the call in which requests ride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The server executes it, and its reply is lost with the connection.
    ReplyLost,
    /// The connection is cut before the server reads it.
    NeverReached,
}

/// A store behind a proxy, and the limits of its requests.
struct Faulty {
    store: RedisStore,
    proxy: FaultProxy,
    /// Limits of one key: all requests for it meet in one queue.
    busy: Arc<Limit<Policy>>,
    shared: Arc<Limit<Policy>>,
    other: Arc<Limit<Policy>>,
    _server: RedisServer,
}

impl Faulty {
    async fn new(client: Client) -> Self {
        let server = RedisServer::start().expect("redis-server");
        let proxy = FaultProxy::start(server.port()).expect("a proxy");
        let url = crate::common::with_client(&proxy.url(), client);
        let store = RedisStore::builder().deadline(Duration::from_secs(20)).connect(&url).await;
        let limit = |name, policy| Arc::new(Limit::new(name, policy).expect("a name"));
        let rate = || "20/d".parse().expect("a rate");
        let gcra = || Gcra::new(rate(), 20).expect("a limit").into();
        Self {
            store: store.expect("it is up"),
            proxy,
            busy: limit("busy", gcra()),
            shared: limit("shared", gcra()),
            other: limit("other", FixedWindow::new(rate()).expect("a limit").into()),
            _server: server,
        }
    }

    /// Starts a request for the key under these limits, which runs until it waits.
    async fn asks<const N: usize>(
        &self,
        key: &'static str,
        limits: [&Arc<Limit<Policy>>; N],
    ) -> Task {
        let (store, limits) = (self.store.clone(), limits.map(Arc::clone));
        let task = tokio::spawn(async move {
            let checks = limits.each_ref().map(|limit| Check { limit, key, cost: 1 });
            store.apply(&Batch::new(&checks).expect("distinct")).await
        });
        for _ in 0..200 {
            yield_now().await;
        }
        task
    }

    /// A request alone, then five that ride in one call, and two that share a state with them and ride in the one after it,
    /// because they have another limit as well.
    async fn asks_all(&self, key: &'static str) -> (Task, Vec<Task>, Vec<Task>) {
        self.proxy.hang(true);
        let under_way = self.asks(key, [&self.busy]).await;
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            first.push(self.asks(key, [&self.shared]).await);
        }
        for _ in 0..2 {
            second.push(self.asks(key, [&self.shared, &self.other]).await);
        }
        (under_way, first, second)
    }
}

/// What remains of each limit.
async fn remaining(task: Task) -> Vec<u64> {
    let verdict = task.await.expect("no panic").expect("decides");
    assert!(verdict.allowed());
    verdict.decisions().iter().map(|decision| decision.remaining).collect()
}

async fn only_those_that_rode_in_the_call_learn_that_their_outcome_is_unknown(client: Client) {
    let faulty = Faulty::new(client).await;
    // From here on the server knows all scripts, and no call is repeated by its text.
    let (under_way, first, second) = faulty.asks_all("warm").await;
    faulty.proxy.hang(false);
    for task in std::iter::once(under_way).chain(first).chain(second) {
        remaining(task).await;
    }
    for (key, fault) in [("lost", Fault::ReplyLost), ("cut", Fault::NeverReached)] {
        let (under_way, first, second) = faulty.asks_all(key).await;
        // The first call with this limit, which the one under way does not have.
        match fault {
            Fault::ReplyLost => faulty.proxy.swallow_matching("shared", 1),
            Fault::NeverReached => faulty.proxy.cut_matching("shared", 1),
        }
        faulty.proxy.hang(false);
        assert_eq!(remaining(under_way).await, [19], "{fault:?}");
        for task in first {
            let error = task.await.expect("no panic").expect_err("its reply is lost");
            assert_eq!(error.kind(), ErrorKind::Indeterminate, "{fault:?}: {error}");
        }
        // All that rode in the lost call are charged, or none.
        let left = if fault == Fault::ReplyLost { 15 } else { 20 };
        for (n, task) in (1..).zip(second) {
            assert_eq!(remaining(task).await, [left - n, 20 - n], "{fault:?}");
        }
        let after = faulty.asks(key, [&faulty.shared]).await;
        assert_eq!(remaining(after).await, [left - 3], "{fault:?}");
    }
    assert_eq!(faulty.proxy.swallowed(), 1);
}

with_each_client!(only_those_that_rode_in_the_call_learn_that_their_outcome_is_unknown);
