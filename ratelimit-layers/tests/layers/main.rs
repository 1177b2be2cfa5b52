//! Stores around a store: each alone, all together, and on Redis.
#![cfg(all(unix, feature = "metrics", feature = "reload", feature = "tracing"))]
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod allocations;
mod allotments;
mod cache;
mod changed_numbers;
mod common;
mod conformance;
mod dashboard;
mod ends;
mod examples;
mod fallback;
mod observers;
mod orders;
mod own_numbers;
mod recovery;
mod redis;
mod reload;
mod repeats;
mod reported;
mod servers;
