//! The law on two limits beside each other over one state, as in a rolling deployment.

use ratelimit_core::algorithm::{InMemory, Recovery, Step};
use ratelimit_core::store::{Op, Reservation};
use ratelimit_core::{Algorithm, Timestamp};

use crate::algorithm::AlgorithmHarness;
use crate::algorithm::laws::later;
use crate::algorithm::walk::{Walk, WalkStep};
use crate::law::{LawResult, ensure};

/// Law 11: what this limit charged, another limit lowers by no more than it gives back, and by
/// nothing if it charges. An acquire is excepted: it takes the state over.
pub(crate) fn another_limit_forgives_nothing<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let other = walk.other.algorithm();
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
    let other = walk.other.algorithm();
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
    if walk.other.counts_attempts() {
        let over = other.capacity().saturating_add(1);
        keeps("a denied attempt", Some(walk.other.step(Some(state), at, over)), 0)?;
    }
    Ok(())
}

/// Checks that a step of the other limit lowers what this limit holds by no more than it gives
/// back.
fn forgives<A: InMemory>(
    walk: &Walk<'_, A>,
    state: &A::State,
    at: Timestamp,
    step: &Step<A::State>,
    back: u64,
) -> LawResult {
    let (limit, other) = (walk.algorithm(), walk.other.algorithm());
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

/// Whether two limits differ in numbers alone, so that one settles what the other charged.
fn differ_in_numbers<A: Algorithm>(one: &A, other: &A) -> bool {
    let window_us = |limit: &A| match limit.recovery()? {
        Recovery::Gradual => Some(0),
        // A window that is aligned to the clock begins at the epoch.
        Recovery::AtReset => Some(limit.step(None, Timestamp::ZERO, 1).decision.reset_after_us),
    };
    window_us(one).is_some_and(|us| Some(us) == window_us(other))
}

/// What a store keeps while reservations are made and settled, and what it would keep if what was
/// used of them, always the first part, had been charged alone.
struct Settling<'a, A: Algorithm> {
    limit: &'a A,
    state: Option<A::State>,
    of_used: Option<A::State>,
    open: Vec<OpenReservation>,
}

struct OpenReservation {
    reservation: Reservation,
    used: u64,
}

impl<A: Algorithm> Settling<'_, A> {
    fn remaining(&self, state: Option<&A::State>, now: Timestamp) -> u64 {
        self.limit.step(state, now, 0).decision.remaining
    }

    /// Charges a cost that fits, of which a part is used.
    fn charge(&mut self, now: Timestamp, cost: u64, used: u64) -> LawResult {
        let (state, of_used) = (self.state.as_ref(), self.of_used.as_ref());
        let (step, due) = (self.limit.step(state, now, cost), self.limit.step(of_used, now, used));
        ensure(step.decision.allowed && due.decision.allowed, || {
            format!(
                "{cost} fit at {now}, but not the {used} of it that are used: {:?}",
                due.decision
            )
        })?;
        let (state, of_used) =
            (step.write.after(state).cloned(), due.write.after(of_used).cloned());
        (self.state, self.of_used) = (state, of_used);
        Ok(())
    }

    /// Reserves a cost that fits.
    fn reserve(&mut self, now: Timestamp, cost: u64, used: u64) -> LawResult {
        let record = self.limit.record(self.state.as_ref(), now, cost, None);
        self.charge(now, cost, used)?;
        self.open.push(OpenReservation { reservation: Reservation { cost, ..record }, used });
        Ok(())
    }

    /// Extends a reservation by a cost that fits. More of it is used only if all of it was.
    fn extend(&mut self, now: Timestamp, place: usize, more: u64, used: u64) -> LawResult {
        let OpenReservation { reservation, used: before } = &self.open[place];
        let used = if *before == reservation.cost { used } else { 0 };
        let (cost, reserved, before) = (reservation.cost + more, reservation.cost, *before);
        let left = self.remaining(self.state.as_ref(), now);
        let record = self.limit.record(self.state.as_ref(), now, more, Some(reservation));
        self.charge(now, more, used)?;
        let reservation = Reservation { cost, ..record };
        let back = self.limit.settle(self.state.as_ref(), now, &reservation, reserved);
        let back = back.map_or(0, |step| step.decision.remaining);
        ensure(back == left, || {
            format!(
                "of {left} at {now} a reservation of {reserved} was extended by {more} and settled at {reserved}: there \
                 are {back}"
            )
        })?;
        self.open[place] = OpenReservation { reservation, used: before + used };
        Ok(())
    }

    fn settle(&mut self, now: Timestamp, place: usize) {
        let OpenReservation { reservation, used } = self.open.swap_remove(place);
        let step = self.limit.settle(self.state.as_ref(), now, &reservation, used);
        if let Some(step) = step {
            self.state = step.write.after(self.state.as_ref()).cloned();
        }
    }
}

/// From this capacity on, a limit may refill in ticks of up to a second.
const LARGE: u64 = 1 << 26;

/// Laws 11 and 13: a settlement never leaves more than if what was used had been charged alone, at
/// the times of the charges: also of a reservation that was extended, and after the limit's numbers
/// have changed.
pub(crate) fn settlements_create_nothing<H: AlgorithmHarness>(
    walk: &mut Walk<'_, H::Algorithm>,
) -> LawResult {
    let (algorithm, other) = (walk.algorithm(), walk.other.algorithm());
    if walk.limit().reservation_us().is_none() || algorithm.has_leases() {
        return Ok(());
    }
    let changed = differ_in_numbers(algorithm, other).then_some(other);
    let capacity = algorithm.capacity().max(changed.map_or(0, Algorithm::capacity));
    let tick_us = if capacity < LARGE { 0 } else { 1_000_000 };
    let (state, of_used, open) = (None, None, Vec::new());
    let mut settling = Settling { limit: algorithm, state, of_used, open };
    let (all, mut nth) = (walk.steps_left(), 0);
    while let Some(WalkStep { op, cost, .. }) = walk.next() {
        if walk.steps_left() * 2 < all {
            settling.limit = changed.unwrap_or(algorithm);
        }
        nth += 1;
        let (now, open) = (walk.latest, settling.open.len());
        let cost = cost.min(settling.remaining(settling.state.as_ref(), now));
        let used = [cost, cost / 2, 0, 0][nth % 4];
        match op {
            Op::Refund if open > 0 => settling.settle(now, nth % open),
            _ if cost == 0 => {}
            Op::Force if open > 0 => settling.extend(now, nth % open, cost, used)?,
            // What others charge stays charged.
            _ if nth % 3 == 0 => settling.charge(now, cost, cost)?,
            _ => settling.reserve(now, cost, used)?,
        }
        for us in [0, 1, walk.scale.unit_us, walk.scale.full_us / 2] {
            let Some(at) = later(now, us) else { continue };
            let Some(then) = later(at, tick_us) else { continue };
            let left = settling.remaining(settling.state.as_ref(), at);
            let most = settling.remaining(settling.of_used.as_ref(), then);
            ensure(left <= most, || {
                format!(
                    "after {op:?} at {now} {left} are left at {at}, and {most} if what was used had been charged alone, \
                     under {} that is changed to {}",
                    walk.text, walk.other_text
                )
            })?;
        }
    }
    Ok(())
}
