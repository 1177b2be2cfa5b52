//! [`NaiveStore`]: a second implementation of every algorithm, slow and obvious, to compare the
//! others with.
//!
//! It shares no arithmetic with `ratelimit-core`. It keeps no state, only the history of charges
//! and their times, and answers one question from it: [`remaining_parts`], how much a limit has
//! left at a moment. The rest follows from that by definition. A request fits if its cost is no
//! more than what is left. `retry_after` is the first moment, found by bisection, at which it fits.
//! `reset_after` is the first moment at which everything is left.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use ratelimit_core::algorithm::{BucketWindow, Refill};
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    Account as Owing, Algorithm, AnyAlgorithm, BucketedWindow, Clock, Decision, ManualClock,
    Refusal, Store, Verdict,
};

use crate::almanac::number;
use crate::seeds::{full_us, refill};

mod lockout;

use lockout::LockedKey;

use End::{Newest, Oldest};

/// A change of a key's account: a charge if positive, a refund if negative.
#[derive(Clone, Copy, Debug)]
struct AccountChange {
    at_us: u64,
    parts: i128,
}

/// The history of one key of one limit, oldest first.
type KeyHistory = Vec<AccountChange>;

/// What the store keeps for a key: its history, and the limit under which it was written.
type Account = (AnyAlgorithm, KeyHistory);

/// A [`Store`] that recomputes every answer from the whole history. Its own clock is set by hand
/// and starts at the epoch.
#[derive(Debug, Default)]
pub struct NaiveStore {
    clock: ManualClock,
    accounts: Mutex<HashMap<(String, String), Account>>,
}

impl NaiveStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The store's own clock.
    #[must_use]
    pub const fn clock(&self) -> &ManualClock {
        &self.clock
    }
}

/// The number of parts that a unit of cost is divided into: one, or for buckets as many as make
/// every refill a whole number of parts.
fn parts_per_unit(algorithm: &AnyAlgorithm) -> i128 {
    match algorithm {
        AnyAlgorithm::Gcra(_) => refill(algorithm).token_units.into(),
        _ => 1,
    }
}

fn capacity(algorithm: &AnyAlgorithm) -> i128 {
    i128::from(algorithm.capacity()) * parts_per_unit(algorithm)
}

fn debt(algorithm: &AnyAlgorithm) -> i128 {
    i128::from(algorithm.debt()) * parts_per_unit(algorithm)
}

/// What these events have charged.
fn sum<'e>(events: impl IntoIterator<Item = &'e AccountChange>) -> i128 {
    events.into_iter().map(|event| event.parts).sum()
}

/// Time as the key sees it: never before the last charge.
fn effective_us(history: &[AccountChange], now_us: u64) -> u64 {
    history.last().map_or(now_us, |last| last.at_us.max(now_us))
}

/// The parts that a key has left at `now_us`; negative if it owes.
fn remaining_parts(algorithm: &AnyAlgorithm, history: &[AccountChange], now_us: u64) -> i128 {
    let at_us = effective_us(history, now_us);
    match algorithm {
        AnyAlgorithm::Gcra(_) => in_bucket(refill(algorithm), history, at_us),
        AnyAlgorithm::FixedWindow(fixed) => {
            let (mut counted, mut window) = (0, number(fixed, 0));
            let now = AccountChange { at_us, parts: 0 };
            for event in history.iter().chain([&now]) {
                // Each window that begins pays as much as the limit.
                let of_event = number(fixed, event.at_us);
                let paid = i128::from(of_event - window) * capacity(algorithm);
                counted = (counted - paid).max(0) + event.parts;
                window = of_event;
            }
            capacity(algorithm) - counted
        }
        AnyAlgorithm::FirstRequestWindow(_) | AnyAlgorithm::WindowLog(_) => {
            capacity(algorithm) - sum(open_window(algorithm, history, now_us))
        }
        AnyAlgorithm::BucketedWindow(bucketed) => {
            let least = bucketed.windows().iter().map(|window| {
                let counted = counted_in(bucketed, window.span_us, history, at_us);
                i128::from(window.limit) - sum(&counted)
            });
            least.min().unwrap_or_default()
        }
        AnyAlgorithm::SlidingCounter(counter) => {
            let (window_us, current) = (counter.window_us(), at_us / counter.window_us());
            let start_us = current * window_us;
            // A sliding counter only remembers when its window began; within the window the clock
            // may go back.
            let overlap_us = window_us - (now_us.max(start_us) - start_us);
            let of =
                |window: u64| sum(history.iter().filter(|event| event.at_us / window_us == window));
            let before = current.checked_sub(1).map_or(0, of);
            let weighed = before * i128::from(overlap_us) / i128::from(window_us);
            // When the clock goes back within the window, more may count than the limit allows.
            (capacity(algorithm) - weighed - of(current)).max(0)
        }
        AnyAlgorithm::Lockout(lockout) => {
            let key = LockedKey::of(lockout, history, now_us);
            if key.until_us > now_us { 0 } else { capacity(algorithm) - key.count }
        }
        AnyAlgorithm::SlidingLog(_) | AnyAlgorithm::Concurrency(_) => {
            let window_us = full_us(algorithm);
            let counts = |event: &&AccountChange| event.at_us + window_us > at_us;
            capacity(algorithm) - sum(history.iter().filter(counts))
        }
    }
}

/// The events that count in a window of this length over these buckets.
fn counted_in(
    bucketed: &BucketedWindow,
    span_us: u64,
    history: &[AccountChange],
    at_us: u64,
) -> KeyHistory {
    let bucket_us = bucketed.bucket_us();
    let counts =
        |event: &&AccountChange| event.at_us / bucket_us + span_us / bucket_us > at_us / bucket_us;
    history.iter().filter(counts).copied().collect()
}

/// The most that a refund can return.
fn refundable(algorithm: &AnyAlgorithm, history: &[AccountChange], now_us: u64) -> i128 {
    let at_us = effective_us(history, now_us);
    match algorithm {
        AnyAlgorithm::BucketedWindow(bucketed) => {
            sum(&counted_in(bucketed, full_us(algorithm), history, at_us))
        }
        // Refunds come from the current window only.
        AnyAlgorithm::SlidingCounter(counter) => {
            let window_us = counter.window_us();
            let same = |event: &&AccountChange| event.at_us / window_us == at_us / window_us;
            sum(history.iter().filter(same))
        }
        // A block is not refunded.
        AnyAlgorithm::Lockout(lockout) => LockedKey::of(lockout, history, now_us).count,
        _ => capacity(algorithm) - remaining_parts(algorithm, history, now_us),
    }
}

/// Whether a key has its full capacity, as a new key.
fn is_whole(algorithm: &AnyAlgorithm, history: &[AccountChange], now_us: u64) -> bool {
    match algorithm {
        // The shortest window may be full again when a longer one is not.
        AnyAlgorithm::BucketedWindow(_) => refundable(algorithm, history, now_us) == 0,
        AnyAlgorithm::Lockout(lockout) => {
            let key = LockedKey::of(lockout, history, now_us);
            (key.count, key.lockouts) == (0, 0)
        }
        _ => remaining_parts(algorithm, history, now_us) == capacity(algorithm),
    }
}

/// The limit that a decision reports: of several windows, the one with the least left.
fn shown_limit(algorithm: &AnyAlgorithm, history: &[AccountChange], now_us: u64) -> u64 {
    let AnyAlgorithm::BucketedWindow(bucketed) = algorithm else { return algorithm.capacity() };
    let at_us = effective_us(history, now_us);
    let left = |window: &&BucketWindow| {
        let counted = counted_in(bucketed, window.span_us, history, at_us);
        (i128::from(window.limit) - sum(&counted)).max(0)
    };
    bucketed.windows().iter().min_by_key(left).map_or(0, |window| window.limit)
}

/// The level of a bucket that began full and has lived through this history.
fn in_bucket(refill: &Refill, history: &[AccountChange], at_us: u64) -> i128 {
    let capacity = i128::from(refill.burst) * i128::from(refill.token_units);
    let (mut level, mut counted_us) = (capacity, 0);
    let now = AccountChange { at_us, parts: 0 };
    for event in history.iter().chain([&now]) {
        // The refill ticks since the last counted one; a full bucket has no phase.
        let ticks = (event.at_us - counted_us) / refill.tick_us;
        level += i128::from(ticks) * i128::from(refill.tick_units);
        counted_us += ticks * refill.tick_us;
        if level >= capacity {
            (level, counted_us) = (capacity, event.at_us);
        }
        // A bucket charged to less than a tick's flow below full restarts its tick; otherwise the
        // tick would add more than a full bucket can take.
        if event.parts > 0 && capacity - level < i128::from(refill.tick_units) {
            counted_us = event.at_us;
        }
        level = (level - event.parts).min(capacity);
    }
    level
}

/// The events of the last window, the one that opened it first.
fn last_window(history: &[AccountChange], window_us: u64) -> &[AccountChange] {
    let mut begin = 0;
    for (position, event) in history.iter().enumerate() {
        if event.at_us >= history[begin].at_us + window_us {
            begin = position;
        }
    }
    &history[begin..]
}

/// The events of the window that contains a request, if windows begin with one; none if the last
/// window has ended.
fn open_window<'h>(
    algorithm: &AnyAlgorithm,
    history: &'h [AccountChange],
    now_us: u64,
) -> &'h [AccountChange] {
    let window_us = full_us(algorithm);
    let window = last_window(history, window_us);
    let ended = window.first().is_some_and(|begin| now_us >= begin.at_us + window_us);
    if ended { &[] } else { window }
}

/// The history after a charge of this many parts at `now_us`, or a refund if negative.
fn after_charge(
    algorithm: &AnyAlgorithm,
    op: Op,
    history: &[AccountChange],
    now_us: u64,
    parts: i128,
) -> KeyHistory {
    let mut history = history.to_vec();
    if parts == 0 {
        return history;
    }
    let at_us = match algorithm {
        // Such a window only remembers when it began; requests from before fall into it.
        AnyAlgorithm::FirstRequestWindow(_) | AnyAlgorithm::WindowLog(_) => now_us,
        // A refund has no time.
        AnyAlgorithm::Lockout(_) => {
            let charges = history.iter().filter(|event| event.parts > 0);
            charges.map(|event| event.at_us).fold(now_us, u64::max)
        }
        // While the window of the last charge is owed, all but a request counts in it, if there is
        // room.
        AnyAlgorithm::FixedWindow(_) if !matches!(op, Op::Acquire | Op::Peek) => {
            let last_us = history.last().map_or(now_us, |last| last.at_us);
            let is_owed = remaining_parts(algorithm, &history, now_us) < capacity(algorithm);
            let room = remaining_parts(algorithm, &history, last_us) + debt(algorithm);
            if is_owed && parts <= room { last_us } else { effective_us(&history, now_us) }
        }
        _ => effective_us(&history, now_us),
    };
    let counted = match algorithm {
        AnyAlgorithm::SlidingLog(_) | AnyAlgorithm::Concurrency(_) => {
            let counts = |event: &&AccountChange| event.at_us + full_us(algorithm) > at_us;
            Some(history.iter().filter(counts).copied().collect())
        }
        AnyAlgorithm::WindowLog(_) => Some(open_window(algorithm, &history, now_us).to_vec()),
        AnyAlgorithm::BucketedWindow(of) => {
            Some(counted_in(of, full_us(algorithm), &history, at_us))
        }
        _ => None,
    };
    let takes_off_newest = counted.is_some();
    history = counted.unwrap_or(history);
    if parts > 0 || !takes_off_newest {
        history.push(AccountChange { at_us, parts });
    } else {
        take_off(&mut history, -parts, Newest);
    }
    // A key with its full capacity counts as a new key.
    if is_whole(algorithm, &history, now_us) {
        history.clear();
    }
    history
}

/// The end of a history from which events are taken.
#[derive(Clone, Copy)]
enum End {
    Oldest,
    Newest,
}

/// Removes this many parts from the oldest or the newest events.
fn take_off(history: &mut KeyHistory, mut parts: i128, end: End) {
    while parts > 0 && !history.is_empty() {
        let position = if matches!(end, Oldest) { 0 } else { history.len() - 1 };
        let taken = history[position].parts.min(parts);
        history[position].parts -= taken;
        parts -= taken;
        if history[position].parts == 0 {
            history.remove(position);
        }
    }
}

/// The least number up to `limit` for which the predicate is true. The predicate must be monotonic.
fn first(limit: u64, reservations: impl Fn(u64) -> bool) -> Option<u64> {
    if !reservations(limit) {
        return None;
    }
    let (mut low, mut high) = (0, limit);
    while low < high {
        let middle = low.midpoint(high);
        if reservations(middle) { high = middle } else { low = middle + 1 }
    }
    Some(low)
}

/// The decision of a limit with this history.
fn decision_of(
    algorithm: &AnyAlgorithm,
    history: &[AccountChange],
    now_us: u64,
    cost: u64,
    fits: bool,
) -> Decision {
    let whole = algorithm.capacity();
    let per_unit = parts_per_unit(algorithm);
    let left_after = |us: u64| remaining_parts(algorithm, history, now_us + us);
    // Everything is back at the latest one full recovery after the last change.
    let last_us = history.iter().map(|event| event.at_us).fold(now_us, u64::max);
    let latest_us = last_us - now_us + full_us(algorithm);
    let wait = |parts| first(latest_us, |us| left_after(us) >= parts);
    let whole_after = |us: u64| is_whole(algorithm, history, now_us + us);
    let remaining = u64::try_from(left_after(0).max(0) / per_unit).expect("not below zero");
    Decision {
        allowed: fits,
        cost,
        limit: shown_limit(algorithm, history, now_us),
        remaining,
        retry_after_us: match fits {
            true => Some(0),
            false if cost > whole => None,
            false => wait(i128::from(cost) * per_unit),
        },
        replenish_after_us: wait(i128::from(remaining + 1) * per_unit).unwrap_or(0),
        reset_after_us: first(latest_us, whole_after).expect("everything comes back"),
    }
}

/// The history of an account under this limit. If another limit wrote it, it counts as one charge,
/// at the time of the last write, of what was used then, capped at the new capacity and debt.
fn carry_over(account: Option<&Account>, algorithm: &AnyAlgorithm) -> KeyHistory {
    let Some((old, history)) = account else { return KeyHistory::new() };
    if old == algorithm {
        return history.clone();
    }
    let Some(last) = history.last() else { return KeyHistory::new() };
    let used = capacity(old) - remaining_parts(old, history, last.at_us);
    let units = (used + parts_per_unit(old) - 1) / parts_per_unit(old);
    let parts = (units * parts_per_unit(algorithm)).min(capacity(algorithm) + debt(algorithm));
    vec![AccountChange { at_us: last.at_us, parts }]
}

/// The history after an attempt that does not fit: it takes whatever is left, so the limit is full
/// afterwards.
fn after_denied_attempt(
    algorithm: &AnyAlgorithm,
    history: &[AccountChange],
    now_us: u64,
    cost: u64,
) -> KeyHistory {
    let parts = i128::from(cost.min(algorithm.capacity()));
    match algorithm {
        AnyAlgorithm::SlidingCounter(_) => {
            let current = refundable(algorithm, history, now_us);
            let parts = parts.min(capacity(algorithm) - current);
            after_charge(algorithm, Op::Force, history, now_us, parts)
        }
        AnyAlgorithm::SlidingLog(_) => {
            let mut history = after_charge(algorithm, Op::Force, history, now_us, parts);
            let excess = sum(&history) - capacity(algorithm);
            take_off(&mut history, excess, Oldest);
            history
        }
        AnyAlgorithm::BucketedWindow(bucketed) => {
            let mut history = after_charge(algorithm, Op::Force, history, now_us, parts);
            // The shortest window comes first: what it has dropped, no longer window counts.
            let mut windows = bucketed.windows().to_vec();
            windows.sort_by_key(|window| window.span_us);
            for window in windows {
                let at_us = effective_us(&history, now_us);
                let mut counted = counted_in(bucketed, window.span_us, &history, at_us);
                history.truncate(history.len() - counted.len());
                let excess = sum(&counted) - i128::from(window.limit);
                take_off(&mut counted, excess, Oldest);
                history.append(&mut counted);
            }
            history
        }
        _ => after_charge(
            algorithm,
            Op::Force,
            history,
            now_us,
            remaining_parts(algorithm, history, now_us).max(0),
        ),
    }
}

/// The decision of a limit, and its history afterwards.
fn decide_check(
    check: &Check<'_, AnyAlgorithm>,
    op: Op,
    history: &[AccountChange],
    now_us: u64,
) -> (Decision, KeyHistory) {
    let algorithm = check.limit.algorithm();
    let cost = i128::from(check.cost) * parts_per_unit(algorithm);
    let room = (remaining_parts(algorithm, history, now_us) + debt(algorithm)).max(0);
    let left = remaining_parts(algorithm, history, now_us).max(0);
    let parts = match op {
        Op::Acquire | Op::Peek if cost > left => {
            let history = if check.limit.counts_attempts() {
                after_denied_attempt(algorithm, history, now_us, check.cost)
            } else {
                history.to_vec()
            };
            return (decision_of(algorithm, &history, now_us, check.cost, false), history);
        }
        Op::Acquire | Op::Peek => cost,
        Op::Force => cost.min(room),
        // A decision tells whole units.
        Op::Adopt => (left - left % parts_per_unit(algorithm) - cost).max(0),
        Op::Refund => -cost.min(refundable(algorithm, history, now_us)),
        Op::Reset => {
            return (decision_of(algorithm, &[], now_us, check.cost, true), KeyHistory::new());
        }
        Op::Settle | Op::Renew | Op::Extend => unreachable!("the oracle has no reservations"),
    };
    let history = after_charge(algorithm, op, history, now_us, parts);
    (decision_of(algorithm, &history, now_us, check.cost, true), history)
}

/// What is owed under a limit with this history, what a request forgives that was made before the
/// last change, and what it charges, if the limit warns and that is not its cost.
fn account_of(
    check: &Check<'_, AnyAlgorithm>,
    op: Op,
    (before, after): (&[AccountChange], &[AccountChange]),
    now_us: u64,
) -> Owing {
    let algorithm = check.limit.algorithm();
    let in_units = |parts: i128| {
        let units = (parts + parts_per_unit(algorithm) - 1) / parts_per_unit(algorithm);
        u64::try_from(units.max(0)).expect("at most the cost")
    };
    let left = remaining_parts(algorithm, before, now_us).max(0) / parts_per_unit(algorithm);
    let charged = check.limit.warns_at_percent().and_then(|_| match op {
        Op::Adopt => Some(u64::try_from(left).ok()?.saturating_sub(check.cost)),
        Op::Refund | Op::Reset => Some(0),
        _ => None,
    });
    let has_debt = algorithm.debt() > 0;
    // Without a debt nothing is owed: a key that has used more than a limit which was lowered has
    // nothing left.
    let before = remaining_parts(algorithm, before, now_us);
    let room = if has_debt { before + debt(algorithm) } else { before.max(0) };
    let forgiven = match op {
        Op::Force => in_units(i128::from(check.cost) * parts_per_unit(algorithm) - room),
        _ => 0,
    };
    let owed = if has_debt { in_units(-remaining_parts(algorithm, after, now_us)) } else { 0 };
    Owing { owed, forgiven, charged }
}

impl NaiveStore {
    /// Decides a batch.
    pub fn decide(&self, batch: &Batch<'_, AnyAlgorithm>) -> Verdict {
        let op = batch.operation();
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let now_us = match batch.time() {
            Now::Store => self.clock.now().as_us(),
            Now::At(now) => now.as_us(),
        };
        let mut answers = Vec::new();
        for check in batch.checks() {
            let key = (check.limit.state_name().to_owned(), check.key.to_owned());
            let algorithm = *check.limit.algorithm();
            let before = carry_over(accounts.get(&key), &algorithm);
            let (decision, after) = decide_check(check, op, &before, now_us);
            answers.push((key, algorithm, before, decision, after));
        }
        let all = answers.iter().all(|(.., decision, _)| decision.allowed);
        let (mut decisions, mut accounts_of) = (Vec::new(), Vec::new());
        for (check, (key, algorithm, before, mut decision, after)) in
            batch.checks().iter().zip(answers)
        {
            if all || check.limit.counts_attempts() {
                if !all && decision.allowed {
                    // The wait includes the charge of this very attempt.
                    let cost = i128::from(check.cost) * parts_per_unit(&algorithm);
                    let fits = cost <= remaining_parts(&algorithm, &after, now_us).max(0);
                    let again = decision_of(&algorithm, &after, now_us, check.cost, fits);
                    decision.retry_after_us = again.retry_after_us;
                }
                accounts_of.push(account_of(check, op, (&before, &after), now_us));
                if op != Op::Peek {
                    accounts.insert(key, (algorithm, after));
                }
                decisions.push(decision);
            } else {
                // All or nothing: limits that would have admitted report what they have, uncharged.
                accounts_of.push(account_of(check, op, (&before, &before), now_us));
                decisions.push(decision_of(
                    &algorithm,
                    &before,
                    now_us,
                    check.cost,
                    decision.allowed,
                ));
            }
        }
        Verdict::several(decisions).with_accounts(accounts_of.into_iter().enumerate())
    }
}

/// The oracle knows no reservations and refuses requests with an id.
impl Store<AnyAlgorithm> for NaiveStore {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Refusal> {
        let op = batch.operation();
        match batch.checks().first() {
            Some(check) if batch.reservation_id().is_some() || op.needs_id() => {
                Err(Refusal::Unsupported { limit: check.limit.name().to_owned(), op })
            }
            _ => Ok(self.decide(batch)),
        }
    }
}

/// The decision that stands for a batch: the least remaining (the first on a tie), the longest
/// reset, and the wait after which all would admit.
pub(crate) fn summary(decisions: &[Decision]) -> Option<Decision> {
    let least = decisions.iter().map(|decision| decision.remaining).min()?;
    let shown = decisions.iter().find(|decision| decision.remaining == least)?;
    let waits: Option<Vec<u64>> =
        decisions.iter().map(|decision| decision.retry_after_us).collect();
    // Every limit that has the least must grow for the least to grow.
    let growing = decisions.iter().filter(|decision| decision.remaining == least);
    let growing: Vec<u64> = growing.map(|decision| decision.replenish_after_us).collect();
    let never = growing.contains(&0);
    Some(Decision {
        allowed: decisions.iter().all(|decision| decision.allowed),
        retry_after_us: waits.map(|waits| waits.into_iter().max().unwrap_or(0)),
        replenish_after_us: if never { 0 } else { growing.into_iter().max()? },
        reset_after_us: decisions.iter().map(|decision| decision.reset_after_us).max()?,
        ..*shown
    })
}
