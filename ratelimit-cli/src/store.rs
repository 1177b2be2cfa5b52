//! The store that `--store` names.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use ratelimit_core::store::{Batch, RecordStore as _};
use ratelimit_core::{
    AnyAlgorithm, Clock, DynError, Limits, ManualClock, Store, Timestamp, Verdict,
};
use ratelimit_memory::{MemoryStore, PreciseClock};
use ratelimit_replay::failure::Failure;
use ratelimit_replay::records::{self, GivenRecord};

#[cfg(feature = "_servers")]
mod servers;

#[cfg(not(feature = "_servers"))]
pub(crate) use pollster::block_on;
#[cfg(feature = "_servers")]
pub(crate) use servers::{
    Redis, Remote, apply_to, block_on, connect, in_each_mode, of_caller, scan_failed,
};

/// The environment variable that holds the secret by which a store hides identifiers.
const SECRET: &str = "RATELIMIT_SECRET";

/// The secret in a file, or else in the environment. On the command line, other users could read
/// it.
pub(crate) fn secret(file: Option<&Path>) -> Result<Option<Vec<u8>>, Failure> {
    let (place, secret) = match file {
        None => (SECRET.to_owned(), env::var_os(SECRET).map(OsString::into_encoded_bytes)),
        Some(path) => {
            let place = format!("--secret-file {}", path.display());
            let secret = fs::read(path).map_err(|error| {
                Failure::input(format!("{place}: cannot be read: {error}; name a file"))
            })?;
            // Editors end a file with a line break, which is not part of the secret.
            let secret = secret.strip_suffix(b"\n").unwrap_or(&secret);
            (place, Some(secret.strip_suffix(b"\r").unwrap_or(secret).to_vec()))
        }
    };
    if secret.as_ref().is_some_and(Vec::is_empty) {
        let remedy = "write the secret of the service, or leave it out if the service has none";
        return Err(Failure::input(format!("{place}: is empty; {remedy}")));
    }
    Ok(secret)
}

/// The most keys in a memory store: a bound that no realistic log reaches. At some hundred bytes
/// per key, the machine runs out of memory first.
const MEMORY_KEYS: usize = 64 << 20;

/// A new store in memory, with room for all the records that a file has.
pub(crate) fn memory() -> MemoryStore {
    memory_by(PreciseClock::new())
}

fn memory_by<C: Clock>(clock: C) -> MemoryStore<AnyAlgorithm, C> {
    MemoryStore::builder().capacity(MEMORY_KEYS).records(usize::MAX).clock(clock).build()
}

/// A store for requests that tell their times. By its own clock none of their records has ended.
fn memory_of_past_times() -> ReplayedStore {
    memory_by(ManualClock::new(Timestamp::ZERO))
}

type ReplayedStore = MemoryStore<AnyAlgorithm, ManualClock>;

/// The value of `--store`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    Memory,
    #[cfg(feature = "_servers")]
    Redis(Box<Redis>),
}

impl StoreUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        match text {
            "memory" => Ok(Self::Memory),
            #[cfg(feature = "_servers")]
            url => Redis::parse(url, "; or use --store memory").map(Self::Redis),
            #[cfg(not(feature = "_servers"))]
            _ => Err(no_client()),
        }
    }

    /// The store's name for people, without user, password and options.
    pub(crate) fn display(&self) -> String {
        match self {
            Self::Memory => "memory".to_owned(),
            #[cfg(feature = "_servers")]
            Self::Redis(redis) => redis.url.to_string(),
        }
    }

    /// The store itself, if it can decide these limits. On a server its keys begin with the prefix,
    /// and hide identifiers if there is a secret.
    pub(crate) async fn open(
        &self,
        prefix: &str,
        secret: impl FnOnce() -> Result<Option<Vec<u8>>, Failure>,
        limits: &Limits<AnyAlgorithm>,
    ) -> Result<Opened, Failure> {
        match self {
            Self::Memory => Ok(Opened::Memory(Box::new(memory_of_past_times()))),
            #[cfg(feature = "_servers")]
            Self::Redis(redis) => {
                connect(redis, prefix, secret()?.as_deref(), limits).await.map(Opened::Redis)
            }
        }
    }

    /// A new store in memory with these records, as far as these limits decide by them.
    pub(crate) async fn open_with(
        &self,
        records: &[GivenRecord],
        limits: &Limits<AnyAlgorithm>,
    ) -> Result<Opened, Failure> {
        if *self != Self::Memory {
            let refused =
                "--records: a replay decides by records in memory only; leave --store out";
            return Err(Failure::input(refused));
        }
        let store = memory_of_past_times();
        for limit in limits {
            for (key, record) in records::of(records, limit) {
                let put = store.exchange_record(limit, key, None, Some(record)).await;
                put.map_err(|error| Failure::store("--records", &error))?;
            }
        }
        Ok(Opened::Memory(Box::new(store)))
    }
}

/// A store in memory or on a server.
pub(crate) enum Opened {
    Memory(Box<ReplayedStore>),
    #[cfg(feature = "_servers")]
    Redis(Remote),
}

impl Opened {
    /// How many checks were decided on a bucket shared with others, because the store was full.
    pub(crate) fn overflowed(&self) -> u64 {
        match self {
            Self::Memory(store) => store.overflowed(),
            #[cfg(feature = "_servers")]
            Self::Redis(_) => 0,
        }
    }
}

impl Store<AnyAlgorithm> for Opened {
    type Error = DynError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, DynError> {
        match self {
            Self::Memory(store) => store.apply(batch).await.map_err(DynError::new),
            #[cfg(feature = "_servers")]
            Self::Redis(store) => store.apply(batch).await.map_err(DynError::new),
        }
    }
}

/// The error of a build that reaches no server. It does not quote the URL, which may hold a
/// password.
#[cfg(not(feature = "_servers"))]
pub(crate) fn no_client() -> Failure {
    Failure::input(
        "--store: this build decides in memory only. For a store on Redis, build with the feature redis or fred: \
         `cargo install ratelimit-cli --features redis --git https://github.com/ratelimit-rs/ratelimit`, \
         or in a clone `cargo run --release --features redis -- …`",
    )
}
