//! Everything between a store and its servers: connections and logins, clusters whose slots move, masters that die
//! and are replaced, masters that Sentinels name, and encrypted connections. Each with every client.

#![cfg(unix)]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod cluster;
mod connections;
mod failover;
mod faults;
mod logins;
mod moving;
mod sentinel;
#[cfg(feature = "tls")]
mod tls;
mod under_traffic;
