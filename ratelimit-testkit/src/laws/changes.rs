//! Law 11 for stores that charge before they read.

use ratelimit_core::store::{Now, Op};
use ratelimit_core::{Algorithm, Policy};

use crate::law::{LawResult, ensure};
use crate::laws::Subject;
use crate::seeds::full_us;
use crate::trace::{Ask, Trace, TraceRequest};

/// Law 11: a state written under an old limit of the same name admits no more than the new capacity, and blocks no longer than
/// the new limit takes to recover from empty. Stores with [`Capability::Changes`](crate::Capability::Changes) agree with the pure
/// step instead, which keeps the law.
pub(crate) async fn a_changed_limit_is_safe(
    subject: &Subject<'_, Policy>,
    trace: &Trace<Policy>,
) -> LawResult {
    for request in &trace.requests {
        let mut before = request.clone();
        before.asks.iter_mut().for_each(|ask| ask.limit = 0);
        let _ = subject.answer(&trace.limits, &before, Now::At(before.at)).await?;
    }
    let (new, at) = (trace.limits.len() - 1, trace.latest());
    let policy = trace.limits[new].algorithm();
    let (capacity, full_us) = (policy.capacity(), full_us(policy));
    for key in ["a", "b", "c"] {
        let one = async |op, cost, at| {
            let ask = Ask { limit: new, key: key.to_owned(), cost };
            let verdict =
                subject.ask(&trace.limits, &TraceRequest::one(at, op, ask), Now::At(at)).await?;
            Ok::<_, String>(*verdict.summary())
        };
        for cost in [0, 1, capacity] {
            let got = one(Op::Peek, cost, at).await?;
            let waits = got.retry_after_us.is_some_and(|us| us <= full_us);
            ensure(waits && got.remaining <= got.limit && got.reset_after_us <= full_us, || {
                format!(
                    "{cost} of {key:?} at {at} got {got:?} under {policy}, which takes {full_us} µs to recover. It was {}",
                    trace.limits[0].algorithm()
                )
            })?;
        }
        let recovered = one(Op::Peek, capacity, at.saturating_add_us(full_us)).await?;
        ensure(recovered.allowed, || {
            format!(
                "{key:?} is not recovered {full_us} µs after its limit was changed to {policy}: {recovered:?}"
            )
        })?;
        let mut admitted = 0_u128;
        for cost in [capacity.div_ceil(2), capacity, 1, 1, 1, capacity.div_ceil(2), 1] {
            let got = one(Op::Acquire, cost, at).await?;
            admitted += if got.allowed { u128::from(cost) } else { 0 };
        }
        ensure(admitted <= capacity.into(), || {
            format!(
                "{admitted} of {key:?} are admitted at {at} after its limit was changed to {policy}"
            )
        })?;
    }
    Ok(())
}
