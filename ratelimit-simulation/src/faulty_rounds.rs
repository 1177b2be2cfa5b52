//! Random requests, of which tasks drop some and whose network fails in every second round: a
//! sequential order explains every answer, and what was charged. So none is admitted above the
//! limit, and none is denied that fits. They run on a real server, in real time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use fastrand::Rng;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{Algorithm, AnyAlgorithm, ErrorKind, Limit, Source, Store, StoreError};
use ratelimit_servers::FaultProxy;
use ratelimit_testkit::{Calendar, Event, History, charges};
use tokio::task::{JoinSet, yield_now};

/// Two keys per round, of which batches may join both.
const KEYS: usize = 2;
const ROUNDS: usize = 48;
/// So few per round that the checker tries nearly every order: a request without an answer may have
/// been charged at any time after, or never.
const TASKS: usize = 4;
const REQUESTS: usize = 5;
/// The most requests of all rounds: each ends with a peek at each limit of each key.
pub const MOST_REQUESTS: usize = ROUNDS * (TASKS * REQUESTS + 4);

/// The place of a limit, that of a key, and a cost.
type Ask = (usize, usize, u64);

/// Rounds of random requests to a store, over a network that fails.
#[derive(Debug)]
pub struct FaultyRounds<S> {
    /// The store, whose connections go through the proxy.
    pub store: S,
    /// The network.
    pub proxy: FaultProxy,
    /// Whether the network fails, and tasks drop requests.
    is_faulty: bool,
    limits: [Limit<AnyAlgorithm>; 2],
    calendar: Calendar,
    /// The counter that orders all events of a round.
    order: AtomicU64,
}

impl<S: Store<AnyAlgorithm> + Send + Sync + 'static> FaultyRounds<S> {
    /// Of a store behind this proxy.
    pub fn new(store: S, proxy: FaultProxy) -> Arc<Self> {
        Self::disturbed(store, proxy, true)
    }

    /// Of a store whose proxy fails, or does not.
    pub fn disturbed(store: S, proxy: FaultProxy, is_faulty: bool) -> Arc<Self> {
        let calendar = Calendar::now();
        let limit = |name, count| {
            let policy = format!("fixed-window {}", calendar.rate(count)).parse();
            Limit::new(name, policy.expect("a limit")).expect("a name")
        };
        let (limits, order) = ([limit("few", 6), limit("many", 12)], AtomicU64::new(0));
        Arc::new(Self { store, proxy, is_faulty, limits, calendar, order })
    }

    /// A random request. A third of them are dropped after some turns of the runtime, if they have
    /// no answer by then.
    async fn ask(&self, round: usize, random: &mut Rng) -> Option<Event> {
        let mut asks: Vec<Ask> = Vec::new();
        for _ in 0..[1, 1, 1, 2, 3][random.usize(..5)] {
            let (limit, key) = (random.usize(..2), random.usize(..KEYS));
            if !asks.iter().any(|(l, k, _)| (*l, *k) == (limit, key)) {
                asks.push((limit, key, [1, 1, 1, 2, 3][random.usize(..5)]));
            }
        }
        match random.u8(..) {
            // A client takes a while to connect again.
            _ if !self.is_faulty || round.is_multiple_of(2) => {}
            0..8 => self.proxy.swallow_matching("EVALSHA", 1),
            8..16 => self.proxy.cut_matching("EVALSHA", 1),
            16..20 => self.proxy.cut_all(),
            _ => {}
        }
        let turns =
            if self.is_faulty && random.usize(..3) == 0 { random.usize(..300) } else { usize::MAX };
        self.event(round, Op::Acquire, asks, turns).await
    }

    /// What is recorded of a request; `None` if it was certainly not charged.
    async fn event(&self, round: usize, op: Op, mut asks: Vec<Ask>, turns: usize) -> Option<Event> {
        let names: Vec<_> = (0..KEYS).map(|key| format!("{round}-{key}")).collect();
        let check = |(limit, key, cost): &Ask| Check {
            limit: &self.limits[*limit],
            key: &names[*key],
            cost: *cost,
        };
        let checks: Vec<_> = asks.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(op);
        let mut asked = self.order.fetch_add(1, SeqCst);
        let answer = tokio::select! {
            biased;
            answer = self.store.apply(&batch) => match answer {
                Ok(verdict) => {
                    let mut decisions = verdict.decisions().to_vec();
                    // A cache answers for each limit as of an answer of the store that it has seen,
                    // which may be that of an earlier request than the last one answered: it denies
                    // rightly, because no charge is taken back, and `remaining` lags. No single
                    // moment need explain several limits; one that denies explains the answer.
                    if verdict.source() == Source::Cache {
                        asked = 0;
                        let denied = decisions.iter().position(|decision| !decision.allowed);
                        let denied = denied.expect("a cache only denies");
                        decisions = vec![decisions[denied]];
                        asks = vec![asks[denied]];
                    }
                    Ok(decisions)
                }
                Err(error) if error.kind() == ErrorKind::Unavailable => return None,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
                    Err(ErrorKind::Indeterminate)
                }
            },
            () = pass(turns) => Err(ErrorKind::Indeterminate),
        };
        // The answer says when the server decided.
        let clock = self.calendar.time_of(answer.as_deref().unwrap_or_default());
        let answered = self.order.fetch_add(1, SeqCst);
        Some(Event { op, asks, id: None, asked, answered, clock: [clock; 2], answer })
    }

    /// What was charged, by the server, once the network works again.
    async fn charged(&self, round: usize, limit: usize, key: usize) -> (u64, Event) {
        self.proxy.heal();
        loop {
            let peek = self.event(round, Op::Peek, vec![(limit, key, 0)], usize::MAX).await;
            // A connection that was cut before may be noticed by this request.
            if let Some(Event { answer: Ok(decisions), .. }) = &peek {
                let capacity = self.limits[limit].algorithm().capacity();
                return (capacity - decisions[0].remaining, peek.expect("it is there"));
            }
        }
    }

    async fn round(self: &Arc<Self>, round: usize) -> Vec<Event> {
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let run = Arc::clone(self);
            let mut random = Rng::with_seed((round * TASKS + task) as u64);
            tasks.spawn(async move {
                let mut events = Vec::new();
                for _ in 0..REQUESTS {
                    events.extend(run.ask(round, &mut random).await);
                }
                events
            });
        }
        tasks.join_all().await.into_iter().flatten().collect()
    }

    /// Runs these rounds.
    ///
    /// # Errors
    /// A round whose answers no order explains.
    pub async fn run(
        self: &Arc<Self>,
        rounds: impl Iterator<Item = usize>,
    ) -> Result<RoundsOutcome, String> {
        let mut outcome = RoundsOutcome::default();
        for round in rounds {
            let mut events = self.round(round).await;
            outcome.unknown += events.iter().filter(|event| event.answer.is_err()).count();
            for (limit, key) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let (charged, peek) = self.charged(round, limit, key).await;
                let due = charges(&events, (limit, key));
                if !due.contains(&charged) {
                    return Err(format!("round {round}: {charged} charged, and not {due:?}"));
                }
                outcome.unused += due.end() - charged;
                events.push(peek);
            }
            outcome.rounds += 1;
            outcome.decisions += events.iter().filter(|event| event.answer.is_ok()).count();
            match History::at_their_times(&self.limits, events).explain() {
                // Where the outcomes of many are unknown, the search may run out of steps.
                Ok(decided) => outcome.undecided += usize::from(!decided),
                Err(unexplained) => return Err(format!("round {round}: {unexplained}")),
            }
        }
        Ok(outcome)
    }

    /// Runs all rounds, with enough faults.
    pub async fn are_explained(self: &Arc<Self>) {
        let RoundsOutcome { unknown, unused, undecided, .. } =
            self.run(0..ROUNDS).await.unwrap_or_else(|broken| panic!("{broken}"));
        let faults = (self.proxy.swallowed(), self.proxy.requests_cut());
        assert!(faults.0 > 0 && faults.1 > 0, "both faults: {faults:?}");
        assert!(
            unknown > ROUNDS && unused > 0,
            "some were taken back, or denied: {unknown}, {unused}"
        );
        assert!(undecided < ROUNDS / 4, "{undecided} of {ROUNDS} rounds are not explained in time");
    }
}

/// What rounds showed.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundsOutcome {
    /// How many rounds ran.
    pub rounds: usize,
    /// Requests with an answer.
    pub decisions: usize,
    /// Requests without an answer.
    pub unknown: usize,
    /// Cost that requests without an answer did not charge.
    unused: u64,
    /// Rounds that the search did not explain within its steps.
    pub undecided: usize,
}

async fn pass(turns: usize) {
    for _ in 0..turns {
        yield_now().await;
    }
}
