//! Laws 1 and 2: exactly as much as the bound allows is admitted.

use ratelimit_core::{Decision, Op};

use crate::harness::Harness;
use crate::laws::bounds::{Bounds, excess, is_full};
use crate::laws::{Kept, Subject, capacity_of};
use crate::trace::{Ask, Request, Trace};

/// Law 1: in every window that the algorithm defines, admissions never exceed its bound.
///
/// # Errors
/// How the store breaks the law.
pub async fn never_admits_more_than_its_bound<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
) -> Kept {
    with_bounds(subject, trace, Attempts::LeftOut, |bounds, request, ask, decision| {
        let bound = trace.policy(ask);
        match excess(bound, bounds.of(ask), request.at, ask.cost) {
            Some(excess) if decision.allowed && ask.cost > 0 => subject.broken(format!(
                "{} of {:?} at {} was allowed. With it {excess}",
                ask.cost, ask.key, request.at
            )),
            _ => Ok(()),
        }
    })
    .await
}

/// Law 2: a request is denied only if it does not fit beside the earlier admissions or, where attempts are
/// counted, the earlier attempts.
///
/// # Errors
/// How the store breaks the law.
pub async fn no_false_denial<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    with_bounds(subject, trace, Attempts::Counted, |bounds, request, ask, decision| {
        let full = is_full(trace.policy(ask), bounds.of(ask), request.at, ask.cost);
        subject.ensure(decision.allowed || full, || {
            format!(
                "{} of {:?} at {} was denied and fits with all that was admitted before",
                ask.cost, ask.key, request.at
            )
        })
    })
    .await
}

/// Whether the bounds include attempts that were charged and not admitted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempts {
    LeftOut,
    Counted,
}

/// Runs a trace of acquires and peeks, and judges every decision by the requests recorded before it.
async fn with_bounds<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    attempts: Attempts,
    judge: impl Fn(&Bounds, &Request, &Ask, &Decision) -> Kept,
) -> Kept {
    let mut bounds = Bounds::default();
    for request in &trace.requests {
        let verdict = subject.ask(&trace.limits, request).await?;
        for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
            judge(&bounds, request, ask, decision)?;
        }
        if request.op != Op::Acquire {
            continue;
        }
        for ask in &request.asks {
            if verdict.allowed() {
                bounds.admit(ask, request.at);
            } else if trace.counts_attempts(ask) && ask.cost > 0 {
                let most = ask.cost.min(capacity_of(trace, ask));
                let cost = if attempts == Attempts::Counted { most } else { 0 };
                bounds.note(ask, request.at, cost);
            }
        }
    }
    Ok(())
}
