//! The laws, on a real Redis, in every mode.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::{Limit, Policy, PolicyState};
use ratelimit_redis::{
    Builder, Cas, Connection, Lua, Mode, Multi, RedisConnection, RedisStore, Reply, Word,
};
use ratelimit_testkit::{Harness, RedisServer, conformance};
use tokio::runtime::Runtime;

/// How long a call may take on a machine that has other things to do as well.
const DEADLINE: Duration = Duration::from_secs(20);
/// How much longer than its state can matter a key may live: what passes between the decision and the
/// look at it does not count against this, it only shortens what is left.
const SLACK: Duration = Duration::from_secs(2);

/// One server for all tests, one connection a test, one prefix a store.
struct OnServer {
    runtime: Runtime,
    connection: Arc<RedisConnection>,
}

/// No two stores of this process share a prefix, and the server is this process's own.
static NEXT_PREFIX: AtomicU64 = AtomicU64::new(0);

impl OnServer {
    fn new() -> Self {
        let server = RedisServer::shared().expect("a server to test on");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let connection = runtime.block_on(RedisConnection::open(&server.url(), DEADLINE));
        Self { runtime, connection: Arc::new(connection.expect("the server is up")) }
    }

    fn store<M: Mode>(&self, builder: Builder<M>) -> RedisStore<M, Arc<RedisConnection>> {
        let prefix = format!("law{}", NEXT_PREFIX.fetch_add(1, Ordering::Relaxed));
        builder.prefix(&prefix).over(Arc::clone(&self.connection)).expect("a plain prefix")
    }

    async fn leaks(&self, prefix: &str, within: Duration) -> Vec<String> {
        let mut leaks = Vec::new();
        for key in self.keys(prefix).await {
            let ttl = self.connection.send(&key, &[Word::Text("PTTL"), Word::Text(&key)]).await;
            let Reply::Integer(ttl_ms) = ttl.expect("the server answers") else {
                panic!("a time to live is a number");
            };
            match u64::try_from(ttl_ms).map(Duration::from_millis) {
                Ok(ttl) if ttl <= within + SLACK => {}
                Ok(ttl) => {
                    leaks.push(format!("{key} lives for {ttl:?}, and matters for {within:?}"));
                }
                Err(_) if ttl_ms == -2 => {} // gone since the scan
                Err(_) => leaks.push(format!("{key} lives for ever")),
            }
        }
        leaks
    }

    /// All keys of a prefix.
    async fn keys(&self, prefix: &str) -> Vec<String> {
        let pattern = format!("{prefix}:*");
        let (mut cursor, mut keys) = (String::from("0"), Vec::new());
        loop {
            let words = ["SCAN", &cursor, "MATCH", &pattern, "COUNT", "1000"].map(Word::Text);
            let reply = self.connection.send("", &words).await.expect("the server answers");
            let Reply::Array(parts) = reply else { panic!("a cursor and keys") };
            let [Reply::Text(next), Reply::Array(found)] = &parts[..] else {
                panic!("a cursor and keys");
            };
            for key in found {
                let Reply::Text(key) = key else { panic!("a key") };
                keys.push(String::from_utf8(key.clone()).expect("keys are text"));
            }
            cursor = String::from_utf8(next.clone()).expect("a cursor");
            if cursor == "0" {
                return keys;
            }
        }
    }
}

/// Writes the harness of a mode.
macro_rules! harness {
    ($harness:ident, $mode:ty, $builder:expr, $gives_back:literal) => {
        struct $harness(OnServer);

        impl Harness for $harness {
            type Store = RedisStore<$mode, Arc<RedisConnection>>;
            const CASES: u32 = 32;
            const SMALL_TRACE_REQUESTS: u32 = 2;
            const GIVES_BACK: bool = $gives_back;

            fn new() -> Self {
                Self(OnServer::new())
            }

            fn store(&self) -> Self::Store {
                self.0.store($builder)
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.0.runtime.block_on(future)
            }

            async fn state(
                &self,
                store: &Self::Store,
                limit: &Limit<Policy>,
                key: &str,
            ) -> Option<PolicyState> {
                store.state(limit, key).await.expect("a state, or none")
            }

            async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
                self.0.leaks(store.prefix(), within).await
            }
        }
    };
}

harness!(InLua, Lua, RedisStore::builder(), true);
harness!(ComparedAndSet, Cas, RedisStore::builder().cas(), true);
harness!(InTransactions, Multi, RedisStore::builder().multi(), false);

conformance!(redis_lua, InLua);
conformance!(redis_cas, ComparedAndSet);
conformance!(redis_multi, InTransactions, attempts);
