//! [`LuaProgram`]: what an algorithm needs to run on the server.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use ratelimit_core::{
    Algorithm, Bucket, BucketedWindow, BucketedWindowState, FirstRequestState, FirstRequestWindow,
    FixedWindow, FixedWindowState, Gcra, GcraState, LogEntry, Policy, PolicyState, Refill,
    SlidingCounter, SlidingCounterState, SlidingLog, SlidingLogState, Tick, TokenBucket,
    TokenBucketState,
};

/// An algorithm with a twin in Lua.
pub trait LuaProgram: Algorithm {
    /// The twin.
    fn program(&self) -> &'static Program;

    /// The numbers that the twin is given, in the order of its `parameters`.
    fn parameters(&self) -> Parameters;

    /// The state that is stored, or `None` if it is not one that this algorithm's twin writes.
    fn decode(&self, stored: &Stored) -> Option<Self::State>;
}

/// An algorithm's twin in Lua.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// What the algorithm is called in scripts and in what they store.
    pub name: &'static str,
    /// Its text, a chunk that returns the algorithm's table.
    pub source: &'static str,
    /// How its state is kept.
    pub keeps: Keeps,
}

/// How a state is kept on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// A few numbers, in a field of the hash that all limits of an identifier share.
    Numbers,
    /// A sorted set under a key of its own.
    SortedSet,
}

/// The most numbers that an algorithm has: a bucket and four windows.
const MAX_PARAMETERS: usize = 9;

/// An algorithm's numbers.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    numbers: [u64; MAX_PARAMETERS],
    count: usize,
}

impl Parameters {
    /// These numbers, each below 2^53.
    #[must_use]
    pub fn new<const N: usize>(given: [u64; N]) -> Self {
        const { assert!(N <= MAX_PARAMETERS, "more parameters than a program may have") };
        let mut numbers = [0; MAX_PARAMETERS];
        numbers[..N].copy_from_slice(&given);
        Self { numbers, count: N }
    }

    /// The numbers.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.numbers[..self.count]
    }
}

/// What was found on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Who wrote it, and its numbers.
    Numbers(String, Vec<u64>),
    /// A sorted set's members and scores, in order.
    SortedSet(Vec<(String, u64)>),
}

impl Stored {
    /// A field's text: a name and numbers.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let name = words.next()?.to_owned();
        let numbers = words.map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
        (!numbers.is_empty()).then_some(Self::Numbers(name, numbers))
    }

    /// The numbers, if they were written by this program and are so many.
    fn numbers<const N: usize>(&self, program: &Program) -> Option<[u64; N]> {
        match self {
            Self::Numbers(name, numbers) if name == program.name => {
                numbers.as_slice().try_into().ok()
            }
            _ => None,
        }
    }
}

macro_rules! program {
    ($name:literal, $file:literal, $keeps:ident) => {
        &Program { name: $name, source: include_str!(concat!("lua/", $file)), keeps: Keeps::$keeps }
    };
}

const GCRA: &Program = program!("gcra", "gcra.lua", Numbers);
const TOKEN_BUCKET: &Program = program!("token-bucket", "token_bucket.lua", Numbers);
const FIXED_WINDOW: &Program = program!("fixed-window", "fixed_window.lua", Numbers);
const FIRST_REQUEST_WINDOW: &Program =
    program!("first-request-window", "first_request_window.lua", Numbers);
const BUCKETED_WINDOW: &Program = program!("bucketed-window", "bucketed_window.lua", Numbers);
const SLIDING_COUNTER: &Program = program!("sliding-counter", "sliding_counter.lua", Numbers);
const SLIDING_LOG: &Program = program!("sliding-log", "sliding_log.lua", SortedSet);

fn refill_parameters(refill: &Refill) -> Parameters {
    let Refill { burst, token_units, tick_units, tick_us } = *refill;
    Parameters::new([burst, token_units, tick_units, tick_us])
}

impl LuaProgram for Gcra {
    fn program(&self) -> &'static Program {
        GCRA
    }

    fn parameters(&self) -> Parameters {
        refill_parameters(self.refill())
    }

    fn decode(&self, stored: &Stored) -> Option<GcraState> {
        let [tat_us, surplus, tick] = stored.numbers(GCRA)?;
        Some(GcraState { tat_us, surplus, tick: Tick::from_us(tick)? })
    }
}

impl LuaProgram for TokenBucket {
    fn program(&self) -> &'static Program {
        TOKEN_BUCKET
    }

    fn parameters(&self) -> Parameters {
        refill_parameters(self.refill())
    }

    fn decode(&self, stored: &Stored) -> Option<TokenBucketState> {
        let [tokens, remainder, tick, since_us] = stored.numbers(TOKEN_BUCKET)?;
        Some(TokenBucketState { tokens, remainder, tick: Tick::from_us(tick)?, since_us })
    }
}

impl LuaProgram for FixedWindow {
    fn program(&self) -> &'static Program {
        FIXED_WINDOW
    }

    fn parameters(&self) -> Parameters {
        Parameters::new([self.capacity(), self.window_us()])
    }

    fn decode(&self, stored: &Stored) -> Option<FixedWindowState> {
        let [start, count] = stored.numbers(FIXED_WINDOW)?;
        Some(FixedWindowState { start: Tick::from_us(start)?, count })
    }
}

impl LuaProgram for FirstRequestWindow {
    fn program(&self) -> &'static Program {
        FIRST_REQUEST_WINDOW
    }

    fn parameters(&self) -> Parameters {
        Parameters::new([self.capacity(), self.window_us()])
    }

    fn decode(&self, stored: &Stored) -> Option<FirstRequestState> {
        let [start, count] = stored.numbers(FIRST_REQUEST_WINDOW)?;
        Some(FirstRequestState { start: Tick::from_us(start)?, count })
    }
}

impl LuaProgram for BucketedWindow {
    fn program(&self) -> &'static Program {
        BUCKETED_WINDOW
    }

    fn parameters(&self) -> Parameters {
        let mut numbers = [0; MAX_PARAMETERS];
        numbers[0] = self.bucket_us();
        for (place, window) in numbers[1..].chunks_exact_mut(2).zip(self.windows()) {
            place.copy_from_slice(&[window.limit, window.span_us]);
        }
        Parameters::new(numbers)
    }

    fn decode(&self, stored: &Stored) -> Option<BucketedWindowState> {
        let Stored::Numbers(name, numbers) = stored else { return None };
        let pairs = numbers.chunks(2).map(|pair| match *pair {
            [start, count] => Some(Bucket { start: Tick::from_us(start)?, count }),
            _ => None,
        });
        let buckets = pairs.collect::<Option<_>>()?;
        (name == BUCKETED_WINDOW.name).then_some(BucketedWindowState { buckets })
    }
}

impl LuaProgram for SlidingCounter {
    fn program(&self) -> &'static Program {
        SLIDING_COUNTER
    }

    fn parameters(&self) -> Parameters {
        Parameters::new([self.capacity(), self.window_us()])
    }

    fn decode(&self, stored: &Stored) -> Option<SlidingCounterState> {
        let [start, previous, current] = stored.numbers(SLIDING_COUNTER)?;
        Some(SlidingCounterState { start: Tick::from_us(start)?, previous, current })
    }
}

impl LuaProgram for SlidingLog {
    fn program(&self) -> &'static Program {
        SLIDING_LOG
    }

    fn parameters(&self) -> Parameters {
        Parameters::new([self.capacity(), self.window_us()])
    }

    /// Without the entries that were already past when the newest was made: the script removes them
    /// a bounded number at a time.
    fn decode(&self, stored: &Stored) -> Option<SlidingLogState> {
        let Stored::SortedSet(members) = stored else { return None };
        let newest = members.last()?.1;
        let entry = |(member, score): &(String, u64)| {
            let (cost, _total) = member.split_once(' ')?;
            Some(LogEntry { tick: Tick::from_us(*score)?, cost: cost.parse().ok()? })
        };
        let live = |(_, score): &&(String, u64)| score.saturating_add(self.window_us()) > newest;
        let entries = members.iter().filter(live).map(entry).collect::<Option<_>>()?;
        Some(SlidingLogState { entries })
    }
}

macro_rules! for_policy {
    ($($variant:ident),+) => {
        impl LuaProgram for Policy {
            fn program(&self) -> &'static Program {
                match self {
                    $( Self::$variant(algorithm) => algorithm.program(), )+
                }
            }

            fn parameters(&self) -> Parameters {
                match self {
                    $( Self::$variant(algorithm) => algorithm.parameters(), )+
                }
            }

            fn decode(&self, stored: &Stored) -> Option<PolicyState> {
                match self {
                    $( Self::$variant(algorithm) => {
                        algorithm.decode(stored).map(PolicyState::$variant)
                    } )+
                }
            }
        }
    };
}

for_policy!(
    Gcra,
    TokenBucket,
    FixedWindow,
    FirstRequestWindow,
    BucketedWindow,
    SlidingCounter,
    SlidingLog
);

/// A script: the prelude, the algorithms of a batch, and the driver.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) sha: String,
}

/// The scripts made so far: one for every set of algorithms that a batch has mixed, and no more than
/// that, because a server keeps every text it has seen.
#[derive(Debug, Default)]
pub(crate) struct Scripts(Mutex<BTreeMap<Vec<&'static str>, Arc<Script>>>);

impl Scripts {
    /// The script for these algorithms.
    pub(crate) fn of(&self, mut programs: Vec<&'static Program>) -> Arc<Script> {
        // By name: a program's own order would compare whole texts at every call.
        programs.sort_unstable_by_key(|program| program.name);
        programs.dedup_by_key(|program| program.name);
        let names: Vec<_> = programs.iter().map(|program| program.name).collect();
        let mut scripts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(scripts.entry(names).or_insert_with(|| Arc::new(Script::new(&programs))))
    }
}

impl Script {
    fn new(programs: &[&'static Program]) -> Self {
        let mut text = String::from(include_str!("lua/prelude.lua"));
        for Program { name, source, .. } in programs {
            // Writing to a string cannot fail.
            let _ = write!(text, "\nalgorithms['{name}'] = (function()\n{source}end)()\n");
        }
        text.push_str(include_str!("lua/driver.lua"));
        Self::from_text(&text)
    }

    /// The script of this text, which is kept without its comments.
    pub(crate) fn from_text(text: &str) -> Self {
        let text = without_comments(text);
        let sha = sha1_smol::Sha1::from(&text).digest().to_string();
        Self { text, sha }
    }
}

/// The text without comments, blank lines and indentation: less for a server to keep.
fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| match line.find("-- ") {
        Some(comment) => line[..comment].trim(),
        None => line.trim(),
    });
    let mut kept = String::with_capacity(text.len());
    for line in lines.filter(|line| !line.is_empty() && *line != "--") {
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}
