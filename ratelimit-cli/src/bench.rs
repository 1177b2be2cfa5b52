//! The benchmark: tasks that ask a store for one decision after another, and the latency of each.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use ratelimit_core::{ErrorKind, Limit, Limits, Policy, RateLimiter, Store, StoreError};
use tokio::task::{JoinSet, yield_now};
use tokio::time::timeout;

use crate::caller::Caller;
use crate::failure::Failure;
use crate::interrupt::Interrupt;

mod limit;
mod result;
mod servers;

pub(crate) use limit::one_limit;
pub(crate) use result::{Context, Row, to_text};
pub(crate) use servers::{CpuTime, Servers};

/// The longest latency that the histogram distinguishes. Calls have deadlines, so none takes longer.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// The significant digits of a recorded latency.
const SIGNIFICANT_DIGITS: u8 = 3;
/// How often the progress is reported and the interrupt checked.
const LOOK: Duration = Duration::from_millis(100);
/// The number of decisions without a wait after which a task yields to the others.
const TURN: u64 = 64;

/// The benchmark's callers. Each has an identifier for every name that the policy uses.
pub(crate) fn callers(limits: &Limits<Policy>, count: u32) -> Vec<Caller<'static>> {
    let mut identifier_names: Vec<&str> = Vec::new();
    for kind in limits.iter().flat_map(Limit::identifier_names) {
        if !identifier_names.contains(&kind) {
            identifier_names.push(kind);
        }
    }
    let bare = limits.iter().any(|limit| limit.identifier_names().len() == 0);
    let caller = |number| {
        let name = format!("caller-{number:013}");
        Caller {
            named: identifier_names
                .iter()
                .map(|kind| ((*kind).to_owned().into(), name.clone().into()))
                .collect(),
            bare: bare.then(|| name.into()),
            bare_only: false,
        }
    };
    (0..count).map(caller).collect()
}

/// The counters of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) admitted: u64,
    pub(crate) denied: u64,
    /// Requests given up because other clients changed the state again and again.
    pub(crate) contended: u64,
    /// Requests that were not answered in time, or whose answer was lost.
    pub(crate) unanswered: u64,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.admitted += other.admitted;
        self.denied += other.denied;
        self.contended += other.contended;
        self.unanswered += other.unanswered;
    }

    /// The number of decided requests.
    pub(crate) const fn decisions(&self) -> u64 {
        self.admitted + self.denied
    }
}

/// The result of one run.
pub(crate) struct Ran {
    pub(crate) counts: Counts,
    pub(crate) elapsed: Duration,
    /// The latency of each decision, in nanoseconds.
    pub(crate) histogram: Histogram<u64>,
    /// Why the run ended early.
    pub(crate) failure: Option<Failure>,
}

/// One run: the number of tasks, and for how long they ask.
pub(crate) struct Load<S> {
    pub(crate) limiter: Arc<RateLimiter<S>>,
    pub(crate) callers: Arc<Vec<Caller<'static>>>,
    pub(crate) tasks: u32,
    pub(crate) length: Duration,
    pub(crate) interrupt: Interrupt,
    /// The store's name, for messages.
    pub(crate) store: String,
}

/// The state that all tasks of a run share.
struct Shared<S> {
    limiter: Arc<RateLimiter<S>>,
    callers: Arc<Vec<Caller<'static>>>,
    histogram: Mutex<Histogram<u64>>,
    stop: AtomicBool,
}

impl<S: Store<Policy> + 'static> Load<S> {
    /// Runs until the time is over, the user interrupts or the store fails. Calls `look` periodically with the
    /// elapsed time.
    pub(crate) async fn run(self, mut look: impl FnMut(Duration)) -> Result<Ran, Failure> {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, SIGNIFICANT_DIGITS)
            .map_err(|error| Failure::Store(format!("no histogram: {error}")))?;
        let shared = Arc::new(Shared {
            limiter: self.limiter,
            callers: self.callers,
            histogram: Mutex::new(histogram),
            stop: AtomicBool::new(false),
        });
        let begun = Instant::now();
        let mut tasks = JoinSet::new();
        for number in 0..self.tasks {
            let draw = Draw::new(number.into());
            tasks.spawn(Arc::clone(&shared).ask(begun, self.length, draw));
        }
        let (mut counts, mut failure) = (Counts::default(), None);
        loop {
            match timeout(LOOK, tasks.join_next()).await {
                Ok(None) => break,
                Ok(Some(Ok((counted, failed)))) => {
                    counts.add(counted);
                    if let Some(error) = failed {
                        shared.stop.store(true, Ordering::Relaxed);
                        failure.get_or_insert_with(|| {
                            Failure::store(&format!("--store {}", self.store), &error)
                        });
                    }
                }
                Ok(Some(Err(error))) => {
                    shared.stop.store(true, Ordering::Relaxed);
                    failure =
                        Some(Failure::Store(format!("a task of the benchmark ended: {error}")));
                }
                Err(_) => {}
            }
            if self.interrupt.is_raised() {
                shared.stop.store(true, Ordering::Relaxed);
            }
            look(begun.elapsed());
        }
        let elapsed = begun.elapsed();
        let histogram = shared.histogram.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(Ran { counts, elapsed, histogram, failure })
    }
}

impl<S: Store<Policy>> Shared<S> {
    /// Asks for one decision after another until the time is over.
    async fn ask(
        self: Arc<Self>,
        begun: Instant,
        length: Duration,
        mut draw: Draw,
    ) -> (Counts, Option<S::Error>) {
        let mut counts = Counts::default();
        let mut asked = 0_u64;
        while !self.stop.load(Ordering::Relaxed) {
            let caller = &self.callers[draw.below(self.callers.len())];
            let sent = Instant::now();
            let answer = self.limiter.check(caller).await;
            let answered = Instant::now();
            match answer {
                Ok(verdict) => {
                    *(if verdict.allowed() { &mut counts.admitted } else { &mut counts.denied }) +=
                        1;
                    let ns = u64::try_from((answered - sent).as_nanos()).unwrap_or(LONGEST_NS);
                    let mut histogram =
                        self.histogram.lock().unwrap_or_else(PoisonError::into_inner);
                    histogram.saturating_record(ns);
                }
                Err(error) => match error.kind() {
                    ErrorKind::Contended => counts.contended += 1,
                    ErrorKind::Indeterminate => counts.unanswered += 1,
                    _ => return (counts, Some(error)),
                },
            }
            if answered - begun >= length {
                break;
            }
            asked += 1;
            // A memory store never waits; without a yield the first task would use all of the time.
            if asked.is_multiple_of(TURN) {
                yield_now().await;
            }
        }
        (counts, None)
    }
}

/// Draws callers pseudo-randomly and uniformly with `SplitMix64`, whose bias is far below what matters here.
struct Draw(u64);

impl Draw {
    const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD134_2543_DE82_EF95))
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % end.max(1) as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_memory::MemoryStore;

    fn limits(words: &str) -> Limits<Policy> {
        one_limit(words).expect("a limit")
    }

    fn run(limits: &Limits<Policy>, tasks: u32, keys: u32) -> Ran {
        let limiter = RateLimiter::new(limits.clone(), MemoryStore::new());
        let load = Load {
            limiter: Arc::new(limiter),
            callers: Arc::new(callers(limits, keys)),
            tasks,
            length: Duration::from_millis(20),
            interrupt: Interrupt::default(),
            store: "memory".into(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let mut looks = 0;
        let ran = runtime.expect("a runtime").block_on(load.run(|_| looks += 1));
        assert!(looks > 0);
        ran.expect("runs")
    }

    #[test]
    fn every_decision_is_counted_and_timed_exactly_once() {
        let ran = run(&limits("fixed-window 10/d"), 5, 7);
        let Counts { admitted, denied, contended, unanswered } = ran.counts;
        // Ten for each of seven callers, and as many again if midnight passes during the test.
        assert!((70..=140).contains(&admitted), "{admitted}");
        assert!(denied > 0 && contended == 0 && unanswered == 0, "{:?}", ran.counts);
        assert_eq!(ran.histogram.len(), ran.counts.decisions());
        assert!(ran.failure.is_none());
    }

    #[test]
    fn a_caller_has_every_identifier_that_the_policy_names() {
        let limits: Limits<Policy> = toml::from_str(
            "[[limit]]\nname = \"a\"\nalgorithm = \"gcra\"\nrate = \"1/s\"\nkey = [\"ip\", \"user\"]\n\
             [[limit]]\nname = \"b\"\nalgorithm = \"gcra\"\nrate = \"1/s\"\nkey = [\"ip\"]\n",
        )
        .expect("a policy");
        let callers = callers(&limits, 3);
        assert_eq!(callers.len(), 3);
        assert_eq!(callers[2].display(), "ip=caller-0000000000002 user=caller-0000000000002");
        for limit in &limits {
            assert!(limit.key_for(&callers[0]).is_some());
        }
    }

    #[test]
    fn an_error_that_lasts_ends_the_run() {
        // The charge needs an entry, for which this store has no room.
        let limits = limits("sliding-log 1000/d");
        let store = MemoryStore::builder().entries(1).build();
        let load = Load {
            limiter: Arc::new(RateLimiter::new(limits.clone(), store)),
            callers: Arc::new(callers(&limits, 100)),
            tasks: 3,
            length: Duration::from_secs(3_600),
            interrupt: Interrupt::default(),
            store: "memory".into(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let ran = runtime.expect("a runtime").block_on(load.run(|_| ())).expect("runs");
        let failure = ran.failure.expect("fails").to_string();
        assert!(failure.contains("--store memory: "), "{failure}");
    }

    #[test]
    fn every_caller_is_drawn() {
        let mut draw = Draw::new(1);
        let mut counts = [0_u32; 10];
        (0..10_000).for_each(|_| counts[draw.below(10)] += 1);
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
    }
}
