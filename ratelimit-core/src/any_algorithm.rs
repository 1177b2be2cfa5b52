//! [`AnyAlgorithm`]: the built-in algorithms as one type, so that one policy mixes them.
//!
//! [`AnyAlgorithm`] is exhaustive, so a new algorithm does not compile without its Lua twin.

use core::num::NonZeroU64;

use crate::algorithms::{
    BucketedWindow, BucketedWindowState, Concurrency, ConcurrencyState, FirstRequestState,
    FirstRequestWindow, FixedWindow, FixedWindowState, Gcra, GcraState, Lockout, LockoutBuilder,
    LockoutState, SlidingCounter, SlidingCounterState, SlidingLog, SlidingLogState, WindowLog,
    WindowLogState,
};
use crate::builder::{AlgorithmBuilder, FromRate};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::quota::Quota;
use crate::rate::Rate;
use crate::share::Share;

/// The other name of [`Gcra`].
const TOKEN_BUCKET: &str = "token-bucket";

/// Writes the enum of algorithms, the enum of their states, and the dispatch between them: the one
/// list that a new built-in algorithm is added to.
macro_rules! algorithms {
    ($( $(#[$doc:meta])* $variant:ident($state:ty) = $name:literal $(or $alias:ident)?, )+) => {
        /// Any of the built-in algorithms.
        ///
        /// ```
        /// use ratelimit_core::{FixedWindow, Gcra, Limits, AnyAlgorithm};
        /// let limits: Limits<AnyAlgorithm> = Limits::builder()
        ///     .limit("burst", Gcra::per_second(10).burst(20))
        ///     .limit("daily", FixedWindow::per_day(5_000))
        ///     .build()?;
        /// # Ok::<(), ratelimit_core::ConfigError>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum AnyAlgorithm {
            $(
                $(#[$doc])* $variant($variant),
            )+
        }

        /// The state of any of the built-in algorithms.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum AnyState {
            $(
                #[doc = concat!("Of [`", stringify!($variant), "`].")]
                $variant($state),
            )+
        }

        impl AnyAlgorithm {
            /// The algorithms' names in a policy document.
            pub const NAMES: &'static [&'static str] = &[$($name $(, $alias)?),+];

            /// This algorithm's name in a policy document.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self {
                    Self::Gcra(gcra) if gcra.is_token_bucket() => TOKEN_BUCKET,
                    $( Self::$variant(_) => $name, )+
                }
            }

            /// The algorithm of this name, of numbers as its `FromStr` reads them.
            pub(crate) fn of_numbers(name: &str, numbers: &str) -> Result<Self, ConfigError> {
                match name {
                    TOKEN_BUCKET => Ok(Self::Gcra(numbers.parse::<Gcra>()?.as_token_bucket())),
                    $( $name => numbers.parse().map(Self::$variant), )+
                    _ => Err(text::unknown(name)),
                }
            }
        }

        $(
            impl From<$variant> for AnyAlgorithm {
                fn from(algorithm: $variant) -> Self {
                    Self::$variant(algorithm)
                }
            }

            impl From<$state> for AnyState {
                fn from(state: $state) -> Self {
                    Self::$variant(state)
                }
            }

            impl<'s> TryFrom<&'s AnyState> for &'s $state {
                type Error = ();

                /// The state, if it is of this algorithm.
                fn try_from(state: &'s AnyState) -> Result<Self, ()> {
                    match state {
                        AnyState::$variant(state) => Ok(state),
                        #[allow(unreachable_patterns, reason = "unreachable if the list had one algorithm")]
                        _ => Err(()),
                    }
                }
            }
        )+

        /// Calls a method of the algorithm in the variant.
        macro_rules! dispatched {
            ($algorithm:expr, |$a:ident| $call:expr) => {
                match $algorithm { $( AnyAlgorithm::$variant($a) => $call, )+ }
            };
        }

        $crate::__forward_algorithm! {
            AnyAlgorithm, AnyState, Gcra(Gcra); $( $variant($variant), )+
        }

        /// Writes the conversions from each built-in algorithm for an enum that has them.
        #[doc(hidden)]
        #[macro_export]
        macro_rules! __from_built_in {
            ($enum:ident) => { $(
                impl From<$crate::$variant> for $enum {
                    fn from(algorithm: $crate::$variant) -> Self {
                        Self::BuiltIn(algorithm.into())
                    }
                }
            )+ };
        }

        /// The number of states that are compact.
        #[cfg(test)]
        fn compact_algorithms(compact: crate::in_memory::Compact) -> usize {
            [$( <$variant as crate::in_memory::InMemory>::from_compact(compact).is_some() ),+].into_iter().filter(|has| *has).count()
        }
    };
}
algorithms! {
    /// The generic cell rate algorithm, or token bucket.
    Gcra(GcraState) = "gcra" or TOKEN_BUCKET,
    /// The fixed window aligned to the clock.
    FixedWindow(FixedWindowState) = "fixed-window",
    /// The window that begins with the first request.
    FirstRequestWindow(FirstRequestState) = "first-request-window",
    /// The window that begins with the first request, with an entry per request.
    WindowLog(WindowLogState) = "window-log",
    /// Several windows over shared buckets.
    BucketedWindow(BucketedWindowState) = "bucketed-window",
    /// Two windows, the previous one weighted.
    SlidingCounter(SlidingCounterState) = "sliding-counter",
    /// The exact log of admitted requests.
    SlidingLog(SlidingLogState) = "sliding-log",
    /// A number of leases at the same time.
    Concurrency(ConcurrencyState) = "concurrency",
    /// Charges in a window that block for a while, longer each time.
    Lockout(LockoutState) = "lockout",
}

pub(crate) mod text;

impl AnyAlgorithm {
    /// What the limit admits in the long run, in lowest terms for a bucket; `None` for a limit on
    /// concurrency.
    ///
    /// ```
    /// use ratelimit_core::AnyAlgorithm;
    ///
    /// let algorithm: AnyAlgorithm = "gcra 10/s burst 20".parse()?;
    /// assert_eq!(algorithm.rate(), Some("10/s".parse()?));
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub fn rate(&self) -> Option<Rate> {
        Quota::rate(self)
    }
}

impl Quota for AnyAlgorithm {
    fn rate(&self) -> Option<Rate> {
        dispatched!(self, |algorithm| Quota::rate(algorithm))
    }

    fn window_us(&self, decision: &Decision) -> Option<u64> {
        dispatched!(self, |algorithm| Quota::window_us(algorithm, decision))
    }
}

impl Share for AnyAlgorithm {
    fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError> {
        dispatched!(self, |algorithm| Ok(algorithm.share(nodes)?.into()))
    }
}

impl<A: FromRate> TryFrom<AlgorithmBuilder<A>> for AnyAlgorithm
where
    Self: From<A>,
{
    type Error = ConfigError;

    fn try_from(builder: AlgorithmBuilder<A>) -> Result<Self, ConfigError> {
        Ok(builder.build()?.into())
    }
}

impl TryFrom<LockoutBuilder> for AnyAlgorithm {
    type Error = ConfigError;

    fn try_from(builder: LockoutBuilder) -> Result<Self, ConfigError> {
        Ok(builder.build()?.into())
    }
}

#[cfg(feature = "calendar")]
impl TryFrom<crate::algorithms::CalendarBuilder> for AnyAlgorithm {
    type Error = ConfigError;

    fn try_from(builder: crate::algorithms::CalendarBuilder) -> Result<Self, ConfigError> {
        Ok(builder.build()?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::{Algorithm as _, Step};
    use crate::in_memory::{Compact, InMemory as _};
    use crate::timestamp::Timestamp;

    #[test]
    fn a_filled_key_has_nothing_left_and_owes_the_whole_debt() {
        for words in [
            "gcra 10/s burst 20 debt 5",
            "token-bucket 7/5m burst 7",
            "fixed-window 2/m debt 9",
            #[cfg(feature = "calendar")]
            "fixed-window 9/month zone Europe/Berlin debt 9",
            "first-request-window 60/h",
            "window-log 3/s",
            "bucketed-window bucket 1s rates 10/1s, 50/10s",
            "sliding-counter 9/s",
            "sliding-log 5/s",
            "concurrency 20/30s",
            "lockout 5/15m block 15m factor 2 longest 1d forget 7d",
        ] {
            let algorithm: AnyAlgorithm = words.parse().expect(words);
            let Step { decision, write } = algorithm.filled(Timestamp::ZERO);
            assert_eq!((decision.cost, decision.remaining), (algorithm.capacity(), 0), "{words}");
            let owed = algorithm.owed(write.after(None), Timestamp::ZERO);
            assert_eq!(owed, algorithm.debt(), "{words}");
        }
    }

    #[test]
    fn only_one_kind_of_state_is_compact() {
        let compact = Compact { at: Timestamp::ZERO, span_us: 7, extra: 1 };
        assert_eq!(compact_algorithms(compact), 1);
        let state = AnyAlgorithm::from_compact(compact).expect("of one");
        assert_eq!(state, GcraState { tat_us: 7, surplus: 1, timestamp: Timestamp::ZERO }.into());
        assert_eq!(AnyAlgorithm::to_compact(&state), Some(compact));
        // No limit writes a state that ends before it was written, but a store may be given one.
        let timestamp = Timestamp::saturating_from_us(8);
        assert_eq!(Gcra::to_compact(&GcraState { tat_us: 7, surplus: 0, timestamp }), None);
        let window = FixedWindow::new("1/s".parse().expect("a rate")).expect("a limit");
        let other = window.step(None, Timestamp::ZERO, 1).map(AnyState::FixedWindow).write;
        assert_eq!(AnyAlgorithm::to_compact(other.after(None).expect("charged")), None);
        assert!(!AnyAlgorithm::from(window).is_compact());
    }

    #[cfg(feature = "calendar")]
    #[test]
    fn numbers_of_a_limit_by_a_calendar_are_of_its_zone_and_anchor_unless_they_name_others() {
        let limit: AnyAlgorithm =
            "fixed-window 10/month zone Europe/Berlin anchor 15 debt 3".parse().expect("a limit");
        let at = |numbers: &str| limit.at_numbers(numbers).map(|limit| alloc::format!("{limit}"));
        for (numbers, whole) in [
            ("99/month", "fixed-window 99/month zone Europe/Berlin anchor 15"),
            ("fixed-window 99/month", "fixed-window 99/month zone Europe/Berlin anchor 15"),
            ("99/month debt 5", "fixed-window 99/month zone Europe/Berlin anchor 15 debt 5"),
            ("99/month anchor 2", "fixed-window 99/month anchor 2"),
            ("99/week", "fixed-window 99/week"),
            ("99/d", "fixed-window 99/d"),
        ] {
            assert_eq!(at(numbers).as_deref(), Ok(whole), "{numbers}");
        }
        assert!(at("99").is_err());
    }
}
