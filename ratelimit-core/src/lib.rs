//! Rate limits, algorithms and [`RateLimiter`]: the part that you always need. No I/O, no clock, no
//! floats.
//!
//! ```
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
//! let limiter = RateLimiter::new(limits, MemoryStore::new());
//!
//! let verdict = limiter.check_now("alice")?;
//! assert!(verdict.allowed());
//! assert_eq!(verdict.remaining(), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A store keeps the state of each caller: in memory
//! ([`ratelimit-memory`](https://docs.rs/ratelimit-memory)) or on Redis
//! ([`ratelimit-redis`](https://docs.rs/ratelimit-redis)). Both give the same decisions, field by
//! field.
//!
//! # Main types
//!
//! | type | for |
//! |---|---|
//! | [`RateLimiter`] | asking whether a caller may do something now, at a cost |
//! | [`Limits`], [`AnyAlgorithm`], [`Rate`] | declaring limits |
//! | [`Verdict`], [`Decision`] | the answer |
//! | [`Gcra`], [`TokenBucket`], [`FixedWindow`], [`FirstRequestWindow`], [`WindowLog`], [`SlidingCounter`], [`BucketedWindow`], [`SlidingLog`], [`Concurrency`], [`Lockout`] | the algorithms |
//! | [`Stack`] | several limits in one key |
//! | [`ReservationId`] | leases, and reservations that you settle later |
//! | [`Algorithm`], [`beside_built_in!`] | writing an algorithm, and limiting by it beside the others |
//! | [`Store`], [`SyncStore`], [`Batch`](store::Batch), [`decide`](store::decide) | writing a store |
//!
//! # Several limits
//!
//! A request is charged to every limit whose identifiers it has, or to none. [`AnyAlgorithm`] holds
//! any built-in algorithm, given as a value or as text:
//!
//! ```
//! use ratelimit_core::{FixedWindow, Gcra, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::builder()
//!     .limit("burst", Gcra::per_second(10).burst(20)).by(["ip"])
//!     .limit("daily", "fixed-window 5000/d").by(["user"])
//!     // Denied requests are charged, too.
//!     .limit("tries", FixedWindow::per_minute(9)).by(["ip", "user"]).count_attempts()
//!     .build()?;
//! let limiter = RateLimiter::new(limits, MemoryStore::new());
//!
//! let verdict = limiter.check_n_now(&[("ip", "192.0.2.7"), ("user", "alice")], 10)?;
//! assert!(!verdict.allowed());
//! for decision in limiter.named(&verdict).filter(|decision| !decision.allowed) {
//!     assert_eq!((decision.name(), decision.limit), ("tries", 9));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Stack`] keeps several limits of one identifier in one state.
//!
//! # Leases and later costs
//!
//! ```
//! use ratelimit_core::{Concurrency, Gcra, Leased, Limits, RateLimiter, ReservationId};
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::builder().limit("tokens", Gcra::per_minute(10_000)).build()?;
//! let limiter = RateLimiter::new(limits, MemoryStore::new());
//! let id = ReservationId::random();
//! assert!(limiter.request("alice").id(id).cost(4_000).check_now()?.allowed()); // the most that it can cost
//! assert!(limiter.request("alice").id(id).cost(1_234).settle_now()?.remaining() >= 8_766); // what it did cost
//!
//! let downloads: Concurrency = "2/30s".parse()?; // two at a time, each for at most 30 s
//! let limits = Limits::builder().limit("downloads", downloads).build()?;
//! let limiter = RateLimiter::new(limits, MemoryStore::new());
//! let Leased::Granted(lease) = limiter.request("alice").lease_now()? else { unreachable!() };
//! drop(lease); // when the work is done
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # An algorithm by itself
//!
//! An [`Algorithm`] is a pure function from a state, a time and a cost to a [`Decision`] and the
//! next state:
//!
//! ```
//! use ratelimit_core::{Algorithm, Gcra, Timestamp};
//!
//! let login = Gcra::per_minute(5).build()?;
//! let step = login.step(None, Timestamp::ZERO, 5);
//! assert!(step.decision.allowed);
//! assert_eq!(step.decision.reset_after_us, 60_000_000);
//! # Ok::<(), ratelimit_core::ConfigError>(())
//! ```
//!
//! All numbers are integers below 2^53: 3/s, 7 per 5 minutes and 10 million/s are exact, and a
//! script on Redis computes the same numbers.
//!
//! # A store
//!
//! A store decides a [`Batch`](store::Batch) as [`decide`](store::decide) does. One that wraps
//! another needs a few lines, and the guide's
//! [chapter](https://github.com/ratelimit-rs/ratelimit/blob/main/docs/guide/src/own-store.md) has a
//! whole one:
//!
//! ```
//! use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
//! use ratelimit_core::{AnyAlgorithm, Store, Verdict};
//! use ratelimit_core::store::Batch;
//!
//! struct Counting<S> {
//!     inner: S,
//!     batches: AtomicU64,
//! }
//!
//! impl<S: Store<AnyAlgorithm>> Store<AnyAlgorithm> for Counting<S> {
//!     type Error = S::Error;
//!     async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, S::Error> {
//!         self.batches.fetch_add(1, Relaxed);
//!         self.inner.apply(batch).await
//!     }
//! }
//! ```
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `std` | yes | [`SystemClock`], [`Lease`] and random [`ReservationId`]s; without it the crate is `no_std` + `alloc` |
//! | `dyn` | no | [`DynStore`], [`DynSnapshotStore`](store::DynSnapshotStore), [`DynRecordStore`](store::DynRecordStore) and [`DynError`]: a store chosen at run time |
//! | `serde` | no | `Limits<AnyAlgorithm>` read from a document |
//! | `calendar` | no | windows of a [`Calendar`](algorithm::Calendar): `1000/month` in a time zone |
//! | `tokio` | no | [`OwnedReservation`]: settled on a tokio runtime when it is dropped; [`TokioClock`]: its time, for tests that pause it |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![no_std]
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod algorithms;
mod any_algorithm;
mod batch;
mod builder;
mod calendar;
mod clock;
mod decision;
#[cfg(feature = "serde")]
mod document;
mod entries;
mod error;
#[macro_use]
mod forward;
mod identifiers;
mod in_memory;
mod limit;
mod limiter;
mod limits_builder;
mod numbers;
mod op;
mod quota;
mod rate;
mod record;
mod refusal;
mod reservation;
mod share;
mod stack;
mod store_traits;
mod timestamp;
mod window;

pub use algorithms::{
    Algorithm, BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, Lockout,
    SlidingCounter, SlidingLog, TokenBucket, WindowLog,
};
pub use any_algorithm::AnyAlgorithm;
#[cfg(feature = "std")]
pub use clock::SystemClock;
#[cfg(feature = "tokio")]
pub use clock::TokioClock;
pub use clock::{Clock, ManualClock};
pub use decision::{Account, Decision, Source, Verdict};
pub use error::{ConfigError, ErrorKind};
pub use identifiers::{IdentifierValue, Identifiers};
pub use limit::{Condition, ConditionValues, Limit, Limits, OnOutage};
#[cfg(feature = "std")]
pub use limiter::{Lease, Leased};
pub use limiter::{LimitCosts, NamedDecision, NamedDecisions, RateLimiter, Request};
#[cfg(feature = "tokio")]
pub use limiter::{OwnedReservation, ReserveError, Reserved};
pub use limits_builder::LimitsBuilder;
pub use numbers::Numbers;
pub use rate::Rate;
pub use record::{Record, UnendedRecord};
pub use refusal::Refusal;
pub use reservation::ReservationId;
pub use stack::Stack;
#[cfg(feature = "dyn")]
pub use store_traits::erased::{DynError, DynStore};
pub use store_traits::{Store, StoreError, SyncStore};
pub use timestamp::Timestamp;

/// The parts of an [`Algorithm`]: its steps, the traits of what it can do besides, builders, and
/// the states of the built-in ones.
pub mod algorithm {
    #[cfg(feature = "calendar")]
    pub use crate::algorithms::{Anchor, CalendarBuilder};
    pub use crate::algorithms::{
        BucketCount, BucketWindow, BucketedWindowState, ConcurrencyState, CountedWindow,
        FirstRequestState, FixedWindowState, GcraState, LockoutBuilder, LockoutState,
        LoggedRequest, MaybeStep, Recovery, SlidingCounterState, SlidingLogState, Step,
        WindowLogState, Write,
    };
    pub use crate::any_algorithm::AnyState;
    pub use crate::builder::{AlgorithmBuilder, FromRate};
    pub use crate::calendar::{Calendar, CalendarWindow};
    pub use crate::entries::{LogState, LoggedCost, LoggedWindow};
    pub use crate::in_memory::InMemory;
    pub use crate::quota::Quota;
    pub use crate::rate::Refill;
    pub use crate::share::Share;
    pub use crate::stack::{StackState, StackedState};
    pub use crate::timestamp::MAX_INTEGER;
    pub use crate::window::WindowState;
}

/// What a [`Store`] is asked, and what it decides with: a batch of checks, an operation, and
/// [`decide`](store::decide).
pub mod store {
    pub use crate::batch::{Batch, Check, States, decide};
    #[cfg(feature = "tokio")]
    pub use crate::limiter::repeat_settlement;
    pub use crate::op::{Now, Op};
    pub use crate::record::Standing;
    pub use crate::reservation::{Reservation, ReservationGroup};
    #[cfg(feature = "dyn")]
    pub use crate::store_traits::erased::{DynRecordStore, DynSnapshotStore};
    pub use crate::store_traits::{LogStore, RecordStore, Snapshot, SnapshotStore, WithSnapshot};
}

/// What `ratelimit-memory` keeps and steps: states of a few numbers. It may change in any version.
#[doc(hidden)]
pub mod for_memory {
    pub use crate::batch::{CompactStates, decide_compact};
    pub use crate::in_memory::{Compact, step_compact};
}

/// What `ratelimit-cli` says as this crate does. It may change in any version.
#[doc(hidden)]
pub mod for_cli {
    pub use crate::error::did_you_mean;
}

/// What the macros of this crate write.
#[doc(hidden)]
pub mod __macros {
    pub use alloc::borrow::Cow;

    pub use crate::algorithms::{Algorithm, LoggedRequest, MaybeStep, Recovery, Step};
    pub use crate::in_memory::{Compact, InMemory};
    pub use crate::reservation::Reservation;
    pub use crate::timestamp::Timestamp;
}
