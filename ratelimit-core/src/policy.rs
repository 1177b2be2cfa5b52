//! [`Policy`]: the built-in algorithms as one type, so that one set of limits mixes them.
//!
//! [`Policy`] is exhaustive, so a new algorithm does not compile without its Lua twin.

use core::num::NonZeroU64;

use crate::algorithms::{
    Algorithm, BucketedWindow, BucketedWindowState, Concurrency, ConcurrencyState,
    FirstRequestState, FirstRequestWindow, FixedWindow, FixedWindowState, Gcra, GcraState,
    KeepsEntries, MaybeStep, SlidingCounter, SlidingCounterState, SlidingLog, SlidingLogState,
    Step, TokenBucket, WindowEntry, WindowLog, WindowLogState, forwards,
};
use crate::attempts::Attempts;
use crate::builder::{AlgorithmBuilder, FromRate};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::{Compact, InMemory};
use crate::quota::Quota;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::share::Share;
use crate::timestamp::Timestamp;

/// Writes the enum of algorithms, the enum of their states, and the dispatch between them: the one list that a new
/// built-in algorithm is added to. The second name, if any, is the variant that charges attempts; both share a state, as
/// do all algorithms that name the same one.
macro_rules! policies {
    (
        algorithms { $( $(#[$doc:meta])* $variant:ident $(| $attempts:ident)? in $kept:ident = $name:literal, )+ }
        states { $( $(#[$state_doc:meta])* $own:ident($state:ty), )+ }
    ) => {
        /// Any of the built-in algorithms.
        ///
        /// ```
        /// use ratelimit_core::{Attempts, FixedWindow, Gcra, Limits, Policy};
        /// let limits: Limits<Policy> = Limits::builder()
        ///     .limit("burst", Gcra::per_second(10).burst(20))
        ///     .limit("daily", FixedWindow::per_day(5_000))
        ///     .limit("tries", Attempts::new(FixedWindow::per_minute(9).build()?))
        ///     .build()?;
        /// # Ok::<(), ratelimit_core::ConfigError>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Policy {
            $(
                $(#[$doc])* $variant($variant),
                $( #[doc = concat!("[`", stringify!($variant), "`](Self::", stringify!($variant), "), charging attempts.")] $attempts(Attempts<$variant>), )?
            )+
        }

        /// The state of any of the built-in algorithms.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum PolicyState {
            $( $(#[$state_doc])* $own($state), )+
        }

        impl Policy {
            /// The algorithms' names in a policy document.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// This algorithm's name in a policy document.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self { $( Self::$variant(_) $(| Self::$attempts(_))? => $name, )+ }
            }

            /// The algorithm of this name, of numbers as its `FromStr` reads them.
            fn of_numbers(name: &str, numbers: &str) -> Result<Self, ConfigError> {
                match name {
                    $( $name => numbers.parse().map(Self::$variant), )+
                    _ => Err(text::unknown(name)),
                }
            }

            /// The same algorithm, charging attempts; `None` if it cannot.
            #[must_use]
            pub const fn by_attempts(self) -> Option<Self> {
                match self {
                    $( $(
                        Self::$variant(algorithm) => Some(Self::$attempts(Attempts::new(algorithm))),
                        Self::$attempts(algorithm) => Some(Self::$attempts(algorithm)),
                    )? )+
                    #[allow(unreachable_patterns, reason = "reached by algorithms without a second name")]
                    _ => None,
                }
            }

            /// The same algorithm, charging admitted requests only.
            #[must_use]
            pub const fn by_admissions(self) -> Self {
                match self {
                    $( Self::$variant(algorithm) => Self::$variant(algorithm),
                    $( Self::$attempts(algorithm) => Self::$variant(*algorithm.algorithm()), )? )+
                }
            }
        }

        $(
            impl From<$variant> for Policy {
                fn from(algorithm: $variant) -> Self {
                    Self::$variant(algorithm)
                }
            }

            $(
                impl From<Attempts<$variant>> for Policy {
                    fn from(algorithm: Attempts<$variant>) -> Self {
                        Self::$attempts(algorithm)
                    }
                }
            )?
        )+

        $(
            impl From<$state> for PolicyState {
                fn from(state: $state) -> Self {
                    Self::$own(state)
                }
            }

            impl<'s> TryFrom<&'s PolicyState> for &'s $state {
                type Error = ();

                /// The state, if it is of this algorithm.
                fn try_from(state: &'s PolicyState) -> Result<Self, ()> {
                    match state {
                        PolicyState::$own(state) => Ok(state),
                        #[allow(unreachable_patterns, reason = "unreachable if the list had one algorithm")]
                        _ => Err(()),
                    }
                }
            }
        )+

        /// Calls a method of the algorithm in the variant.
        macro_rules! dispatched {
            ($policy:expr, |$a:ident| $call:expr) => {
                match $policy { $( Policy::$variant($a) => $call, $( Policy::$attempts($a) => $call, )? )+ }
            };
        }

        #[deny(clippy::missing_trait_methods)]
        impl InMemory for Policy {
            /// A state of another algorithm, which a store finds only where two hashes agree, counts as none.
            fn step_in_place(&self, state: &mut PolicyState, now: Timestamp, cost: u64) -> Step<()> {
                match (self, &mut *state) {
                    $(
                        (Self::$variant(algorithm), PolicyState::$kept(own)) => {
                            algorithm.step_in_place(own, now, cost)
                        }
                        $( (Self::$attempts(algorithm), PolicyState::$kept(own)) => {
                            algorithm.step_in_place(own, now, cost)
                        } )?
                    )+
                    #[allow(unreachable_patterns, reason = "unreachable if the list had one algorithm")]
                    _ => self.step(None, now, cost).map(|next| *state = next),
                }
            }

            fn entries_in(state: &PolicyState) -> usize {
                match state { $( PolicyState::$own(state) => $own::entries_in(state), )+ }
            }

            fn entries_per_step(&self) -> usize {
                dispatched!(self, |algorithm| algorithm.entries_per_step())
            }

            #[inline]
            fn is_compact(&self) -> bool {
                dispatched!(self, |algorithm| algorithm.is_compact())
            }

            fn to_compact(state: &PolicyState) -> Option<Compact> {
                match state { $( PolicyState::$own(state) => $own::to_compact(state), )+ }
            }

            /// The numbers do not name a state, so only one kind of state may be compact.
            fn from_compact(compact: Compact) -> Option<PolicyState> {
                None$( .or_else(|| $own::from_compact(compact).map(PolicyState::$own)) )+
            }

            #[inline]
            fn has_fast_step(&self) -> bool {
                dispatched!(self, |algorithm| algorithm.has_fast_step())
            }

            #[inline]
            fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
                dispatched!(self, |algorithm| algorithm.step_fast(state, now, cost))
            }
        }

        /// The number of states that are compact.
        #[cfg(test)]
        fn compact_algorithms(compact: Compact) -> usize {
            [$( $own::from_compact(compact).is_some() ),+].into_iter().filter(|has| *has).count()
        }
    };
}
policies! {
    algorithms {
        /// The generic cell rate algorithm.
        Gcra | GcraAttempts in Gcra = "gcra",
        /// The token bucket, which decides as GCRA and keeps its state.
        TokenBucket | TokenBucketAttempts in Gcra = "token-bucket",
        /// The fixed window aligned to the clock.
        FixedWindow | FixedWindowAttempts in FixedWindow = "fixed-window",
        /// The window that begins with the first request.
        FirstRequestWindow | FirstRequestWindowAttempts in FirstRequestWindow = "first-request-window",
        /// The window that begins with the first request, with an entry per request.
        WindowLog | WindowLogAttempts in WindowLog = "window-log",
        /// Several windows over shared buckets.
        BucketedWindow | BucketedWindowAttempts in BucketedWindow = "bucketed-window",
        /// Two windows, the previous one weighted.
        SlidingCounter | SlidingCounterAttempts in SlidingCounter = "sliding-counter",
        /// The exact log of admitted requests.
        SlidingLog | SlidingLogAttempts in SlidingLog = "sliding-log",
        /// A number of leases at the same time.
        Concurrency in Concurrency = "concurrency",
    }
    states {
        /// Of [`Gcra`] and [`TokenBucket`].
        Gcra(GcraState),
        /// Of [`FixedWindow`].
        FixedWindow(FixedWindowState),
        /// Of [`FirstRequestWindow`].
        FirstRequestWindow(FirstRequestState),
        /// Of [`WindowLog`].
        WindowLog(WindowLogState),
        /// Of [`BucketedWindow`].
        BucketedWindow(BucketedWindowState),
        /// Of [`SlidingCounter`].
        SlidingCounter(SlidingCounterState),
        /// Of [`SlidingLog`].
        SlidingLog(SlidingLogState),
        /// Of [`Concurrency`].
        Concurrency(ConcurrencyState),
    }
}

#[cfg(feature = "serde")]
mod document;
mod text;

impl Policy {
    /// What the limit admits in the long run, in lowest terms for a bucket; `None` for a limit on concurrency.
    ///
    /// ```
    /// use ratelimit_core::Policy;
    ///
    /// let policy: Policy = "gcra 10/s burst 20".parse()?;
    /// assert_eq!(policy.rate(), Some("10/s".parse()?));
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub fn rate(&self) -> Option<Rate> {
        Quota::rate(self)
    }
}

impl Quota for Policy {
    fn rate(&self) -> Option<Rate> {
        dispatched!(self, |algorithm| Quota::rate(algorithm))
    }

    fn window_us(&self, decision: &Decision) -> Option<u64> {
        dispatched!(self, |algorithm| Quota::window_us(algorithm, decision))
    }
}

impl Share for Policy {
    fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError> {
        dispatched!(self, |algorithm| Ok(algorithm.share(nodes)?.into()))
    }
}

impl<A: FromRate> TryFrom<AlgorithmBuilder<A>> for Policy
where
    Self: From<A>,
{
    type Error = ConfigError;

    fn try_from(builder: AlgorithmBuilder<A>) -> Result<Self, ConfigError> {
        Ok(builder.build()?.into())
    }
}

/// The state, if it belongs to the algorithm that asks.
fn own<'s, S: 's>(state: Option<&'s PolicyState>) -> Option<&'s S>
where
    &'s S: TryFrom<&'s PolicyState>,
{
    state.and_then(|state| state.try_into().ok())
}

#[deny(clippy::missing_trait_methods)]
impl Algorithm for Policy {
    type State = PolicyState;

    forwards!(dispatched, own);

    fn step(&self, state: Option<&PolicyState>, now: Timestamp, cost: u64) -> Step<PolicyState> {
        dispatched!(self, |algorithm| algorithm.step(own(state), now, cost).map(Into::into))
    }

    fn reservation_us(&self) -> Option<u64> {
        dispatched!(self, |algorithm| algorithm.reservation_us())
    }

    fn settle(
        &self,
        state: Option<&PolicyState>,
        now: Timestamp,
        made: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        dispatched!(self, |algorithm| {
            Some(algorithm.settle(own(state), now, made, cost)?.map(Into::into))
        })
    }

    fn charges_denials(&self) -> bool {
        dispatched!(self, |algorithm| algorithm.charges_denials())
    }

    fn annotate(&self, state: &mut PolicyState, metadata: &[u8]) {
        if let (Self::WindowLog(log), PolicyState::WindowLog(state)) = (self.by_admissions(), state)
        {
            log.annotate(state, metadata);
        }
    }
}

/// Only a [`WindowLog`] keeps entries.
#[deny(clippy::missing_trait_methods)]
impl KeepsEntries for Policy {
    fn entries_of<'s>(&self, state: &'s PolicyState, now: Timestamp) -> &'s [WindowEntry] {
        match (self.by_admissions(), state) {
            (Self::WindowLog(log), PolicyState::WindowLog(state)) => log.entries_of(state, now),
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filled_key_has_nothing_left_and_owes_the_whole_debt() {
        for words in [
            "gcra 10/s burst 20 debt 5",
            "token-bucket 7/5m burst 7",
            "fixed-window 2/m debt 9",
            "first-request-window 60/h count attempts",
            "window-log 3/s",
            "bucketed-window bucket 1s rates 10/1s, 50/10s",
            "sliding-counter 9/s",
            "sliding-log 5/s",
            "concurrency 20/30s",
        ] {
            let policy: Policy = words.parse().expect(words);
            let Step { decision, write } = policy.filled(Timestamp::ZERO);
            assert_eq!((decision.cost, decision.remaining), (policy.capacity(), 0), "{words}");
            let owed = policy.owed(write.after(None), Timestamp::ZERO);
            assert_eq!(owed, policy.debt(), "{words}");
        }
    }

    #[test]
    fn only_one_kind_of_state_is_compact() {
        let compact = Compact { at: Timestamp::ZERO, span_us: 7, extra: 1 };
        assert_eq!(compact_algorithms(compact), 1);
        let state = Policy::from_compact(compact).expect("of one");
        assert_eq!(state, GcraState { tat_us: 7, surplus: 1, timestamp: Timestamp::ZERO }.into());
        assert_eq!(Policy::to_compact(&state), Some(compact));
        // No limit writes a state that ends before it was written, but a store may be given one.
        let timestamp = Timestamp::saturating_from_us(8);
        assert_eq!(Gcra::to_compact(&GcraState { tat_us: 7, surplus: 0, timestamp }), None);
        let window = FixedWindow::new("1/s".parse().expect("a rate")).expect("a limit");
        let other = window.step(None, Timestamp::ZERO, 1).map(PolicyState::FixedWindow).write;
        assert_eq!(Policy::to_compact(other.after(None).expect("charged")), None);
        assert!(!Policy::from(window).is_compact());
    }
}
