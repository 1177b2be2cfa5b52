//! Fleets of limiters on a model of Redis, in virtual time, by seeds.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod conformance;

use tokio::runtime::{Builder, Runtime};

/// A runtime whose clock stands still while tasks run.
fn paused() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime")
}
