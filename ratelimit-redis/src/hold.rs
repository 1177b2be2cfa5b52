//! A [`Hold`] as it is kept under a key of its own, in every mode: `TICK SINCE COST`, and once it
//! has been settled `TICK SINCE COST SETTLED`. `driver.lua` reads and writes the same.
//!
//! One that was charged in one slot of several ends with ` ?`: whoever charged it may take it back, as
//! long as nobody else was told that the id has it.

use ratelimit_core::{Hold, Tick};

const RESERVED: &str = " ?";

/// The same, to be taken back by who wrote it.
pub(crate) fn reserved(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.extend_from_slice(RESERVED.as_bytes());
    bytes
}

/// The same, which nobody takes back any more; `None` if that is so already.
pub(crate) fn kept(bytes: &[u8]) -> Option<Vec<u8>> {
    bytes.strip_suffix(RESERVED.as_bytes()).map(<[u8]>::to_vec)
}

pub(crate) fn encode(hold: &Hold) -> Vec<u8> {
    let (tick_us, since_us, cost) = (hold.tick.as_us(), hold.since.as_us(), hold.cost);
    match hold.settled {
        None => format!("{tick_us} {since_us} {cost}"),
        Some(settled) => format!("{tick_us} {since_us} {cost} {settled}"),
    }
    .into_bytes()
}

/// `None` if these bytes are no hold.
pub(crate) fn decode(bytes: &[u8]) -> Option<Hold> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut words = text.strip_suffix(RESERVED).unwrap_or(text).split(' ').map(str::parse::<u64>);
    let tick = Tick::from_us(words.next()?.ok()?)?;
    let since = Tick::from_us(words.next()?.ok()?)?;
    let cost = words.next()?.ok()?;
    let settled = words.next().transpose().ok()?;
    words.next().is_none().then_some(Hold { tick, cost, settled, since })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_is_read_as_it_is_written_and_nothing_else_is() {
        let tick = Tick::from_us(1_795_218_392_123_456).expect("a time");
        for settled in [None, Some(0), Some(u64::MAX)] {
            let since = tick.saturating_add_us(1);
            let hold = Hold { tick, cost: 7, settled, since };
            assert_eq!(decode(&encode(&hold)), Some(hold));
            assert_eq!(kept(&encode(&hold)), None);
            let written = reserved(encode(&hold));
            assert_eq!((decode(&written), kept(&written)), (Some(hold), Some(encode(&hold))));
        }
        for garbage in
            ["", "1 2", "1 2 ", "1 2 3 4 5", "-1 2 3", "4503599627370496 1 1", "nonsense"]
        {
            assert_eq!(decode(garbage.as_bytes()), None, "{garbage}");
        }
    }
}
