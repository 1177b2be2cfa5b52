//! What is wrong with a limit, a policy or a batch, and what would be accepted.

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
