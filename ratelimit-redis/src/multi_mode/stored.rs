//! Reads the entries under a key.
//!
//! | stored in | a field or an element |
//! |---|---|
//! | a hash of counters | `SINCE`, and the cost charged since then |
//! | a list, a sorted set | `SINCE COST ID TIMESTAMP METADATA`; the metadata may be any bytes |

use std::sync::Arc;

use ratelimit_core::algorithm::{MAX_INTEGER, WindowEntry};
use ratelimit_core::{ReservationId, Timestamp};

use crate::codec::number;
use crate::connection::Reply;
use crate::native::{Entry, EntryStorage};

pub(super) type CommandWords = Vec<Vec<u8>>;

/// More than concurrent charges can add up to: no limit counts so far.
const MOST_COUNTED: u64 = 1 << 62;

/// An entry as it is stored.
#[derive(Clone, Debug)]
pub(super) struct StoredEntry {
    /// A counter's field, or an element.
    pub(super) text: Vec<u8>,
    pub(super) entry: Entry,
}

/// Parses a reply: the entries under a key, oldest first; `None` if it contains a value that no limit
/// wrote.
pub(super) fn stored_entries(storage: EntryStorage, reply: &Reply) -> Option<Vec<StoredEntry>> {
    let strings = reply.strings()?;
    if storage != EntryStorage::Counters {
        return strings.into_iter().map(StoredEntry::element).collect();
    }
    let mut counters: Vec<_> =
        strings.chunks(2).map(StoredEntry::counter).collect::<Option<_>>()?;
    counters.sort_unstable_by_key(|stored| stored.entry.since);
    Some(counters)
}

/// The entries that count or did count.
pub(super) fn counted(stored: &[StoredEntry]) -> Vec<Entry> {
    stored.iter().map(|stored| stored.entry.clone()).collect()
}

impl StoredEntry {
    /// The counter of this field and value; `None` if it is none.
    fn counter(pair: &[&[u8]]) -> Option<Self> {
        let [field, count] = pair else { return None };
        let since = Timestamp::from_us(number(field)?)?;
        let count = number(count).filter(|count| (1..=MOST_COUNTED).contains(count))?;
        let entry = Entry::plain(since, count.min(MAX_INTEGER));
        Some(Self { text: field.to_vec(), entry })
    }

    /// The element of this text; `None` if it is none.
    fn element(text: &[u8]) -> Option<Self> {
        let mut parts = text.splitn(5, |byte| *byte == b' ');
        let since = Timestamp::from_us(number(parts.next()?)?)?;
        let cost = number(parts.next()?).filter(|cost| *cost > 0)?;
        let _id = parts.next()?;
        let timestamp = Timestamp::from_us(number(parts.next()?)?)?;
        let metadata: Arc<[u8]> = parts.next()?.into();
        let entry = Entry { since, charged: WindowEntry { timestamp, cost, metadata } };
        Some(Self { text: text.to_vec(), entry })
    }

    /// The text of an element, which its id makes unlike any other.
    pub(super) fn text_of(entry: &Entry, id: ReservationId) -> Vec<u8> {
        let WindowEntry { timestamp, cost, metadata } = &entry.charged;
        let numbers = format!("{} {cost} {id} {} ", entry.since.as_us(), timestamp.as_us());
        [numbers.as_bytes(), &**metadata].concat()
    }
}

/// A command of text arguments.
pub(super) fn command<const N: usize>(arguments: [&str; N]) -> CommandWords {
    arguments.iter().map(|argument| argument.as_bytes().to_vec()).collect()
}

/// The command with this as its last argument.
pub(super) fn with(mut command: CommandWords, last: Vec<u8>) -> CommandWords {
    command.push(last);
    command
}

/// The command that removes a field or an element.
pub(super) fn removal(storage: EntryStorage, key: &str, text: &[u8]) -> CommandWords {
    let removal = match storage {
        EntryStorage::Counters => command(["HDEL", key]),
        EntryStorage::List => command(["LREM", key, "1"]),
        EntryStorage::SortedSet => command(["ZREM", key]),
    };
    with(removal, text.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pairs: &[(&str, &str)]) -> Option<Vec<(u64, u64)>> {
        let text = |text: &str| Reply::Text(text.into());
        let items = pairs.iter().flat_map(|(field, count)| [text(field), text(count)]).collect();
        let found = stored_entries(EntryStorage::Counters, &Reply::Array(items))?;
        Some(
            counted(&found).iter().map(|entry| (entry.since.as_us(), entry.charged.cost)).collect(),
        )
    }

    #[test]
    fn counters_are_read_oldest_first_and_count_no_more_than_any_limit() {
        let fields = [("12", "1"), ("7", "9"), ("11", "4611686018427387904")];
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
            ("7", "9223372036854775807"),
            ("4503599627370496", "1"),
        ] {
            assert_eq!(found(&[(field, count)]), None, "{field} {count}");
        }
    }
}
