//! Values that no limit wrote: a request that only reads reports them and leaves them, one that
//! writes reports them once and removes them, and what has another type stays. None is charged in
//! part.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::algorithm::{AnyState, Write};
use ratelimit_redis::HealOptions;

use crate::common::prelude::*;

const LEFT: &str = "has not been removed";
const REMOVED: &str = "has been removed";
const ID: Option<u128> = Some(7);

/// How a mode stores a limit's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    Field,
    Text,
    List,
    Scores,
    Counters,
}

/// A limit in a mode that can decide it.
struct Place {
    store: Arc<dyn DynStore<AnyAlgorithm>>,
    limit: Limit<AnyAlgorithm>,
    key: String,
    stored: Stored,
}

/// Every algorithm in every mode.
fn places<C: Connection>(store: &RedisStore<Lua, C>, caller: &str) -> Vec<Place> {
    let [(_, lua), (_, cas), (_, multi)] = in_every_mode(store);
    let native_key = store.in_mode::<Multi>();
    let own = |limit: &Limit<AnyAlgorithm>, other| match limit.algorithm().name() {
        "window-log" => Stored::List,
        "sliding-log" | "concurrency" => Stored::Scores,
        _ => other,
    };
    let mut places = Vec::new();
    for limit in every(3) {
        let (key, stored) = (store.key(&limit, caller), own(&limit, Stored::Field));
        places.push(Place { store: Arc::clone(&lua), limit: limit.clone(), key, stored });
        let key = store.in_mode::<Cas>().key(&limit, caller);
        places.push(Place { store: Arc::clone(&cas), limit, key, stored: Stored::Text });
    }
    for limit in native(3) {
        let (key, stored) = (native_key.key(&limit, caller), own(&limit, Stored::Counters));
        places.push(Place { store: Arc::clone(&multi), limit, key: key.expect("native"), stored });
    }
    places
}

impl Place {
    /// What no limit writes.
    fn garbage(&self) -> Vec<String> {
        // The token bucket is GCRA by its other name.
        let name = self.limit.name().replace("token-bucket", "gcra");
        let texts: &[&str] = match self.stored {
            Stored::List => &["nonsense", "1 2 3", "1 2 3 99999999999999999999 x", "-1 1 1 1 "],
            Stored::Scores | Stored::Counters => &["nonsense"],
            Stored::Field | Stored::Text if name == "bucketed-window" => &[
                "nonsense",
                "NAME",
                "NAME 0000000000000000 0000000000000000              nan",
                "NAME 0000000000000000 0000000000000x10 0000000000000000",
                "NAME 0000000000000000 0000000000000000x0000000000000001",
            ],
            Stored::Field | Stored::Text => &[
                "nonsense",
                "NAME",
                "NAME nan inf 0x10",
                "NAME 1 2 99999999999999999999",
                "NAME 1 0 1\n",
                "-1 -1",
                "a\nb",
            ],
        };
        texts.iter().map(|text| text.replace("NAME", &name)).collect()
    }

    /// The command that writes this, with the score or the window of what stands beside other
    /// content.
    fn writing(&self, score: &str, content: &str) -> Vec<String> {
        let Self { limit, key, .. } = self;
        let words: &[&str] = match self.stored {
            Stored::Field => &["HSET", key, limit.state_name(), content],
            Stored::Text => &["SET", key, content],
            Stored::List => &["RPUSH", key, content],
            Stored::Scores => &["ZADD", key, score, content],
            Stored::Counters => &["HSET", key, score, content],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn spoil(&self, server: &RedisServer, garbage: &str) {
        let words = self.writing("17", garbage);
        tell(server, &words.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// A program may read the state itself.
    async fn state(
        &self,
        lua: &RedisStore<Lua>,
        identifier: &str,
    ) -> Result<Option<AnyState>, RedisError> {
        match self.stored {
            Stored::Text => lua.in_mode::<Cas>().state(&self.limit, identifier).await,
            _ if self.limit.counts_attempts() => {
                lua.in_mode::<Multi>().state(&self.limit, identifier).await
            }
            _ => lua.state(&self.limit, identifier).await,
        }
    }
}

fn dump(server: &RedisServer, key: &str) -> RespValue {
    tell(server, &["DUMP", key])
}

async fn corrupt<S: Store<AnyAlgorithm>>(
    store: &S,
    checks: &[(&Limit<AnyAlgorithm>, &str, u64)],
    (op, id): (Op, Option<u128>),
    says: &str,
) -> String {
    fails(apply(store, checks, op, id).await, ErrorKind::Corrupt, says)
}

#[tokio::test]
async fn to_look_leaves_a_foreign_value_and_a_charge_removes_it_and_starts_fresh() {
    let server = server();
    let lua = plain(&server).await;
    for place in places(&lua, "a") {
        let Place { store, limit, key, .. } = &place;
        for garbage in place.garbage() {
            place.spoil(&server, &garbage);
            let before = dump(&server, key);
            corrupt(store, &[(limit, "a", 1)], (Op::Peek, None), LEFT).await;
            fails(place.state(&lua, "a").await, ErrorKind::Corrupt, LEFT);
            assert_eq!(dump(&server, key), before, "{key}: {garbage:?}");
            let said = corrupt(store, &[(limit, "a", 1)], (Op::Acquire, None), REMOVED).await;
            assert!(said.contains(limit.name()) && said.contains(key), "{said}");
            three_and_no_more(store, limit, "a").await;
            tell(&server, &["DEL", key]);
        }
    }
}

#[tokio::test]
async fn a_key_of_another_type_is_reported_every_time_and_left_alone() {
    let server = server();
    let (lua, beside) = (plain(&server).await, limit("beside", "gcra 3/h"));
    for place in places(&lua, "a") {
        let Place { store, limit, key, stored } = &place;
        let other = if *stored == Stored::Text { "RPUSH" } else { "SET" };
        tell(&server, &[other, key, "another program's"]);
        let before = dump(&server, key);
        for op in [Op::Acquire, Op::Peek] {
            corrupt(store, &[(limit, "a", 1)], (op, None), key).await;
        }
        fails(place.state(&lua, "a").await, ErrorKind::Corrupt, key);
        if *stored != Stored::Counters && !limit.counts_attempts() {
            // A batch with several checks charges nothing, whichever of them has the wrong type.
            let both = [(&beside, "b", 1), (limit, "a", 1)];
            corrupt(store, &both, (Op::Acquire, None), key).await;
            assert_eq!(peek(store, &beside, "b").await, 3);
        }
        assert_eq!(dump(&server, key), before, "{key}");
        tell(&server, &["DEL", key]);
    }
}

#[tokio::test]
async fn a_foreign_reservation_is_left_by_a_peek_and_removed_by_a_write() {
    let (server, limit) = (server(), limit("leases", "concurrency 3/h"));
    let lua = plain(&server).await;
    let id = ReservationId::new(7);
    let keys = [
        lua.reservation_key(&limit, "a", id),
        lua.in_mode::<Cas>().reservation_key(&limit, "a", id),
    ];
    for (key, (_, store)) in keys.iter().zip(in_every_mode(&lua)) {
        let lease = [(&limit, "a", 2)];
        for garbage in [
            "nonsense",
            "1 2",
            "1 2 ",
            "1 2 3 4 5",
            "1 99999999999999999999 1",
            "4503599627370496 1 1",
            "1 4503599627370496 1",
            "1 2 18446744073709551616 3",
            "1 2 3 18446744073709551616",
            "1 2 3 @11111111111111111 a",
            "1 2 -3",
            "-1 2 3",
            "1 2 3 @",
            "1 2 3 @xyz a",
        ] {
            tell(&server, &["SET", key, garbage]);
            let before = dump(&server, key);
            corrupt(&store, &lease, (Op::Peek, ID), LEFT).await;
            assert_eq!(dump(&server, key), before);
            corrupt(&store, &lease, (Op::Acquire, ID), key).await;
            let verdict = apply(&store, &lease, Op::Acquire, ID).await.expect("healed");
            assert_eq!(verdict.remaining(), 1, "{garbage}");
            let verdict = apply(&store, &lease, Op::Settle, ID).await.expect("released");
            assert_eq!(verdict.remaining(), 3);
            tell(&server, &["DEL", key]);
        }
        tell(&server, &["RPUSH", key, "another program's"]);
        for _ in 0..2 {
            corrupt(&store, &lease, (Op::Acquire, ID), key).await;
        }
        assert_eq!(number(&server, &["LLEN", key]), 1);
    }
}

/// Asking is part of charging: otherwise a corrupt value would deny forever.
#[tokio::test]
async fn across_slots_a_question_leaves_a_foreign_value_and_the_operation_removes_it() {
    let server = server();
    let store = over(RedisStore::builder(), meddling_connection(&server).await.clustered());
    for place in places(&store, "b") {
        let Place { store, limit, .. } = &place;
        let both = [(limit, "a", 1), (limit, "b", 1)];
        place.spoil(&server, "nonsense");
        corrupt(store, &both, (Op::Peek, None), LEFT).await;
        corrupt(store, &both, (Op::Acquire, None), REMOVED).await;
        let healed = apply(store, &both, Op::Acquire, None).await.expect("healed");
        assert_eq!(healed.remaining(), 2);
    }
    let (limit, id) = (limit("jobs", "gcra 3/h"), ReservationId::new(7));
    let in_lua = ["a", "b"].map(|key| store.reservation_key(&limit, key, id));
    let in_cas = ["a", "b"].map(|key| store.in_mode::<Cas>().reservation_key(&limit, key, id));
    for ([a, b], (mode, store)) in [in_lua, in_cas].iter().zip(in_every_mode(&store)) {
        let both = [(&limit, "a", 1), (&limit, "b", 1)];
        let _ = apply(&store, &both, Op::Acquire, ID).await.expect("reserved");
        let reserved = dump(&server, a);
        tell(&server, &["SET", b, "nonsense"]);
        corrupt(&store, &both, (Op::Peek, ID), LEFT).await;
        assert_ne!(dump(&server, b), RespValue::Nil, "only read");
        // The other slot is not touched.
        corrupt(&store, &both, (Op::Settle, ID), REMOVED).await;
        assert_eq!(dump(&server, a), reserved, "{mode}");
        let _ = apply(&store, &both, Op::Settle, ID).await.expect("healed");
    }
}

/// A check that costs nothing finds it, in a batch with one that is charged.
#[tokio::test]
async fn a_corrupt_state_beside_a_charge_charges_nothing_and_is_removed() {
    let server = server();
    let (store, looked) = (plain(&server).await, limit("looked", "gcra 3/3650d"));
    for charged in ["gcra 3/3650d", "gcra 3/3650d count attempts"] {
        let charged = limit("charged", charged);
        for (n, garbage) in ["nonsense", "gcra", "gcra 1 0 1\n", "\n\n", "a\nb"].iter().enumerate()
        {
            let key = format!("{n} {}", charged.counts_attempts());
            tell(&server, &["HSET", &store.key(&looked, &key), looked.state_name(), garbage]);
            let both = [(&charged, &*key, 1), (&looked, &key, 0)];
            corrupt(&store, &both, (Op::Acquire, None), "looked").await;
            let verdict = apply(&store, &both, Op::Acquire, None).await.expect("healed");
            assert_eq!(verdict.decisions()[0].remaining, 2, "{garbage:?} of {charged:?}");
        }
    }
}

/// The oldest entry that counts, one in the middle that only a denial reads in search of room, and
/// one deep in a list that only a refund reads, with a total, a cost or a time that no limit
/// writes.
#[tokio::test]
async fn a_foreign_entry_of_a_log_is_reported_and_removed() {
    let server = server();
    let (store, log) = (plain(&server).await, limit("log", "sliding-log 3/h"));
    let now: u64 = tell(&server, &["TIME"]).as_array()[0].as_text().unwrap().parse().unwrap();
    let ago = |seconds: u64| format!("{}", (now - seconds) * 1_000_000);
    for (n, (score, member)) in [
        (ago(60), "1 9007199254740992"),
        (ago(60), "1 99999999999999999999999999"),
        (ago(60), "9007199254740992 1"),
        (ago(60), "nonsense"),
        (ago(60) + ".5", "1 1"),
        ("inf".into(), "1 1"),
        ("1e300".into(), "1 1"),
    ]
    .iter()
    .enumerate()
    {
        for cost in [1, 2] {
            let caller = format!("{n} {cost}");
            let key = store.key(&log, &caller);
            if cost == 2 {
                tell(&server, &["ZADD", &key, &ago(90), "1 1", &ago(30), "1 3"]);
            } else {
                tell(&server, &["ZADD", &key, &ago(30), "1 2"]);
            }
            tell(&server, &["ZADD", &key, score, member]);
            corrupt(&store, &[(&log, &caller, cost)], (Op::Acquire, None), &key).await;
            let healed = apply(&store, &[(&log, &*caller, cost)], Op::Acquire, None).await;
            assert_eq!(healed.expect("healed").remaining(), 3 - cost, "{caller}");
        }
    }
    let log = limit("log", "window-log 3/h");
    let key = store.key(&log, "a");
    tell(&server, &["RPUSH", &key, "nonsense", &format!("{now}000000 1 2 {now}000000 ")]);
    corrupt(&store, &[(&log, "a", 1)], (Op::Refund, None), &key).await;
    let healed = apply(&store, &[(&log, "a", 1)], Op::Refund, None).await.expect("healed");
    assert_eq!(healed.remaining(), 3);
}

#[tokio::test]
async fn an_impossible_count_is_reported_once_and_what_has_ended_goes() {
    let server = server();
    let store = plain(&server).await.in_mode::<Multi>();
    for algorithm in ["fixed-window 3/h", "first-request-window 3/h"] {
        let limit = limit("l", &format!("{algorithm} count attempts"));
        let key = store.key(&limit, algorithm).expect("native");
        let one = [(&limit, algorithm, 1)];
        let acquire = async || apply_at(&store, &one, Op::Acquire, None, at(7_200_000_000)).await;
        tell(&server, &["HSET", &key, "7200000000", "9223372036854775807"]);
        fails(acquire().await, ErrorKind::Corrupt, REMOVED);
        tell(&server, &["HSET", &key, "1", "3", "7200000000", "1"]);
        assert_eq!(acquire().await.expect("heals").remaining(), 1, "{algorithm}");
        assert_eq!(number(&server, &["HEXISTS", &key, "1"]), 0);
        assert!(number(&server, &["PTTL", &key]) > 0);
    }
}

const NOW_US: u64 = 1_795_218_392_123_456;

/// Algorithms whose state is a few numbers, and how many. Behind them stands until when the key is
/// kept.
fn of_numbers() -> Vec<(Limit<AnyAlgorithm>, usize)> {
    let mut all = Vec::new();
    for (name, numbers) in
        [("gcra", 3), ("fixed-window", 3), ("first-request-window", 3), ("sliding-counter", 3)]
    {
        for rate in ["3/s", "7/5m", "1000000000/s", "1/3650d", "4503599627/d"] {
            for burst in ["", " burst 1", " burst 1000", " burst 1099511627776"] {
                let Ok(algorithm) = format!("{name} {rate}{burst}").parse::<AnyAlgorithm>() else {
                    continue;
                };
                let limit = named("l", algorithm);
                let attempts = limit.clone().count_attempts().expect("a few numbers");
                all.extend([(limit, numbers), (attempts, numbers)]);
            }
        }
    }
    all
}

/// Small numbers, those around times, and those around the limits of a double.
fn numbers() -> impl Strategy<Value = u64> {
    let near = |centre: u64| (0..=4_u64).prop_map(move |n| (centre + n).saturating_sub(2));
    prop_oneof![
        0..5_u64,
        any::<u64>(),
        (0..64_u32).prop_map(|bits| 1 << bits).prop_flat_map(near),
        near(NOW_US),
        (NOW_US - 10_000_000)..(NOW_US + 10_000_000),
    ]
}

#[test]
fn script_and_step_agree_on_any_stored_numbers() {
    let (server, runtime) = (server(), Runtime::new().expect("a runtime"));
    let store = runtime.block_on(plain(&server));
    let aside = RefCell::new(server.client().expect("it is up"));
    let costs = prop_oneof![1..5_u64, numbers()];
    let stored = proptest::collection::vec(numbers(), 5);
    // How many states there were, and how many were decided by.
    let (tried, decided) = (Cell::new(0), Cell::new(0));
    let config =
        ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |((limit, count) in select(of_numbers()), stored in stored, cost in costs)| {
        // No limit writes a window without a charge: a script takes it for none.
        let is_window = ["fixed-window", "first-request-window"].contains(&limit.algorithm().name());
        prop_assume!(!is_window || stored[1] << 8 != 0);
        tried.set(tried.get() + 1);
        let key = store.key(&limit, "a\r\nb");
        let mut packed = format!("{} ", limit.algorithm().name()).into_bytes();
        for number in &stored[..=count] {
            packed.extend(&number.to_le_bytes()[..7]);
        }
        let field = limit.state_name().as_bytes();
        for words in [&[b"DEL", key.as_bytes()][..], &[b"HSET", key.as_bytes(), field, &packed]] {
            aside.borrow_mut().command(words).expect("it answers").ok().expect("done");
        }
        let (now, text) = (Timestamp::from_us(NOW_US).expect("a time"), &stored[..=count]);
        runtime.block_on(async {
            let state = store.state(&limit, "a\r\nb").await;
            let one = [(&limit, "a\r\nb", cost)];
            match apply_at(&store, &one, Op::Acquire, None, Now::At(now)).await {
                Ok(verdict) => {
                    decided.set(decided.get() + 1);
                    let state = state.expect("it was decided by it");
                    let step = limit.step(state.as_ref(), now, cost);
                    assert_eq!(*verdict.summary(), step.decision, "{text:?} of {limit:?}");
                    if let Write::Put { state: due, .. } = step.write {
                        let left = store.state(&limit, "a\r\nb").await.expect("reads");
                        assert_eq!(left, Some(due), "after {text:?} of {limit:?}");
                    }
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{text:?}: {error}"),
            }
        });
    });
    assert!(decided.get() >= tried.get() / 10, "{} of {}", decided.get(), tried.get());
}

/// What a key of a limit contains.
#[derive(Clone, Debug)]
enum Spoilt {
    /// Numbers, behind the name of an algorithm.
    Numbers(&'static str, Vec<u64>),
    /// A state of the limit of which some bytes have changed.
    Bytes(Vec<(usize, u8)>),
    /// A state from so many microseconds ahead.
    Ahead(u64),
}

/// Changes bytes of a text or a field.
const CHANGE: &str = "local is_hash = redis.call('TYPE', KEYS[1]).ok == 'hash' \
    local stored = is_hash and redis.call('HGET', KEYS[1], ARGV[1]) or not is_hash and redis.call('GET', KEYS[1]) \
    if not stored then return end \
    for place = 2, #ARGV, 2 do local at = ARGV[place] % #stored \
    stored = stored:sub(1, at) .. string.char(ARGV[place + 1]) .. stored:sub(at + 2) end \
    if is_hash then redis.call('HSET', KEYS[1], ARGV[1], stored) else redis.call('SET', KEYS[1], stored, 'KEEPTTL') end";

impl Place {
    /// The command that spoils the key. A state from ahead was charged at its time.
    fn spoiling(&self, spoilt: &Spoilt) -> Vec<String> {
        let Self { limit, key, .. } = self;
        match (self.stored, spoilt) {
            (_, Spoilt::Ahead(_)) => vec!["EXISTS".to_owned(), key.clone()],
            (Stored::Field | Stored::Text, Spoilt::Bytes(bytes)) => {
                let bytes = bytes.iter().flat_map(|(at, byte)| [at.to_string(), byte.to_string()]);
                let script = ["EVAL", CHANGE, "1", key, limit.state_name()].map(str::to_owned);
                script.into_iter().chain(bytes).collect()
            }
            (stored, Spoilt::Bytes(bytes)) => {
                let (at, byte) = bytes[0];
                let content = match stored {
                    Stored::List => format!("{at} {byte} {byte} {at} "),
                    Stored::Scores => format!("{byte} {byte}"),
                    _ => byte.to_string(),
                };
                self.writing(&at.to_string(), &content)
            }
            (stored, Spoilt::Numbers(name, numbers)) => {
                let numbers: Vec<_> = numbers.iter().map(u64::to_string).collect();
                let content = match stored {
                    Stored::Field | Stored::Text => format!("{name} {}", numbers.join(" ")),
                    Stored::List => numbers.join(" ") + " ",
                    Stored::Scores => numbers[1..].join(" "),
                    Stored::Counters => numbers[1].clone(),
                };
                self.writing(&numbers[0], &content)
            }
        }
    }
}

fn spoilt() -> impl Strategy<Value = Spoilt> {
    let several = proptest::collection::vec(numbers(), 2..8);
    let bytes = proptest::collection::vec((0..64_usize, any::<u8>()), 1..4);
    prop_oneof![
        (select(AnyAlgorithm::NAMES), several)
            .prop_map(|(name, numbers)| Spoilt::Numbers(name, numbers)),
        bytes.prop_map(Spoilt::Bytes),
        // Up to a century.
        (0..42_u32, 1..1_000_u64).prop_map(|(bits, n)| Spoilt::Ahead(n << bits)),
    ]
}

/// Corrupt, of another algorithm or from the future: whatever a key contains is reported once at
/// most, admits no more than the limit, and after a healing recovers no later than a full limit
/// does.
#[test]
fn whatever_a_key_contains_admits_no_more_than_the_limit_and_is_healed() {
    let (server, runtime) = (server(), Runtime::new().expect("a runtime"));
    let lua = runtime.block_on(plain(&server));
    let (places, aside) = (places(&lua, "a"), RefCell::new(server.client().expect("it is up")));
    // How many values were tried, how many were reported, and how many states healed.
    let seen = Cell::new([0; 3]);
    let tell =
        |words: &[&str]| aside.borrow_mut().command(words).expect("it answers").ok().expect("done");
    let config =
        ProptestConfig { cases: 1_500, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(place in 0..places.len(), spoilt in spoilt())| {
        let place = &places[place];
        let Place { store, limit, key, stored } = place;
        let limits = Limits::new([limit.clone()]).expect("one");
        tell(&["FLUSHALL"]);
        runtime.block_on(async {
            let charged_at = match spoilt {
                Spoilt::Numbers(..) => None,
                Spoilt::Bytes(_) => Some(Now::Store),
                Spoilt::Ahead(us) => {
                    Some(Now::At(Timestamp::saturating_from_us(now_us().saturating_add(us))))
                }
            };
            if let Some(time) = charged_at {
                let charged = apply_at(store, &[(limit, "a", 3)], Op::Acquire, None, time).await;
                let _ = charged.expect("empty");
            }
            let words = place.spoiling(&spoilt);
            tell(&words.iter().map(String::as_str).collect::<Vec<_>>());
            let (mut admitted, mut reported) = (0, 0);
            for _ in 0..6 {
                match apply(store, &[(limit, "a", 1)], Op::Acquire, None).await {
                    Ok(verdict) => admitted += u64::from(verdict.allowed()),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Corrupt, "{words:?}: {error}");
                        reported += 1;
                    }
                }
            }
            assert!(reported <= 1 && admitted <= 3, "{words:?}: {reported}, {admitted}");
            let options = HealOptions::default();
            let healed = match stored {
                Stored::Text => lua.in_mode::<Cas>().heal(&limits, options).await,
                _ if limit.counts_attempts() => {
                    lua.in_mode::<Multi>().heal(&limits, options).await
                }
                _ => lua.heal(&limits, options).await,
            };
            let healed = healed.expect("it answers").states.len();
            let [tried, all_reported, all_healed] = seen.get();
            seen.set([tried + 1, all_reported + reported, all_healed + healed]);
            let verdict = apply(store, &[(limit, "a", 0)], Op::Peek, None).await.expect("healed");
            let now = Timestamp::saturating_from_us(now_us());
            let most_us = limit.algorithm().filled(now).decision.reset_after_us + 60_000_000;
            let reset_us = verdict.summary().reset_after_us;
            assert!(reset_us <= most_us, "{key}, {words:?}: {reset_us} of {most_us}, {healed} healed");
        });
    });
    let [tried, reported, healed] = seen.get();
    assert!(reported.min(healed) >= tried / 30, "{seen:?}");
}
