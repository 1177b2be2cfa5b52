//! The Redis store for `ratelimit-core`: every batch is one script, decided on the server.
//!
//! ```no_run
//! use ratelimit_core::{Gcra, Limit, Limits, Policy, RateLimiter};
//! use ratelimit_redis::RedisStore;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let limits = Limits::<Policy>::new([Limit::new("login", Gcra::new("5/m".parse()?, 5)?.into())?])?;
//! let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
//! let limiter = RateLimiter::new(limits, store);
//!
//! let verdict = limiter.check("alice").await?;
//! if !verdict.allowed() {
//!     println!("come back in {:.1?}", verdict.retry_after().unwrap_or_default());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | default | brings |
//! |---|---|---|
//! | `redis` | yes | the client `redis` |
//! | `fred` | no | the client `fred` |
//! | `connection-manager` | yes | stores over a `redis::aio::ConnectionManager` of the program |
//! | `tls` | no | `rediss://` URLs, by rustls |
//!
//! At least one client is needed.
//!
//! # Main types
//!
//! | type | for |
//! |---|---|
//! | [`RedisStore`], [`Builder`] | the store, and how it is built |
//! | [`RedisUrl`] | one server, Sentinel or a cluster, in one line |
//! | [`Lua`], [`Cas`], [`Multi`] | the modes |
//! | [`RedisError`] | what went wrong, and whether the request can have been charged |
//! | [`Health`] | what the servers lack for the mode |
//! | [`Codec`], [`LuaProgram`] | an algorithm of your own: its state as bytes, or its twin in Lua |
//! | [`IntoConnection`], [`Connection`] | a client that the program has already, or a client of your own |
//!
//! A store that is built while Redis may be away, with a prefix and a deadline of its own:
//!
//! ```no_run
//! use std::time::Duration;
//! use ratelimit_redis::RedisStore;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::builder()
//!     .prefix("shop")
//!     .deadline(Duration::from_millis(200))
//!     .connect_lazy("redis-cluster://10.0.0.1:7000,10.0.0.2:7000")?;
//! let health = store.health().await;
//! println!("{health:?}");
//! # Ok(())
//! # }
//! ```
//!
//! # Behaviour
//!
//! - It decides exactly as the memory store does, field by field: each algorithm has a twin in Lua,
//!   and `ratelimit-testkit` tests both against the same laws.
//! - That is the [`Lua`] mode. In the [`Cas`] mode any algorithm runs, with no Lua of its own: stepped
//!   here, and written there if nothing has changed meanwhile. The [`Multi`] mode needs no scripting at
//!   all, and serves limits that count attempts.
//! - Time is the server's, one clock for all who ask it.
//! - It serves on one server, on the master that sentinels name and on a cluster: see [`RedisUrl`]. Slots
//!   that move and masters that are replaced are followed, within the deadline of the call.
//! - A request is executed at most once. It is sent again only after a server has said that it did not
//!   execute it, or if it was never sent. An error says whether it can have been charged:
//!   [`ErrorKind::Unavailable`](ratelimit_core::ErrorKind::Unavailable) or
//!   [`ErrorKind::Indeterminate`](ratelimit_core::ErrorKind::Indeterminate).
//! - Scripts are called by their hash, and by their text where the server does not know it.
//! - Every key has a time to live and is gone when its state has stopped to matter.
//! - Limits whose state is a few numbers share one hash per identifier, and so do the limits of a
//!   [`Stack`](ratelimit_core::Stack), a field each; a sliding log is a sorted set of its own, a window
//!   log a list. A reservation is a key of its own, some 200 bytes, for an hour, or for ten seconds after its
//!   settlement if the layer drew its id. The keys of one identifier have one hash tag.
//!
//! # Clients that a program has already
//!
//! A store can be put [over](Builder::over) connections of the crates `redis` and `fred` that a program
//! uses for other things as well, to one server or by Sentinels. [`IntoConnection`] says which, with an
//! example of each, and what to know of them. For a cluster give a URL. Anything else can be a
//! [`Connection`].

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

#[cfg(not(any(feature = "redis", feature = "fred")))]
compile_error!("ratelimit-redis needs a client: switch on the feature `redis` or `fred`, or both");

mod apply;
mod builder;
mod cas_mode;
mod client;
mod codec;
mod connection;
mod cross_slot;
mod deadline;
mod error;
mod flat;
mod flights;
mod heal;
mod health;
mod key;
mod lua_mode;
mod mode;
mod multi_mode;
mod native;
mod program;
mod reservation;
mod rounds;
mod scan;
mod script;
mod scripts;
mod shared_runtime;
mod store;
mod turns;
mod url;

pub use builder::Builder;
pub use client::Client;
pub use codec::Codec;
pub use connection::{Argument, Connection, External, IntoConnection, RedisConnection, Reply};
pub use deadline::Deadline;
pub use error::RedisError;
pub use heal::{HealOptions, Healed, HealedState};
pub use health::{Finding, Health, Server, Severity};
pub use key::Tag;
pub use mode::{Cas, Lua, Mode, Multi};
pub use native::{Entry, EntryStorage, MultiProgram, Native, NativeState};
pub use program::{Keeps, LuaProgram, Parameters, Program, Stored, Twin};
pub use scan::Scan;
pub use store::{CrossSlot, RedisStore};
pub use url::RedisUrl;
