//! The generic cell rate algorithm (GCRA): a limiter that keeps a time instead of a count.
//!
//! Source: ITU-T Recommendation I.371, "virtual scheduling algorithm". Each token is work that
//! takes one *emission interval*, one token after the other. The *theoretical arrival time* (TAT)
//! is when all admitted work will be done. A request fits if the work still to do, with its own
//! added, is at most what the burst allows:
//!
//! ```text
//!      at                    TAT                     at + full_us
//!       ├──────── used ────────┤───── what is left ──────┤
//! ```
//!
//! # In integers
//!
//! With `n` tokens per `p` refill ticks (in lowest terms) a token is `p` units of work, and a tick
//! does `n` units. The emission interval `p / n` is seldom a whole number of ticks. So the state
//! keeps the TAT rounded up to a whole tick, and the `surplus`: the units by which that is too
//! much. At 3/s, `n = 3` and `p = 1,000,000`. One token admitted at 0 is done after 333,333⅓ µs;
//! the state keeps a TAT of 333,334 µs and a surplus of `333,334 · 3 − 1,000,000 = 2` units.
//!
//! A tick lasts one microsecond for all but the largest numbers, and a millisecond or a second for
//! those. [`Refill`] chooses it so that the capacity in units and the time from empty to full stay
//! below 2^52. The sum of a time and such a span stays below 2^53, and so does every number here.
//!
//! The arithmetic is in `gcra/step.rs`. `gcra.lua` in `ratelimit-redis` is the same algorithm in
//! Lua, with the same names in the same order. `gcra/fast.rs` is the fast path for stores in
//! memory.
//!
//! # Two names
//!
//! A token bucket holds at most `burst` tokens, begins full, and refills at `rate` (Turner's "leaky
//! bucket as a meter", 1986, in the form for tokens of RFC 2697). It lacks the work that GCRA still
//! has to do, so both decide alike: I.371 defines them as equivalent. [`TokenBucket`] is the name
//! that many know this algorithm by.
//!
//! # The time of the last charge
//!
//! The textbook keeps the TAT alone. From the TAT, no store can know how far its clock had come
//! before it went back, or reduce a state to a smaller limit without moving it at every denial. So
//! the state also keeps the time of its last charge, and `retry_after` stays exact.
//!
//! # Debt
//!
//! Forced charges and settlements above their reservation may charge `debt` tokens beyond the
//! burst. They stand in the TAT as any other work, so a request is denied until the work that is
//! left, with its own, fits the burst again. What would pass burst and debt is forgiven.
//!
//! # Settling
//!
//! Part of a reservation may have refilled by the time it is settled below its estimate. The
//! difference is returned in full if nothing was charged since, and otherwise less what may have
//! refilled, so settling never creates capacity.

mod fast;
mod step;

use crate::builder::{AlgorithmBuilder, FromRate, from_text, owing, per};
use crate::error::ConfigError;
use crate::rate::{Rate, Refill, beside_nothing};
use crate::timestamp::Timestamp;

/// The generic cell rate algorithm: `rate` in the long run, `burst` at once.
///
/// ```
/// use ratelimit_core::{Algorithm, Gcra, Timestamp};
/// use ratelimit_core::algorithm::Write;
///
/// let gcra = Gcra::new("3/s".parse()?, 1)?;
/// let first = gcra.step(None, Timestamp::ZERO, 1);
/// assert!(first.decision.allowed);
///
/// let Write::Put { state, .. } = first.write else { unreachable!() };
/// let second = gcra.step(Some(&state), Timestamp::ZERO, 1);
/// assert_eq!(second.decision.retry_after_us, Some(333_334)); // a third of a second, rounded up
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Gcra {
    refill: Refill,
    /// For the fast path, which serves limits whose tokens are whole microseconds.
    token: Option<fast::Token>,
    /// Whether a document or a text calls it `token-bucket`: then it is shown so.
    is_token_bucket: bool,
}

/// What it is called makes no difference.
impl PartialEq for Gcra {
    fn eq(&self, other: &Self) -> bool {
        self.refill == other.refill
    }
}

impl Eq for Gcra {}

/// A bucket of `burst` tokens that refills at `rate`: [`Gcra`] by its other name.
///
/// ```
/// use ratelimit_core::{Algorithm, Timestamp, TokenBucket};
///
/// let bucket = TokenBucket::new("1/s".parse()?, 5)?;
/// let forced = bucket.force(None, Timestamp::ZERO, 7).expect("a bucket can be drained");
/// assert!(forced.decision.allowed);
/// assert_eq!(forced.decision.remaining, 0);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
pub type TokenBucket = Gcra;

/// What [`Gcra`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcraState {
    /// The theoretical arrival time: when all admitted work will be done, and the bucket full. In
    /// microseconds since the Unix epoch; it may lie past [`Timestamp::MAX`], but below 2^53.
    pub tat_us: u64,
    /// Units of work by which `tat_us` is rounded up; less than what one refill tick does.
    pub surplus: u64,
    /// When the state was written. An earlier `now` counts as this time.
    pub timestamp: Timestamp,
}

impl Gcra {
    /// `rate` in the long run and up to `burst` at once. At a rate of 0 it denies everything, and
    /// the burst is 0.
    ///
    /// # Errors
    /// A burst of 0 at a rate above 0, or one above 0 at a rate of 0; numbers too large to stay
    /// exact.
    pub fn new(rate: Rate, burst: u64) -> Result<Self, ConfigError> {
        Self::with_debt(rate, burst, 0)
    }

    /// As [`new`](Self::new), and up to `debt` may be owed: see
    /// [`Algorithm::debt`](crate::Algorithm::debt).
    ///
    /// ```
    /// use ratelimit_core::{Algorithm, Gcra, Timestamp};
    ///
    /// let tokens = Gcra::with_debt("10/s".parse()?, 100, 50)?;
    /// let forced = tokens.force(None, Timestamp::ZERO, 120).expect("GCRA has forced charges");
    /// // Twenty are owed: ten more of a burst of 100 fit once thirty have flowed back.
    /// let state = forced.write.after(None);
    /// assert_eq!(tokens.owed(state, Timestamp::ZERO), 20);
    /// assert_eq!(tokens.step(state, Timestamp::ZERO, 10).decision.retry_after_us, Some(3_000_000));
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new); a debt at a rate of 0.
    pub fn with_debt(rate: Rate, burst: u64, debt: u64) -> Result<Self, ConfigError> {
        let refill = Refill::with_debt(rate, burst, debt)?;
        Ok(Self { refill, token: fast::Token::from_refill(&refill), is_token_bucket: false })
    }

    /// The same limit, called `token-bucket`.
    pub(crate) const fn as_token_bucket(self) -> Self {
        Self { is_token_bucket: true, ..self }
    }

    /// Whether it is called `token-bucket`.
    pub(crate) const fn is_token_bucket(&self) -> bool {
        self.is_token_bucket
    }

    /// The integers that this limit computes with.
    #[must_use]
    pub const fn refill(&self) -> &Refill {
        &self.refill
    }
}

per!(Gcra);
from_text!(Gcra);

impl FromRate for Gcra {
    fn from_rate(rate: Rate, burst: Option<u64>, debt: Option<u64>) -> Result<Self, ConfigError> {
        if rate.count() == 0 && burst.is_some() {
            return Err(beside_nothing("burst"));
        }
        Self::with_debt(rate, burst.unwrap_or(rate.count()), debt.unwrap_or_default())
    }

    fn to_rate(&self) -> Rate {
        self.refill().rate()
    }

    fn to_burst(&self) -> Option<u64> {
        Some(self.refill().burst).filter(|burst| *burst > 0)
    }

    fn span_us(&self) -> u64 {
        self.refill().full_us()
    }
}

impl AlgorithmBuilder<Gcra> {
    /// The most that is admitted at one moment, at least 1; the number of the rate by default.
    pub const fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }
}

owing!(Gcra);
