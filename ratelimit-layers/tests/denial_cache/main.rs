//! A denial cache answers what the store would answer, and never answers what the store alone can.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod composed;
mod dropped;
mod exact;
#[cfg(unix)]
mod faults;
mod laws;
#[path = "../common/memory.rs"]
mod memory;
mod noted;
mod pace;
#[cfg(unix)]
mod redis;
mod rounds;
mod servers;
#[cfg(unix)]
mod trace;
mod wrong;

use ratelimit_core::{Limit, ManualClock, Policy};
use ratelimit_layers::{DenialCache, DenialCacheBuilder};

use noted::Noted;

type Cached = DenialCache<Noted, Policy, ManualClock>;

/// The settings of a cache that never finds an answer too old.
fn lasting(clock: &ManualClock) -> DenialCacheBuilder<ManualClock> {
    DenialCache::builder().clock(clock.clone()).max_age(std::time::Duration::MAX)
}

fn limit(name: &str, words: &str) -> Limit<Policy> {
    Limit::new(name, words.parse().expect(words)).expect("a name")
}
