//! [`Fold`]: how a wrong store takes different texts for one.

/// A mapping of keys under which different keys become equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fold {
    /// Only the hash tag counts: `{a}b` is `{a}c`.
    HashTag,
    /// A collation ignores case: `Alice` is `alice`.
    Case,
    /// The store replaces its own separator: `a:b` is `a_b`.
    Colons,
    /// White space at the ends is trimmed.
    Trimmed,
    /// A key ends with a NUL.
    NulTerminated,
    /// Only so many bytes count.
    CutAt(usize),
}

impl Fold {
    pub(crate) fn fold(self, key: &str) -> String {
        let tag = || key.split_once('{')?.1.split_once('}').map(|(tag, _)| tag);
        match self {
            Self::HashTag => tag().filter(|tag| !tag.is_empty()).unwrap_or(key).to_owned(),
            Self::Case => key.to_lowercase(),
            Self::Colons => key.replace(':', "_"),
            Self::Trimmed => key.trim().to_owned(),
            Self::NulTerminated => key.split('\0').next().unwrap_or_default().to_owned(),
            Self::CutAt(bytes) => {
                String::from_utf8_lossy(&key.as_bytes()[..bytes.min(key.len())]).into_owned()
            }
        }
    }
}
