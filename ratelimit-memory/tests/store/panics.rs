//! A panic in foreign code charges nothing, leaks no capacity, and leaves every other key as it
//! was, whichever method of an algorithm or clock panics, at whichever of its calls.

mod trap;

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    Decision, Limit, Limits, ManualClock, RateLimiter, ReservationId, Stack, SyncStore, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use trap::{PARTS, Part, Trapped, TrappedClock, run_trapped, trapped_clock};

use crate::common::{BEGIN, algorithm, ask, limit};

/// The keys that have states from the start; all other keys are new.
const HELD: [&str; 5] = ["held 0", "held 1", "held 2", "held 3", "held 4"];
const NEW: [&str; 5] = ["new 0", "new 1", "new 2", "new 3", "new 4"];
const ID: ReservationId = ReservationId::new(7);

type Store<A> = MemoryStore<Trapped<A>, TrappedClock>;

/// A call to a store.
struct Call<'c> {
    op: Op,
    keys: Vec<&'c str>,
    cost: u64,
    id: Option<ReservationId>,
    metadata: &'c [u8],
    now: Now,
}

impl<'c> Call<'c> {
    fn new(op: Op, keys: impl IntoIterator<Item = &'c str>) -> Self {
        let keys = keys.into_iter().collect();
        Self { op, keys, cost: 1, id: None, metadata: &[], now: Now::Store }
    }

    fn make<A: InMemory>(
        &self,
        store: &Store<A>,
        limit: &Limit<Trapped<A>>,
    ) -> Result<Vec<Decision>, MemoryError> {
        let check = |key: &&'c str| Check { limit, key, cost: self.cost };
        let checks: Vec<_> = self.keys.iter().map(check).collect();
        let mut batch = Batch::new(&checks).expect("distinct").op(self.op).now(self.now);
        if let Some(id) = self.id {
            batch = batch.id(id);
        }
        store.apply_now(&batch.metadata(self.metadata)).map(|verdict| verdict.decisions().to_vec())
    }
}

/// All calls that are tried: of one key and of several, existing and new, with an id and without.
fn calls() -> Vec<Call<'static>> {
    let sets = [
        vec![HELD[0]],
        vec![NEW[0]],
        HELD[..2].to_vec(),
        HELD[..3].to_vec(),
        vec![HELD[0], NEW[0], NEW[1]],
        NEW[..2].to_vec(),
        [HELD, NEW].concat(),
    ];
    let mut calls = Vec::new();
    for op in [Op::Acquire, Op::Peek, Op::Force, Op::Refund, Op::Reset] {
        for keys in &sets {
            let (call, metadata) = (|| Call::new(op, keys.iter().copied()), &b"who"[..]);
            calls.extend([call(), Call { cost: 99, ..call() }, Call { metadata, ..call() }]);
            calls.push(Call { now: Now::At(BEGIN), ..call() });
            if matches!(op, Op::Acquire | Op::Force | Op::Refund) {
                let id = Some(ReservationId::new(8));
                calls.extend([Call { id, ..call() }, Call { id, metadata, ..call() }]);
            }
        }
    }
    for op in [Op::Settle, Op::Renew] {
        for keys in [&HELD[..1], &HELD[..2], &HELD[..]] {
            let call = Call::new(op, keys.iter().copied());
            let cost = u64::from(op != Op::Settle);
            calls.push(Call { id: Some(ID), cost, ..call });
        }
    }
    calls
}

/// How much room a store has.
#[derive(Clone, Copy, Debug)]
enum Room {
    Plenty,
    /// No room for another key.
    NoKeys,
    /// No room for another entry, except for shared states.
    NoEntries,
}

/// Creates a store with so much room, in which all of [`HELD`] have a state, and a reservation
/// under [`ID`] if possible.
fn store<A: InMemory + Clone>(limit: &Limit<A>, room: Room) -> (Store<A>, Limit<Trapped<A>>) {
    let trapped = Limit::new("l", Trapped(limit.algorithm().clone())).expect("a name");
    let attempts = limit.counts_attempts();
    let trapped = if attempts { trapped.count_attempts().expect("it can") } else { trapped };
    let can_reserve = limit.reservation_us().is_some();
    let builder = MemoryStore::builder().shards(2).clock(trapped_clock());
    let builder = match room {
        Room::Plenty => builder,
        Room::NoKeys => builder.capacity(HELD.len()),
        // One more entry is for shared states.
        Room::NoEntries => builder.entries(store(limit, Room::Plenty).0.entry_count() + 1),
    };
    let store: Store<A> = builder.build();
    for key in HELD {
        let id = can_reserve.then_some(ID);
        let charged = Call { id, ..Call::new(Op::Acquire, [key]) }.make(&store, &trapped);
        assert!(charged.expect("room")[0].allowed);
    }
    (store, trapped)
}

/// The observable state of a store.
#[derive(Debug, PartialEq)]
struct Seen<S> {
    states: Vec<Option<S>>,
    len: usize,
    reservations: usize,
    entries: usize,
    /// The decision on the next new key.
    next: Decision,
}

fn observe<A: InMemory>(store: &Store<A>, limit: &Limit<Trapped<A>>) -> Seen<A::State> {
    let (len, entries) = (store.len(), store.entry_count());
    let states = HELD.iter().chain(&NEW).map(|key| store.state(limit, key)).collect();
    let check = Check { limit, key: "next", cost: 1 };
    let next = store.apply_now(&Batch::one(&check).op(Op::Peek)).expect("decides");
    let reservations = store.reservations();
    Seen { states, len, reservations, entries, next: *next.summary() }
}

/// Whether the algorithm may write the state in place, and is asked for its entries afterwards. A
/// panic of that question comes too late to undo the key's own charge.
fn is_in_place<A: InMemory>(call: &Call<'_>, algorithm: &A) -> bool {
    let is_plain = call.op == Op::Acquire && call.id.is_none() && call.metadata.is_empty();
    is_plain && call.keys == HELD[..1] && !algorithm.is_compact()
}

/// Repeats a call with a part trapped at its first call, its second and so on, until the trap is
/// not sprung. Returns how often it was sprung.
fn sprung_at_each<A>(of: &Limit<A>, room: Room, call: &Call<'_>, part: Part) -> usize
where
    A: InMemory<State: Debug + PartialEq> + Clone,
{
    let about = format!("{room:?}, {part:?}: {} {:?} at {}", call.op, call.keys, call.cost);
    let about = format!("{about}, {:?}, {:?}, {:?}", call.id, call.metadata, call.now);
    let (store, limit) = store(of, room);
    let written_first = part == Part::Entries && is_in_place(call, of.algorithm());
    let before = observe(&store, &limit);
    let mut sprung = 0;
    let decided = loop {
        let overflowed = store.overflowed();
        if let Some(decided) = run_trapped(part, sprung, || call.make(&store, &limit)) {
            break decided;
        }
        assert_eq!(store.overflowed(), overflowed, "{about}");
        let mut now = observe(&store, &limit);
        if written_first && sprung > 0 {
            now.states[0].clone_from(&before.states[0]);
            now.entries = before.entries;
        }
        assert_eq!(now, before, "{about}, at call {sprung}");
        sprung += 1;
    };
    if !written_first {
        let (twin, limit) = self::store(of, room);
        assert_eq!(decided, call.make(&twin, &limit), "{about}");
        assert_eq!(observe(&store, &limit), observe(&twin, &limit), "{about}");
    }
    for key in HELD.iter().chain(&NEW) {
        Call::new(Op::Reset, [*key]).make(&store, &limit).expect("decides");
    }
    let is_shared = store.overflowed() > 0;
    assert!(is_shared || store.entry_count() == 0, "{about}: {}", store.entry_count());
    sprung
}

/// Makes every call with every part trapped at each of its calls in turn.
fn nothing_is_left_behind<A>(limit: &Limit<A>)
where
    A: InMemory<State: Debug + PartialEq> + Clone,
{
    for part in PARTS {
        let mut sprung = 0;
        for room in [Room::Plenty, Room::NoKeys, Room::NoEntries] {
            for call in calls() {
                let is_possible = call.id.is_none() || limit.reservation_us().is_some();
                if is_possible {
                    sprung += sprung_at_each(limit, room, &call, part);
                }
            }
        }
        assert!(sprung > 100, "{part:?}: {sprung}");
    }
}

#[test]
fn a_panic_changes_nothing_whatever_the_algorithm() {
    let stacked = ["gcra 5/h", "sliding-log 5/h", "fixed-window 5/h"].map(algorithm);
    let stack = Stack::new(stacked).and_then(|stack| Limit::new("l", stack));
    let stack = &stack.expect("a stack");
    std::thread::scope(|scope| {
        scope.spawn(|| nothing_is_left_behind(stack));
        for words in [
            "gcra 5/h",
            "fixed-window 5/h",
            "sliding-log 5/h",
            "window-log 5/h",
            "concurrency 5/h",
            "sliding-log 5/h count attempts",
        ] {
            scope.spawn(move || nothing_is_left_behind(&limit("l", words)));
        }
    });
}

/// A closure that panics ends a call for several keys: the charges of the keys that it was called
/// for stand, and no other key is charged.
#[test]
fn a_panic_of_the_closure_leaves_later_keys_uncharged() {
    let names: Vec<String> = (0..13).map(|n| n.to_string()).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    for words in ["gcra 5/h", "sliding-log 5/h"] {
        for (held, end) in (0..2 * keys.len()).map(|nth| (nth % 2 == 0, nth / 2)) {
            let limits = Limits::new([limit("l", words)]).expect("a limit");
            let store = MemoryStore::builder().clock(ManualClock::new(BEGIN)).build();
            let limiter = RateLimiter::new(limits, store);
            let (limit, store) = (&limiter.limits().as_slice()[0], limiter.store());
            if held {
                let room = |_, decided: Result<Verdict, MemoryError>| _ = decided.expect("room");
                MemoryStore::check_each_now(&limiter, &keys, room);
            }
            let call = || {
                MemoryStore::check_each_now(&limiter, &keys, |position, _| {
                    if position == end {
                        std::panic::resume_unwind(Box::new(()));
                    }
                });
            };
            assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
            for (position, key) in keys.iter().enumerate() {
                let left = ask(store, (limit, key), Op::Peek, 1).remaining();
                let charged = u64::from(held) + u64::from(position <= end);
                assert_eq!(left, 4 - charged, "{held} {end} {position}");
            }
            assert_eq!(store.len(), if held { keys.len() } else { end + 1 });
        }
    }
}
