//! The laws of an algorithm alone. Each states a clause of the contract of [`Algorithm`] and is
//! checked in every state that a walk reaches.

use ratelimit_core::algorithm::{InMemory, MAX_INTEGER, Write};
use ratelimit_core::for_memory::Compact;
use ratelimit_core::store::{Op, Reservation};
use ratelimit_core::{Algorithm, Decision, Timestamp};

use crate::algorithm::AlgorithmHarness;
use crate::algorithm::walk::{Walk, WalkStep};
use crate::law::{LawResult, ensure};

/// The time `us` microseconds later, if it can be represented.
pub(crate) fn later(at: Timestamp, us: u64) -> Option<Timestamp> {
    at.as_us().checked_add(us).and_then(Timestamp::from_us)
}

/// Law 1: no moment admits more than the capacity, and no stretch of time more than the harness
/// allows.
pub(crate) fn never_admits_more_than_its_bound<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let (mut admitted, mut moment): (Vec<(Timestamp, u64)>, _) = (Vec::new(), (None, 0_u128));
    let attempts = walk.limit().counts_attempts();
    while let Some(asked) = walk.next() {
        // Bounds do not account for refunds, so each refund is replaced by an acquire.
        let asked = WalkStep { op: Op::Acquire, ..asked };
        let step = walk.step(&asked);
        let WalkStep { at, cost, .. } = asked;
        // After the clock has gone back, the time of the last admission counts.
        let by_state = admitted.last().map_or(at, |(last, _)| at.max(*last));
        if step.decision.allowed && cost > 0 {
            let before = if moment.0 == Some(at) { moment.1 } else { 0 };
            moment = (Some(at), before + u128::from(cost));
            let capacity = walk.scale.capacity;
            ensure(moment.1 <= capacity.into(), || {
                format!("at {at}, {} are admitted of a capacity of {capacity}", moment.1)
            })?;
            if let Some(excess) = H::excess(walk.algorithm(), &admitted, by_state, cost) {
                return Err(format!("{cost} at {at} is admitted: {excess}"));
            }
            admitted.push((by_state, cost));
        } else if attempts && cost > 0 {
            // A counted attempt moves the state's time even when nothing is admitted.
            admitted.push((by_state, 0));
        }
        walk.take(step);
    }
    Ok(())
}

/// Law 2: the reported remaining units fit, one unit more does not, and after a charge as much is
/// left as the decision reported.
pub(crate) fn what_is_left_is_what_fits<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let attempts = walk.limit().counts_attempts();
    while let Some(asked) = walk.next() {
        let WalkStep { at, op, cost } = asked;
        let left = walk.decision(at, 0);
        let step = walk.step(&asked);
        let got = step.decision;
        let message =
            |what: &str| format!("{asked:?} got {got:?} where cost 0 got {left:?}: {what}");
        ensure(left.remaining <= left.limit, || message("more is left than the limit"))?;
        ensure(got.remaining <= got.limit, || message("more is left than the limit"))?;
        ensure(got.cost == cost, || message("it is said of another cost"))?;
        let capacity = walk.scale.capacity;
        let more = left.remaining.checked_add(1).map(|more| (more, false));
        for (cost, fits) in more.into_iter().chain([(left.remaining, true)]) {
            let got = walk.decision(at, cost);
            ensure(got.allowed == fits, || {
                let left = left.remaining;
                format!("at {at} there are {left} left of {capacity}, and {cost} got {got:?}")
            })?;
        }
        // A new key has all of it at some time.
        let most = walk.limit().step(None, at, capacity).decision;
        ensure(most.retry_after_us.is_some(), || {
            format!("at {at}, the capacity of {capacity} never fits a new key: {most:?}")
        })?;
        let over = walk.decision(at, capacity.saturating_add(1));
        ensure(!over.allowed || capacity == u64::MAX, || {
            format!("at {at}, one more than the capacity of {capacity} got {over:?}")
        })?;
        if op == Op::Acquire {
            ensure(got.allowed == (cost <= left.remaining), || message("it fits or not"))?;
            let due = if got.allowed { left.remaining - cost } else { left.remaining };
            let same = got.remaining == due || (attempts && !got.allowed && got.remaining <= due);
            ensure(same, || message(&format!("{due} should be left")))?;
        }
        walk.take(step);
        let after = walk.decision(at, 0);
        ensure(after.remaining == got.remaining, || {
            message(&format!("then cost 0 got {after:?}"))
        })?;
    }
    Ok(())
}

/// Law 1 for refunds and forced charges: a refund returns at most its cost and never exceeds the
/// limit; a forced charge takes its cost or everything that is left. While the clock is behind, a
/// refund returns no more; once the clock is where it was, it has returned no less.
pub(crate) fn refunds_and_forced_charges_are_exact<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    while let Some(asked) = walk.go() {
        // A refund returns the newest charges first; after the clock has gone back, those carry the
        // state's time.
        let at = walk.latest.max(asked.at);
        let (algorithm, state) = (walk.algorithm(), walk.state.as_ref());
        let left = walk.decision(at, 0).remaining;
        for cost in walk.costs() {
            let (back, kept) = (left.saturating_add(cost), left.saturating_sub(cost));
            for (what, step, range) in [
                ("a refund", algorithm.refund(state, at, cost), left..=back),
                ("a forced charge", algorithm.force(state, at, cost), kept..=kept),
            ] {
                let Some(step) = step else { continue };
                let (got, after) = (step.decision, step.write.after(state));
                let now = algorithm.step(after, at, 0).decision;
                let fair = got.allowed && got.remaining == now.remaining;
                ensure(
                    fair && now.remaining <= now.limit && range.contains(&now.remaining),
                    || {
                        format!(
                            "{what} of {cost} at {at}, where {left} were left, got {got:?}, and then cost 0 got {now:?}"
                        )
                    },
                )?;
            }
            refund_behind(walk, (asked.at, at), cost)?;
        }
    }
    Ok(())
}

/// Checks a refund at a time before that of the state. The newest charges take their time with
/// them, so that less may be left then: what had ended by their time, and not by this one, counts
/// again until it ends.
fn refund_behind<A: Algorithm>(
    walk: &Walk<'_, A>,
    (behind, at): (Timestamp, Timestamp),
    cost: u64,
) -> LawResult {
    let (algorithm, state) = (walk.algorithm(), walk.state.as_ref());
    let refunds = algorithm.refund(state, behind, cost).zip(algorithm.refund(state, at, cost));
    let Some((step, due)) = refunds.filter(|_| behind < at) else { return Ok(()) };
    let left = |state: Option<&A::State>, at| algorithm.step(state, at, 0).decision.remaining;
    let after = step.write.after(state);
    let (now, then) = (left(after, behind), left(after, at));
    let [before, most] = [behind, at].map(|at| left(state, at).saturating_add(cost));
    // What is past by then may be refunded earlier.
    let kept = (due.decision.remaining..=most).contains(&then);
    ensure(now <= before && kept, || {
        let due = due.decision;
        format!(
            "a refund of {cost} at {behind} left {now} of {before} at most, and {then} at {at}, where it leaves {due:?}"
        )
    })
}

/// Law 3: a request denied with `retry_after = d` is admitted at `now + d` and still denied one
/// microsecond before; with `None` it is never admitted. `reset_after` counts down to the moment at
/// which the key decides as a new one. A state that never expires has no reset to check.
pub(crate) fn retry_after_is_honest<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    while let Some(asked) = walk.next() {
        let step = walk.step(&asked);
        let got = step.decision;
        walk.take(step);
        let WalkStep { at, op, cost } = asked;
        let message = |what: &str| format!("{asked:?} got {got:?}: {what}");
        let waits = got.retry_after_us;
        ensure((waits == Some(0)) == got.allowed, || message("a wait of 0 is what allowed means"))?;
        match waits {
            Some(0) => {}
            Some(d) => {
                ensure(cost <= walk.scale.capacity, || message("it can never fit"))?;
                for (us, fits) in [(d - 1, false), (d, true)] {
                    let Some(then) = later(at, us) else { continue };
                    let allowed = walk.decision(then, cost).allowed;
                    let is = if allowed { "is admitted" } else { "is still denied" };
                    ensure(allowed == fits, || {
                        message(&format!("after {us} µs, at {then}, it {is}"))
                    })?;
                }
            }
            None => {
                let full_us = walk.scale.full_us;
                for us in [0, full_us, 10 * full_us, 1_000 * full_us] {
                    let Some(then) = later(at, us) else { continue };
                    let allowed = op == Op::Acquire && walk.decision(then, cost).allowed;
                    ensure(!allowed, || {
                        message(&format!("after {us} µs, at {then}, it is admitted"))
                    })?;
                }
            }
        }
        replenishes(walk, at, &got)?;
        if walk.expires != Some(Timestamp::MAX) {
            resets(walk, at, &got)?;
        }
    }
    Ok(())
}

/// Checks that more remains when a decision said so, and no earlier.
fn replenishes<A: Algorithm>(walk: &Walk<'_, A>, at: Timestamp, got: &Decision) -> LawResult {
    let d = got.replenish_after_us;
    // A limit that does not replenish has the same when everything is back.
    let last_us = if d > 0 { d - 1 } else { got.reset_after_us };
    for (us, grows) in [(Some(last_us), false), (Some(d).filter(|d| *d > 0), true)] {
        let Some(then) = us.and_then(|us| later(at, us)) else { continue };
        let remaining = walk.decision(then, 0).remaining;
        ensure((remaining > got.remaining) == grows, || {
            format!(
                "at {at} more than {} was to remain in {d} µs (0 is never); at {then} {remaining} remain",
                got.remaining
            )
        })?;
    }
    Ok(())
}

/// Checks that the key has recovered fully when a decision said so.
fn resets<A: Algorithm>(walk: &Walk<'_, A>, at: Timestamp, got: &Decision) -> LawResult {
    let d = got.reset_after_us;
    for us in [0, d / 2, d.saturating_sub(1), d] {
        let Some(then) = later(at, us) else { continue };
        let reset_us = walk.decision(then, 0).reset_after_us;
        ensure(reset_us == d - us, || {
            format!("at {at} all was to be back in {d} µs; {us} µs later, in {reset_us} µs")
        })?;
    }
    let Some(then) = later(at, d) else { return Ok(()) };
    for cost in walk.costs() {
        let (is, new) = (walk.decision(then, cost), walk.limit().step(None, then, cost).decision);
        ensure(is == new, || {
            format!(
                "at {then} all was to be back, and {cost} got {is:?}; of a key never seen it is {new:?}"
            )
        })?;
    }
    Ok(())
}

/// Law 4: a denial writes nothing. Where attempts are counted, it leaves no more than before, and
/// blocks for no shorter.
pub(crate) fn a_denial_charges_nothing<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let attempts = walk.limit().counts_attempts();
    while let Some(asked) = walk.next() {
        let before = walk.decision(asked.at, 0);
        let step = walk.step(&asked);
        let (got, keeps) = (step.decision, matches!(step.write, Write::Keep));
        walk.take(step);
        if got.allowed {
            continue;
        }
        ensure(asked.op == Op::Acquire, || {
            format!("{asked:?} was denied with {got:?}: only an acquire can be")
        })?;
        let after = walk.decision(asked.at, 0);
        let message = || {
            format!("{asked:?} was denied with {got:?}. Cost 0 got {before:?} and then {after:?}")
        };
        if attempts {
            let no_less = after.remaining <= before.remaining;
            ensure(no_less && after.reset_after_us >= before.reset_after_us, message)?;
        } else {
            ensure(keeps, || {
                format!("{asked:?} was denied with {got:?}, and writes: answer Write::Keep")
            })?;
            ensure(before == after, message)?;
        }
    }
    Ok(())
}

/// Law 5: from the microsecond of its expiry on, a state decides as an absent one and leads to the
/// same states.
pub(crate) fn expired_is_absent<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    while walk.go().is_some() {
        let (Some(expires), Some(state)) = (walk.expires, walk.state.as_ref()) else { continue };
        if expires == Timestamp::MAX {
            continue;
        }
        let message = |what: String| {
            format!("a state that expires at {expires} and none differ from then on: {what}")
        };
        walk.alike(Some(state), None, expires).map_err(message)?;
        // The states written from there on must agree, too.
        let (mut old, mut new) = (Some(state.clone()), None);
        for (position, cost) in walk.costs().into_iter().enumerate() {
            let at = expires.saturating_add_us(position as u64 * walk.scale.unit_us);
            let (from_old, from_new) = (
                walk.limit().step(old.as_ref(), at, cost),
                walk.limit().step(new.as_ref(), at, cost),
            );
            old = from_old.write.after(old.as_ref()).cloned();
            new = from_new.write.after(new.as_ref()).cloned();
            walk.alike(old.as_ref(), new.as_ref(), at).map_err(message)?;
        }
    }
    Ok(())
}

/// Law 6: at a time before the state's, no more is left than at the state's time, and what is taken
/// then stays taken.
pub(crate) fn time_going_back_mints_nothing<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    while let Some(asked) = walk.next() {
        let step = walk.step(&asked);
        let charges = asked.op != Op::Refund && asked.cost > 0 && step.decision.allowed;
        walk.take(step);
        // Only a state that was just charged is certain to carry this time or a later one.
        let (Some(state), true) = (walk.state.as_ref(), charges) else { continue };
        let (limit, timestamp, there) = (walk.limit(), asked.at, walk.decision(asked.at, 0));
        for back_us in
            [1, walk.scale.unit_us, walk.scale.full_us, timestamp.as_us() / 2, timestamp.as_us()]
        {
            let back = Timestamp::saturating_from_us(timestamp.as_us().saturating_sub(back_us));
            for cost in walk.costs().into_iter().chain([u64::MAX]) {
                let (at_timestamp, got) =
                    (walk.decision(timestamp, cost), walk.decision(back, cost));
                let same = at_timestamp.allowed == got.allowed;
                let minted =
                    if same { got.remaining > at_timestamp.remaining } else { got.allowed };
                ensure(!minted, || {
                    format!(
                        "{cost} at {timestamp} is {at_timestamp:?}, and at {back}, where the clock has gone \
                         back, {got:?}"
                    )
                })?;
            }
            let left = walk.decision(back, 0).remaining;
            let drained = limit.step(Some(state), back, left);
            let state = drained.write.after(Some(state));
            let now = limit.step(state, timestamp, 0).decision;
            ensure(now.remaining <= there.remaining - left.min(there.remaining), || {
                format!(
                    "of {there:?} at {timestamp}, {left} were taken at {back}; then at {timestamp} there is {now:?}"
                )
            })?;
        }
    }
    Ok(())
}

/// Law 8: cost 0 is allowed, writes nothing and reports the current state; a new key has its full
/// capacity at any time.
pub(crate) fn cost_zero_is_a_peek<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    while let Some(asked) = walk.next() {
        let (algorithm, at) = (walk.algorithm(), asked.at);
        for state in [walk.state.as_ref(), None] {
            let ahead = at.saturating_add_us(walk.scale.full_us / 2);
            for at in [at, ahead] {
                let free = [
                    Some(algorithm.step(state, at, 0)),
                    algorithm.refund(state, at, 0),
                    algorithm.force(state, at, 0),
                ];
                for step in free.into_iter().flatten() {
                    let got = step.decision;
                    ensure(got.allowed && got.retry_after_us == Some(0), || {
                        format!("cost 0 at {at} got {got:?}")
                    })?;
                    ensure(matches!(step.write, Write::Keep), || {
                        format!("cost 0 at {at} got {got:?}, and writes: answer Write::Keep")
                    })?;
                }
            }
        }
        let new = algorithm.step(None, at, 0).decision;
        ensure(new.remaining == new.limit && new.reset_after_us == 0, || {
            format!("of a key never seen, cost 0 at {at} got {new:?}: not all is there")
        })?;
        let step = walk.step(&asked);
        walk.take(step);
    }
    Ok(())
}

/// Law 11: a state written under another limit admits no more than this limit's capacity, and
/// blocks a key no longer than this limit takes to recover from empty.
pub(crate) fn changing_a_limit_is_safe<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let new = walk.other;
    let capacity = new.algorithm().capacity();
    let mut longest = None;
    while walk.go().is_some() {
        // After the clock has gone back, charges count for that much longer, so the latest time is
        // used.
        let (at, state) = (walk.latest, walk.state.as_ref());
        let message = |what: &str, got: &Decision| {
            let (old, new) = (walk.text, walk.other_text);
            format!("at {at} {old} was changed to {new}, which {what}: {got:?}")
        };
        let hint = "as it says of drained keys; if it can take longer from empty, say so in \
                    `AlgorithmHarness::recovers_within_us`";
        let longest = longest.get_or_insert_with(|| Longest::measure::<H>(new.algorithm(), at));
        for cost in [0, 1, capacity.div_ceil(2), capacity] {
            let got = new.step(state, at, cost).decision;
            ensure(got.remaining <= got.limit, || message("has more left than its limit", &got))?;
            let waits = got.retry_after_us;
            let most = longest.retry_us(new.algorithm(), cost);
            let locked = match (waits, most) {
                (Some(waits), Some(most)) => waits > most,
                (None, Some(_)) => true,
                (_, None) => false,
            };
            ensure(!locked, || {
                message(&format!("has {cost} wait for longer than {most:?} µs, {hint}"), &got)
            })?;
            ensure(got.reset_after_us <= longest.reset_us, || {
                message(&format!("recovers for longer than {} µs, {hint}", longest.reset_us), &got)
            })?;
        }
        let left = new.step(state, at, 0).decision.remaining;
        let drained = new.step(state, at, left);
        ensure(left <= capacity && drained.decision.allowed, || {
            message(&format!("has {left} left of a capacity of {capacity}"), &drained.decision)
        })?;
        let more = new.step(drained.write.after(state), at, 1).decision;
        ensure(!more.allowed, || message("admits one more when all is taken", &more))?;
        let over = new.step(state, at, capacity.saturating_add(1)).decision;
        ensure(!over.allowed || capacity == u64::MAX, || {
            message("admits more than it has", &over)
        })?;
    }
    Ok(())
}

/// The longest time that a limit takes to recover from empty.
struct Longest<S> {
    drained: Vec<(Timestamp, Option<S>)>,
    reset_us: u64,
}

/// How many consecutive windows are examined, and how many charges are made in a row.
const WINDOWS: usize = 10;
const CHARGES: usize = 100;

impl<S: Clone> Longest<S> {
    /// Takes the time from the harness or measures it on drained keys: by one charge, by one forced
    /// charge, and by as many charges as the limit admits. Each measurement begins where the one
    /// before has recovered, because windows begin there.
    fn measure<H: AlgorithmHarness<Algorithm: Algorithm<State = S>>>(
        limit: &H::Algorithm,
        at: Timestamp,
    ) -> Self {
        let mut drained = Vec::new();
        // Near the last representable moment no window ends any more.
        for mut begin in [at, Timestamp::ZERO, MOMENTS[1]] {
            for _ in 0..WINDOWS {
                let left = limit.step(None, begin, 0).decision.remaining;
                let step = limit.step(None, begin, left);
                let more_us = limit.step(None, begin, 1).decision.retry_after_us.unwrap_or(1);
                let us = step.decision.reset_after_us.max(more_us).max(1);
                drained.push((begin, step.write.after(None).cloned()));
                if let Some(forced) = limit.force(None, begin, u64::MAX) {
                    drained.push((begin, forced.write.after(None).cloned()));
                }
                begin = begin.saturating_add_us(us);
            }
        }
        let (mut now, mut state) = (at, None);
        for _ in 0..CHARGES {
            let left = limit.step(state.as_ref(), now, 0).decision.remaining;
            state = limit.step(state.as_ref(), now, left).write.after(state.as_ref()).cloned();
            drained.push((now, state.clone()));
            let more = limit.step(state.as_ref(), now, 1).decision.retry_after_us;
            now = now.saturating_add_us(more.unwrap_or(1).max(1));
        }
        let resets = drained
            .iter()
            .map(|(at, state)| limit.step(state.as_ref(), *at, 0).decision.reset_after_us);
        let reset_us = H::recovers_within_us(limit).or(resets.max()).unwrap_or(0);
        Self { drained, reset_us }
    }

    /// The longest wait for a cost: a recovery, or longer where so much is available at some times
    /// only.
    fn retry_us<A: Algorithm<State = S>>(&self, limit: &A, cost: u64) -> Option<u64> {
        let waits = self
            .drained
            .iter()
            .map(|(at, state)| limit.step(state.as_ref(), *at, cost).decision.retry_after_us);
        let longest = waits.collect::<Option<Vec<_>>>()?.into_iter().max();
        longest.max(Some(self.reset_us))
    }
}

/// The last moment, the first one, and one in between.
const MOMENTS: [Timestamp; 3] =
    [Timestamp::ZERO, Timestamp::saturating_from_us(1_795_218_392_123_456), Timestamp::MAX];

/// Law 6: no state, time or cost causes a panic, and neither does a compact state that no step has
/// written.
#[allow(clippy::unnecessary_wraps, reason = "a law among others")]
pub(crate) fn never_panics<H: AlgorithmHarness>(walk: &mut Walk<'_, H::Algorithm>) -> LawResult {
    while let Some(asked) = walk.next() {
        let (limit, algorithm) = (walk.limit(), walk.algorithm());
        for at in MOMENTS.into_iter().chain([asked.at]) {
            for cost in walk.costs().into_iter().chain([asked.cost, u64::MAX]) {
                for state in [walk.state.as_ref(), None] {
                    // The other laws judge the result.
                    let _ = limit.step(state, at, cost);
                    let _ = algorithm.refund(state, at, cost);
                    let _ = algorithm.force(state, at, cost);
                    let _ = algorithm.charged_at(state, at);
                    let reservation = Reservation { since: at, ..Reservation::new(asked.at, cost) };
                    let _ = algorithm.settle(state, at, &reservation, asked.cost);
                    let _ = algorithm.renew(state, at, &reservation);
                }
                if let Some(state) = &walk.state {
                    let _ = limit.step_in_place(&mut state.clone(), at, cost);
                }
                // Numbers within the range of every algorithm, even if no state reported them.
                let [span_us, extra] = [asked.cost, cost].map(|n| n.min(MAX_INTEGER));
                let compact = Compact { at, span_us, extra };
                let _ = H::Algorithm::from_compact(compact)
                    .map(|state| limit.step(Some(&state), asked.at, cost));
                let _ = algorithm.step_fast(compact, asked.at, cost);
                let _ = limit.step_compact(Some(compact), asked.at, cost);
            }
        }
        let step = walk.step(&asked);
        walk.take(step);
    }
    Ok(())
}
