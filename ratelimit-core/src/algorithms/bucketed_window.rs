//! The sliding window over buckets: a count per second (or per other bucket), summed over several
//! windows.
//!
//! Source: the Redis pattern of a counter per second that is read back with `MGET`: 1,000 in one
//! second, 5,000 in ten, 7,000 in fifteen, all from the same counters. A window of `n` buckets is
//! the current bucket and the `n − 1` before it, so it slides by one bucket at a time. Buckets are
//! aligned to the clock.
//!
//! It is coarser than [`SlidingLog`](crate::SlidingLog) by one bucket. Its state grows with the
//! number of buckets, not of requests.
//!
//! `bucketed_window.lua` in `ratelimit-redis` is the same algorithm in Lua.

use alloc::borrow::Cow;
use alloc::format;
use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroU64;
use core::str::FromStr;

use crate::algorithms::{Algorithm, MaybeStep, Step, Write, undone_by_refund};
use crate::builder::WriteNumbers;
use crate::decision::Decision;
use crate::entries::after_refund;
use crate::error::ConfigError;
use crate::in_memory::{InMemory, counts_entries};
use crate::quota::{Quota, slower};
use crate::rate::{Period, Rate, gcd, kind_of_window, period_us};
use crate::reservation::Reservation;
use crate::share::{Share, window};
use crate::timestamp::Timestamp;

/// The most windows that share buckets.
const MAX_WINDOWS: usize = 4;
/// The most buckets in a window.
const MAX_BUCKETS: u64 = 4096;

/// Several windows over shared buckets; a request must fit all of them.
///
/// A decision shows the window with the least remaining (the first on a tie). A step takes time and
/// memory in proportion to the buckets of the longest window that have admitted a request.
///
/// ```
/// use ratelimit_core::{Algorithm, BucketedWindow, Timestamp};
///
/// let steps = BucketedWindow::new(
///     1_000_000,
///     &["1000/1s".parse()?, "5000/10s".parse()?, "7000/15s".parse()?],
/// )?;
/// let decision = steps.step(None, Timestamp::ZERO, 1).decision;
/// assert_eq!((decision.limit, decision.remaining), (1000, 999));
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketedWindow {
    bucket_us: u64,
    windows: [BucketWindow; MAX_WINDOWS],
    count: usize,
}

/// One of the windows of a [`BucketedWindow`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketWindow {
    /// The most that it admits.
    pub limit: u64,
    /// Its length in microseconds: a whole number of buckets.
    pub span_us: u64,
}

/// What [`BucketedWindow`] keeps for a key: its buckets, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketedWindowState {
    /// The buckets that have admitted a request, their starts strictly ascending.
    pub buckets: Vec<BucketCount>,
}

/// The count of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCount {
    /// When the bucket began.
    pub start: Timestamp,
    /// What it has admitted.
    pub count: u64,
}

/// The buckets that still count in the longest window.
#[derive(Clone, Copy)]
struct LiveBuckets<'a> {
    /// The start of the current bucket: that of `now`, or the newest of the state if that is later.
    current: Timestamp,
    buckets: &'a [BucketCount],
}

impl BucketedWindow {
    /// Windows as rates, over buckets of `bucket_us` microseconds.
    ///
    /// # Errors
    /// No window, or more than four; a bucket of 0; a window that is not a whole number of buckets,
    /// or of more than 4,096 buckets.
    pub fn new(bucket_us: u64, rates: &[Rate]) -> Result<Self, ConfigError> {
        if rates.is_empty() || rates.len() > MAX_WINDOWS {
            return Err(ConfigError::new(format!(
                "there are {} rates; write 1 to {MAX_WINDOWS}, such as [\"1000/1s\", \"5000/10s\"]",
                rates.len()
            )));
        }
        let mut windows = [BucketWindow::default(); MAX_WINDOWS];
        for (window, rate) in windows.iter_mut().zip(rates) {
            let span_us = rate.period_us();
            if bucket_us == 0 || !span_us.is_multiple_of(bucket_us) {
                let longest_us = rates.iter().fold(0, |all, rate| gcd(rate.period_us(), all));
                let longest = Period { us: longest_us, times_one: true };
                return Err(ConfigError::new(format!(
                    "the window of {rate} is not a whole number of buckets; choose a bucket that \
                     divides every window, such as {longest}"
                )));
            }
            if span_us / bucket_us > MAX_BUCKETS {
                return Err(ConfigError::new(format!(
                    "the window of {rate} has more than {MAX_BUCKETS} buckets; choose a longer bucket"
                )));
            }
            *window = BucketWindow { limit: rate.count(), span_us };
        }
        Ok(Self { bucket_us, windows, count: rates.len() })
    }

    /// The length of a bucket in microseconds.
    #[must_use]
    pub const fn bucket_us(&self) -> u64 {
        self.bucket_us
    }

    /// The windows, in the order that [`new`](Self::new) was given.
    #[must_use]
    pub fn windows(&self) -> &[BucketWindow] {
        &self.windows[..self.count]
    }

    fn longest_us(&self) -> u64 {
        self.windows().iter().map(|window| window.span_us).max().unwrap_or_default()
    }

    /// When a bucket stops counting in a window: one window's length after its start.
    fn end_us(bucket: BucketCount, span_us: u64) -> u64 {
        bucket.start.as_us() + span_us
    }

    fn aligned(&self, timestamp: Timestamp) -> Timestamp {
        timestamp.aligned(self.bucket_us)
    }

    fn live<'a>(&self, state: Option<&'a BucketedWindowState>, now: Timestamp) -> LiveBuckets<'a> {
        let buckets = state.map_or(&[][..], |state| &state.buckets);
        let last = buckets.last().map_or(Timestamp::ZERO, |bucket| bucket.start);
        let current = self.aligned(now).max(last);
        let past =
            |bucket: &BucketCount| Self::end_us(*bucket, self.longest_us()) <= current.as_us();
        LiveBuckets { current, buckets: &buckets[buckets.partition_point(past)..] }
    }

    /// The buckets that count in a window, and what they hold together.
    fn in_window(live: LiveBuckets<'_>, span_us: u64) -> (&[BucketCount], u64) {
        let past = |bucket: &BucketCount| Self::end_us(*bucket, span_us) <= live.current.as_us();
        let buckets = &live.buckets[live.buckets.partition_point(past)..];
        (buckets, buckets.iter().map(|bucket| bucket.count).fold(0, u64::saturating_add))
    }

    fn used(live: LiveBuckets<'_>, window: BucketWindow) -> u64 {
        Self::in_window(live, window.span_us).1
    }

    /// What every window has left.
    fn remaining(&self, live: LiveBuckets<'_>) -> u64 {
        let left = |window: &BucketWindow| window.limit.saturating_sub(Self::used(live, *window));
        self.windows().iter().map(left).min().unwrap_or_default()
    }

    /// When `cost` fits all windows after `charge` is added to the current bucket, if it ever does.
    fn fits_us(&self, live: LiveBuckets<'_>, charge: u64, cost: u64) -> Option<u64> {
        let mut fits_us = live.current.as_us();
        for window in self.windows() {
            let room = window.limit.checked_sub(cost)?;
            let (buckets, used) = Self::in_window(live, window.span_us);
            let mut used = used.saturating_add(charge);
            let current = BucketCount { start: live.current, count: charge };
            for bucket in buckets.iter().chain([&current]) {
                if used <= room {
                    break;
                }
                // Of foreign counts, the sum is less than all of them.
                used = used.saturating_sub(bucket.count);
                fits_us = fits_us.max(Self::end_us(*bucket, window.span_us));
            }
        }
        Some(fits_us)
    }

    /// The decision when `charge` is added to the current bucket, which is in every window.
    fn decision(
        &self,
        (now, cost): (Timestamp, u64),
        live: LiveBuckets<'_>,
        charge: u64,
        retry_after_us: Option<u64>,
    ) -> Decision {
        let left = |window: &BucketWindow| {
            window.limit.saturating_sub(Self::used(live, *window).saturating_add(charge))
        };
        // `min_by_key` takes the first of equals.
        let all_left = self.windows().iter().map(|window| (window.limit, left(window)));
        let (limit, remaining) = all_left.min_by_key(|(_, left)| *left).unwrap_or_default();
        let newest = match charge {
            0 => live.buckets.last().copied(),
            count => Some(BucketCount { start: live.current, count }),
        };
        // What can admit nothing has nothing to recover.
        let newest = newest.filter(|_| self.capacity() > 0);
        let end_us = |bucket| Self::end_us(bucket, self.longest_us());
        let grown_us = self.fits_us(live, charge, remaining + 1);
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit,
            remaining,
            retry_after_us,
            replenish_after_us: grown_us.map_or(0, |us| us.saturating_sub(now.as_us())),
            reset_after_us: newest.map_or(0, |bucket| end_us(bucket).saturating_sub(now.as_us())),
        }
    }

    /// The decision on a request, and the charge.
    fn decide(&self, now: Timestamp, cost: u64, live: LiveBuckets<'_>) -> (Decision, u64) {
        if cost > self.remaining(live) {
            // A store may have kept buckets in no order, of which some have ended already.
            let wait_us = |us: u64| us.saturating_sub(now.as_us()).max(1);
            let retry_after_us = self.fits_us(live, 0, cost).map(wait_us);
            return (self.decision((now, cost), live, 0, retry_after_us), 0);
        }
        (self.decision((now, cost), live, cost, Some(0)), cost)
    }

    fn admit(
        &self,
        now: Timestamp,
        cost: u64,
        live: LiveBuckets<'_>,
        buckets: Option<Vec<BucketCount>>,
    ) -> Step<BucketedWindowState> {
        let after = LiveBuckets { buckets: buckets.as_deref().unwrap_or(live.buckets), ..live };
        let decision = self.decision((now, cost), after, 0, Some(0));
        let write = match buckets {
            None => Write::Keep,
            Some(buckets) => self.write(buckets),
        };
        Step { decision, write }
    }

    fn write(&self, buckets: Vec<BucketCount>) -> Write<BucketedWindowState> {
        match buckets.last() {
            None => Write::Remove,
            Some(last) => {
                let end_us = Self::end_us(*last, self.longest_us());
                Write::until(BucketedWindowState { buckets }, end_us)
            }
        }
    }

    /// The live buckets with `cost` added to the current one.
    fn with_charge(live: LiveBuckets<'_>, cost: u64) -> Option<Vec<BucketCount>> {
        if cost == 0 {
            return None;
        }
        let mut buckets = Vec::with_capacity(live.buckets.len() + 1);
        buckets.extend_from_slice(live.buckets);
        Self::add(&mut buckets, BucketCount { start: live.current, count: cost });
        Some(buckets)
    }

    /// Adds a count to the last bucket, or a bucket after it.
    fn add(buckets: &mut Vec<BucketCount>, new: BucketCount) {
        match buckets.last_mut() {
            Some(last) if last.start >= new.start => last.count += new.count,
            _ => buckets.push(new),
        }
    }
}

impl Algorithm for BucketedWindow {
    type State = BucketedWindowState;

    /// The least of the windows' limits.
    fn capacity(&self) -> u64 {
        self.windows().iter().map(|window| window.limit).min().unwrap_or_default()
    }

    /// The buckets, and the longest window: for as long as that a state keeps them.
    /// Each window of `max` contains no more than a window does that is as long, or longer.
    fn is_within(&self, max: &Self) -> bool {
        let holds = |max: &BucketWindow| {
            let mut own = self.windows().iter();
            own.any(|own| own.span_us >= max.span_us && own.limit <= max.limit)
        };
        self.bucket_us == max.bucket_us && max.windows().iter().all(holds)
    }

    fn state_kind(&self) -> Cow<'static, str> {
        let of_buckets = kind_of_window("bucketed-window", self.bucket_us);
        kind_of_window(&of_buckets, self.longest_us())
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let live = self.live(state, now);
        let (decision, charge) = self.decide(now, cost, live);
        let write =
            Self::with_charge(live, charge).map_or(Write::Keep, |buckets| self.write(buckets));
        Step { decision, write }
    }

    /// Takes the cost off the newest buckets.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let live = self.live(state, now);
        let Some(buckets) = after_refund(live.buckets, cost, |bucket| &mut bucket.count) else {
            return Some(self.admit(now, cost, live, None));
        };
        // Without its newest bucket the state may belong to an earlier time.
        let newest = buckets.last().map_or(Timestamp::ZERO, |bucket| bucket.start);
        let live = LiveBuckets { current: self.aligned(now).max(newest), ..live };
        Some(self.admit(now, cost, live, Some(buckets)))
    }

    /// Charges the largest of the windows' limits: no window has anything left until the bucket has
    /// left it.
    fn filled(&self, now: Timestamp) -> Step<BucketedWindowState> {
        let most = self.windows().iter().map(|window| window.limit).max();
        // What can admit nothing is full as it is.
        let most = most.filter(|_| self.capacity() > 0).unwrap_or_default();
        let live = self.live(None, now);
        self.admit(now, self.capacity(), live, Self::with_charge(live, most))
    }

    // Charges count in the newest bucket.
    undone_by_refund!(|state| state.buckets.last().map(|bucket| bucket.start));

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let live = self.live(state, now);
        Some(self.admit(now, cost, live, Self::with_charge(live, cost.min(self.remaining(live)))))
    }

    /// Counts the cost in the current bucket. Then each bucket, from the newest back, keeps as much
    /// as every window that contains it has room for.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let live = self.live(state, now);
        let mut buckets = Self::with_charge(live, cost).unwrap_or_default();
        let mut newer = 0;
        for bucket in buckets.iter_mut().rev() {
            let contains = |window: &&BucketWindow| {
                Self::end_us(*bucket, window.span_us) > live.current.as_us()
            };
            // A larger limit may have filled a window further, and still counts it.
            let full = |window: &BucketWindow| window.limit.max(Self::used(live, *window));
            let least = self.windows().iter().filter(contains).map(full).min();
            bucket.count = bucket.count.min(least.unwrap_or_default().saturating_sub(newer));
            newer += bucket.count;
        }
        buckets.retain(|bucket| bucket.count > 0);
        Some(self.admit(now, cost, live, Some(buckets).filter(|_| cost > 0)))
    }
}

impl InMemory for BucketedWindow {
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        let live = self.live(Some(state), now);
        let (decision, charge) = self.decide(now, cost, live);
        if charge == 0 {
            return Step { decision, write: Write::Keep };
        }
        let new = BucketCount { start: live.current, count: charge };
        let past = state.buckets.len() - live.buckets.len();
        if past > 0 {
            state.buckets.drain(..past);
        }
        Self::add(&mut state.buckets, new);
        let newest = state.buckets.last().copied().unwrap_or(new);
        Step { decision, write: Write::until((), Self::end_us(newest, self.longest_us())) }
    }

    counts_entries!(buckets);
}

impl FromStr for BucketedWindow {
    type Err = ConfigError;

    /// Reads `bucket 1s rates 1000/1s, 5000/10s`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let words = text.trim().strip_prefix("bucket ").and_then(|rest| rest.split_once(" rates "));
        let (bucket, rates) = words.ok_or_else(|| {
            ConfigError::new(format!(
                "{text:?} is not a bucketed window; write \"bucket 1s rates 1000/1s, 5000/10s\""
            ))
        })?;
        let rates = rates.split(',').map(str::parse).collect::<Result<Vec<Rate>, _>>()?;
        Self::new(period_us(bucket)?, &rates)
    }
}

impl WriteNumbers for BucketedWindow {
    fn write_numbers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = |us| Period { us, times_one: true };
        write!(f, " bucket {} rates ", length(self.bucket_us()))?;
        for (position, window) in self.windows().iter().enumerate() {
            let comma = if position > 0 { ", " } else { "" };
            write!(f, "{comma}{}/{}", window.limit, length(window.span_us))?;
        }
        Ok(())
    }
}

impl Quota for BucketedWindow {
    fn rate(&self) -> Option<Rate> {
        let rates = self.windows().iter().map(|w| Rate::of_built(w.limit, w.span_us));
        rates.reduce(slower)
    }

    fn window_us(&self, decision: &Decision) -> Option<u64> {
        let same = self.windows().iter().filter(|window| window.limit == decision.limit);
        same.map(|window| window.span_us).max()
    }
}

impl Share for BucketedWindow {
    fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError> {
        let rates = self.windows().iter().map(|one| window(one.limit, one.span_us, nodes));
        Self::new(self.bucket_us(), &rates.collect::<Result<Vec<_>, _>>()?)
    }
}
