//! The programs of the built-in algorithms.

use ratelimit_core::algorithm::{
    BucketCount, BucketedWindowState, ConcurrencyState, FirstRequestState, FixedWindowState,
    GcraState, LogEntry, MAX_INTEGER, Refill, SlidingCounterState, SlidingLogState, WindowEntry,
    WindowLogState,
};
use ratelimit_core::{
    Algorithm, BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, SlidingCounter,
    SlidingLog, Timestamp, WindowLog,
};

use super::{Keeps, LuaProgram, MAX_PARAMETERS, Program, Stored, Twin};
use crate::codec::{Numbers, number};

static GCRA: Program = Program::of_numbers(
    "gcra",
    &["tat_us", "surplus", "timestamp"],
    &["tick_units", "tick_us", "most"],
    include_str!("../lua/gcra.lua"),
);
static FIXED_WINDOW: Program = Program::of_numbers(
    "fixed-window",
    &["start", "count", "ends_us"],
    &["window_us", "most"],
    include_str!("../lua/fixed_window.lua"),
);
static FIRST_REQUEST_WINDOW: Program = Program::of_numbers(
    "first-request-window",
    &["start", "count", "ends_us"],
    &["window_us"],
    include_str!("../lua/first_request_window.lua"),
);
static SLIDING_COUNTER: Program = Program::of_numbers(
    "sliding-counter",
    &["start", "previous", "current"],
    &["window_us"],
    include_str!("../lua/sliding_counter.lua"),
);
static WINDOW_LOG: Program =
    Program::of_entries("window-log", include_str!("../lua/window_log.lua"), Keeps::List);
static BUCKETED_WINDOW: Program = Program::of_entries(
    "bucketed-window",
    include_str!("../lua/bucketed_window.lua"),
    Keeps::Numbers,
);
static SLIDING_LOG: Program =
    Program::of_entries("sliding-log", include_str!("../lua/sliding_log.lua"), Keeps::SortedSet);
static CONCURRENCY: Program =
    Program::of_entries("concurrency", include_str!("../lua/concurrency.lua"), Keeps::Numbers);

/// All built-in programs.
pub(crate) static BUILT_IN: [&Program; 8] = [
    &GCRA,
    &FIXED_WINDOW,
    &FIRST_REQUEST_WINDOW,
    &WINDOW_LOG,
    &BUCKETED_WINDOW,
    &SLIDING_COUNTER,
    &SLIDING_LOG,
    &CONCURRENCY,
];

/// The value that the only twin stored.
fn only(stored: &[Option<Stored>]) -> Option<&Stored> {
    match stored {
        [stored] => stored.as_ref(),
        _ => None,
    }
}

/// The state whose numbers the only twin stored, if it is this program.
fn state_of<S: Numbers>(stored: &[Option<Stored>], program: &Program) -> Option<S> {
    S::of(only(stored)?.numbers(program)?)
}

impl LuaProgram for Gcra {
    fn twins(&self) -> Vec<Twin> {
        let Refill { token_units, tick_units, tick_us, .. } = *self.refill();
        let parameters = [tick_units, tick_us, self.refill().most_units()];
        vec![Twin::new(&GCRA, self.capacity(), parameters).in_units(token_units)]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<GcraState> {
        state_of(stored, &GCRA)
    }
}

impl LuaProgram for FixedWindow {
    fn twins(&self) -> Vec<Twin> {
        let most = self.capacity() + self.debt();
        vec![Twin::new(&FIXED_WINDOW, self.capacity(), [self.window_us(), most])]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<FixedWindowState> {
        state_of(stored, &FIXED_WINDOW)
    }
}

impl LuaProgram for FirstRequestWindow {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(&FIRST_REQUEST_WINDOW, self.capacity(), [self.window_us()])]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<FirstRequestState> {
        state_of(stored, &FIRST_REQUEST_WINDOW)
    }
}

impl LuaProgram for WindowLog {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(&WINDOW_LOG, self.capacity(), [self.capacity(), self.window_us()])]
    }

    /// A script answers the window's start and its total, and no single entries.
    fn decode(&self, stored: &[Option<Stored>]) -> Option<WindowLogState> {
        if let Some([start, total]) = only(stored)?.numbers(&WINDOW_LOG) {
            let start = Timestamp::from_us(*start)?;
            let all = WindowEntry { timestamp: start, cost: *total, metadata: [].into() };
            return Some(WindowLogState { start, entries: vec![all] });
        }
        let Stored::List(elements) = only(stored)? else { return None };
        let mut newest_start = None;
        let entries = elements.iter().map(|element| {
            let (entry, start) = window_entry(element)?;
            newest_start = Some(start);
            Some(entry)
        });
        let entries = entries.collect::<Option<_>>()?;
        Some(WindowLogState { start: newest_start?, entries })
    }
}

/// Parses an element and the start of its window: `TIMESTAMP COST TOTAL START METADATA`.
fn window_entry(element: &[u8]) -> Option<(WindowEntry, Timestamp)> {
    let mut parts = element.splitn(5, |byte| *byte == b' ');
    let mut number = || number(parts.next()?);
    let (timestamp, cost, _total, start) = (number()?, number()?, number()?, number()?);
    let metadata = parts.next()?.into();
    Some((
        WindowEntry { timestamp: Timestamp::from_us(timestamp)?, cost, metadata },
        Timestamp::from_us(start)?,
    ))
}

impl LuaProgram for BucketedWindow {
    fn twins(&self) -> Vec<Twin> {
        let mut numbers = [0; MAX_PARAMETERS];
        numbers[0] = self.bucket_us();
        for (place, window) in numbers[1..].chunks_exact_mut(2).zip(self.windows()) {
            place.copy_from_slice(&[window.limit, window.span_us]);
        }
        vec![Twin::new(&BUCKETED_WINDOW, self.capacity(), numbers)]
    }

    /// Decodes the total before all buckets, and per bucket its start and the total including it.
    fn decode(&self, stored: &[Option<Stored>]) -> Option<BucketedWindowState> {
        let (before, pairs) = only(stored)?.numbers(&BUCKETED_WINDOW)?.split_first()?;
        let (mut before, mut buckets) = (*before, Vec::<BucketCount>::of(pairs)?);
        for BucketCount { count, .. } in &mut buckets {
            // Totals wrap around at 2^52.
            let total = *count;
            *count = total.wrapping_sub(before) & MAX_INTEGER;
            before = total;
        }
        Some(BucketedWindowState { buckets })
    }
}

impl LuaProgram for SlidingCounter {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(&SLIDING_COUNTER, self.capacity(), [self.window_us()])]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<SlidingCounterState> {
        state_of(stored, &SLIDING_COUNTER)
    }
}

impl LuaProgram for SlidingLog {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(&SLIDING_LOG, self.capacity(), [self.capacity(), self.window_us()])]
    }

    /// Leaves out the entries that were already past when the newest was made: the script removes
    /// only a bounded number at a time. A script answers pairs, and only the entries that the step
    /// needs.
    fn decode(&self, stored: &[Option<Stored>]) -> Option<SlidingLogState> {
        let Stored::SortedSet(members) = only(stored)? else {
            return state_of(stored, &SLIDING_LOG);
        };
        let newest = members.last()?.1;
        let entry = |(member, score): &(String, u64)| {
            let (cost, _total) = member.split_once(' ')?;
            Some(LogEntry { timestamp: Timestamp::from_us(*score)?, cost: cost.parse().ok()? })
        };
        let live = |(_, score): &&(String, u64)| score.saturating_add(self.window_us()) > newest;
        let entries = members.iter().filter(live).map(entry).collect::<Option<_>>()?;
        Some(SlidingLogState { entries })
    }
}

impl LuaProgram for Concurrency {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(&CONCURRENCY, self.capacity(), [self.capacity(), self.lease_us()])]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<ConcurrencyState> {
        state_of(stored, &CONCURRENCY)
    }
}
