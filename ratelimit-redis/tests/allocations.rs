//! What a check in the Lua mode allocates on its way, and how large its future is. The connection
//! answers by itself, so only this crate and core count.
//!
//! The crate `allocation-counter` puts a counting allocator under this whole program.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use allocation_counter::measure;
use ratelimit_core::{AnyAlgorithm, Gcra, Limits, RateLimiter, Verdict};
use ratelimit_redis::{Argument, Connection, Deadline, Lua, RedisError, RedisStore, Reply};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::yield_now;

const KEY: &str = "203.0.113.77";

/// Answers about a caller that every limit knows, each call as soon as the gate lets it.
struct Answers {
    text: Vec<u8>,
    gate: Arc<Semaphore>,
    address: Arc<str>,
}

impl Answers {
    /// What `decide.lua` answers.
    fn about(limits: usize, gate: &Arc<Semaphore>) -> Self {
        const PACKED_BYTES: usize = 7;
        let packed = |number: u64| number.to_le_bytes().into_iter().take(PACKED_BYTES);
        let now_us = 1_795_218_392_123_456;
        let numbers = [now_us - 1, 0, now_us - 1, now_us / 1_000].into_iter().flat_map(packed);
        let state: Vec<_> = b"gcra ".iter().copied().chain(numbers).collect();
        let sized = [format!("{}:", state.len()).as_bytes(), &state].concat();
        let text = [&b"1795218392 123456\n1\n"[..], &sized.repeat(limits)].concat();
        Self { text, gate: Arc::clone(gate), address: "a test".into() }
    }
}

impl Connection for Answers {
    async fn send(&self, _: &str, _: &[Argument<'_>], _: Deadline) -> Result<Reply, RedisError> {
        self.gate.acquire().await.expect("open").forget();
        Ok(Reply::Text(self.text.clone()))
    }

    async fn transaction(
        &self,
        _: &str,
        _: &[Vec<Argument<'_>>],
        _: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        panic!("the Lua mode sends none")
    }

    async fn send_to_each(
        &self,
        _: &[Argument<'_>],
        _: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        panic!("no check does")
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        &self.address
    }
}

fn limits(count: usize) -> Limits<AnyAlgorithm> {
    let limit = |all: ratelimit_core::LimitsBuilder, n| {
        all.limit(&format!("limit-{n}"), Gcra::per_minute(60))
    };
    (0..count).fold(Limits::builder(), limit).build().expect("limits")
}

/// A limiter of so many limits over a connection, and the gate of its answers.
fn limiter(limits: usize) -> (RateLimiter<RedisStore<Lua, Answers>>, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let store = RedisStore::builder().over(Answers::about(limits, &gate)).expect("a store");
    (RateLimiter::new(self::limits(limits), store), gate)
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Polls a check, and counts what that allocates. Returns whether it has ended.
fn poll(
    check: Pin<&mut impl Future<Output = Result<Verdict, RedisError>>>,
    allocated: &mut u64,
) -> bool {
    let mut said = Poll::Pending;
    let mut context = Context::from_waker(Waker::noop());
    *allocated += measure(|| said = check.poll(&mut context)).count_total;
    match said {
        Poll::Ready(verdict) => verdict.expect("decides").allowed(),
        Poll::Pending => false,
    }
}

/// The key, the future, the arguments, the answer and the states. Three limits also have lists of
/// the keys, the checks, the twins and the decisions.
#[test]
fn a_check_allocates_little() {
    let runtime = runtime();
    let _here = runtime.enter();
    for (count, most) in [(1, 5), (3, 10)] {
        let (limiter, gate) = limiter(count);
        gate.add_permits(2);
        let check = || {
            let mut allocated = 0;
            assert!(poll(pin!(limiter.check(KEY)), &mut allocated), "it answers at once");
            allocated
        };
        // What the first one makes is kept.
        check();
        let allocated = check();
        assert!(allocated <= most, "{count} limits: {allocated}");
    }
}

/// No arguments and no answer, but the request, its copies of the keys and fields, the channel of
/// its answer, and lists of the group's verdicts and checks. Of three limits also their lists.
#[test]
fn a_check_that_waits_allocates_little() {
    for (count, most) in [(1, 9), (3, 19)] {
        let (limiter, gate) = limiter(count);
        runtime().block_on(async {
            let mut last = 0;
            // The first one that waits starts the task that sends.
            for _ in 0..2 {
                let mut none = 0;
                let mut out = [Box::pin(limiter.check(KEY)), Box::pin(limiter.check(KEY))];
                assert!(!out.iter_mut().any(|check| poll(check.as_mut(), &mut none)));
                let (mut check, mut allocated) = (pin!(limiter.check(KEY)), 0);
                assert!(!poll(check.as_mut(), &mut allocated), "it waits");
                gate.add_permits(3);
                assert!(out.iter_mut().all(|check| poll(check.as_mut(), &mut none)));
                while !poll(check.as_mut(), &mut allocated) {
                    yield_now().await;
                }
                last = allocated;
                // Its call lets another one out a little later.
                for _ in 0..3 {
                    yield_now().await;
                }
            }
            assert!(last <= most, "{count} limits: {last}");
        });
    }
}

#[test]
fn the_future_of_a_check_is_small() {
    let store = RedisStore::builder().connect_lazy("redis://127.0.0.1:1").expect("a store");
    let limiter = RateLimiter::new(limits(1), store);
    let bytes = size_of_val(&limiter.check(KEY));
    assert!(bytes <= 800, "{bytes} bytes");
}
