//! [`Codec`]: a state as bytes, for the compare-and-set mode.

use ratelimit_core::Timestamp;
use ratelimit_core::algorithm::{
    BucketCount, BucketedWindowState, ConcurrencyState, FirstRequestState, FixedWindowState,
    GcraState, LogEntry, PolicyState, SlidingCounterState, SlidingLogState, WindowLogState,
};

mod stack;
mod window_log;

/// A state that can be stored as bytes.
///
/// ```
/// use ratelimit_redis::Codec;
///
/// struct Spent(u64);
///
/// impl Codec for Spent {
///     fn encode(&self) -> Vec<u8> {
///         self.0.to_string().into_bytes()
///     }
///     fn decode(bytes: &[u8]) -> Option<Self> {
///         std::str::from_utf8(bytes).ok()?.parse().ok().map(Spent)
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be stored as bytes",
    label = "no `Codec`",
    note = "implement `Codec` for the state of the algorithm, so that `.cas()` can store it"
)]
pub trait Codec: Sized {
    /// The state as bytes, at least one. Equal bytes mean equal states.
    fn encode(&self) -> Vec<u8>;

    /// The state of these bytes, or `None` if they are no state.
    fn decode(bytes: &[u8]) -> Option<Self>;
}

/// Encodes each built-in state as in a [`PolicyState`].
macro_rules! built_in {
    ($($variant:ident of $state:ty),+ $(,)?) => { $(
        impl Codec for $state {
            fn encode(&self) -> Vec<u8> {
                PolicyState::from(self.clone()).encode()
            }

            fn decode(bytes: &[u8]) -> Option<Self> {
                match PolicyState::decode(bytes)? {
                    PolicyState::$variant(state) => Some(state),
                    _ => None,
                }
            }
        }
    )+ };
}

built_in!(
    Gcra of GcraState,
    FixedWindow of FixedWindowState,
    FirstRequestWindow of FirstRequestState,
    WindowLog of WindowLogState,
    BucketedWindow of BucketedWindowState,
    SlidingCounter of SlidingCounterState,
    SlidingLog of SlidingLogState,
    Concurrency of ConcurrencyState,
);

/// Text: the algorithm's name and its numbers; in a window log, metadata as well.
impl Codec for PolicyState {
    fn encode(&self) -> Vec<u8> {
        let (name, numbers) = match self {
            Self::Gcra(GcraState { tat_us, surplus, timestamp }) => {
                ("gcra", vec![*tat_us, *surplus, timestamp.as_us()])
            }
            Self::FixedWindow(FixedWindowState { start, count, ends_us }) => {
                ("fixed-window", vec![start.as_us(), *count, *ends_us])
            }
            Self::FirstRequestWindow(FirstRequestState { start, count, ends_us }) => {
                ("first-request-window", vec![start.as_us(), *count, *ends_us])
            }
            Self::BucketedWindow(BucketedWindowState { buckets }) => {
                let numbers =
                    buckets.iter().flat_map(|bucket| [bucket.start.as_us(), bucket.count]);
                ("bucketed-window", numbers.collect())
            }
            Self::SlidingCounter(SlidingCounterState { start, previous, current, window_us }) => {
                ("sliding-counter", vec![start.as_us(), *previous, *current, *window_us])
            }
            Self::SlidingLog(SlidingLogState { entries }) => ("sliding-log", of_entries(entries)),
            Self::Concurrency(ConcurrencyState { leases }) => ("concurrency", of_entries(leases)),
            Self::WindowLog(state) => return window_log::encode(state),
        };
        let mut text = String::from(name);
        for number in numbers {
            text.push(' ');
            text.push_str(&number.to_string());
        }
        text.into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if let Some(rest) = bytes.strip_prefix(window_log::NAME) {
            return window_log::decode(rest).map(Self::WindowLog);
        }
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        let name = words.next()?;
        let numbers = words.map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
        let timestamp = |us: &u64| Timestamp::from_us(*us);
        Some(match (name, &*numbers) {
            ("gcra", [tat_us, surplus, at]) => {
                GcraState { tat_us: *tat_us, surplus: *surplus, timestamp: timestamp(at)? }.into()
            }
            ("fixed-window", [start, count, ends_us]) => {
                let (count, ends_us) = (*count, *ends_us);
                FixedWindowState { start: timestamp(start)?, count, ends_us }.into()
            }
            ("first-request-window", [start, count, ends_us]) => {
                let (count, ends_us) = (*count, *ends_us);
                FirstRequestState { start: timestamp(start)?, count, ends_us }.into()
            }
            ("bucketed-window", pairs @ [_, ..]) => {
                let bucket =
                    |(start, count)| Some(BucketCount { start: timestamp(&start)?, count });
                let buckets = in_pairs(pairs)?.map(bucket).collect::<Option<_>>()?;
                BucketedWindowState { buckets }.into()
            }
            ("sliding-counter", [start, previous, current, window_us]) => {
                let (previous, current, window_us) = (*previous, *current, *window_us);
                let start = timestamp(start)?;
                SlidingCounterState { start, previous, current, window_us }.into()
            }
            ("sliding-log", pairs @ [_, ..]) => SlidingLogState { entries: entries(pairs)? }.into(),
            ("concurrency", pairs @ [_, ..]) => ConcurrencyState { leases: entries(pairs)? }.into(),
            _ => return None,
        })
    }
}

fn of_entries(entries: &[LogEntry]) -> Vec<u64> {
    entries.iter().flat_map(|entry| [entry.timestamp.as_us(), entry.cost]).collect()
}

fn entries(pairs: &[u64]) -> Option<Vec<LogEntry>> {
    let entry = |(at, cost)| Some(LogEntry { timestamp: Timestamp::from_us(at)?, cost });
    in_pairs(pairs)?.map(entry).collect()
}

fn in_pairs(numbers: &[u64]) -> Option<impl Iterator<Item = (u64, u64)>> {
    let pairs = numbers.chunks_exact(2);
    pairs.remainder().is_empty().then(|| pairs.map(|pair| (pair[0], pair[1])))
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The number before this byte, and the rest after it.
fn number_before(bytes: &[u8], end: u8) -> Option<(u64, &[u8])> {
    let place = bytes.iter().position(|byte| *byte == end)?;
    Some((number(&bytes[..place])?, &bytes[place + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use ratelimit_core::algorithm::{StackState, StackedState, WindowEntry, WindowLogState};

    fn timestamps() -> impl Strategy<Value = Timestamp> {
        (0..=Timestamp::MAX.as_us()).prop_map(Timestamp::saturating_from_us)
    }

    fn logs() -> impl Strategy<Value = PolicyState> {
        let entry = (timestamps(), any::<u64>(), vec(any::<u8>(), 0..9)).prop_map(
            |(timestamp, cost, metadata)| WindowEntry {
                timestamp,
                cost,
                metadata: metadata.into(),
            },
        );
        (timestamps(), vec(entry, 0..4))
            .prop_map(|(start, entries)| WindowLogState { start, entries }.into())
    }

    fn states() -> impl Strategy<Value = PolicyState> {
        let lease =
            (timestamps(), any::<u64>()).prop_map(|(timestamp, cost)| LogEntry { timestamp, cost });
        let leases = vec(lease, 1..4).prop_map(|leases| ConcurrencyState { leases }.into());
        prop_oneof![logs(), leases]
    }

    fn stacks() -> impl Strategy<Value = StackState<PolicyState>> {
        let stacked =
            (states(), timestamps()).prop_map(|(state, expires)| StackedState { state, expires });
        vec(prop::option::of(stacked), 0..4).prop_map(|states| StackState { states })
    }

    proptest! {
        #[test]
        fn a_state_decodes_to_what_was_encoded(state in states(), stack in stacks()) {
            prop_assert_eq!(PolicyState::decode(&state.encode()), Some(state));
            let states = vec![Some(StackedState { state: stack, expires: Timestamp::ZERO }), None];
            let of_stacks = StackState { states };
            prop_assert_eq!(StackState::decode(&of_stacks.encode()), Some(of_stacks));
        }

        #[test]
        fn other_bytes_are_no_state_or_that_of_these_bytes(
            whole in prop_oneof![
                logs().prop_map(|state| state.encode()),
                stacks().prop_map(|stack| stack.encode()),
                vec(any::<u8>(), 0..40).prop_map(|bytes| [&b"stack"[..], &bytes].concat()),
                vec(any::<u8>(), 0..40).prop_map(|bytes| [&b"window-log "[..], &bytes].concat()),
            ],
            cut in 0_usize..99,
        ) {
            let bytes = &whole[..whole.len().saturating_sub(cut)];
            if let Some(read) = PolicyState::decode(bytes) {
                prop_assert_eq!(PolicyState::decode(&read.encode()), Some(read));
            }
            if let Some(read) = StackState::<PolicyState>::decode(bytes) {
                prop_assert_eq!(StackState::decode(&read.encode()), Some(read));
            }
        }
    }
}
