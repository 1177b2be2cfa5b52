//! Law 11: two limits of one name in turn; and, for stores that charge before they read, a limit
//! that was changed.

use ratelimit_core::store::{Now, Op};
use ratelimit_core::{Algorithm, AnyAlgorithm, Decision, Limit, ReservationId, Timestamp};

use crate::capability::{Able, Capability};
use crate::law::{LawResult, ensure};
use crate::laws::{Said, Subject};
use crate::seeds::{AlgorithmKind, BEGINNINGS_US, Scope, full_us, rate};
use crate::trace::made::{Instance, limit};
use crate::trace::{Ask, Trace, TraceRequest};

const HOUR_US: u64 = 3_600_000_000;
const DAY_US: u64 = 24 * HOUR_US;

/// Pairs of limits that may take turns under one name: of other windows, and of other algorithms.
pub(crate) fn pairs_in_turn(scope: Scope, able: Able) -> Vec<[Instance<AnyAlgorithm>; 2]> {
    let all = match scope {
        Scope::Reservations => AlgorithmKind::RESERVATIONS.map(Scope::One).to_vec(),
        _ => Scope::singles(),
    };
    let limit_of = |scope: Scope, count, us| scope.at_rate(rate(count, us), count);
    let mut pairs = Vec::new();
    for (place, one) in all.iter().enumerate() {
        if scope.is_single() && scope != *one {
            continue;
        }
        let next = &all[(place + 1) % all.len()..][..1];
        let others = if scope.is_single() { &all[..] } else { next };
        let others = others.iter().flat_map(|other| limit_of(*other, 4, HOUR_US));
        let others = limit_of(*one, 4, DAY_US).into_iter().chain(others);
        let one = &limit_of(*one, 3, HOUR_US)[0];
        pairs.extend(others.map(|other| [one.clone(), other]));
    }
    let kind = |limit: &Instance<AnyAlgorithm>| limit.algorithm.state_kind();
    let is_one_state = |[one, other]: &[Instance<AnyAlgorithm>; 2]| kind(one) == kind(other);
    pairs.retain(|pair| able.can(Capability::Changes) || !is_one_state(pair));
    pairs.retain(|pair| pair.iter().all(|instance| able.can_keep(instance)));
    pairs
}

/// Two limits of one name that take turns, as in a rolling deployment.
struct Turns<'s, 'a> {
    subject: &'s Subject<'a, AnyAlgorithm>,
    limits: [Limit<AnyAlgorithm>; 2],
    at: Timestamp,
}

impl Turns<'_, '_> {
    async fn answer(
        &self,
        (op, limit): (Op, usize),
        key: &str,
        cost: u64,
        id: Option<ReservationId>,
    ) -> Result<Said, String> {
        let asks = vec![Ask { limit, key: key.to_owned(), cost }];
        let request = TraceRequest { at: self.at, op, asks, id };
        self.subject.answer(&self.limits, &request, Now::At(self.at)).await
    }

    async fn decision(&self, of: (Op, usize), key: &str, cost: u64) -> Result<Decision, String> {
        let failed = |(_, error)| format!("{of:?} of {key:?} failed: {error}");
        Ok(*self.answer(of, key, cost, None).await?.map_err(failed)?.summary())
    }

    /// What remains of a key under each of the limits.
    async fn remaining(&self, key: &str) -> Result<[u64; 2], String> {
        let mut remaining = [0; 2];
        for (limit, left) in remaining.iter_mut().enumerate() {
            *left = self.decision((Op::Peek, limit), key, 0).await?.remaining;
        }
        Ok(remaining)
    }
}

/// Law 11: a caller of two limits of one name in turn is admitted at most the sum of both, of other
/// algorithms or windows as well; what one of these reserves, the other neither settles nor
/// forgets.
pub(crate) async fn two_limits_in_turn_admit_their_sum(
    subject: &Subject<'_, AnyAlgorithm>,
    pair: [Instance<AnyAlgorithm>; 2],
) -> LawResult {
    let limits = pair.clone().map(|instance| limit("turns", instance));
    let turns = Turns { subject, limits, at: Timestamp::saturating_from_us(BEGINNINGS_US[2]) };
    let of = || format!("{} and {} in turn", pair[0], pair[1]);
    let capacities = pair.each_ref().map(|instance| instance.algorithm.capacity());
    let sum: u64 = capacities.iter().sum();
    let mut admitted = 0;
    for turn in 0..3 * sum {
        let limit = usize::try_from(turn % 2).unwrap_or_default();
        admitted += u64::from(turns.decision((Op::Acquire, limit), "a", 1).await?.allowed);
    }
    let is_one_state = pair[0].algorithm.state_kind() == pair[1].algorithm.state_kind();
    let most = if is_one_state { capacities.into_iter().max().unwrap_or_default() } else { sum };
    ensure(admitted <= most, || format!("{}: {admitted} are admitted, {most} at most", of()))?;
    if is_one_state {
        return Ok(());
    }
    ensure(admitted == sum, || format!("{}: {admitted} of {sum} are admitted", of()))?;
    if subject.able.can(Capability::Reset) {
        let _ = turns.decision((Op::Reset, 1), "a", 0).await?;
        let left = turns.remaining("a").await?;
        ensure(left == [0, capacities[1]], || format!("{}: a reset leaves {left:?}", of()))?;
    }
    if pair[0].can_reserve() && subject.able.can(Capability::Reservations) {
        let id = Some(ReservationId::new(7));
        let failed = |(_, error)| format!("{}: {error}", of());
        let _ = turns.answer((Op::Acquire, 0), "b", 2, id).await?.map_err(failed)?;
        let settled = turns.answer((Op::Settle, 1), "b", 0, id).await?;
        let left = turns.remaining("b").await?;
        ensure(settled.is_err() && left == [capacities[0] - 2, capacities[1]], || {
            format!("{}: the other limit settles, {settled:?}, which leaves {left:?}", of())
        })?;
        let _ = turns.answer((Op::Settle, 0), "b", 0, id).await?.map_err(failed)?;
        let left = turns.remaining("b").await?;
        ensure(left == capacities, || format!("{}: its settlement leaves {left:?}", of()))?;
    }
    Ok(())
}

/// Law 11: a state written under an old limit of the same name admits no more than the new
/// capacity, and blocks no longer than the new limit takes to recover from empty. Stores with
/// [`Capability::Changes`](crate::Capability::Changes) agree with the pure step instead, which
/// keeps the law.
pub(crate) async fn a_changed_limit_is_safe(
    subject: &Subject<'_, AnyAlgorithm>,
    trace: &Trace<AnyAlgorithm>,
) -> LawResult {
    for request in &trace.requests {
        let mut before = request.clone();
        before.asks.iter_mut().for_each(|ask| ask.limit = 0);
        let _ = subject.answer(&trace.limits, &before, Now::At(before.at)).await?;
    }
    let (new, at) = (trace.limits.len() - 1, trace.latest());
    let (instance, text) = (trace.limits[new].algorithm(), &trace.texts[new]);
    let (capacity, full_us) = (instance.capacity(), full_us(instance));
    for key in ["a", "b", "c"] {
        let one = async |op, cost, at| {
            let ask = Ask { limit: new, key: key.to_owned(), cost };
            let verdict =
                subject.ask(&trace.limits, &TraceRequest::one(at, op, ask), Now::At(at)).await?;
            Ok::<_, String>(*verdict.summary())
        };
        for cost in [0, 1, capacity] {
            let got = one(Op::Peek, cost, at).await?;
            // What is above the capacity, as anything is at a rate of 0, never fits.
            let waits = match got.retry_after_us {
                Some(us) => cost <= capacity && us <= full_us,
                None => cost > capacity,
            };
            ensure(waits && got.remaining <= got.limit && got.reset_after_us <= full_us, || {
                format!(
                    "{cost} of {key:?} at {at} got {got:?} under {text}, which takes {full_us} µs to recover. It was {}",
                    trace.texts[0]
                )
            })?;
        }
        let recovered = one(Op::Peek, capacity, at.saturating_add_us(full_us)).await?;
        ensure(recovered.allowed, || {
            format!(
                "{key:?} is not recovered {full_us} µs after its limit was changed to {text}: {recovered:?}"
            )
        })?;
        let mut admitted = 0_u128;
        for cost in [capacity.div_ceil(2), capacity, 1, 1, 1, capacity.div_ceil(2), 1] {
            let got = one(Op::Acquire, cost, at).await?;
            admitted += if got.allowed { u128::from(cost) } else { 0 };
        }
        ensure(admitted <= capacity.into(), || {
            format!(
                "{admitted} of {key:?} are admitted at {at} after its limit was changed to {text}"
            )
        })?;
    }
    Ok(())
}
