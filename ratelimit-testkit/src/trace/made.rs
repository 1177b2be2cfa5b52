//! The proptest strategies that generate traces.

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{Algorithm, Op, Policy, Reservation, ReservationId, Timestamp};

use crate::capability::{Able, Capability};
use crate::seeds::{AlgorithmKind, BEGINNINGS_US, Scale, limit};
use crate::trace::{Ask, Request, Scope, Trace};

/// The shape of the traces that a law needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// The operations in the traces.
    pub(crate) ops: Ops,
    /// Whether time sometimes goes back.
    pub(crate) back: bool,
    /// Whether some traces begin shortly before the last representable moment, where the numbers are largest.
    pub(crate) to_the_end: bool,
    /// The largest number of requests.
    pub(crate) requests: usize,
}

impl Shape {
    pub(crate) const ANY: Self =
        Self { ops: Ops::All, back: true, to_the_end: false, requests: 40 };
    pub(crate) const TO_THE_END: Self = Self { to_the_end: true, ..Self::ANY };
    pub(crate) const FORWARD: Self = Self { back: false, ..Self::ANY };
    pub(crate) const CHARGES_ONLY: Self = Self { ops: Ops::Charges, ..Self::ANY };
    pub(crate) const SHORT: Self = Self { requests: 12, ..Self::ANY };

    /// The same shape, without times at which this store cannot decide.
    fn on(self, able: Able) -> Self {
        // After the last moment nothing follows: by its own clock a store discards everything at once.
        let past = able.can(Capability::PastTimes);
        Self { back: self.back && past, to_the_end: self.to_the_end && past, ..self }
    }
}

/// The operations of a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ops {
    /// Every operation without an id.
    All,
    /// Acquires and peeks.
    Charges,
}

/// How far the time moves between two requests, on the scale of a limit.
#[derive(Clone, Copy, Debug)]
enum Advance {
    Us(u64),
    /// The time of this many units, plus or minus some microseconds.
    Units(u64, i64),
    /// The recovery time from empty to full, plus or minus some microseconds.
    Full(i64),
    /// Thousandths of the recovery time.
    Part(u64),
    /// The lifetime of a reservation or lease, plus or minus some microseconds.
    ReservationEnd(i64),
}

#[derive(Clone, Copy, Debug)]
enum Cost {
    Units(u64),
    Zero,
    /// Hundredths of the capacity, at least one unit.
    Part(u64),
    Capacity,
    OneMore,
    Max,
}

/// An unresolved request: limits and keys by number, times and costs on the limits' scale.
#[derive(Clone, Debug)]
struct Draft {
    back: bool,
    advance: Advance,
    op: Op,
    asks: Vec<(usize, usize, Cost)>,
    id: Option<ReservationId>,
}

fn advances() -> impl Strategy<Value = Advance> {
    prop_oneof![
        5 => Just(Advance::Us(0)),
        2 => (1_u64..=3).prop_map(Advance::Us),
        5 => (1_u64..=3, -1_i64..=1).prop_map(|(n, off)| Advance::Units(n, off)),
        2 => (0_u64..=1000).prop_map(Advance::Part),
        2 => (-1_i64..=1).prop_map(Advance::Full),
    ]
}

fn costs() -> impl Strategy<Value = Cost> {
    prop_oneof![
        8 => (1_u64..=3).prop_map(Cost::Units),
        3 => (1_u64..=100).prop_map(Cost::Part),
        2 => Just(Cost::Capacity),
        1 => Just(Cost::Zero),
        1 => Just(Cost::OneMore),
        1 => Just(Cost::Max),
    ]
}

fn ops(ops: Ops) -> BoxedStrategy<Op> {
    match ops {
        Ops::Charges => prop_oneof![6 => Just(Op::Acquire), 1 => Just(Op::Peek)].boxed(),
        Ops::All => prop_oneof![
            14 => Just(Op::Acquire),
            3 => Just(Op::Peek),
            3 => Just(Op::Refund),
            2 => Just(Op::Force),
            1 => Just(Op::Reset),
        ]
        .boxed(),
    }
}

/// The operations of a trace with reservations, and their ids.
fn ops_of_reservations() -> impl Strategy<Value = (Op, Option<ReservationId>)> {
    // Mostly the same id, so that requests collide.
    let ids = || prop_oneof![3 => Just(IDS[0]), 1 => Just(IDS[1]), 1 => Just(IDS[2])];
    let under = |op| ids().prop_map(move |id| (op, Some(id)));
    prop_oneof![
        8 => under(Op::Acquire),
        6 => under(Op::Settle),
        3 => under(Op::Renew),
        3 => Just((Op::Acquire, None)),
        1 => prop_oneof![under(Op::Peek), Just((Op::Peek, None)), Just((Op::Settle, None))],
        1 => prop_oneof![under(Op::Refund), under(Op::Force), under(Op::Reset)],
        1 => select(&[Op::Refund, Op::Force, Op::Reset][..]).prop_map(|op| (op, None)),
    ]
}

fn drafts(shape: Shape, asks: usize) -> impl Strategy<Value = Vec<Draft>> {
    let back = if shape.back { prop::bool::weighted(0.1).boxed() } else { Just(false).boxed() };
    // Most batches are small; numbers are reduced to the limits and keys that exist.
    let asks = prop_oneof![2 => Just(1), 1 => 1..=asks]
        .prop_flat_map(|count| prop::collection::vec((0_usize..12, 0_usize..12, costs()), count));
    let draft = (back, advances(), ops(shape.ops), asks)
        .prop_map(|(back, advance, op, asks)| Draft { back, advance, op, asks, id: None });
    prop::collection::vec(draft, 1..=shape.requests)
}

/// The ids of reservations.
pub(crate) const IDS: [ReservationId; 3] =
    [ReservationId::new(1), ReservationId::new(0x2a << 64), ReservationId::new(u128::MAX)];

/// An id that is [settled once](ratelimit_core::Batch::settled_once).
pub(crate) const DRAWN: ReservationId = ReservationId::new(0xd);

/// Generates traces for a scope within a store's capabilities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Makes {
    pub(crate) scope: Scope,
    pub(crate) able: Able,
}

impl Makes {
    /// The limits of the scope that the store supports.
    fn seeds(self) -> Vec<Policy> {
        self.scope.seeds().into_iter().filter(|policy| self.able.can_keep(policy)).collect()
    }

    fn policies(self) -> BoxedStrategy<Vec<Policy>> {
        match self.scope {
            Scope::One(_) | Scope::Attempts(_) => {
                select(self.seeds()).prop_map(|policy| vec![policy]).boxed()
            }
            Scope::Mixed => prop::collection::vec(self.any_limit(), 2..=4).boxed(),
            Scope::MixedAttempts => prop::collection::vec(select(self.seeds()), 2..=4).boxed(),
        }
    }

    /// Any limit; one in five counts attempts.
    fn any_limit(self) -> BoxedStrategy<Policy> {
        let mixed = Self { scope: Scope::Mixed, ..self };
        let (attempts, admissions): (Vec<_>, Vec<_>) =
            mixed.seeds().into_iter().partition(Algorithm::charges_denials);
        if attempts.is_empty() {
            return select(admissions).boxed();
        }
        prop_oneof![4 => select(admissions), 1 => select(attempts)].boxed()
    }

    /// Traces of this shape in which some limit counts attempts.
    pub(crate) fn attempts(self, shape: Shape) -> BoxedStrategy<Trace> {
        let shape = shape.on(self.able);
        let attempts: Vec<_> =
            self.seeds().into_iter().filter(Algorithm::charges_denials).collect();
        let policies = (self.policies(), select(attempts), any::<prop::sample::Index>());
        let policies = policies.prop_map(|(mut policies, attempts, place)| {
            let place = place.index(policies.len());
            policies[place] = attempts;
            policies
        });
        (policies, select(BEGINNINGS_US), drafts(shape, 4))
            .prop_map(move |(policies, begin_us, drafts)| {
                self.resolve(&policies, begin_us, &drafts)
            })
            .boxed()
    }

    /// Traces of this shape.
    pub(crate) fn traces(self, shape: Shape) -> BoxedStrategy<Trace> {
        let shape = shape.on(self.able);
        let mut beginnings = BEGINNINGS_US.to_vec();
        if shape.to_the_end {
            beginnings.push(Timestamp::MAX.as_us() - 1_000_000_000);
        }
        (self.policies(), select(beginnings), drafts(shape, 4))
            .prop_map(move |(policies, begin_us, drafts)| {
                self.resolve(&policies, begin_us, &drafts)
            })
            .boxed()
    }

    /// Traces that reserve, settle and renew under a few ids, with times as in this shape.
    pub(crate) fn reservations(self, shape: Shape) -> BoxedStrategy<Trace> {
        let policies = match self.scope {
            Scope::Mixed => {
                let able = AlgorithmKind::RESERVATIONS.iter().flat_map(|kind| kind.seeds());
                let able = able.filter(|policy| self.able.can_keep(policy)).collect::<Vec<_>>();
                let policy = prop_oneof![15 => select(able), 1 => self.any_limit()];
                prop::collection::vec(policy, 2..=3).boxed()
            }
            _ => self.policies(),
        };
        let advances = prop_oneof![
            16 => advances(),
            2 => (-1_i64..=1).prop_map(Advance::ReservationEnd),
            1 => (0_u64..=1).prop_map(|off| Advance::Us(Reservation::REPEAT_US - off)),
        ];
        let asks = prop_oneof![2 => Just(1), 1 => 1..=3_usize].prop_flat_map(|count| {
            prop::collection::vec((0_usize..12, 0_usize..8, costs()), count)
        });
        let back = if shape.on(self.able).back {
            prop::bool::weighted(0.1).boxed()
        } else {
            Just(false).boxed()
        };
        let draft = (back, advances, ops_of_reservations(), asks)
            .prop_map(|(back, advance, (op, id), asks)| Draft { back, advance, op, asks, id });
        let draft = draft.prop_map(|draft| match draft.id {
            Some(id) if id == IDS[2] => Draft { id: Some(DRAWN), ..draft },
            _ => draft,
        });
        (policies, select(BEGINNINGS_US), prop::collection::vec(draft, 1..=24))
            .prop_map(move |(policies, begin_us, drafts)| {
                self.resolve(&policies, begin_us, &drafts)
            })
            .boxed()
    }

    /// Traces of up to this many requests on limits that do not refill meanwhile: every operation without an id
    /// and, for limits whose charges can be reserved, operations with one.
    pub(crate) fn slow(self, requests: usize) -> BoxedStrategy<Trace> {
        let slow: Vec<_> =
            self.scope.slow().into_iter().filter(|policy| self.able.can_keep(policy)).collect();
        let can_reserve = |policy: &Policy| {
            !policy.charges_denials()
                && AlgorithmKind::RESERVATIONS.contains(&AlgorithmKind::of(policy))
        };
        let can_be_reserved: Vec<_> = slow.iter().copied().filter(can_reserve).collect();
        let without_id = || ops(Ops::All).prop_map(|op| (op, None));
        let plain = self.slow_on(slow, without_id().boxed(), requests);
        if can_be_reserved.is_empty() || !self.able.can(Capability::Reservations) {
            return plain;
        }
        let ops = prop_oneof![without_id(), ops_of_reservations()].boxed();
        prop_oneof![plain, self.slow_on(can_be_reserved, ops, requests)].boxed()
    }

    fn slow_on(
        self,
        policies: Vec<Policy>,
        ops: BoxedStrategy<(Op, Option<ReservationId>)>,
        requests: usize,
    ) -> BoxedStrategy<Trace> {
        let most = match self.scope {
            Scope::One(_) | Scope::Attempts(_) => 1,
            Scope::Mixed | Scope::MixedAttempts => 4,
        };
        // Seconds in total, and sometimes so many minutes that a settable clock may let a limit refill.
        let advances = prop_oneof![
            16 => Just(0_u64),
            8 => 0_u64..1_000_000,
            1 => 0_u64..60_000_000,
        ];
        let asks = prop_oneof![2 => Just(1), 1 => 1..=4_usize].prop_flat_map(|count| {
            prop::collection::vec((0_usize..12, 0_usize..12, costs()), count)
        });
        let draft = (advances, ops, asks).prop_map(|(us, (op, id), asks)| {
            let advance = Advance::Us(us);
            Draft { back: false, advance, op, asks, id }
        });
        let policies = prop::collection::vec(select(policies), 1..=most);
        (policies, select(BEGINNINGS_US), prop::collection::vec(draft, 1..=requests))
            .prop_map(move |(policies, begin_us, drafts)| {
                self.resolve(&policies, begin_us, &drafts)
            })
            .boxed()
    }

    /// Two traces forward in time on the same limits.
    pub(crate) fn twice(self, shape: Shape) -> BoxedStrategy<(Trace, Trace)> {
        let shape = Shape { requests: 15, ..shape.on(self.able) };
        (self.policies(), select(BEGINNINGS_US), drafts(shape, 4), drafts(shape, 4))
            .prop_map(move |(policies, begin_us, first, then)| {
                (
                    self.resolve(&policies, begin_us, &first),
                    self.resolve(&policies, begin_us, &then),
                )
            })
            .boxed()
    }

    /// Two limits of one name, and a trace forward in time for each, the second after the first.
    pub(crate) fn changes(self) -> BoxedStrategy<(Trace, Trace)> {
        let any = || self.one_limit();
        let shape = Shape { back: false, requests: 12, ..Shape::CHARGES_ONLY };
        let drafts = || drafts(shape, 2);
        (any(), any(), select(BEGINNINGS_US), drafts(), advances(), drafts())
            .prop_map(move |(old, new, begin_us, before, advance, after)| {
                let before = self.resolve(&[old], begin_us, &before);
                let pause_us = moved(0, false, advance, &Scale::of(&new));
                let after = self.resolve(&[new], before.latest().as_us() + pause_us, &after);
                (before, after)
            })
            .boxed()
    }

    fn resolve(self, policies: &[Policy], begin_us: u64, drafts: &[Draft]) -> Trace {
        let scales: Vec<_> = policies.iter().map(Scale::of).collect();
        let limits =
            policies.iter().enumerate().map(|(n, policy)| limit(&format!("l{n}"), *policy));
        let mut at_us = begin_us;
        let requests = drafts.iter().map(|draft| {
            let on = draft.asks.first().map_or(0, |(limit, ..)| *limit);
            at_us = moved(at_us, draft.back, draft.advance, &scales[on % scales.len()]);
            let mut asks: Vec<Ask> = Vec::new();
            for (limit, key, cost) in &draft.asks {
                let limit = limit % scales.len();
                let cost = resolved(*cost, scales[limit].capacity);
                let ask = Ask {
                    limit,
                    key: ["a", "b", "c"][key / 6 + usize::from(*key > 9)].to_owned(),
                    cost,
                };
                if !asks.iter().any(|other| other.limit == limit && other.key == ask.key) {
                    asks.push(ask);
                }
            }
            // By its own clock a store refuses to decide at the last moment.
            let at = Timestamp::saturating_from_us(at_us.min(Timestamp::MAX.as_us() - 1));
            Request { at, op: draft.op, asks, id: draft.id }
        });
        let mut trace = Trace { limits: limits.collect(), requests: requests.collect() };
        self.leave_out(&mut trace);
        trace
    }

    /// Removes what the store does not support.
    fn leave_out(self, trace: &mut Trace) {
        let can = |capability| self.able.can(capability);
        trace.requests.retain(|request| {
            self.able.can_do(request.op) && (request.id.is_none() || can(Capability::Reservations))
        });
        for request in &mut trace.requests {
            if !can(Capability::Batches) {
                request.asks.truncate(1);
            }
            let first = request.asks[0].key.clone();
            request.asks.retain(|ask| ask.key == first || can(Capability::SeveralKeys));
        }
    }

    /// Limits of all algorithms in the scope, for laws that need no trace.
    pub(crate) fn one_limit(self) -> BoxedStrategy<Policy> {
        self.policies().prop_map(|policies| policies[0]).boxed()
    }
}

fn moved(at_us: u64, back: bool, advance: Advance, scale: &Scale) -> u64 {
    let by_us = match advance {
        Advance::Us(us) => us,
        Advance::Units(n, off) => (n * scale.unit_us).saturating_add_signed(off),
        Advance::Full(off) => scale.full_us.saturating_add_signed(off),
        Advance::ReservationEnd(off) => scale.reservation_us.saturating_add_signed(off),
        Advance::Part(thousandths) => scale.full_us / 1000 * thousandths,
    };
    if back { at_us.saturating_sub(by_us) } else { at_us + by_us }
}

fn resolved(cost: Cost, capacity: u64) -> u64 {
    match cost {
        Cost::Units(n) if n > capacity => 1,
        Cost::Units(n) => n,
        Cost::Zero => 0,
        Cost::Part(hundredths) => (capacity / 100 * hundredths).clamp(1, capacity),
        Cost::Capacity => capacity,
        Cost::OneMore => capacity + 1,
        Cost::Max => u64::MAX,
    }
}
