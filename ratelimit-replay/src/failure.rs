//! [`Failure`]: why the tool stops, and with which exit code.

use std::io;
use std::path::Path;

use ratelimit_core::{ErrorKind, StoreError};

/// Why the tool stops.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Invalid arguments or input: exit code 2.
    #[error("{0}")]
    Input(String),
    /// The store failed or is unreachable: exit code 3.
    #[error("{0}")]
    Store(String),
    /// The reader of standard output has closed it, as in `ratelimit … | head`. This is not
    /// reported.
    #[error("the reader of the output has closed it")]
    BrokenPipe,
    /// The user has interrupted the tool: exit code 130, as in shells. This is not reported,
    /// either.
    #[error("interrupted")]
    Interrupted,
}

impl Failure {
    /// Invalid arguments or input. The message names the place and the remedy.
    pub fn input(message: impl Into<String>) -> Self {
        Self::Input(message.into())
    }

    /// Explains a store's error to the user.
    pub fn store(what: &str, error: &impl StoreError) -> Self {
        let message = format!("{what}: {error}");
        match error.kind() {
            // Of the policy or the request, and not of the store.
            ErrorKind::Invalid => Self::Input(error.to_string()),
            ErrorKind::Config | ErrorKind::Unsupported => Self::Input(message),
            _ => Self::Store(message),
        }
    }

    /// An output that cannot be written.
    pub fn writing(to: &Path, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::BrokenPipe,
            _ => Self::Input(format!("{}: cannot be written: {error}", to.display())),
        }
    }
}
