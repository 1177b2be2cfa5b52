//! Law 3: predictions of waits come true, and not a microsecond early.

use ratelimit_core::{Decision, Op, Verdict};

use crate::harness::Harness;
use crate::laws::{Kept, Subject, capacity_of, later};
use crate::seeds::AlgorithmKind;
use crate::trace::{Ask, Request, Trace};

/// Law 3: without other requests in between, a request denied with `retry_after = d` is admitted at `now + d`
/// and still denied at `now + d − 1 µs`; with `None` it can never be admitted. `replenish_after` is the time until
/// `remaining` grows, and `reset_after` the time until the limit is full again.
///
/// Where attempts are counted, the wait includes the charge of this very attempt, both for the limit and for
/// the verdict.
///
/// # Errors
/// How the store breaks the law.
pub async fn retry_after_is_honest<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    for request in &trace.requests {
        let verdict = subject.ask(&trace.limits, request).await?;
        if matches!(request.op, Op::Acquire | Op::Peek) {
            check_retry(subject, trace, request, &verdict).await?;
        }
        for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
            // A peek reports what would be left, although it takes nothing.
            let fresh = subject.peek(&trace.limits, ask, 0, request.at).await?;
            let shown = if request.op == Op::Peek { &fresh } else { decision };
            check_replenish(subject, trace, request, ask, shown).await?;
            check_reset(subject, trace, request, ask, shown).await?;
        }
    }
    Ok(())
}

async fn check_retry<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    request: &Request,
    verdict: &Verdict,
) -> Kept {
    let never = request.asks.iter().any(|ask| ask.cost > capacity_of(trace, ask));
    let retry = verdict.summary().retry_after_us;
    let message = |what: String| format!("{request:?} got {:?}: {what}", verdict.summary());
    let d = match retry {
        None => return subject.ensure(never, || message("it could fit".into())),
        Some(d) if never => {
            return subject.broken(message(format!("it never fits, not in {d} µs")));
        }
        Some(d) => d,
    };
    subject.ensure((d == 0) == verdict.allowed(), || {
        message("a wait of 0 is what allowed means".into())
    })?;
    // A peek is not charged, so it cannot show the wait that follows an attempt.
    if request.op == Op::Peek && request.asks.iter().any(|ask| trace.counts_attempts(ask)) {
        return Ok(());
    }
    let (true, Some(then)) = (d > 0, later(request.at, d)) else { return Ok(()) };
    for (at, fits) in [(later(request.at, d - 1), false), (Some(then), true)] {
        let Some(at) = at else { continue };
        let peek = Request { at, op: Op::Peek, ..request.clone() };
        let got = subject.ask(&trace.limits, &peek).await?;
        subject.ensure(got.allowed() == fits, || {
            let is = if got.allowed() { "allowed" } else { "still denied" };
            message(format!("at {at}, after {} µs, it is {is}", at.saturating_us_since(request.at)))
        })?;
    }
    Ok(())
}

async fn check_replenish<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    request: &Request,
    ask: &Ask,
    decision: &Decision,
) -> Kept {
    let d = decision.replenish_after_us;
    // A limit that does not replenish has the same when everything is back.
    let last_us = if d > 0 { d - 1 } else { decision.reset_after_us };
    for (us, grows) in [(Some(last_us), false), (Some(d).filter(|d| *d > 0), true)] {
        let Some(at) = us.and_then(|us| later(request.at, us)) else { continue };
        let then = subject.peek(&trace.limits, ask, 0, at).await?;
        let grown = then.remaining > decision.remaining;
        subject.ensure(grown == grows, || {
            let is = if grown { "more remains" } else { "no more remains" };
            format!("{request:?} got {decision:?} for {:?}: at {at} {is}: {then:?}", ask.key)
        })?;
    }
    Ok(())
}

async fn check_reset<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    request: &Request,
    ask: &Ask,
    decision: &Decision,
) -> Kept {
    let capacity = capacity_of(trace, ask);
    let d = decision.reset_after_us;
    for (us, full) in [(d.checked_sub(1), false), (Some(d), true)] {
        let Some(at) = us.and_then(|us| later(request.at, us)) else { continue };
        let all = subject.peek(&trace.limits, ask, capacity, at).await?;
        // A longer window of the same limit may still be counting when the shortest one is full again.
        let none = subject.peek(&trace.limits, ask, 0, at).await?;
        let longer = AlgorithmKind::of(trace.policy(ask)) == AlgorithmKind::BucketedWindow
            && none.reset_after_us > 0;
        let back = all.allowed && !longer;
        subject.ensure(back == full, || {
            let is = if back { "everything is back already" } else { "not all is back" };
            format!("{request:?} got {decision:?} for {:?}: at {at} {is}", ask.key)
        })?;
    }
    Ok(())
}
