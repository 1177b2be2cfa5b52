//! The store that `--store` names.

use crate::failure::Failure;

#[cfg(feature = "_servers")]
mod servers;
#[cfg(feature = "_servers")]
mod stored_key;

#[cfg(feature = "_servers")]
pub(crate) use servers::{
    Keys, Redis, Remote, apply_to, block_on, connect, in_each_mode, may_scan, of_caller, own_prefix,
};
#[cfg(feature = "_servers")]
pub(crate) use stored_key::StoredKey;

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
}

/// The error of a build that reaches no server. It does not quote the URL, which may hold a password.
#[cfg(not(feature = "_servers"))]
pub(crate) fn no_client() -> Failure {
    Failure::input(
        "--store: this build decides in memory only. For a store on Redis, build with the feature redis or fred: \
         `cargo install ratelimit-cli --features redis`, or in a clone `cargo run --release --features redis -- …`",
    )
}
