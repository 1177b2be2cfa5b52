//! The strategies that generate traces.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::str::FromStr;

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::strategy::Union;
use ratelimit_core::store::{Op, Reservation};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, ConfigError, Decision, Limit, OnOutage, ReservationId, Timestamp,
};

use crate::capability::{Able, Capability};
use crate::pure::PureStore;
use crate::seeds::BEGINNINGS_US;
use crate::trace::{Ask, Trace, TraceRequest};

/// A limit of an algorithm, with the text that names it.
#[derive(Clone, Debug)]
pub struct Instance<A> {
    /// The text that names the limit in a failure, such as `WeekendBudget(100)`. It is unique
    /// within a harness.
    pub text: String,
    /// The algorithm.
    pub algorithm: A,
    /// Whether the limit counts attempts.
    pub counts_attempts: bool,
}

/// What the text of a limit that counts attempts ends in.
const COUNTS_ATTEMPTS: &str = " count attempts";

impl<A> Instance<A> {
    /// Creates an instance from its text and its algorithm.
    pub fn new(text: impl Into<String>, algorithm: A) -> Self {
        Self { text: text.into(), algorithm, counts_attempts: false }
    }

    /// The same limit, counting attempts.
    #[must_use]
    pub fn count_attempts(self) -> Self {
        let text = self.text + COUNTS_ATTEMPTS;
        Self { text, counts_attempts: true, ..self }
    }
}

impl<A: Algorithm> Instance<A> {
    /// Whether its charges can be reserved.
    pub(crate) fn can_reserve(&self) -> bool {
        !self.counts_attempts && self.algorithm.reservation_us().is_some()
    }

    /// The limit under this name.
    ///
    /// # Panics
    /// If no limit can have this name, or if it cannot count attempts.
    #[must_use]
    pub fn named(self, name: &str) -> Limit<A> {
        let limit = Limit::new(name, self.algorithm).expect("the testkit's names are plain");
        if self.counts_attempts { limit.count_attempts().expect("it can") } else { limit }
    }
}

impl From<AnyAlgorithm> for Instance<AnyAlgorithm> {
    fn from(algorithm: AnyAlgorithm) -> Self {
        Self::new(algorithm.to_string(), algorithm)
    }
}

/// Reads the words of an algorithm, and behind them `count attempts` if the limit does.
impl FromStr for Instance<AnyAlgorithm> {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.strip_suffix(COUNTS_ATTEMPTS) {
            Some(text) => {
                text.parse().map(|algorithm: AnyAlgorithm| Self::from(algorithm).count_attempts())
            }
            None => text.parse().map(|algorithm: AnyAlgorithm| algorithm.into()),
        }
    }
}

/// The limit of this name in these words: those of its algorithm, and behind them `count attempts`
/// if it does.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub fn limit_in_words(name: &str, words: &str) -> Limit<AnyAlgorithm> {
    let instance: Instance<AnyAlgorithm> = words.parse().unwrap_or_else(|e| panic!("{words}: {e}"));
    instance.named(name)
}

impl<A> fmt::Display for Instance<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The limits of which traces are made.
pub(crate) struct Pool<A> {
    /// Makes all of them.
    pub(crate) make: Rc<dyn Fn() -> Vec<Instance<A>>>,
    /// The times at which the algorithm is likely to go wrong, ascending.
    pub(crate) unkind_us: Rc<[u64]>,
    /// The least and the most limits of one trace.
    pub(crate) some: [usize; 2],
    /// Whether both limits of a trace have one name: the first is changed to the second.
    pub(crate) changed: bool,
    /// Whether most requests are under an id.
    pub(crate) reserves: bool,
    /// Whether all requests are to one key of the first limit.
    pub(crate) alone: bool,
    pub(crate) able: Able,
}

impl<A> Clone for Pool<A> {
    fn clone(&self) -> Self {
        Self { make: Rc::clone(&self.make), unkind_us: Rc::clone(&self.unkind_us), ..*self }
    }
}

/// The shape of the traces that a law needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TraceShape {
    /// Whether time sometimes goes back.
    pub(crate) back: bool,
    /// Whether some traces begin shortly before the last representable moment, where the numbers
    /// are largest.
    pub(crate) to_the_end: bool,
    /// Whether time moves on the scale of the limits, or by seconds at most.
    pub(crate) slow: bool,
    /// The largest number of requests.
    pub(crate) requests: usize,
}

impl TraceShape {
    pub(crate) const ANY: Self = Self { back: true, to_the_end: true, slow: false, requests: 40 };
    pub(crate) const FORWARD: Self = Self { back: false, to_the_end: false, ..Self::ANY };
}

/// How far the time moves before a request.
#[derive(Clone, Copy, Debug)]
enum Advance {
    Us(u64),
    /// The time of this many units, plus or minus some microseconds.
    Units(u64, i64),
    /// Thousandths of the recovery time.
    Part(u64),
    /// A time of the first limit, or one that the last verdict promised, plus or minus some
    /// microseconds.
    Until(Until, i64),
    /// To an unkind time, so many after the next one, plus or minus some microseconds.
    Unkind(usize, i64),
}

#[derive(Clone, Copy, Debug)]
enum Until {
    Full,
    Retry,
    Replenish,
    Reset,
    ReservationEnd,
    Forgotten,
}

#[derive(Clone, Copy, Debug)]
enum CostKind {
    Units(u64),
    Zero,
    /// Hundredths of the capacity, at least one unit.
    Part(u64),
    /// What is left, less this many.
    Left(u64),
    OneMoreThanLeft,
    Capacity,
    OneMore,
    Max,
}

/// An unresolved request: limits and keys by number, times and costs on the limits' scale.
#[derive(Clone, Debug)]
struct Draft {
    back: bool,
    advance: Advance,
    op: (Op, Option<ReservationId>),
    asks: Vec<(usize, usize, CostKind)>,
    /// Whether a settlement or renewal names what was reserved under its id.
    again: bool,
}

/// An id that is [settled once](ratelimit_core::store::Batch::settled_once).
pub(crate) const DRAWN: ReservationId = ReservationId::new(0xd);
/// The ids of reservations, two of which have the same low half.
const IDS: [ReservationId; 3] =
    [ReservationId::new(1), ReservationId::new(u128::MAX), ReservationId::new((1 << 64) + 1)];

/// So long before an unkind time a charge can still be settled after it.
const SHORTLY_US: i64 = 1_200_000_000;

fn advances(slow: bool, unkind: bool) -> BoxedStrategy<Advance> {
    if unkind {
        let off = select(vec![0, 0, -1, 1, -SHORTLY_US]);
        let nth = select(vec![0, 0, 0, 1, 2]);
        let to_unkind = (nth, off).prop_map(|(nth, off)| Advance::Unkind(nth, off));
        return prop_oneof![to_unkind, advances(slow, false)].boxed();
    }
    if slow {
        // Seconds in total, and sometimes so many minutes that a settable clock may let a limit
        // refill.
        return prop_oneof![16 => Just(0_u64), 8 => 0_u64..1_000_000, 1 => 0_u64..60_000_000]
            .prop_map(Advance::Us)
            .boxed();
    }
    let until = |until| (-1_i64..=1).prop_map(move |off| Advance::Until(until, off));
    prop_oneof![
        16 => Just(Advance::Us(0)),
        6 => (1_u64..=3).prop_map(Advance::Us),
        12 => (1_u64..=3, -1_i64..=1).prop_map(|(n, off)| Advance::Units(n, off)),
        6 => (0_u64..=1000).prop_map(Advance::Part),
        4 => until(Until::Full),
        8 => until(Until::Retry),
        2 => until(Until::Replenish),
        4 => until(Until::Reset),
        3 => until(Until::ReservationEnd),
        2 => until(Until::Forgotten),
    ]
    .boxed()
}

fn costs() -> impl Strategy<Value = CostKind> {
    prop_oneof![
        8 => (1_u64..=3).prop_map(CostKind::Units),
        3 => (1_u64..=100).prop_map(CostKind::Part),
        2 => (0_u64..=1).prop_map(CostKind::Left),
        1 => Just(CostKind::OneMoreThanLeft),
        2 => Just(CostKind::Capacity),
        1 => Just(CostKind::Zero),
        1 => Just(CostKind::OneMore),
        1 => Just(CostKind::Max),
    ]
}

/// The operations that the store supports, those of reservations with an id.
fn ops(able: Able, many: bool) -> impl Strategy<Value = (Op, Option<ReservationId>)> {
    // Mostly the same id, so that requests collide.
    let id = prop_oneof![4 => Just(IDS[0]), 2 => select(&IDS[1..]), 2 => Just(DRAWN)];
    let reserves = able.can(Capability::Reservations);
    let (plain, reserving) = if many { (3, 20) } else { (8, 4) };
    let without = [
        (14, Op::Acquire),
        (3, Op::Peek),
        (3, Op::Refund),
        (2, Op::Force),
        (1, Op::Reset),
        (2, Op::Adopt),
    ];
    let under = [
        (10, Op::Acquire),
        (8, Op::Settle),
        (4, Op::Renew),
        (4, Op::Extend),
        (1, Op::Peek),
        (1, Op::Refund),
        (1, Op::Force),
        (1, Op::Adopt),
        (1, Op::Reset),
    ];
    let can = move |(_, op): &(u32, Op)| able.can_do(*op);
    let without = without.into_iter().filter(can);
    let without = without.map(|(n, op)| (n * plain, Just((op, None)).boxed()));
    let under = under.into_iter().filter(move |of| reserves && can(of));
    let under = under
        .map(|(n, op)| (n * reserving, id.clone().prop_map(move |id| (op, Some(id))).boxed()))
        .collect::<Vec<_>>();
    Union::new_weighted(without.chain(under).collect())
}

impl<A: Algorithm + 'static> Pool<A> {
    /// Two limits of one name: the first is changed to the second.
    pub(crate) fn with_changed_limit(self) -> Self {
        Self { some: [2, 2], changed: true, ..self }
    }

    /// Traces of this shape, within the store's capabilities.
    pub(crate) fn traces(&self, mut shape: TraceShape) -> BoxedStrategy<Trace<A>> {
        // After the last moment nothing follows: by its own clock a store discards everything at
        // once.
        let past = self.able.can(Capability::PastTimes);
        (shape.back, shape.to_the_end) = (shape.back && past, shape.to_the_end && past);
        let mut beginnings = BEGINNINGS_US.to_vec();
        if shape.to_the_end {
            beginnings.push(Timestamp::MAX.as_us() - 1_000_000_000);
        }
        for at_us in self.unkind_us.iter() {
            let before_us = [0, 1, SHORTLY_US.unsigned_abs()];
            beginnings.extend(before_us.map(|us| at_us.saturating_sub(us)));
        }
        let back = prop::bool::weighted(if shape.back { 0.1 } else { 0.0 });
        // Most batches are small; numbers are reduced to the limits and keys that exist.
        let asks = prop_oneof![2 => Just(1), 1 => 1..=4_usize].prop_flat_map(|count| {
            prop::collection::vec((0_usize..12, 0_usize..12, costs()), count)
        });
        let again = prop::bool::weighted(0.75);
        let draft = (
            back,
            advances(shape.slow, !self.unkind_us.is_empty()),
            ops(self.able, self.reserves),
            asks,
            again,
        )
            .prop_map(|(back, advance, op, asks, again)| Draft {
                back,
                advance,
                op,
                asks,
                again,
            });
        let all = (self.make)().len();
        let some = self.some.map(|some| some.min(all));
        let picks = subsequence((0..all).collect::<Vec<_>>(), some[0]..=some[1]).prop_shuffle();
        let pool = self.clone();
        (picks, select(beginnings), prop::collection::vec(draft, 1..=shape.requests))
            .prop_map(move |(picks, begin_us, drafts)| pool.resolve(&picks, begin_us, &drafts))
            .boxed()
    }

    /// Every limit changed to the next and back when it is all used, with each operation that the
    /// new one may do on that state.
    pub(crate) fn full_ones_changed(&self) -> Vec<Trace<A>> {
        let at = Timestamp::saturating_from_us(BEGINNINGS_US[0]);
        let all = (self.make)().len();
        let pairs = (0..all).map(|one| [one, (one + 1) % all]).filter(|[one, next]| one != next);
        let changed = pairs.flat_map(|[one, next]| [[one, next], [next, one]]).map(|pair| {
            let instances = pair.map(|position| (self.make)().swap_remove(position));
            let [old, new] = [0, 1].map(|limit| instances[limit].algorithm.capacity());
            let steps = [
                (Op::Acquire, 0, old),
                (Op::Peek, 1, new),
                (Op::Force, 1, 1),
                (Op::Refund, 1, 1),
                (Op::Acquire, 1, 1),
                (Op::Refund, 1, new),
                (Op::Acquire, 1, new),
            ];
            let steps = steps.into_iter().filter(|(op, ..)| self.able.can_do(*op));
            let ask = |limit, cost| Ask { limit, key: "a".to_owned(), cost };
            let requests =
                steps.map(|(op, limit, cost)| TraceRequest::one(at, op, ask(limit, cost)));
            let requests = requests.collect();
            let texts = instances.iter().map(|instance| instance.text.clone()).collect();
            let limits = instances.map(|instance| limit("l0", instance)).into();
            Trace { limits, texts, requests }
        });
        changed.collect()
    }

    /// The time until an unkind time; 0 where none follows.
    fn until_unkind_us(&self, at_us: u64, nth: usize, off: i64) -> u64 {
        let next = self.unkind_us.partition_point(|unkind_us| *unkind_us <= at_us);
        let unkind_us = self.unkind_us.get(next + nth).or(self.unkind_us.get(next));
        let Some(unkind_us) = unkind_us else { return 0 };
        unkind_us.saturating_add_signed(off).saturating_sub(at_us)
    }

    fn resolve(&self, picks: &[usize], begin_us: u64, drafts: &[Draft]) -> Trace<A> {
        let mut all: Vec<_> = (self.make)().into_iter().map(Some).collect();
        let kind = |position: usize| all[position].as_ref().map(|it| it.algorithm.state_kind());
        let mut picks = picks.to_vec();
        // By itself, an algorithm knows states of one kind; a store is tried on either.
        if let (&[one, other], true) = (&picks[..], self.alone || drafts.len() % 2 == 1) {
            let near = (0..all.len()).map(|by| (other + by) % all.len());
            let same = near.filter(|near| *near != one).find(|near| kind(*near) == kind(one));
            match same {
                Some(same) if self.alone || self.changed => picks[1] = same,
                None if self.alone => picks.truncate(1),
                _ => {}
            }
        }
        let (mut limits, mut texts) = (Vec::new(), Vec::new());
        for instance in picks.iter().filter_map(|position| all[*position].take()) {
            let name = if self.changed { 0 } else { limits.len() };
            texts.push(instance.text.clone());
            limits.push(limit(&format!("l{name}"), instance));
        }
        let scales: Vec<_> =
            limits.iter().map(|limit| Scale::measure(limit.algorithm(), begin_us)).collect();
        let pure = PureStore::new();
        // An algorithm may panic; a law finds that.
        let answer = |limits: &[Limit<A>], request: &TraceRequest| {
            catch_unwind(AssertUnwindSafe(|| pure.answer(limits, request, &[]))).ok()?.ok()
        };
        let (mut at_us, mut last, mut requests) = (begin_us, None, Vec::new());
        let mut reserved: HashMap<ReservationId, Vec<(usize, usize)>> = HashMap::new();
        for draft in drafts {
            // A limit is changed once, or requests bring other numbers in turn.
            let changed = match drafts.len() % 3 {
                0 => draft.asks[0].0 % limits.len(),
                _ => requests.len() * limits.len() / drafts.len(),
            };
            let limit_key = |(limit, key): (usize, usize)| {
                let key = ["a", "b", "c"][key / 6 + usize::from(key > 9)];
                if self.alone {
                    (0, "a")
                } else if self.changed {
                    (changed, key)
                } else {
                    (limit % limits.len(), key)
                }
            };
            let on = scales[limit_key((draft.asks[0].0, 0)).0];
            let by_us = match draft.advance {
                Advance::Unkind(nth, off) => self.until_unkind_us(at_us, nth, off),
                other => on.us(other, last),
            };
            at_us = if draft.back { at_us.saturating_sub(by_us) } else { at_us + by_us };
            // Stay short of the last moment, after which time cannot advance.
            at_us = at_us.min(Timestamp::MAX.as_us() - 10);
            let at = Timestamp::saturating_from_us(at_us);
            let (op, id) = draft.op;
            let mut request = TraceRequest { at, op, asks: Vec::new(), id };
            let mut limit_keys = HashSet::new();
            let mut asked: Vec<_> = draft.asks.clone();
            let known = id.and_then(|id| reserved.get(&id)).filter(|_| draft.again);
            if let (true, Some(known)) = (op.needs_id(), known) {
                let costs = draft.asks.iter().map(|(.., cost)| *cost).cycle();
                asked = known
                    .iter()
                    .zip(costs)
                    .map(|(limit_key, cost)| (limit_key.0, limit_key.1, cost))
                    .collect();
            }
            if let (Op::Acquire, Some(id)) = (op, id) {
                reserved.insert(id, asked.iter().map(|(limit, key, _)| (*limit, *key)).collect());
            }
            for (limit, key, cost) in &asked {
                let (limit, key) = limit_key((*limit, *key));
                let fits = request.asks.is_empty() || self.able.can(Capability::Batches);
                let same = request.asks.first().is_none_or(|first| first.key == key);
                if fits
                    && (same || self.able.can(Capability::SeveralKeys))
                    && limit_keys.insert((limits[limit].name(), key))
                {
                    let ask = Ask { limit, key: key.to_owned(), cost: 0 };
                    let peek = TraceRequest::one(at, Op::Peek, ask.clone());
                    let left = || answer(&limits, &peek).map_or(0, |got| got.remaining());
                    request.asks.push(Ask { cost: scales[limit].cost(*cost, left), ..ask });
                }
            }
            // The verdict's waits are where the next request may come.
            if let Some(verdict) = answer(&limits, &request) {
                last = Some(*verdict.summary());
            }
            requests.push(request);
        }
        Trace { limits, texts, requests }
    }
}

/// A limit with a name that the testkit chose, which warns: so all that a store says of charges is
/// compared. If the name ends in 1, it is a shadow limit: to a store one as any other.
pub(crate) fn limit<A: Algorithm>(name: &str, instance: Instance<A>) -> Limit<A> {
    // A store that needs to know what becomes of requests in an outage can be tested too.
    let limit = instance.named(name).on_outage(OnOutage::Open);
    let limit = limit.warn_at_percent(50).expect("a percentage");
    if name.ends_with('1') { limit.shadow() } else { limit }
}

/// The time scale of an algorithm, measured from its own decisions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(crate) capacity: u64,
    pub(crate) unit_us: u64,
    pub(crate) full_us: u64,
    reservation_us: u64,
}

impl Scale {
    pub(crate) fn measure<A: Algorithm>(algorithm: &A, begin_us: u64) -> Self {
        let (capacity, begin) = (algorithm.capacity(), Timestamp::saturating_from_us(begin_us));
        let left = algorithm.step(None, begin, 0).decision.remaining;
        let reset_us = |cost| algorithm.step(None, begin, cost).decision.reset_after_us;
        // An algorithm that reports no times or never recovers gets a default scale.
        let sensible = |us: u64| if (1..1 << 46).contains(&us) { us } else { 1_000_000 };
        let reservation_us = algorithm.reservation_us().unwrap_or(Reservation::LIFE_US);
        let (unit_us, full_us) = (sensible(reset_us(1)), sensible(reset_us(left)));
        Self { capacity, unit_us, full_us, reservation_us }
    }

    fn us(&self, advance: Advance, last: Option<Decision>) -> u64 {
        match advance {
            // `resolve` knows these times.
            Advance::Unkind(..) => 0,
            Advance::Us(us) => us,
            Advance::Units(n, off) => (n * self.unit_us).saturating_add_signed(off),
            Advance::Part(thousandths) => self.full_us / 1000 * thousandths,
            Advance::Until(until, off) => {
                let last = |of: fn(Decision) -> u64| last.map_or(self.unit_us, of);
                let us = match until {
                    Until::Full => self.full_us,
                    Until::Retry => last(|last| last.retry_after_us.unwrap_or(1)),
                    Until::Replenish => last(|last| last.replenish_after_us),
                    Until::Reset => last(|last| last.reset_after_us),
                    Until::ReservationEnd => self.reservation_us,
                    Until::Forgotten => Reservation::REPEAT_US,
                };
                us.min(1 << 50).saturating_add_signed(off)
            }
        }
    }

    fn cost(&self, cost: CostKind, left: impl FnOnce() -> u64) -> u64 {
        match cost {
            CostKind::Units(n) if n > self.capacity => 1,
            CostKind::Units(n) => n,
            CostKind::Zero => 0,
            CostKind::Part(hundredths) => {
                (self.capacity / 100 * hundredths).clamp(1, self.capacity.max(1))
            }
            CostKind::Left(less) => left().saturating_sub(less),
            CostKind::OneMoreThanLeft => left().saturating_add(1),
            CostKind::Capacity => self.capacity,
            CostKind::OneMore => self.capacity.saturating_add(1),
            CostKind::Max => u64::MAX,
        }
    }
}
