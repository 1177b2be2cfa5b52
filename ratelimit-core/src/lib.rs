//! Rate-limiting algorithms as pure state machines: no I/O, no clock, no floats.
//!
//! An [`Algorithm`] is a function from a state, a time and a cost to a [`Decision`] and the next
//! state. A [`Store`] keeps the states and makes each step atomic: in memory (`ratelimit-memory`) or
//! on Redis (`ratelimit-redis`), with the same decisions, field by field. [`RateLimiter`] puts named
//! limits in front of a store.
//!
//! | read | for |
//! |---|---|
//! | [`RateLimiter`] | using it |
//! | [`Policy`], [`Limits`], [`Rate`] | saying what is allowed |
//! | [`Verdict`], [`Decision`] | the answer |
//! | [`Gcra`], [`TokenBucket`], [`FixedWindow`], [`FirstRequestWindow`], [`WindowLog`], [`SlidingCounter`], [`BucketedWindow`], [`SlidingLog`], [`Concurrency`] | the algorithms |
//! | [`Attempts`], [`Stack`] | what they are combined by |
//! | [`ReservationId`] | leases, and reservations that are settled later |
//! | [`Algorithm`] | writing one |
//! | [`Store`], [`Batch`], [`decide`] | writing a backend |
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
mod clock;
mod decision;
mod entries;
mod error;
mod limit;
mod limiter;
mod op;
mod policy;
mod rate;
mod refusal;
mod reservation;
mod stack;
mod store;
mod timestamp;

pub use algorithm::{
    Algorithm, Bucket, BucketWindow, BucketedWindow, BucketedWindowState, ChargesAttempts, Compact,
    Concurrency, ConcurrencyState, FirstRequestState, FirstRequestWindow, FixedWindow,
    FixedWindowState, Gcra, GcraState, KeepsEntries, SlidingCounter, SlidingCounterState,
    SlidingLog, SlidingLogState, Step, TokenBucket, TokenBucketState, WindowEntry, WindowLog,
    WindowLogState, Write,
};
pub use attempts::Attempts;
pub use batch::{Batch, Check, CompactStates, States, decide, decide_compact};
#[cfg(feature = "std")]
pub use clock::SystemClock;
pub use clock::{Clock, ManualClock};
pub use decision::{Decision, Verdict};
pub use entries::LogEntry;
pub use error::{ConfigError, ErrorKind};
pub use limit::{Identifiers, Limit, Limits, fingerprint};
#[cfg(feature = "std")]
pub use limiter::{Lease, Leased};
pub use limiter::{RateLimiter, Request};
pub use op::{Now, Op};
pub use policy::{Policy, PolicyState};
pub use rate::{Rate, Refill};
pub use refusal::Refusal;
pub use reservation::{Reservation, ReservationGroup, ReservationId};
pub use stack::{Stack, StackState, StackedState};
#[cfg(feature = "dyn")]
pub use store::erased::{DynError, DynStore};
pub use store::{EntryStore, Store, StoreError, SyncStore};
pub use timestamp::{MAX_INTEGER, Timestamp};
