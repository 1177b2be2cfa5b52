//! [`MultiProgram`]: what an algorithm needs to be decided by native commands in a transaction.
//!
//! Every state is a list of entries: a charge, and the time from which it counts. A window is one entry,
//! a bucketed window one per bucket, a log one per request. A charge always adds cost to the newest
//! entry or appends one after it, and drops the oldest.

use ratelimit_core::algorithm::{
    BucketCount, BucketedWindowState, FirstRequestState, FixedWindowState, LogEntry, PolicyState,
    SlidingLogState, WindowEntry, WindowLogState,
};
use ratelimit_core::{
    Algorithm, Attempts, BucketedWindow, FirstRequestWindow, FixedWindow, Policy, SlidingLog,
    Timestamp, WindowLog,
};

/// An algorithm that a transaction can decide. A transaction charges whatever it reads, so the
/// algorithm has to count [attempts](Attempts).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be decided by native commands in MULTI",
    label = "a transaction cannot branch, and so charges every attempt",
    note = "count attempts: wrap `FixedWindow`, `FirstRequestWindow`, `WindowLog`, `BucketedWindow` or `SlidingLog` in `Attempts`",
    note = "or build the store without `.multi()`; an algorithm of your own runs with `.cas()`"
)]
pub trait MultiProgram: Algorithm {
    /// Where its entries are stored; `None` if no transaction can decide it.
    fn native(&self) -> Option<Native>;

    /// The entries of a state, oldest first, at least one.
    fn entries(&self, state: &Self::State) -> Vec<Entry>;

    /// The state of these entries, oldest first; `None` if there are none.
    fn state(&self, entries: &[Entry]) -> Option<Self::State>;
}

/// One charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The start of the window or bucket in which it counts; in a sliding log, the time of the charge.
    pub since: Timestamp,
    /// The time of the charge, its cost and its metadata.
    pub charged: WindowEntry,
}

/// Where entries are stored on the server, and which of them count together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Native {
    /// The data type.
    pub storage: EntryStorage,
    /// The windows in which entries count.
    pub windows: Windows,
}

/// The windows in which entries count. Lengths are in microseconds, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// Windows of this length, aligned to the epoch.
    Aligned {
        /// The length.
        window_us: u64,
    },
    /// A window of this length begins with the first entry that the one before does not cover. Clients that begin a
    /// window concurrently may disagree on its start.
    SinceFirst {
        /// The length.
        window_us: u64,
    },
    /// The last so many microseconds. An attempt that does not fit displaces older entries.
    Sliding {
        /// The length.
        window_us: u64,
        /// The length of a bucket, whose charges share an entry; 1 in a log.
        bucket_us: u64,
    },
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

impl EntryStorage {
    /// The name in keys.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Counters => "counters",
            Self::List => "list",
            Self::SortedSet => "sorted-set",
        }
    }
}

impl Windows {
    /// Whether charges that count from these two times share a window.
    pub(crate) fn is_same(&self, a: Timestamp, b: Timestamp) -> bool {
        match *self {
            Self::Aligned { window_us } => aligned(a, window_us) == aligned(b, window_us),
            Self::SinceFirst { window_us } => {
                a.saturating_us_since(b).max(b.saturating_us_since(a)) < window_us
            }
            Self::Sliding { .. } => a == b,
        }
    }

    /// The time from which the oldest of these entries counts that still counts at `now`.
    pub(crate) fn oldest(&self, entries: &[Entry], now: Timestamp) -> Timestamp {
        match *self {
            Self::Aligned { window_us } => aligned(now, window_us),
            Self::SinceFirst { window_us } => {
                let lasts = |start: &Timestamp| start.as_us() + window_us > now.as_us();
                begun(entries, window_us).into_iter().find(lasts).unwrap_or(Timestamp::MAX)
            }
            Self::Sliding { window_us, bucket_us } => match now.as_us().checked_sub(window_us) {
                None => Timestamp::ZERO,
                Some(us) => aligned(Timestamp::saturating_from_us(us), bucket_us)
                    .saturating_add_us(bucket_us),
            },
        }
    }

    /// The entries as a charge sees them that counts from `at` but arrives after charges which count from a later time.
    /// Later charges that can share its window count as if they had come with it.
    pub(crate) fn as_of(&self, entries: &[Entry], at: Timestamp) -> Vec<Entry> {
        let next = match *self {
            Self::Sliding { .. } => return together(entries, at),
            Self::Aligned { window_us } => {
                Some(aligned(at, window_us).saturating_add_us(window_us))
            }
            Self::SinceFirst { window_us } => {
                let later = |start: &Timestamp| start.as_us() >= at.as_us() + window_us;
                begun(entries, window_us).into_iter().find(later)
            }
        };
        let begins_before = |entry: &&Entry| next.is_none_or(|next| entry.since < next);
        entries.iter().filter(begins_before).cloned().collect()
    }

    /// Whether an attempt that does not fit displaces older entries.
    pub(crate) fn displaces(&self) -> bool {
        matches!(self, Self::Sliding { .. })
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

impl MultiProgram for Attempts<FixedWindow> {
    fn native(&self) -> Option<Native> {
        let windows = Windows::Aligned { window_us: self.algorithm().window_us() };
        Some(Native { storage: EntryStorage::Counters, windows })
    }

    fn entries(&self, state: &FixedWindowState) -> Vec<Entry> {
        vec![Entry::plain(state.start, state.count)]
    }

    /// The sum of the latest window.
    fn state(&self, entries: &[Entry]) -> Option<FixedWindowState> {
        let start = entries.last()?.since;
        let first = entries.partition_point(|entry| entry.since < start);
        let ends_us = start.as_us() + self.algorithm().window_us();
        Some(FixedWindowState { start, count: sum(&entries[first..]), ends_us })
    }
}

/// The start of the window or bucket of this length that contains a time.
fn aligned(timestamp: Timestamp, length_us: u64) -> Timestamp {
    Timestamp::saturating_from_us(timestamp.as_us() - timestamp.as_us() % length_us.max(1))
}

impl MultiProgram for Attempts<FirstRequestWindow> {
    fn native(&self) -> Option<Native> {
        let windows = Windows::SinceFirst { window_us: self.algorithm().window_us() };
        Some(Native { storage: EntryStorage::Counters, windows })
    }

    fn entries(&self, state: &FirstRequestState) -> Vec<Entry> {
        vec![Entry::plain(state.start, state.count)]
    }

    fn state(&self, entries: &[Entry]) -> Option<FirstRequestState> {
        let (start, window) = last_window(entries, self.algorithm().window_us())?;
        let ends_us = start.as_us() + self.algorithm().window_us();
        Some(FirstRequestState { start, count: sum(window), ends_us })
    }
}

impl MultiProgram for Attempts<BucketedWindow> {
    fn native(&self) -> Option<Native> {
        let algorithm = self.algorithm();
        let window_us =
            algorithm.windows().iter().map(|window| window.span_us).max().unwrap_or_default();
        let windows = Windows::Sliding { window_us, bucket_us: algorithm.bucket_us() };
        Some(Native { storage: EntryStorage::Counters, windows })
    }

    fn entries(&self, state: &BucketedWindowState) -> Vec<Entry> {
        state.buckets.iter().map(|bucket| Entry::plain(bucket.start, bucket.count)).collect()
    }

    fn state(&self, entries: &[Entry]) -> Option<BucketedWindowState> {
        let bucket = |entry: &Entry| BucketCount { start: entry.since, count: entry.charged.cost };
        let buckets: Vec<_> = entries.iter().map(bucket).collect();
        (!buckets.is_empty()).then_some(BucketedWindowState { buckets })
    }
}

impl MultiProgram for Attempts<WindowLog> {
    fn native(&self) -> Option<Native> {
        let windows = Windows::SinceFirst { window_us: self.algorithm().window_us() };
        Some(Native { storage: EntryStorage::List, windows })
    }

    fn entries(&self, state: &WindowLogState) -> Vec<Entry> {
        let entries = state.entries.iter().cloned();
        entries.map(|charged| Entry { since: state.start, charged }).collect()
    }

    fn state(&self, entries: &[Entry]) -> Option<WindowLogState> {
        let (start, window) = last_window(entries, self.algorithm().window_us())?;
        let entries = window.into_iter().map(|entry| entry.charged.clone()).collect();
        Some(WindowLogState { start, entries })
    }
}

impl MultiProgram for Attempts<SlidingLog> {
    fn native(&self) -> Option<Native> {
        let windows = Windows::Sliding { window_us: self.algorithm().window_us(), bucket_us: 1 };
        Some(Native { storage: EntryStorage::SortedSet, windows })
    }

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
        let log = Attempts::new(WindowLog::new(rate).expect("a limit"));
        // The second charge begins the window and the third counts in the next: 12 is not within 2 to
        // 12.
        let state = log.state(&entries(&[(3, 1), (2, 2), (12, 4)])).expect("a state");
        assert_eq!((state.start, state.entries.len()), (at(12), 1));
        // A charge of the window before that arrives late.
        let late = log.state(&entries(&[(2, 1), (12, 4), (2, 2)]));
        assert_eq!(late.expect("a state"), state);
    }

    #[test]
    fn an_entry_counts_as_long_as_its_window_lasts() {
        let first = Windows::SinceFirst { window_us: 10 };
        let sliding = |bucket_us| Windows::Sliding { window_us: 10, bucket_us };
        for (windows, now, oldest) in [
            (Windows::Aligned { window_us: 10 }, 25, 20),
            (first, 12, 3),
            (first, 13, 14),
            (first, 24, Timestamp::MAX.as_us()),
            (sliding(1), 25, 16),
            (sliding(5), 25, 20),
            (sliding(5), 9, 0),
        ] {
            let found = windows.oldest(&entries(&[(3, 1), (5, 1), (14, 1)]), at(now));
            assert_eq!(found, at(oldest), "{windows:?} at {now}");
        }
    }
}
