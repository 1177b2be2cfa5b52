//! [`Policy`]: the built-in algorithms as one type, so that limits of different kinds mix.

use crate::algorithm::{
    Algorithm, BucketedWindow, BucketedWindowState, FirstRequestState, FirstRequestWindow,
    FixedWindow, FixedWindowState, Gcra, GcraState, SlidingCounter, SlidingCounterState,
    SlidingLog, SlidingLogState, Step, TokenBucket, TokenBucketState, Write,
};
use crate::tick::Tick;

#[cfg(feature = "serde")]
mod document;

/// Writes the enum of algorithms, the enum of their states, and the dispatch between them: the one
/// list that a new built-in is added to.
macro_rules! policies {
    ($( $(#[$doc:meta])* $variant:ident($algorithm:ty, $state:ty) = $name:literal, )+) => {
        /// Any of the built-in algorithms.
        ///
        /// ```
        /// use ratelimit_core::{FixedWindow, Gcra, Limit, Limits, Policy};
        /// let limits = Limits::<Policy>::new([
        ///     Limit::new("burst", Gcra::new("10/s".parse()?, 20)?.into())?,
        ///     Limit::new("daily", FixedWindow::new("5000/d".parse()?)?.into())?,
        /// ])?;
        /// # Ok::<(), ratelimit_core::ConfigError>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Policy {
            $( $(#[$doc])* $variant($algorithm), )+
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
                match self { $( Self::$variant(_) => $name, )+ }
            }
        }

        $(
            impl From<$algorithm> for Policy {
                fn from(algorithm: $algorithm) -> Self {
                    Self::$variant(algorithm)
                }
            }

            impl From<$state> for PolicyState {
                fn from(state: $state) -> Self {
                    Self::$variant(state)
                }
            }
        )+

        impl Algorithm for Policy {
            type State = PolicyState;

            fn capacity(&self) -> u64 {
                match self { $( Self::$variant(algorithm) => algorithm.capacity(), )+ }
            }

            fn step(&self, state: Option<&PolicyState>, now: Tick, cost: u64) -> Step<PolicyState> {
                match self { $(
                    Self::$variant(algorithm) => {
                        // A state that another algorithm wrote says nothing to this one.
                        let state = match state {
                            Some(PolicyState::$variant(state)) => Some(state),
                            _ => None,
                        };
                        algorithm.step(state, now, cost).map(PolicyState::$variant)
                    }
                )+ }
            }

            fn refund(
                &self,
                state: Option<&PolicyState>,
                now: Tick,
                cost: u64,
            ) -> Option<Step<PolicyState>> {
                match self { $(
                    Self::$variant(algorithm) => {
                        let state = match state {
                            Some(PolicyState::$variant(state)) => Some(state),
                            _ => None,
                        };
                        Some(algorithm.refund(state, now, cost)?.map(PolicyState::$variant))
                    }
                )+ }
            }

            fn force(
                &self,
                state: Option<&PolicyState>,
                now: Tick,
                cost: u64,
            ) -> Option<Step<PolicyState>> {
                match self { $(
                    Self::$variant(algorithm) => {
                        let state = match state {
                            Some(PolicyState::$variant(state)) => Some(state),
                            _ => None,
                        };
                        Some(algorithm.force(state, now, cost)?.map(PolicyState::$variant))
                    }
                )+ }
            }
        }
    };
}

policies! {
    /// The generic cell rate algorithm.
    Gcra(Gcra, GcraState) = "gcra",
    /// The token bucket.
    TokenBucket(TokenBucket, TokenBucketState) = "token-bucket",
    /// The fixed window aligned to the clock.
    FixedWindow(FixedWindow, FixedWindowState) = "fixed-window",
    /// The window that begins with the first request.
    FirstRequestWindow(FirstRequestWindow, FirstRequestState) = "first-request-window",
    /// Counts per bucket, over several windows.
    BucketedWindow(BucketedWindow, BucketedWindowState) = "bucketed-window",
    /// Two windows, the older one weighed.
    SlidingCounter(SlidingCounter, SlidingCounterState) = "sliding-counter",
    /// The exact log of what was admitted.
    SlidingLog(SlidingLog, SlidingLogState) = "sliding-log",
}

impl<S> Step<S> {
    /// The same step with its state wrapped by `f`.
    pub fn map<T>(self, f: impl FnOnce(S) -> T) -> Step<T> {
        let write = match self.write {
            Write::Keep => Write::Keep,
            Write::Put { state, expires } => Write::Put { state: f(state), expires },
            Write::Remove => Write::Remove,
        };
        Step { decision: self.decision, write }
    }
}
