//! [`Policy`]: the built-in algorithms as one type, so that one set of limits mixes them.

use core::num::NonZeroU64;

use crate::algorithm::{
    Algorithm, BucketedWindow, BucketedWindowState, Concurrency, ConcurrencyState,
    FirstRequestState, FirstRequestWindow, FixedWindow, FixedWindowState, Gcra, GcraState,
    KeepsEntries, Recovery, SlidingCounter, SlidingCounterState, SlidingLog, SlidingLogState, Step,
    TokenBucket, TokenBucketState, WindowEntry, WindowLog, WindowLogState,
};
use crate::attempts::Attempts;
use crate::builder::AlgorithmBuilder;
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::{Compact, InMemory};
use crate::quota::Quota;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::share::Share;
use crate::timestamp::Timestamp;

#[cfg(feature = "serde")]
mod document;
mod text;

/// Writes the enum of algorithms, the enum of their states, and the dispatch between them: the one list that a new
/// built-in algorithm is added to. The second name, if any, is the variant that charges attempts; both share a state.
macro_rules! policies {
    ($( $(#[$doc:meta])* $variant:ident $(| $attempts:ident)? ($algorithm:ty, $state:ty) = $name:literal, )+) => {
        /// Any of the built-in algorithms.
        ///
        /// ```
        /// use ratelimit_core::{Attempts, FixedWindow, Gcra, Limit, Limits, Policy};
        /// let limits = Limits::<Policy>::new([
        ///     Limit::new("burst", Gcra::new("10/s".parse()?, 20)?.into())?,
        ///     Limit::new("daily", FixedWindow::new("5000/d".parse()?)?.into())?,
        ///     Limit::new("tries", Attempts::new(FixedWindow::new("9/m".parse()?)?).into())?,
        /// ])?;
        /// # Ok::<(), ratelimit_core::ConfigError>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Policy {
            $(
                $(#[$doc])* $variant($algorithm),
                $( #[doc = concat!("[`", stringify!($variant), "`](Self::", stringify!($variant), "), charging attempts.")] $attempts(Attempts<$algorithm>), )?
            )+
        }

        /// The state of any of the built-in algorithms.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum PolicyState {
            $( $(#[$doc])* $variant($state), )+
        }

        impl Policy {
            /// The algorithms' names in a policy document.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// This algorithm's name in a policy document.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self { $( Self::$variant(_) $(| Self::$attempts(_))? => $name, )+ }
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
            impl From<$algorithm> for Policy {
                fn from(algorithm: $algorithm) -> Self {
                    Self::$variant(algorithm)
                }
            }

            $(
                impl From<Attempts<$algorithm>> for Policy {
                    fn from(algorithm: Attempts<$algorithm>) -> Self {
                        Self::$attempts(algorithm)
                    }
                }
            )?

            impl From<$state> for PolicyState {
                fn from(state: $state) -> Self {
                    Self::$variant(state)
                }
            }

            impl<'s> TryFrom<&'s PolicyState> for &'s $state {
                type Error = ();

                /// The state, if it is of this algorithm.
                fn try_from(state: &'s PolicyState) -> Result<Self, ()> {
                    match state {
                        PolicyState::$variant(state) => Ok(state),
                        #[allow(unreachable_patterns, reason = "unreachable if the list had one algorithm")]
                        _ => Err(()),
                    }
                }
            }
        )+

        /// The entries of a state.
        fn entries_in(state: &PolicyState) -> usize {
            match state { $( PolicyState::$variant(state) => <$algorithm>::entries_in(state), )+ }
        }

        /// Steps in place if the state belongs to this algorithm. Otherwise steps from no state and replaces it.
        fn step_in_place(policy: &Policy, state: &mut PolicyState, now: Timestamp, cost: u64) -> Step<()> {
            match (policy, &mut *state) {
                $(
                    (Policy::$variant(algorithm), PolicyState::$variant(own)) => {
                        algorithm.step_in_place(own, now, cost)
                    }
                    $( (Policy::$attempts(algorithm), PolicyState::$variant(own)) => {
                        algorithm.step_in_place(own, now, cost)
                    } )?
                )+
                #[allow(unreachable_patterns, reason = "unreachable if the list had one algorithm")]
                _ => {
                    let Step { decision, write } = policy.step(None, now, cost);
                    Step { decision, write: write.map(|next| *state = next) }
                }
            }
        }

        /// Encodes a state by its algorithm.
        fn to_compact(state: &PolicyState) -> Option<Compact> {
            match state { $( PolicyState::$variant(state) => <$algorithm>::to_compact(state), )+ }
        }

        /// Decodes a state. The numbers do not name an algorithm, so only one algorithm may have compact states.
        fn from_compact(compact: Compact) -> Option<PolicyState> {
            None$( .or_else(|| <$algorithm>::from_compact(compact).map(PolicyState::$variant)) )+
        }

        /// The number of algorithms that have compact states.
        #[cfg(test)]
        fn compact_algorithms(compact: Compact) -> usize {
            [$( <$algorithm>::from_compact(compact).is_some() ),+].into_iter().filter(|has| *has).count()
        }

        impl Share for Policy {
            fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError> {
                match self { $(
                    Self::$variant(algorithm) => algorithm.share(nodes).map(Self::$variant),
                    $( Self::$attempts(algorithm) => algorithm.share(nodes).map(Self::$attempts), )?
                )+ }
            }
        }

        /// Calls a method of the algorithm in the variant. A state that another algorithm wrote counts as no state.
        macro_rules! dispatched {
            ($policy:expr, |$a:ident, $wrap:ident| $call:expr) => {
                match $policy {
                    $(
                        Policy::$variant($a) => {
                            #[allow(unused, reason = "unused by methods that return no state")]
                            let $wrap = PolicyState::$variant;
                            $call
                        }
                        $( Policy::$attempts($a) => {
                            #[allow(unused, reason = "unused by methods that return no state")]
                            let $wrap = PolicyState::$variant;
                            $call
                        } )?
                    )+
                }
            };
        }
    };
}
policies! {
    /// The generic cell rate algorithm.
    Gcra | GcraAttempts (Gcra, GcraState) = "gcra",
    /// The token bucket.
    TokenBucket | TokenBucketAttempts (TokenBucket, TokenBucketState) = "token-bucket",
    /// The fixed window aligned to the clock.
    FixedWindow | FixedWindowAttempts (FixedWindow, FixedWindowState) = "fixed-window",
    /// The window that begins with the first request.
    FirstRequestWindow | FirstRequestWindowAttempts (FirstRequestWindow, FirstRequestState)
        = "first-request-window",
    /// The window that begins with the first request, with an entry per request.
    WindowLog | WindowLogAttempts (WindowLog, WindowLogState) = "window-log",
    /// Several windows over shared buckets.
    BucketedWindow | BucketedWindowAttempts (BucketedWindow, BucketedWindowState) = "bucketed-window",
    /// Two windows, the previous one weighted.
    SlidingCounter | SlidingCounterAttempts (SlidingCounter, SlidingCounterState) = "sliding-counter",
    /// The exact log of admitted requests.
    SlidingLog | SlidingLogAttempts (SlidingLog, SlidingLogState) = "sliding-log",
    /// A number of leases at the same time.
    Concurrency(Concurrency, ConcurrencyState) = "concurrency",
}

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
        dispatched!(self, |algorithm, wrap| Quota::rate(algorithm))
    }

    fn window_us(&self, decision: &Decision) -> Option<u64> {
        dispatched!(self, |algorithm, wrap| Quota::window_us(algorithm, decision))
    }
}

macro_rules! from_builders {
    ($($algorithm:ident),+) => { $(
        impl TryFrom<AlgorithmBuilder<$algorithm>> for Policy {
            type Error = ConfigError;

            fn try_from(builder: AlgorithmBuilder<$algorithm>) -> Result<Self, ConfigError> {
                Ok(builder.build()?.into())
            }
        }
    )+ };
}

from_builders!(
    Gcra,
    TokenBucket,
    FixedWindow,
    FirstRequestWindow,
    WindowLog,
    SlidingCounter,
    SlidingLog,
    Concurrency
);

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

    fn capacity(&self) -> u64 {
        dispatched!(self, |algorithm, wrap| algorithm.capacity())
    }

    fn step(&self, state: Option<&PolicyState>, now: Timestamp, cost: u64) -> Step<PolicyState> {
        dispatched!(self, |algorithm, wrap| algorithm.step(own(state), now, cost).map(wrap))
    }

    fn refund(
        &self,
        state: Option<&PolicyState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<PolicyState>> {
        dispatched!(self, |algorithm, wrap| {
            Some(algorithm.refund(own(state), now, cost)?.map(wrap))
        })
    }

    fn force(
        &self,
        state: Option<&PolicyState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<PolicyState>> {
        dispatched!(self, |algorithm, wrap| {
            Some(algorithm.force(own(state), now, cost)?.map(wrap))
        })
    }

    fn reservation_us(&self) -> Option<u64> {
        dispatched!(self, |algorithm, wrap| algorithm.reservation_us())
    }

    fn charged_at(&self, state: Option<&PolicyState>, now: Timestamp) -> Timestamp {
        dispatched!(self, |algorithm, wrap| algorithm.charged_at(own(state), now))
    }

    fn settle(
        &self,
        state: Option<&PolicyState>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<PolicyState>> {
        dispatched!(self, |algorithm, wrap| {
            Some(algorithm.settle(own(state), now, reservation, cost)?.map(wrap))
        })
    }

    fn undo(
        &self,
        state: Option<&PolicyState>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &PolicyState,
    ) -> Option<Step<PolicyState>> {
        dispatched!(self, |algorithm, wrap| {
            Some(algorithm.undo(own(state), now, reservation, own(Some(charged))?)?.map(wrap))
        })
    }

    fn renew(
        &self,
        state: Option<&PolicyState>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<PolicyState> {
        dispatched!(self, |algorithm, wrap| algorithm.renew(own(state), now, reservation).map(wrap))
    }

    fn filled(&self, now: Timestamp) -> Step<PolicyState> {
        dispatched!(self, |algorithm, wrap| algorithm.filled(now).map(wrap))
    }

    fn charges_denials(&self) -> bool {
        dispatched!(self, |algorithm, wrap| algorithm.charges_denials())
    }

    fn has_leases(&self) -> bool {
        dispatched!(self, |algorithm, wrap| algorithm.has_leases())
    }

    fn recovery(&self) -> Option<Recovery> {
        dispatched!(self, |algorithm, wrap| algorithm.recovery())
    }

    fn wait_us(&self, state: Option<&PolicyState>, now: Timestamp, cost: u64) -> Option<u64> {
        dispatched!(self, |algorithm, wrap| algorithm.wait_us(own(state), now, cost))
    }

    fn metadata_bytes(&self) -> Option<usize> {
        dispatched!(self, |algorithm, wrap| algorithm.metadata_bytes())
    }

    fn annotate(&self, state: &mut PolicyState, metadata: &[u8]) {
        match (self, state) {
            (Self::WindowLog(log), PolicyState::WindowLog(state)) => log.annotate(state, metadata),
            (Self::WindowLogAttempts(log), PolicyState::WindowLog(state)) => {
                log.annotate(state, metadata);
            }
            _ => {}
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl InMemory for Policy {
    fn decision(&self, state: Option<&PolicyState>, now: Timestamp, cost: u64) -> Decision {
        dispatched!(self, |algorithm, wrap| algorithm.decision(own(state), now, cost))
    }

    fn step_in_place(&self, state: &mut PolicyState, now: Timestamp, cost: u64) -> Step<()> {
        step_in_place(self, state, now, cost)
    }

    /// In place for leases, which are settled most often.
    fn settle_in_place(
        &self,
        state: &mut PolicyState,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<()>> {
        if let (Self::Concurrency(limit), PolicyState::Concurrency(own)) = (self, &mut *state) {
            return limit.settle_in_place(own, now, reservation, cost);
        }
        let Step { decision, write } = self.settle(Some(state), now, reservation, cost)?;
        Some(Step { decision, write: write.map(|next| *state = next) })
    }

    fn entries_in(state: &PolicyState) -> usize {
        entries_in(state)
    }

    fn entries_per_step(&self) -> usize {
        dispatched!(self, |algorithm, wrap| algorithm.entries_per_step())
    }

    #[inline]
    fn is_compact(&self) -> bool {
        dispatched!(self, |algorithm, wrap| algorithm.is_compact())
    }

    fn to_compact(state: &PolicyState) -> Option<Compact> {
        to_compact(state)
    }

    fn from_compact(compact: Compact) -> Option<PolicyState> {
        from_compact(compact)
    }

    #[inline]
    fn has_fast_step(&self) -> bool {
        dispatched!(self, |algorithm, wrap| algorithm.has_fast_step())
    }

    #[inline]
    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
        dispatched!(self, |algorithm, wrap| algorithm.step_fast(state, now, cost))
    }
}

/// Only a [`WindowLog`] keeps entries.
#[deny(clippy::missing_trait_methods)]
impl KeepsEntries for Policy {
    fn entries_of<'s>(&self, state: &'s PolicyState, now: Timestamp) -> &'s [WindowEntry] {
        match (self, state) {
            (Self::WindowLog(log), PolicyState::WindowLog(state)) => log.entries_of(state, now),
            (Self::WindowLogAttempts(log), PolicyState::WindowLog(state)) => {
                log.entries_of(state, now)
            }
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_algorithm_has_compact_states() {
        let compact = Compact { at: Timestamp::ZERO, span_us: 7, extra: 1 };
        assert_eq!(compact_algorithms(compact), 1);
        let state = from_compact(compact).expect("of one");
        assert_eq!(state, GcraState { tat_us: 7, surplus: 1, timestamp: Timestamp::ZERO }.into());
        assert_eq!(Policy::to_compact(&state), Some(compact));
        let window = FixedWindow::new("1/s".parse().expect("a rate")).expect("a limit");
        let other = window.step(None, Timestamp::ZERO, 1).map(PolicyState::FixedWindow).write;
        assert_eq!(Policy::to_compact(other.after(None).expect("charged")), None);
        assert!(!Policy::from(window).is_compact());
    }
}
