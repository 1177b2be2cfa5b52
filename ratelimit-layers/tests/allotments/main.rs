//! Allotments never admit more than their bound, whatever is lost on the way.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod composed;
mod endings;
mod laws;
#[path = "../common/memory.rs"]
mod memory;
mod one_node;
#[cfg(unix)]
mod redis;

use ratelimit_core::{Batch, Check, Limit, ManualClock, Op, Policy, Store, Verdict};
use ratelimit_layers::{Allotments, AllotmentsBuilder};

use memory::BEGIN;

fn limit(name: &str, words: &str) -> Limit<Policy> {
    Limit::new(name, words.parse().expect(words)).expect("a name")
}

/// The settings of allotments that take all that is left, of this clock.
fn greedy(clock: &ManualClock) -> AllotmentsBuilder<ManualClock> {
    Allotments::builder().clock(clock.clone()).divisor(1)
}

/// What a store says about a request of one key.
async fn ask<S: Store<Policy>>(store: &S, limit: &Limit<Policy>, key: &str, cost: u64) -> Verdict {
    let check = Check { limit, key, cost };
    store.apply(&Batch::one(&check)).await.expect("decides")
}

/// What a key has left in a store.
async fn left<S: Store<Policy>>(store: &S, limit: &Limit<Policy>, key: &str) -> u64 {
    let check = Check { limit, key, cost: 0 };
    store.apply(&Batch::one(&check).op(Op::Peek)).await.expect("decides").remaining()
}
