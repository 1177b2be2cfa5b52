//! The Redis store for `ratelimit-core`: one atomic script per decision, on one server, Sentinel or
//! a cluster.
//!
//! ```no_run
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_redis::RedisStore;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
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
//! | feature | default | adds |
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
//! | [`RedisStore`], [`Builder`] | the store, and its settings |
//! | [`RedisUrl`] | one server, Sentinel or a cluster, in one line |
//! | [`Lua`], [`Cas`], [`Multi`] | the modes |
//! | [`RedisError`] | what went wrong, and whether the request can have been charged |
//! | [`Health`] | what the servers lack for the mode |
//! | [`Codec`], [`LuaProgram`] | your own algorithm: its state as bytes, or its twin in Lua |
//! | [`IntoConnection`], [`Connection`] | an existing client of your program, or another client crate |
//!
//! With a prefix and a deadline, for a service that starts even if Redis is unreachable:
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
//! # Modes
//!
//! [`Cas`] runs any algorithm by compare-and-set, and [`Multi`] needs no scripting:
//!
//! ```
//! use ratelimit_core::{FixedWindow, Gcra, Limits, RateLimiter};
//! use ratelimit_redis::{Cas, Multi, RedisStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = ratelimit_servers::RedisServer::start()?;
//! # let url = &server.url();
//! let store: RedisStore<Cas> = RedisStore::builder().cas().prefix("cas").connect(url).await?;
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
//! let limiter = RateLimiter::new(limits, store);
//! assert_eq!(limiter.check("alice").await?.remaining(), 4);
//!
//! let store: RedisStore<Multi> = RedisStore::builder().multi().prefix("multi").connect(url).await?;
//! let limits = Limits::builder().limit("login", FixedWindow::per_minute(5)).count_attempts();
//! let limiter = store.limiter(limits.build()?)?; // denied requests are charged, too
//! assert_eq!(limiter.check("alice").await?.remaining(), 4);
//! # Ok(())
//! # }
//! ```
//!
//! # Your own algorithm
//!
//! In the mode [`Cas`], it needs a [`Codec`] for its state, and `impl RecordText for Mine {}` ([the
//! whole
//! program](https://github.com/ratelimit-rs/ratelimit/blob/main/ratelimit-redis/examples/weekend_budget.rs)):
//!
//! ```
//! use ratelimit_redis::Codec;
//!
//! struct Spent(u64);
//!
//! impl Codec for Spent {
//!     fn encode(&self) -> Vec<u8> {
//!         self.0.to_string().into_bytes()
//!     }
//!     fn decode(bytes: &[u8]) -> Option<Self> {
//!         std::str::from_utf8(bytes).ok()?.parse().ok().map(Spent)
//!     }
//! }
//! # assert_eq!(Spent::decode(&Spent(7).encode()).map(|spent| spent.0), Some(7));
//! ```
//!
//! # Behaviour
//!
//! - **Decisions** equal those of the memory store, field by field: each algorithm has a twin in
//!   Lua, and `ratelimit-testkit` tests both against the same laws.
//! - **Modes.** [`Lua`] is the default. [`Cas`] runs any algorithm without Lua of its own, by
//!   compare-and-set. [`Multi`] needs no scripting, and serves limits that count attempts.
//! - **Time.** All clients use the server's clock.
//! - **Servers.** One server, the master that sentinels name, or a cluster: see [`RedisUrl`]. The
//!   store follows slots that move and masters that are replaced, within the deadline of the call.
//! - **At most once.** The store sends a request again only if it was never sent, or if a server
//!   has answered that it did not execute it. An error reports whether the request can have been
//!   charged: [`ErrorKind::Unavailable`](ratelimit_core::ErrorKind::Unavailable) or
//!   [`ErrorKind::Indeterminate`](ratelimit_core::ErrorKind::Indeterminate).
//! - **Merging.** Requests that wait for a connection share its next call, whatever their keys.
//! - **Keys.** Every key has a time to live, and is gone soon after its state stops mattering.
//!   Limits whose state is a few numbers share one hash per identifier, with a field per limit; a
//!   sliding log is a sorted set, and a window log is a list. A reservation is a key of some 230
//!   bytes, for an hour, or for ten seconds after its settlement if the layer drew its id. The keys
//!   of one identifier have one hash tag.
//!
//! # Existing clients
//!
//! A store can [share](Builder::over) a connection of the crate `redis` or `fred` with the rest of
//! your program, to one server or by Sentinels. [`IntoConnection`] lists them, with an example and
//! the caveats of each. For a cluster, give a URL. For any other client, implement [`Connection`].

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

#[cfg(not(any(feature = "redis", feature = "fred")))]
compile_error!("ratelimit-redis needs a client: switch on the feature `redis` or `fred`, or both");

mod apply;
mod builder;
mod calls;
mod cas_mode;
mod client;
mod codec;
mod concurrent;
mod connection;
mod cross_slot;
mod deadline;
mod error;
mod heal;
mod health;
mod key;
mod lua_mode;
mod mode;
mod multi_mode;
mod native;
mod program;
mod record_store;
mod records;
mod reservation;
mod rounds;
mod runtime;
mod scan;
mod script;
mod scripts;
mod store;
mod turns;
mod url;

pub use builder::Builder;
pub use client::Client;
pub use codec::{Codec, RecordText};
pub use connection::{Argument, Connection, External, IntoConnection, RedisConnection, Reply};
pub use deadline::Deadline;
pub use error::RedisError;
pub use heal::{HealOptions, Healed, HealedState};
pub use health::{Finding, Health, Server, Severity};
pub use key::{StoredKey, Tag};
pub use mode::{Cas, Lua, Multi};
pub use native::{MultiProgram, Native, NativeCharge, Storage};
pub use program::{Keeps, LuaProgram, Program, Stored, Twin};
pub use scan::Scan;
pub use store::{CrossSlot, Mode, RedisStore};
pub use url::RedisUrl;
