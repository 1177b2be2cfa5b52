//! Law 13, and law 10 for reservations.

use std::collections::HashMap;

use ratelimit_core::{
    Algorithm, Decision, ErrorKind, Limit, Op, Policy, Reservation, ReservationId, StoreError,
    Timestamp,
};

use crate::capability::Capability;
use crate::harness::Harness;
use crate::laws::agreement::states_agree;
use crate::laws::{Kept, Said, Subject, capacity_of, checks};
use crate::pure::PureStore;
use crate::seeds::{AlgorithmKind, Scale, refill};
use crate::trace::made::{DRAWN, IDS};
use crate::trace::{Ask, Request, Trace};

/// Law 10 for reservations: the store answers as the pure step does, errors and their messages included, and
/// keeps the same states, even when every request with an id is sent twice.
///
/// # Errors
/// How the store breaks the law.
pub async fn reservations_agree<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let pure = PureStore::new();
    for request in &trace.requests {
        let (checks, metadata) = (checks(&trace.limits, &request.asks), subject.metadata(request));
        let batch = match request.batch(&checks, &metadata) {
            Ok(batch) => batch,
            Err(error) => return subject.broken(error.to_string()),
        };
        for _ in 0..if request.id.is_some() { 2 } else { 1 } {
            let got = subject.answer(&trace.limits, request).await?;
            let due: Said = pure.decide(&batch).map_err(|refusal| {
                let refused = crate::pure::Refused(refusal);
                (refused.kind(), refused.to_string())
            });
            subject.ensure(got == due, || {
                format!("{request:?} got {got:?}; the pure step says {due:?}")
            })?;
            if subject.able().can(Capability::States) {
                states_agree(subject, trace, request, &pure).await?;
            }
        }
    }
    Ok(())
}

/// Law 13: a repeated request with an id changes nothing and gets the same answer. A reservation settled at 0
/// at once leaves the key as if nothing had been charged. Concurrent reservations never exceed the limit, and a
/// settlement makes no more room than the reservation took. A lease that is never released expires by itself;
/// after that it can be neither released nor renewed, whatever else its batch reserved. An expired reservation
/// cannot be settled. An id that was drawn for one charge is forgotten soon after its settlement.
///
/// # Errors
/// How the store breaks the law.
pub async fn a_reservation_is_settled_once<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
) -> Kept {
    let limits = &trace.limits;
    let mut ledger = Ledger::default();
    for (number, request) in trace.requests.iter().enumerate() {
        let Request { at, asks, .. } = request;
        if request.op == Op::Acquire && number % 2 == 0 {
            held_for_nothing(subject, trace, request, ReservationId::new(1_000 + number as u128))
                .await?;
        }
        let before = subject.accounts(limits, asks, *at).await?;
        let said = subject.answer(limits, request).await?;
        let after = subject.accounts(limits, asks, *at).await?;
        if request.id.is_some() {
            let again = subject.answer(limits, request).await?;
            subject.ensure(said == again, || {
                format!("{request:?} got {said:?} and, sent once more, {again:?}")
            })?;
            let now = subject.accounts(limits, asks, *at).await?;
            subject.ensure(now == after, || {
                format!("{request:?}, sent once more, changed {after:?} to {now:?}")
            })?;
        }
        subject.ensure(said.is_ok() || before == after, || {
            format!("{request:?} got {said:?} and changed {before:?} to {after:?}")
        })?;
        let allowed = said.as_ref().is_ok_and(ratelimit_core::Verdict::allowed);
        for (ask, (before, after)) in asks.iter().zip(before.iter().zip(&after)) {
            let charged = before.remaining.saturating_sub(after.remaining);
            let back = after.remaining.saturating_sub(before.remaining);
            let own = ledger.counting(trace, request, ask);
            subject
                .ensure(request.op != Op::Settle || own.is_none_or(|own| back <= own), || {
                    format!("{request:?} gave {back} back of {own:?} of {:?} that count", ask.key)
                })?;
            ledger.note(trace, request, ask, if allowed { Some(charged) } else { None });
            let (reserved, capacity) = (ledger.reserved(ask, *at), capacity_of(trace, ask));
            subject.ensure(reserved <= capacity, || {
                format!(
                    "with {request:?}, {reserved} of {capacity} of {:?} are reserved at once",
                    ask.key
                )
            })?;
        }
    }
    everything_ends(subject, trace).await?;
    a_lease_ends_beside_other_reservations(subject, trace).await?;
    a_drawn_id_is_forgotten_soon(subject, trace).await
}

/// Checks that a reservation settled at 0 at once counts as never charged, and stays settled.
async fn held_for_nothing<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    request: &Request,
    id: ReservationId,
) -> Kept {
    let limits = &trace.limits;
    let before = subject.accounts(limits, &request.asks, request.at).await?;
    let acquire = Request { id: Some(id), ..request.clone() };
    let Ok(acquired) = subject.answer(limits, &acquire).await? else { return Ok(()) };
    if !acquired.allowed() {
        return Ok(());
    }
    let reserved = subject.accounts(limits, &request.asks, request.at).await?;
    for (ask, (before, reserved)) in request.asks.iter().zip(before.iter().zip(&reserved)) {
        subject.ensure(reserved.remaining == before.remaining.saturating_sub(ask.cost), || {
            format!("{acquire:?} is reserved, and of {before:?} there is {reserved:?}")
        })?;
    }
    others_settle_nothing(subject, trace, &acquire, &reserved).await?;
    let settle = |cost: u64| {
        let mut settle = Request { op: Op::Settle, ..acquire.clone() };
        settle.asks.iter_mut().for_each(|ask| ask.cost = cost);
        settle
    };
    for (again, allowed) in [(settle(0), true), (settle(0), true), (settle(1), false)] {
        let said = subject.answer(limits, &again).await?;
        let refused = said.as_ref().err().map(|(kind, _)| *kind);
        let due = if allowed { None } else { Some(ErrorKind::Invalid) };
        subject.ensure(refused == due, || format!("{acquire:?}, and then {again:?}: {said:?}"))?;
        let now = subject.accounts(limits, &request.asks, request.at).await?;
        for (ask, (before, now)) in request.asks.iter().zip(before.iter().zip(&now)) {
            // A charge may restart a refill tick.
            let late_us = match trace.policy(ask) {
                bucket if AlgorithmKind::of(bucket).is_bucket() => refill(bucket).tick_us - 1,
                _ => 0,
            };
            let reset_us = before.reset_after_us..=before.reset_after_us.saturating_add(late_us);
            let same = now.remaining == before.remaining && reset_us.contains(&now.reset_after_us);
            subject.ensure(same, || {
                format!("{acquire:?} was settled at 0: there was {before:?}, and is {now:?}")
            })?;
        }
    }
    Ok(())
}

/// Checks that a settlement that names other limits or keys than the reservation is an error and changes
/// nothing.
async fn others_settle_nothing<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    acquired: &Request,
    reserved: &[Decision],
) -> Kept {
    let limits = &trace.limits;
    let elsewhere = |ask: &Ask| Ask { key: format!("{} elsewhere", ask.key), ..ask.clone() };
    let Some(last) = acquired.asks.last() else { return Ok(()) };
    let fewer = acquired.asks[..acquired.asks.len() - 1].to_vec();
    let other = fewer.iter().cloned().chain([elsewhere(last)]).collect();
    let more = acquired.asks.iter().cloned().chain([elsewhere(last)]).collect();
    for mut asks in [fewer, other, more] {
        for ask in &mut asks {
            ask.cost = 0;
        }
        let several = [Capability::Batches, Capability::SeveralKeys];
        let is_more = asks.len() > 1 && subject.able().lacks(several).is_some();
        if asks.is_empty() || is_more {
            continue;
        }
        let settle = Request { op: Op::Settle, asks, ..acquired.clone() };
        let said = subject.answer(limits, &settle).await?;
        let refused = matches!(said, Err((ErrorKind::Invalid, _)));
        subject.ensure(refused, || format!("{acquired:?}, and then {settle:?}: {said:?}"))?;
        let now = subject.accounts(limits, &acquired.asks, acquired.at).await?;
        subject.ensure(now == reserved, || {
            format!("{acquired:?}, and then {settle:?}: there was {reserved:?}, and is {now:?}")
        })?;
    }
    Ok(())
}

/// Checks that when everything has expired, all capacity is free, nothing can be settled or renewed, and trying
/// changes nothing.
async fn everything_ends<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    for ask in trace.everybody() {
        let policy = trace.policy(&ask);
        if policy.reservation_us().is_none() {
            continue;
        }
        let at = trace.latest().saturating_add_us(Scale::of(policy).reservation_us);
        let before = subject.peek(&trace.limits, &ask, 0, at).await?;
        let leases = AlgorithmKind::of(policy) == AlgorithmKind::Concurrency;
        subject.ensure(!leases || before.remaining == capacity_of(trace, &ask), || {
            format!("at {at} every lease of {:?} is over, and there is {before:?}", ask.key)
        })?;
        for (op, id) in [(Op::Renew, IDS[0]), (Op::Settle, IDS[0]), (Op::Settle, IDS[1])] {
            let asks = vec![Ask { cost: 0, ..ask.clone() }];
            let late = Request { at, op, asks, id: Some(id) };
            let said = subject.answer(&trace.limits, &late).await?;
            let refused = matches!(said, Err((ErrorKind::Invalid, _)));
            subject
                .ensure(refused, || format!("{late:?} is of what has ended, and got {said:?}"))?;
        }
        let after = subject.peek(&trace.limits, &ask, 0, at).await?;
        subject.ensure(before == after, || {
            format!("what has ended was settled: of {before:?} there is {after:?}")
        })?;
        if !leases && Scale::of(policy).full_us < Reservation::LIFE_US {
            nothing_past_is_given_back(subject, trace, &ask, at).await?;
        }
    }
    Ok(())
}

/// Checks that a lease which has ended is not renewed while another limit of its batch still has its reservation.
async fn a_lease_ends_beside_other_reservations<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
) -> Kept {
    let life_us = |limit: &Limit<Policy>| limit.algorithm().reservation_us();
    let place = |leases: bool| {
        trace.limits.iter().position(|limit| {
            limit.algorithm().has_leases() == leases
                && life_us(limit).is_some_and(|us| leases == (us < Reservation::LIFE_US))
        })
    };
    let (Some(lease), Some(other)) = (place(true), place(false)) else { return Ok(()) };
    if subject.able().lacks([Capability::Batches, Capability::SeveralKeys]).is_some() {
        return Ok(());
    }
    let begin = trace.latest().saturating_add_us(2 * Reservation::LIFE_US);
    let lease_us = life_us(&trace.limits[lease]).unwrap_or_default();
    let ask = |limit, key: &str| Ask { limit, key: key.to_owned(), cost: 1 };
    let asked = |op, after_us| Request {
        at: begin.saturating_add_us(after_us),
        op,
        asks: vec![ask(lease, "a lease"), ask(other, "and more")],
        id: Some(ReservationId::new(998)),
    };
    for (request, is_there) in [
        (asked(Op::Acquire, 0), true),
        (asked(Op::Renew, lease_us - 1), true),
        (asked(Op::Renew, 2 * lease_us - 1), false),
        (asked(Op::Settle, 2 * lease_us - 1), true),
    ] {
        let said = subject.answer(&trace.limits, &request).await?;
        let due = if is_there { None } else { Some(ErrorKind::Invalid) };
        let refused = said.as_ref().err().map(|(kind, _)| *kind);
        subject.ensure(refused == due, || {
            format!(
                "a lease of {lease_us} µs and another reservation came to {request:?}: {said:?}"
            )
        })?;
    }
    Ok(())
}

/// Checks that a settlement under an id that was drawn for one charge can be sent again for a while, and is then
/// forgotten.
async fn a_drawn_id_is_forgotten_soon<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let can = |limit: &Limit<Policy>| limit.algorithm().reservation_us();
    let found =
        trace.limits.iter().enumerate().find_map(|(place, limit)| Some((place, can(limit)?)));
    let Some((limit, life_us)) = found else { return Ok(()) };
    let begin = trace.latest().saturating_add_us(3 * Reservation::LIFE_US);
    let known_us = life_us.min(Reservation::REPEAT_US);
    for (op, after_us, is_known) in [
        (Op::Acquire, 0, true),
        (Op::Settle, 0, true),
        (Op::Settle, known_us - 1, true),
        (Op::Settle, known_us, false),
    ] {
        let at = begin.saturating_add_us(after_us);
        let asks = vec![Ask { limit, key: "drawn".to_owned(), cost: 1 }];
        let request = Request { at, op, asks, id: Some(DRAWN) };
        let said = subject.answer(&trace.limits, &request).await?;
        let due = if is_known { None } else { Some(ErrorKind::Invalid) };
        let refused = said.as_ref().err().map(|(kind, _)| *kind);
        subject.ensure(refused == due, || {
            format!("{request:?}, {after_us} µs after its reservation was settled, got {said:?}")
        })?;
    }
    Ok(())
}

/// Checks that a reservation of everything, renewed after a full recovery, returns nothing of what other
/// requests have taken since.
async fn nothing_past_is_given_back<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
    ask: &Ask,
    at: Timestamp,
) -> Kept {
    let (id, capacity) = (Some(ReservationId::new(999)), capacity_of(trace, ask));
    let back = at.saturating_add_us(Scale::of(trace.policy(ask)).full_us);
    for (at, op, id, cost) in [
        (at, Op::Acquire, id, capacity),
        (back, Op::Renew, id, 0),
        (back, Op::Acquire, None, capacity),
        (back, Op::Settle, id, 0),
    ] {
        let request = Request { at, op, asks: vec![Ask { cost, ..ask.clone() }], id };
        let got = subject.ask(&trace.limits, &request).await?;
        let room = op == Op::Settle && got.remaining() > 0;
        subject.ensure(got.allowed() && !room, || {
            format!("a reservation of all of {:?} came to {request:?}, which got {got:?}", ask.key)
        })?;
    }
    Ok(())
}

/// An exact account of leases and of charges in fixed windows; no other algorithm allows one.
#[derive(Default)]
struct Ledger(HashMap<(usize, String), Account>);

#[derive(Default)]
struct Account {
    /// The latest time of any request. The store may have forgotten whatever had expired by then, so those
    /// charges no longer count even when the clock goes back.
    latest: Timestamp,
    /// Whether a refund or reset took away a charge without naming its owner: the rest may then be released
    /// twice.
    muddled: bool,
    charges: Vec<Charge>,
}

struct Charge {
    id: Option<ReservationId>,
    cost: u64,
    /// The charge counts at least until `until` and, if the clock has gone back, at most until `at_most_until`.
    until: Timestamp,
    at_most_until: Timestamp,
}

impl Ledger {
    /// Records a request's effect. Omissions only ever make the account too low.
    fn note(&mut self, trace: &Trace, request: &Request, ask: &Ask, charged: Option<u64>) {
        let Request { at, op, id, .. } = request;
        let account = self.0.entry((ask.limit, ask.key.clone())).or_default();
        account.latest = account.latest.max(*at);
        let Some(charged) = charged else { return };
        let Some(until) = counts_until(trace.policy(ask), *at) else { return };
        let at_most_until = counts_until(trace.policy(ask), account.latest).unwrap_or(until);
        let own = |charge: &Charge| id.is_some() && charge.id == *id;
        match op {
            // A repeated request charges nothing.
            Op::Acquire if charged > 0 => {
                let latest = account.latest;
                account.charges.retain(|charge| !own(charge) || charge.until > latest);
                account.charges.push(Charge { id: *id, cost: ask.cost, until, at_most_until });
            }
            Op::Settle => {
                let leases = AlgorithmKind::of(trace.policy(ask)) == AlgorithmKind::Concurrency;
                for charge in account.charges.iter_mut().filter(|charge| own(charge)) {
                    charge.cost = if leases { 0 } else { charge.cost.min(ask.cost) };
                }
            }
            Op::Renew if AlgorithmKind::of(trace.policy(ask)) == AlgorithmKind::Concurrency => {
                let latest = account.latest;
                for charge in account.charges.iter_mut().filter(|charge| own(charge)) {
                    charge.at_most_until = charge.at_most_until.max(at_most_until);
                    // An expired lease stays expired.
                    charge.until =
                        if charge.until > latest { charge.until.max(until) } else { charge.until };
                }
            }
            Op::Refund | Op::Reset => account.muddled = true,
            _ => {}
        }
    }

    /// How much of a request's earlier charges under its id may still count; `None` for algorithms without an
    /// account.
    fn counting(&self, trace: &Trace, request: &Request, ask: &Ask) -> Option<u64> {
        counts_until(trace.policy(ask), request.at)?;
        let charges = self.0.get(&(ask.limit, ask.key.clone())).map_or(&[][..], |a| &a.charges);
        let own = |charge: &&Charge| charge.id == request.id && charge.at_most_until > request.at;
        Some(charges.iter().filter(own).map(|charge| charge.cost).sum())
    }

    fn reserved(&self, ask: &Ask, at: Timestamp) -> u64 {
        let Some(account) = self.0.get(&(ask.limit, ask.key.clone())) else { return 0 };
        if account.muddled {
            return 0;
        }
        let at = account.latest.max(at);
        account.charges.iter().filter(|charge| charge.until > at).map(|charge| charge.cost).sum()
    }
}

/// The end of a charge, for algorithms where its time alone decides it.
fn counts_until(policy: &Policy, at: Timestamp) -> Option<Timestamp> {
    match policy {
        Policy::Concurrency(leases) => Some(at.saturating_add_us(leases.lease_us())),
        Policy::FixedWindow(fixed) => {
            let into_us = at.as_us() % fixed.window_us();
            Some(at.saturating_add_us(fixed.window_us() - into_us))
        }
        _ => None,
    }
}
