//! What is sent to a server: [`Argument`]s of a command, or [`Commands`] at once.

/// An argument of a command.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// Text, sent verbatim.
    Text(&'a str),
    /// Bytes, sent verbatim.
    Bytes(&'a [u8]),
    /// A number, sent in decimal.
    Number(u64),
}

impl Argument<'_> {
    /// No fewer bytes than it takes.
    pub(crate) const fn most_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::Number(_) => "18446744073709551615".len(),
        }
    }
}

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
