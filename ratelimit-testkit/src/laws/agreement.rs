//! Laws 10 and 12: the same answer everywhere.

use ratelimit_core::{Algorithm, Decision, Policy, Verdict};

use crate::capability::Capability;
use crate::harness::Harness;
use crate::laws::{Kept, Subject, as_read, checks};
use crate::oracle::{NaiveStore, summary};
use crate::pure::PureStore;
use crate::seeds::{AlgorithmKind, by_attempts, limit, rate, refill};
use crate::trace::{Request, Trace};

/// Law 10: the store, the pure step and the oracle give the same answers, field by field, and the store keeps
/// the same states as the pure step.
///
/// # Errors
/// How the store breaks the law.
pub async fn one_answer_everywhere<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    follow(subject, trace, &PureStore::new(), Some(&NaiveStore::new())).await
}

/// Law 10 when a limit changes between two traces: the store reads the states left by the old limit as the pure
/// step does. Stores that report no states pass, and stores that charge before they read: these keep no end of a window.
///
/// # Errors
/// How the store breaks the law.
pub async fn one_answer_after_a_limit_was_changed<H: Harness>(
    subject: &Subject<'_, H>,
    (before, after): &(Trace, Trace),
) -> Kept {
    let pure = PureStore::new();
    if subject.able().can(Capability::States) && subject.able().can(Capability::Force) {
        follow(subject, before, &pure, None).await?;
        follow(subject, after, &pure, None).await?;
    }
    Ok(())
}

/// Runs a trace and compares every answer and every state.
async fn follow<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    pure: &PureStore,
    oracle: Option<&NaiveStore>,
) -> Kept {
    for request in &trace.requests {
        let got = subject.ask(&trace.limits, request).await?;
        let (checks, metadata) = (checks(&trace.limits, &request.asks), subject.metadata(request));
        let batch = match request.batch(&checks, &metadata) {
            Ok(batch) => batch,
            Err(error) => return subject.broken(error.to_string()),
        };
        if let Some(oracle) = oracle {
            agree(subject, request, &got, &oracle.decide(&batch), "the oracle")?;
        }
        let due = match pure.decide(&batch) {
            Ok(due) => due,
            Err(refusal) => return subject.broken(format!("{request:?} is refused: {refusal}")),
        };
        agree(subject, request, &got, &due, "the pure step")?;
        subject.ensure(summary(got.decisions()).is_none_or(|due| due == *got.summary()), || {
            format!(
                "{request:?} got {:?}, which does not sum up {:?}",
                got.summary(),
                got.decisions()
            )
        })?;
        if subject.able().can(Capability::States) {
            states_agree(subject, trace, request, pure).await?;
        }
    }
    Ok(())
}

/// Fails unless the store keeps the same states for a request's keys as the pure step.
pub(crate) async fn states_agree<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    request: &Request,
    pure: &PureStore,
) -> Kept {
    for ask in &request.asks {
        let limit = &trace.limits[ask.limit];
        let got = subject.state(limit, &ask.key).await;
        let due = pure.state(limit, &ask.key).and_then(|state| as_read(state, limit.algorithm()));
        subject.ensure(got == due, || {
            format!("after {request:?} the state of {:?} is {got:?} and should be {due:?}", ask.key)
        })?;
    }
    Ok(())
}

/// Fails unless two answers are the same.
pub(crate) fn agree<H: Harness>(
    subject: &Subject<'_, H>,
    request: &Request,
    got: &Verdict,
    due: &Verdict,
    says: &str,
) -> Kept {
    let same = |(got, due): (&Decision, &Decision)| got == due;
    let all = got.decisions().len() == due.decisions().len()
        && got.decisions().iter().zip(due.decisions()).all(same)
        && got.summary() == due.summary();
    subject.ensure(all, || {
        format!(
            "{request:?} got {:?}, summed up as {:?}; {says} says {:?}, summed up as {:?}",
            got.decisions(),
            got.summary(),
            due.decisions(),
            due.summary()
        )
    })
}

/// Law 12: the token bucket and the generic cell rate algorithm with the same rate and burst decide alike.
///
/// # Errors
/// How the store breaks the law.
pub async fn two_names_one_machine<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let under = |kind: AlgorithmKind| -> Vec<_> {
        let policy = |policy: &Policy| {
            let refill = refill(policy);
            let rate = rate(refill.tick_units, refill.token_units * refill.tick_us);
            let renamed = kind.policy(rate, refill.burst);
            if policy.charges_denials() { by_attempts(renamed) } else { renamed }
        };
        let name = |n: usize| format!("{}-{n}", policy(trace.limits[n].algorithm()).name());
        let renamed = trace.limits.iter().enumerate();
        renamed.map(|(n, old)| limit(&name(n), policy(old.algorithm()))).collect()
    };
    let (gcra, bucket) = (under(AlgorithmKind::Gcra), under(AlgorithmKind::TokenBucket));
    for request in &trace.requests {
        let as_gcra = subject.ask(&gcra, request).await?;
        let as_bucket = subject.ask(&bucket, request).await?;
        subject.ensure(as_gcra == as_bucket, || {
            format!("{request:?} got {as_gcra:?} as gcra and {as_bucket:?} as token bucket")
        })?;
    }
    Ok(())
}
