//! Requests that come while a call is under way go together in the next one: observed on the wire.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, ErrorKind, FixedWindow, Gcra, Limit, Policy, SlidingCounter, Stack, Store,
    StoreError, TokenBucket, Verdict,
};
use ratelimit_redis::{
    Argument, Connection, Deadline, Lua, LuaProgram, RedisConnection, RedisError, RedisStore,
    Reply, Tag,
};
use ratelimit_testkit::RedisServer;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, yield_now};

/// A connection that holds each command back until the test lets it go.
struct Gate {
    connection: RedisConnection,
    open: Semaphore,
    /// What happens to the next commands; all others are sent.
    fates: Mutex<VecDeque<Fate>>,
    calls: Mutex<Vec<Vec<String>>>,
}

/// What happens to a command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Sent,
    /// It is sent, and its reply is lost.
    ReplyLost,
    NeverSent,
    /// The server refuses it.
    Refused,
}

impl Gate {
    fn lets_go(&self, commands: usize) {
        self.open.add_permits(commands);
    }

    /// The calls of scripts since the last time. Those that repeat one by its text do not count.
    fn calls(&self) -> Vec<Vec<String>> {
        let mut calls = std::mem::take(&mut *self.calls.lock().expect("no panic"));
        calls.retain(|words| words[0] == "EVALSHA");
        calls
    }

    /// Holds commands back again.
    fn closes(&self) {
        self.open.forget_permits(Semaphore::MAX_PERMITS);
    }
}

impl Connection for Gate {
    async fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let word = |word: &Argument<'_>| match word {
            Argument::Text(text) => (*text).to_owned(),
            Argument::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Argument::Number(number) => number.to_string(),
            Argument::Integer(number) => number.to_string(),
        };
        self.calls.lock().expect("no panic").push(words.iter().map(word).collect());
        tokio::time::timeout_at(deadline.at(), self.open.acquire())
            .await
            .map_err(|_| RedisError::TimedOut {
                address: Arc::clone(self.connection.address()),
                deadline: deadline.given(),
            })?
            .expect("never closed")
            .forget();
        let fate = self.fates.lock().expect("no panic").pop_front().unwrap_or(Fate::Sent);
        let (address, reason) = (Arc::clone(self.connection.address()), "by the test".to_owned());
        match fate {
            Fate::NeverSent => return Err(RedisError::Unreachable { address, reason }),
            Fate::Refused => {
                let code = "OOM".to_owned();
                return Err(RedisError::Server { address, code, message: reason });
            }
            Fate::Sent | Fate::ReplyLost => {}
        }
        let patient = Deadline::within(Duration::from_secs(20));
        let reply = self.connection.send(key, words, patient).await;
        match fate {
            Fate::ReplyLost => Err(RedisError::Lost { address, reason }),
            _ => reply,
        }
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        self.connection.transaction(key, commands, deadline).await
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.connection.send_to_each(words, deadline).await
    }

    fn is_cluster(&self) -> bool {
        // All keys are in one slot, and so in one queue.
        true
    }

    fn address(&self) -> &Arc<str> {
        self.connection.address()
    }
}

/// A store behind a gate.
struct Merging {
    server: RedisServer,
    gate: Arc<Gate>,
    store: RedisStore<Lua, Arc<Gate>>,
}

type Task = JoinHandle<Result<Verdict, RedisError>>;

impl Merging {
    async fn new() -> Self {
        Self::within(Duration::from_secs(20)).await
    }

    async fn within(deadline: Duration) -> Self {
        let server = RedisServer::start().expect("redis-server");
        let connection = RedisConnection::open(&server.url(), Duration::from_secs(20)).await;
        let gate = Arc::new(Gate {
            connection: connection.expect("it is up"),
            open: Semaphore::new(0),
            fates: Mutex::default(),
            calls: Mutex::default(),
        });
        let store = RedisStore::builder().tag(Tag::Fixed("all".into())).deadline(deadline);
        let store = store.over(Arc::clone(&gate));
        Self { server, gate, store: store.expect("a prefix") }
    }

    /// Starts a request, which runs until it waits.
    async fn asks<A: LuaProgram + 'static>(
        &self,
        checks: impl IntoIterator<Item = (&Arc<Limit<A>>, &'static str, u64)>,
    ) -> Task
    where
        A::State: Send + Sync,
    {
        let checks: Vec<_> =
            checks.into_iter().map(|(limit, key, cost)| (Arc::clone(limit), key, cost)).collect();
        let store = self.store.clone();
        let task = tokio::spawn(async move {
            let checks: Vec<_> =
                checks.iter().map(|(limit, key, cost)| Check { limit, key, cost: *cost }).collect();
            store.apply(&Batch::new(&checks).expect("distinct")).await
        });
        settled().await;
        task
    }

    /// A request that is under way: all that come now wait for it.
    async fn is_busy(&self) -> Task {
        let limit = limit("busy", Gcra::new("1/h".parse().expect("a rate"), 9).expect("a limit"));
        self.gate.calls();
        let task = self.asks([(&limit, "another", 1)]).await;
        assert_eq!(self.gate.calls().len(), 1);
        task
    }

    /// Lets the call under way go, and all that come.
    async fn lands(&self, busy: Task) {
        self.gate.lets_go(1_000);
        assert!(busy.await.expect("no panic").expect("decides").allowed());
    }
}

/// Until all tasks wait. The runtime has one thread.
async fn settled() {
    for _ in 0..200 {
        yield_now().await;
    }
}

fn limit<A: ratelimit_core::Algorithm>(name: &str, algorithm: A) -> Arc<Limit<A>> {
    Arc::new(Limit::new(name, algorithm).expect("a name"))
}

/// Ten per day, by each algorithm that merges.
fn policies() -> Vec<Policy> {
    let rate = || "10/d".parse().expect("a rate");
    let gcra = || Gcra::new(rate(), 10).expect("a limit");
    vec![
        gcra().into(),
        TokenBucket::new(rate(), 10).expect("a limit").into(),
        FixedWindow::new(rate()).expect("a limit").into(),
        SlidingCounter::new(rate()).expect("a limit").into(),
    ]
}

async fn remaining(task: Task) -> (bool, u64) {
    let verdict = task.await.expect("no panic").expect("decides");
    (verdict.allowed(), verdict.remaining())
}

#[tokio::test]
async fn requests_of_one_key_are_one_call_and_charged_in_their_order() {
    let merging = Merging::new().await;
    for (n, policy) in policies().into_iter().enumerate() {
        let limit = limit(&format!("l{n}"), policy);
        let busy = merging.is_busy().await;
        let mut tasks = Vec::new();
        for cost in [1, 1, 1, 4, 9, 2, 2, 1, 1] {
            tasks.push(merging.asks([(&limit, "alice", cost)]).await);
        }
        assert!(merging.gate.calls().is_empty(), "they wait");
        merging.lands(busy).await;
        let mut seen = Vec::new();
        for task in tasks {
            seen.push(remaining(task).await);
        }
        let due = [(9, true), (8, true), (7, true), (3, true), (3, false), (1, true), (1, false)];
        let due = due.into_iter().chain([(0, true), (0, false)]).map(|(left, yes)| (yes, left));
        assert_eq!(seen, due.collect::<Vec<_>>(), "{limit:?}");
        let calls = merging.gate.calls();
        assert_eq!(calls.len(), 1, "{calls:?}");
        merging.gate.closes();
    }
}

#[tokio::test]
async fn requests_of_different_keys_and_limits_go_in_one_call() {
    let merging = Merging::new().await;
    let gcra = |n| Gcra::new("10/d".parse().expect("a rate"), n).expect("a limit");
    let (few, many) = (limit("few", gcra(2)), limit("many", gcra(5)));
    let busy = merging.is_busy().await;
    let mut tasks = Vec::new();
    for key in ["alice", "bob", "carol", "alice", "alice"] {
        tasks.push(merging.asks([(&few, key, 1)]).await);
        tasks.push(merging.asks([(&many, key, 1)]).await);
    }
    merging.lands(busy).await;
    let mut left = Vec::new();
    for task in tasks {
        left.push(remaining(task).await);
    }
    let due = [(1, 4), (1, 4), (1, 4), (0, 3), (0, 2)];
    let due: Vec<_> = due.into_iter().flat_map(|(few, many)| [few, many]).collect();
    assert_eq!(left.iter().map(|(_, left)| *left).collect::<Vec<_>>(), due);
    assert_eq!(left.iter().filter(|(allowed, _)| !allowed).count(), 1, "{left:?}");
    assert_eq!(merging.gate.calls().len(), 1);
}

#[tokio::test]
async fn batches_are_all_or_nothing_and_those_that_overlap_keep_their_order() {
    let merging = Merging::new().await;
    let gcra = |n| Gcra::new("10/d".parse().expect("a rate"), n).expect("a limit");
    let (few, many) = (limit("few", gcra(2)), limit("many", gcra(5)));
    let busy = merging.is_busy().await;
    let both = [(&few, "alice", 1), (&many, "alice", 1)];
    let first = merging.asks(both).await;
    let second = merging.asks(both).await;
    let third = merging.asks(both).await;
    // Shares a state with those before it, and has other limits: it goes after them.
    let alone = merging.asks([(&many, "alice", 3)]).await;
    let last = merging.asks([(&few, "alice", 1)]).await;
    let elsewhere = merging.asks([(&few, "bob", 1)]).await;
    merging.lands(busy).await;
    assert_eq!(remaining(first).await, (true, 1));
    assert_eq!(remaining(second).await, (true, 0));
    assert_eq!(remaining(third).await, (false, 0));
    assert_eq!(remaining(alone).await, (true, 0), "the third request charged nothing");
    assert_eq!(remaining(last).await, (false, 0));
    assert_eq!(remaining(elsewhere).await, (true, 1));
    let calls = merging.gate.calls();
    let with =
        |text: &str| calls.iter().position(|words| words.iter().any(|word| word.contains(text)));
    // Two scripts of one flight, then the one of the next.
    assert!(with("}bob") < Some(2), "it goes with the first of them: {calls:?}");
    assert_eq!(calls.len(), 3, "{calls:?}");
}

#[tokio::test]
async fn stacks_merge_as_other_limits_do() {
    let merging = Merging::new().await;
    let stack = limit("stack", Stack::new(policies().into_iter().take(3)).expect("a stack"));
    let busy = merging.is_busy().await;
    let mut tasks = Vec::new();
    for cost in [3, 3, 3, 3, 1] {
        tasks.push(merging.asks([(&stack, "alice", cost)]).await);
    }
    merging.lands(busy).await;
    let mut seen = Vec::new();
    for task in tasks {
        seen.push(remaining(task).await);
    }
    assert_eq!(seen, [(true, 7), (true, 4), (true, 1), (false, 1), (true, 0)]);
    assert_eq!(merging.gate.calls().len(), 1);
}

#[tokio::test]
async fn a_request_that_is_dropped_is_charged_at_most_once_and_shifts_no_other() {
    let merging = Merging::new().await;
    let limit = limit("api", policies().swap_remove(0));
    let busy = merging.is_busy().await;
    let mut tasks = Vec::new();
    for cost in [1, 2, 3, 1] {
        tasks.push(merging.asks([(&limit, "alice", cost)]).await);
    }
    // Before it is sent: it is never charged.
    let dropped = tasks.remove(1);
    dropped.abort();
    settled().await;
    merging.gate.lets_go(1);
    settled().await;
    // The server lacks the script of the busy request: its text.
    merging.gate.lets_go(1);
    assert!(remaining(busy).await.0);
    settled().await;
    // After it is sent: it stays charged, and the others get their own answers.
    let dropped = tasks.remove(1);
    dropped.abort();
    merging.gate.lets_go(1_000);
    let mut seen = Vec::new();
    for task in tasks {
        seen.push(remaining(task).await);
    }
    assert_eq!(seen, [(true, 9), (true, 5)]);
}

#[tokio::test]
async fn a_lost_reply_is_indeterminate_for_those_that_rode_in_the_call_and_no_other() {
    for (fate, kind) in
        [(Fate::ReplyLost, ErrorKind::Indeterminate), (Fate::NeverSent, ErrorKind::Unavailable)]
    {
        let merging = Merging::new().await;
        let limit = limit("api", policies().swap_remove(0));
        let busy = merging.is_busy().await;
        let (alice, bob) =
            (merging.asks([(&limit, "alice", 1)]).await, merging.asks([(&limit, "bob", 1)]).await);
        let fates = [Fate::Sent, Fate::Sent, Fate::Sent, fate];
        merging.gate.fates.lock().expect("no panic").extend(fates);
        merging.lands(busy).await;
        for task in [alice, bob] {
            let error = task.await.expect("no panic").expect_err("it is lost");
            assert_eq!(error.kind(), kind, "{error}");
        }
        let after = merging.asks([(&limit, "alice", 1)]).await;
        let charged = u64::from(fate == Fate::ReplyLost);
        assert_eq!(remaining(after).await, (true, 9 - charged));
    }
}

#[tokio::test]
async fn what_the_server_refuses_is_decided_one_by_one() {
    let merging = Merging::new().await;
    let limit = limit("api", policies().swap_remove(0));
    let mut aside = crate::common::aside(&merging.server);
    let () = crate::common::query(&mut aside, &["RPUSH", "rl:1::{all}mallory", "no", "hash"]);
    let () = crate::common::query(&mut aside, &["HSET", "rl:1::{all}eve", "api", "no state"]);
    let busy = merging.is_busy().await;
    let mut tasks = Vec::new();
    for key in ["alice", "mallory", "eve", "alice"] {
        tasks.push(merging.asks([(&limit, key, 1)]).await);
    }
    merging.lands(busy).await;
    let last = remaining(tasks.pop().expect("four")).await;
    let mut tasks = tasks.into_iter();
    let alice = remaining(tasks.next().expect("three")).await;
    assert_eq!((alice, last), ((true, 9), (true, 8)));
    for task in tasks {
        let error = task.await.expect("no panic").expect_err("the value is not ours");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }

    // A call that the server refuses as a whole has charged nothing.
    merging.gate.closes();
    let busy = merging.is_busy().await;
    let tasks =
        [merging.asks([(&limit, "dave", 1)]).await, merging.asks([(&limit, "dave", 1)]).await];
    merging.gate.fates.lock().expect("no panic").extend([Fate::Sent, Fate::Refused]);
    merging.lands(busy).await;
    let mut left = Vec::new();
    for task in tasks {
        left.push(remaining(task).await);
    }
    assert_eq!(left, [(true, 9), (true, 8)]);
}

#[tokio::test]
async fn a_request_waits_for_the_call_under_way_until_its_deadline_and_is_not_sent_after_it() {
    let merging = Merging::within(Duration::from_millis(40)).await;
    let limit = limit("api", policies().swap_remove(0));
    let busy = merging.is_busy().await;
    let waits = merging.asks([(&limit, "alice", 1)]).await;
    let error = busy.await.expect("no panic").expect_err("the server hangs");
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    let error = waits.await.expect("no panic").expect_err("the server hangs");
    assert!([ErrorKind::Unavailable, ErrorKind::Indeterminate].contains(&error.kind()), "{error}");
}

/// Requests of a runtime that ends, while those of another wait for it.
#[test]
fn a_runtime_that_ends_strands_no_request_of_another() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    let lasting = runtime().expect("a runtime");
    let merging = lasting.block_on(Merging::new());
    let limit = limit("api", policies().swap_remove(0));
    let ending = runtime().expect("a runtime");
    ending.block_on(async {
        let _busy = merging.is_busy().await;
        let _waits = merging.asks([(&limit, "alice", 1)]).await;
    });
    let waits = lasting.block_on(merging.asks([(&limit, "bob", 1)]));
    drop(ending);
    merging.gate.lets_go(1_000);
    assert_eq!(lasting.block_on(remaining(waits)), (true, 9));
}
