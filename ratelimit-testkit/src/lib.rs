//! The laws that every `ratelimit-core` backend keeps, as property tests for any of them.
//!
//! Tell the testkit how to get at the store, in a [`Harness`], and let it write the tests:
//!
//! ```
//! use std::time::Duration;
//! use ratelimit_core::{Limit, Policy, PolicyState};
//! use ratelimit_testkit::{Harness, PureStore, conformance};
//!
//! struct Pure;
//!
//! impl Harness for Pure {
//!     type Store = PureStore;
//!     fn new() -> Self { Pure }
//!     fn store(&self) -> PureStore { PureStore::new() }
//!     async fn state(&self, store: &PureStore, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
//!         store.state(limit, key)
//!     }
//!     async fn leaks(&self, _: &PureStore, _within: Duration) -> Vec<String> { vec![] }
//! }
//!
//! conformance!(pure, Pure); // pure::gcra::a_denial_charges_nothing, and so on
//! # fn main() {}
//! ```
//!
//! | read | for |
//! |---|---|
//! | [`Law`], [`laws`] | what is tested |
//! | [`Harness`], [`conformance!`] | testing a backend |
//! | [`NaiveStore`], [`PureStore`] | what the answers are held against |
//! | [`wrong`] | stores that break the laws, and must be caught |
//! | [`Play`], [`History`] | many threads at once, and an order that explains what they were told |
//! | [`RedisServer`] | a server to test on |
//! | [`RedisCluster`] | a cluster: slots on the move, nodes that die and come back |
//! | [`RedisSentinels`] | a master that three sentinels replace when it dies |
//! | `TlsServer` (feature `tls`) | a server with certificates of its own |
//! | [`FaultProxy`] | a network that fails on purpose |
//! | [`RespClient`] | a word with a server, without a client crate |
//!
//! A broken law panics: that is what tests do.
#![allow(
    clippy::panic,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "this crate runs in tests, where a panic is how a failure is told"
)]

mod harness;
mod law;
pub mod laws;
mod oracle;
mod pure;
mod seeds;
mod server;
mod suite;
mod trace;
mod witness;
pub mod wrong;

pub use harness::{Harness, block_on};
pub use law::{Law, Violation};
pub use oracle::NaiveStore;
pub use pure::{PureStore, Refused};
pub use seeds::Kind;
#[cfg(all(unix, feature = "tls"))]
pub use server::TlsServer;
pub use server::{
    FaultProxy, RedisCluster, RedisSentinels, RedisServer, RespClient, RespValue, SERVERS_VARIABLE,
};
pub use suite::{Failure, Property, test, try_property, try_same};
pub use trace::{Ask, Request, Scope, Trace};
pub use witness::{Event, History, Play, Unexplained, Witnessed};
