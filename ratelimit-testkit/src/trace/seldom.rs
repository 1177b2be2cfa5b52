//! Traces that chance seldom draws.

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, Policy, ReservationId, Timestamp};

use crate::capability::{Able, Capability};
use crate::seeds::{Scope, rate};
use crate::trace::made::limit;
use crate::trace::{Ask, Trace, TraceRequest};

const AT: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const ID: ReservationId = ReservationId::new(3);

/// The checks of a long batch: more than any store has a path of its own for.
const LONG: usize = 20;

impl Scope {
    /// Long batches of each operation, on limits of this scope that the store can keep; of reservations, also batches that differ
    /// in nothing but which limit has which key.
    pub(crate) fn seldom(self, able: Able) -> Vec<Trace<Policy>> {
        let mut policies = self.at_rate(rate(9, 3_600_000_000), 9);
        policies.retain(|policy| able.can_keep(policy));
        if self != Self::Reservations {
            let ops = [Op::Acquire, Op::Peek, Op::Force, Op::Refund, Op::Adopt, Op::Reset];
            let ops = ops.into_iter().filter(|op| able.can_do(*op)).map(|op| (op, None));
            return vec![long(&policies, ops)];
        }
        policies.retain(|policy| policy.reservation_us().is_some());
        let under = |ops: [Op; 3]| ops.map(|op| (op, Some(ID))).into_iter();
        let mut traces = vec![long(&policies, under([Op::Acquire, Op::Renew, Op::Settle]))];
        // A lease is not extended.
        policies.retain(|policy| !policy.has_leases());
        let Some(first) = policies.first() else { return traces };
        traces.push(long(&policies, under([Op::Acquire, Op::Extend, Op::Settle])));
        if able.can(Capability::SeveralKeys) {
            let crossed = [[(0, "a"), (0, "b"), (1, "c")], [(0, "a"), (0, "c"), (1, "b")]];
            let requests = crossed.map(|asks| request(0, (Op::Acquire, Some(ID)), asks));
            traces.push(trace(&[*first; 2], requests));
        }
        traces
    }
}

/// One batch of these operations after the other, each of one check of so many limits.
fn long(
    policies: &[Policy],
    ops: impl Iterator<Item = (Op, Option<ReservationId>)>,
) -> Trace<Policy> {
    let policies: Vec<_> = policies.iter().copied().cycle().take(LONG).collect();
    let asks = || (0..LONG).map(|limit| (limit, "a"));
    trace(&policies, ops.zip(0..).map(|(op, n)| request(n, op, asks())))
}

fn trace(policies: &[Policy], requests: impl IntoIterator<Item = TraceRequest>) -> Trace<Policy> {
    let limits = policies.iter().enumerate();
    Trace {
        limits: limits.map(|(n, policy)| limit(&format!("l{n}"), *policy)).collect(),
        texts: policies.iter().map(ToString::to_string).collect(),
        requests: requests.into_iter().collect(),
    }
}

/// The request of this number: later than the ones before, and at a higher cost.
fn request(
    n: u64,
    (op, id): (Op, Option<ReservationId>),
    asks: impl IntoIterator<Item = (usize, &'static str)>,
) -> TraceRequest {
    let asks = asks.into_iter();
    let asks = asks.map(|(limit, key)| Ask { limit, key: key.to_owned(), cost: n + 1 }).collect();
    TraceRequest { at: AT.saturating_add_us(n), op, asks, id }
}
