//! Law 4: a denial charges nothing; limits that count attempts charge it.

use ratelimit_core::{Op, Policy, Timestamp, Verdict};

use crate::capability::Capability;
use crate::harness::Harness;
use crate::laws::{Kept, Subject};
use crate::trace::{Request, Trace};

/// How often a denied request is repeated: a caller that retries must not starve itself.
const INSISTING: usize = 3;

/// Law 4: a denial charges nothing, in any limit of the batch except those that count attempts, however often
/// the request is repeated.
///
/// # Errors
/// How the store breaks the law.
pub async fn a_denial_charges_nothing<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let limits = &trace.limits;
    for request in &trace.requests {
        let at = request.at;
        let (attempts, asks): (Vec<_>, Vec<_>) =
            request.asks.iter().cloned().partition(|ask| trace.counts_attempts(ask));
        let asks = &asks;
        let accounts = subject.accounts(limits, asks, at).await?;
        let states = subject.states(limits, asks).await;
        let verdict = subject.ask(limits, request).await?;
        if verdict.allowed() {
            continue;
        }
        subject.ensure(matches!(request.op, Op::Acquire | Op::Peek), || {
            format!("{request:?} was denied: only an acquire or a peek can be")
        })?;
        for _ in 0..INSISTING {
            let now = subject.accounts(limits, asks, at).await?;
            subject.ensure(accounts == now, || {
                format!("denied was {request:?}. The accounts were {accounts:?} and are {now:?}")
            })?;
            let now = subject.states(limits, asks).await;
            subject.ensure(states == now, || {
                format!("denied was {request:?}. The states were {states:?} and are {now:?}")
            })?;
            let again = subject.ask(limits, request).await?;
            let same = !attempts.is_empty() || again.summary() == verdict.summary();
            subject.ensure(same && !again.allowed(), || {
                format!("{request:?} was denied with {verdict:?}, and then got {again:?}")
            })?;
        }
    }
    Ok(())
}

/// Law 4 for limits that count attempts: every attempt is charged, whether it is admitted, denied by the limit
/// or denied by another limit of the batch. It takes at most what is left. A caller that keeps trying stays
/// out.
///
/// # Errors
/// How the store breaks the law.
pub async fn every_attempt_is_charged<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let limits = &trace.limits;
    let mut latest = Timestamp::ZERO;
    for request in &trace.requests {
        latest = latest.max(request.at);
        let mut accounts = subject.accounts(limits, &request.asks, request.at).await?;
        let mut verdict = subject.ask(limits, request).await?;
        if request.op != Op::Acquire {
            continue;
        }
        for _ in 0..INSISTING {
            let now = subject.accounts(limits, &request.asks, request.at).await?;
            let answers = verdict.decisions().iter().zip(accounts.iter().zip(&now));
            for (ask, (decision, (before, after))) in request.asks.iter().zip(answers) {
                let charged = verdict.allowed() || trace.counts_attempts(ask);
                let due = before.remaining.saturating_sub(if charged { ask.cost } else { 0 });
                subject.ensure(after.remaining == due && decision.remaining == due, || {
                    format!(
                        "{request:?} got {verdict:?}. {:?} had {} and has {}, and should have {due}",
                        ask.key, before.remaining, after.remaining
                    )
                })?;
                subject.ensure(
                    !charged || after.reset_after_us >= before.reset_after_us,
                    || {
                        format!(
                            "{request:?} made {:?} recover sooner: {before:?}, {after:?}",
                            ask.key
                        )
                    },
                )?;
                if let (Policy::SlidingLogAttempts(log), 1..) = (trace.policy(ask), ask.cost) {
                    let window_us = log.algorithm().window_us();
                    subject.ensure(after.reset_after_us >= window_us, || {
                        format!("{request:?} is a try that {:?} does not remember", ask.key)
                    })?;
                }
            }
            if verdict.allowed() {
                break;
            }
            // The repeated request must not be admitted earlier.
            let again = subject.ask(limits, request).await?;
            let (first, then) = (verdict.summary().retry_after_us, again.summary().retry_after_us);
            let no_sooner = match (first, then) {
                (Some(first), Some(then)) => first <= then,
                (first, then) => first == then,
            };
            subject.ensure(!again.allowed() && no_sooner, || {
                format!("{request:?} was denied with {verdict:?}, and tried again it got {again:?}")
            })?;
            (accounts, verdict) = (now, again);
        }
        // After the clock has gone back, a refund may uncover an earlier bucket.
        if request.at == latest {
            attempts_fill_and_never_overfill(subject, trace, request, &verdict).await?;
        }
    }
    Ok(())
}

/// A limit that denied an attempt is full and owes no more than its capacity: a refund becomes available again.
async fn attempts_fill_and_never_overfill<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    request: &Request,
    verdict: &Verdict,
) -> Kept {
    if subject.able().lacks([Capability::Refund]).is_some() {
        return Ok(());
    }
    for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
        // The estimate of a sliding counter may exceed its limit.
        let is_estimate = matches!(trace.policy(ask), Policy::SlidingCounterAttempts(_));
        if decision.allowed || is_estimate || !trace.counts_attempts(ask) {
            continue;
        }
        let back = subject.one(&trace.limits, ask, Op::Refund, 1, request.at).await?;
        let has = subject.one(&trace.limits, ask, Op::Peek, 0, request.at).await?;
        subject.ensure(back.remaining == 1 && has.remaining == 1, || {
            format!(
                "{request:?} filled {:?}. 1 was given back: {back:?}, and there is {has:?}",
                ask.key
            )
        })?;
    }
    Ok(())
}
