//! Reads and changes the entries under a key.
//!
//! | stored in | a field or an element |
//! |---|---|
//! | a hash of counters | `SINCE`, and the cost charged since then; `SINCE<LEFT@RAW`: of its first `RAW` only `LEFT` count |
//! | a list, a sorted set | `SINCE COST ID TIMESTAMP METADATA`; the metadata may be any bytes |

use std::collections::BTreeMap;
use std::sync::Arc;

use ratelimit_core::Timestamp;
use ratelimit_core::algorithm::{MAX_INTEGER, WindowEntry};

use crate::codec::number;
use crate::connection::Reply;
use crate::native::{Entry, EntryStorage};

pub(super) type CommandWords = Vec<Vec<u8>>;

/// More than concurrent charges can add up to: no limit counts so far.
const MOST_COUNTED: i64 = 1 << 62;

/// An entry as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredEntry {
    /// A counter's field name, or an element.
    pub(super) text: Vec<u8>,
    /// The part of it that counts.
    pub(super) entry: Entry,
    /// A counter's stored value.
    pub(super) raw: u64,
    /// A counter's cuts, each in a field of its own.
    pub(super) cuts: Vec<Cut>,
}

/// Displaces cost from a counter: of its first `raw`, only `left` counts, plus everything charged later.
/// An attempt that did not fit took the place of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) since: Timestamp,
    pub(super) left: u64,
    pub(super) raw: u64,
}

impl Cut {
    /// The field name of the cut.
    pub(super) fn field(&self) -> Vec<u8> {
        format!("{}<{}@{}", self.since.as_us(), self.left, self.raw).into_bytes()
    }

    fn of(since: Timestamp, text: &[u8]) -> Option<Self> {
        let mut numbers = text.splitn(2, |byte| *byte == b'@');
        let (left, raw) = (number(numbers.next()?)?, number(numbers.next()?)?);
        Some(Self { since, left, raw })
    }

    /// The part of a counter's value that counts.
    fn counted(&self, raw: u64) -> u64 {
        let later = raw.saturating_sub(self.raw);
        self.left.saturating_add(later).min(raw)
    }
}

/// The entries under a key, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct StoredEntries(pub(super) Vec<StoredEntry>);

impl StoredEntries {
    /// Parses a reply; `None` if it contains a value that no limit wrote.
    pub(super) fn of(storage: EntryStorage, reply: &Reply) -> Option<Self> {
        let strings = reply.strings()?;
        match storage {
            EntryStorage::Counters => Self::counters(&strings),
            EntryStorage::List | EntryStorage::SortedSet => {
                strings.into_iter().map(StoredEntry::element).collect::<Option<_>>().map(Self)
            }
        }
    }

    fn counters(strings: &[&[u8]]) -> Option<Self> {
        let mut counters: BTreeMap<Timestamp, (i64, Vec<Cut>)> = BTreeMap::new();
        for pair in strings.chunks(2) {
            let [field, count] = pair else { return None };
            let count: i64 = std::str::from_utf8(count).ok()?.parse().ok()?;
            let mut parts = field.splitn(2, |byte| *byte == b'<');
            let since = Timestamp::from_us(number(parts.next()?)?)?;
            let counter = counters.entry(since).or_default();
            match parts.next() {
                Some(cut) => counter.1.push(Cut::of(since, cut)?),
                None if count > MOST_COUNTED => return None,
                None => counter.0 = count,
            }
        }
        let stored = counters.into_iter();
        Some(Self(
            stored.map(|(since, (raw, cuts))| StoredEntry::counter(since, raw, cuts)).collect(),
        ))
    }

    /// The entries that count or did count.
    pub(super) fn entries(&self) -> Vec<Entry> {
        // A counter at zero or below remains where all charges were taken back; below zero, its charge
        // is yet to come.
        let counts = |entry: &&Entry| entry.charged.cost > 0;
        self.0.iter().map(|stored| &stored.entry).filter(counts).cloned().collect()
    }
}

impl StoredEntry {
    fn counter(since: Timestamp, raw: i64, cuts: Vec<Cut>) -> Self {
        let text = since.as_us().to_string().into_bytes();
        let raw = u64::try_from(raw).unwrap_or(0);
        let counted = cuts.iter().map(|cut| cut.counted(raw)).min();
        let entry = Entry::plain(since, counted.unwrap_or(raw).min(MAX_INTEGER));
        Self { text, entry, raw, cuts }
    }

    /// The element of this text; `None` if it is none.
    pub(super) fn element(text: &[u8]) -> Option<Self> {
        let mut parts = text.splitn(5, |byte| *byte == b' ');
        let since = Timestamp::from_us(number(parts.next()?)?)?;
        let cost = number(parts.next()?).filter(|cost| *cost > 0)?;
        let _id = parts.next()?;
        let timestamp = Timestamp::from_us(number(parts.next()?)?)?;
        let metadata: Arc<[u8]> = parts.next()?.into();
        let entry = Entry { since, charged: WindowEntry { timestamp, cost, metadata } };
        Some(Self { text: text.to_vec(), entry, raw: 0, cuts: Vec::new() })
    }

    /// The text of an element.
    pub(super) fn text_of(entry: &Entry, id: &str) -> Vec<u8> {
        let WindowEntry { timestamp, cost, metadata } = &entry.charged;
        let numbers = format!("{} {cost} {id} {} ", entry.since.as_us(), timestamp.as_us());
        [numbers.as_bytes(), &**metadata].concat()
    }

    /// An element of the same charge with this cost; `None` for zero.
    pub(super) fn part(&self, cost: u64) -> Option<Self> {
        let id = self.text.splitn(5, |byte| *byte == b' ').nth(2).filter(|_| cost > 0)?;
        let id = std::str::from_utf8(id).ok()?;
        let charged = WindowEntry { cost, ..self.entry.charged.clone() };
        let entry = Entry { charged, ..self.entry.clone() };
        Some(Self { text: Self::text_of(&entry, id), entry, ..self.clone() })
    }

    /// All fields of a counter, or the element.
    pub(super) fn fields(&self) -> Vec<Vec<u8>> {
        let cuts = self.cuts.iter().map(Cut::field);
        std::iter::once(self.text.clone()).chain(cuts).collect()
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

/// The command that adds a member to a sorted set.
pub(super) fn addition(key: &str, stored: &StoredEntry) -> CommandWords {
    let since = stored.entry.since.as_us().to_string();
    with(command(["ZADD", key, &since]), stored.text.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pairs: &[(&str, &str)]) -> Option<Vec<(u64, u64)>> {
        let text = |text: &str| Reply::Text(text.into());
        let items = pairs.iter().flat_map(|(field, count)| [text(field), text(count)]).collect();
        let found = StoredEntries::of(EntryStorage::Counters, &Reply::Array(items))?.entries();
        Some(found.iter().map(|entry| (entry.since.as_us(), entry.charged.cost)).collect())
    }

    #[test]
    fn a_cut_removes_earlier_charges_of_a_counter_and_keeps_later_ones() {
        for (raw, cuts, counts) in [
            ("9", &[][..], 9),
            ("9", &["7<5@9"], 5),
            // Charged after the cut, or taken back.
            ("12", &["7<5@9"], 8),
            ("7", &["7<5@9"], 5),
            ("4", &["7<5@9"], 4),
            ("9", &["7<5@9", "7<3@8", "7<9@9"], 4),
        ] {
            let cuts = cuts.iter().map(|cut| (*cut, "1"));
            let fields: Vec<_> = [("7", raw), ("12", "1")].into_iter().chain(cuts).collect();
            assert_eq!(found(&fields), Some(vec![(7, counts), (12, 1)]), "{fields:?}");
        }
        assert_eq!(found(&[("7", "0"), ("8", "-3"), ("9", "4"), ("9<0@4", "1")]), Some(vec![]));
        assert_eq!(found(&[("9<0@4", "1")]), Some(vec![]));
    }

    #[test]
    fn a_value_that_no_limit_wrote_does_not_parse() {
        for (field, count) in [
            ("x", "1"),
            ("7", "x"),
            ("-7", "1"),
            ("7", "9223372036854775807"),
            ("7<", "1"),
            ("7<5", "1"),
            ("7<5@", "1"),
            ("7<x@9", "1"),
            ("4503599627370496", "1"),
        ] {
            assert_eq!(found(&[(field, count)]), None, "{field} {count}");
        }
    }
}
