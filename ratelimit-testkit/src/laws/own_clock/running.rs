//! Law 14 on a running clock: whole traces, and many tasks.

use std::cmp::Reverse;
use std::collections::HashSet;

use ratelimit_core::store::{Now, Op, Reservation};
use ratelimit_core::{Algorithm, AnyAlgorithm, Decision, Limit, ReservationId, Timestamp, Verdict};

use crate::capability::Capability;
use crate::law::{LawResult, ensure};
use crate::laws::own_clock::{ADJUSTED, BEGIN_US, COARSE_US, Time};
use crate::laws::{Said, Subject};
use crate::pure::PureStore;
use crate::seeds::{AlgorithmKind, aligned_us, full_us, refill};
use crate::trace::{Ask, Trace, TraceRequest};

/// Law 14 for a running clock: at its own time the store decides a whole trace as the pure step
/// does.
///
/// The limits of the trace are slow: during the test nothing refills and no window ends. `allowed`
/// and `remaining` therefore equal those of the pure step at one moment, and the waits are shorter
/// than its waits by at most the time that has passed. If the test takes longer than that, the
/// comparison stops there. Requests that depend on single microseconds are left out. The trace's
/// times only order its requests.
pub(crate) async fn decides_by_a_clock_that_runs(
    subject: &Subject<'_, AnyAlgorithm>,
    trace: &Trace<AnyAlgorithm>,
) -> LawResult {
    let time = Time::from_clock(subject.store.clock());
    let run = RunningStore::begin(subject, &trace.limits, time).await?;
    let pure = PureStore::new();
    let last = at_last(subject, trace);
    let mut reserved = TraceReservations::default();
    for request in trace.requests.iter().chain(&last) {
        if reserved.leaves_it_to_the_moment(trace, request) {
            continue;
        }
        let got = subject.answer(&trace.limits, request, Now::Store).await?;
        let passed = run.elapsed();
        if !run.is_steady(&passed) {
            break;
        }
        let due = run.expected_answer(request, &pure);
        ensure(agrees(&got, &due, &passed), || {
            format!(
                "{request:?}, at the store's own time, got {got:?}; the pure step says {due:?}, less at most {} µs of \
                 waiting",
                passed.most_us
            )
        })?;
    }
    Ok(())
}

/// The reservations of a trace, and those of them whose settlement does not depend on the time
/// since.
#[derive(Default)]
struct TraceReservations<'t> {
    known: HashSet<(usize, &'t str, ReservationId)>,
    settles_alike: HashSet<(usize, &'t str, ReservationId)>,
}

impl<'t> TraceReservations<'t> {
    /// Records a request. Returns whether its outcome may depend on whether two requests were
    /// decided at the same time or a microsecond apart:
    ///
    /// - A bucket that was charged after a reservation returns only what cannot have refilled
    ///   since, which is nearly a unit less after the first microsecond.
    /// - A lease that was taken away is not returned; another one of the same time in its place is.
    fn leaves_it_to_the_moment(
        &mut self,
        trace: &Trace<AnyAlgorithm>,
        request: &'t TraceRequest,
    ) -> bool {
        let mut matters = false;
        for ask in &request.asks {
            let (limit, key) = (ask.limit, &*ask.key);
            let kind = AlgorithmKind::from_algorithm(trace.limits[ask.limit].algorithm());
            let same = |known: &(usize, &str, ReservationId)| known.0 == limit && known.1 == key;
            match (request.op, request.id) {
                _ if !kind.is_bucket() && kind != AlgorithmKind::Concurrency => {}
                (Op::Peek, _) => {}
                (op, id) if op.needs_id() => {
                    let id = id.map(|id| (limit, key, id));
                    matters |= id.is_some_and(|id| {
                        self.known.contains(&id) && !self.settles_alike.contains(&id)
                    });
                }
                (Op::Acquire, Some(id)) => {
                    if self.known.insert((limit, key, id)) {
                        self.settles_alike.retain(|known| !(kind.is_bucket() && same(known)));
                        self.settles_alike.insert((limit, key, id));
                    }
                }
                (Op::Acquire, None) => {
                    self.settles_alike.retain(|known| !(kind.is_bucket() && same(known)));
                }
                _ => {
                    self.settles_alike.retain(|known| !same(known));
                }
            }
        }
        matters
    }
}

/// Peeks at everything that the trace asked about, in one batch if the store supports that.
fn at_last(subject: &Subject<'_, AnyAlgorithm>, trace: &Trace<AnyAlgorithm>) -> Vec<TraceRequest> {
    let look = |asks| TraceRequest { at: trace.latest(), op: Op::Peek, asks, id: None };
    let everybody = trace.everybody();
    match subject.able.lacks([Capability::Batches, Capability::SeveralKeys]) {
        _ if everybody.is_empty() => Vec::new(),
        None => vec![look(everybody)],
        Some(_) => everybody.into_iter().map(|ask| look(vec![ask])).collect(),
    }
}

/// The time that has passed for the store since the first request, as far as the client can know
/// it.
pub(crate) struct Passed {
    most_us: u64,
    /// The tolerated difference between two readings of the store's clock and the test's.
    coarse_us: u64,
}

/// A store with a running clock that is asked about slow limits.
pub(crate) struct RunningStore<'a> {
    subject: &'a Subject<'a, AnyAlgorithm>,
    limits: &'a [Limit<AnyAlgorithm>],
    time: Time,
    began_us: u64,
    /// A time at which all windows have progressed as far as they had for the store at the first
    /// request.
    at: Timestamp,
}

/// The key that is charged first, to find out how far the store's windows have progressed.
const FIRST: &str = "the first";

impl<'a> RunningStore<'a> {
    /// Asks each of the limits once. The `reset_after` of the first answer from a clock-aligned
    /// window tells how far the store's windows have progressed; the store's absolute time does not
    /// matter.
    pub(crate) async fn begin(
        subject: &'a Subject<'a, AnyAlgorithm>,
        limits: &'a [Limit<AnyAlgorithm>],
        time: Time,
    ) -> Result<Self, String> {
        // The longest window comes first: it is a multiple of the others, so it tells their
        // progress, too.
        let windows = limits.iter().map(|limit| aligned_us(limit.algorithm()).unwrap_or(0));
        let mut windows: Vec<(u64, usize)> = windows.zip(0..).collect();
        windows.sort_unstable_by_key(|(window_us, position)| (Reverse(*window_us), *position));
        let aligned = windows.iter().map(|(us, _)| *us).filter(|us| *us > 0).collect::<Vec<_>>();
        let unfit = |pair: &&[u64]| !pair[0].is_multiple_of(pair[1]);
        if let Some(&[longer, shorter]) = aligned.windows(2).find(unfit) {
            return Err(format!(
                "this case needs a clock that can be set: where it runs, the windows that are aligned to it have to \
                 divide each other, and {shorter} µs does not divide {longer} µs"
            ));
        }
        let epoch_us = aligned.first().map_or(BEGIN_US, |longest| BEGIN_US - BEGIN_US % longest);
        let at = Timestamp::saturating_from_us(epoch_us);
        let began_us = time.now_us();
        let mut run = Self { subject, limits, time, began_us, at };
        let ask = |(_, limit)| Ask { limit, key: FIRST.to_owned(), cost: 1 };
        let asks: Vec<_> = windows.into_iter().map(ask).collect();
        let together = if subject.able.can(Capability::Batches) { asks.len() } else { 1 };
        for (n, asks) in asks.chunks(together.max(1)).enumerate() {
            let request = TraceRequest { at, op: Op::Acquire, asks: asks.to_vec(), id: None };
            let got = subject.answer(limits, &request, Now::Store).await?;
            let passed = run.elapsed();
            if let (0, Ok(got), Ok(due)) =
                (n, &got, run.expected_answer(&request, &PureStore::new()))
            {
                let resets_us = [due, got.clone()].map(|all| all.decisions()[0].reset_after_us);
                run.at = at.saturating_add_us(resets_us[0].saturating_sub(resets_us[1]));
            }
            let due = run.expected_answer(&request, &PureStore::new());
            ensure(agrees(&got, &due, &passed), || {
                format!(
                    "the first {request:?}, at the store's own time, got {got:?}; at no time does the pure step say \
                     so, the nearest is {due:?}"
                )
            })?;
        }
        Ok(run)
    }

    /// The time that has passed.
    pub(crate) fn elapsed(&self) -> Passed {
        let us = self.time.now_us().saturating_sub(self.began_us);
        let coarse_us = if self.time.is_exact() { 0 } else { COARSE_US + us / ADJUSTED };
        Passed { most_us: us.saturating_add(coarse_us), coarse_us }
    }

    /// Whether no limit has refilled and no window has begun or ended in this time.
    pub(crate) fn is_steady(&self, passed: &Passed) -> bool {
        self.limits.iter().all(|limit| {
            let algorithm = limit.algorithm();
            let (gone_us, left_us) = match aligned_us(algorithm) {
                Some(window_us) => {
                    let gone_us = self.at.as_us() % window_us;
                    (gone_us, window_us - gone_us)
                }
                None if AlgorithmKind::from_algorithm(algorithm).is_bucket() => {
                    let refill = refill(algorithm);
                    (u64::MAX, refill.ticks_for(refill.token_units) * refill.tick_us)
                }
                None => (u64::MAX, full_us(algorithm)),
            };
            let reserved_us = algorithm.reservation_us().unwrap_or(Reservation::LIFE_US);
            passed.coarse_us <= gone_us && passed.most_us < left_us.min(reserved_us)
        })
    }

    /// The pure step's answer to a request at the moment that stands for the whole run.
    fn expected_answer(&self, request: &TraceRequest, pure: &PureStore) -> Said {
        self.subject.expected_answer(
            pure,
            self.limits,
            &TraceRequest { at: self.at, ..request.clone() },
        )
    }
}

/// Whether two answers are the same except for waits that became shorter in this time.
fn agrees(got: &Said, due: &Said, passed: &Passed) -> bool {
    let all = |verdict: &Verdict| -> Vec<Decision> {
        verdict.decisions().iter().chain([verdict.summary()]).copied().collect()
    };
    match (got, due) {
        (Ok(got), Ok(due)) => {
            let (got, due) = (all(got), all(due));
            got.len() == due.len()
                && got.iter().zip(&due).all(|(got, due)| decisions_agree(got, due, passed))
        }
        (got, due) => got == due,
    }
}

fn decisions_agree(got: &Decision, due: &Decision, passed: &Passed) -> bool {
    let timeless = |decision: &Decision| Decision {
        retry_after_us: decision.retry_after_us.map(|_| 0),
        replenish_after_us: 0,
        reset_after_us: 0,
        ..*decision
    };
    // A wait of 0 stays 0, and no wait ends within a run.
    let near = |got_us: u64, due_us: u64| match due_us {
        0 => got_us == 0,
        _ => {
            got_us > 0
                && got_us <= due_us.saturating_add(passed.coarse_us)
                && got_us.saturating_add(passed.most_us) >= due_us
        }
    };
    timeless(got) == timeless(due)
        && near(got.replenish_after_us, due.replenish_after_us)
        && near(got.reset_after_us, due.reset_after_us)
        && near(got.retry_after_us.unwrap_or(0), due.retry_after_us.unwrap_or(0))
}
