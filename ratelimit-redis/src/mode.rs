//! The modes of a store: [`Lua`], [`Cas`] and [`Multi`].

/// The mode that decides each batch in one script. It serves algorithms with a [twin in
/// Lua](crate::LuaProgram).
#[derive(Clone, Copy, Debug)]
pub enum Lua {}

/// The mode that steps in Rust and writes with compare-and-set. It serves any
/// [`Algorithm`](ratelimit_core::Algorithm) whose state has a [`Codec`](crate::Codec).
///
/// It reads the states, steps, and writes only if no state has changed meanwhile. After a bounded
/// number of attempts it returns [`Contended`](ratelimit_core::ErrorKind::Contended). If the server
/// has `SET … IFEQ`, a batch of one check needs no scripting, unless its limit looks for
/// [records](ratelimit_core::Record): those are compared as the states are.
///
/// ```no_run
/// use ratelimit_core::{Gcra, Limits, RateLimiter};
/// use ratelimit_redis::RedisStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::builder().cas().connect("redis://127.0.0.1:6379").await?;
/// let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
/// let limiter = RateLimiter::new(limits, store);
/// limiter.check("alice").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Cas {}

/// The mode that decides each batch in a transaction of native commands, without scripting. It
/// serves limits that [count attempts](ratelimit_core::Limit::count_attempts), by an algorithm that
/// is a [`MultiProgram`](crate::MultiProgram).
///
/// ```no_run
/// use ratelimit_core::{FixedWindow, Limits};
/// use ratelimit_redis::RedisStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::builder().multi().connect("redis://127.0.0.1:6379").await?;
/// let limits = Limits::builder().limit("login", FixedWindow::per_minute(5)).count_attempts();
/// let limiter = store.limiter(limits.build()?)?;
/// limiter.check("alice").await?;
/// # Ok(())
/// # }
/// ```
///
/// A decision takes two round trips: one reads the entries, one charges. No limit admits more than
/// it may. If other clients charge or reset in between, an attempt may count once more than
/// elsewhere, for a window at most. A charge more than a second after its read is
/// [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate), unless it is denied.
///
/// Any other limit, and one that looks for [records](ratelimit_core::Record), is refused by name:
/// by [`limiter`](crate::RedisStore::limiter), by [`supports`](crate::RedisStore::supports) for a
/// store within another, and by each request to it. An algorithm that is no `MultiProgram`, such as
/// [`Gcra`](ratelimit_core::Gcra) by its own type, does not compile.
#[derive(Clone, Copy, Debug)]
pub enum Multi {}

impl Sealed for Lua {
    const NAME: &'static str = "lua";
    const COMMANDS: &'static str = "+eval +evalsha +ping +select +time +get +set +del \
        +unlink +hget +hmget +hset +hdel +hlen +hgetall +pttl +pexpire +zadd +zrem +zrange +zcard +zcount +zremrangebyrank +rpush \
        +lindex +llen +lrange +lset +ltrim";
    const OLDEST: u32 = 5;
    const MARK: &'static str = "";
    const SHARES_A_HASH: bool = true;
    const ONLY_ATTEMPTS: bool = false;
    const TRIALS: &'static [(&'static str, &'static str)] = &[
        ("health", "gcra 1000/s"),
        ("health-log", "sliding-log 1000/s"),
        ("health-list", "window-log 1000/s"),
    ];
}

impl Sealed for Cas {
    const NAME: &'static str = "cas";
    const COMMANDS: &'static str = "+eval +evalsha +multi +exec +ping +select +time +get +set +del \
        +hget +hset +hdel +hgetall +pttl +pexpire";
    const OLDEST: u32 = 5;
    const MARK: &'static str = "!";
    const SHARES_A_HASH: bool = false;
    const ONLY_ATTEMPTS: bool = false;
    const TRIALS: &'static [(&'static str, &'static str)] = &[("health", "gcra 1000/s")];
}

impl Sealed for Multi {
    const NAME: &'static str = "multi";
    const COMMANDS: &'static str = "+multi +exec +ping +select +time +del +pexpire \
        +hincrby +hdel +hgetall +zadd +zrem +zremrangebyrank +zrange +rpush +lrem +lrange";
    const OLDEST: u32 = 7;
    const MARK: &'static str = "+";
    const SHARES_A_HASH: bool = false;
    const ONLY_ATTEMPTS: bool = true;
    const TRIALS: &'static [(&'static str, &'static str)] = &[
        ("health", "fixed-window 1000/s"),
        ("health-log", "sliding-log 1000/s"),
        ("health-list", "window-log 1000/s"),
    ];
}

/// What users read of a mode by its own name.
macro_rules! named {
    ($($mode:ident),+) => { $(
        impl $mode {
            /// The mode's name in a store's URL.
            pub const NAME: &'static str = <Self as Sealed>::NAME;
            /// The commands that the server's user needs, as `ACL SETUSER` takes them, besides
            /// access to the keys (`~rl:*` for the prefix `rl`). A cluster also needs
            /// `+cluster|slots +asking`; [`RedisStore::health`](crate::RedisStore::health) also
            /// needs `+info +scan` and, on a cluster, `+cluster|info`;
            /// [`RedisStore::heal`](crate::RedisStore::heal) needs `+scan`. The client `fred` asks
            /// for `CLIENT ID` and `INFO` when it connects, and of a cluster for `CLUSTER INFO`; it
            /// does without them, but unless the user has `+client|id +info +cluster|info`, the
            /// server notes each refusal in its `ACL LOG`.
            pub const COMMANDS: &'static str = <Self as Sealed>::COMMANDS;
            /// The oldest Redis major version that has all of them.
            pub const OLDEST: u32 = <Self as Sealed>::OLDEST;
        }
    )+ };
}

named!(Lua, Cas, Multi);

pub(crate) use sealed::Sealed;

mod sealed {
    /// A mode of this crate, whatever it decides.
    pub trait Sealed: Send + Sync + 'static {
        const NAME: &'static str;
        const COMMANDS: &'static str;
        const OLDEST: u32;
        /// What follows a limit's state name in the keys of its reservations, so that no two modes
        /// share one.
        const MARK: &'static str;
        /// Whether limits of an identifier share a hash.
        const SHARES_A_HASH: bool;
        /// Whether it serves only limits that count attempts.
        const ONLY_ATTEMPTS: bool;
        /// Names and texts of limits that need, together, all that the mode needs.
        const TRIALS: &'static [(&'static str, &'static str)];
    }
}
