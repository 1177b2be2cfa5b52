//! [`ConfigError`], for limits, policies and batches that cannot be built, and [`ErrorKind`], for
//! the errors of stores.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

/// A limit that cannot be built, or a batch that cannot be decided.
///
/// The message names the fault and the remedy, for the author of the policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", .limit.as_ref().map(|name| format!("limit {name:?}: ")).unwrap_or_default())]
pub struct ConfigError {
    limit: Option<String>,
    message: String,
}

impl ConfigError {
    /// An error with this message: what is wrong, then what is accepted.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { limit: None, message: message.into() }
    }

    /// The same error, for the limit of this name.
    #[must_use]
    pub fn in_limit(mut self, name: impl Into<String>) -> Self {
        self.limit.get_or_insert_with(|| name.into());
        self
    }

    /// The same error, for a limit whose name is not known.
    #[cfg(feature = "serde")]
    pub(crate) fn unnamed(mut self) -> Self {
        self.limit = None;
        self
    }

    /// The name of the limit at fault, if there is one.
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        self.limit.as_deref()
    }
}

/// `; did you mean "burst"?` for the nearest of these names, or nothing if none is near. A name
/// without what follows its first `_` is near, as `at` is to `at_us`.
pub fn did_you_mean<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let near = known.into_iter().map(|name| {
        let is_shortened = name.split_once('_').is_some_and(|(first, _)| first == wrong);
        (if is_shortened { 1 } else { typing_errors(wrong, name) }, name)
    });
    let nearest =
        near.filter(|(errors, name)| *errors < name.len() && errors * 3 <= name.len().max(3)).min();
    nearest.map_or_else(String::new, |(_, name)| format!("; did you mean {name:?}?"))
}

/// How many characters differ: the optimal string alignment distance, in which two swapped
/// neighbours are one error. Upper and lower case are the same.
fn typing_errors(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_ascii_lowercase().into_bytes(), b.to_ascii_lowercase().into_bytes());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// What went wrong, so that a caller can decide what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store was not reached, or cannot decide now. Nothing was charged: a retry is safe.
    Unavailable,
    /// The request was sent and no answer came. It may have been charged: a retry may charge twice.
    Indeterminate,
    /// Too many other clients changed the same key at the same time. Nothing was charged.
    Contended,
    /// The keys of the batch lie on different servers. Nothing was charged.
    CrossSlot,
    /// The store, its mode or the algorithm cannot do this. Nothing was charged.
    Unsupported,
    /// The key holds a value that this limit did not write. Nothing was charged.
    Corrupt,
    /// The request is at fault: see [`Refusal`](crate::Refusal). Nothing was charged.
    Invalid,
    /// The reservation or lease under the id has ended, or there was none. Nothing was charged, and
    /// nothing given back.
    Ended,
    /// The store is configured wrongly, or the server refuses it. Nothing was charged.
    Config,
}

impl ErrorKind {
    /// Whether the store cannot be reached or does not answer: it is
    /// [`Unavailable`](Self::Unavailable) or [`Indeterminate`](Self::Indeterminate). Errors of all
    /// other kinds come from a store that is there.
    #[must_use]
    pub const fn is_outage(self) -> bool {
        matches!(self, Self::Unavailable | Self::Indeterminate)
    }
}
