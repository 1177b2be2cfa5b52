//! [`MultiProgram`]: what an algorithm needs to be decided by native commands in a transaction.
//!
//! Every state is told as entries: so much was charged, and counts from such a time on. A window is one
//! entry, a bucketed window one a bucket, a log one a request. A charge is then always the same: more
//! cost on the newest entry, or a new one after it; and the oldest go.

use ratelimit_core::{
    Algorithm, Attempts, Bucket, BucketedWindow, BucketedWindowState, ChargesAttempts,
    FirstRequestState, FirstRequestWindow, FixedWindow, FixedWindowState, LogEntry, Policy,
    PolicyState, SlidingLog, SlidingLogState, Tick, WindowEntry, WindowLog, WindowLogState,
};

/// An algorithm that a transaction can decide, which charges first and looks afterwards: one that
/// counts [attempts](Attempts).
pub trait MultiProgram: Algorithm {
    /// Where its entries are kept; `None` if no transaction can decide it.
    fn native(&self) -> Option<Native>;

    /// A state as entries, oldest first, at least one.
    fn entries(&self, state: &Self::State) -> Vec<Entry>;

    /// The state that these entries are, oldest first; `None` if there are none.
    fn state(&self, entries: &[Entry]) -> Option<Self::State>;

    /// Whether what counts from these two times on counts in the same window.
    fn is_same(&self, a: Tick, b: Tick) -> bool;
}

/// So much was charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// When the window or the bucket began that it counts in; in a sliding log, when it was charged.
    pub since: Tick,
    /// When it was charged, how much, and by whom.
    pub charged: WindowEntry,
}

/// Where entries are kept on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Native {
    /// The algorithm's name, which stands in the key: what another one wrote is not even met.
    pub name: &'static str,
    /// In what.
    pub kept_in: KeptIn,
}

/// What entries are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptIn {
    /// A hash of counters: HINCRBY and PEXPIRE.
    Counters,
    /// A list: RPUSH and RPUSHX.
    List,
    /// A sorted set: ZREMRANGEBYSCORE and ZADD.
    SortedSet,
}

/// What [`Attempts`] of an algorithm are kept as.
pub trait NativeState: ChargesAttempts {
    /// Where the entries are kept.
    const NATIVE: Native;

    /// As [`MultiProgram::entries`].
    fn entries(&self, state: &Self::State) -> Vec<Entry>;

    /// As [`MultiProgram::state`].
    fn state(&self, entries: &[Entry]) -> Option<Self::State>;

    /// As [`MultiProgram::is_same`].
    fn is_same(&self, a: Tick, b: Tick) -> bool {
        a == b
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

    fn is_same(&self, a: Tick, b: Tick) -> bool {
        self.algorithm().is_same(a, b)
    }
}

impl Entry {
    /// So much, counted from then on, by nobody in particular.
    pub(crate) fn plain(since: Tick, cost: u64) -> Self {
        Self { since, charged: WindowEntry { tick: since, cost, metadata: [].into() } }
    }
}

fn sum(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry.charged.cost).fold(0, u64::saturating_add)
}

/// The entries of the window that began last, if each begins with the first entry that the one before
/// does not reach. Callers that began it at the same time may have taken it to begin at different
/// times: all of that counts in it.
fn last_window(entries: &[Entry], window_us: u64) -> &[Entry] {
    let mut begin = 0;
    for (place, entry) in entries.iter().enumerate() {
        if entry.since.as_us() >= entries[begin].since.as_us() + window_us {
            begin = place;
        }
    }
    &entries[begin..]
}

impl NativeState for FixedWindow {
    const NATIVE: Native = Native { name: "fixed-window", kept_in: KeptIn::Counters };

    fn entries(&self, state: &FixedWindowState) -> Vec<Entry> {
        vec![Entry::plain(state.start, state.count)]
    }

    /// All that was counted in the latest window, by the alignment that holds now.
    fn state(&self, entries: &[Entry]) -> Option<FixedWindowState> {
        let latest = entries.last()?.since;
        let first = entries.partition_point(|entry| !self.is_same(entry.since, latest));
        Some(FixedWindowState { start: entries[first].since, count: sum(&entries[first..]) })
    }

    /// A window that was begun under another length stands where it began then.
    fn is_same(&self, a: Tick, b: Tick) -> bool {
        a.as_us() / self.window_us() == b.as_us() / self.window_us()
    }
}

impl NativeState for FirstRequestWindow {
    const NATIVE: Native = Native { name: "first-request-window", kept_in: KeptIn::Counters };

    fn entries(&self, state: &FirstRequestState) -> Vec<Entry> {
        vec![Entry::plain(state.start, state.count)]
    }

    fn state(&self, entries: &[Entry]) -> Option<FirstRequestState> {
        let window = last_window(entries, self.window_us());
        Some(FirstRequestState { start: window.first()?.since, count: sum(window) })
    }

    /// Those who begin a window at the same time need not agree on when it began.
    fn is_same(&self, a: Tick, b: Tick) -> bool {
        let apart_us = a.saturating_us_since(b).max(b.saturating_us_since(a));
        apart_us < self.window_us()
    }
}

impl NativeState for BucketedWindow {
    const NATIVE: Native = Native { name: "bucketed-window", kept_in: KeptIn::Counters };

    fn entries(&self, state: &BucketedWindowState) -> Vec<Entry> {
        state.buckets.iter().map(|bucket| Entry::plain(bucket.start, bucket.count)).collect()
    }

    fn state(&self, entries: &[Entry]) -> Option<BucketedWindowState> {
        let bucket = |entry: &Entry| Bucket { start: entry.since, count: entry.charged.cost };
        let buckets: Vec<_> = entries.iter().map(bucket).collect();
        (!buckets.is_empty()).then_some(BucketedWindowState { buckets })
    }
}

impl NativeState for WindowLog {
    const NATIVE: Native = Native { name: "window-log", kept_in: KeptIn::List };

    fn entries(&self, state: &WindowLogState) -> Vec<Entry> {
        let entries = state.entries.iter().cloned();
        entries.map(|charged| Entry { since: state.start, charged }).collect()
    }

    fn state(&self, entries: &[Entry]) -> Option<WindowLogState> {
        let window = last_window(entries, self.window_us());
        let start = window.iter().map(|entry| entry.since).min()?;
        let entries = window.iter().map(|entry| entry.charged.clone()).collect();
        Some(WindowLogState { start, entries })
    }

    /// Those who begin a window at the same time need not agree on when it began.
    fn is_same(&self, a: Tick, b: Tick) -> bool {
        let apart_us = a.saturating_us_since(b).max(b.saturating_us_since(a));
        apart_us < self.window_us()
    }
}

impl NativeState for SlidingLog {
    const NATIVE: Native = Native { name: "sliding-log", kept_in: KeptIn::SortedSet };

    fn entries(&self, state: &SlidingLogState) -> Vec<Entry> {
        state.entries.iter().map(|log| Entry::plain(log.tick, log.cost)).collect()
    }

    /// One entry a moment, of however many requests.
    fn state(&self, entries: &[Entry]) -> Option<SlidingLogState> {
        let moments = entries.chunk_by(|a, b| a.since == b.since);
        let entries: Vec<_> =
            moments.map(|moment| LogEntry { tick: moment[0].since, cost: sum(moment) }).collect();
        (!entries.is_empty()).then_some(SlidingLogState { entries })
    }
}

/// Those of the built-in algorithms that a transaction can decide.
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

            fn is_same(&self, a: Tick, b: Tick) -> bool {
                match self {
                    $( Self::$variant(algorithm) => MultiProgram::is_same(algorithm, a, b), )+
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
