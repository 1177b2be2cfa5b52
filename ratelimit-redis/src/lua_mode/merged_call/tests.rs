//! What a request that waits for others is promised: an end by its deadline, whatever the others do, and a bound.
//!
//! By given time, over a connection that answers as a server without keys does when the test lets it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::FutureExt as _;
use ratelimit_core::{Check, ErrorKind, Gcra, Limit, Store as _, StoreError as _};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::*;
use crate::connection::{Argument, Reply};
use crate::merge::Queues;

const DEADLINE: Duration = Duration::from_secs(1);
/// The clock's timers are exact to a millisecond.
const EXACT: Duration = Duration::from_millis(2);

/// A connection to a server without keys, which answers a command for each permit.
struct Fake {
    address: Arc<str>,
    open: Semaphore,
    /// The arguments of the commands.
    commands: Mutex<Vec<Vec<String>>>,
}

impl Fake {
    fn answers(&self, commands: usize) {
        self.open.add_permits(commands);
    }

    /// Answers no more.
    fn hangs(&self) {
        self.open.forget_permits(Semaphore::MAX_PERMITS);
    }

    fn commands(&self) -> usize {
        self.commands.lock().expect("no panic").len()
    }
}

impl Connection for Fake {
    async fn send(
        &self,
        _key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let words: Vec<_> =
            words.iter().map(|word| String::from_utf8(word.to_bytes()).expect("text")).collect();
        let answer = answer(&words);
        self.commands.lock().expect("no panic").push(words);
        let address = Arc::clone(&self.address);
        let late = RedisError::TimedOut { address, deadline: deadline.given() };
        timeout_at(deadline.at(), self.open.acquire())
            .await
            .map_err(|_| late)?
            .expect("open")
            .forget();
        Ok(answer)
    }

    async fn transaction(
        &self,
        _key: &str,
        _commands: &[Vec<Argument<'_>>],
        _deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        unreachable!("the mode sends scripts")
    }

    async fn send_to_each(
        &self,
        _words: &[Argument<'_>],
        _deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        unreachable!("the mode sends scripts")
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        &self.address
    }
}

const TIME: &str = "1795218392 123456";

/// What the script of one request, or the merged script for groups of one run each, answers about keys that do not
/// exist: it admits all.
fn answer(words: &[String]) -> Reply {
    let text = |text: String| Reply::Text(text.into_bytes());
    let arguments = &words[3 + words[2].parse::<usize>().expect("the number of keys")..];
    let Ok(single) = arguments[0].parse::<usize>() else { return text(format!("+{TIME}\n")) };
    let groups = arguments[1].parse::<usize>().expect("the number of groups");
    // After the field, the capacity, three parameters of GCRA and the charge: runs of a count and a charge.
    let counts = arguments[8..].chunks(3).map(|run| run[1].clone());
    let counts: Vec<_> = vec!["1".to_owned(); single].into_iter().chain(counts).collect();
    assert_eq!(counts.len(), groups, "{words:?}");
    let of_groups = counts.iter().map(|count| text(format!("{count}\n")));
    Reply::Array([text(TIME.to_owned())].into_iter().chain(of_groups).collect())
}

type FakeStore = RedisStore<Lua, Arc<Fake>>;
type Answer = Result<u64, RedisError>;

fn store() -> (FakeStore, Arc<Fake>) {
    let fake =
        Fake { address: "fake:1".into(), open: Semaphore::new(0), commands: Mutex::default() };
    let fake = Arc::new(fake);
    let store = RedisStore::builder().deadline(DEADLINE).over(Arc::clone(&fake));
    let mut store = store.expect("a prefix");
    // All keys wait for each other.
    let inner = Arc::get_mut(&mut store.inner).expect("the only clone");
    inner.queues = Some(Queues::one(Queue::default()));
    (store, fake)
}

/// What remains of ten, and how long it took to say.
async fn ask(store: FakeStore, key: &'static str) -> (Answer, Duration) {
    let begin = Instant::now();
    let gcra = Gcra::new("10/d".parse().expect("a rate"), 10).expect("a limit");
    let limit = Limit::new("api", gcra).expect("a name");
    let check = Check { limit: &limit, key, cost: 1 };
    let verdict = store.apply(&Batch::one(&check)).await;
    (verdict.map(|verdict| verdict.remaining()), begin.elapsed())
}

/// Asks in a task of its own, which has run until it waits.
async fn asks(store: &FakeStore, key: &'static str) -> JoinHandle<(Answer, Duration)> {
    let task = tokio::spawn(ask(store.clone(), key));
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    task
}

/// A request that no task polls any more.
fn unpolled(
    store: &FakeStore,
    key: &'static str,
) -> Pin<Box<impl Future<Output = (Answer, Duration)> + use<>>> {
    let mut kept = Box::pin(ask(store.clone(), key));
    assert!((&mut kept).now_or_never().is_none(), "the server answers nothing yet");
    kept
}

/// Requests that come all the time to a server that hangs. Those that wait for the call under way, those in flight
/// and those that went alone end when their own time is over, also after callers before them are dropped.
#[tokio::test(start_paused = true)]
async fn every_caller_ends_by_its_own_deadline() {
    for (dropped, after_ms) in
        [(None, 0), (Some(0), 300), (Some(1), 70), (Some(1), 300), (Some(1), 730), (Some(2), 990)]
    {
        let (store, fake) = store();
        let mut tasks = Vec::new();
        for n in 0..30 {
            tasks.push(asks(&store, ["alice", "alice", "bob"][n % 3]).await);
            sleep(Duration::from_millis(70)).await;
            if let Some(dropped) = dropped
                && n == after_ms / 70
            {
                tasks[dropped].abort();
            }
        }
        for (n, task) in tasks.into_iter().enumerate() {
            let Ok((answer, took)) = task.await else {
                assert_eq!(dropped, Some(n));
                continue;
            };
            let error = answer.expect_err("the server hangs");
            let kinds = [ErrorKind::Unavailable, ErrorKind::Indeterminate];
            assert!(kinds.contains(&error.kind()), "{error}");
            assert!(
                took <= DEADLINE + EXACT,
                "{n}: {took:?} with {dropped:?} after {after_ms} ms: {error}"
            );
            // A call ends by the earliest deadline of its requests, each of which has a quarter of its time left.
            assert!(took + EXACT >= DEADLINE / 4, "{n}: {took:?}: {error}");
        }
        assert!(fake.commands() < 10, "requests that wait share calls: {}", fake.commands());
    }
}

/// Requests whose sender has gone with its runtime join again with what is left of their time.
#[tokio::test(start_paused = true)]
async fn a_caller_that_joins_with_an_earlier_deadline_watches_the_clock_itself() {
    let group = Arc::new(Group::new(vec!["key".to_owned()], Vec::new(), 1));
    let deadlines = [8, 4, 6, 2, 4].map(|seconds| Deadline::within(Duration::from_secs(seconds)));
    let begin = Instant::now();
    let on = Handle::current().id();
    let places = deadlines.map(|deadline| (group.add([1].into_iter(), deadline, on), deadline));
    for (place, deadline) in &places {
        place.watch_on(&Handle::current(), *deadline);
    }
    let tasks = places.map(|(place, deadline)| {
        tokio::spawn(async move {
            assert!(place.outcome(deadline, || {}).await.is_none());
            (begin.elapsed(), deadline.given())
        })
    });
    for task in tasks {
        let (took, given) = task.await.expect("no panic");
        assert!(took <= given + EXACT && took >= given, "{took:?} of {given:?}");
    }
}

/// A caller may keep a future and no longer poll it, as `select!` with a reference does. The requests that wait for
/// that call are decided in their time.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_no_longer_polled_holds_no_other_back() {
    let (store, fake) = store();
    let kept = unpolled(&store, "kept");
    fake.answers(100);
    let tasks = [asks(&store, "alice").await, asks(&store, "alice").await];
    let mut remaining = Vec::new();
    for task in tasks {
        let (answer, took) = task.await.expect("no panic");
        remaining.push(answer.expect("another sends it"));
        assert!(took <= DEADLINE / 2 + EXACT, "{took:?}");
    }
    assert_eq!(remaining, [9, 8]);
    // The queue has recovered: no request waits any more.
    let (answer, took) = asks(&store, "bob").await.await.expect("no panic");
    assert_eq!((answer.expect("decided"), took), (9, Duration::ZERO));
    // The call that was overtaken ends nothing but itself.
    fake.hangs();
    let busy = unpolled(&store, "kept");
    fake.answers(100);
    assert_eq!(kept.await.0.expect("decided"), 9);
    let waits = asks(&store, "carol").await;
    assert!(!waits.is_finished(), "the other call is under way");
    assert_eq!(busy.await.0.expect("decided"), 9);
    assert_eq!(waits.await.expect("no panic").0.expect("decided"), 9);
}

/// So may several callers whose requests wait for the call, among them the first of their group.
#[tokio::test(start_paused = true)]
async fn requests_that_are_no_longer_polled_hold_no_other_of_their_call_back() {
    for kept in 0..9 {
        let (store, fake) = store();
        let under_way = unpolled(&store, "kept");
        let waiting: Vec<_> = (0..kept).map(|_| unpolled(&store, "alice")).collect();
        let asked = asks(&store, "alice").await;
        fake.answers(100);
        let (answer, took) = timeout_at(Instant::now() + 2 * DEADLINE, asked)
            .await
            .unwrap_or_else(|_| panic!("it hangs behind {kept}"))
            .expect("no panic");
        assert_eq!(answer.expect("it overtakes the call"), 9 - kept);
        assert!(took <= DEADLINE / 2 + EXACT, "{kept}: {took:?}");
        for (kept, remaining) in waiting.into_iter().zip((0..10).rev()) {
            assert_eq!(kept.await.0.expect("it was sent with the others"), remaining);
        }
        assert_eq!(under_way.await.0.expect("decided"), 9);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_behind_one_that_is_no_longer_polled_end_by_their_own_deadline() {
    let (store, _fake) = store();
    let _under_way = unpolled(&store, "kept");
    let _first = unpolled(&store, "alice");
    let mut tasks = Vec::new();
    for _ in 0..9 {
        tasks.push(asks(&store, "alice").await);
        sleep(Duration::from_millis(10)).await;
    }
    for task in tasks {
        let (answer, took) = task.await.expect("no panic");
        assert!(answer.is_err() && took <= DEADLINE + EXACT, "{took:?}: {answer:?}");
    }
}

/// A runtime of one thread runs its tasks only while `block_on` runs. A request of another runtime does not depend
/// on that.
#[test]
fn a_runtime_that_no_thread_drives_holds_no_request_of_another_back() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_time().start_paused(true).build().expect("a runtime")
    };
    let (idle, driven) = (runtime(), runtime());
    let (store, fake) = store();
    let entered = idle.enter();
    let busy = unpolled(&store, "kept");
    drop(entered);
    let tasks = ["alice", "bob"].map(|key| driven.block_on(asks(&store, key)));
    fake.answers(100);
    assert_eq!(idle.block_on(busy).0.expect("decided"), 9);
    for task in tasks {
        let (answer, _) = driven.block_on(task).expect("no panic");
        assert_eq!(answer.expect("its own runtime sends it"), 9);
    }
}

#[tokio::test(start_paused = true)]
async fn when_too_many_wait_the_next_is_refused_and_charged_nothing() {
    let (mut store, fake) = store();
    let inner = Arc::get_mut(&mut store.inner).expect("the only clone");
    inner.queues = Some(Queues::one(Queue::bounded(3)));
    let under_way = asks(&store, "busy").await;
    let mut tasks = Vec::new();
    for _ in 0..3 {
        tasks.push(asks(&store, "alice").await);
    }
    // Those of one key do not use up the places of others.
    let other = asks(&store, "bob").await;
    for key in ["alice", "bob"] {
        let (refused, took) = asks(&store, key).await.await.expect("no panic");
        let error = refused.expect_err("too many wait");
        assert!(matches!(error, RedisError::Overloaded { .. }), "{error}");
        assert_eq!((error.kind(), took), (ErrorKind::Unavailable, Duration::ZERO));
    }
    assert_eq!(fake.commands(), 1);
    fake.answers(100);
    assert_eq!(under_way.await.expect("no panic").0.expect("decided"), 9);
    let mut remaining = Vec::new();
    for task in tasks {
        remaining.push(task.await.expect("no panic").0.expect("decided"));
    }
    assert_eq!(remaining, [9, 8, 7]);
    assert_eq!(other.await.expect("no panic").0.expect("decided"), 9);
    assert_eq!(fake.commands(), 2);
    assert!(asks(&store, "alice").await.await.expect("no panic").0.is_ok(), "there is room again");
}
