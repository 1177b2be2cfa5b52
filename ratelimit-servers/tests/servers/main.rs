//! Servers, clusters, sentinels and proxies do what tests rely on. One program, so that the shared
//! parts compile once.
#![cfg(unix)]
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod cluster;
#[cfg(target_os = "linux")]
mod ends;
mod proxy;
mod sentinel;
mod server;

use std::time::Duration;

use ratelimit_servers::RespValue;

const DEADLINE: Duration = Duration::from_secs(30);

fn ok() -> RespValue {
    RespValue::text("OK")
}

/// The error that was replied.
fn refused(reply: Result<RespValue, String>) -> String {
    reply.expect("a reply").ok().expect_err("an error")
}
