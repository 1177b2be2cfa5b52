//! A model of Redis that runs the store's own scripts in virtual time, and a network that fails by
//! a seed.
//!
//! | type | for |
//! |---|---|
//! | [`ModelServer`] | a server: keys, scripts, a clock that jumps and drifts, a replica that lags |
//! | [`Network`] | the way to one server, or to several that share slots: delays, losses, duplicates, cuts |
//! | [`ModelConnection`] | a node's connection, for [`Builder::over`](ratelimit_redis::Builder::over) |
//! | [`SimulatedClock`], [`by_each_seed`] | a clock that is off and drifts; runs by many seeds |
//! | [`FaultyRounds`] | random requests to a real server, over a network that fails |
//!
//! What is simulated runs on one thread of a paused tokio runtime, and a seed decides all of it.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    reason = "this crate runs in tests"
)]

mod faulty_rounds;
mod keyspace;
mod network;
mod script;
mod seeds;
mod server;

pub use faulty_rounds::{FaultyRounds, MOST_REQUESTS, RoundsOutcome};
pub use network::{Faults, ModelConnection, Network, may_repeat};
pub use seeds::{BEGIN, SimulatedClock, by_each_seed, widen};
pub use server::ModelServer;
