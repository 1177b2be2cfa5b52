//! [`MultiProgram`]: what an algorithm needs to be decided by native commands in a transaction.
//!
//! Every state is a list of entries: a charge, and the time from which it counts. A window is one
//! entry, a log one per request. A charge adds cost to the newest entry or appends one after it.

use ratelimit_core::algorithm::LoggedRequest;
use ratelimit_core::{Algorithm, Timestamp};

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
    fn state(&self, entries: &[NativeCharge]) -> Option<Self::State>;

    /// The newest entry of a state, with all that counts from the same time. In a list, the last
    /// charge.
    fn newest(&self, state: &Self::State) -> Option<NativeCharge>;
}

/// One charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NativeCharge {
    /// The start of the window in which it counts; in a sliding log, the time of the charge.
    pub since: Timestamp,
    /// The time of the charge, its cost and its metadata.
    pub charged: LoggedRequest,
}

/// How entries are stored on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Native {
    /// The data type.
    pub storage: Storage,
    /// For how long an entry counts at most, in microseconds, at least 1.
    pub window_us: u64,
}

/// The data type that stores entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Storage {
    /// A hash of counters, one per window: HINCRBY and PEXPIRE.
    Counters,
    /// A list of the charges in windows: RPUSH and PEXPIRE.
    List,
    /// A sorted set of charges, each of which counts until it is a window old: ZADD and PEXPIRE. It
    /// keeps the newest, as many as the limit's capacity.
    SortedSet,
}

impl Storage {
    pub(crate) const ALL: [Self; 3] = [Self::Counters, Self::List, Self::SortedSet];

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
    pub(crate) fn oldest(self, entries: &[NativeCharge], at: Timestamp) -> Timestamp {
        let counts = |since: &Timestamp| since.as_us() + self.window_us > at.as_us();
        let since = match self.storage {
            Storage::Counters | Storage::List => begun(entries, self.window_us),
            Storage::SortedSet => entries.iter().map(|entry| entry.since).collect(),
        };
        since.into_iter().find(counts).unwrap_or(Timestamp::MAX)
    }
}

impl NativeCharge {
    /// A charge that counts from `since`, without metadata.
    pub(crate) fn plain(since: Timestamp, cost: u64) -> Self {
        Self { since, charged: LoggedRequest { timestamp: since, cost, metadata: [].into() } }
    }
}

/// What these entries have charged.
pub(crate) fn sum<'e>(entries: impl IntoIterator<Item = &'e NativeCharge>) -> u64 {
    entries.into_iter().map(|entry| entry.charged.cost).fold(0, u64::saturating_add)
}

/// The start of each window, if each begins with the first entry that the one before does not
/// cover. Clients that begin a window concurrently may disagree on its start; all their entries
/// count in it.
fn begun(entries: &[NativeCharge], window_us: u64) -> Vec<Timestamp> {
    let mut since: Vec<_> = entries.iter().map(|entry| entry.since).collect();
    since.sort_unstable();
    since.dedup_by(|next, begun| next.as_us() < begun.as_us() + window_us);
    since
}

/// The start of the last window, and its entries.
pub(crate) fn last_window(
    entries: &[NativeCharge],
    window_us: u64,
) -> Option<(Timestamp, Vec<&NativeCharge>)> {
    let start = *begun(entries, window_us).last()?;
    Some((start, entries.iter().filter(|entry| entry.since >= start).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::WindowLog;

    fn at(us: u64) -> Timestamp {
        Timestamp::saturating_from_us(us)
    }

    fn entries(pairs: &[(u64, u64)]) -> Vec<NativeCharge> {
        pairs.iter().map(|(us, cost)| NativeCharge::plain(at(*us), *cost)).collect()
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
        let windows = Native { storage: Storage::Counters, window_us: 10 };
        let sliding = Native { storage: Storage::SortedSet, window_us: 10 };
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
