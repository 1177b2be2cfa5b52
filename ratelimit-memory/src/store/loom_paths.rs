//! Loom models of the store's paths to a state in the buckets, by the store's own functions:
//! decisions without a lock, of one key and of a batch, a relocation, and a split. Mutants of these
//! functions fail here.
//!
//! The other thread uses snapshots from before the threads begin: loom compares an access only with
//! the last one before it, and a lookup of that thread would hide the store's access.

use loom::sync::Arc;
use ratelimit_core::for_memory::Compact;
use ratelimit_core::{Gcra, Rate};

use super::loom_store::{LoomStore as Loomed, model, models, race, small_limit, small_store};
use super::*;
use crate::cuckoo::{Address, CuckooTable, Insertion, Packed, SlotEntry};
use crate::hash::KeyHasher;

const NOW: Timestamp = Timestamp::saturating_from_us(1_000_000);
const TOKEN_US: u64 = 1_000_000_000;

/// A token per thousand seconds, with this burst.
fn limit(burst: u64) -> Limit<Gcra> {
    let gcra = Gcra::new(Rate::per_us(1, TOKEN_US).expect("a rate"), burst).expect("a limit");
    Limit::new("l", gcra).expect("a name")
}

/// A store of one segment of four buckets of two entries each, which can split once.
fn store() -> Arc<Loomed> {
    small_store(8)
}

fn table(store: &Loomed) -> &CuckooTable {
    store.table.as_ref().expect("small states")
}

fn address(key: &str) -> Address {
    Address::new(KeyHasher::random().hash(key).under(limit(1).fingerprint()))
}

/// The first keys whose addresses satisfy `is_wanted`. The hash of a model's store has a fixed key.
fn keys<const N: usize>(is_wanted: impl Fn(Address) -> bool) -> [String; N] {
    let mut found = (0..).map(|n| n.to_string()).filter(|key| is_wanted(address(key)));
    std::array::from_fn(|_| found.next().expect("there are many"))
}

/// Whether these are a key's first bucket and its alternate.
fn lies_in(table: [usize; 2]) -> impl Fn(Address) -> bool {
    move |address| [address.first(), address.second()] == table
}

fn pack(store: &Loomed, span_us: u64) -> Packed {
    table(store).pack(Compact { at: NOW, span_us, extra: 0 }).expect("fits")
}

/// Inserts a state of a new key.
fn put(store: &Loomed, key: &str, span_us: u64) {
    let mut pair = table(store).lock(address(key));
    assert_eq!(pair.insert(pack(store, span_us), None, || true), Insertion::Done);
}

fn span_us(store: &Loomed, key: &str) -> Option<u64> {
    let state = table(store).lock(address(key)).state()?;
    Some(table(store).unpack(state).span_us)
}

fn ask(store: &Loomed, burst: u64, key: &str, op: Op) -> (bool, u64) {
    let limit = limit(burst);
    let verdict = match op {
        // The path of nearly all requests.
        Op::Acquire => store.acquire_now(&limit, key, 1),
        _ => store.apply_now(&Batch::one(&Check { limit: &limit, key, cost: 1 }).op(op)),
    };
    let verdict = verdict.expect("decides");
    (verdict.allowed(), verdict.remaining())
}

/// Replaces a key's state, unless the entry has changed since this was made.
fn writer(store: &Loomed, key: &str, span_us: u64) -> impl Fn(&Loomed) + 'static {
    let address = address(key);
    let parts = table(store).route(address).find().expect("there").parts();
    move |store| {
        let seen = table(store).route(address).buckets()[0].optimistic_read(parts);
        if let Some(mut entry) = seen.try_lock() {
            entry.set(pack(store, span_us));
        }
    }
}

/// Spans of two states: one has a bit in the entry's word and none in the rest, the other is a
/// microsecond shorter and has all its bits in the rest. A mixture of both spans is twice as long,
/// or empty.
const SPANS_US: [u64; 2] = [1 << 32, (1 << 32) - 1];
/// The burst by which one token is left in either state, and another number in a mixture.
const BURST: u64 = 6;

/// A decision on a key while another thread writes is true of one of both states.
#[test]
fn loom_a_decision_without_a_lock_sees_no_mixture_of_two_states() {
    let [one, other] = SPANS_US;
    let spans = [[one, other], [other, one]];
    models([Op::Acquire, Op::Peek].map(|op| spans.map(|spans| (op, spans))).concat(), |case| {
        let ((op, [old, new]), store, key) = (case, store(), "a");
        put(&store, key, old);
        let writer = writer(&store, key, new);
        let (asked, ()) = race(&store, |store| ask(store, BURST, key, op), writer);
        assert_eq!(asked, (true, 0), "a mixture");
    });
}

/// Another key takes the slot of a key that is being charged, with the very same state: the charge
/// is not written to the other key.
#[test]
fn loom_a_charge_is_not_written_to_a_key_that_took_its_slot() {
    // Keys whose tags have the same upper part, which lies in the entry's word.
    let (first, some) = (address("a"), Packed::of_span(1, 1).expect("fits"));
    let is_like = |other: Address| {
        let [one, another] = [first, other].map(|address| SlotEntry::new(address.tag(0), some));
        one.has_word_of(another) && other.first() == first.first() && other != first
    };
    let [other] = keys(is_like);
    model(move || {
        let store = store();
        put(&store, "a", TOKEN_US);
        let (came, state) = (address(&other), pack(&store, TOKEN_US));
        // Only the fast path: the paths that follow it would multiply the interleavings by a
        // hundred.
        let charge = |store: &Loomed| store.charge_fast(&limit(3), store.hash(&limit(3), "a"), 1);
        let comes = move |store: &Loomed| table(store).lock(came).set((0, 0), state);
        let (charged, ()) = race(&store, charge, comes);
        assert!(charged.is_none_or(|decision| decision.allowed));
        assert_eq!(span_us(&store, &other), Some(TOKEN_US), "another key was charged");
    });
}

/// A key is charged while an entry is relocated, to make room for a key whose buckets are full:
/// `charged`, of the key whose entry moves and of this one, has the span of so many tokens
/// afterwards, and the other key has that of one.
fn is_charged_beside_a_relocation(charged: Option<String>, tokens: u64, len: usize) {
    // Buckets 0 and 1 are full, and one of the keys can be relocated to bucket 3.
    let [moves] = keys(lies_in([0, 3]));
    let [one, two, three, comes] = keys(lies_in([0, 1]));
    model(move || {
        let (store, charged) = (store(), charged.as_ref().unwrap_or(&moves));
        [&moves, &one, &two, &three].into_iter().for_each(|key| put(&store, key, TOKEN_US));
        let comes = address(&comes);
        let makes_room = move |store: &Loomed| table(store).make_room(comes);
        let (asked, made_room) =
            race(&store, |store| ask(store, 2, charged, Op::Acquire), makes_room);
        assert!(asked.0 && made_room);
        assert_eq!(span_us(&store, charged), Some(tokens * TOKEN_US), "a charge is lost");
        assert!(span_us(&store, &moves).is_some(), "an entry is lost");
        assert_eq!(table(&store).len(), len);
    });
}

#[test]
fn loom_a_key_is_charged_while_its_entry_is_relocated() {
    is_charged_beside_a_relocation(None, 2, 4);
}

#[test]
fn loom_a_key_is_inserted_into_the_bucket_that_an_entry_is_relocated_to() {
    let [inserted] = keys(lies_in([3, 2]));
    is_charged_beside_a_relocation(Some(inserted), 1, 5);
}

/// A batch of two new keys while their segment splits: each is charged once, and found there.
#[test]
fn loom_a_batch_of_new_keys_beside_a_split_is_charged_once_and_found() {
    let keys: [String; 2] =
        keys(|address| address.directory_index(u64::BITS - 1) == 1 && lies_in([0, 1])(address));
    model(move || {
        let store = store();
        let (first, limit) = (address(&keys[0]), limit(1));
        let checks = keys.each_ref().map(|key| Check { limit: &limit, key, cost: 1 });
        let batch = Batch::new(&checks).expect("distinct");
        let splits = move |store: &Loomed| table(store).split(first);
        let (decided, split) = race(&store, |store| store.apply_now(&batch), splits);
        assert!(decided.expect("decides").allowed() && split);
        let spans = keys.each_ref().map(|key| span_us(&store, key));
        assert_eq!(spans, [Some(TOKEN_US); 2], "lost in a split");
        assert_eq!((table(&store).len(), store.len()), (2, 2));
    });
}

/// The remaining capacity of each key that a batch over both reports.
fn remaining(store: &Loomed, op: Op, costs: [u64; 2]) -> [u64; 2] {
    let (limit, [here, there]) = (small_limit(3), costs);
    let checks = [("a", here), ("b", there)].map(|(key, cost)| Check { limit: &limit, key, cost });
    let batch = Batch::new(&checks).expect("distinct").op(op);
    let verdict = store.apply_now(&batch).expect("decides");
    [0, 1].map(|position| verdict.decisions()[position].remaining)
}

/// Another thread charges two keys once more beside this batch. The batch reports both as they were
/// at one moment: `before` that charge, or after it.
fn is_of_one_moment(op: Op, costs: [u64; 2], before: [u64; 2]) {
    model(move || {
        let store = store();
        remaining(&store, Op::Acquire, [1, 1]);
        let addresses = ["a", "b"].map(address);
        let seen = addresses.map(|at| table(&store).route(at).find().expect("there").parts());
        let charges = move |store: &Loomed| {
            // Two tokens of a second each.
            let twice = pack(store, 2_000_000);
            let bucket = |position: usize| table(store).route(addresses[position]).buckets()[0];
            let seen = [0, 1].map(|position| bucket(position).optimistic_read(seen[position]));
            // Unless the batch is charging one of them, or has charged it.
            if let [Some(mut here), Some(mut there)] = seen.each_ref().map(|seen| seen.try_lock()) {
                here.set(twice);
                there.set(twice);
            }
        };
        let (left, ()) = race(&store, |store| remaining(store, op, costs), charges);
        let after = before.map(|left| left - 1);
        assert!(left == before || left == after, "{left:?}");
    });
}

#[test]
fn loom_a_peek_at_two_keys_sees_both_of_two_charges_or_neither() {
    is_of_one_moment(Op::Peek, [1, 1], [1, 1]);
}

#[test]
fn loom_an_uncharged_key_is_read_at_the_moment_of_the_charge_of_the_other() {
    is_of_one_moment(Op::Acquire, [0, 1], [2, 1]);
}

/// A charge by what stood before a change of the record comes before the change: what looks after
/// it sees the charge.
#[test]
fn loom_a_charge_is_decided_by_the_record_that_stands_once_its_state_is_locked() {
    models([(None, Some(7)), (Some(7), None)], |(before, after)| {
        let (store, key) = (store(), "a");
        put(&store, key, TOKEN_US);
        let limit = || limit(3).overridable();
        let record = |burst: u64| Record::numbers(*self::limit(burst).algorithm()).forever();
        let change = move |store: &Loomed, key: &str, old: Option<u64>, new: Option<u64>| {
            let (old, new) = (old.map(record), new.map(record));
            let at = (store.hash(&limit(), key), key);
            let done = store.records.exchange(&limit(), at, NOW, old.as_ref(), new.as_ref());
            assert!(matches!(done, Ok(true)));
        };
        // The filter is made with the first record, and this one lies at another place of it.
        let place = |key: &&str| store.hash(&limit(), key) % 2;
        let other = ["b", "c", "d", "e"].into_iter().find(|other| place(other) != place(&key));
        change(&store, other.expect("one of them"), None, Some(9));
        if before.is_some() {
            change(&store, key, None, before);
        }
        let changes = move |store: &Loomed| {
            change(store, key, before, after);
            table(store).lock(address("a")).state()
        };
        let charges = |store: &Loomed| {
            let verdict = store.acquire_now(&limit(), key, 1).expect("decides");
            (verdict.limit(), verdict.remaining())
        };
        let (by, left) = race(&store, charges, changes);
        let numbers = |numbers: Option<u64>| numbers.unwrap_or(3);
        assert_eq!(span_us(&store, key), Some(2 * TOKEN_US), "a charge is lost");
        if by.0 == numbers(before) {
            let left = left.expect("there");
            assert_eq!(
                table(&store).unpack(left).span_us,
                2 * TOKEN_US,
                "it comes after the change"
            );
        }
        assert_eq!(by.1 + 2, by.0);
    });
}

/// A batch by the policy alone is of a moment at which none of its callers had a record.
#[test]
fn loom_a_batch_without_records_is_of_a_moment_without_them() {
    model(move || {
        let (store, limit) = (store(), limit(3).overridable());
        let at = |key: &'static str| (store.hash(&limit, key), key);
        let is_elsewhere = |key: &&'static str| at(key).0 % 2 != at("a").0 % 2;
        let other = ["b", "c", "d", "e"].into_iter().find(is_elsewhere).expect("one of them");
        let places = [at("a"), at(other)];
        let record = Record::numbers(*self::limit(7).algorithm()).forever();
        let change = |store: &Loomed, at: (u64, &str), old: Option<&_>, new: Option<&_>| {
            let limit = self::limit(3).overridable();
            assert!(matches!(store.records.exchange(&limit, at, NOW, old, new), Ok(true)));
        };
        places.iter().for_each(|(_, key)| put(&store, key, TOKEN_US));
        change(&store, places[1], None, Some(&record));
        let changes = move |store: &Loomed| {
            change(store, places[0], None, Some(&record));
            change(store, places[1], Some(&record), None);
        };
        let checks = places.map(|(_, key)| Check { limit: &limit, key, cost: 1 });
        let batch = Batch::new(&checks).expect("distinct");
        let hashes = places.map(|(hash, _)| hash);
        let (decided, ()) =
            race(&store, |store| store.decide_optimistically(&batch, &hashes), changes);
        assert!(decided.is_none(), "one of them had a record all the time");
    });
}

/// A batch by a record comes before a change of it: what looks after that sees the charge.
#[test]
fn loom_a_batch_is_decided_by_the_records_that_stand_when_it_is_charged() {
    models([Some(9), None], |after| {
        let (store, limit) = (store(), limit(3).overridable());
        let record = |burst: u64| Record::numbers(*self::limit(burst).algorithm()).forever();
        let change = move |store: &Loomed, old: Option<u64>, new: Option<u64>| {
            let limit = self::limit(3).overridable();
            let (old, new) = (old.map(record), new.map(record));
            let at = (store.hash(&limit, "a"), "a");
            let done = store.records.exchange(&limit, at, NOW, old.as_ref(), new.as_ref());
            assert!(matches!(done, Ok(true)));
        };
        ["a", "b"].into_iter().for_each(|key| put(&store, key, TOKEN_US));
        change(&store, None, Some(7));
        let changes = move |store: &Loomed| {
            change(store, Some(7), after);
            span_us(store, "a")
        };
        let checks = ["a", "b"].map(|key| Check { limit: &limit, key, cost: 1 });
        let batch = Batch::new(&checks).expect("distinct");
        let hashes = ["a", "b"].map(|key| store.hash(&limit, key));
        let (decided, left) = race(&store, |store| store.decide_known(&batch, &hashes), changes);
        if let Some(verdict) = decided
            && verdict.decisions()[0].limit == 7
        {
            assert_eq!(left, Some(2 * TOKEN_US), "it comes after the change");
        }
    });
}
