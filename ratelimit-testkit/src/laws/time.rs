//! Laws 5, 6 and 9: expiry, a clock that goes back, and cleaning up.

use std::time::Duration;

use ratelimit_core::{Now, Op, Policy, Timestamp};

use crate::capability::Capability;
use crate::harness::Harness;
use crate::laws::{Kept, Subject, capacity_of};
use crate::seeds::Scale;
use crate::trace::{Ask, Request, Trace};

/// Law 5: from the microsecond of its expiry on, a key's state decides as an absent one.
///
/// # Errors
/// How the store breaks the law.
pub async fn expired_is_absent<H: Harness>(
    subject: &Subject<'_, H>,
    (first, then): &(Trace, Trace),
) -> Kept {
    subject.run(first).await?;
    let mut recovered = first.latest();
    for ask in first.everybody() {
        let account = subject.peek(&first.limits, &ask, 0, first.latest()).await?;
        recovered = recovered.max(first.latest().saturating_add_us(account.reset_after_us));
    }
    // The second trace begins when the first has expired, on the same keys and on new ones.
    let begin = then.requests.first().map_or(Timestamp::ZERO, |request| request.at);
    for request in &then.requests {
        let at = recovered.saturating_add_us(request.at.saturating_us_since(begin));
        let used = Request { at, ..request.clone() };
        let mut fresh = used.clone();
        fresh.asks.iter_mut().for_each(|ask| ask.key.push_str(" never seen"));
        let used_got = subject.ask(&first.limits, &used).await?;
        let fresh_got = subject.ask(&first.limits, &fresh).await?;
        subject.ensure(used_got == fresh_got, || {
            format!(
                "everything had recovered at {recovered}. {used:?} got {used_got:?}, and a key never \
                 seen got {fresh_got:?}"
            )
        })?;
    }
    Ok(())
}

/// Law 6: at a time before the state's timestamp, decisions equal those at the timestamp, with waits counted
/// from the earlier time.
///
/// # Errors
/// How the store breaks the law.
pub async fn time_going_back_mints_nothing<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
) -> Kept {
    let limits = &trace.limits;
    subject.run(trace).await?;
    let now = trace.latest();
    let first = trace.requests.first().map_or(Timestamp::ZERO, |request| request.at);
    for ask in trace.everybody() {
        // The last charge sets the key's clock. Where nothing is left, nothing can be charged.
        if subject.peek(limits, &ask, 0, now).await?.remaining == 0 {
            continue;
        }
        subject.one(limits, &ask, Op::Acquire, 1, now).await?;
        let timestamp = timestamp_of(trace.policy(&ask), now);
        let capacity = capacity_of(trace, &ask);
        for back in [timestamp.as_us().saturating_sub(1), first.as_us(), first.as_us() / 2, 0] {
            let back = Timestamp::saturating_from_us(back).min(timestamp);
            let by_us = timestamp.saturating_us_since(back);
            for cost in [0, 1, 2, capacity, u64::MAX] {
                let at_timestamp = subject.peek(limits, &ask, cost, timestamp).await?;
                let got = subject.peek(limits, &ask, cost, back).await?;
                let mut due = at_timestamp;
                due.retry_after_us = due.retry_after_us.map(|d| if d == 0 { 0 } else { d + by_us });
                for wait_us in [&mut due.replenish_after_us, &mut due.reset_after_us] {
                    if *wait_us > 0 {
                        *wait_us += by_us;
                    }
                }
                subject.ensure(got == due, || {
                    format!(
                        "{cost} of {:?} at {timestamp} is {at_timestamp:?}; asked at {back} it is {got:?} and \
                         should be {due:?}",
                        ask.key
                    )
                })?;
            }
        }
        drain_in_the_past(subject, trace, &ask, timestamp, first.min(timestamp)).await?;
    }
    Ok(())
}

/// The timestamp of a state charged at `now`: the time of the charge or, for the sliding counter, which keeps
/// no other, the beginning of its window.
fn timestamp_of(policy: &Policy, now: Timestamp) -> Timestamp {
    match policy.by_admissions() {
        Policy::SlidingCounter(counter) => {
            Timestamp::saturating_from_us(now.as_us() - now.as_us() % counter.window_us())
        }
        _ => now,
    }
}

/// Takes everything at a past time, and checks that it was no more than before and that nothing is left
/// afterwards.
async fn drain_in_the_past<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    ask: &Ask,
    now: Timestamp,
    past: Timestamp,
) -> Kept {
    let limits = &trace.limits;
    let there = subject.peek(limits, ask, 0, now).await?.remaining;
    subject.one(limits, ask, Op::Acquire, there, past).await?;
    for at in [past, now] {
        let more = subject.one(limits, ask, Op::Acquire, 1, at).await?;
        subject.ensure(!more.allowed, || {
            format!(
                "{there} of {:?} were left at {now} and all acquired at {past}; at {at} one more is \
                 admitted: {more:?}",
                ask.key
            )
        })?;
    }
    Ok(())
}

/// How much longer than needed a store may keep a state.
const SLACK: Duration = Duration::from_secs(2);

/// The part of the hour of grace for which what was written at a given time must be kept, however slow the test is.
const GRACE: Duration = Duration::from_micros(Now::PADDING_US / 16 * 15);

/// Law 9: everything that is written disappears by itself soon after it stops to matter. That includes
/// reservations, which are known for as long as they can be settled. What was written at a given time is kept for an
/// hour longer, if the harness reports what is kept.
///
/// # Errors
/// How the store breaks the law.
pub async fn nothing_leaks<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    // Covers both rounds: the states of the first are still there in the second.
    let mut longest_us = 0;
    for (by_own_clock, padding_us) in [(true, 0), (false, Now::PADDING_US)] {
        let kept = if by_own_clock { Vec::new() } else { leaks(subject, GRACE).await };
        for request in &trace.requests {
            let mut request = request.clone();
            // The two rounds run on different clocks, so their keys must differ.
            request.asks.iter_mut().for_each(|ask| ask.key.push_str(&padding_us.to_string()));
            let now = if by_own_clock { Now::Store } else { Now::At(request.at) };
            let verdict = match subject.answer_at(&trace.limits, &request, now).await? {
                Ok(verdict) => verdict,
                // Nothing was charged.
                Err(_) if request.id.is_some() || request.op == Op::Settle => continue,
                Err((_, error)) => return subject.broken(format!("{request:?} failed: {error}")),
            };
            let reserved =
                |ask: &Ask| request.id.map_or(0, |_| Scale::of(trace.policy(ask)).reservation_us);
            for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
                longest_us =
                    longest_us.max(decision.reset_after_us.max(reserved(ask)) + padding_us);
                let bound_us = trace.longest_us();
                subject.ensure(decision.reset_after_us <= bound_us, || {
                    format!(
                        "{:?} takes {} µs to recover, and no limit takes longer than {bound_us}",
                        ask.key, decision.reset_after_us
                    )
                })?;
            }
        }
        // One that decides by its own clock alone promises no grace.
        let promises = subject.able().can(Capability::PastTimes);
        if promises && !by_own_clock && kept.is_empty() {
            keeps_for_the_grace(subject, trace, padding_us).await?;
        }
        let within = Duration::from_micros(longest_us) + SLACK;
        let leaks = leaks(subject, within).await;
        subject.ensure(leaks.is_empty(), || {
            format!("after {within:?} nothing can matter, and still there is: {}", leaks.join("; "))
        })?;
    }
    Ok(())
}

async fn leaks<H: Harness>(subject: &Subject<'_, H>, within: Duration) -> Vec<String> {
    subject.harness.leaks(subject.store, within).await
}

/// Fails if a state of a trace at given times is there, and gone within the hour of grace. Nothing else is kept so long.
async fn keeps_for_the_grace<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    padding_us: u64,
) -> Kept {
    let mut used = None;
    for ask in trace.everybody() {
        let ask = Ask { key: format!("{}{padding_us}", ask.key), ..ask };
        let account = subject.peek(&trace.limits, &ask, 0, trace.latest()).await?;
        if account.reset_after_us > 0 {
            used = Some(ask);
        }
    }
    let Some(used) = used else { return Ok(()) };
    if leaks(subject, Duration::ZERO).await.is_empty() || !leaks(subject, GRACE).await.is_empty() {
        return Ok(());
    }
    subject.broken(format!(
        "{:?} was charged at {}, a given time, and the store keeps nothing for {GRACE:?}: it has to keep the state for \
         an hour after its expiry, so that a slow run loses none",
        used.key,
        trace.latest()
    ))
}
