//! Rate-limiting algorithms as pure state machines: no I/O, no clock, no floats.
//!
//! An [`Algorithm`] is a function from a state, a time and a cost to a [`Decision`] and the next
//! state. A [`Store`] keeps the states and makes each step atomic: in memory (`ratelimit-memory`) or
//! on Redis (`ratelimit-redis`), with the same decisions, field by field. [`RateLimiter`] puts named
//! limits in front of a store.
//!
//! | type | for |
//! |---|---|
//! | [`RateLimiter`] | asking: may this caller do this now, at this cost? |
//! | [`Policy`], [`Limits`], [`Rate`] | stating what is allowed |
//! | [`Verdict`], [`Decision`] | the answer |
//! | [`Gcra`], [`TokenBucket`], [`FixedWindow`], [`FirstRequestWindow`], [`WindowLog`], [`SlidingCounter`], [`BucketedWindow`], [`SlidingLog`], [`Concurrency`] | the algorithms |
//! | [`Attempts`], [`Stack`] | limits that charge attempts, and several limits in one key |
//! | [`ReservationId`] | leases, and reservations settled later |
//! | [`Algorithm`] | writing one |
//! | [`Store`], [`SyncStore`], [`Batch`], [`decide`] | writing a store |
//!
//! # Features
//!
//! | feature | default | brings |
//! |---|---|---|
//! | `std` | yes | [`SystemClock`], [`Lease`] and random [`ReservationId`]s; without it the crate is `no_std` + `alloc` |
//! | `dyn` | yes | [`DynStore`], [`DynSnapshotStore`] and [`DynError`]: a store chosen at run time |
//! | `serde` | no | `Limits<Policy>` read from a document |
//! | `tokio` | no | [`OwnedReservation`]: settled on a tokio runtime when it is dropped |
//!
//! # Examples
//!
//! Limits, and a limiter over any store that decides at once:
//!
//! ```
//! use ratelimit_core::{FixedWindow, Gcra, Limit, Limits, Policy, RateLimiter, SyncStore};
//!
//! fn limiter<S: SyncStore<Policy>>(store: S) -> Result<RateLimiter<S>, Box<dyn std::error::Error>> {
//!     let limits = Limits::<Policy>::new([
//!         Limit::new("burst", Gcra::new("10/s".parse()?, 20)?.into())?.by(["ip"])?,
//!         Limit::new("daily", FixedWindow::new("5000/d".parse()?)?.into())?.by(["user"])?,
//!     ])?;
//!     Ok(RateLimiter::new(limits, store))
//! }
//!
//! fn serve<S: SyncStore<Policy>>(limiter: &RateLimiter<S>) -> Result<u16, S::Error> {
//!     let verdict = limiter.check_now(&[("ip", "192.0.2.7"), ("user", "alice")])?;
//!     Ok(if verdict.allowed() { 200 } else { 429 })
//! }
//! ```
//!
//! An algorithm by itself, a function of state, time and cost:
//!
//! ```
//! use ratelimit_core::{Algorithm, Gcra, Timestamp};
//!
//! let login = Gcra::new("5/m".parse()?, 5)?;
//! let step = login.step(None, Timestamp::ZERO, 5);
//! assert!(step.decision.allowed);
//! assert_eq!(step.decision.reset_after_us, 60_000_000);
//! # Ok::<(), ratelimit_core::ConfigError>(())
//! ```
//!
//! Everything is decided in integers below 2^53: 3/s, 7 per 5 minutes and 10 million/s are exact, and a
//! script on Redis computes the same numbers.

#![no_std]
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod algorithm;
mod attempts;
mod batch;
mod builder;
mod clock;
mod decision;
mod entries;
mod error;
mod identifiers;
mod in_memory;
mod limit;
mod limiter;
mod limits_builder;
mod op;
mod policy;
mod quota;
mod rate;
mod refusal;
mod reservation;
mod share;
mod stack;
mod store;
mod timestamp;
mod window;

pub use algorithm::{
    Algorithm, Bucket, BucketWindow, BucketedWindow, BucketedWindowState, ChargesAttempts,
    Concurrency, ConcurrencyState, CountedWindow, FirstRequestState, FirstRequestWindow,
    FixedWindow, FixedWindowState, Gcra, GcraState, KeepsEntries, LeakyBucket, Recovery,
    SlidingCounter, SlidingCounterState, SlidingLog, SlidingLogState, Step, TokenBucket,
    WindowEntry, WindowLog, WindowLogState, Write,
};
pub use attempts::Attempts;
pub use batch::{Batch, Check, CompactStates, States, decide, decide_compact};
pub use builder::{AlgorithmBuilder, FromRate};
#[cfg(feature = "std")]
pub use clock::SystemClock;
pub use clock::{Clock, ManualClock};
pub use decision::{Decision, Source, Verdict};
pub use entries::LogEntry;
pub use error::{ConfigError, ErrorKind};
pub use identifiers::{IdentifierValue, Identifiers};
pub use in_memory::{Compact, InMemory, step_compact};
pub use limit::{Limit, Limits, OnOutage, fingerprint};
#[cfg(feature = "std")]
pub use limiter::{Lease, Leased};
pub use limiter::{NamedDecision, NamedDecisions, RateLimiter, Request};
#[cfg(feature = "tokio")]
pub use limiter::{OwnedReservation, Reserved};
pub use limits_builder::LimitsBuilder;
pub use op::{Now, Op};
pub use policy::{Policy, PolicyState};
pub use quota::Quota;
pub use rate::{Rate, Refill};
pub use refusal::Refusal;
pub use reservation::{Reservation, ReservationGroup, ReservationId};
pub use share::Share;
pub use stack::{Stack, StackState, StackedState};
#[cfg(feature = "dyn")]
pub use store::erased::{DynError, DynSnapshotStore, DynStore};
pub use store::{EntryStore, Snapshot, SnapshotStore, Store, StoreError, SyncStore, WithSnapshot};
pub use timestamp::{MAX_INTEGER, Timestamp};
pub use window::WindowState;
