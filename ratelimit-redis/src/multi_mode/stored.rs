//! Reads the entries under a key.
//!
//! | stored in | a field or an element |
//! |---|---|
//! | a hash of counters | `SINCE`, and the cost charged since then |
//! | a list, a sorted set | `SINCE COST ID TIMESTAMP METADATA`; the metadata may be any bytes |

use std::sync::Arc;

use ratelimit_core::algorithm::{LoggedRequest, MAX_INTEGER};
use ratelimit_core::{ReservationId, Timestamp};

use crate::codec::number;
use crate::connection::Reply;
use crate::native::{NativeCharge, Storage};

/// The words of a command.
pub(super) type Words = Vec<Vec<u8>>;

/// The counters' fields or the elements under a key, and the entries that they are, oldest first.
pub(super) type Found = (Vec<Vec<u8>>, Vec<NativeCharge>);

/// Parses a reply; `None` if it contains a value that no limit wrote.
pub(super) fn parsed(storage: Storage, reply: &Reply) -> Option<Found> {
    let strings = reply.strings()?;
    if storage != Storage::Counters {
        return strings.iter().map(element).collect();
    }
    let mut counters: Vec<_> = strings.chunks(2).map(counter).collect::<Option<_>>()?;
    counters.sort_unstable_by_key(|(_, entry)| entry.since);
    Some(counters.into_iter().unzip())
}

/// The counter of this field and value; `None` if it is none.
pub(super) fn counter(pair: &[&[u8]]) -> Option<(Vec<u8>, NativeCharge)> {
    let [field, count] = pair else { return None };
    let since = Timestamp::from_us(number(field)?)?;
    // Concurrent charges add up to less than so much.
    let count = number(count).filter(|count| (1..1 << 62).contains(count))?;
    Some((field.to_vec(), NativeCharge::plain(since, count.min(MAX_INTEGER))))
}

/// The element of this text; `None` if it is none.
pub(super) fn element(text: &&[u8]) -> Option<(Vec<u8>, NativeCharge)> {
    let mut parts = text.splitn(5, |byte| *byte == b' ');
    let since = Timestamp::from_us(number(parts.next()?)?)?;
    let cost = number(parts.next()?).filter(|cost| *cost > 0)?;
    let _id = parts.next()?;
    let timestamp = Timestamp::from_us(number(parts.next()?)?)?;
    let metadata: Arc<[u8]> = parts.next()?.into();
    let entry = NativeCharge { since, charged: LoggedRequest { timestamp, cost, metadata } };
    Some((text.to_vec(), entry))
}

/// The text of an element, which its id makes unlike any other.
pub(super) fn element_of(entry: &NativeCharge, id: ReservationId) -> Vec<u8> {
    let LoggedRequest { timestamp, cost, metadata } = &entry.charged;
    let numbers = format!("{} {cost} {id} {} ", entry.since.as_us(), timestamp.as_us());
    [numbers.as_bytes(), &**metadata].concat()
}

/// A command of these words.
pub(super) fn command<const N: usize>(words: [&dyn AsRef<[u8]>; N]) -> Words {
    words.iter().map(|word| word.as_ref().to_vec()).collect()
}

/// The command that reads all entries under a key.
pub(super) fn reading(storage: Storage, key: &str) -> Words {
    match storage {
        Storage::Counters => command([&"HGETALL", &key]),
        Storage::List => command([&"LRANGE", &key, &"0", &"-1"]),
        Storage::SortedSet => command([&"ZRANGE", &key, &"0", &"-1"]),
    }
}

/// The command that removes a field or an element.
pub(super) fn removal(storage: Storage, key: &str, text: &[u8]) -> Words {
    match storage {
        Storage::Counters => command([&"HDEL", &key, &text]),
        Storage::List => command([&"LREM", &key, &"1", &text]),
        Storage::SortedSet => command([&"ZREM", &key, &text]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pairs: &[(&str, &str)]) -> Option<Vec<(u64, u64)>> {
        let text = |text: &str| Reply::Text(text.into());
        let items = pairs.iter().flat_map(|(field, count)| [text(field), text(count)]).collect();
        let (_, found) = parsed(Storage::Counters, &Reply::Array(items))?;
        Some(found.iter().map(|entry| (entry.since.as_us(), entry.charged.cost)).collect())
    }

    #[test]
    fn counters_are_read_oldest_first_and_count_no_more_than_any_limit() {
        let fields = [("12", "1"), ("7", "9"), ("11", "4611686018427387903")];
        assert_eq!(found(&fields), Some(vec![(7, 9), (11, MAX_INTEGER), (12, 1)]));
    }

    #[test]
    fn a_value_that_no_limit_wrote_does_not_parse() {
        for (field, count) in [
            ("x", "1"),
            ("7", "x"),
            ("-7", "1"),
            ("7", "0"),
            ("7", "-1"),
            ("7", "4611686018427387904"),
            ("4503599627370496", "1"),
        ] {
            assert_eq!(found(&[(field, count)]), None, "{field} {count}");
        }
    }
}
