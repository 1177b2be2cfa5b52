//! Law 4: a denial charges nothing.

use ratelimit_core::Op;

use crate::harness::Harness;
use crate::laws::{Kept, Subject};
use crate::trace::{Request, Trace};

/// How often a denied request is made again: a caller that keeps trying must not starve itself.
const INSISTING: usize = 3;

/// Law 4: a denial charges nothing, in any limit of the batch, however often it is asked for.
///
/// # Errors
/// How the law is broken.
pub async fn a_denial_charges_nothing<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let limits = &trace.limits;
    for request in &trace.requests {
        let Request { at, asks, .. } = request;
        let accounts = subject.accounts(limits, asks, *at).await?;
        let states = subject.states(limits, asks).await;
        let verdict = subject.ask(limits, request).await?;
        if verdict.allowed() {
            continue;
        }
        subject.holds(matches!(request.op, Op::Acquire | Op::Peek), || {
            format!("{request:?} was denied: only an acquire or a peek can be")
        })?;
        for _ in 0..INSISTING {
            let now = subject.accounts(limits, asks, *at).await?;
            subject.holds(accounts == now, || {
                format!("denied was {request:?}. The accounts were {accounts:?} and are {now:?}")
            })?;
            let now = subject.states(limits, asks).await;
            subject.holds(states == now, || {
                format!("denied was {request:?}. The states were {states:?} and are {now:?}")
            })?;
            let again = subject.ask(limits, request).await?;
            subject.holds(again.summary() == verdict.summary(), || {
                format!("{request:?} was denied with {verdict:?}, and then got {again:?}")
            })?;
        }
    }
    Ok(())
}
