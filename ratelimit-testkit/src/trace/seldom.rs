//! Traces that chance seldom draws.

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm as _, AnyAlgorithm, ReservationId, Timestamp};

use crate::capability::{Able, Capability};
use crate::seeds::{Scope, rate};
use crate::trace::made::{Instance, limit};
use crate::trace::{Ask, Trace, TraceRequest};

const AT: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const ID: ReservationId = ReservationId::new(3);

/// The checks of a long batch: more than any store has a path of its own for.
const LONG: usize = 20;

/// In this time one of nine units an hour flows back.
const ONE_FLOWS_BACK_US: u64 = 400_000_000;

impl Scope {
    /// Long batches of each operation, on limits of this scope that the store can keep, and one
    /// over several keys that one limit denies. Of reservations, also batches that differ in
    /// nothing but which limit has which key, and a settlement after a part of the charge has
    /// flowed back.
    pub(crate) fn seldom(self, able: Able) -> Vec<Trace<AnyAlgorithm>> {
        let mut instances = self.at_rate(rate(9, 3_600_000_000), 9);
        instances.retain(|instance| able.can_keep(instance));
        let several_keys = able.can(Capability::SeveralKeys);
        if self != Self::Reservations {
            let can = |op: &Op| !op.needs_id() && able.can_do(*op);
            let ops = Op::ALL.iter().copied().filter(can).map(|op| (op, None));
            let mut traces = vec![long(&instances, ops)];
            traces.extend(Some(denied_by_one(&instances)).filter(|_| several_keys));
            return traces;
        }
        instances.retain(Instance::can_reserve);
        let under = |ops: [Op; 3]| ops.map(|op| (op, Some(ID))).into_iter();
        let mut traces = vec![long(&instances, under([Op::Acquire, Op::Renew, Op::Settle]))];
        // A lease is not extended.
        instances.retain(|instance| !instance.algorithm.has_leases());
        let Some(first) = instances.first() else { return traces };
        traces.push(long(&instances, under([Op::Acquire, Op::Extend, Op::Settle])));
        if able.can(Capability::Force) {
            traces.push(extended_late(&instances));
        }
        if several_keys {
            let crossed = [[(0, "a"), (0, "b"), (1, "c")], [(0, "a"), (0, "c"), (1, "b")]];
            let requests = crossed.map(|asks| request(0, (Op::Acquire, Some(ID)), asks));
            traces.push(trace(&[first.clone(), first.clone()], requests));
        }
        traces
    }
}

/// One batch of these operations after the other, each of one check of so many limits.
fn long(
    instances: &[Instance<AnyAlgorithm>],
    ops: impl Iterator<Item = (Op, Option<ReservationId>)>,
) -> Trace<AnyAlgorithm> {
    let instances: Vec<_> = instances.iter().cloned().cycle().take(LONG).collect();
    let asks = || (0..LONG).map(|limit| (limit, "a"));
    trace(&instances, ops.zip(0..).map(|(op, n)| request(n, op, asks())))
}

/// Each of three keys has limits that count attempts after limits that count admissions. The last
/// limit denies the batch: whatever counts attempts is charged, in its position, and nothing else.
fn denied_by_one(instances: &[Instance<AnyAlgorithm>]) -> Trace<AnyAlgorithm> {
    let ask = |limit: usize, cost| Ask { limit, key: ["a", "b", "c"][limit % 3].to_owned(), cost };
    let last = instances.len().saturating_sub(1);
    let all = (0..instances.len()).map(|limit| ask(limit, 1)).collect();
    let requests = [vec![ask(last, 9)], all];
    trace(instances, requests.map(|asks| TraceRequest { at: AT, op: Op::Acquire, asks, id: None }))
}

/// A reservation is extended after a part of it has flowed back, and another caller has charged:
/// its settlement gives back what still counts, and no unit twice.
fn extended_late(instances: &[Instance<AnyAlgorithm>]) -> Trace<AnyAlgorithm> {
    let requests = [
        (0, Op::Acquire, Some(ID), 3),
        (ONE_FLOWS_BACK_US, Op::Force, None, 4),
        (2 * ONE_FLOWS_BACK_US, Op::Extend, Some(ID), 5),
        (2 * ONE_FLOWS_BACK_US, Op::Settle, Some(ID), 0),
    ];
    let requests = requests.map(|(after_us, op, id, cost)| {
        let ask = |limit| Ask { limit, key: "a".to_owned(), cost };
        let asks = (0..instances.len()).map(ask).collect();
        TraceRequest { at: AT.saturating_add_us(after_us), op, asks, id }
    });
    trace(instances, requests)
}

fn trace(
    instances: &[Instance<AnyAlgorithm>],
    requests: impl IntoIterator<Item = TraceRequest>,
) -> Trace<AnyAlgorithm> {
    let limits = instances.iter().enumerate();
    Trace {
        limits: limits.map(|(n, instance)| limit(&format!("l{n}"), instance.clone())).collect(),
        texts: instances.iter().map(ToString::to_string).collect(),
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
