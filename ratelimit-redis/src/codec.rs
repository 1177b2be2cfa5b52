//! [`Codec`]: a state as bytes, for the compare-and-set mode. [`RecordText`]: numbers as text, for
//! records.

use ratelimit_core::{Algorithm, AnyAlgorithm, Record, UnendedRecord};

mod numbers;
mod stack;
mod window_log;

pub(crate) use numbers::{Numbers, decode_numbers, encode_numbers, in_fields, parsed};
pub(crate) use stack::parts;

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

/// The numbers of an algorithm as text, in which a [record](ratelimit_core::Record) keeps them.
///
/// `impl RecordText for Mine {}` has no text: then records of this algorithm block and exempt, and
/// those with numbers are refused.
#[diagnostic::on_unimplemented(
    message = "nothing says how records keep the numbers of `{Self}`",
    label = "no `RecordText`",
    note = "`impl RecordText for {Self} {{}}` suffices: then records block and exempt, and have no numbers"
)]
pub trait RecordText: Algorithm {
    /// The numbers as text: for a built-in algorithm such as `gcra 10/s burst 20`. `None`, the
    /// default, if there is none.
    fn numbers_to_text(&self) -> Option<String> {
        None
    }

    /// The numbers of such a text, for a record: `None` if it is none.
    #[must_use]
    fn numbers_from_text(text: &str) -> Option<UnendedRecord<Self>>
    where
        Self: Sized,
    {
        let _ = text;
        None
    }
}

impl RecordText for AnyAlgorithm {
    fn numbers_to_text(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn numbers_from_text(text: &str) -> Option<UnendedRecord<Self>> {
        text.parse().ok().map(Record::numbers)
    }
}

pub(crate) fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The number before this byte, and the rest after it.
pub(crate) fn number_before(bytes: &[u8], end: u8) -> Option<(u64, &[u8])> {
    let place = bytes.iter().position(|byte| *byte == end)?;
    Some((number(&bytes[..place])?, &bytes[place + 1..]))
}

/// Takes bytes from the front: their length, a colon, and themselves.
pub(crate) fn take_sized<'b>(bytes: &mut &'b [u8]) -> Option<&'b [u8]> {
    let (length, rest) = number_before(bytes, b':')?;
    let (taken, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
    *bytes = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use ratelimit_core::Timestamp;
    use ratelimit_core::algorithm::{
        AnyState, ConcurrencyState, LoggedCost, LoggedRequest, StackState, StackedState,
        WindowLogState,
    };

    fn timestamps() -> impl Strategy<Value = Timestamp> {
        (0..=Timestamp::MAX.as_us()).prop_map(Timestamp::saturating_from_us)
    }

    fn logs() -> impl Strategy<Value = AnyState> {
        let entry = (timestamps(), any::<u64>(), vec(any::<u8>(), 0..9)).prop_map(
            |(timestamp, cost, metadata)| LoggedRequest {
                timestamp,
                cost,
                metadata: metadata.into(),
            },
        );
        (timestamps(), vec(entry, 0..4))
            .prop_map(|(start, entries)| WindowLogState { start, entries }.into())
    }

    fn states() -> impl Strategy<Value = AnyState> {
        let lease = (timestamps(), any::<u64>())
            .prop_map(|(timestamp, cost)| LoggedCost { timestamp, cost });
        let leases = vec(lease, 1..4).prop_map(|entries| ConcurrencyState { entries }.into());
        prop_oneof![logs(), leases]
    }

    fn stacks() -> impl Strategy<Value = StackState<AnyState>> {
        let stacked =
            (states(), timestamps()).prop_map(|(state, expires)| StackedState { state, expires });
        vec(prop::option::of(stacked), 0..4).prop_map(|states| StackState { states })
    }

    proptest! {
        #[test]
        fn a_state_decodes_to_what_was_encoded(state in states(), stack in stacks()) {
            prop_assert_eq!(AnyState::decode(&state.encode()), Some(state));
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
            if let Some(read) = AnyState::decode(bytes) {
                prop_assert_eq!(AnyState::decode(&read.encode()), Some(read));
            }
            if let Some(read) = StackState::<AnyState>::decode(bytes) {
                prop_assert_eq!(StackState::decode(&read.encode()), Some(read));
            }
        }
    }
}
