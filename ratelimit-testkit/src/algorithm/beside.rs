//! The law on two limits beside each other over one state, as in a rolling deployment.

use ratelimit_core::algorithm::{InMemory, Recovery, Step};
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, Timestamp};

use crate::algorithm::AlgorithmHarness;
use crate::algorithm::laws::later;
use crate::algorithm::walk::Walk;
use crate::law::{LawResult, ensure};

/// Law 11: what this limit charged, another limit lowers by no more than it gives back, and by nothing if it charges. An
/// acquire is excepted: it takes the state over.
pub(crate) fn another_limit_forgives_nothing<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let other = walk.other;
    while walk.go().is_some() {
        let (Some(state), latest) = (&walk.state, walk.latest) else { continue };
        let unit_us = other.step(None, latest, 1).decision.reset_after_us;
        let full_us = other.step(None, latest, other.capacity()).decision.reset_after_us;
        for us in [0, 1, unit_us, full_us, walk.scale.unit_us, walk.scale.full_us / 2] {
            let Some(at) = later(latest, us) else { continue };
            // Entries that are past for the other limit are lost with its first write.
            let entries = H::Algorithm::entries_in(state) > 0;
            let recovered_us =
                |of: &H::Algorithm| of.step(Some(state), at, 0).decision.reset_after_us;
            if entries && recovered_us(other) < recovered_us(walk.algorithm()) {
                continue;
            }
            for cost in [1, 2, other.capacity().div_ceil(2), other.capacity(), walk.scale.capacity]
            {
                of_cost(walk, state, at, cost)?;
            }
        }
    }
    Ok(())
}

/// Tries every operation of the other limit that gives this cost back, or charges it.
fn of_cost<A: InMemory>(
    walk: &Walk<'_, A>,
    state: &A::State,
    at: Timestamp,
    cost: u64,
) -> LawResult {
    let other = walk.other;
    let keeps = |what: &str, step: Option<Step<A::State>>, back: u64| match step {
        Some(step) => forgives(walk, state, at, &step, back)
            .map_err(|how| format!("{what} of {cost} at {at} by {}: {how}", walk.other_text)),
        None => Ok(()),
    };
    keeps("a forced charge", other.force(Some(state), at, cost), 0)?;
    keeps("a refund", other.refund(Some(state), at, cost), cost)?;
    for made in [walk.latest, at] {
        let reservation = Reservation::new(made, cost);
        for (what, settled) in [("a settlement at 0", 0), ("a settlement at half", cost / 2)] {
            let step = other.settle(Some(state), at, &reservation, settled);
            // A lease ends whatever the cost.
            keeps(what, step, if other.has_leases() { cost } else { cost - settled })?;
        }
        let (more, back) = (cost.saturating_mul(2), if other.has_leases() { cost } else { 0 });
        keeps("a settlement at twice", other.settle(Some(state), at, &reservation, more), back)?;
    }
    if other.charges_denials() {
        let over = other.capacity().saturating_add(1);
        keeps("a denied attempt", Some(other.step(Some(state), at, over)), 0)?;
    }
    Ok(())
}

/// Checks that a step of the other limit lowers what this limit holds by no more than it gives back.
fn forgives<A: InMemory>(
    walk: &Walk<'_, A>,
    state: &A::State,
    at: Timestamp,
    step: &Step<A::State>,
    back: u64,
) -> LawResult {
    let (limit, other) = (walk.algorithm(), walk.other);
    let after = step.write.after(Some(state));
    let shown = other.step(after, at, 0).decision.remaining;
    ensure(step.decision.remaining == shown, || {
        format!("it says {:?}, and then {shown} remain", step.decision)
    })?;
    let (before, now) =
        (limit.step(Some(state), at, 0).decision, limit.step(after, at, 0).decision);
    let charged = other.force(None, at, back).map(|step| step.decision);
    let back_us = charged.unwrap_or_else(|| other.filled(at).decision).reset_after_us;
    // What a unit of cost is worth may differ, where it is a time.
    let in_time = back > 0 && limit.recovery() != Some(Recovery::AtReset);
    let forgives = now.remaining > before.remaining.saturating_add(back)
        && !(in_time && now.reset_after_us.saturating_add(back_us) >= before.reset_after_us);
    ensure(!forgives, || {
        format!("{} had {before:?}, and then {now:?}, when {back} was given back", walk.text)
    })
}
