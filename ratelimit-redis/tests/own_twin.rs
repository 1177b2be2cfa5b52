//! An algorithm that is not ours with a twin that is not ours: alone, in a stack, and what it lacks.

#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Meddled, Meddling};
use ratelimit_core::{
    Algorithm, Batch, Check, Decision, Limit, ManualClock, Now, Op, Refusal, Stack, Step, Store,
    SyncStore, Tick, Write,
};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{
    Keeps, LuaProgram, Parameters, Program, RedisConnection, RedisError, RedisStore, Stored, Twin,
    Word,
};
use ratelimit_testkit::RedisServer;

/// So many once, and never again.
#[derive(Clone, Copy, Debug)]
struct OnceEver(u64);

impl Algorithm for OnceEver {
    /// What has been used up.
    type State = u64;

    fn capacity(&self) -> u64 {
        self.0
    }

    fn step(&self, state: Option<&u64>, _now: Tick, cost: u64) -> Step<u64> {
        let used = state.copied().unwrap_or_default();
        let left = self.0.saturating_sub(used);
        let allowed = cost <= left;
        let charged = if allowed { cost } else { 0 };
        let write = match charged {
            0 => Write::Keep,
            _ => Write::Put { state: used + charged, expires: Tick::MAX },
        };
        let retry_after_us = allowed.then_some(0);
        let (limit, remaining) = (self.0, left - charged);
        let decision =
            Decision { allowed, cost, limit, remaining, retry_after_us, reset_after_us: 0 };
        Step { decision, write }
    }
}

const ONCE_EVER: &Program = &Program {
    name: "once-ever",
    source: "
local once = numbers('once-ever', { 'used' })
once.parameters = { 'limit' }

function once.step(limit, state, now, cost)
  local used = state and state.used or 0
  local left = math.max(limit.limit - used, 0)
  local allowed = cost <= left
  local charged = allowed and cost or 0
  local answer = {
    allowed = allowed,
    remaining = left - charged,
    retry_after_us = allowed and 0 or NEVER,
    reset_after_us = 0,
  }
  if charged == 0 then return answer end
  return answer, 'put', { used = used + charged }, MOST
end

return once
",
    keeps: Keeps::Numbers,
};

impl LuaProgram for OnceEver {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(ONCE_EVER, self.0, Parameters::new([self.0]))]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<u64> {
        let [Some(stored)] = stored else { return None };
        match stored.numbers(ONCE_EVER)? {
            [used] => Some(*used),
            _ => None,
        }
    }
}

/// Decides alike in memory and on Redis, and says what is left.
async fn decided<A: LuaProgram>(
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
    let at = Now::At(Tick::from_us(1_795_218_392_123_456).expect("a time"));
    for (cost, left) in [(2, 3), (0, 3), (4, 3), (6, 3), (u64::MAX, 3), (3, 0), (1, 0)] {
        let check = Check { limit: &limit, key: "alice", cost };
        assert_eq!(decided(&redis, &memory, &Batch::one(&check).now(at)).await, left);
    }
}

#[tokio::test]
async fn what_a_twin_lacks_is_refused_as_in_memory_and_charges_nothing() {
    let server = RedisServer::start().expect("redis-server");
    let redis = RedisStore::connect(&server.url()).await.expect("the server is up");
    let limit = Limit::new("trial", OnceEver(5)).expect("a name");
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    for op in [Op::Refund, Op::Force] {
        let error = redis.apply(&Batch::one(&check).op(op)).await.expect_err("has none");
        let due = Refusal::Unsupported { limit: "trial".into(), op };
        assert!(matches!(&error, RedisError::Refused(told) if *told == due), "{error}");
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
    let at = Now::At(Tick::from_us(1_795_218_392_123_456).expect("a time"));
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

/// What has neither refund nor settlement stays charged if another slot denies in between: a denial, and
/// no error.
#[tokio::test]
async fn what_a_twin_cannot_give_back_stays_charged_in_several_slots() {
    let server = RedisServer::start().expect("redis-server");
    let limit = Limit::new("once", OnceEver(3)).expect("a name");
    let url = server.url();
    let connection = || RedisConnection::open(&url, Duration::from_secs(20));
    let aside = RedisStore::builder().over(connection().await.expect("up")).expect("a prefix");
    // Bob's place is taken between the question and the charge: he is charged by another program.
    let port = server.port();
    let before = move |words: &[Word<'_>]| {
        let says =
            |what: &str| words.iter().any(|w| matches!(w, Word::Text(text) if *text == what));
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
