//! [`Journal`]: what was admitted locally and is to be charged to the store when it is back.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use derive_where::derive_where;
use ratelimit_core::store::Now;
use ratelimit_core::{Algorithm, Limit};

use crate::bounded::WideKeyHasher;
use crate::lock;

/// How many bytes the keys may have on average. They are kept whole, because a store charges a key
/// and not its hash.
const KEY_BYTES: usize = 128;
/// At how many others a new key looks, so that those whose charges count no more go faster than new
/// ones come.
const LOOKS: usize = 2;

/// One key's charges under one limit.
#[derive(Debug)]
pub(super) struct PendingCharges<A> {
    /// The limit as the store knows it.
    pub(super) limit: Arc<Limit<A>>,
    pub(super) key: Arc<str>,
    pub(super) cost: u64,
    /// The time of the last charge, if it was given.
    pub(super) now: Now,
}

/// Charges by state name and key, of at most so many keys and bytes. What finds no place is
/// forgotten, and counted.
#[derive(Debug)]
pub(super) struct Journal<A> {
    most: usize,
    hasher: WideKeyHasher,
    entries: Mutex<Entries<A>>,
    /// How many keys there are.
    len: AtomicUsize,
    forgotten: AtomicU64,
}

/// Grows with each key that comes, so that a pass over the keys ends while others come.
pub(super) type Place = u64;

#[derive(Debug)]
#[derive_where(Default)]
struct Entries<A> {
    /// By the place of the key.
    by_place: BTreeMap<Place, JournalEntry<A>>,
    /// By the hash of limit and key.
    places: HashMap<u128, Place>,
    /// By state name the limit that was charged last, which keys of the same numbers share, and how
    /// many keys it has at any.
    limits: HashMap<Box<str>, (Arc<Limit<A>>, usize)>,
    next: Place,
    /// After which place the next look begins.
    looked: Place,
    /// Of all keys together.
    bytes: usize,
}

#[derive(Debug)]
struct JournalEntry<A> {
    /// At the numbers of the key's last charge: a request may have its own, and a policy may be
    /// replaced during an outage.
    limit: Arc<Limit<A>>,
    key: Arc<str>,
    hash: u128,
    cost: u64,
    now: Now,
}

impl<A: Algorithm> Entries<A> {
    fn at(&mut self, hash: u128) -> Option<&mut JournalEntry<A>> {
        self.by_place.get_mut(self.places.get(&hash)?)
    }

    fn insert(&mut self, place: Place, entry: JournalEntry<A>) {
        self.bytes += entry.key.len();
        self.places.insert(entry.hash, place);
        self.by_place.insert(place, entry);
    }

    /// A limit goes with its last key.
    fn remove(&mut self, place: Place) -> Option<PendingCharges<A>> {
        let JournalEntry { limit, key, hash, cost, now } = self.by_place.remove(&place)?;
        self.places.remove(&hash);
        self.bytes -= key.len();
        if let Some((_, keys)) = self.limits.get_mut(limit.state_name()) {
            *keys -= 1;
            if *keys == 0 {
                self.limits.remove(limit.state_name());
            }
        }
        Some(PendingCharges { limit, key, cost, now })
    }

    /// The key that is looked at next, in turn.
    fn look(&mut self) -> Option<Place> {
        let after = self.looked.saturating_add(1);
        let next = self.by_place.range(after..).next().or_else(|| self.by_place.first_key_value());
        self.looked = *next?.0;
        Some(self.looked)
    }
}

impl<A: Algorithm + Clone + PartialEq> Journal<A> {
    pub(super) fn new(most: usize) -> Self {
        let (hasher, entries) = (WideKeyHasher::default(), Mutex::default());
        Self { most, hasher, entries, len: AtomicUsize::new(0), forgotten: AtomicU64::new(0) }
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::SeqCst)
    }

    /// How many keys' charges were forgotten, because there was no place or the store could not
    /// take them.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    pub(super) fn forget(&self) {
        self.forgotten.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes a charge. A new key drops others of which `counts` says that their charges do not
    /// count any more.
    pub(super) fn add(
        &self,
        limit: &Limit<A>,
        key: &str,
        (cost, now): (u64, Now),
        counts: impl Fn(&Limit<A>, &str, Now) -> bool,
    ) {
        let mut entries = lock(&self.entries);
        let noted = match entries.limits.get_mut(limit.state_name()) {
            Some((last, _)) if **last == *limit => Arc::clone(last),
            Some((last, _)) => {
                *last = Arc::new(limit.clone());
                Arc::clone(last)
            }
            None => Arc::new(limit.clone()),
        };
        let is_known = entries.places.contains_key(&self.hash(limit.state_name(), key));
        for _ in 0..if is_known { 0 } else { LOOKS } {
            let Some(place) = entries.look() else { break };
            let JournalEntry { limit, key, now, .. } = &entries.by_place[&place];
            if !counts(limit, key, *now) {
                entries.remove(place);
            }
        }
        let place = entries.next;
        entries.next += 1;
        let pending = PendingCharges { limit: noted, key: key.into(), cost, now };
        self.note(&mut entries, place, pending, true);
    }

    /// Puts back what the store did not take. What was noted meanwhile is newer.
    pub(super) fn put_back(&self, place: Place, pending: PendingCharges<A>) {
        self.note(&mut lock(&self.entries), place, pending, false);
    }

    fn hash(&self, state_name: &str, key: &str) -> u128 {
        self.hasher.hash((state_name, key))
    }

    fn note(
        &self,
        entries: &mut Entries<A>,
        place: Place,
        pending: PendingCharges<A>,
        is_newest: bool,
    ) {
        let PendingCharges { limit, key, cost, now } = pending;
        let hash = self.hash(limit.state_name(), &key);
        let bytes = entries.bytes.saturating_add(key.len());
        let has_room =
            entries.by_place.len() < self.most && bytes <= self.most.saturating_mul(KEY_BYTES);
        if cost == 0 {
        } else if let Some(known) = entries.at(hash) {
            known.cost = known.cost.saturating_add(cost);
            if is_newest {
                (known.limit, known.now) = (limit, now);
            }
        } else if has_room {
            let of_state = entries.limits.entry(limit.state_name().into());
            let (_, keys) = of_state.or_insert_with(|| (Arc::clone(&limit), 0));
            *keys += 1;
            entries.insert(place, JournalEntry { limit, key, hash, cost, now });
        } else {
            self.forget();
        }
        self.len.store(entries.by_place.len(), Ordering::SeqCst);
    }

    /// Takes off what was given back.
    pub(super) fn take_off(&self, limit: &Limit<A>, key: &str, cost: u64) {
        let mut entries = lock(&self.entries);
        let hash = self.hash(limit.state_name(), key);
        let Some(known) = entries.at(hash) else { return };
        known.cost = known.cost.saturating_sub(cost);
        if known.cost == 0
            && let Some(place) = entries.places.get(&hash).copied()
        {
            entries.remove(place);
        }
        self.len.store(entries.by_place.len(), Ordering::SeqCst);
    }

    /// The place of the next key that comes.
    pub(super) fn end(&self) -> Place {
        lock(&self.entries).next
    }

    /// Removes the first key's charges, of any limit, between these places.
    pub(super) fn pop(&self, places: std::ops::Range<Place>) -> Option<(Place, PendingCharges<A>)> {
        let mut entries = lock(&self.entries);
        let place = *entries.by_place.range(places).next()?.0;
        let pending = entries.remove(place);
        self.len.store(entries.by_place.len(), Ordering::SeqCst);
        Some(place).zip(pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::{AnyAlgorithm, Timestamp};

    fn limit(words: &str) -> Limit<AnyAlgorithm> {
        Limit::new("burst", words.parse().expect(words)).expect("a name")
    }

    fn add(
        journal: &Journal<AnyAlgorithm>,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
        cost: u64,
        now: Now,
    ) {
        journal.add(limit, key, (cost, now), |_, _, _| true);
    }

    fn pop(journal: &Journal<AnyAlgorithm>) -> Option<(Place, PendingCharges<AnyAlgorithm>)> {
        journal.pop(0..journal.end())
    }

    fn at(us: u64) -> Now {
        Now::At(Timestamp::saturating_from_us(us))
    }

    #[test]
    fn charges_have_the_numbers_of_the_last_one_of_their_key() {
        let (old, new) = (limit("gcra 60/m burst 60"), limit("gcra 60/m burst 30"));
        let journal = Journal::new(9);
        for (limit, key) in [(&old, "alice"), (&old, "bob"), (&new, "bob"), (&old, "carol")] {
            add(&journal, limit, key, 3, Now::Store);
        }
        for (key, limit, cost) in [("alice", &old, 3), ("bob", &new, 6), ("carol", &old, 3)] {
            let (_, pending) = pop(&journal).expect("a charge");
            assert_eq!((&*pending.key, &*pending.limit, pending.cost), (key, limit, cost));
        }
        assert!(lock(&journal.entries).limits.is_empty());
    }

    #[test]
    fn what_is_put_back_is_older_than_what_was_noted_meanwhile() {
        let (old, new) = (limit("gcra 60/m burst 60"), limit("gcra 60/m burst 30"));
        let journal = Journal::new(9);
        add(&journal, &old, "alice", 3, at(1));
        let (place, pending) = pop(&journal).expect("a charge");
        add(&journal, &new, "alice", 4, at(2));
        journal.put_back(place, pending);
        let (_, both) = pop(&journal).expect("both charges");
        assert_eq!((&*both.limit, both.cost, both.now), (&new, 7, at(2)));
        assert!(pop(&journal).is_none());
    }

    #[test]
    fn a_limit_without_charges_leaves_nothing_behind() {
        let journal = Journal::new(1);
        let limit = limit("gcra 60/m burst 60");
        for _ in 0..2 {
            add(&journal, &limit, "alice", 3, Now::Store);
            add(&journal, &limit, "bob", 3, Now::Store); // there is no place
            journal.take_off(&limit, "alice", 3);
            add(&journal, &limit, "alice", 3, Now::Store);
            assert!(pop(&journal).is_some());
            let entries = lock(&journal.entries);
            assert_eq!((journal.len(), entries.limits.len(), entries.places.len()), (0, 0, 0));
        }
        assert_eq!(journal.forgotten(), 2);
    }

    #[test]
    fn keys_are_bounded_in_bytes_and_what_counts_no_more_makes_way() {
        let (journal, limit) = (Journal::new(64), limit("gcra 60/m burst 60"));
        let most_bytes = 64 * KEY_BYTES;
        for n in 0..50 {
            add(&journal, &limit, &format!("{n:0>1000}"), 1, Now::Store);
            assert!(lock(&journal.entries).bytes <= most_bytes);
        }
        assert_eq!((journal.len(), journal.forgotten()), (8, 42));
        // A key that would take all of it.
        add(&journal, &limit, &"x".repeat(most_bytes + 1), 1, Now::Store);
        assert_eq!((journal.len(), journal.forgotten()), (8, 43));
        // Once they count no more, they go faster than others come.
        for n in 1..=50_u64 {
            journal.add(&limit, &format!("{n:1>1000}"), (1, at(n)), |_, _, now| now == at(n - 1));
            assert!(journal.len() <= 8, "{}", journal.len());
        }
        assert_eq!((journal.len(), journal.forgotten()), (2, 43));
    }
}
