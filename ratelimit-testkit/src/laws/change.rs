//! Law 11: changing a limit is safe.

use ratelimit_core::{Algorithm, Op, Policy};

use crate::harness::Harness;
use crate::laws::bounds::{Bounds, excess};
use crate::laws::{Kept, Subject};
use crate::seeds::{AlgorithmKind, Scale};
use crate::trace::Trace;

/// Algorithms whose windows begin with a request.
const OWN_WINDOWS: [AlgorithmKind; 2] =
    [AlgorithmKind::FirstRequestWindow, AlgorithmKind::WindowLog];

/// Law 11: a state written under an old limit of the same name admits no more than the new capacity, and blocks
/// no longer than the new limit takes to recover from empty. Waits stay honest.
///
/// # Errors
/// How the store breaks the law.
pub async fn changing_a_limit_is_safe<H: Harness>(
    subject: &Subject<'_, H>,
    (before, after): &(Trace, Trace),
) -> Kept {
    subject.run(before).await?;
    let new = &after.limits;
    let changed_at = after.requests.first().map_or(before.latest(), |request| request.at);
    let mut everybody = before.everybody();
    everybody.extend(after.everybody().into_iter().filter(|ask| !before.everybody().contains(ask)));
    for ask in &everybody {
        let policy = new[ask.limit].algorithm();
        let scale = Scale::of(policy);
        for cost in [0, 1, scale.capacity] {
            let got = subject.peek(new, ask, cost, changed_at).await?;
            let message = |what: &str| {
                format!(
                    "{cost} of {:?} at {changed_at} got {got:?}, {what} under {policy}. It was \
                     {}",
                    ask.key,
                    before.limits[0].algorithm()
                )
            };
            subject.ensure(shows(policy, got.limit), || message("another limit"))?;
            subject.ensure(got.remaining <= got.limit, || message("more than there can be"))?;
            subject.ensure(got.retry_after_us.is_some_and(|d| d <= scale.full_us), || {
                message("locked for longer than it takes to recover from empty")
            })?;
            subject.ensure(got.reset_after_us <= scale.full_us, || {
                message("recovering for longer than from empty")
            })?;
            // An attempt's wait includes its own charge, which a peek does not make.
            let Some(wait_us @ 1..) = got.retry_after_us.filter(|_| !policy.charges_denials())
            else {
                continue;
            };
            for (after_us, admitted) in [(wait_us - 1, false), (wait_us, true)] {
                let then = changed_at.saturating_add_us(after_us);
                let again = subject.peek(new, ask, cost, then).await?;
                subject.ensure(again.allowed == admitted, || {
                    message(&format!("and at {then} {again:?}, which makes the wait a lie"))
                })?;
            }
        }
        let recovered = changed_at.saturating_add_us(scale.full_us);
        let got = subject.peek(new, ask, scale.capacity, recovered).await?;
        subject.ensure(got.allowed, || {
            format!(
                "{:?} is not recovered at {recovered}, a full recovery after the limit was changed to \
                 {policy}: {got:?}",
                ask.key
            )
        })?;
        let over = policy.capacity().saturating_add(1);
        let got = subject.peek(new, ask, over, changed_at).await?;
        subject.ensure(!got.allowed, || format!("{over} at once is allowed under {policy}"))?;
    }
    admits_no_more_than_new(subject, after).await
}

/// Whether a decision of this policy can report this limit.
fn shows(policy: &Policy, limit: u64) -> bool {
    match policy.by_admissions() {
        Policy::BucketedWindow(bucketed) => bucketed.windows().iter().any(|w| w.limit == limit),
        _ => limit == policy.capacity(),
    }
}

/// Checks that admissions since the change keep to the new limit's bound.
async fn admits_no_more_than_new<H: Harness>(subject: &Subject<'_, H>, after: &Trace) -> Kept {
    let mut bounds = Bounds::default();
    let mut last = None;
    for request in &after.requests {
        // A window that began before the change may end, and the next one begin, at any moment.
        let own_windows =
            after.limits.iter().any(|l| OWN_WINDOWS.contains(&AlgorithmKind::of(l.algorithm())));
        if own_windows && last.replace(request.at) != Some(request.at) {
            bounds = Bounds::default();
        }
        // Ask for as much as possible, so that any created capacity is found.
        for ask in &request.asks {
            let mut ask = ask.clone();
            for cost in [ask.cost, after.policy(&ask).capacity(), 1, 1, 1, 1] {
                ask.cost = cost;
                let excess = excess(after.policy(&ask), bounds.of(&ask), request.at, cost);
                let got = subject.one(&after.limits, &ask, Op::Acquire, cost, request.at).await?;
                let minted = excess.filter(|_| got.allowed && cost > 0);
                if let Some(excess) = minted {
                    return subject.broken(format!(
                        "{cost} of {:?} at {} was allowed after the limit was changed. With it {excess}",
                        ask.key, request.at
                    ));
                }
                if got.allowed {
                    bounds.admit(&ask, request.at);
                }
            }
        }
    }
    Ok(())
}
