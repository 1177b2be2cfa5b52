//! A model of Redis that runs the store's own scripts in virtual time, and a network that fails by
//! a seed.
//!
//! | type | for |
//! |---|---|
//! | [`ModelServer`] | a server: keys, scripts, a clock that jumps and drifts, a replica that lags |
//! | [`Network`] | the way to one server, or to several that share slots: delays, losses, duplicates, cuts |
//! | [`ModelConnection`] | a node's connection, for [`Builder::over`](ratelimit_redis::Builder::over) |
//!
//! Everything runs on one thread of a paused tokio runtime, and a seed decides all of it.

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "this crate runs in tests")]

mod keyspace;
mod network;
mod script;
mod server;

pub use network::{Faults, ModelConnection, Network, may_repeat};
pub use server::ModelServer;
