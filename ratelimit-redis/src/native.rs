//! [`MultiProgram`]: what an algorithm needs to be decided by native commands in a transaction.
//!
//! Every state is told as entries: so much was charged at such a time. A window is one entry, a
//! bucketed window one a bucket, a log one a request. A charge is then always the same: more cost on
//! the newest entry, or a new one after it; and the oldest go.

use ratelimit_core::{
    Algorithm, Attempts, Bucket, BucketedWindow, BucketedWindowState, ChargesAttempts,
    FirstRequestState, FirstRequestWindow, FixedWindow, FixedWindowState, LogEntry, Policy,
    PolicyState, SlidingLog, SlidingLogState, WindowEntry, WindowLog, WindowLogState,
};

/// An algorithm that a transaction can decide, which charges first and looks afterwards: one that
/// counts [attempts](Attempts).
pub trait MultiProgram: Algorithm {
    /// Where its entries are kept; `None` if no transaction can decide it.
    fn native(&self) -> Option<Native>;

    /// A state as entries, oldest first, at least one.
    fn entries(&self, state: &Self::State) -> Vec<WindowEntry>;

    /// The state that these entries are, oldest first; `None` if there are none.
    fn state(&self, entries: &[WindowEntry]) -> Option<Self::State>;
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
    fn entries(&self, state: &Self::State) -> Vec<WindowEntry>;

    /// As [`MultiProgram::state`].
    fn state(&self, entries: &[WindowEntry]) -> Option<Self::State>;
}

impl<A: NativeState> MultiProgram for Attempts<A> {
    fn native(&self) -> Option<Native> {
        Some(A::NATIVE)
    }

    fn entries(&self, state: &A::State) -> Vec<WindowEntry> {
        self.algorithm().entries(state)
    }

    fn state(&self, entries: &[WindowEntry]) -> Option<A::State> {
        self.algorithm().state(entries)
    }
}

fn entry(tick: ratelimit_core::Tick, cost: u64) -> WindowEntry {
    WindowEntry { tick, cost, metadata: [].into() }
}

fn sum(entries: &[WindowEntry]) -> u64 {
    entries.iter().map(|entry| entry.cost).fold(0, u64::saturating_add)
}

/// The entries of the window that began last, if each begins with the first entry that the one before
/// does not reach. More than one stand in a hash only while callers that began windows at the same
/// time have not agreed yet: then all of them count.
fn last_window(entries: &[WindowEntry], window_us: u64) -> &[WindowEntry] {
    let mut begin = 0;
    for (place, entry) in entries.iter().enumerate() {
        if entry.tick.as_us() >= entries[begin].tick.as_us() + window_us {
            begin = place;
        }
    }
    &entries[begin..]
}

impl NativeState for FixedWindow {
    const NATIVE: Native = Native { name: "fixed-window", kept_in: KeptIn::Counters };

    fn entries(&self, state: &FixedWindowState) -> Vec<WindowEntry> {
        vec![entry(state.start, state.count)]
    }

    /// All that was counted in the latest window, by the alignment that holds now.
    fn state(&self, entries: &[WindowEntry]) -> Option<FixedWindowState> {
        let start = entries.last()?.tick;
        let window = |entry: &WindowEntry| entry.tick.as_us() / self.window_us();
        let first = entries.partition_point(|e| window(e) < start.as_us() / self.window_us());
        Some(FixedWindowState { start, count: sum(&entries[first..]) })
    }
}

impl NativeState for FirstRequestWindow {
    const NATIVE: Native = Native { name: "first-request-window", kept_in: KeptIn::Counters };

    fn entries(&self, state: &FirstRequestState) -> Vec<WindowEntry> {
        vec![entry(state.start, state.count)]
    }

    fn state(&self, entries: &[WindowEntry]) -> Option<FirstRequestState> {
        let window = last_window(entries, self.window_us());
        Some(FirstRequestState { start: window.first()?.tick, count: sum(window) })
    }
}

impl NativeState for BucketedWindow {
    const NATIVE: Native = Native { name: "bucketed-window", kept_in: KeptIn::Counters };

    fn entries(&self, state: &BucketedWindowState) -> Vec<WindowEntry> {
        state.buckets.iter().map(|bucket| entry(bucket.start, bucket.count)).collect()
    }

    fn state(&self, entries: &[WindowEntry]) -> Option<BucketedWindowState> {
        let bucket = |entry: &WindowEntry| Bucket { start: entry.tick, count: entry.cost };
        let buckets: Vec<_> = entries.iter().map(bucket).collect();
        (!buckets.is_empty()).then_some(BucketedWindowState { buckets })
    }
}

impl NativeState for WindowLog {
    const NATIVE: Native = Native { name: "window-log", kept_in: KeptIn::List };

    fn entries(&self, state: &WindowLogState) -> Vec<WindowEntry> {
        state.entries.clone()
    }

    fn state(&self, entries: &[WindowEntry]) -> Option<WindowLogState> {
        let window = last_window(entries, self.window_us());
        Some(WindowLogState { start: window.first()?.tick, entries: window.to_vec() })
    }
}

impl NativeState for SlidingLog {
    const NATIVE: Native = Native { name: "sliding-log", kept_in: KeptIn::SortedSet };

    fn entries(&self, state: &SlidingLogState) -> Vec<WindowEntry> {
        state.entries.iter().map(|log| entry(log.tick, log.cost)).collect()
    }

    /// One entry a moment, of however many requests.
    fn state(&self, entries: &[WindowEntry]) -> Option<SlidingLogState> {
        let moments = entries.chunk_by(|a, b| a.tick == b.tick);
        let entries: Vec<_> =
            moments.map(|moment| LogEntry { tick: moment[0].tick, cost: sum(moment) }).collect();
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

            fn entries(&self, state: &PolicyState) -> Vec<WindowEntry> {
                match (self, state) {
                    $( (Self::$variant(algorithm), PolicyState::$state(state)) => {
                        MultiProgram::entries(algorithm, state)
                    } )+
                    _ => Vec::new(),
                }
            }

            fn state(&self, entries: &[WindowEntry]) -> Option<PolicyState> {
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
