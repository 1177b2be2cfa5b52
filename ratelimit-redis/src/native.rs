//! [`MultiProgram`]: what an algorithm needs to be decided by native commands in a transaction.
//!
//! Every state is a list of entries: a charge, and the time from which it counts. A window is one entry,
//! a bucketed window one per bucket, a log one per request. A charge always adds cost to the newest
//! entry or appends one after it, and drops the oldest.

use ratelimit_core::algorithm::{
    BucketCount, BucketedWindowState, ChargesAttempts, FirstRequestState, FixedWindowState,
    LogEntry, PolicyState, SlidingLogState, WindowEntry, WindowLogState,
};
use ratelimit_core::{
    Algorithm, Attempts, BucketedWindow, FirstRequestWindow, FixedWindow, Policy, SlidingLog,
    Timestamp, WindowLog,
};

/// An algorithm that a transaction can decide. A transaction charges first and reads afterwards, so the
/// algorithm has to count [attempts](Attempts).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be decided by native commands in MULTI",
    label = "a transaction cannot branch, and so charges every attempt",
    note = "count attempts: wrap a window or a sliding log in `Attempts`",
    note = "or build the store without `.multi()`; an algorithm of your own runs with `.cas()`"
)]
pub trait MultiProgram: Algorithm {
    /// Where its entries are stored; `None` if no transaction can decide it.
    fn native(&self) -> Option<Native>;

    /// The entries of a state, oldest first, at least one.
    fn entries(&self, state: &Self::State) -> Vec<Entry>;

    /// The state of these entries, oldest first; `None` if there are none.
    fn state(&self, entries: &[Entry]) -> Option<Self::State>;

    /// Whether charges that count from these two times share a window.
    fn is_same(&self, a: Timestamp, b: Timestamp) -> bool;

    /// The time from which the oldest of these entries counts that still counts at `now`. Entries before
    /// it no longer count.
    fn oldest(&self, entries: &[Entry], now: Timestamp) -> Timestamp;

    /// The entries as a charge sees them that counts from `at` but arrives after charges which count
    /// from a later time. Later charges that can share its window count as if they had come with it.
    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry>;

    /// Whether an attempt that does not fit displaces older entries.
    fn displaces(&self) -> bool;
}

/// One charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The start of the window or bucket in which it counts; in a sliding log, the time of the charge.
    pub since: Timestamp,
    /// The time of the charge, its cost and its metadata.
    pub charged: WindowEntry,
}

/// Where entries are stored on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Native {
    /// The algorithm's name. It is part of the key, so entries of another algorithm are never read.
    pub name: &'static str,
    /// The data type.
    pub storage: EntryStorage,
}

/// The data type that stores entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryStorage {
    /// A hash of counters: HINCRBY and PEXPIRE.
    Counters,
    /// A list: RPUSH and RPUSHX.
    List,
    /// A sorted set: ZREMRANGEBYSCORE and ZADD.
    SortedSet,
}

/// How the state of [`Attempts`] of an algorithm is stored.
#[diagnostic::on_unimplemented(
    message = "`Attempts<{Self}>` cannot be decided by native commands in MULTI",
    note = "take `FixedWindow`, `FirstRequestWindow`, `WindowLog`, `BucketedWindow` or `SlidingLog`",
    note = "or build the store without `.multi()`; an algorithm of your own runs with `.cas()`"
)]
pub trait NativeState: ChargesAttempts {
    /// Where the entries are stored.
    const NATIVE: Native;

    /// As [`MultiProgram::entries`].
    fn entries(&self, state: &Self::State) -> Vec<Entry>;

    /// As [`MultiProgram::state`].
    fn state(&self, entries: &[Entry]) -> Option<Self::State>;

    /// As [`MultiProgram::is_same`].
    fn is_same(&self, a: Timestamp, b: Timestamp) -> bool {
        a == b
    }

    /// As [`MultiProgram::oldest`].
    fn oldest(&self, entries: &[Entry], now: Timestamp) -> Timestamp;

    /// As [`MultiProgram::as_of`].
    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry>;

    /// As [`MultiProgram::displaces`].
    fn displaces(&self) -> bool {
        false
    }
}

impl<A: NativeState> MultiProgram for Attempts<A> {
    fn native(&self) -> Option<Native> {
        Some(A::NATIVE)
    }

    fn entries(&self, state: &A::State) -> Vec<Entry> {
        self.algorithm().entries(state)
    }

    fn state(&self, entries: &[Entry]) -> Option<A::State> {
        self.algorithm().state(entries)
    }

    fn is_same(&self, a: Timestamp, b: Timestamp) -> bool {
        self.algorithm().is_same(a, b)
    }

    fn oldest(&self, entries: &[Entry], now: Timestamp) -> Timestamp {
        self.algorithm().oldest(entries, now)
    }

    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
        self.algorithm().as_of(entries, at)
    }

    fn displaces(&self) -> bool {
        self.algorithm().displaces()
    }
}

impl Entry {
    /// A charge that counts from `since`, without metadata.
    pub(crate) fn plain(since: Timestamp, cost: u64) -> Self {
        Self { since, charged: WindowEntry { timestamp: since, cost, metadata: [].into() } }
    }
}

fn sum<'e>(entries: impl IntoIterator<Item = &'e Entry>) -> u64 {
    entries.into_iter().map(|entry| entry.charged.cost).fold(0, u64::saturating_add)
}

/// The start of each window, if each begins with the first entry that the one before does not cover.
/// Clients that begin a window concurrently may disagree on its start; all their entries count in it.
fn begun(entries: &[Entry], window_us: u64) -> Vec<Timestamp> {
    let mut since: Vec<_> = entries.iter().map(|entry| entry.since).collect();
    since.sort_unstable();
    let mut begun: Vec<Timestamp> = Vec::new();
    for since in since {
        if begun.last().is_none_or(|begun| since.as_us() >= begun.as_us() + window_us) {
            begun.push(since);
        }
    }
    begun
}

/// The start of the last window, and its entries.
fn last_window(entries: &[Entry], window_us: u64) -> Option<(Timestamp, Vec<&Entry>)> {
    let start = *begun(entries, window_us).last()?;
    Some((start, entries.iter().filter(|entry| entry.since >= start).collect()))
}

/// The start of the first window that is not over.
fn oldest_window(entries: &[Entry], window_us: u64, now: Timestamp) -> Timestamp {
    let lasts = |start: &Timestamp| start.as_us() + window_us > now.as_us();
    begun(entries, window_us).into_iter().find(lasts).unwrap_or(Timestamp::MAX)
}

/// The entries of the window in which a charge from `at` counts, and of those before.
fn up_to(entries: &[Entry], window_us: u64, at: Timestamp) -> Vec<Entry> {
    let later = |start: &Timestamp| start.as_us() >= at.as_us() + window_us;
    let next = begun(entries, window_us).into_iter().find(later);
    let begins_before = |entry: &&Entry| next.is_none_or(|next| entry.since < next);
    entries.iter().filter(begins_before).cloned().collect()
}

/// All entries; those that count from a later time count as if they had come at `at`.
fn together(entries: &[Entry], at: Timestamp) -> Vec<Entry> {
    let (mut earlier, later): (Vec<_>, Vec<_>) =
        entries.iter().cloned().partition(|entry| entry.since <= at);
    let later = sum(&later);
    match earlier.last_mut() {
        _ if later == 0 => {}
        Some(last) if last.since == at => {
            last.charged.cost = last.charged.cost.saturating_add(later);
        }
        _ => earlier.push(Entry::plain(at, later)),
    }
    earlier
}

impl NativeState for FixedWindow {
    const NATIVE: Native = Native { name: "fixed-window", storage: EntryStorage::Counters };

    fn entries(&self, state: &FixedWindowState) -> Vec<Entry> {
        vec![Entry::plain(state.start, state.count)]
    }

    /// The sum of the latest window, by the alignment that is configured now.
    fn state(&self, entries: &[Entry]) -> Option<FixedWindowState> {
        let latest = entries.last()?.since;
        let first = entries.partition_point(|entry| !self.is_same(entry.since, latest));
        let start = entries[first].since;
        let ends_us = aligned(start, self.window_us()).as_us() + self.window_us();
        Some(FixedWindowState { start, count: sum(&entries[first..]), ends_us })
    }

    /// A window that began under another length keeps its start.
    fn is_same(&self, a: Timestamp, b: Timestamp) -> bool {
        a.as_us() / self.window_us() == b.as_us() / self.window_us()
    }

    fn oldest(&self, _entries: &[Entry], now: Timestamp) -> Timestamp {
        aligned(now, self.window_us())
    }

    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
        let current = aligned(at, self.window_us());
        let is_later = |entry: &&Entry| aligned(entry.since, self.window_us()) > current;
        entries.iter().filter(|entry| !is_later(entry)).cloned().collect()
    }
}

/// The start of the window or bucket of this length that contains a time.
fn aligned(timestamp: Timestamp, length_us: u64) -> Timestamp {
    Timestamp::saturating_from_us(timestamp.as_us() - timestamp.as_us() % length_us)
}

impl NativeState for FirstRequestWindow {
    const NATIVE: Native = Native { name: "first-request-window", storage: EntryStorage::Counters };

    fn entries(&self, state: &FirstRequestState) -> Vec<Entry> {
        vec![Entry::plain(state.start, state.count)]
    }

    fn state(&self, entries: &[Entry]) -> Option<FirstRequestState> {
        let (start, window) = last_window(entries, self.window_us())?;
        let ends_us = start.as_us() + self.window_us();
        Some(FirstRequestState { start, count: sum(window), ends_us })
    }

    /// Clients that begin a window concurrently may disagree on its start.
    fn is_same(&self, a: Timestamp, b: Timestamp) -> bool {
        let apart_us = a.saturating_us_since(b).max(b.saturating_us_since(a));
        apart_us < self.window_us()
    }

    fn oldest(&self, entries: &[Entry], now: Timestamp) -> Timestamp {
        oldest_window(entries, self.window_us(), now)
    }

    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
        up_to(entries, self.window_us(), at)
    }
}

impl NativeState for BucketedWindow {
    const NATIVE: Native = Native { name: "bucketed-window", storage: EntryStorage::Counters };

    fn entries(&self, state: &BucketedWindowState) -> Vec<Entry> {
        state.buckets.iter().map(|bucket| Entry::plain(bucket.start, bucket.count)).collect()
    }

    fn state(&self, entries: &[Entry]) -> Option<BucketedWindowState> {
        let bucket = |entry: &Entry| BucketCount { start: entry.since, count: entry.charged.cost };
        let buckets: Vec<_> = entries.iter().map(bucket).collect();
        (!buckets.is_empty()).then_some(BucketedWindowState { buckets })
    }

    fn oldest(&self, _entries: &[Entry], now: Timestamp) -> Timestamp {
        let longest_us = self.windows().iter().map(|window| window.span_us).max();
        match now.as_us().checked_sub(longest_us.unwrap_or_default()) {
            None => Timestamp::ZERO,
            Some(us) => aligned(Timestamp::saturating_from_us(us), self.bucket_us())
                .saturating_add_us(self.bucket_us()),
        }
    }

    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
        together(entries, at)
    }

    fn displaces(&self) -> bool {
        true
    }
}

impl NativeState for WindowLog {
    const NATIVE: Native = Native { name: "window-log", storage: EntryStorage::List };

    fn entries(&self, state: &WindowLogState) -> Vec<Entry> {
        let entries = state.entries.iter().cloned();
        entries.map(|charged| Entry { since: state.start, charged }).collect()
    }

    fn state(&self, entries: &[Entry]) -> Option<WindowLogState> {
        let (start, window) = last_window(entries, self.window_us())?;
        let entries = window.into_iter().map(|entry| entry.charged.clone()).collect();
        Some(WindowLogState { start, entries })
    }

    /// Clients that begin a window concurrently may disagree on its start.
    fn is_same(&self, a: Timestamp, b: Timestamp) -> bool {
        let apart_us = a.saturating_us_since(b).max(b.saturating_us_since(a));
        apart_us < self.window_us()
    }

    fn oldest(&self, entries: &[Entry], now: Timestamp) -> Timestamp {
        oldest_window(entries, self.window_us(), now)
    }

    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
        up_to(entries, self.window_us(), at)
    }
}

impl NativeState for SlidingLog {
    const NATIVE: Native = Native { name: "sliding-log", storage: EntryStorage::SortedSet };

    fn entries(&self, state: &SlidingLogState) -> Vec<Entry> {
        state.entries.iter().map(|log| Entry::plain(log.timestamp, log.cost)).collect()
    }

    /// One log entry per moment, for all its requests.
    fn state(&self, entries: &[Entry]) -> Option<SlidingLogState> {
        let moments = entries.chunk_by(|a, b| a.since == b.since);
        let entries: Vec<_> = moments
            .map(|moment| LogEntry { timestamp: moment[0].since, cost: sum(moment) })
            .collect();
        (!entries.is_empty()).then_some(SlidingLogState { entries })
    }

    fn oldest(&self, _entries: &[Entry], now: Timestamp) -> Timestamp {
        let end_us = now.as_us().checked_sub(self.window_us());
        end_us.map_or(Timestamp::ZERO, |us| Timestamp::saturating_from_us(us + 1))
    }

    fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
        together(entries, at)
    }

    fn displaces(&self) -> bool {
        true
    }
}

/// Implements it for the built-in algorithms that a transaction can decide.
macro_rules! for_policy {
    ($($variant:ident of $state:ident),+) => {
        impl MultiProgram for Policy {
            fn native(&self) -> Option<Native> {
                match self {
                    $( Self::$variant(algorithm) => algorithm.native(), )+
                    _ => None,
                }
            }

            fn entries(&self, state: &PolicyState) -> Vec<Entry> {
                match (self, state) {
                    $( (Self::$variant(algorithm), PolicyState::$state(state)) => {
                        MultiProgram::entries(algorithm, state)
                    } )+
                    _ => Vec::new(),
                }
            }

            fn state(&self, entries: &[Entry]) -> Option<PolicyState> {
                match self {
                    $( Self::$variant(algorithm) => {
                        MultiProgram::state(algorithm, entries).map(PolicyState::$state)
                    } )+
                    _ => None,
                }
            }

            fn is_same(&self, a: Timestamp, b: Timestamp) -> bool {
                match self {
                    $( Self::$variant(algorithm) => MultiProgram::is_same(algorithm, a, b), )+
                    _ => false,
                }
            }

            fn oldest(&self, entries: &[Entry], now: Timestamp) -> Timestamp {
                match self {
                    $( Self::$variant(algorithm) => MultiProgram::oldest(algorithm, entries, now), )+
                    _ => Timestamp::ZERO,
                }
            }

            fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
                match self {
                    $( Self::$variant(algorithm) => MultiProgram::as_of(algorithm, entries, at), )+
                    _ => entries.to_vec(),
                }
            }

            fn displaces(&self) -> bool {
                match self {
                    $( Self::$variant(algorithm) => MultiProgram::displaces(algorithm), )+
                    _ => false,
                }
            }
        }
    };
}

for_policy!(
    FixedWindowAttempts of FixedWindow,
    FirstRequestWindowAttempts of FirstRequestWindow,
    WindowLogAttempts of WindowLog,
    BucketedWindowAttempts of BucketedWindow,
    SlidingLogAttempts of SlidingLog
);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Timestamp {
        Timestamp::saturating_from_us(us)
    }

    fn entries(pairs: &[(u64, u64)]) -> Vec<Entry> {
        pairs.iter().map(|(us, cost)| Entry::plain(at(*us), *cost)).collect()
    }

    #[test]
    fn concurrent_first_charges_share_a_window_in_any_order() {
        let rate = "9/10us".parse().expect("a rate");
        let log = WindowLog::new(rate).expect("a limit");
        // The second charge begins the window and the third counts in the next: 12 is not within 2 to
        // 12.
        let state = NativeState::state(&log, &entries(&[(3, 1), (2, 2), (12, 4)]));
        let state = state.expect("a state");
        assert_eq!((state.start, state.entries.len()), (at(12), 1));
        // A charge of the window before that arrives late.
        let late = NativeState::state(&log, &entries(&[(2, 1), (12, 4), (2, 2)]));
        assert_eq!(late.expect("a state"), state);
    }
}
