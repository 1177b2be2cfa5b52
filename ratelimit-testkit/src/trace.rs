//! [`Trace`]: what a law is tried on, and the strategies that make them up.

use std::fmt;

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{
    Algorithm, Batch, Check, ConfigError, HoldId, Limit, Now, Op, Policy, Rate, Tick,
};

use crate::harness::Harness;
use crate::seeds::{BEGINNINGS_US, Kind, Scale, by_attempts, limit};

/// Which limits a law is tried on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Limits of one algorithm; in every third batch several keys of one limit.
    One(Kind),
    /// Limits of one algorithm that count attempts.
    Attempts(Kind),
    /// Batches over several limits of any algorithms, and several keys; now and then one of the limits
    /// counts attempts.
    Mixed,
    /// Batches over several limits that count attempts, of the algorithms that can do so
    /// [blindly](Kind::BLIND).
    MixedAttempts,
}

impl Scope {
    /// The scopes of one algorithm that it consists of.
    pub(crate) fn singles(self) -> Vec<Self> {
        match self {
            Self::One(_) | Self::Attempts(_) => vec![self],
            Self::Mixed => {
                let admissions = Kind::ALL.into_iter().map(Self::One);
                admissions.chain(Kind::ATTEMPTS.into_iter().map(Self::Attempts)).collect()
            }
            Self::MixedAttempts => Kind::BLIND.into_iter().map(Self::Attempts).collect(),
        }
    }

    /// A limit of this scope, if it is of one algorithm, made by `make` of its kind.
    fn made(self, make: &dyn Fn(Kind) -> Vec<Policy>) -> Vec<Policy> {
        match self {
            Self::One(kind) => make(kind),
            Self::Attempts(kind) => make(kind).into_iter().map(by_attempts).collect(),
            Self::Mixed | Self::MixedAttempts => {
                self.singles().into_iter().flat_map(|single| single.made(make)).collect()
            }
        }
    }

    /// The limits that the laws are tried on.
    pub(crate) fn seeds(self) -> Vec<Policy> {
        self.made(&Kind::seeds)
    }

    /// The tiniest of them, of which every trace can be tried.
    pub(crate) fn tiny(self) -> Vec<Policy> {
        self.made(&Kind::tiny)
    }

    /// The limits of this rate.
    pub(crate) fn at_rate(self, rate: Rate, burst: u64) -> Vec<Policy> {
        self.made(&|kind| vec![kind.policy(rate, burst)])
    }
}

/// Some limits, and requests to them in order of arrival.
#[derive(Clone, PartialEq, Eq)]
pub struct Trace {
    /// The limits, each with a name of its own.
    pub limits: Vec<Limit<Policy>>,
    /// The requests.
    pub requests: Vec<Request>,
}

/// One batch at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct Request {
    /// When.
    pub at: Tick,
    /// What is to be done.
    pub op: Op,
    /// Of whom: each pair of limit and key once.
    pub asks: Vec<Ask>,
    /// Under which id, if under any.
    pub id: Option<HoldId>,
}

/// One limit asked about one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The position of the limit in its trace.
    pub limit: usize,
    /// The key.
    pub key: String,
    /// The cost.
    pub cost: u64,
}

impl Request {
    /// What a limit that keeps metadata is told of the caller: bytes of any kind, and now and then none.
    #[must_use]
    pub fn metadata(&self) -> Vec<u8> {
        let [low, next, ..] = self.at.as_us().to_le_bytes();
        if low.is_multiple_of(4) { Vec::new() } else { vec![low, 0, b'\n', next, 255] }
    }

    /// The batch that it is.
    ///
    /// # Errors
    /// A key named twice.
    pub(crate) fn batch<'a>(
        &self,
        checks: &'a [Check<'a, Policy>],
        metadata: &'a [u8],
    ) -> Result<Batch<'a, Policy>, ConfigError> {
        let batch = Batch::new(checks)?.op(self.op).now(Now::At(self.at)).metadata(metadata);
        Ok(self.id.map_or(batch, |id| batch.id(id)))
    }
}

impl Trace {
    /// What a limit of the trace decides by.
    #[must_use]
    pub fn policy(&self, ask: &Ask) -> &Policy {
        self.limits[ask.limit].algorithm()
    }

    /// Whether the limit of an ask counts attempts.
    #[must_use]
    pub fn counts_attempts(&self, ask: &Ask) -> bool {
        self.policy(ask).charges_denials()
    }

    /// Every pair of limit and key that is asked about, once, at cost 1.
    #[must_use]
    pub fn everybody(&self) -> Vec<Ask> {
        let mut everybody: Vec<Ask> = Vec::new();
        for ask in self.requests.iter().flat_map(|request| &request.asks) {
            if !everybody.iter().any(|known| known.limit == ask.limit && known.key == ask.key) {
                everybody.push(Ask { cost: 1, ..ask.clone() });
            }
        }
        everybody
    }

    /// The latest time of any request.
    #[must_use]
    pub fn latest(&self) -> Tick {
        self.requests.iter().map(|request| request.at).max().unwrap_or_default()
    }

    /// The longest that any limit takes to recover from empty, in microseconds.
    pub(crate) fn longest_us(&self) -> u64 {
        self.limits.iter().map(|l| Scale::of(l.algorithm()).full_us).max().unwrap_or(0)
    }
}

/// The limits and the requests, a line each.
impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for limit in &self.limits {
            writeln!(f, "limit {}: {:?}", limit.name(), limit.algorithm())?;
        }
        for request in &self.requests {
            write!(f, "at {} {}", request.at, request.op)?;
            if let Some(id) = request.id {
                write!(f, " under {id}")?;
            }
            for ask in &request.asks {
                write!(f, ", {} of {:?}", ask.cost, ask.key)?;
                if self.limits.len() > 1 {
                    write!(f, " in {}", self.limits[ask.limit].name())?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} of {:?}", self.op, self.at, self.asks)?;
        self.id.map_or(Ok(()), |id| write!(f, " under {id}"))
    }
}

/// What kind of traces a law speaks of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// What is done in them.
    pub(crate) ops: Ops,
    /// Whether time goes back now and then.
    pub(crate) back: bool,
    /// Whether some begin shortly before the last moment there is, where the numbers are largest.
    pub(crate) to_the_end: bool,
    /// How many requests at most.
    pub(crate) requests: usize,
}

impl Shape {
    pub(crate) const ANY: Self =
        Self { ops: Ops::All, back: true, to_the_end: false, requests: 40 };
    pub(crate) const TO_THE_END: Self = Self { to_the_end: true, ..Self::ANY };
    pub(crate) const FORWARD: Self = Self { back: false, ..Self::ANY };
    pub(crate) const CHARGES_ONLY: Self = Self { ops: Ops::Charges, ..Self::ANY };
    pub(crate) const SHORT: Self = Self { requests: 12, ..Self::ANY };

    /// The same, without what this store cannot do.
    pub(crate) const fn on<H: Harness>(self) -> Self {
        // The last moment there is has nothing after it: by its own clock a store forgets all at once.
        let (back, to_the_end) = (self.back && H::GOES_BACK, self.to_the_end && H::GOES_BACK);
        let shape = Self { back, to_the_end, ..self };
        match self.ops {
            Ops::All if !H::GIVES_BACK => Self { ops: Ops::NothingBack, ..shape },
            _ => shape,
        }
    }
}

/// What is done in a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ops {
    /// Everything that needs no id.
    All,
    /// Acquires, peeks and resets.
    NothingBack,
    /// Acquires and peeks.
    Charges,
}

/// How far the time moves between two requests, on the scale of a limit.
#[derive(Clone, Copy, Debug)]
enum Advance {
    Us(u64),
    /// So many units' time, and a microsecond more or less.
    Units(u64, i64),
    /// From empty to full, and a microsecond more or less.
    Full(i64),
    /// So many thousandths of from empty to full.
    Part(u64),
    /// For as long as something can be held, and a microsecond more or less.
    Held(i64),
}

#[derive(Clone, Copy, Debug)]
enum Cost {
    Units(u64),
    Zero,
    /// So many hundredths of the capacity, at least one unit.
    Part(u64),
    Capacity,
    OneMore,
    Max,
}

/// An unresolved request: which limits and keys by number, times and costs on the limits' scale.
#[derive(Clone, Debug)]
struct Draft {
    back: bool,
    advance: Advance,
    op: Op,
    asks: Vec<(usize, usize, Cost)>,
    id: Option<HoldId>,
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
        Ops::NothingBack => {
            prop_oneof![14 => Just(Op::Acquire), 3 => Just(Op::Peek), 1 => Just(Op::Reset)].boxed()
        }
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

fn drafts(shape: Shape, asks: usize) -> impl Strategy<Value = Vec<Draft>> {
    let back = if shape.back { prop::bool::weighted(0.1).boxed() } else { Just(false).boxed() };
    // Most batches are small; numbers are cut down to the limits and keys that there are.
    let asks = prop_oneof![2 => Just(1), 1 => 1..=asks]
        .prop_flat_map(|count| prop::collection::vec((0_usize..12, 0_usize..12, costs()), count));
    let draft = (back, advances(), ops(shape.ops), asks)
        .prop_map(|(back, advance, op, asks)| Draft { back, advance, op, asks, id: None });
    prop::collection::vec(draft, 1..=shape.requests)
}

fn policies(scope: Scope) -> BoxedStrategy<Vec<Policy>> {
    match scope {
        Scope::One(_) | Scope::Attempts(_) => {
            select(scope.seeds()).prop_map(|policy| vec![policy]).boxed()
        }
        Scope::Mixed => prop::collection::vec(any_limit(), 2..=4).boxed(),
        Scope::MixedAttempts => prop::collection::vec(select(scope.seeds()), 2..=4).boxed(),
    }
}

/// Any limit; one in five counts attempts.
fn any_limit() -> BoxedStrategy<Policy> {
    let (attempts, admissions): (Vec<_>, Vec<_>) =
        Scope::Mixed.seeds().into_iter().partition(Algorithm::charges_denials);
    prop_oneof![4 => select(admissions), 1 => select(attempts)].boxed()
}

/// Traces of this shape in which some limit counts attempts.
pub(crate) fn attempts(scope: Scope, shape: Shape) -> BoxedStrategy<Trace> {
    let attempts: Vec<_> = scope.seeds().into_iter().filter(Algorithm::charges_denials).collect();
    let policies = (policies(scope), select(attempts), any::<prop::sample::Index>());
    let policies = policies.prop_map(|(mut policies, attempts, place)| {
        let place = place.index(policies.len());
        policies[place] = attempts;
        policies
    });
    (policies, select(BEGINNINGS_US), drafts(shape, 4))
        .prop_map(|(policies, begin_us, drafts)| resolve(&policies, begin_us, &drafts))
        .boxed()
}

/// Traces of this shape.
pub(crate) fn traces(scope: Scope, shape: Shape) -> BoxedStrategy<Trace> {
    let mut beginnings = BEGINNINGS_US.to_vec();
    if shape.to_the_end {
        beginnings.push(Tick::MAX.as_us() - 1_000_000_000);
    }
    (policies(scope), select(beginnings), drafts(shape, 4))
        .prop_map(|(policies, begin_us, drafts)| resolve(&policies, begin_us, &drafts))
        .boxed()
}

/// Under which ids things are held.
pub(crate) const IDS: [HoldId; 3] =
    [HoldId::new(1), HoldId::new(0x2a << 64), HoldId::new(u128::MAX)];

/// Traces in which things are held, settled and renewed under a few ids.
pub(crate) fn holds(scope: Scope, back: bool) -> BoxedStrategy<Trace> {
    let policies = match scope {
        Scope::Mixed => {
            let able: Vec<_> = Kind::HOLDS.iter().flat_map(|kind| kind.seeds()).collect();
            let policy = prop_oneof![15 => select(able), 1 => any_limit()];
            prop::collection::vec(policy, 2..=3).boxed()
        }
        _ => policies(scope),
    };
    // Mostly one of them, and mostly one key, so that they meet.
    let ids = || prop_oneof![3 => Just(IDS[0]), 1 => Just(IDS[1]), 1 => Just(IDS[2])];
    let under = |op| ids().prop_map(move |id| (op, Some(id)));
    let ops = prop_oneof![
        8 => under(Op::Acquire),
        6 => under(Op::Settle),
        3 => under(Op::Renew),
        3 => Just((Op::Acquire, None)),
        1 => prop_oneof![under(Op::Peek), Just((Op::Peek, None)), Just((Op::Settle, None))],
        1 => prop_oneof![under(Op::Refund), under(Op::Force), under(Op::Reset)],
        1 => select(&[Op::Refund, Op::Force, Op::Reset][..]).prop_map(|op| (op, None)),
    ];
    let advances = prop_oneof![
        8 => advances(),
        1 => (-1_i64..=1).prop_map(Advance::Held),
    ];
    let asks = prop_oneof![2 => Just(1), 1 => 1..=3_usize]
        .prop_flat_map(|count| prop::collection::vec((0_usize..12, 0_usize..8, costs()), count));
    let back = if back { prop::bool::weighted(0.1).boxed() } else { Just(false).boxed() };
    let draft = (back, advances, ops, asks).prop_map(|(back, advance, (op, id), asks)| Draft {
        back,
        advance,
        op,
        asks,
        id,
    });
    (policies, select(BEGINNINGS_US), prop::collection::vec(draft, 1..=24))
        .prop_map(|(policies, begin_us, drafts)| resolve(&policies, begin_us, &drafts))
        .boxed()
}

/// Two traces forward in time on the same limits.
pub(crate) fn twice(scope: Scope, shape: Shape) -> BoxedStrategy<(Trace, Trace)> {
    let shape = Shape { requests: 15, ..shape };
    (policies(scope), select(BEGINNINGS_US), drafts(shape, 4), drafts(shape, 4))
        .prop_map(|(policies, begin_us, first, then)| {
            (resolve(&policies, begin_us, &first), resolve(&policies, begin_us, &then))
        })
        .boxed()
}

/// Two limits of one name, and a trace forward in time for each, the second after the first.
pub(crate) fn changes(scope: Scope) -> BoxedStrategy<(Trace, Trace)> {
    let any = || one_limit(scope);
    let shape = Shape { back: false, requests: 12, ..Shape::CHARGES_ONLY };
    let drafts = || drafts(shape, 2);
    (any(), any(), select(BEGINNINGS_US), drafts(), advances(), drafts())
        .prop_map(|(old, new, begin_us, before, advance, after)| {
            let before = resolve(&[old], begin_us, &before);
            let pause_us = moved(0, false, advance, &Scale::of(&new));
            let after = resolve(&[new], before.latest().as_us() + pause_us, &after);
            (before, after)
        })
        .boxed()
}

fn resolve(policies: &[Policy], begin_us: u64, drafts: &[Draft]) -> Trace {
    let scales: Vec<_> = policies.iter().map(Scale::of).collect();
    let limits = policies.iter().enumerate().map(|(n, policy)| limit(&format!("l{n}"), *policy));
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
        Request { at: Tick::saturating_from_us(at_us), op: draft.op, asks, id: draft.id }
    });
    let requests = requests.collect();
    Trace { limits: limits.collect(), requests }
}

fn moved(at_us: u64, back: bool, advance: Advance, scale: &Scale) -> u64 {
    let by_us = match advance {
        Advance::Us(us) => us,
        Advance::Units(n, off) => (n * scale.unit_us).saturating_add_signed(off),
        Advance::Full(off) => scale.full_us.saturating_add_signed(off),
        Advance::Held(off) => scale.held_us.saturating_add_signed(off),
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

/// Limits of all algorithms in the scope: for what needs no trace.
pub(crate) fn one_limit(scope: Scope) -> BoxedStrategy<Policy> {
    policies(scope).prop_map(|policies| policies[0]).boxed()
}

/// The units that a policy may admit at once.
pub(crate) fn capacity(limit: &Limit<Policy>) -> u64 {
    limit.algorithm().capacity()
}
