//! The strategies that generate limits and requests to them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};
use ratelimit_core::store::Op;
use ratelimit_core::{
    AnyAlgorithm, Identifiers, Limit, LimitCosts, Limits, Numbers, OnOutage, Record, ReservationId,
    Timestamp,
};

use crate::trace::made::Instance;

/// Texts of limits with a number to fill in: they differ in algorithm, rate, window and life.
const LIMITS: [&str; 25] = [
    "gcra 1/s burst N",
    "gcra N/m burst N",
    "gcra N/s burst N",
    "gcra 2/s burst N",
    "token-bucket 1/2s burst N",
    "token-bucket N/7s burst N",
    "gcra 1/m burst N debt 4",
    "token-bucket 3/h burst N",
    "token-bucket 1/s burst N debt 2",
    "fixed-window N/s",
    "fixed-window N/7m",
    "fixed-window N/3h debt 3",
    "fixed-window N/day zone Europe/Berlin anchor 7",
    "fixed-window N/month debt 1",
    "first-request-window N/2s",
    "window-log N/9s",
    "bucketed-window bucket 1s rates N/5s, 12/20s",
    "sliding-counter N/11s",
    "sliding-log N/13s",
    "concurrency N/30s",
    "lockout N/5s block 7s factor 2 longest 20s forget 1m",
    "fixed-window N/17s count attempts",
    "sliding-log N/4s count attempts",
    "window-log N/6s count attempts",
    "first-request-window N/40s count attempts",
];

/// The names of the identifiers, and their values: mostly the same. Where the separator or its
/// escape is missing, two pairs of the others are joined to one text.
const NAMES: [&str; 2] = ["ip", "user"];
const VALUES: [&str; 10] = [
    "sekret-1",
    "sekret-1",
    "sekret-1",
    "sekret-2",
    "sekret-2",
    "sekret-11",
    "1sekret-2",
    "sekret-1|sekret-2",
    "sekret-2|sekret-2",
    "sekret\\3",
];

/// The limit at this number; what cannot be 0 is 1.
fn instance(text: &str, number: u64) -> Instance<AnyAlgorithm> {
    let at = |number: u64| text.replace('N', &number.to_string()).parse();
    at(number).or_else(|_| at(number.max(1))).expect("a limit")
}

/// A limit, and the same with another number.
#[derive(Clone, Debug)]
pub(crate) struct LimitDraft {
    pub(crate) name: String,
    /// Its text, with a number to fill in.
    pub(crate) text: &'static str,
    /// The limit of the first limiter, and that of the second.
    pub(crate) instances: [Instance<AnyAlgorithm>; 2],
    pub(crate) by: Vec<&'static str>,
    /// What the condition on `user` is, and whether it excludes.
    pub(crate) when_user: Option<(&'static str, bool)>,
    pub(crate) required: bool,
    pub(crate) shadow: bool,
    pub(crate) overridable: bool,
    pub(crate) on_outage: Option<OnOutage>,
    /// At how many percent it warns.
    pub(crate) warn: Option<u8>,
}

/// The largest number that a limit accepts of a request.
pub(super) const MAX: u64 = 9;

impl LimitDraft {
    /// The limit of the first limiter or of the second, which accepts other numbers.
    pub(crate) fn build(&self, changed: bool) -> Limit<AnyAlgorithm> {
        let limit = self.build_of(self.instances[usize::from(changed)].clone());
        limit.accepts_up_to(self.at_number(MAX)).expect("one algorithm and window")
    }

    /// The limit that decides a request without a record: at the number that this has of its own,
    /// if it has one.
    pub(crate) fn deciding(&self, asked: &AskedRequest) -> Limit<AnyAlgorithm> {
        match asked.own.get(&self.name) {
            Some(number) => self.build_of(instance(self.text, *number)),
            None => self.build(asked.changed),
        }
    }

    /// The limit at this number, of a record.
    pub(crate) fn build_at(&self, number: u64) -> Limit<AnyAlgorithm> {
        self.build_of(instance(self.text, number))
    }

    /// Its algorithm at this number.
    pub(crate) fn at_number(&self, number: u64) -> AnyAlgorithm {
        instance(self.text, number).algorithm
    }

    /// A record of a caller.
    pub(crate) fn record(&self, record: TestRecord) -> Record<AnyAlgorithm> {
        let record = match record {
            TestRecord::Numbers(number) => Record::numbers(self.at_number(number)),
            TestRecord::Blocked => Record::blocked(),
            TestRecord::Exempt => Record::exempt(),
        };
        record.forever()
    }

    /// The limit that accepts more than those of the limiters do.
    fn build_generous(&self) -> Limit<AnyAlgorithm> {
        let limit = self.build_of(self.instances[0].clone());
        limit.accepts_up_to(self.at_number(2 * MAX)).expect("one algorithm and window")
    }

    /// The number that a caller has of its own, the same for all that share a state with it.
    fn plan_of(&self, caller: &TestCaller) -> u64 {
        let letters =
            caller.key(self).iter().flatten().map(|value| value.len() as u64).sum::<u64>();
        1 + letters % MAX
    }

    fn build_of(&self, instance: Instance<AnyAlgorithm>) -> Limit<AnyAlgorithm> {
        let limit = instance.named(&self.name);
        let limit = limit.by(&self.by).expect("plain names");
        let mut limit = match self.when_user {
            Some((value, false)) => limit.when("user", value).expect("a condition"),
            Some((value, true)) => limit.when_not("user", value).expect("a condition"),
            None => limit,
        };
        limit = if self.required { limit.required() } else { limit };
        limit = if self.shadow { limit.shadow() } else { limit };
        limit = if self.overridable { limit.overridable() } else { limit };
        // Of several windows in a state, the one that is shown changes.
        if let Some(percent) = self.warn
            && limit.algorithm().name() != "bucketed-window"
        {
            limit = limit.warn_at_percent(percent).expect("a percentage");
        }
        match self.on_outage {
            Some(on_outage) => limit.on_outage(on_outage),
            None => limit,
        }
    }
}

/// Who asks: some identifiers, as text that lies there or is made for each call.
#[derive(Clone, Debug)]
pub struct TestCaller {
    pub(crate) bare: Option<&'static str>,
    pub(crate) named: Vec<(&'static str, &'static str)>,
    is_owned: bool,
}

impl TestCaller {
    fn text(&self, text: &'static str) -> Cow<'_, str> {
        if self.is_owned { Cow::Owned(text.to_owned()) } else { Cow::Borrowed(text) }
    }

    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        self.bare.into_iter().chain(self.named.iter().map(|(_, value)| *value))
    }

    /// Whether it meets the condition of a limit.
    pub(crate) fn meets(&self, limit: &LimitDraft) -> bool {
        let Some((wanted, excludes)) = limit.when_user else { return true };
        let user = self.named.iter().find(|(name, _)| *name == "user").map(|(_, value)| *value);
        let has = match wanted.strip_suffix('*') {
            Some(beginning) => user.is_some_and(|user| user.starts_with(beginning)),
            None => user == Some(wanted),
        };
        has != excludes
    }

    /// The identifiers that a limit counts by; `None` if the caller lacks one, or does not meet the
    /// condition.
    pub(crate) fn key(&self, limit: &LimitDraft) -> Option<Vec<&'static str>> {
        if !self.meets(limit) {
            return None;
        }
        if limit.by.is_empty() {
            return self.bare.map(|bare| vec![bare]);
        }
        let value = |name: &&str| self.named.iter().find(|(own, _)| own == name).map(|own| own.1);
        limit.by.iter().map(value).collect()
    }
}

impl Identifiers for TestCaller {
    fn bare(&self) -> Option<Cow<'_, str>> {
        self.bare.map(|bare| self.text(bare))
    }

    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        let found = self.named.iter().find(|(own, _)| *own == name);
        found.map(|(_, value)| self.text(value))
    }

    fn names(&self) -> Vec<&str> {
        self.named.iter().map(|(name, _)| *name).collect()
    }
}

/// A request with all its options.
#[derive(Clone, Debug)]
pub struct AskedRequest {
    /// The operation.
    pub op: Op,
    /// When it is made.
    pub at: Timestamp,
    /// Who asks.
    pub caller: TestCaller,
    /// The costs by the names of the limits.
    pub costs: LimitCosts,
    /// The id of a reservation.
    pub id: Option<ReservationId>,
    /// The caller's metadata.
    pub metadata: Vec<u8>,
    /// Whether it goes to the limiter whose limits have other numbers.
    pub(crate) changed: bool,
    /// The record that its caller gets before, or none any more, under the limit of this place.
    pub(crate) record: Option<(usize, Option<TestRecord>)>,
    /// The numbers that it has of its own, by the names of the limits.
    pub(crate) own: BTreeMap<String, u64>,
    /// The same as a request has them.
    pub(crate) numbers: Option<Numbers>,
}

/// What an operator has decided of a caller; the numbers are no subject of a limit's max.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TestRecord {
    Numbers(u64),
    Blocked,
    Exempt,
}

/// Limits, and requests to them.
#[derive(Clone, Debug)]
pub(crate) struct RequestCase {
    pub(crate) limits: Vec<LimitDraft>,
    pub(crate) allows_unlimited: bool,
    pub(crate) requests: Vec<AskedRequest>,
}

fn limits(
    can_keep: fn(&Limit<AnyAlgorithm>) -> bool,
    records: bool,
) -> impl Strategy<Value = Vec<LimitDraft>> {
    // Buckets have more paths than others.
    let texts: Vec<_> =
        LIMITS.into_iter().filter(|text| can_keep(&instance(text, 3).named("l"))).collect();
    let by = select(vec![
        vec![],
        vec![],
        vec!["ip"],
        vec!["user"],
        vec!["ip", "user"],
        vec!["user", "ip"],
    ]);
    let seldom = || prop::bool::weighted(0.15);
    let on_outage = option::of(select(vec![OnOutage::Open, OnOutage::Closed, OnOutage::Local]));
    let warn = option::weighted(0.3, select(vec![1_u8, 34, 50, 80, 100]));
    let when_user = select(vec![
        ("sekret-1", false),
        ("sekret-1*", false),
        ("sekret-2", true),
        ("sekret-2*", true),
    ]);
    let by = (by, option::weighted(0.25, when_user));
    let overridable = prop::bool::weighted(if records { 0.4 } else { 0.0 });
    let how = (seldom(), seldom(), overridable);
    // Some admit nothing.
    let other = prop_oneof![9 => 1_u64..9, 1 => Just(0)];
    let options = (2_u64..7, other, by, how, on_outage, warn);
    // Some more than are decided without an allocation.
    let most = texts.len();
    let count = select(vec![1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 10])
        .prop_map(move |count: usize| count.min(most));
    let texts = count.prop_flat_map(move |count| subsequence(texts.clone(), count)).prop_shuffle();
    (texts, vec(options, most)).prop_map(move |(texts, options)| {
        let named = texts.into_iter().zip(options).enumerate();
        let limit =
            named.map(|(n, (text, (one, other, (by, when_user), how, on_outage, warn)))| {
                let (required, shadow, overridable) = how;
                LimitDraft {
                    when_user,
                    name: format!("l{n}"),
                    text,
                    instances: [one, other].map(|number| instance(text, number)),
                    by,
                    required,
                    shadow,
                    overridable,
                    on_outage,
                    warn,
                }
            });
        limit.collect()
    })
}

fn callers() -> impl Strategy<Value = TestCaller> {
    let value = || option::weighted(0.75, select(&VALUES[..]));
    (value(), [value(), value()], any::<bool>()).prop_map(|(bare, named, is_owned)| {
        let named = NAMES.into_iter().zip(named).filter_map(|(name, value)| Some((name, value?)));
        TestCaller { bare, named: named.collect(), is_owned }
    })
}

#[derive(Clone, Debug)]
struct Draft {
    op: Op,
    later_us: u64,
    caller: TestCaller,
    cost: u64,
    costs: Vec<(usize, u64)>,
    misspelt: bool,
    reserves: bool,
    settles: Index,
    metadata: Vec<u8>,
    changed: bool,
    /// The limits to which it brings other numbers.
    own: Vec<(usize, u64)>,
    record: Option<(Index, Option<TestRecord>)>,
}

fn drafts(can_do: fn(Op) -> bool) -> impl Strategy<Value = Draft> {
    let ops = [
        Op::Acquire,
        Op::Acquire,
        Op::Acquire,
        Op::Acquire,
        Op::Peek,
        Op::Force,
        Op::Refund,
        Op::Reset,
        Op::Settle,
        Op::Settle,
    ];
    let ops: Vec<_> = ops.into_iter().filter(|op| can_do(*op)).collect();
    let later = select(vec![0, 0, 1, 1_000, 300_000, 1_000_000, 2_500_000, 7_000_000]);
    let costs = prop_oneof![3 => Just(Vec::new()), 1 => vec((0_usize..10, 0_u64..5), 1..3)];
    let misspelt = prop::bool::weighted(0.03);
    let reserves = prop::bool::weighted(if can_do(Op::Settle) { 0.3 } else { 0.0 });
    let metadata = prop_oneof![3 => Just(Vec::new()), 1 => vec(any::<u8>(), 1..9)];
    let what = (select(ops), later, callers(), 0_u64..6, costs);
    // Some are more than a limit accepts.
    let number = prop_oneof![40 => 0_u64..=MAX, 1 => Just(MAX + 1)];
    let own = prop_oneof![1 => Just(Vec::new()), 1 => vec((0_usize..10, number), 1..4)];
    let record = prop_oneof![
        2 => (0_u64..=2 * MAX).prop_map(TestRecord::Numbers),
        1 => Just(TestRecord::Blocked),
        1 => Just(TestRecord::Exempt),
    ];
    let record = option::weighted(0.3, (any::<Index>(), option::weighted(0.8, record)));
    let own = (own, record);
    let how = (misspelt, reserves, any::<Index>(), metadata, prop::bool::weighted(0.3), own);
    (what, how).prop_map(|((op, later_us, caller, cost, costs), how)| {
        let (misspelt, reserves, settles, metadata, changed, (own, record)) = how;
        Draft {
            op,
            later_us,
            caller,
            cost,
            costs,
            misspelt,
            reserves,
            settles,
            metadata,
            changed,
            own,
            record,
        }
    })
}

/// Cases for a store that can keep these limits and has these operations, and on which limits may
/// change, and callers have records.
pub(crate) fn cases(
    can_keep: fn(&Limit<AnyAlgorithm>) -> bool,
    can_do: fn(Op) -> bool,
    [changes, records]: [bool; 2],
) -> impl Strategy<Value = RequestCase> {
    let begin =
        select(vec![1_795_218_392_123_456_u64, 1_795_218_390_000_000, 1_795_218_389_999_999]);
    let drafts = vec(drafts(can_do), 1..24);
    // What another limiter charged in between says how a settlement is read: a law of its own.
    let by_id = any::<bool>();
    // Each customer has its plan, or each request has other numbers.
    let by_plan = any::<bool>();
    (limits(can_keep, records), prop::bool::weighted(0.2), begin, drafts, (by_id, by_plan))
        .prop_map(move |(limits, allows_unlimited, mut at_us, drafts, (by_id, by_plan))| {
            let all = Limits::new(limits.iter().map(LimitDraft::build_generous));
            let all = all.expect("names of their own");
            let mut reserved: Vec<AskedRequest> = Vec::new();
            let mut requests = Vec::new();
            for (n, draft) in drafts.into_iter().enumerate() {
                at_us += draft.later_us;
                let mut costs = LimitCosts::from(draft.cost);
                for (limit, cost) in &draft.costs {
                    costs.set(&limits[limit % limits.len()].name, *cost);
                }
                if draft.misspelt {
                    costs.set("l99", 1);
                }
                let mut asked = AskedRequest {
                    op: draft.op,
                    at: Timestamp::saturating_from_us(at_us),
                    caller: draft.caller,
                    costs,
                    id: None,
                    metadata: draft.metadata,
                    changed: draft.changed && changes && !by_id,
                    own: BTreeMap::new(),
                    numbers: None,
                    record: None,
                };
                let applies = |limit: &&LimitDraft| asked.caller.key(limit).is_some();
                let applying: Vec<_> = limits.iter().filter(applies).collect();
                let can = |limit: &&&LimitDraft| {
                    limit.instances[0].can_reserve() && asked.costs.get(&limit.name) > 0
                };
                let can_reserve = applying.iter().filter(can).count() == applying.len();
                match asked.op {
                    Op::Settle if reserved.is_empty() => asked.op = Op::Acquire,
                    Op::Settle => {
                        let settled = reserved.remove(draft.settles.index(reserved.len()));
                        (asked.id, asked.caller) = (settled.id, settled.caller);
                    }
                    Op::Acquire if by_id && draft.reserves && can_reserve && !draft.misspelt => {
                        asked.id = Some(ReservationId::new(n as u128 + 1));
                        reserved.push(asked.clone());
                    }
                    _ => {}
                }
                let can_override: Vec<_> = (0..limits.len())
                    .filter(|place| limits[*place].overridable)
                    .filter(|place| asked.caller.key(&limits[*place]).is_some())
                    .collect();
                if let (Some((place, record)), false) = (draft.record, can_override.is_empty()) {
                    asked.record = Some((*place.get(&can_override), record));
                }
                if by_plan {
                    let plan = |limit: &LimitDraft| limit.plan_of(&asked.caller);
                    let own = limits.iter().map(|limit| (limit.name.clone(), plan(limit)));
                    asked.own = own.collect();
                } else if changes && !by_id {
                    let own = draft.own.iter().map(|(limit, number)| {
                        (limits[limit % limits.len()].name.clone(), *number)
                    });
                    asked.own = own.collect();
                }
                let at_number = |limit: &LimitDraft| {
                    let number = asked.own.get(&limit.name)?;
                    Some((limit.name.clone(), limit.at_number(*number)))
                };
                let numbers = all.numbers(limits.iter().filter_map(at_number));
                asked.numbers =
                    (!asked.own.is_empty()).then(|| numbers.expect("within all that there are"));
                requests.push(asked);
            }
            RequestCase { limits, allows_unlimited, requests }
        })
}
