//! Requests that wait share a call: they are charged in their order, each learns its own outcome by
//! its own deadline, and no caller that stops holds another back.

use std::collections::HashSet;
use std::pin::Pin;
use std::task::Poll;

use futures_util::FutureExt as _;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use ratelimit_core::Gcra;
use ratelimit_core::algorithm::{GcraState, Step};
use ratelimit_redis::{LuaProgram, RecordText, Stored, Tag, Twin};
use ratelimit_testkit::PureStore;
use tokio::sync::Semaphore;

use crate::common::prelude::*;
use crate::examples::own_twin::Trial;

/// What holds each command back until the test lets it go.
struct Gate {
    open: Semaphore,
    /// Holds back the commands that are about one of [`OUT`].
    open_for_first: Semaphore,
    /// The server refuses the first command about this identifier.
    refused: Mutex<Option<&'static str>>,
    /// How many calls of scripts there were.
    calls: AtomicUsize,
}

impl Gate {
    fn opens(&self) {
        self.open.add_permits(10_000);
        self.opens_for_first();
    }

    /// Lets go only the calls that were the first ones out.
    fn opens_for_first(&self) {
        self.open_for_first.add_permits(10_000);
    }

    fn closes(&self) {
        for gate in [&self.open, &self.open_for_first] {
            gate.forget_permits(Semaphore::MAX_PERMITS);
        }
    }
}

/// An identifier for each of the calls that a store has out at first.
const OUT: [&str; 2] = ["busy", "idle"];

/// A store behind a gate. All requests lie in one slot.
#[derive(Clone)]
struct Gated {
    gate: Arc<Gate>,
    store: RedisStore<Lua, MeddlingConnection>,
}

type Task = JoinHandle<Result<Verdict, RedisError>>;
type Asked = Pin<Box<dyn Future<Output = Result<Verdict, RedisError>> + Send>>;

impl Gated {
    async fn new(server: &RedisServer, deadline: Duration, wrong: Option<Wrong>) -> Self {
        let builder = RedisStore::builder().deadline(deadline);
        Self::built(server, builder, wrong).await
    }

    async fn built(server: &RedisServer, builder: Builder, wrong: Option<Wrong>) -> Self {
        let (open, open_for_first) = (Semaphore::new(0), Semaphore::new(0));
        let (refused, calls) = (Mutex::default(), AtomicUsize::new(0));
        let gate = Arc::new(Gate { open, open_for_first, refused, calls });
        let connection = meddling_connection(server).await.clustered().holding();
        let connection = connection.before_with(Arc::clone(&gate), |gate, words| async move {
            let is_call = usize::from(words.name() == "EVALSHA");
            gate.calls.fetch_add(is_call, Ordering::SeqCst);
            let is_about = |key: &mut &str| words.0.iter().any(|word| word.ends_with(*key));
            let is_first = OUT.into_iter().any(|mut key| is_about(&mut key));
            let open = if is_first { &gate.open_for_first } else { &gate.open };
            open.acquire().await.expect("never closed").forget();
            let refused = gate.refused.lock().unwrap().take_if(is_about);
            refused.map_or(Fate::Sent, |_| Fate::Refused)
        });
        let connection =
            if let Some(wrong) = wrong { connection.rewriting(wrong) } else { connection };
        let builder = builder.tag(Tag::Fixed("all".into())).prefix(&prefix());
        Self { gate, store: over(builder, connection) }
    }

    fn calls(&self) -> usize {
        self.gate.calls.load(Ordering::SeqCst)
    }

    fn future(&self, checks: &[(&Limit<AnyAlgorithm>, &'static str, u64)]) -> Asked {
        let store = self.store.clone();
        let checks: Vec<_> =
            checks.iter().map(|(l, key, cost)| ((*l).clone(), *key, *cost)).collect();
        Box::pin(async move {
            let checks: Vec<_> =
                checks.iter().map(|(limit, key, cost)| (limit, *key, *cost)).collect();
            apply(&store, &checks, Op::Acquire, None).await
        })
    }

    /// Starts a request, which runs until it waits. The runtime has one thread.
    async fn asks(&self, checks: &[(&Limit<AnyAlgorithm>, &'static str, u64)]) -> Task {
        let task = tokio::spawn(self.future(checks));
        turns().await;
        task
    }

    /// Requests that take all calls, so that those which come later share one.
    async fn fills(&self, limit: &Limit<AnyAlgorithm>) -> Vec<Task> {
        let mut tasks = Vec::new();
        for key in OUT {
            tasks.push(self.asks(&[(limit, key, 1)]).await);
        }
        tasks
    }

    /// A request that waits, and that no task polls any more.
    fn kept(&self, limit: &Limit<AnyAlgorithm>, key: &'static str) -> Asked {
        let mut kept = self.future(&[(limit, key, 1)]);
        assert!((&mut kept).now_or_never().is_none(), "the server answers nothing yet");
        kept
    }
}

/// So many turns of the runtime that each task runs until it waits.
async fn turns() {
    for _ in 0..200 {
        yield_now().await;
    }
}

async fn remaining(task: Task) -> u64 {
    let verdict = task.await.expect("no panic").expect("decides");
    assert!(verdict.allowed());
    verdict.remaining()
}

/// What a script may do wrong.
pub(crate) type Wrong = fn(&str) -> String;

/// Requests that wait for a call in flight: the limit's place, whether by the second key, the cost.
fn requests() -> impl Strategy<Value = Vec<Vec<(usize, bool, u64)>>> {
    let cost = prop_oneof![6 => Just(1_u64), 2 => 1..7_u64, 1 => Just(0)];
    let one = (0..8_usize, any::<bool>(), cost);
    let few = prop_oneof![
        4 => prop::collection::vec(one.clone(), 1..2),
        1 => prop::collection::vec(one, 1..4),
    ];
    // One that charges nothing waits for no other.
    let charges = |asks: &Vec<(usize, bool, u64)>| asks.iter().any(|(_, _, cost)| *cost > 0);
    prop::collection::vec(few.prop_filter("it charges", charges), 1..24)
}

/// Whether requests that share calls are decided as one after the other.
pub(crate) fn decides_in_order(wrong: Option<Wrong>, cases: u32) -> Result<(), String> {
    let (server, runtime) = (server(), runtime());
    // The same cases each time. A fault needs not be shrunk.
    let config =
        Config { cases, max_shrink_iters: 64, failure_persistence: None, ..Config::default() };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let (every, busy) = (every(9), seldom());
    // They have the name of the first, and another algorithm or other numbers, as of a customer.
    let renamed = ["sliding-counter 9/3650d", "gcra 7/3650d", "gcra 40/3650d burst 30"];
    let renamed = renamed.map(|words| limit(every[0].name(), words));
    let [changed, small, large] = &renamed;
    let yearly = limit("yearly", "fixed-window 9/year zone Europe/Berlin");
    let limits = [&every[0], &every[2], &every[3], &every[6], changed, small, large, &yearly];
    let ran = runner.run(&requests(), |requests| {
        runtime.block_on(async {
            let (gated, pure) = (Gated::new(&server, PATIENCE, wrong).await, PureStore::new());
            let in_flight = gated.fills(&busy).await;
            let (mut tasks, mut due) = (Vec::new(), Vec::new());
            for asks in requests {
                let mut checks: Vec<_> = asks
                    .iter()
                    .map(|(place, second, cost)| {
                        (limits[*place], ["alice", "bob"][usize::from(*second)], *cost)
                    })
                    .collect();
                checks.sort_by_key(|(limit, key, cost)| {
                    (limit.name(), *key, std::cmp::Reverse(*cost))
                });
                checks.dedup_by_key(|(limit, key, _)| (limit.name(), *key));
                // Some ask for the same limits in another order.
                if asks[0].1 {
                    checks.reverse();
                }
                tasks.push(gated.asks(&checks).await);
                due.push(told(&apply(&pure, &checks, Op::Acquire, None).await.expect("decides")));
            }
            gated.gate.opens();
            let lost = |error: &dyn std::fmt::Display| TestCaseError::fail(error.to_string());
            for task in in_flight {
                let _ = task.await.expect("no panic").map_err(|error| lost(&error))?;
            }
            for (task, due) in tasks.into_iter().zip(due) {
                let verdict = task.await.expect("no panic").map_err(|error| lost(&error))?;
                prop_assert_eq!(told(&verdict), due);
            }
            // None of those that wait waits for another: there are no more calls than may be out.
            // On a slow machine, one that measures the way may come between them, and what is left
            // then is shared anew.
            prop_assert!(wrong.is_some() || gated.calls() <= 2 * OUT.len() + 2);
            for limit in limits {
                for key in ["alice", "bob"] {
                    let left = peek(&pure, limit, key).await;
                    prop_assert_eq!(peek(&gated.store, limit, key).await, left);
                }
            }
            Ok(())
        })
    });
    ran.map_err(|error| error.to_string())
}

/// What does not depend on the moment.
fn told(verdict: &Verdict) -> Vec<(bool, u64)> {
    verdict.decisions().iter().map(|decision| (decision.allowed, decision.remaining)).collect()
}

#[test]
fn requests_that_share_calls_are_decided_in_the_order_in_which_they_came() {
    decides_in_order(None, 96).unwrap_or_else(|error| panic!("{error}"));
}

/// More requests than a call carries, all polled by one task: they are sent in their order.
#[tokio::test]
async fn calls_are_decided_in_the_order_in_which_they_came() {
    const MANY: u64 = 3_000;
    let (server, limit) = (server(), limit("api", "fixed-window 1000000/3650d"));
    let store = plain(&server).await;
    for round in 0..3 {
        let checks = [(&limit, "alice", 1)];
        let waits = (0..MANY).map(|_| apply(&store, &checks, Op::Acquire, None));
        let mut waits: Vec<_> = waits.map(|asked| (Box::pin(asked), None)).collect();
        std::future::poll_fn(|context| {
            for (asked, left) in waits.iter_mut().filter(|(_, left)| left.is_none()) {
                if let Poll::Ready(verdict) = asked.as_mut().poll(context) {
                    *left = Some(verdict.expect("decides").remaining());
                }
            }
            let is_over = waits.iter().all(|(_, left)| left.is_some());
            if is_over { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let left: Vec<_> = waits.into_iter().filter_map(|(_, left)| left).collect();
        let due: Vec<_> = (1..=MANY).map(|nth| 1_000_000 - round * MANY - nth).collect();
        assert_eq!(left, due);
    }
}

#[tokio::test]
async fn what_the_server_refuses_is_decided_one_by_one() {
    let (server, limit) = (server(), limit("api", "gcra 10/3650d"));
    let gated = Gated::new(&server, PATIENCE, None).await;
    let of = |key| gated.store.key(&limit, key);
    tell(&server, &["RPUSH", &of("mallory"), "no", "hash"]);
    tell(&server, &["HSET", &of("eve"), limit.state_name(), "no state"]);
    // And one call is refused as a whole, which has charged nothing.
    *gated.gate.refused.lock().unwrap() = Some("dave");
    let in_flight = gated.fills(&limit).await;
    let mut tasks = Vec::new();
    for key in ["alice", "mallory", "eve", "alice", "dave", "dave"] {
        tasks.push((key, gated.asks(&[(&limit, key, 1)]).await));
    }
    gated.gate.opens();
    for task in in_flight {
        assert_eq!(remaining(task).await, 9);
    }
    let mut decided = HashSet::new();
    for (key, task) in tasks {
        match key {
            "alice" | "dave" => assert!(decided.insert((key, remaining(task).await))),
            _ => drop(fails(task.await.expect("no panic"), ErrorKind::Corrupt, "")),
        }
    }
    assert_eq!(decided, HashSet::from([("alice", 9), ("alice", 8), ("dave", 9), ("dave", 8)]));
}

/// An algorithm whose step panics at a cost of 3, if the state is known.
#[derive(Debug)]
struct Trap(Gcra);

impl Algorithm for Trap {
    type State = GcraState;

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn step(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
        assert!(cost != 3 || state.is_none(), "a trap");
        self.0.step(state, now, cost)
    }
}

impl RecordText for Trap {}

impl LuaProgram for Trap {
    fn twins(&self) -> impl IntoIterator<Item = Twin> {
        self.0.twins()
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<GcraState> {
        self.0.decode(stored)
    }
}

#[tokio::test]
async fn a_panic_of_one_requests_step_is_its_own() {
    let (server, trap) = (server(), Gcra::new("10/3650d".parse().expect("a rate"), 20));
    let trap = Arc::new(named("trap", Trap(trap.expect("a limit"))));
    let gated = Gated::new(&server, PATIENCE, None).await;
    let mut tasks = Vec::new();
    for cost in [1, 1, 1, 3, 1] {
        let (store, trap) = (gated.store.clone(), Arc::clone(&trap));
        let asked =
            async move { apply(&store, &[(&*trap, "alice", cost)], Op::Acquire, None).await };
        tasks.push((cost, tokio::spawn(asked)));
        turns().await;
    }
    gated.gate.opens();
    for (cost, task) in tasks {
        match task.await {
            Ok(verdict) => assert!(cost == 1 && verdict.expect("decides").allowed()),
            Err(error) => assert!(cost == 3 && error.is_panic()),
        }
    }
}

#[tokio::test]
async fn a_twin_of_a_user_shares_no_call_with_others() {
    let (server, limit, own) = (server(), limit("api", "gcra 9/3650d"), named("own", Trial(9)));
    let gated = Gated::new(&server, PATIENCE, None).await;
    let mut tasks = gated.fills(&limit).await;
    tasks.push(gated.asks(&[(&limit, "alice", 1)]).await);
    let store = gated.store.clone();
    tasks.push(tokio::spawn(
        async move { apply(&store, &[(&own, "bob", 1)], Op::Acquire, None).await },
    ));
    turns().await;
    gated.gate.opens();
    for task in tasks {
        assert!(task.await.expect("no panic").expect("decides").allowed());
    }
    assert_eq!(gated.calls(), OUT.len() + 2);
}

#[tokio::test]
async fn a_given_runtime_sends_what_callers_of_stopped_runtimes_share() {
    let (server, limit) = (server(), limit("api", "gcra 10/3650d"));
    let given = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let given = given.expect("a runtime");
    let builder = RedisStore::builder().deadline(PATIENCE).runtime(given.handle().clone());
    let gated = Gated::built(&server, builder, None).await;
    // The server knows the script.
    gated.gate.opens();
    remaining(gated.asks(&[(&limit, "bob", 1)]).await).await;
    gated.gate.closes();
    let of_caller = gated.clone();
    let begun = aside(move || {
        let elsewhere = runtime();
        let in_flight = elsewhere.block_on(async {
            let in_flight = of_caller.fills(&limit).await;
            drop(of_caller.asks(&[(&limit, "alice", 1)]).await);
            in_flight
        });
        (elsewhere, in_flight, limit)
    });
    let (elsewhere, in_flight, limit) = begun.await;
    let shares = gated.asks(&[(&limit, "alice", 1)]).await;
    // Those in flight end, and the next one departs, in whatever calls. Then no thread drives the
    // first ones' runtime.
    gated.gate.opens_for_first();
    let stopped = aside(move || {
        elsewhere.block_on(async {
            for task in in_flight {
                assert_eq!(remaining(task).await, 9);
            }
            turns().await;
        });
        elsewhere
    });
    let stopped = stopped.await;
    gated.gate.opens();
    assert_eq!(remaining(shares).await, 8);
    aside(move || drop((stopped, given))).await;
}

/// The most requests that wait for a connection.
const MOST_WAITING: usize = 65_536;

/// If a caller fills the channel, others are sent alone until a call has taken what it dropped.
#[tokio::test]
async fn a_caller_that_fills_the_channel_makes_others_go_alone() {
    let (server, limit) = (server(), limit("api", "gcra 9/3650d"));
    let gated = Gated::new(&server, PATIENCE * 100, None).await;
    let in_flight = gated.fills(&limit).await;
    let mut waiting: Vec<_> = (0..MOST_WAITING).map(|_| gated.kept(&limit, "mallory")).collect();
    // The task that sends takes the first.
    turns().await;
    waiting.push(gated.kept(&limit, "mallory"));
    let before = gated.calls();
    let alone = gated.asks(&[(&limit, "alice", 1)]).await;
    assert_eq!(gated.calls(), before + 1);
    drop(waiting);
    gated.gate.opens();
    assert_eq!(remaining(alone).await, 8);
    for task in in_flight {
        remaining(task).await;
    }
    assert_eq!(peek(&gated.store, &limit, "mallory").await, 9, "what was dropped charged nothing");
    gated.gate.closes();
    let in_flight = gated.fills(&limit).await;
    let before = gated.calls();
    let waits = gated.asks(&[(&limit, "alice", 1)]).await;
    assert_eq!(gated.calls(), before, "there is room again");
    gated.gate.opens();
    assert_eq!(remaining(waits).await, 7);
    drop(in_flight);
}

/// The clock's timers are exact to a millisecond.
const EXACT: Duration = Duration::from_millis(2);

const DEADLINE: Duration = Duration::from_secs(1);

/// A server that hangs, and a store on it.
fn hanging() -> (Slow, RedisStore<Lua, Slow>) {
    let slow = Slow::new(PATIENCE);
    let builder = RedisStore::builder().deadline(DEADLINE);
    (slow.clone(), builder.over(slow).expect("a prefix"))
}

/// Of a server that hangs: those that wait, those in flight and those that went alone, also after
/// callers before them are dropped, or no longer polled.
#[tokio::test(start_paused = true)]
async fn every_caller_ends_by_its_own_deadline() {
    for (dropped, after_ms) in
        [(None, 0), (Some(0), 300), (Some(1), 70), (Some(1), 300), (Some(1), 730), (Some(2), 990)]
    {
        for kept in 0..3 {
            let (slow, store) = hanging();
            let ask = || {
                let store = store.clone();
                async move {
                    let begin = tokio::time::Instant::now();
                    (acquire(&store, &seldom(), "alice").await, begin.elapsed())
                }
            };
            let mut unpolled: Vec<_> = (0..kept).map(|_| Box::pin(ask())).collect();
            assert!(unpolled.iter_mut().all(|asked| asked.now_or_never().is_none()));
            let mut tasks = Vec::new();
            for n in 0..30 {
                tasks.push(tokio::spawn(ask()));
                tokio::time::sleep(Duration::from_millis(70)).await;
                if let Some(dropped) = dropped.filter(|_| n == after_ms / 70) {
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
                // A call ends by the earliest deadline of its requests, each of which has a quarter
                // of its time left.
                let in_time = (DEADLINE / 4).saturating_sub(EXACT)..=(DEADLINE + EXACT);
                assert!(in_time.contains(&took), "{n}, {kept}, {dropped:?}: {took:?}: {error}");
            }
            let sent = slow.sent.load(Ordering::SeqCst);
            assert!(sent < 20, "requests that wait share calls: {sent}");
        }
    }
}

/// Its caller would not learn in time whether it was charged.
#[tokio::test(start_paused = true)]
async fn a_request_with_a_quarter_of_its_time_left_is_not_sent_any_more() {
    let (slow, store) = hanging();
    let ask = || {
        let store = store.clone();
        tokio::spawn(async move { acquire(&store, &seldom(), "alice").await })
    };
    let sent = || slow.sent.load(Ordering::SeqCst);
    let _in_flight = OUT.map(|_| ask());
    let waits = ask();
    turns().await;
    let before = sent();
    // No thread drove the runtime meanwhile.
    tokio::time::advance(DEADLINE / 4 * 3).await;
    fails(waits.await.expect("no panic"), ErrorKind::Unavailable, "");
    assert_eq!(sent(), before);
}

/// A caller may keep a future and no longer poll it, as `select!` with a reference does: of the
/// request in the call in flight, or of the first of those that wait for it. The others are decided
/// in their time.
#[tokio::test]
async fn a_request_that_is_no_longer_polled_holds_no_other_back() {
    for kept in [0, 1, 8] {
        let (server, limit) = (server(), limit("api", "gcra 10/3650d"));
        let gated = Gated::new(&server, DEADLINE, None).await;
        let in_flight = OUT.map(|key| gated.kept(&limit, key));
        let waiting: Vec<_> = (0..kept).map(|_| gated.kept(&limit, "alice")).collect();
        let begin = Instant::now();
        let asked = gated.asks(&[(&limit, "alice", 1)]).await;
        gated.gate.opens();
        assert_eq!(remaining(asked).await, 9 - kept);
        assert!(begin.elapsed() < DEADLINE, "{:?}", begin.elapsed());
        for (n, waits) in (1..).zip(waiting) {
            assert_eq!(waits.await.expect("it was sent with the others").remaining(), 10 - n);
        }
        for kept in in_flight {
            assert_eq!(kept.await.expect("decided").remaining(), 9);
        }
        // No request waits any more.
        assert_eq!(remaining_after_acquire(&gated.store, &limit, "bob").await, 9);
        gated.gate.closes();
    }
}

/// A network that fails under requests that share calls. Only those that rode in the failed one
/// learn that their outcome is unknown, and it charged all of them, or none.
async fn a_lost_call_is_indeterminate_for_those_that_rode_in_it(client: Client) {
    let ((_server, proxy), shared) = (server_behind_proxy(), limit("shared", "gcra 40/3650d"));
    let store = store(&proxy.url(), client).await;
    // From the second round on the server knows all scripts.
    for (key, executes) in [("warm", None), ("lost", Some(true)), ("cut", Some(false))] {
        proxy.hang(true);
        let (mut tasks, busy) = (Vec::new(), limit("busy", "gcra 9/3650d"));
        let mut ask = async |limits: &[&Limit<AnyAlgorithm>]| {
            let (store, limits) = (store.clone(), limits.iter().map(|l| (*l).clone()).collect());
            let task = tokio::spawn(async move {
                let limits: Vec<Limit<AnyAlgorithm>> = limits;
                let checks: Vec<_> = limits.iter().map(|limit| (limit, key, 1)).collect();
                apply(&store, &checks, Op::Acquire, None).await
            });
            tasks.push(task);
            turns().await;
        };
        for _ in OUT {
            ask(&[&busy]).await;
        }
        for limits in [&[&shared][..]; 8].into_iter().chain([&[&shared, &busy][..]; 2]) {
            ask(limits).await;
        }
        match executes {
            Some(true) => proxy.swallow_matching("shared", 1),
            Some(false) => proxy.cut_matching("shared", 1),
            None => {}
        }
        proxy.hang(false);
        let (mut decided, mut lost) = (0, 0);
        for (n, task) in tasks.into_iter().enumerate() {
            match task.await.expect("no panic") {
                Ok(_) if n >= OUT.len() => decided += 1,
                Ok(_) => {}
                error => {
                    fails(error, ErrorKind::Indeterminate, "");
                    lost += 1;
                }
            }
        }
        assert_eq!(lost > 0, executes.is_some(), "{key}: {decided} decided");
        // They ride in two calls, since two may be out. The second has reached the server, or has
        // not.
        let charged = 40 - peek(&store, &shared, key).await;
        let least = decided + u64::from(executes == Some(true));
        let due = least..=if executes.is_none() { decided } else { decided + lost };
        assert!(due.contains(&charged), "{key}: {decided} decided, {lost} lost, {charged} charged");
    }
}

with_each_client!(a_lost_call_is_indeterminate_for_those_that_rode_in_it,);
