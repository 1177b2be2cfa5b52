//! Laws 7 and 8: batches are atomic, and peeks change nothing.

use ratelimit_core::{Batch, Op};

use crate::harness::Harness;
use crate::laws::{Kept, Subject, checks, later};
use crate::trace::{Ask, Request, Trace};

/// Law 7: a batch charges every limit or none, except that limits that count attempts always charge. It is
/// allowed if each of its limits alone would allow it. A batch that names a key twice is refused.
///
/// # Errors
/// How the store breaks the law.
pub async fn all_or_nothing<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let limits = &trace.limits;
    for request in &trace.requests {
        let Request { at, op, asks, .. } = request;
        let mut twice = asks.clone();
        twice.push(Ask { cost: 1, ..asks[0].clone() });
        subject.ensure(Batch::new(&checks(limits, &twice)).is_err(), || {
            format!("{twice:?} names a key twice and was not refused")
        })?;

        let before = subject.accounts(limits, asks, *at).await?;
        let states = subject.states(limits, asks).await;
        let mut alone = Vec::new();
        for ask in asks {
            alone.push(subject.peek(limits, ask, ask.cost, *at).await?);
        }
        let verdict = subject.ask(limits, request).await?;
        let after = subject.accounts(limits, asks, *at).await?;
        if !matches!(op, Op::Acquire | Op::Peek) {
            continue;
        }
        let all = alone.iter().all(|decision| decision.allowed);
        subject.ensure(verdict.allowed() == all, || {
            format!("{request:?} got {verdict:?}, and its limits alone say {alone:?}")
        })?;
        for (got, alone) in verdict.decisions().iter().zip(&alone) {
            subject.ensure(got.allowed == alone.allowed, || {
                format!("{request:?} got {got:?} from a limit that says {alone:?} on its own")
            })?;
        }
        for ((ask, before), after) in asks.iter().zip(&before).zip(&after) {
            let charged = *op == Op::Acquire && (verdict.allowed() || trace.counts_attempts(ask));
            let due = before.remaining.saturating_sub(if charged { ask.cost } else { 0 });
            subject.ensure(after.remaining == due, || {
                format!(
                    "{request:?} was {}. {:?} had {} and has {}",
                    if charged { "charged" } else { "not charged" },
                    ask.key,
                    before.remaining,
                    after.remaining
                )
            })?;
        }
        let now = subject.states(limits, asks).await;
        for ((ask, before), after) in asks.iter().zip(&states).zip(&now) {
            let charged = *op == Op::Acquire && (verdict.allowed() || trace.counts_attempts(ask));
            subject.ensure(charged || before == after, || {
                format!(
                    "{request:?} charges {:?} nothing. It was {before:?}, and is {after:?}",
                    ask.key
                )
            })?;
        }
    }
    Ok(())
}

/// Law 8: a request of cost 0 is allowed and writes nothing, at any time; a peek reports what the next request
/// would see.
///
/// # Errors
/// How the store breaks the law.
pub async fn cost_zero_is_a_peek<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let limits = &trace.limits;
    for request in &trace.requests {
        let Request { at, asks, .. } = request;
        let peek = Request { op: Op::Peek, ..request.clone() };
        let before = subject.ask(limits, &peek).await?;
        let states = subject.states(limits, asks).await;
        // A peek far ahead must not move the state's timestamp either.
        let ahead = later(*at, trace.longest_us() / 2).unwrap_or(*at);
        for at in [*at, ahead] {
            let mut free = Request { at, ..request.clone() };
            free.asks.iter_mut().for_each(|ask| ask.cost = 0);
            let mut answers = Vec::new();
            let all = [Op::Peek, Op::Acquire, Op::Refund, Op::Force];
            for op in all.into_iter().filter(|op| subject.able().can_do(*op)) {
                answers.push(subject.ask(limits, &Request { op, ..free.clone() }).await?);
            }
            subject
                .ensure(answers.iter().all(|got| *got == answers[0] && got.allowed()), || {
                    format!("at cost 0 {free:?} got {answers:?} as peek, acquire, refund, force")
                })?;
        }
        let again = subject.ask(limits, &peek).await?;
        subject.ensure(before == again, || {
            format!("{peek:?} got {before:?}, and after more of cost 0 {again:?}")
        })?;
        let now = subject.states(limits, asks).await;
        subject.ensure(states == now, || {
            format!("peeks wrote: the states were {states:?} and are {now:?}, after {peek:?}")
        })?;
        let got = subject.ask(limits, request).await?;
        subject.ensure(!matches!(request.op, Op::Acquire | Op::Peek) || got == before, || {
            format!("{request:?} got {got:?}, and the peek before it showed {before:?}")
        })?;
    }
    Ok(())
}
