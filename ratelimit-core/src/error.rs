//! What is wrong with a limit, a policy or a batch, and what would be accepted; and the kinds of trouble
//! that a store can have.

use alloc::string::String;
use core::fmt;

/// A limit that cannot be built, or a batch that cannot be decided.
///
/// The message names the place and the remedy, and is meant for the person who wrote the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    limit: Option<String>,
    message: String,
}

impl ConfigError {
    /// An error with this message: what is wrong, then what would be accepted.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { limit: None, message: message.into() }
    }

    /// The same error, said of the limit of this name.
    #[must_use]
    pub fn in_limit(mut self, name: impl Into<String>) -> Self {
        self.limit.get_or_insert_with(|| name.into());
        self
    }

    /// The name of the limit that is at fault, where there is one.
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        self.limit.as_deref()
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limit {
            Some(name) => write!(f, "limit {name:?}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl core::error::Error for ConfigError {}

/// What went wrong, as far as a caller has to decide about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store was not reached, or cannot work now. Nothing was charged: asking again is safe.
    Unavailable,
    /// The request was sent and no answer came. It may have been charged: asking again may charge
    /// twice.
    Indeterminate,
    /// Too many others changed the same key at the same time. Nothing was charged.
    Contended,
    /// The keys of the batch lie on different servers. Nothing was charged.
    CrossSlot,
    /// The store, its mode or the algorithm cannot do this. Nothing was charged.
    Unsupported,
    /// What is stored under the key was not written by this limit. Nothing was charged.
    Corrupt,
    /// The request itself is at fault: see [`Refusal`](crate::Refusal). Nothing was charged.
    Invalid,
    /// The store was set up wrongly, or the server refuses it. Nothing was charged.
    Config,
}
