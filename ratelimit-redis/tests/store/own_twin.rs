//! A user's own algorithm with a user's own twin: alone, in a stack, and without optional operations.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Meddled, Meddling};
use ratelimit_core::{
    Algorithm, Batch, Check, Decision, ErrorKind, InMemory, Limit, ManualClock, Now, Op, Refusal,
    Stack, Step, Store, StoreError, SyncStore, Timestamp, Write,
};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{
    Argument, Keeps, LuaProgram, Parameters, Program, RedisConnection, RedisError, RedisStore,
    Stored, Twin,
};
use ratelimit_testkit::RedisServer;

/// This much once, and never again.
#[derive(Clone, Copy, Debug)]
struct OnceEver(u64);

impl Algorithm for OnceEver {
    /// The used cost.
    type State = u64;

    fn capacity(&self) -> u64 {
        self.0
    }

    fn step(&self, state: Option<&u64>, _now: Timestamp, cost: u64) -> Step<u64> {
        let used = state.copied().unwrap_or_default();
        let left = self.0.saturating_sub(used);
        let allowed = cost <= left;
        let charged = if allowed { cost } else { 0 };
        let write = match charged {
            0 => Write::Keep,
            _ => Write::Put { state: used + charged, expires: Timestamp::MAX },
        };
        let retry_after_us = allowed.then_some(0);
        let (limit, remaining) = (self.0, left - charged);
        let decision = Decision {
            allowed,
            cost,
            limit,
            remaining,
            retry_after_us,
            replenish_after_us: 0,
            reset_after_us: 0,
        };
        Step { decision, write }
    }
}

impl InMemory for OnceEver {}

const ONCE_EVER_LUA: &str = "
--- fresh
spent = 0

--- level
local used = spent

--- move
spent = after
-- Never: a key lives for as long as a time can tell.
expires = 2^52 - 1

--- wait
fits_us = now - 1
";

static ONCE_EVER: Program = Program::of_numbers("once-ever", &["spent"], &[], ONCE_EVER_LUA);

impl LuaProgram for OnceEver {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(&ONCE_EVER, self.0, Parameters::new([]))]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<u64> {
        let [Some(stored)] = stored else { return None };
        match stored.numbers(&ONCE_EVER)? {
            [used] => Some(*used),
            _ => None,
        }
    }
}

/// Checks that memory and Redis decide alike, and returns the remaining cost.
async fn decided<A: LuaProgram + InMemory>(
    redis: &RedisStore,
    memory: &MemoryStore<A, ManualClock>,
    batch: &Batch<'_, A>,
) -> u64
where
    A::State: PartialEq + std::fmt::Debug,
{
    let there = redis.apply(batch).await.expect("decides");
    assert_eq!(memory.apply_now(batch).expect("decides"), there);
    for Check { limit, key, .. } in batch.checks() {
        let state = redis.state(limit, key).await.expect("reads");
        assert_eq!(memory.state(limit.name(), key), state);
    }
    there.remaining()
}

#[tokio::test]
async fn a_users_twin_decides_as_its_algorithm_does() {
    let server = RedisServer::start().expect("redis-server");
    let redis = RedisStore::connect(&server.url()).await.expect("the server is up");
    let memory = MemoryStore::builder().clock(ManualClock::default()).build();
    let limit = Limit::new("trial", OnceEver(5)).expect("a name");
    let at = Now::At(Timestamp::from_us(1_795_218_392_123_456).expect("a time"));
    for (cost, left) in [(2, 3), (0, 3), (4, 3), (6, 3), (u64::MAX, 3), (3, 0), (1, 0)] {
        let check = Check { limit: &limit, key: "alice", cost };
        assert_eq!(decided(&redis, &memory, &Batch::one(&check).now(at)).await, left);
    }
}

#[tokio::test]
async fn an_operation_that_a_twin_lacks_is_refused_and_charges_nothing() {
    let server = RedisServer::start().expect("redis-server");
    let redis = RedisStore::connect(&server.url()).await.expect("the server is up");
    let limit = Limit::new("trial", OnceEver(5)).expect("a name");
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    for op in [Op::Refund, Op::Force] {
        let error = redis.apply(&Batch::one(&check).op(op)).await.expect_err("has none");
        let due = Refusal::Unsupported { limit: "trial".into(), op };
        assert!(matches!(&error, RedisError::Refused(refusal) if *refusal == due), "{error}");
    }
    assert_eq!(redis.state(&limit, "alice").await.expect("reads"), None);
}

#[tokio::test]
async fn a_stack_of_stacks_decides_as_in_memory() {
    let server = RedisServer::start().expect("redis-server");
    let redis = RedisStore::connect(&server.url()).await.expect("the server is up");
    let inner = |limits: [u64; 2]| Stack::new(limits.map(OnceEver)).expect("a stack");
    let stack = Stack::new([inner([3, 9]), inner([4, 5])]).expect("a stack");
    let limit = Limit::new("trials", stack).expect("a name");
    let at = Now::At(Timestamp::from_us(1_795_218_392_123_456).expect("a time"));
    let memory = MemoryStore::builder().clock(ManualClock::default()).build();
    for (cost, left) in [(2, 1), (2, 1), (1, 0), (1, 0)] {
        let check = Check { limit: &limit, key: "alice", cost };
        let there = redis.apply(&Batch::one(&check).now(at)).await.expect("decides");
        assert_eq!(memory.apply_now(&Batch::one(&check).now(at)).expect("decides"), there);
        assert_eq!(there.remaining(), left);
    }
    let states = redis.state(&limit, "alice").await.expect("reads").expect("used").states;
    let used = |inner: usize| {
        let state = states[inner].as_ref().expect("used").state.states.iter().flatten();
        state.map(|stacked| stacked.state).collect::<Vec<_>>()
    };
    assert_eq!((used(0), used(1)), (vec![3, 3], vec![3, 3]));
}

/// A charge without refund or settlement stays if another slot denies in between: the caller gets a
/// denial, not an error.
#[tokio::test]
async fn a_charge_without_undo_stays_across_slots() {
    let server = RedisServer::start().expect("redis-server");
    let limit = Limit::new("once", OnceEver(3)).expect("a name");
    let url = server.url();
    let connection = || RedisConnection::open(&url, Duration::from_secs(20));
    let aside = RedisStore::builder().over(connection().await.expect("up")).expect("a prefix");
    // Another program takes Bob's place between the question and the charge.
    let port = server.port();
    let before = move |words: &[Argument<'_>]| {
        let says =
            |what: &str| words.iter().any(|w| matches!(w, Argument::Text(text) if *text == what));
        if says("reserve") && says("rl:1::{bob}") {
            let mut client = ratelimit_testkit::RespClient::connect(port).expect("it is up");
            let used = ["HSET", "rl:1::{bob}", "once", "once-ever 3"];
            client.command(&used).expect("it answers").ok().expect("done");
        }
        Meddling::None
    };
    let meddled = Meddled::new(connection().await.expect("up")).clustered().before(before);
    let store = RedisStore::builder().over(Arc::new(meddled)).expect("a prefix");
    let checks = ["alice", "bob"].map(|key| Check { limit: &limit, key, cost: 1 });
    let batch = Batch::new(&checks).expect("distinct");
    let verdict = store.apply(&batch).await.expect("decides");
    assert_eq!(verdict.denied_by().collect::<Vec<_>>(), [1]);
    assert_eq!(aside.state(&limit, "alice").await.expect("a state"), Some(1));
}

/// A twin that charges twice what its algorithm does.
#[derive(Clone, Copy, Debug)]
struct Doubled(&'static [u64]);

impl Algorithm for Doubled {
    type State = u64;

    fn capacity(&self) -> u64 {
        3
    }

    fn step(&self, state: Option<&u64>, now: Timestamp, cost: u64) -> Step<u64> {
        OnceEver(3).step(state, now, cost)
    }
}

impl LuaProgram for Doubled {
    fn twins(&self) -> Vec<Twin> {
        static DOUBLED: Program = Program::of_numbers(
            "doubled",
            &["spent"],
            &[],
            "--- fresh\nspent = 0\n--- level\nlocal used = 2 * spent\n--- move\nspent, expires = after, 2^52 - 1",
        );
        let parameters = if self.0.is_empty() { Parameters::new([]) } else { Parameters::new([1]) };
        vec![Twin::new(&DOUBLED, 3, parameters)]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<u64> {
        stored.first()?.as_ref().map(|_| 1)
    }
}

#[tokio::test]
async fn a_script_that_contradicts_the_step_is_an_error_that_names_the_limit() {
    let server = RedisServer::start().expect("redis-server");
    let redis = RedisStore::connect(&server.url()).await.expect("the server is up");
    let limit = Limit::new("wrong", Doubled(&[])).expect("a name");
    let check = Check { limit: &limit, key: "alice", cost: 2 };
    assert!(redis.apply(&Batch::one(&check)).await.expect("both admit").allowed());
    let error = redis.apply(&Batch::one(&check)).await.expect_err("one of them denies");
    assert!(matches!(&error, RedisError::Disagrees { limit, .. } if limit == "wrong"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
}

#[tokio::test]
async fn a_twin_of_too_many_parameters_is_refused_by_name() {
    let server = RedisServer::start().expect("redis-server");
    let redis = RedisStore::connect(&server.url()).await.expect("the server is up");
    let limit = Limit::new("more", Doubled(&[1])).expect("a name");
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    let error = redis.apply(&Batch::one(&check)).await.expect_err("one too many");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("limit \"more\""), "{error}");
}

/// An algorithm whose program has the name of a built-in one, or of another user's program.
#[derive(Clone, Copy, Debug)]
struct Called(&'static Program);

impl Algorithm for Called {
    type State = u64;

    fn capacity(&self) -> u64 {
        1
    }

    fn step(&self, state: Option<&u64>, now: Timestamp, cost: u64) -> Step<u64> {
        OnceEver(1).step(state, now, cost)
    }
}

impl LuaProgram for Called {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(self.0, 1, Parameters::new([]))]
    }

    fn decode(&self, _stored: &[Option<Stored>]) -> Option<u64> {
        None
    }
}

/// The name identifies whose state is stored, so no two programs may share one.
#[tokio::test]
async fn a_program_with_anothers_name_is_refused() {
    const DENIES: &str = "
return {
  parameters = { 'limit' },
  read = function() end,
  step = function() return { allowed = false, remaining = 0, retry_after_us = NEVER, reset_after_us = 0 } end,
}
";
    static OTHER: Program = Program::of_entries("once-ever", DENIES, Keeps::Numbers);
    let server = RedisServer::start().expect("redis-server");
    let fresh = || async { RedisStore::connect(&server.url()).await.expect("the server is up") };
    for name in [
        "gcra",
        "token-bucket",
        "fixed-window",
        "first-request-window",
        "window-log",
        "bucketed-window",
        "sliding-counter",
        "sliding-log",
        "concurrency",
    ] {
        let program: &'static Program =
            Box::leak(Box::new(Program::of_entries(name, DENIES, Keeps::Numbers)));
        let limit = Limit::new("mine", Called(program)).expect("a name");
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        // Before the built-in one has been used, and after.
        let store = fresh().await;
        for used in [false, true] {
            if used {
                let gcra = ratelimit_core::Gcra::new("1/s".parse().expect("a rate"), 1);
                let theirs = Limit::new("theirs", gcra.expect("a limit")).expect("a name");
                let check = Check { limit: &theirs, key: "alice", cost: 1 };
                let _ = store.apply(&Batch::one(&check)).await.expect("decides");
            }
            let error = store.apply(&Batch::one(&check)).await.expect_err("another one");
            assert_eq!(error.kind(), ErrorKind::Config, "{name}: {error}");
            assert!(error.to_string().contains(&format!("the program {name:?}")), "{error}");
            assert!(error.to_string().contains("another name"), "{error}");
        }
    }
    // Two of the user's own programs.
    let store = fresh().await;
    let (one, other) = (Called(&ONCE_EVER), Called(&OTHER));
    let limits = [("one", one), ("other", other)];
    let [one, other] = limits.map(|(name, called)| Limit::new(name, called).expect("a name"));
    let acquire = async |limit: &Limit<Called>| {
        store.apply(&Batch::one(&Check { limit, key: "alice", cost: 1 })).await
    };
    assert!(acquire(&one).await.expect("decides").allowed());
    let error = acquire(&other).await.expect_err("another one of this name");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(!acquire(&one).await.expect("decides").allowed(), "used up");
    let checks = [&one, &other].map(|limit| Check { limit, key: "bob", cost: 1 });
    let both = Batch::new(&checks).expect("distinct");
    let error = fresh().await.apply(&both).await.expect_err("two of one name");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    // The same program twice is one.
    let same: &'static Program =
        Box::leak(Box::new(Program::of_numbers("once-ever", &["spent"], &[], ONCE_EVER_LUA)));
    let same = Limit::new("same", Called(same)).expect("a name");
    assert!(acquire(&same).await.expect("decides").allowed());
}

/// Scripts contain the name in strings, patterns and formats.
#[tokio::test]
async fn a_program_with_an_invalid_name_is_refused() {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&server.url()).await.expect("the server is up");
    for name in
        ["", "once+ever", "once.ever", "once ever", "once%d", "once'ever", "once\never", "(once"]
    {
        let program: &'static Program =
            Box::leak(Box::new(Program::of_numbers(name, &["spent"], &[], ONCE_EVER_LUA)));
        let limit = Limit::new("mine", Called(program)).expect("a name");
        for (op, cost) in [(Op::Acquire, 1), (Op::Peek, 1), (Op::Reset, 0)] {
            let check = Check { limit: &limit, key: "alice", cost };
            let error = store.apply(&Batch::one(&check).op(op)).await.expect_err(name);
            assert_eq!(error.kind(), ErrorKind::Config, "{name:?}: {error}");
            assert!(error.to_string().contains(&format!("the program {name:?}")), "{error}");
        }
    }
}
