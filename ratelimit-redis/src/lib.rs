//! The Redis store for `ratelimit-core`.

use std::time::Duration;

use ratelimit_core::{Batch, ErrorKind, Limit, Policy, PolicyState, Store, StoreError, Verdict};

/// A store on Redis.
#[derive(Clone, Debug)]
pub struct RedisStore {}

/// How a [`RedisStore`] is to be built.
#[derive(Clone, Debug)]
pub struct Builder {}

impl Builder {
    /// What every key begins with; `rl` unless told otherwise.
    #[must_use]
    pub fn prefix(self, _prefix: &str) -> Self {
        self
    }

    /// How long a call may take, connecting included; 1 second unless told otherwise.
    #[must_use]
    pub fn deadline(self, _deadline: Duration) -> Self {
        self
    }

    /// Connects to the server at this URL.
    ///
    /// # Errors
    /// A URL that cannot be read, or a server that cannot be reached within the deadline.
    pub async fn connect(self, _url: &str) -> Result<RedisStore, RedisError> {
        Err(RedisError)
    }
}

impl RedisStore {
    /// Where to say by which prefix and with which deadline.
    #[must_use]
    pub fn builder() -> Builder {
        Builder {}
    }

    /// Connects to the server at this URL, with everything as by default.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    pub async fn connect(url: &str) -> Result<Self, RedisError> {
        Self::builder().connect(url).await
    }

    /// The state stored for a key of a limit.
    ///
    /// # Errors
    /// A server that does not answer, or a value that this limit did not write.
    pub async fn state(
        &self,
        _limit: &Limit<Policy>,
        _key: &str,
    ) -> Result<Option<PolicyState>, RedisError> {
        Err(RedisError)
    }
}

impl Store<Policy> for RedisStore {
    type Error = RedisError;

    async fn apply(&self, _batch: &Batch<'_, Policy>) -> Result<Verdict, RedisError> {
        Err(RedisError)
    }
}

/// What the store could not do.
#[derive(Debug)]
pub struct RedisError;

impl std::fmt::Display for RedisError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("not yet")
    }
}

impl std::error::Error for RedisError {}

impl StoreError for RedisError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Unavailable
    }
}
