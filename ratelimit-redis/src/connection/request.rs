//! [`Request`]: a command or a transaction, so that each way to send them is written once.

use super::Argument;
use super::follow::TryAgain;

/// What is sent to a server at once. The reply to a transaction is an array of its commands' replies.
#[derive(Clone, Copy)]
pub(crate) enum Commands<'a> {
    One(&'a [Argument<'a>]),
    Transaction(&'a [Vec<Argument<'a>>]),
}

/// What a request is about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Keys that stay together.
    Keys,
    /// Keys that the caller can send apart.
    SplittableKeys,
    /// Which server is in charge.
    Owners,
}

/// A request to a server.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) commands: Commands<'a>,
    pub(crate) purpose: Purpose,
}

impl<'a> Request<'a> {
    pub(crate) const fn command(words: &'a [Argument<'a>]) -> Self {
        Self { commands: Commands::One(words), purpose: Purpose::Keys }
    }

    pub(crate) const fn splittable(words: &'a [Argument<'a>]) -> Self {
        Self { purpose: Purpose::SplittableKeys, ..Self::command(words) }
    }

    pub(crate) const fn question(words: &'a [Argument<'a>]) -> Self {
        Self { purpose: Purpose::Owners, ..Self::command(words) }
    }

    pub(crate) const fn transaction(commands: &'a [Vec<Argument<'a>>]) -> Self {
        Self { commands: Commands::Transaction(commands), purpose: Purpose::Keys }
    }

    pub(crate) fn try_again(self) -> TryAgain {
        match self.purpose {
            Purpose::SplittableKeys => TryAgain::Return,
            Purpose::Keys | Purpose::Owners => TryAgain::Wait,
        }
    }
}
