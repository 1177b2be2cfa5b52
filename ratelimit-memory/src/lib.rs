//! The in-process store for `ratelimit-core`: sync and async, for production and for unit tests.
//!
//! ```
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
//! let limiter = RateLimiter::new(limits, MemoryStore::new());
//!
//! assert!(limiter.check_now("alice")?.allowed());
//! assert_eq!(limiter.check_n_now("alice", 4)?.remaining(), 0);
//! assert!(!limiter.check_now("alice")?.allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Main types
//!
//! | type | for |
//! |---|---|
//! | [`MemoryStore`], [`Builder`] | the store, and its capacity, shards and clock |
//! | [`MemoryError`] | what went wrong, and the remedy |
//! | [`PreciseClock`], [`CoarseClock`] | its clocks; [`ManualClock`](ratelimit_core::ManualClock) is for tests |
//!
//! The crate has no features. In a test, you move the clock:
//!
//! ```
//! use std::time::Duration;
//! use ratelimit_core::{Gcra, Limits, ManualClock, AnyAlgorithm, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//!
//! let clock = ManualClock::default();
//! let store = MemoryStore::builder().capacity(10_000).clock(clock.clone()).build::<AnyAlgorithm>();
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
//! let limiter = RateLimiter::new(limits, store);
//!
//! assert!(limiter.check_n_now("alice", 5)?.allowed());
//! assert!(!limiter.check_now("alice")?.allowed());
//!
//! clock.advance(Duration::from_secs(12));
//! assert!(limiter.check_now("alice")?.allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`CoarseClock`] is read without a system call and moves in steps. A store that is full of
//! reservations returns a [`MemoryError`]:
//!
//! ```
//! use ratelimit_core::{Gcra, Limits, RateLimiter, ReservationId};
//! use ratelimit_memory::{CoarseClock, MemoryError, MemoryStore};
//!
//! let store = MemoryStore::builder().reservations(1).clock(CoarseClock::new()).build();
//! let limits = Limits::builder().limit("tokens", Gcra::per_minute(10_000)).build()?;
//! let limiter = RateLimiter::new(limits, store);
//!
//! assert!(limiter.request("alice").id(ReservationId::new(1)).cost(4_000).check_now()?.allowed());
//! let second = limiter.request("alice").id(ReservationId::new(2)).cost(4_000).check_now();
//! assert_eq!(second, Err(MemoryError::Full { capacity: 1 }));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Behaviour
//!
//! - **Bounded memory.** A store has caps on [keys](Builder::capacity),
//!   [reservations](Builder::reservations), [log entries](Builder::entries) and
//!   [records](Builder::records) of single callers, of which it evicts none. It never resets the
//!   limit of a live key to make room: at the cap, new keys share one state per limit, which
//!   [`MemoryStore::overflowed`] counts. Give a store that is often full a larger capacity.
//! - **No background thread.** Later calls free expired states, a few per call. Memory therefore
//!   follows the keys that arrive: the states of the last burst stay until new keys come, within
//!   the cap. [`MemoryStore::len`] counts them.
//! - **Locks.** For [`Gcra`](ratelimit_core::Gcra), a denial usually takes no lock, and a charge
//!   locks one slot for some instructions. Other states have locks per shard. Batches never
//!   deadlock.
//! - **Keys are hashes** under a random secret. Two keys whose hashes agree share a limit. Among
//!   ten million keys of GCRA limits that have all arrived once, any two have met with a
//!   probability of at most 1.6 · 10⁻³; among as many keys of the other algorithms, it is 2 · 10⁻⁵.
//!   The comment in `src/hash.rs` derives these figures, and those for chosen keys.
//! - **A panic** of an algorithm or a clock charges nothing, and the store stays usable.
//!
//! To list the callers denied most often, wrap the store in `TopDenied` of the crate
//! `ratelimit-layers`. For a value that owns a lease, see
//! [`Request::lease_now`](ratelimit_core::Request::lease_now).
//!
//! # Without an operating system
//!
//! The store runs on `wasm32-unknown-unknown` if you [give it a clock](Builder::clock). The
//! standard library has no time there: [`MemoryStore::new`], [`PreciseClock`] and [`CoarseClock`]
//! panic. It has no randomness either, so the hash key is no secret, and clients that choose their
//! keys can make them collide.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

mod blocks;
mod capacity;
mod clock;
mod cuckoo;
mod hash;
mod records;
mod reservations;
mod shard;
mod store;
mod sync;

pub use clock::{CoarseClock, PreciseClock};
pub use store::{Builder, MemoryError, MemoryStore};
