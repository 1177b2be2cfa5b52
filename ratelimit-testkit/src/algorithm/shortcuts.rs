//! The laws on an algorithm's shortcuts: each agrees with the general step.

use ratelimit_core::algorithm::{InMemory, Step, Write};
use ratelimit_core::for_memory::Compact;
use ratelimit_core::store::{Op, Reservation};
use ratelimit_core::{Algorithm, Timestamp};

use crate::algorithm::AlgorithmHarness;
use crate::algorithm::laws::later;
use crate::algorithm::walk::{Walk, WalkStep};
use crate::law::{LawResult, ensure};

/// Law 10: the same state, time and cost give the same step, whatever is asked in between.
pub(crate) fn a_step_depends_on_nothing_else<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    while let Some(asked) = walk.next() {
        let first = walk.step(&asked);
        // Other requests in between, to this limit and to another one.
        for limit in [walk.limit(), walk.other] {
            let _ = limit.step(None, asked.at.saturating_add_us(1), asked.cost / 2);
            let _ = limit.step(first.write.after(None), asked.at, 1);
        }
        let again = walk.step(&asked);
        ensure(first.decision == again.decision, || {
            format!(
                "{asked:?} got {:?} and, of the same state, {:?}",
                first.decision, again.decision
            )
        })?;
        let (one, other) =
            (first.write.after(walk.state.as_ref()), again.write.after(walk.state.as_ref()));
        walk.alike(one, other, asked.at)
            .map_err(|message| format!("{asked:?} wrote one thing and then another: {message}"))?;
        walk.take(first);
    }
    Ok(())
}

/// The kind and expiry of a write, without its state, for comparison.
fn kind<S>(write: &Write<S>) -> (&'static str, Option<Timestamp>) {
    match write {
        Write::Keep => ("Keep", None),
        Write::Put { expires, .. } => ("Put", Some(*expires)),
        Write::Remove => ("Remove", None),
    }
}

/// Law 10: `step_in_place`, `step_compact` and `step_fast` decide and write what `step` does; a
/// state survives the round trip through its compact form. `debt`, `owed`, `forgiven` and `filled`
/// tell what the steps do.
pub(crate) fn shortcuts_agree_with_the_step<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    while let Some(asked) = walk.next() {
        let asked = WalkStep { op: Op::Acquire, ..asked };
        let step = walk.step(&asked);
        let WalkStep { at, cost, .. } = asked;
        if let Some(before) = &walk.state {
            let mut own = before.clone();
            let placed = walk.limit().step_in_place(&mut own, at, cost);
            let of = ("step_in_place", asked);
            says_the_same(of, &step, &placed)?;
            if let Some(due) = step.write.after(Some(before)) {
                leaves_the_same(walk, of, Some(&own), due)?;
            }
        }
        in_compact(walk, asked, &step)?;
        owes_what_is_charged(walk)?;
        walk.take(step);
    }
    Ok(())
}

/// Checks that a shortcut decides and writes as the step does.
fn says_the_same<S, T>(
    (name, asked): (&str, WalkStep),
    step: &Step<S>,
    shortcut: &Step<T>,
) -> LawResult {
    let due = (step.decision, kind(&step.write));
    let got = (shortcut.decision, kind(&shortcut.write));
    ensure(got == due, || {
        format!(
            "`{name}` says {:?} and writes {:?} where the step says {:?} and writes {:?}, of {asked:?}",
            got.0, got.1, due.0, due.1
        )
    })
}

/// Checks that a shortcut leaves the state that the step leaves.
fn leaves_the_same<A: InMemory>(
    walk: &Walk<'_, A>,
    (name, asked): (&str, WalkStep),
    got: Option<&A::State>,
    due: &A::State,
) -> LawResult {
    walk.alike(got, Some(due), asked.at).map_err(|message| {
        format!("`{name}` leaves another state than the step, of {asked:?}: {message}")
    })
}

/// Checks `debt`, `owed`, `forgiven` and `filled` by forced charges. An algorithm that passes its
/// calls on to another one and forgets one of these methods has its default instead.
fn owes_what_is_charged<A: InMemory>(walk: &Walk<'_, A>) -> LawResult {
    let (algorithm, at, state) = (walk.algorithm(), walk.latest, walk.state.as_ref());
    let now = |state: Option<&A::State>| algorithm.step(state, at, 0).decision;
    let level = |state: Option<&A::State>| {
        i128::from(now(state).remaining) - i128::from(algorithm.owed(state, at))
    };
    let debt = algorithm.debt();
    for cost in [1, walk.scale.capacity, walk.scale.capacity.saturating_add(debt), u64::MAX] {
        let Some(forced) = algorithm.force(state, at, cost) else { break };
        let forgiven = algorithm.forgiven(state, at, cost);
        let (before, after) = (level(state), level(forced.write.after(state)));
        ensure(before - (i128::from(cost) - i128::from(forgiven)) == after, || {
            format!(
                "at {at} {before} is left (less than 0 is `owed`), and after a forced charge of {cost}, of which {forgiven} is \
                 `forgiven`, {after}"
            )
        })?;
    }
    let (filled, forced) = (algorithm.filled(at), algorithm.force(None, at, u64::MAX));
    for (what, step) in [("`filled`", Some(&filled)), ("a forced charge of all", forced.as_ref())] {
        let Some(step) = step else { continue };
        let after = step.write.after(None);
        let (got, owed) = (now(after), algorithm.owed(after, at));
        ensure(got.remaining == 0 && step.decision.remaining == 0 && owed == debt, || {
            format!("at {at} {what} leaves {got:?} and owes {owed} of a `debt` of {debt}")
        })?;
        let longest_us = now(filled.write.after(None)).reset_after_us;
        let others_us = got.reset_after_us.max(now(state).reset_after_us);
        ensure(others_us <= longest_us, || {
            format!(
                "at {at} `filled` is full again in {longest_us} us, and another key in {others_us}"
            )
        })?;
    }
    Ok(())
}

/// How much later the same request is made again.
const LATER_US: u64 = 1_000_000;

/// Checks that the operations on compact states agree with the step.
fn in_compact<A: InMemory>(
    walk: &Walk<'_, A>,
    asked: WalkStep,
    step: &Step<A::State>,
) -> LawResult {
    let (limit, WalkStep { at, cost, .. }) = (walk.limit(), asked);
    let compact = match &walk.state {
        None => None,
        Some(state) => {
            let Some(compact) = A::to_compact(state) else { return Ok(()) };
            let Some(back) = A::from_compact(compact) else {
                return Err(format!(
                    "`from_compact` does not know {compact:?}, which `to_compact` encoded"
                ));
            };
            walk.alike(Some(state), Some(&back), at).map_err(|message| {
                format!("a state encoded as {compact:?} comes back as another: {message}")
            })?;
            Some(compact)
        }
    };
    if let Some(stepped) = limit.step_compact(compact, at, cost) {
        agrees(walk, ("step_compact", asked), step, &stepped)?;
    }
    let Some(compact) = compact else { return Ok(()) };
    // A denied attempt is charged, which no fast step does.
    if limit.counts_attempts() && !step.decision.allowed {
        return Ok(());
    }
    let algorithm = limit.algorithm();
    let quick = algorithm.step_fast(compact, at, cost);
    if let Some(stepped) = &quick {
        ensure(algorithm.has_fast_step(), || {
            "there is a fast step, and `has_fast_step` denies it".to_owned()
        })?;
        agrees(walk, ("step_fast", asked), step, stepped)?;
    }
    // The step must not depend on the moment from which the compact state counts time.
    if let (Some(then), Some(now)) = (later(compact.at, LATER_US), later(at, LATER_US)) {
        let moved = algorithm.step_fast(Compact { at: then, ..compact }, now, cost);
        let later_by = |step: &Step<Compact>, by_us: u64| {
            let written = step.write.after(None);
            (step.decision, written.map(|s| (s.at.as_us() - by_us, s.span_us, s.extra)))
        };
        let (moved, stayed) =
            (moved.as_ref().map(|s| later_by(s, LATER_US)), quick.as_ref().map(|s| later_by(s, 0)));
        ensure(moved == stayed, || {
            format!(
                "`step_fast` of {asked:?} says {stayed:?}, and if all times are {LATER_US} µs later {moved:?}"
            )
        })?;
    }
    Ok(())
}

/// Checks that a step between compact states agrees with the general step.
fn agrees<A: InMemory>(
    walk: &Walk<'_, A>,
    of: (&str, WalkStep),
    step: &Step<A::State>,
    compact: &Step<Compact>,
) -> LawResult {
    says_the_same(of, step, compact)?;
    match (&compact.write, &step.write) {
        (Write::Put { state, .. }, Write::Put { state: due, .. }) => {
            leaves_the_same(walk, of, A::from_compact(*state).as_ref(), due)
        }
        _ => Ok(()),
    }
}

/// How much longer than it matters a state may be kept: as in a store.
const SLACK_US: u64 = 2_000_000;

/// Law 9: a step leaves no more entries than announced, the caller's metadata is kept and changes
/// no decision, and a state expires when it stops mattering.
pub(crate) fn entries_and_metadata_are_accounted_for<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let entries = |state: Option<&_>| state.map_or(0, H::Algorithm::entries_in);
    while let Some(asked) = walk.next() {
        let before = entries(walk.state.as_ref());
        let step = walk.step(&asked);
        walk.take(step);
        let (after, most) = (entries(walk.state.as_ref()), walk.algorithm().entries_per_step());
        ensure(after <= before + most, || {
            format!(
                "{asked:?} made {after} entries of {before}, and at most {most} more are announced"
            )
        })?;
        if let (Some(expires), Some(state)) = (walk.expires, &walk.state) {
            let reset_us = walk.decision(asked.at, 0).reset_after_us;
            let late = expires > asked.at.saturating_add_us(reset_us.saturating_add(SLACK_US));
            let last = Timestamp::saturating_from_us(expires.as_us().saturating_sub(1));
            ensure(!late || walk.alike(Some(state), None, last).is_err(), || {
                format!(
                    "at {} all is back in {reset_us} us, and the state expires at {expires}: stores would keep it for too long",
                    asked.at
                )
            })?;
        }
        if let (Some(bytes), Some(state)) = (walk.algorithm().metadata_bytes(), &walk.state) {
            let mut annotated = state.clone();
            walk.algorithm().annotate(&mut annotated, &vec![255; bytes]);
            walk.alike(Some(&annotated), Some(state), asked.at)
                .map_err(|message| format!("metadata change what is decided: {message}"))?;
            let is_kept = bytes == 0 || format!("{annotated:?}") != format!("{state:?}");
            ensure(is_kept, || {
                format!("`metadata_bytes` is {bytes}, and `annotate` leaves {state:?} as it is")
            })?;
        }
    }
    Ok(())
}

/// Law 13: a reservation settled at 0 at once leaves the state as if nothing had been charged;
/// settled at its charge, it changes nothing. A settlement returns at most the excess, and nothing
/// that has already refilled. A renewal returns nothing.
pub(crate) fn a_reservation_is_settled_once<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let algorithm = walk.algorithm();
    let Some(life_us) = walk.limit().reservation_us() else { return Ok(()) };
    while let Some(WalkStep { at, cost, .. }) = walk.go() {
        let before = walk.state.as_ref();
        let had = walk.decision(at, 0).remaining;
        let cost = cost.min(had);
        if cost == 0 {
            continue;
        }
        let timestamp = algorithm.charged_at(before, at);
        ensure(timestamp >= at, || {
            format!("a charge at {at} counts as made at {timestamp}, before that")
        })?;
        let reservation = Reservation::new(timestamp, cost);
        let step = algorithm.step(before, at, cost);
        let charged = step.write.after(before);
        let left = |state: Option<&_>, at| algorithm.step(state, at, 0).decision.remaining;
        let settled = |state: Option<&_>, at: Timestamp, cost: u64| {
            let step = algorithm.settle(state, at, &reservation, cost);
            let step =
                step.ok_or_else(|| format!("`hold_us` is {life_us}, and `settle` does nothing"))?;
            let remaining = left(step.write.after(state), at);
            let decision = step.decision;
            ensure(
                decision.allowed && decision.remaining == remaining && decision.cost == cost,
                || {
                    format!(
                        "settled at {cost} at {at}, it says {decision:?}, and {remaining} are left"
                    )
                },
            )?;
            Ok::<u64, String>(remaining)
        };
        let message = |what: &str, is: u64| {
            format!("of {had} at {at}, {cost} were reserved, and {what}: there are {is}")
        };
        let nothing = settled(charged, at, 0)?;
        ensure(nothing == had, || message("settled at 0 at once", nothing))?;
        let more = settled(charged, at, cost.saturating_add(1))?;
        // A lease ends whatever the cost; otherwise only the rest is charged.
        let leases = algorithm.has_leases();
        let due = if leases { had } else { (had - cost).saturating_sub(1) };
        ensure(more == due, || message("settled at one more", more))?;
        let by_scale = [0, 1, walk.scale.unit_us, walk.scale.full_us / 2];
        for us in by_scale.into_iter().chain(walk.unkind_after(at)) {
            let Some(then) = later(at, us).filter(|_| us < life_us) else { continue };
            let without = left(charged, then);
            for at_cost in [0, cost / 2, cost] {
                let is = settled(charged, then, at_cost)?;
                let most = without.saturating_add(cost);
                ensure((without..=most).contains(&is), || {
                    message(
                        &format!("settled at {at_cost} at {then}, where {without} were left"),
                        is,
                    )
                })?;
            }
            let renewed = algorithm.renew(charged, then, &reservation);
            let renewed_state = renewed.write.after(charged);
            let is = left(renewed_state, then);
            ensure(renewed.decision.allowed && is <= without, || {
                message(&format!("renewed at {then}, where {without} were left"), is)
            })?;
            let resets_us = |state| algorithm.step(state, then, 0).decision.reset_after_us;
            let anew_us = algorithm.step(None, then, cost).decision.reset_after_us;
            ensure(!leases || resets_us(renewed_state) >= anew_us, || {
                message(&format!("renewed at {then}, the lease does not last for {anew_us} us"), is)
            })?;
        }
        if let Some(undone) = charged.and_then(|now| algorithm.undo(charged, at, &reservation, now))
        {
            let is = left(undone.write.after(charged), at);
            ensure(is == had, || message("taken back at once", is))?;
        }
        past_gives_nothing_back(walk, charged, &reservation, life_us)?;
    }
    Ok(())
}

/// Once a charge has refilled and another request has taken it, settling it returns nothing.
fn past_gives_nothing_back<A: InMemory>(
    walk: &Walk<'_, A>,
    charged: Option<&A::State>,
    reservation: &Reservation,
    life_us: u64,
) -> LawResult {
    let algorithm = walk.algorithm();
    let back_us = algorithm.step(charged, reservation.timestamp, 0).decision.reset_after_us;
    let Some(then) = later(reservation.timestamp, back_us).filter(|_| back_us < life_us) else {
        return Ok(());
    };
    let left = algorithm.step(charged, then, 0).decision.remaining;
    let taken = algorithm.step(charged, then, left);
    let taken = taken.write.after(charged);
    let Some(settled) = algorithm.settle(taken, then, reservation, 0) else { return Ok(()) };
    let is = algorithm.step(settled.write.after(taken), then, 0).decision.remaining;
    ensure(is == 0, || {
        format!(
            "what was reserved at {} was back at {then}, and all was taken by another; settled at 0 it gave {is} back",
            reservation.timestamp
        )
    })
}
