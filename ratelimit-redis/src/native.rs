//! [`MultiProgram`]: what an algorithm needs to be decided by native commands in a transaction.
//!
//! Every state is a list of entries: a charge, and the time from which it counts. A window is one
//! entry, a log one per request. A charge adds cost to the newest entry or appends one after it.

use ratelimit_core::algorithm::{
    AnyState, FirstRequestState, FixedWindowState, LogEntry, SlidingLogState, WindowEntry,
    WindowLogState,
};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, FirstRequestWindow, FixedWindow, SlidingLog, Timestamp, WindowLog,
};

/// An algorithm that a transaction can decide. A transaction charges whatever it reads, so its
/// limits have to [count attempts](ratelimit_core::Limit::count_attempts).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be decided by native commands in MULTI",
    label = "a transaction cannot branch, and so charges every attempt",
    note = "count attempts by `FixedWindow`, `FirstRequestWindow`, `WindowLog` or `SlidingLog`",
    note = "or build the store without `.multi()`; an algorithm of your own runs with `.cas()`"
)]
pub trait MultiProgram: Algorithm {
    /// How its entries are stored; `None` if no transaction can decide it.
    fn native(&self) -> Option<Native>;

    /// The state of these entries, oldest first; `None` if there are none.
    fn state(&self, entries: &[Entry]) -> Option<Self::State>;

    /// The newest entry of a state, with all that counts from the same time. In a list, the last
    /// charge.
    fn newest(&self, state: &Self::State) -> Option<Entry>;
}

/// One charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The start of the window in which it counts; in a sliding log, the time of the charge.
    pub since: Timestamp,
    /// The time of the charge, its cost and its metadata.
    pub charged: WindowEntry,
}

/// How entries are stored on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Native {
    /// The data type.
    pub storage: EntryStorage,
    /// For how long an entry counts at most, in microseconds, at least 1.
    pub window_us: u64,
}

/// The data type that stores entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryStorage {
    /// A hash of counters, one per window: HINCRBY and PEXPIRE.
    Counters,
    /// A list of the charges in windows: RPUSH and PEXPIRE.
    List,
    /// A sorted set of charges, each of which counts until it is a window old: ZADD and PEXPIRE. It
    /// keeps the newest, as many as the limit's capacity.
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

impl Native {
    /// The time from which the oldest of these entries counts that still counts at `at`. Entries of
    /// a window count as long as its first one.
    pub(crate) fn oldest(self, entries: &[Entry], at: Timestamp) -> Timestamp {
        let counts = |since: &Timestamp| since.as_us() + self.window_us > at.as_us();
        let since = match self.storage {
            EntryStorage::Counters | EntryStorage::List => begun(entries, self.window_us),
            EntryStorage::SortedSet => entries.iter().map(|entry| entry.since).collect(),
        };
        since.into_iter().find(counts).unwrap_or(Timestamp::MAX)
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

/// The start of each window, if each begins with the first entry that the one before does not
/// cover. Clients that begin a window concurrently may disagree on its start; all their entries
/// count in it.
fn begun(entries: &[Entry], window_us: u64) -> Vec<Timestamp> {
    let mut since: Vec<_> = entries.iter().map(|entry| entry.since).collect();
    since.sort_unstable();
    since.dedup_by(|next, begun| next.as_us() < begun.as_us() + window_us);
    since
}

/// The start of the last window, and its entries.
fn last_window(entries: &[Entry], window_us: u64) -> Option<(Timestamp, Vec<&Entry>)> {
    let start = *begun(entries, window_us).last()?;
    Some((start, entries.iter().filter(|entry| entry.since >= start).collect()))
}

/// A count per window, of which no more counts than the limit.
macro_rules! counted {
    ($($algorithm:ident of $state:ident),+) => { $(
        impl MultiProgram for $algorithm {
            fn native(&self) -> Option<Native> {
                let window_us = self.window_us();
                Some(Native { storage: EntryStorage::Counters, window_us })
            }

            fn state(&self, entries: &[Entry]) -> Option<$state> {
                let window_us = self.window_us();
                let (start, window) = last_window(entries, window_us)?;
                let count = sum(window).min(self.capacity());
                Some($state { start, count, ends_us: start.as_us() + window_us })
            }

            fn newest(&self, state: &$state) -> Option<Entry> {
                Some(Entry::plain(state.start, state.count))
            }
        }
    )+ };
}

counted!(FixedWindow of FixedWindowState, FirstRequestWindow of FirstRequestState);

impl MultiProgram for WindowLog {
    fn native(&self) -> Option<Native> {
        Some(Native { storage: EntryStorage::List, window_us: self.window_us() })
    }

    fn state(&self, entries: &[Entry]) -> Option<WindowLogState> {
        let (start, window) = last_window(entries, self.window_us())?;
        let entries = window.into_iter().map(|entry| entry.charged.clone()).collect();
        Some(WindowLogState { start, entries })
    }

    fn newest(&self, state: &WindowLogState) -> Option<Entry> {
        Some(Entry { since: state.start, charged: state.entries.last()?.clone() })
    }
}

impl MultiProgram for SlidingLog {
    fn native(&self) -> Option<Native> {
        Some(Native { storage: EntryStorage::SortedSet, window_us: self.window_us() })
    }

    /// One log entry per moment, for all its requests. Where newer ones leave no room for an older
    /// one, it counts no more.
    fn state(&self, entries: &[Entry]) -> Option<SlidingLogState> {
        let mut room = self.capacity();
        let moments = entries.chunk_by(|a, b| a.since == b.since).rev();
        let kept = moments.map(|moment| {
            let cost = sum(moment).min(room);
            room -= cost;
            LogEntry { timestamp: moment[0].since, cost }
        });
        let mut entries: Vec<_> = kept.take_while(|kept| kept.cost > 0).collect();
        entries.reverse();
        (!entries.is_empty()).then_some(SlidingLogState { entries })
    }

    fn newest(&self, state: &SlidingLogState) -> Option<Entry> {
        state.entries.last().map(|newest| Entry::plain(newest.timestamp, newest.cost))
    }
}

/// Implements it for the built-in algorithms that a transaction can decide.
macro_rules! for_any_algorithm {
    ($($variant:ident),+) => {
        impl MultiProgram for AnyAlgorithm {
            fn native(&self) -> Option<Native> {
                match self { $( Self::$variant(algorithm) => algorithm.native(), )+ _ => None }
            }

            fn state(&self, entries: &[Entry]) -> Option<AnyState> {
                match self {
                    $( Self::$variant(it) => MultiProgram::state(it, entries).map(Into::into), )+
                    _ => None,
                }
            }

            fn newest(&self, state: &AnyState) -> Option<Entry> {
                match (self, state) {
                    $( (Self::$variant(it), AnyState::$variant(state)) => it.newest(state), )+
                    _ => None,
                }
            }
        }
    };
}

for_any_algorithm!(FixedWindow, FirstRequestWindow, WindowLog, SlidingLog);

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
        // The second charge begins the window and the third counts in the next: 12 is not within 2
        // to 12.
        let state = log.state(&entries(&[(3, 1), (2, 2), (12, 4)])).expect("a state");
        assert_eq!((state.start, state.entries.len()), (at(12), 1));
        // A charge of the window before that arrives late.
        let late = log.state(&entries(&[(2, 1), (12, 4), (2, 2)]));
        assert_eq!(late.expect("a state"), state);
    }

    #[test]
    fn an_entry_counts_as_long_as_its_window_lasts() {
        let windows = Native { storage: EntryStorage::Counters, window_us: 10 };
        let sliding = Native { storage: EntryStorage::SortedSet, window_us: 10 };
        for (native, now, oldest) in [
            (windows, 12, 3),
            (windows, 13, 14),
            (windows, 24, Timestamp::MAX.as_us()),
            (sliding, 12, 3),
            (sliding, 13, 5),
            (sliding, 15, 14),
        ] {
            let found = native.oldest(&entries(&[(3, 1), (5, 1), (14, 1)]), at(now));
            assert_eq!(found, at(oldest), "{native:?} at {now}");
        }
    }
}
