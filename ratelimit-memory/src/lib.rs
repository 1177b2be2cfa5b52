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
//! | [`TopDenied`] | who is denied most |
//!
//! The crate has no features. A store on a clock that a test moves, wrapped to list who is denied most:
//!
//! ```
//! use std::time::Duration;
//! use ratelimit_core::{Gcra, Limit, Limits, ManualClock, RateLimiter};
//! use ratelimit_memory::{MemoryStore, TopDenied};
//!
//! let clock = ManualClock::default();
//! let store = MemoryStore::builder().capacity(10_000).clock(clock.clone()).build::<Gcra>();
//! let limits = Limits::new([Limit::new("login", Gcra::new("5/m".parse()?, 5)?)?])?;
//! let limiter = RateLimiter::new(limits, TopDenied::new(store, 100));
//!
//! assert!(limiter.check_n_now("alice", 5)?.allowed());
//! assert!(!limiter.check_now("alice")?.allowed());
//! assert_eq!(&*limiter.store().top(1)[0].key, "alice");
//!
//! clock.advance(Duration::from_secs(12));
//! assert!(limiter.check_now("alice")?.allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Behaviour
//!
//! - A state of a few numbers (of a [`Gcra`](ratelimit_core::Gcra)) lies in a table of cache lines that grows with its
//!   keys, 16 bytes a key. A decision on one that is held takes no lock if it writes nothing, and its own
//!   for some instructions if it does. (Those of both of its buckets the first time after it has moved.)
//!   One that takes more than twelve days to recover, or was written 2.2 years after the store was made,
//!   lies in a shard.
//! - What takes more (logs, windows, leases, stacks) lies in shards, each under a lock of its own, and is
//!   stepped in its place. So does what was charged at a given time. A batch of a few limits whose
//!   states buckets hold locks these alone, to write; any other its buckets and then its shards in one order, so
//!   that batches never wait for each other in a circle.
//! - There is no sweeper thread, and no pause. A check of a state that a bucket holds frees nothing. A key
//!   that is new takes the place of an expired one if it can, and frees what has expired in the next three
//!   buckets, and in two places of a shard; in a batch whose states all lie in buckets, what has expired in its own.
//!   An admission by a state in a shard looks at one place there. So memory follows the keys that come: what
//!   the last burst has left stays until new ones do, within the cap.
//!   [`MemoryStore::len`] counts it.
//! - The number of keys has a hard cap, and no live key's limit is ever reset to make room. When it is
//!   reached, a call that needs a place looks for an expired state in its own buckets and shard, and then in the next
//!   8 to 256 buckets (all, if there are no more), twice as many as the call before if that found some and half as
//!   many if not, and in 64 places of each of four shards. It looks no further: where it finds none, new keys
//!   share one state per limit, which is counted in [`MemoryStore::overflowed`], even if there are idle states
//!   elsewhere. What that means for a key is said at [`Builder::capacity`]. With one idle state in two hundred, 256 buckets hold about three. The next call looks at the next
//!   buckets. A store that is often full wants a larger [capacity](Builder::capacity).
//! - The number of entries that logs keep has a hard cap too, [for all of them
//!   together](Builder::entries). When it is reached and nothing has expired, new keys share a bucket as
//!   well, from a sixteenth of the entries that is kept for that; a held key that would need one more is
//!   answered with [`MemoryError::Entries`], and charged nothing. What is denied or takes something off
//!   needs no entry, and goes on.
//! - Keys are known by hashes of them under a secret, so that nobody can choose which meet: see below.
//! - [`TopDenied`] over this or any other store lists who is denied most.
//! - A lease can be held by a value: see [`RateLimiter::lease_now`](ratelimit_core::RateLimiter::lease_now).
//!
//! # When foreign code panics
//!
//! An algorithm and a clock run while the store holds locks. If one of them panics, the call charges nothing and
//! loses no room, every other key stays as it was, and the next call goes on: all foreign code of a call runs before
//! its first write, and what was reserved is given back.
//!
//! There are three exceptions. A state is dropped when the call is charged already: if that panics, the charge stands. Where
//! an algorithm writes over a state itself
//! ([`step_in_place`](ratelimit_core::Algorithm::step_in_place),
//! [`settle_in_place`](ratelimit_core::Algorithm::settle_in_place)), its contract is to decide before it writes. A panic
//! after that, or in [`entries_in`](ratelimit_core::Algorithm::entries_in) of the state that it wrote, leaves this one
//! key with what the algorithm has written; no other key and no count is concerned. And a closure that is
//! [told of several keys](ratelimit_core::SyncStore::acquire_each_now) is called when a key has been decided: those
//! that it was told of stay decided, and all others are as they were.
//!
//! # Without an operating system
//!
//! The store needs no thread, and no clock but the one that it is [given](Builder::clock). So it runs on
//! `wasm32-unknown-unknown`, where the standard library has no time: [`MemoryStore::new`], [`PreciseClock`] and
//! [`CoarseClock`] panic there. Nor has it randomness there. What keys are hashed with is then no secret, and a caller
//! who chooses keys can make them meet.
//!
//! # When two keys meet
//!
//! No key is kept, only a hash of it. Two keys whose hashes agree share a state; if both ask while the table
//! grows, the one may find the limit of the other, or its own begun anew.
//!
//! The hash is a polynomial at a secret place, [`PolymurHash`](https://github.com/orlp/polymur-hash). Whoever chooses
//! two keys of at most *n* bytes, and sees no hash, is proved to make them agree in all of it with a chance of *n* ·
//! 2⁻⁶⁰ at the most. For keys that nobody chose its 61 bits are as good as chance, and in shards all of them
//! count: that any two of ten million meet has a chance of 2 in a hundred thousand. (Chosen by somebody, 20 bytes
//! each: 8 in ten thousand at the most.) In buckets it is 46 bits in a small table and one more each time that it has
//! doubled, as of when the state was last written. That a part of the hash is as good as chance is not proved,
//! but what every test says. At the worst, if all keys come once and none again:
//!
//! | keys held | a new one meets any | any two have met | … once all were written anew |
//! |---|---|---|---|
//! | 1,000 | 1.4 · 10⁻¹¹ | 7 · 10⁻⁹ | 7 · 10⁻⁹ |
//! | 1,000,000 | 1.4 · 10⁻¹⁰ | 1.2 · 10⁻⁴ | 8 · 10⁻⁶ |
//! | 10,000,000 | 1.8 · 10⁻¹⁰ | 1.6 · 10⁻³ | 8 · 10⁻⁵ |
//!
//! A stream of a hundred thousand new keys a second so brings about a pair a day at the most, of two that
//! nobody can choose. Limits of one caller lie near each other and are told apart by what their names'
//! fingerprints differ in: two names meet with a chance of 10⁻⁷ in a small table, of 10⁻¹⁰ among a million, and
//! then for one caller in 256; all others never do. Where that is too much, an algorithm whose states lie in
//! shards, such as [`TokenBucket`](ratelimit_core::TokenBucket), decides the same.
//!
//! The store shows no hash. What it does tells a little of them: two keys that have met share a limit; in a
//! full store a new key has a state of its own if one near it has expired; and what is near is a little faster.
//! To compute the secret from that would take far more keys and far closer looks than an answer over a network
//! gives, but it is an argument, and no proof.

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
mod top_denied;

#[cfg(all(test, loom))]
mod loom_store;

pub use clock::{CoarseClock, PreciseClock};
pub use store::{Builder, MemoryError, MemoryStore};
pub use top_denied::{Denied, TopDenied};
