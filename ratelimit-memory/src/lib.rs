//! The in-process store for `ratelimit-core`: sync and async, for production and for unit tests.
//!
//! ```
//! use ratelimit_core::{Gcra, Limit, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::new([Limit::new("login", Gcra::new("5/m".parse()?, 5)?)?])?;
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
//! The crate has no features. A store on a clock that a test moves:
//!
//! ```
//! use std::time::Duration;
//! use ratelimit_core::{Gcra, Limit, Limits, ManualClock, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//!
//! let clock = ManualClock::default();
//! let store = MemoryStore::builder().capacity(10_000).clock(clock.clone()).build::<Gcra>();
//! let limits = Limits::new([Limit::new("login", Gcra::new("5/m".parse()?, 5)?)?])?;
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
//! # Behaviour
//!
//! - **Two places for states.** A state of a few numbers (of a [`Gcra`](ratelimit_core::Gcra)) takes 16 bytes in a cuckoo
//!   table of cache lines, which grows with its keys. A denial there takes no lock; a charge locks its slot for some
//!   instructions, or both of its buckets the first time after it has moved. A state that takes more than twelve days to
//!   recover, or is written 2.2 years after the store was made, lies in a shard.
//! - **Shards** hold everything else (logs, windows, leases, stacks, and what was charged at a given time), each under
//!   its own lock, and step a state in its place. A batch of a few limits whose states are in buckets locks only these,
//!   to write. Any other batch locks its buckets and then its shards in one order, so batches never deadlock.
//! - **No sweeper thread, no pause.** A check of a state in a bucket frees nothing. A new key takes the place of an
//!   expired one if it can, and frees expired states in the next three buckets and in two places of a shard; in a batch
//!   whose states are all in buckets, it frees those in its own. An admission by a state in a shard looks at one place
//!   there. Memory therefore follows the keys that arrive: the states of the last burst stay until new keys come, within
//!   the cap. [`MemoryStore::len`] counts them.
//! - **A hard cap on keys.** The store never resets the limit of a live key to make room. At the cap, a call that needs a
//!   place looks for an expired state in its own buckets and shard, then in the next 8 to 256 buckets (twice as many as the
//!   call before if that found one, half as many if not), and in 64 places of each of four shards. Where it finds none, new
//!   keys share one state per limit, which [`MemoryStore::overflowed`] counts, even if there are idle states elsewhere.
//!   [`Builder::capacity`] says what a key can get then. With one idle state in two hundred, 256 buckets hold about three,
//!   and the next call looks at the next buckets. Give a store that is often full a larger [capacity](Builder::capacity).
//! - **A hard cap on reservations**, apart from keys: [`Builder::reservations`] says what each costs, and what becomes of
//!   requests at the cap. [`MemoryStore::reservations`] and [`MemoryStore::unrecorded`] count them.
//! - **A hard cap on entries.** All logs and leases together keep [at most so many entries](Builder::entries). At that cap, new
//!   keys share a state as well, from a sixteenth of the entries that is reserved for it. A known key that needs one more
//!   gets [`MemoryError::Entries`] and is charged nothing. Denials, refunds and releases need no entry, and go on.
//! - **Keyed hashing.** Keys are known by hashes under a secret; see below.
//! - `TopDenied`, in the crate `ratelimit-layers`, wraps this or any other store and lists the callers denied most often.
//! - A value can own a lease: see [`RateLimiter::lease_now`](ratelimit_core::RateLimiter::lease_now).
//!
//! # When foreign code panics
//!
//! An algorithm and a clock run while the store holds locks. If one of them panics, the call charges nothing and loses no
//! room, every other key stays as it was, and the next call goes on: all foreign code of a call runs before its first
//! write, and reserved room is given back.
//!
//! There are three exceptions:
//!
//! - Dropping an old state happens after the call is charged. If that panics, the charge stands.
//! - An algorithm that writes over a state itself ([`step_in_place`](ratelimit_core::InMemory::step_in_place)) decides
//!   before it writes. A panic after that, or in [`entries_in`](ratelimit_core::InMemory::entries_in) of the new state,
//!   leaves this one key with what the algorithm has written, and no other key or count.
//! - The closure of [a call for several keys](MemoryStore::acquire_each_now) runs after each key is decided.
//!   If it panics, the keys that it was called for stay decided, and all others are as they were.
//!
//! # Without an operating system
//!
//! The store needs no thread, and no clock but the one that it is [given](Builder::clock), so it runs on
//! `wasm32-unknown-unknown`. The standard library has no time there: [`MemoryStore::new`], [`PreciseClock`] and
//! [`CoarseClock`] panic. It has no randomness either, so the hash key is no secret, and a client that chooses keys can make
//! them collide.
//!
//! # Hash collisions
//!
//! The store keeps hashes, not keys. Two keys whose hashes agree share a state; if both ask while the table grows, one may
//! find the limit of the other, or its own begun anew.
//!
//! The hash is a polynomial at a secret point, [`PolymurHash`](https://github.com/orlp/polymur-hash). For two keys of at most
//! *n* bytes, chosen without seeing hashes, the probability of a full collision is proved to be at most *n* · 2⁻⁶⁰. For
//! keys that no attacker chose, its 61 bits behave as random, and shards use all of them: any two of ten million collide
//! with a probability of 2 in a hundred thousand. (Chosen keys of 20 bytes: 8 in ten thousand at most.) Buckets use 46
//! bits in a small table and one more each time the table has doubled, as of the state's last write. That a part of the
//! hash behaves as random is not proved, but every test agrees. In the worst case, all keys arrive once and none again:
//!
//! | keys in the store | a new key meets any | any two have met | … once all were written anew |
//! |---|---|---|---|
//! | 1,000 | 1.4 · 10⁻¹¹ | 7 · 10⁻⁹ | 7 · 10⁻⁹ |
//! | 1,000,000 | 1.4 · 10⁻¹⁰ | 1.2 · 10⁻⁴ | 8 · 10⁻⁶ |
//! | 10,000,000 | 1.8 · 10⁻¹⁰ | 1.6 · 10⁻³ | 8 · 10⁻⁵ |
//!
//! A stream of a hundred thousand new keys per second therefore brings at most about one such pair per day, of keys that no
//! client can choose. Limits of one caller lie near each other and are told apart by their names' fingerprints: two
//! names collide with a probability of 10⁻⁷ in a small table and 10⁻¹⁰ among a million keys, and then for one caller in
//! 256. Where that is too much, take an algorithm whose states lie in shards: any but [`Gcra`](ratelimit_core::Gcra) and
//! [`TokenBucket`](ratelimit_core::TokenBucket).
//!
//! The store shows no hash. Its behaviour reveals a little: keys that collide share a limit; in a full store, a new
//! key gets a state of its own if one near it has expired; and near keys are a little faster. Computing the secret from
//! that takes far more keys and far closer looks than answers over a network give; this is an argument, not a proof.

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

mod blocks;
mod capacity;
mod clock;
mod cuckoo;
mod hash;
mod reservations;
mod shard;
mod store;
mod sync;

#[cfg(all(test, loom))]
mod loom_store;

pub use clock::{CoarseClock, PreciseClock};
pub use store::{Builder, MemoryError, MemoryStore};
