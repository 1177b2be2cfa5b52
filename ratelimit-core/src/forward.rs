//! [`beside_built_in!`](crate::beside_built_in): algorithms of a program's own beside the built-in
//! ones, as one type.
//!
//! One macro passes every method to the algorithm in a variant, for [`AnyAlgorithm`] and for the
//! enums of programs.
//!
//! [`AnyAlgorithm`]: crate::AnyAlgorithm

/// Writes an enum of your algorithms and the built-in ones, so that one set of limits mixes them,
/// and an enum of their states.
///
/// The first enum also has the variant `BuiltIn` of an [`AnyAlgorithm`](crate::AnyAlgorithm), and
/// is an [`Algorithm`](crate::Algorithm) and [`InMemory`](crate::algorithm::InMemory), as each of
/// your algorithms has to be. It converts from all that
/// [`LimitsBuilder::limit`](crate::LimitsBuilder::limit) takes. For HTTP headers implement
/// [`Quota`](crate::algorithm::Quota) for it, and for a share during an outage
/// [`Share`](crate::algorithm::Share).
///
/// ```
/// use ratelimit_core::algorithm::{InMemory, Step, Write};
/// use ratelimit_core::{
///     Algorithm, Decision, Gcra, LimitsBuilder, RateLimiter, Timestamp, beside_built_in,
/// };
/// use ratelimit_memory::MemoryStore;
///
/// /// So many requests, ever.
/// #[derive(Clone, Debug)]
/// struct Total(u64);
///
/// impl Algorithm for Total {
///     type State = u64;
///     fn capacity(&self) -> u64 { self.0 }
///     fn step(&self, state: Option<&u64>, _now: Timestamp, cost: u64) -> Step<u64> {
///         let used = state.copied().unwrap_or_default();
///         let left = self.0.saturating_sub(used);
///         let charged = if cost <= left { cost } else { 0 };
///         let write = match charged {
///             0 => Write::Keep,
///             _ => Write::Put { state: used + charged, expires: Timestamp::MAX },
///         };
///         Step {
///             decision: Decision {
///                 allowed: cost <= left, cost, limit: self.0, remaining: left - charged,
///                 retry_after_us: (cost <= left).then_some(0), replenish_after_us: 0,
///                 reset_after_us: 0,
///             },
///             write,
///         }
///     }
/// }
/// impl InMemory for Total {}
///
/// beside_built_in! {
///     /// What this program limits by.
///     #[derive(Clone, Debug)]
///     pub enum Mine { Total(Total) }
///
///     /// Its states.
///     #[derive(Clone, Debug)]
///     pub enum MineState;
/// }
///
/// let limits = LimitsBuilder::<Mine>::new()
///     .limit("burst", Gcra::per_second(10))
///     .limit("daily", "fixed-window 5000/d")
///     .limit("trial", Total(3))
///     .build()?;
/// let limiter = RateLimiter::new(limits, MemoryStore::builder().build());
/// let verdict = limiter.check_n_now("alice", 3)?;
/// let left: Vec<_> = limiter.named(&verdict).map(|decision| decision.remaining).collect();
/// assert_eq!(left, [7, 4_997, 0]);
/// assert!(!limiter.check_now("alice")?.allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! beside_built_in {
    (
        $(#[$meta:meta])*
        $vis:vis enum $Algorithm:ident { $( $(#[$doc:meta])* $Own:ident($own:ty) ),+ $(,)? }

        $(#[$state_meta:meta])*
        $state_vis:vis enum $State:ident;
    ) => {
        $(#[$meta])*
        $vis enum $Algorithm {
            /// A built-in algorithm.
            BuiltIn($crate::AnyAlgorithm),
            $( $(#[$doc])* $Own($own), )+
        }

        $(#[$state_meta])*
        $state_vis enum $State {
            /// Of a built-in algorithm.
            BuiltIn($crate::algorithm::AnyState),
            $(
                #[doc = concat!("Of [`", stringify!($Own), "`](", stringify!($Algorithm), "::", stringify!($Own), ").")]
                $Own(<$own as $crate::Algorithm>::State),
            )+
        }

        $crate::__forward_algorithm! {
            $Algorithm, $State, BuiltIn($crate::AnyAlgorithm);
            BuiltIn($crate::AnyAlgorithm), $( $Own($own), )+
        }
        $crate::__from_built_in!($Algorithm);

        impl ::core::convert::From<$crate::AnyAlgorithm> for $Algorithm {
            fn from(algorithm: $crate::AnyAlgorithm) -> Self {
                Self::BuiltIn(algorithm)
            }
        }

        $(
            impl ::core::convert::From<$own> for $Algorithm {
                fn from(algorithm: $own) -> Self {
                    Self::$Own(algorithm)
                }
            }
        )+

        impl<A: $crate::algorithm::FromRate> ::core::convert::TryFrom<$crate::algorithm::AlgorithmBuilder<A>>
            for $Algorithm
        where
            $crate::AnyAlgorithm: ::core::convert::From<A>,
        {
            type Error = $crate::ConfigError;

            fn try_from(
                builder: $crate::algorithm::AlgorithmBuilder<A>,
            ) -> ::core::result::Result<Self, $crate::ConfigError> {
                builder.build().map(|algorithm| Self::BuiltIn(algorithm.into()))
            }
        }

        impl ::core::convert::TryFrom<&str> for $Algorithm {
            type Error = $crate::ConfigError;

            fn try_from(text: &str) -> ::core::result::Result<Self, $crate::ConfigError> {
                text.parse().map(Self::BuiltIn)
            }
        }
    };
}

/// Passes every method of [`Algorithm`](crate::Algorithm) and
/// [`InMemory`](crate::algorithm::InMemory) to the algorithm in a variant. A state of another
/// variant, which a store finds only where two hashes agree, counts as none. Three numbers do not
/// say of which variant a state is, so only those of one variant, the first here, are compact.
#[doc(hidden)]
#[macro_export]
macro_rules! __forward_algorithm {
    ($Algorithm:ident, $State:ident, $Compact:ident($compact:ty); $( $Variant:ident($algorithm:ty), )+) => {
        const _: () = {
            use $crate::__macros as parts;
            #[allow(unused_imports, reason = "where the enum is written they may be there")]
            use $crate::__macros::{Algorithm as _, InMemory as _};

            #[deny(clippy::missing_trait_methods)]
            #[allow(unreachable_patterns, reason = "unreachable if there were one variant")]
            impl parts::Algorithm for $Algorithm {
                type State = $State;

                fn capacity(&self) -> u64 {
                    match self { $( Self::$Variant(own) => own.capacity(), )+ }
                }

                fn state_kind(&self) -> parts::Cow<'static, str> {
                    match self { $( Self::$Variant(own) => own.state_kind(), )+ }
                }

                fn step(&self, state: Option<&$State>, now: parts::Timestamp, cost: u64) -> parts::Step<$State> {
                    match self { $(
                        Self::$Variant(own) => {
                            let state = $crate::__own_state!($State::$Variant, state);
                            own.step(state, now, cost).map($State::$Variant)
                        }
                    )+ }
                }

                fn refund(&self, state: Option<&$State>, now: parts::Timestamp, cost: u64) -> parts::MaybeStep<Self> {
                    match self { $(
                        Self::$Variant(own) => {
                            let state = $crate::__own_state!($State::$Variant, state);
                            Some(own.refund(state, now, cost)?.map($State::$Variant))
                        }
                    )+ }
                }

                fn force(&self, state: Option<&$State>, now: parts::Timestamp, cost: u64) -> parts::MaybeStep<Self> {
                    match self { $(
                        Self::$Variant(own) => {
                            let state = $crate::__own_state!($State::$Variant, state);
                            Some(own.force(state, now, cost)?.map($State::$Variant))
                        }
                    )+ }
                }

                fn fill(&self, state: Option<&$State>, now: parts::Timestamp, cost: u64) -> parts::MaybeStep<Self> {
                    match self { $(
                        Self::$Variant(own) => {
                            let state = $crate::__own_state!($State::$Variant, state);
                            Some(own.fill(state, now, cost)?.map($State::$Variant))
                        }
                    )+ }
                }

                fn debt(&self) -> u64 {
                    match self { $( Self::$Variant(own) => own.debt(), )+ }
                }

                fn is_within(&self, max: &Self) -> bool {
                    match (self, max) {
                        $( (Self::$Variant(own), Self::$Variant(max)) => own.is_within(max), )+
                        _ => false,
                    }
                }

                fn owed(&self, state: Option<&$State>, now: parts::Timestamp) -> u64 {
                    match self { $(
                        Self::$Variant(own) => own.owed($crate::__own_state!($State::$Variant, state), now),
                    )+ }
                }

                fn forgiven(&self, state: Option<&$State>, now: parts::Timestamp, cost: u64) -> u64 {
                    match self { $(
                        Self::$Variant(own) => {
                            own.forgiven($crate::__own_state!($State::$Variant, state), now, cost)
                        }
                    )+ }
                }

                fn reservation_us(&self) -> Option<u64> {
                    match self { $( Self::$Variant(own) => own.reservation_us(), )+ }
                }

                fn charged_at(&self, state: Option<&$State>, now: parts::Timestamp) -> parts::Timestamp {
                    match self { $(
                        Self::$Variant(own) => {
                            own.charged_at($crate::__own_state!($State::$Variant, state), now)
                        }
                    )+ }
                }

                fn record(
                    &self,
                    state: Option<&$State>,
                    now: parts::Timestamp,
                    cost: u64,
                    before: Option<&parts::Reservation>,
                ) -> parts::Reservation {
                    match self { $(
                        Self::$Variant(own) => {
                            own.record($crate::__own_state!($State::$Variant, state), now, cost, before)
                        }
                    )+ }
                }

                fn settle(
                    &self,
                    state: Option<&$State>,
                    now: parts::Timestamp,
                    reservation: &parts::Reservation,
                    cost: u64,
                ) -> parts::MaybeStep<Self> {
                    match self { $(
                        Self::$Variant(own) => {
                            let state = $crate::__own_state!($State::$Variant, state);
                            Some(own.settle(state, now, reservation, cost)?.map($State::$Variant))
                        }
                    )+ }
                }

                fn renew(
                    &self,
                    state: Option<&$State>,
                    now: parts::Timestamp,
                    reservation: &parts::Reservation,
                ) -> parts::Step<$State> {
                    match self { $(
                        Self::$Variant(own) => {
                            let state = $crate::__own_state!($State::$Variant, state);
                            own.renew(state, now, reservation).map($State::$Variant)
                        }
                    )+ }
                }

                fn undo(
                    &self,
                    state: Option<&$State>,
                    now: parts::Timestamp,
                    reservation: &parts::Reservation,
                    charged: &$State,
                ) -> parts::MaybeStep<Self> {
                    match self { $(
                        Self::$Variant(own) => {
                            let state = $crate::__own_state!($State::$Variant, state);
                            let charged = $crate::__own_state!($State::$Variant, Some(charged))?;
                            Some(own.undo(state, now, reservation, charged)?.map($State::$Variant))
                        }
                    )+ }
                }

                fn filled(&self, now: parts::Timestamp) -> parts::Step<$State> {
                    match self { $( Self::$Variant(own) => own.filled(now).map($State::$Variant), )+ }
                }

                fn has_leases(&self) -> bool {
                    match self { $( Self::$Variant(own) => own.has_leases(), )+ }
                }

                fn denies_abnormal_usage(&self) -> bool {
                    match self { $( Self::$Variant(own) => own.denies_abnormal_usage(), )+ }
                }

                fn recovery(&self) -> Option<parts::Recovery> {
                    match self { $( Self::$Variant(own) => own.recovery(), )+ }
                }

                fn metadata_bytes(&self) -> Option<usize> {
                    match self { $( Self::$Variant(own) => own.metadata_bytes(), )+ }
                }

                fn annotate(&self, state: &mut $State, metadata: &[u8]) {
                    match (self, state) {
                        $( (Self::$Variant(own), $State::$Variant(state)) => own.annotate(state, metadata), )+
                        _ => {}
                    }
                }

                fn logged<'s>(&self, state: &'s $State, now: parts::Timestamp) -> &'s [parts::LoggedRequest] {
                    match (self, state) {
                        $( (Self::$Variant(own), $State::$Variant(state)) => own.logged(state, now), )+
                        _ => &[],
                    }
                }
            }

            #[deny(clippy::missing_trait_methods)]
            #[allow(unreachable_patterns, reason = "unreachable if there were one variant")]
            impl parts::InMemory for $Algorithm {
                fn step_in_place(&self, state: &mut $State, now: parts::Timestamp, cost: u64) -> parts::Step<()> {
                    match (self, &mut *state) {
                        $( (Self::$Variant(own), $State::$Variant(state)) => own.step_in_place(state, now, cost), )+
                        _ => self.step(None, now, cost).map(|next| *state = next),
                    }
                }

                fn entries_in(state: &$State) -> usize {
                    match state { $( $State::$Variant(state) => <$algorithm>::entries_in(state), )+ }
                }

                fn entries_per_step(&self) -> usize {
                    match self { $( Self::$Variant(own) => own.entries_per_step(), )+ }
                }

                #[inline]
                fn is_compact(&self) -> bool {
                    match self {
                        Self::$Compact(own) => own.is_compact(),
                        _ => false,
                    }
                }

                fn to_compact(state: &$State) -> Option<parts::Compact> {
                    match state {
                        $State::$Compact(state) => <$compact>::to_compact(state),
                        _ => None,
                    }
                }

                fn from_compact(compact: parts::Compact) -> Option<$State> {
                    <$compact>::from_compact(compact).map($State::$Compact)
                }

                #[inline]
                fn has_fast_step(&self) -> bool {
                    match self {
                        Self::$Compact(own) => own.has_fast_step(),
                        _ => false,
                    }
                }

                #[inline]
                fn step_fast(&self, state: parts::Compact, now: parts::Timestamp, cost: u64) -> Option<parts::Step<parts::Compact>> {
                    match self {
                        Self::$Compact(own) => own.step_fast(state, now, cost),
                        _ => None,
                    }
                }
            }
        };
    };
}

/// A state, if it is of this variant.
#[doc(hidden)]
#[macro_export]
macro_rules! __own_state {
    ($State:ident::$Variant:ident, $state:expr) => {
        match $state {
            Some($State::$Variant(own)) => Some(own),
            _ => None,
        }
    };
}
