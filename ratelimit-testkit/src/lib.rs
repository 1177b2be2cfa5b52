//! The laws of `ratelimit-core` as property tests, for your own store or algorithm.
//!
//! # A store
//!
//! A [`Harness`] gives the laws access to your store, and [`conformance!`] writes the tests:
//!
//! ```
//! use std::time::Duration;
//! use ratelimit_core::{Limit, AnyAlgorithm};
//! use ratelimit_core::algorithm::AnyState;
//! use ratelimit_testkit::{Harness, PureStore, StoreClock, conformance};
//!
//! struct Pure;
//!
//! impl Harness for Pure {
//!     type Store = PureStore; // yours
//!     fn new() -> Self { Pure }
//!     fn store(&self) -> PureStore { PureStore::new() }
//!     async fn state(&self, store: &PureStore, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
//!         store.state(limit, key)
//!     }
//!     async fn leaks(&self, _: &PureStore, _within: Duration) -> Vec<String> { vec![] }
//!     // Leave this out for a store whose clock runs by itself, such as a server's.
//!     fn clock(&self, store: &PureStore) -> StoreClock { store.clock().into() }
//! }
//!
//! conformance!(pure, Pure); // pure::agrees_on::gcra, and so on
//! # fn main() {}
//! ```
//!
//! If a store has fewer operations, its harness lists those that are missing. The laws skip them, a
//! test that needs one reports that it is skipped, and `it_can_do_what_it_claims` fails if the list
//! is wrong:
//!
//! ```
//! # use std::time::Duration;
//! # use ratelimit_core::{Limit, AnyAlgorithm, Refusal, Store, Verdict};
//! # use ratelimit_core::algorithm::AnyState;
//! # use ratelimit_core::store::{Batch, Op};
//! # use ratelimit_testkit::{Harness, PureStore, StoreClock, conformance};
//! use ratelimit_testkit::{Capability, AlgorithmKind};
//! # struct NoRefund(PureStore);
//! # impl Store<AnyAlgorithm> for NoRefund {
//! #     type Error = Refusal;
//! #     async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Refusal> {
//! #         let limit = batch.checks()[0].limit.name().to_owned();
//! #         match batch.operation() {
//! #             op @ Op::Refund => Err(Refusal::Unsupported { limit, op }),
//! #             _ => self.0.apply(batch).await,
//! #         }
//! #     }
//! # }
//!
//! struct Mine;
//!
//! impl Harness for Mine {
//! #   type Store = NoRefund;
//! #   fn new() -> Self { Mine }
//! #   fn store(&self) -> NoRefund { NoRefund(PureStore::new()) }
//! #   async fn state(&self, store: &NoRefund, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
//! #       store.0.state(limit, key)
//! #   }
//! #   async fn leaks(&self, _: &NoRefund, _within: Duration) -> Vec<String> { vec![] }
//! #   fn clock(&self, store: &NoRefund) -> StoreClock { store.0.clock().into() }
//!     const LACKS: &'static [Capability] = &[Capability::Refund];
//!     // …
//! }
//!
//! conformance!(mine, Mine);
//! # fn main() {}
//! ```
//!
//! # An algorithm
//!
//! Name it, and some limits at which it could go wrong. [`algorithm_conformance!`] tests it by
//! itself and in a store:
//!
//! ```
//! use ratelimit_core::{Algorithm, Decision, Timestamp};
//! use ratelimit_core::algorithm::{InMemory, Step, Write};
//! use ratelimit_testkit::algorithm_conformance;
//!
//! /// So many at one moment, and again a second later.
//! #[derive(Clone, Copy)]
//! pub struct Ticket(pub u64);
//!
//! impl Algorithm for Ticket {
//!     type State = (Timestamp, u64); // until when, and how many
//!     fn capacity(&self) -> u64 { self.0 }
//!     fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
//!         let open = state.filter(|(until, _)| now < *until);
//!         let (until, used) = open.copied().unwrap_or((now.saturating_add_us(1_000_000), 0));
//!         let left = self.0.saturating_sub(used);
//!         let (allowed, wait_us) = (cost <= left, until.saturating_us_since(now));
//!         let charged = if allowed { cost } else { 0 };
//!         let reset_after_us = if used + charged == 0 { 0 } else { wait_us };
//!         let decision = Decision {
//!             allowed, cost, limit: self.0, remaining: left - charged,
//!             retry_after_us: if allowed { Some(0) } else { (cost <= self.0).then_some(wait_us) },
//!             replenish_after_us: reset_after_us, reset_after_us,
//!         };
//!         let write = match charged {
//!             0 => Write::Keep,
//!             _ => Write::Put { state: (until, used + charged), expires: until },
//!         };
//!         Step { decision, write }
//!     }
//! }
//! impl InMemory for Ticket {}
//!
//! algorithm_conformance!(ticket, Ticket, [Ticket(1), Ticket(3), Ticket(1_000_000)]);
//! // ticket::retry_after_is_honest, ticket::in_the_reference_store::it_agrees, and so on
//! # fn main() {}
//! ```
//!
//! # A failure
//!
//! A failing test prints the law, how it was broken, and the smallest case as text. Paste the case
//! into [`regression`] (or [`algorithm_regression`]) to make it a test:
//!
//! ```
//! # use std::time::Duration;
//! # use ratelimit_core::{Limit, AnyAlgorithm};
//! # use ratelimit_core::algorithm::AnyState;
//! # use ratelimit_testkit::{Harness, PureStore};
//! use ratelimit_testkit::{Property, regression};
//! # struct Mine;
//! # impl Harness for Mine {
//! #     type Store = PureStore;
//! #     fn new() -> Self { Mine }
//! #     fn store(&self) -> PureStore { PureStore::new() }
//! #     async fn state(&self, store: &PureStore, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
//! #         store.state(limit, key)
//! #     }
//! #     async fn leaks(&self, _: &PureStore, _within: Duration) -> Vec<String> { vec![] }
//! # }
//!
//! regression::<Mine>(Property::Agrees, r#"
//!     limit l0: gcra 10/s burst 20
//!     at 1795218392123456 acquire 3 of "a" in l0
//!     at 1795218392123457 acquire 20 of "a" in l0
//! "#);
//! ```
//!
//! # Many threads at once
//!
//! A [`History`] without an order that explains its answers is an error. A [`ConcurrentRun`]
//! records one of a real store:
//!
//! ```
//! use ratelimit_core::{Algorithm, Gcra, Limit, Timestamp};
//! use ratelimit_core::store::Op;
//! use ratelimit_testkit::{Event, History};
//!
//! let limits = [Limit::new("login", Gcra::per_second(5).build()?)?];
//! let first = limits[0].algorithm().step(None, Timestamp::ZERO, 1).decision;
//! let event = |asked, answered| Event {
//!     op: Op::Acquire, asks: vec![(0, 0, 1)], id: None, asked, answered,
//!     clock: [Timestamp::ZERO; 2], answer: Ok(vec![first]),
//! };
//! // Two concurrent requests both get the first answer: a charge is lost.
//! let history = History { limits: &limits, events: vec![event(0, 2), event(1, 3)], times: vec![Timestamp::ZERO] };
//! assert!(history.explain().is_err());
//! # Ok::<(), ratelimit_core::ConfigError>(())
//! ```
//!
//! # Main types
//!
//! | item | for |
//! |---|---|
//! | [`Law`], [`Property`], [`AlgorithmProperty`] | the laws, and their tests |
//! | [`Harness`], [`conformance!`] | testing a store |
//! | [`Capability`] | operations that a store may lack |
//! | [`StoreClock`], [`ByOwnClock`] | the clock of a store, and all laws on that clock |
//! | [`AlsoSync`] | all laws by the calls of [`SyncStore`](ratelimit_core::SyncStore), too |
//! | [`AlgorithmHarness`], [`algorithm_conformance!`] | testing an algorithm |
//! | [`RequestHarness`] | whole requests to a limiter, by the names of its limits |
//! | [`NaiveStore`], [`PureStore`] | the references for comparison |
//! | [`ConcurrentRun`], [`History`] | many threads at once, and an order that explains their answers |
//! | [`Admissions`] | what was admitted in every interval of a history of any length |
//!
//! A broken law panics, as failing tests do.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    clippy::panic,
    clippy::expect_used,
    clippy::missing_panics_doc,
    reason = "this crate runs in tests, where a panic reports a failure"
)]

mod admissions;
mod algorithm;
mod almanac;
mod also_sync;
mod by_own_clock;
mod calendar;
mod capability;
mod ends;
mod failed_once;
mod harness;
mod law;
mod laws;
mod linearizability;
mod oracle;
mod pure;
mod records;
mod requests;
mod seeds;
mod suite;
mod trace;

pub use admissions::{Admissions, Excess};
pub use algorithm::{
    AlgorithmHarness, AlgorithmProperty, Reference, algorithm_regression, test_algorithm,
    test_algorithm_on, try_same_algorithm, try_same_algorithm_on,
};
pub use almanac::Calendars;
pub use also_sync::{AlsoSync, ByBothWays};
pub use by_own_clock::{AtOwnTime, ByOwnClock};
pub use calendar::Calendar;
pub use capability::Capability;
#[doc(hidden)]
pub use ends::Ends;
pub use failed_once::failed_once;
pub use harness::{Harness, StoreClock, block_on};
pub use law::{Failure, Law};
pub use linearizability::{
    ConcurrentRun, Event, History, Linearized, RecordChange, Unexplained, charges,
};
pub use oracle::NaiveStore;
pub use pure::PureStore;
pub use records::RecordRule;
pub use requests::{AskedRequest, RequestHarness, TestCaller, try_requests};
pub use seeds::{AlgorithmKind, Scope};
pub use suite::{Property, regression, test, try_same};
pub use trace::made::{Instance, limit_in_words};
