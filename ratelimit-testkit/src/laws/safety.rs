//! Laws 1 and 2: as much as the bound allows is admitted, and not one unit more.

use ratelimit_core::Decision;

use crate::harness::Harness;
use crate::laws::book::{Books, excess, is_full};
use crate::laws::{Kept, Subject};
use crate::trace::{Ask, Request, Trace};

/// Law 1: in every window that the algorithm speaks of, what is admitted never exceeds its bound.
///
/// # Errors
/// How the law is broken.
pub async fn never_admits_more_than_its_bound<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
) -> Kept {
    with_books(subject, trace, |books, request, ask, decision| {
        let bound = trace.policy(ask);
        match excess(bound, books.of(ask), request.at, ask.cost) {
            Some(excess) if decision.allowed && ask.cost > 0 => subject.broken(format!(
                "{} of {:?} at {} was allowed. With it {excess}",
                ask.cost, ask.key, request.at
            )),
            _ => Ok(()),
        }
    })
    .await
}

/// Law 2: a request is denied only if it does not fit.
///
/// # Errors
/// How the law is broken.
pub async fn no_false_denial<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    with_books(subject, trace, |books, request, ask, decision| {
        let full = is_full(trace.policy(ask), books.of(ask), request.at, ask.cost);
        subject.holds(decision.allowed || full, || {
            format!(
                "{} of {:?} at {} was denied and fits with all that was admitted before",
                ask.cost, ask.key, request.at
            )
        })
    })
    .await
}

/// Runs a trace of acquires and peeks, and judges every decision by what was admitted before.
async fn with_books<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    judge: impl Fn(&Books, &Request, &Ask, &Decision) -> Kept,
) -> Kept {
    let mut books = Books::default();
    for request in &trace.requests {
        let verdict = subject.ask(&trace.limits, request).await?;
        for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
            judge(&books, request, ask, decision)?;
        }
        if verdict.allowed() && request.op == ratelimit_core::Op::Acquire {
            for ask in &request.asks {
                books.admit(ask, request.at);
            }
        }
    }
    Ok(())
}
