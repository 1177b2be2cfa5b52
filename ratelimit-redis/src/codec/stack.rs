//! Encodes a stack's state: `stack`, then per limit ` -` or, for a limit in use, ` EXPIRES BYTES:`
//! and that many bytes of the limit's own state.

use ratelimit_core::algorithm::{StackState, StackedState};
use ratelimit_core::{Algorithm, Stack, Timestamp};

use super::{Codec, RecordText, number_before, take_sized};

const NAME: &[u8] = b"stack";

impl<S: Codec> Codec for StackState<S> {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = NAME.to_vec();
        for state in &self.states {
            match state {
                None => bytes.extend(b" -"),
                Some(StackedState { state, expires }) => {
                    let state = state.encode();
                    bytes.extend(format!(" {} {}:", expires.as_us(), state.len()).bytes());
                    bytes.extend(state);
                }
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let decoded = |part: Option<Part<'_>>| {
            let Some((expires, state)) = part else { return Some(None) };
            Some(Some(StackedState { state: S::decode(state)?, expires }))
        };
        let states = parts(bytes)?.into_iter().map(decoded).collect::<Option<_>>()?;
        Some(Self { states })
    }
}

impl<A: Algorithm> RecordText for Stack<A> {}

/// A state in a stack's state, and the time until which it matters.
type Part<'b> = (Timestamp, &'b [u8]);

/// The states in a stack's state; `None` if these bytes are none.
pub(crate) fn parts(bytes: &[u8]) -> Option<Vec<Option<Part<'_>>>> {
    let mut rest = bytes.strip_prefix(NAME)?;
    let mut states = Vec::new();
    while let Some(limit) = rest.strip_prefix(b" ") {
        if let Some(more) = limit.strip_prefix(b"-") {
            states.push(None);
            rest = more;
            continue;
        }
        let (expires, more) = number_before(limit, b' ')?;
        rest = more;
        states.push(Some((Timestamp::from_us(expires)?, take_sized(&mut rest)?)));
    }
    rest.is_empty().then_some(states)
}
