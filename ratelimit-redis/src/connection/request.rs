//! [`Request`]: a command or a transaction, so that each way to send them is written once.

use super::Argument;

/// What is sent to a server at once. The reply to a transaction is an array of its commands'
/// replies.
#[derive(Clone, Copy)]
pub(crate) enum Commands<'a> {
    One(&'a [Argument<'a>]),
    Transaction(&'a [Vec<Argument<'a>>]),
}

impl<'a> Commands<'a> {
    /// The commands as they are sent one after the other, with ASKING before them if `asking`.
    pub(crate) fn each(self, asking: bool) -> Vec<&'a [Argument<'a>]> {
        let mut all: Vec<&[Argument<'_>]> = Vec::new();
        if asking {
            all.push(&[Argument::Text("ASKING")]);
        }
        match self {
            Self::One(words) => all.push(words),
            Self::Transaction(commands) => {
                all.push(&[Argument::Text("MULTI")]);
                all.extend(commands.iter().map(Vec::as_slice));
                all.push(&[Argument::Text("EXEC")]);
            }
        }
        all
    }
}

/// What to do while keys of a request lie on two servers, because their slot moves: a server
/// answers `TRYAGAIN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TryAgain {
    /// Wait until they lie on one.
    Wait,
    /// Return the error: the caller sends the keys apart.
    Return,
}

/// A request to a server.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) commands: Commands<'a>,
    pub(crate) try_again: TryAgain,
    /// Whether it asks which server is in charge.
    pub(crate) asks_owners: bool,
}

impl<'a> Request<'a> {
    const fn of(commands: Commands<'a>) -> Self {
        Self { commands, try_again: TryAgain::Wait, asks_owners: false }
    }

    pub(crate) const fn command(words: &'a [Argument<'a>]) -> Self {
        Self::of(Commands::One(words))
    }

    pub(crate) const fn splittable(words: &'a [Argument<'a>]) -> Self {
        Self { try_again: TryAgain::Return, ..Self::command(words) }
    }

    pub(crate) const fn question(words: &'a [Argument<'a>]) -> Self {
        Self { asks_owners: true, ..Self::command(words) }
    }

    pub(crate) const fn transaction(commands: &'a [Vec<Argument<'a>>]) -> Self {
        Self::of(Commands::Transaction(commands))
    }
}
