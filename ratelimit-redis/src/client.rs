//! [`Client`]: the client crate that a store connects with.

use std::fmt;

/// The client crate that a store connects with. Both give the same decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Client {
    /// The crate `redis`.
    #[cfg(feature = "redis")]
    Redis,
    /// The crate `fred`. It logs through the crate `log`: at level `debug` which user a server
    /// refuses a command, and at `trace` what a server says about a login, which may quote the
    /// password.
    #[cfg(feature = "fred")]
    Fred,
}

impl Default for Client {
    /// `redis`, if the crate was built with it.
    fn default() -> Self {
        Self::ALL[0]
    }
}

impl Client {
    /// The clients that the crate was built with.
    pub const ALL: &'static [Self] = &[
        #[cfg(feature = "redis")]
        Self::Redis,
        #[cfg(feature = "fred")]
        Self::Fred,
    ];

    /// The name in a URL, as in `client=redis`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis => "redis",
            #[cfg(feature = "fred")]
            Self::Fred => "fred",
        }
    }
}

/// The name in a URL.
impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
