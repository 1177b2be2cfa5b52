//! Everything between a store and its servers: connections and logins, clusters whose slots move,
//! masters that Sentinels name, encrypted connections, and the table of faults under traffic. Each
//! with every client.

#![cfg(unix)]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod cluster;
mod connections;
mod faults;
mod logins;
mod moving;
mod sentinel;
#[cfg(feature = "tls")]
mod tls;
