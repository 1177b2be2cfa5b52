//! [`RecordRule`]: what a store with [records](Record) of callers keeps to.

use std::time::{SystemTime, UNIX_EPOCH};

use ratelimit_core::store::{Batch, Check, Now, Op, RecordStore};
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Limit, OnOutage, Record, ReservationId, Store, StoreError as _,
    Timestamp, Verdict,
};

use crate::harness::{Harness, StoreClock};
use crate::pure::PureStore;
use crate::suite::cases;
use crate::trace::made;

type Any = AnyAlgorithm;
type Held = Result<(), String>;

const SECOND_US: u64 = 1_000_000;

/// Writes the tests that hold a store to the rules of records: `record_conformance!(name,
/// Harness);`, for a [`Harness`] whose store is a [`RecordStore`].
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::{Limit, AnyAlgorithm};
/// # use ratelimit_core::algorithm::AnyState;
/// use ratelimit_testkit::{Harness, PureStore, StoreClock, record_conformance};
/// # struct Pure;
/// # impl Harness for Pure {
/// #     type Store = PureStore;
/// #     fn new() -> Self { Pure }
/// #     fn store(&self) -> PureStore { PureStore::new() }
/// #     fn clock(&self, store: &PureStore) -> StoreClock { store.clock().into() }
/// #     async fn state(&self, store: &PureStore, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
/// #         store.state(limit, key)
/// #     }
/// #     async fn leaks(&self, _: &PureStore, _within: Duration) -> Vec<String> { vec![] }
/// # }
///
/// record_conformance!(pure_records, Pure); // pure_records::agrees, and so on
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! record_conformance {
    ($name:ident, $harness:ty) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::record_conformance! { @tests
                agrees_with_the_pure_step: Agrees,
                a_blocked_caller_is_denied_until_the_end_and_charged_nothing: BlocksUntilTheEnd,
                an_exempt_caller_is_charged_nothing: ExemptsFromCharges,
                a_raise_grants_no_second_burst: RaisesWithoutASecondBurst,
                records_outlive_states: OutlivesStates,
                of_two_writers_one_is_told: TellsTheLoser,
                requests_and_changes_have_an_order: AnswersInSomeOrder,
                only_overridable_limits_look: AsksOnlyOverridable
            }
        }
    };
    (@tests $($test:ident: $rule:ident),+) => { $(
        #[test]
        fn $test() {
            if let Err(broken) = $crate::RecordRule::$rule.held_by::<Harnessed>() {
                panic!("{broken}");
            }
        }
    )+ };
}

/// A rule of stores with records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RecordRule {
    /// Every answer is that of the pure step under the record that stands, over drawn histories of
    /// all operations, with and without an id, in which records are set and cleared, end in the
    /// microsecond of a decision, and have numbers at the ends of ranges.
    Agrees,
    /// A blocked caller is denied, with the rest of the block as its wait, and is charged nothing.
    BlocksUntilTheEnd,
    /// An exempt caller is allowed and charged nothing.
    ExemptsFromCharges,
    /// What was used counts under other numbers.
    RaisesWithoutASecondBurst,
    /// Neither a reset nor the end of a state takes a record away.
    OutlivesStates,
    /// A writer learns whether the record has changed since it was read, and that one which has
    /// ended is none.
    TellsTheLoser,
    /// Of tasks that ask and change records at one moment, each is answered as if all had come one
    /// after the other, in some order.
    AnswersInSomeOrder,
    /// A limit that does not look for records has none, and its callers decide by the policy.
    AsksOnlyOverridable,
}

impl RecordRule {
    /// All rules.
    pub const ALL: [Self; 8] = [
        Self::Agrees,
        Self::BlocksUntilTheEnd,
        Self::ExemptsFromCharges,
        Self::RaisesWithoutASecondBurst,
        Self::OutlivesStates,
        Self::TellsTheLoser,
        Self::AnswersInSomeOrder,
        Self::AsksOnlyOverridable,
    ];

    /// Whether the store of a harness keeps to the rule: at given times, and at its own if its
    /// clock can be set.
    ///
    /// # Errors
    /// What the store did instead.
    pub fn held_by<H: Harness<Any, Store: RecordStore<Any>>>(self) -> Held {
        let harness = H::new();
        for by_own_clock in [false, true] {
            let try_on = || Tried::new(&harness, harness.store(), by_own_clock);
            if by_own_clock && try_on().set.is_none() {
                continue;
            }
            let held = match self {
                Self::Agrees => (0..u64::from(cases(H::CASES))).try_for_each(|seed| {
                    let tried = try_on();
                    harness.block_on(agrees(&tried, seed))
                }),
                Self::BlocksUntilTheEnd => harness.block_on(blocks(&try_on())),
                Self::ExemptsFromCharges => harness.block_on(exempts(&try_on())),
                Self::RaisesWithoutASecondBurst => harness.block_on(raises(&try_on())),
                Self::OutlivesStates => harness.block_on(outlives(&try_on())),
                Self::TellsTheLoser => harness.block_on(tells(&try_on())),
                Self::AnswersInSomeOrder => races::answers(&harness, &try_on()),
                Self::AsksOnlyOverridable => harness.block_on(asks_only(&try_on())),
            };
            held.map_err(|broken| format!("{self:?}, by its own clock: {by_own_clock}: {broken}"))?;
        }
        Ok(())
    }
}

/// A store under test, and a time at which no record has ended by its own clock.
struct Tried<S> {
    store: S,
    set: Option<StoreClock>,
    begin: Timestamp,
}

impl<S: RecordStore<Any>> Tried<S> {
    fn new<H: Harness<Any, Store = S>>(harness: &H, store: S, by_own_clock: bool) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let begin = Timestamp::ZERO + now + std::time::Duration::from_secs(3_600);
        let set = Some(harness.clock(&store));
        // By a store's own clock no record of a given time has ended.
        if let Some(StoreClock::Settable(set)) = &set {
            set(Timestamp::ZERO + now);
        }
        let set = set.filter(|clock| by_own_clock && matches!(clock, StoreClock::Settable(_)));
        let tried = Self { store, set, begin };
        tried.time(begin);
        tried
    }

    fn after(&self, us: u64) -> Timestamp {
        self.begin.saturating_add_us(us)
    }

    fn time(&self, now: Timestamp) -> Now {
        match &self.set {
            Some(StoreClock::Settable(set)) => {
                set(now);
                Now::Store
            }
            _ => Now::At(now),
        }
    }

    async fn ask(&self, asked: &Asked<'_>) -> Result<Verdict, String> {
        let now = self.time(asked.at);
        ask(&self.store, asked, now).await
    }

    async fn one(&self, limit: &Limit<Any>, us: u64, op: Op, cost: u64) -> Result<Verdict, String> {
        let checks = [(limit, "alice", cost)];
        self.ask(&Asked { checks: &checks, op, at: self.after(us), id: None }).await
    }

    async fn set(&self, limit: &Limit<Any>, next: Option<Record<Any>>) -> Held {
        self.set_of(limit, "alice", next).await
    }

    async fn set_of(&self, limit: &Limit<Any>, key: &str, next: Option<Record<Any>>) -> Held {
        set_on(&self.store, limit, key, next).await
    }
}

/// Sets the record of a key in the place of the one that stands.
async fn set_on<S: RecordStore<Any>>(
    store: &S,
    limit: &Limit<Any>,
    key: &str,
    next: Option<Record<Any>>,
) -> Held {
    let said = |error: S::Error| format!("it cannot set a record: {error}");
    let before = store.record(limit, key).await.map_err(said)?;
    let done = store.exchange_record(limit, key, before.as_ref(), next.as_ref()).await;
    ensure(done.map_err(said)?, || "an unchanged record was not replaced".to_owned())
}

/// A request.
struct Asked<'c> {
    checks: &'c [(&'c Limit<Any>, &'c str, u64)],
    op: Op,
    at: Timestamp,
    id: Option<ReservationId>,
}

async fn ask<S: Store<Any>>(store: &S, asked: &Asked<'_>, now: Now) -> Result<Verdict, String> {
    let check = |&(limit, key, cost): &(_, _, u64)| Check { limit, key, cost };
    let checks: Vec<Check<'_, Any>> = asked.checks.iter().map(check).collect();
    let batch = Batch::new(&checks).map_err(|error| error.to_string())?.op(asked.op).now(now);
    let batch = asked.id.map_or(batch, |id| batch.id(id));
    store.apply(&batch).await.map_err(|error| format!("{:?}: {error}", error.kind()))
}

fn ensure(holds: bool, broken: impl FnOnce() -> String) -> Held {
    if holds { Ok(()) } else { Err(broken()) }
}

/// Whether a verdict shows this.
fn shows(
    verdict: &Verdict,
    allowed: bool,
    remaining: u64,
    retry_after_us: impl Into<Option<u64>>,
) -> Held {
    let due = (allowed, remaining, retry_after_us.into());
    let summary = verdict.summary();
    let shown = (summary.allowed, summary.remaining, summary.retry_after_us);
    ensure(shown == due, || {
        format!("(allowed, remaining, retry_after_us) is {shown:?} in place of {due:?}")
    })
}

/// A limit, with a choice for a layer that asks for one.
fn limit_in_words(name: &str, words: &str) -> Limit<Any> {
    made::limit_in_words(name, words).on_outage(OnOutage::Open)
}

fn api() -> Limit<Any> {
    limit_in_words("api", "fixed-window 10/h").overridable()
}

fn numbers(limit: &Limit<Any>, words: &str) -> Result<Record<Any>, String> {
    Ok(Record::numbers(algorithm(limit, words)?).forever())
}

fn algorithm(limit: &Limit<Any>, numbers: &str) -> Result<Any, String> {
    limit.algorithm().at_numbers(numbers).map_err(|error| error.to_string())
}

async fn blocks<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    for words in ["gcra 10/s burst 10", "gcra 10/s burst 10 count attempts", "sliding-log 10/s"] {
        let name = words.replace([' ', '/'], "-");
        let (api, free) = (
            limit_in_words(&name, words).overridable(),
            limit_in_words("free", "gcra 10/s burst 10").overridable(),
        );
        let _ = tried.one(&api, 0, Op::Acquire, 3).await?;
        let end = tried.after(60 * SECOND_US);
        tried.set(&api, Some(Record::blocked().until(end))).await?;
        for op in [Op::Acquire, Op::Peek, Op::Acquire] {
            shows(&tried.one(&api, 0, op, 1).await?, false, 0, 60 * SECOND_US)?;
        }
        // All or nothing.
        let both = [(&api, "alice", 1), (&free, "alice", 4)];
        let asked = Asked { checks: &both, op: Op::Acquire, at: tried.begin, id: None };
        shows(&tried.ask(&asked).await?, false, 0, 60 * SECOND_US)?;
        shows(&tried.one(&free, 0, Op::Peek, 0).await?, true, 10, 0)?;
        tried.set(&api, None).await?;
        shows(&tried.one(&api, 0, Op::Peek, 0).await?, true, 7, 0)?;
        tried.set(&api, Some(Record::blocked().until(end))).await?;
        let before = tried.one(&api, 60 * SECOND_US - 1, Op::Acquire, 1).await?;
        shows(&before, false, 0, 1)?;
        shows(&tried.one(&api, 60 * SECOND_US, Op::Acquire, 1).await?, true, 9, 0)?;
        tried.set(&api, Some(Record::blocked().forever())).await?;
        shows(&tried.one(&api, 61 * SECOND_US, Op::Acquire, 1).await?, false, 0, None)?;
        tried.set(&api, None).await?;
    }
    extends_nothing(tried).await
}

/// Nor is anything else extended that the same id has reserved, also after the caller's lease has
/// ended.
async fn extends_nothing<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    let running = limit_in_words("running", "concurrency 5/1s").overridable();
    let spent = limit_in_words("spent", "fixed-window 100/30d");
    let id = Some(ReservationId::new(7));
    let ask = async |us: u64, op: Op, cost: u64| {
        let checks = [(&running, "alice", 1), (&spent, "alice", cost)];
        tried.ask(&Asked { checks: &checks, op, at: tried.after(us), id }).await
    };
    shows(&ask(0, Op::Acquire, 10).await?, true, 4, 0)?;
    tried.set(&running, Some(Record::blocked().forever())).await?;
    shows(&ask(2 * SECOND_US, Op::Extend, 40).await?, false, 0, None)?;
    shows(&tried.one(&spent, 2 * SECOND_US, Op::Peek, 0).await?, true, 90, 0)?;
    tried.set(&running, None).await
}

async fn exempts<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    let api = api();
    let _ = tried.one(&api, 0, Op::Acquire, 8).await?;
    tried.set(&api, Some(Record::exempt().forever())).await?;
    for op in [Op::Acquire, Op::Force, Op::Acquire] {
        shows(&tried.one(&api, 1, op, 100).await?, true, 2, 0)?;
    }
    let (one, id) = ([(&api, "alice", 50)], Some(ReservationId::new(7)));
    let asked = Asked { checks: &one, op: Op::Acquire, at: tried.after(2), id };
    shows(&tried.ask(&asked).await?, true, 2, 0)?;
    // Costs that no double represents exactly, settled before the exemption ends and after it.
    let most = |n, op, cost: u64| {
        let (checks, id) = ([(&api, "alice", cost)], Some(ReservationId::new(n)));
        let at = tried.after(2);
        async move { tried.ask(&Asked { checks: &checks, op, at, id }).await }
    };
    shows(&most(8, Op::Acquire, u64::MAX).await?, true, 2, 0)?;
    shows(&most(8, Op::Settle, u64::MAX - 1).await?, true, 2, 0)?;
    shows(&most(9, Op::Acquire, u64::MAX - 1).await?, true, 2, 0)?;
    tried.set(&api, None).await?;
    // What was charged nothing gives nothing back.
    let less = [(&api, "alice", 20)];
    let asked = Asked { checks: &less, op: Op::Settle, at: tried.after(3), id };
    shows(&tried.ask(&asked).await?, true, 2, 0)?;
    shows(&most(9, Op::Settle, u64::MAX).await?, true, 1, 0)?;
    shows(&tried.one(&api, 4, Op::Acquire, 1).await?, true, 0, 0)?;
    ensure(!tried.one(&api, 5, Op::Acquire, 1).await?.allowed(), || {
        "an exemption that was cleared still holds".to_owned()
    })
}

async fn raises<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    let api = api();
    shows(&tried.one(&api, 0, Op::Acquire, 10).await?, true, 0, 0)?;
    let double = numbers(&api, "20/h")?;
    tried.set(&api, Some(double)).await?;
    shows(&tried.one(&api, 1, Op::Acquire, 10).await?, true, 0, 0)?;
    ensure(!tried.one(&api, 2, Op::Acquire, 1).await?.allowed(), || {
        "20 per hour admitted more than 20".to_owned()
    })?;
    let less = numbers(&api, "5/h")?;
    tried.set(&api, Some(less)).await?;
    ensure(!tried.one(&api, 3, Op::Acquire, 1).await?.allowed(), || {
        "numbers that lower were not seen".to_owned()
    })?;
    waits_for_ends(tried).await
}

/// The wait of a denial counts with the end of the record by whose numbers it was decided.
async fn waits_for_ends<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    for words in ["gcra 10/s burst 10", "sliding-log 10/s"] {
        let api = limit_in_words("waits", words).overridable();
        let until = tried.after(5 * SECOND_US);
        let record = |words| Ok::<_, String>(Record::numbers(algorithm(&api, words)?).until(until));
        let [low, high] = match words.split(' ').next() {
            Some("gcra") => ["1/h burst 1", "20/s burst 20"],
            _ => ["1/s", "20/s"],
        };
        // Nothing above the lower capacity ever fits at the lower numbers.
        let _ = tried.time(tried.begin);
        tried.set(&api, Some(record(low)?)).await?;
        shows(&tried.one(&api, 0, Op::Peek, 2).await?, false, 1, 5 * SECOND_US)?;
        shows(&tried.one(&api, 5 * SECOND_US - 1, Op::Peek, 2).await?, false, 1, 1)?;
        shows(&tried.one(&api, 5 * SECOND_US, Op::Peek, 2).await?, true, 8, 0)?;
        // Nor what is above the policy's capacity, once the higher numbers have ended.
        let _ = tried.time(tried.begin);
        tried.set(&api, Some(record(high)?)).await?;
        let late = 5 * SECOND_US - 1;
        shows(&tried.one(&api, late, Op::Acquire, 20).await?, true, 0, 0)?;
        shows(&tried.one(&api, late, Op::Peek, 11).await?, false, 0, None)?;
        let _ = tried.one(&api, late, Op::Reset, 0).await?;
        tried.set(&api, None).await?;
    }
    Ok(())
}

async fn outlives<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    let api = limit_in_words("api", "gcra 10/s burst 10").overridable();
    tried.set(&api, Some(numbers(&api, "10/s burst 40")?)).await?;
    shows(&tried.one(&api, 0, Op::Acquire, 1).await?, true, 39, 0)?;
    let _ = tried.one(&api, 0, Op::Reset, 0).await?;
    shows(&tried.one(&api, 0, Op::Acquire, 1).await?, true, 39, 0)?;
    // Long after the state has ended, and other keys have come.
    for n in 0..200 {
        let key = n.to_string();
        let other = [(&api, &*key, 1)];
        let at = tried.after(3_600 * SECOND_US + n);
        let _ = tried.ask(&Asked { checks: &other, op: Op::Acquire, at, id: None }).await?;
    }
    shows(&tried.one(&api, 3_601 * SECOND_US, Op::Acquire, 1).await?, true, 39, 0)
}

async fn tells<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    let (api, blocked) = (api(), Record::blocked().forever());
    let raised = numbers(&api, "20/h")?;
    let said = |error: S::Error| error.to_string();
    let (store, key) = (&tried.store, "alice");
    let first = store.exchange_record(&api, key, None, Some(&raised)).await.map_err(said)?;
    let second = store.exchange_record(&api, key, None, Some(&blocked)).await.map_err(said)?;
    ensure(first && !second, || {
        format!("of two writers that saw no record, {first} and {second} were told yes")
    })?;
    let stands = store.record(&api, key).await.map_err(said)?;
    ensure(stands.as_ref() == Some(&raised), || format!("{stands:?} stands"))?;
    let ended = Record::blocked().until(Timestamp::ZERO);
    for standing in [Some(&raised), None] {
        let refused = store.exchange_record(&api, key, standing, Some(&ended)).await;
        let kind = refused.map_err(|error| error.kind());
        ensure(kind == Err(ErrorKind::Invalid), || format!("an ended record got {kind:?}"))?;
    }
    let third = store.exchange_record(&api, key, Some(&raised), Some(&blocked)).await;
    ensure(third.map_err(said)?, || "an unchanged record was not replaced".to_owned())?;
    let cleared = store.exchange_record(&api, key, Some(&blocked), None).await.map_err(said)?;
    let stands = store.record(&api, key).await.map_err(said)?;
    ensure(cleared && stands.is_none(), || format!("{stands:?} stands after it was cleared"))
}

async fn asks_only<S: RecordStore<Any>>(tried: &Tried<S>) -> Held {
    let (api, fixed) = (api(), limit_in_words("api", "fixed-window 10/h"));
    tried.set(&api, Some(Record::blocked().forever())).await?;
    shows(&tried.one(&fixed, 0, Op::Acquire, 1).await?, true, 9, 0)?;
    let other = [(&api, "bob", 1)];
    let asked = Asked { checks: &other, op: Op::Acquire, at: tried.after(1), id: None };
    shows(&tried.ask(&asked).await?, true, 9, 0)?;
    let blocked = Record::blocked().forever();
    let set = tried.store.exchange_record(&fixed, "alice", None, Some(&blocked)).await;
    ensure(set.is_err(), || "a limit that looks for no record took one".to_owned())
}

/// Draws numbers (`SplitMix64`; Steele et al., 2014).
struct Drawn(u64);

impl Drawn {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) >> 32).unwrap_or_default() % end
    }

    fn of<'t, T>(&mut self, all: &'t [T]) -> &'t T {
        &all[self.below(all.len())]
    }
}

/// Limits, each with other numbers that it could have.
const LIMITS: [(&str, [&str; 2]); 19] = [
    ("gcra 10/s burst 5", ["100/s burst 9", "1/s burst 2"]),
    ("gcra 3/s burst 4 debt 6", ["7/s burst 9 debt 2", "3/s burst 1 debt 9"]),
    ("token-bucket 7/2s burst 4 count attempts", ["70/2s burst 8", "1/s"]),
    ("fixed-window 4/s", ["8/s", "2/s"]),
    ("first-request-window 4/s", ["8/s", "2/s"]),
    ("window-log 4/s", ["8/s", "2/s"]),
    ("sliding-log 5/s", ["9/s", "1/s"]),
    ("sliding-counter 5/s count attempts", ["9/s", "1/s"]),
    (
        "bucketed-window bucket 250ms rates 5/s, 8/2s",
        ["bucket 250ms rates 9/s, 18/2s", "bucket 250ms rates 2/s, 3/2s"],
    ),
    ("concurrency 3/700ms", ["5/700ms", "1/700ms"]),
    (
        "lockout 3/1s block 250ms factor 2 longest 1s forget 2s",
        [
            "5/1s block 250ms factor 2 longest 1s forget 2s",
            "1/1s block 250ms factor 2 longest 1s forget 2s",
        ],
    ),
    ("fixed-window 4/day zone Europe/Berlin debt 2", ["8/day", "2/day debt 1"]),
    ("gcra 0/s", ["3/s burst 2", "0/s"]),
    // The ends of ranges.
    ("gcra 1/us burst 4503599627370494", ["0/s", "1/4503599627370494us burst 1"]),
    ("token-bucket 1/4503599627370494us burst 1", ["1/us burst 4503599627370494", "1/h burst 1"]),
    ("fixed-window 4503599627370495/s", ["0/s", "4503599627370000/s debt 495"]),
    ("sliding-log 0/s", ["4503599627370495/s", "1/s"]),
    ("concurrency 1/4503599627370495us", ["0/4503599627370495us", "10000/4503599627370495us"]),
    ("sliding-counter 4503599627370495/s", ["0/s", "1/s"]),
];

const OPS: [Op; 14] = [
    Op::Acquire,
    Op::Acquire,
    Op::Acquire,
    Op::Acquire,
    Op::Acquire,
    Op::Peek,
    Op::Peek,
    Op::Force,
    Op::Refund,
    Op::Reset,
    Op::Settle,
    Op::Renew,
    Op::Extend,
    Op::Adopt,
];

async fn agrees<S: RecordStore<Any>>(tried: &Tried<S>, seed: u64) -> Held {
    let (pure, mut drawn) = (PureStore::new(), Drawn(seed));
    let chosen: Vec<_> = (0..3).map(|n| (n, *drawn.of(&LIMITS))).collect();
    let limits: Vec<_> = chosen
        .iter()
        .map(|(n, (words, _))| {
            let limit = limit_in_words(&format!("l{n}"), words);
            let limit = limit.warn_at_percent(50).expect("a percentage");
            if *n == 2 { limit } else { limit.overridable() }
        })
        .collect();
    let (mut us, mut history) = (0, Vec::new());
    for _ in 0..40 {
        us += *drawn.of(&[0, 1, 40_000, 100_000, 250_000, 700_000]);
        // Over the end of a record, and of a state that a store may have removed by its own clock.
        if tried.set.is_none() && drawn.below(6) == 0 {
            us -= us.min(*drawn.of(&[1, 100_000, 500_000]));
        }
        let at = tried.after(us);
        pure.clock().set(at);
        let _ = tried.time(at);
        let key = *drawn.of(&["alice", "bob"]);
        if drawn.below(4) == 0 {
            let place = drawn.below(2);
            let (limit, other) = (&limits[place], drawn.of(&chosen[place].1.1));
            let until = at.saturating_add_us(*drawn.of(&[0, 1, 100_000, 500_000]));
            let until = *drawn.of(&[until, until, until, Timestamp::ZERO, Timestamp::MAX]);
            let change = match drawn.below(6) {
                0 => None,
                1 => Some(Record::blocked()),
                2 => Some(Record::exempt()),
                _ => Some(Record::numbers(algorithm(limit, other)?)),
            };
            let ends = drawn.below(2) == 0;
            let next =
                change.map(|change| if ends { change.until(until) } else { change.forever() });
            history.push(format!("{at}: {key} under {} has {next:?}", limit.name()));
            // A record that has ended by the store's own clock is refused.
            pure.clock().set(if tried.set.is_some() { at } else { Timestamp::ZERO });
            let due = set_on(&pure, limit, key, next.clone()).await;
            pure.clock().set(at);
            let got = tried.set_of(limit, key, next).await;
            ensure(due.is_ok() == got.is_ok(), || {
                format!("seed {seed}:\n{}\ndue {due:?}\ngot {got:?}", history.join("\n"))
            })?;
        }
        let (op, cost) = (*drawn.of(&OPS), *drawn.of(&[0, 1, 1, 1, 2, 3, 9, u64::MAX]));
        let has_id = op.needs_id() || drawn.below(4) == 0;
        let id = has_id.then(|| ReservationId::new(drawn.below(4) as u128));
        let first = drawn.below(limits.len());
        let mut checks = vec![(&limits[first], key, cost)];
        if drawn.below(3) == 0 {
            let (next, cost) = ((first + 1) % limits.len(), *drawn.of(&[0, 1, 2]));
            checks.push((
                &limits[next],
                if has_id { key } else { *drawn.of(&["alice", "bob"]) },
                cost,
            ));
        }
        let asked = Asked { checks: &checks, op, at, id };
        let told = checks.iter().map(|(limit, key, cost)| format!("{} {key} {cost}", limit.name()));
        let told = told.collect::<Vec<_>>().join(", ");
        history.push(format!("{at}: {op} {told} {id:?}"));
        let due = ask(&pure, &asked, Now::At(at)).await;
        let got = tried.ask(&asked).await;
        ensure(got == due, || {
            let limits: Vec<_> = chosen.iter().map(|(_, (words, _))| *words).collect();
            format!(
                "seed {seed}, limits {limits:?}:\n{}\ndue {due:#?}\ngot {got:#?}",
                history.join("\n")
            )
        })?;
    }
    Ok(())
}

mod races;
#[cfg(test)]
mod wrong;
