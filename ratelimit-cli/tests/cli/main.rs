//! The tool, run as a process.
#![allow(missing_docs, clippy::expect_used)]

mod browser;
mod commands;
mod common;
mod decisions;
mod formats;
#[cfg(all(feature = "fred", feature = "redis"))]
mod json;
#[path = "../../examples/make_access_log.rs"]
#[allow(dead_code, unreachable_pub)]
mod make_access_log;
mod numbers;
mod order;
mod playground;
mod records;
#[cfg(all(feature = "fred", feature = "redis"))]
mod redis;
mod replay;
mod report;
mod schema;
#[cfg(all(feature = "fred", feature = "redis"))]
mod servers;
mod suggest;
#[cfg(all(feature = "fred", feature = "redis"))]
mod top;
#[cfg(all(feature = "fred", feature = "redis"))]
mod watch;
