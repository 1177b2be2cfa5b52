//! Law 10: the same answer everywhere.

use ratelimit_core::store::{Now, Op};
use ratelimit_core::{Algorithm, Limit, ReservationId};

use crate::capability::Capability;
use crate::law::{LawResult, ensure};
use crate::laws::Subject;
use crate::oracle::summary;
use crate::pure::PureStore;
use crate::trace::{Ask, Trace, TraceRequest};

/// Law 10, and with it what the algorithm keeps of the other laws: the store answers every request
/// as the pure step does, field by field and errors with their messages, and keeps the same states.
/// A request with an id is sent twice, and executed once.
pub(crate) async fn agrees<A: Algorithm>(subject: &Subject<'_, A>, trace: &Trace<A>) -> LawResult {
    let pure = PureStore::new();
    for request in trace.requests.iter().chain(&renewals(subject, trace)) {
        for _ in 0..if request.id.is_some() { 2 } else { 1 } {
            agrees_on(subject, &pure, &trace.limits, request, Now::At(request.at)).await?;
        }
    }
    Ok(())
}

/// Leases on two keys that are renewed together, again and again, after a trace with such a limit:
/// drawn requests do that rarely.
fn renewals<A: Algorithm>(subject: &Subject<'_, A>, trace: &Trace<A>) -> Vec<TraceRequest> {
    let lacks = subject.able.lacks([
        Capability::Reservations,
        Capability::Batches,
        Capability::SeveralKeys,
    ]);
    let leases = trace.limits.iter().rposition(|limit| limit.algorithm().has_leases());
    let (Some(limit), None) = (leases, lacks) else { return Vec::new() };
    let requests = (0..).zip([Op::Acquire, Op::Renew, Op::Renew, Op::Settle]);
    let request = |(after_us, op)| {
        let cost = u64::from(op == Op::Acquire);
        let asks = ["renewed", "with it"].map(|key| Ask { limit, key: key.to_owned(), cost });
        let at = trace.latest().saturating_add_us(after_us);
        TraceRequest { at, op, asks: asks.to_vec(), id: Some(ReservationId::new(7)) }
    };
    requests.map(request).collect()
}

/// Checks an answer, and what the request has left of its keys. At the store's own time, its clock
/// says what the request does.
pub(crate) async fn agrees_on<A: Algorithm>(
    subject: &Subject<'_, A>,
    pure: &PureStore<A>,
    limits: &[Limit<A>],
    request: &TraceRequest,
    now: Now,
) -> LawResult {
    let got = subject.answer(limits, request, now).await?;
    let due = subject.expected_answer(pure, limits, request);
    let by = if now == Now::Store { ", by the store's own clock, set to that time," } else { "" };
    ensure(got == due, || format!("{request:?}{by} got {got:?}; the pure step says {due:?}"))?;
    if let Ok(got) = &got {
        let due = summary(got.decisions());
        ensure(due.is_none_or(|due| due == *got.summary()), || {
            format!(
                "{request:?} got {:?}, which does not sum up {:?}",
                got.summary(),
                got.decisions()
            )
        })?;
    }
    for ask in &request.asks {
        let limit = &limits[ask.limit];
        if let (Some(difference), true) = (subject.difference, subject.able.can(Capability::States))
        {
            let got = subject.store.state(limit, &ask.key).await;
            let both = [got, pure.state(limit, &ask.key)];
            if let Some([got, due]) = difference(limit.algorithm(), both) {
                return Err(format!(
                    "after {request:?} the state of {:?} is {got:?} and should be {due:?}",
                    ask.key
                ));
            }
            continue;
        }
        let peek = TraceRequest::one(request.at, Op::Peek, Ask { cost: 0, ..ask.clone() });
        let got = subject.answer(limits, &peek, now).await?;
        let due = subject.expected_answer(pure, limits, &peek);
        ensure(got == due, || {
            format!("after {request:?}, {peek:?} got {got:?}; the pure step says {due:?}")
        })?;
    }
    Ok(())
}
