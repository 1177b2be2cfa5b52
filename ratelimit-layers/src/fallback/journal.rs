//! [`Journal`]: what was admitted locally and is to be charged to the store when it is back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ratelimit_core::store::Now;
use ratelimit_core::{Algorithm, Limit};

use crate::lock;

/// One key's charges under one limit.
#[derive(Debug)]
pub(super) struct PendingCharges<A> {
    /// The limit as the store knows it.
    pub(super) limit: Arc<Limit<A>>,
    pub(super) key: Box<str>,
    pub(super) cost: u64,
    /// The time of the last charge, if it was given.
    pub(super) now: Now,
}

#[derive(Debug)]
struct LimitJournal<A> {
    limit: Arc<Limit<A>>,
    by_key: HashMap<Box<str>, (u64, Now)>,
}

/// Charges by limit and key, of at most so many keys. What finds no place is forgotten, and counted.
#[derive(Debug)]
pub(super) struct Journal<A> {
    most: usize,
    by_limit: Mutex<HashMap<Box<str>, LimitJournal<A>>>,
    /// How many keys there are.
    len: AtomicUsize,
    forgotten: AtomicU64,
}

impl<A: Algorithm + Clone> Journal<A> {
    pub(super) fn new(most: usize) -> Self {
        let by_limit = Mutex::default();
        Self { most, by_limit, len: AtomicUsize::new(0), forgotten: AtomicU64::new(0) }
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::SeqCst)
    }

    /// How many keys' charges were forgotten, because there was no place or the store could not take them.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    pub(super) fn forget(&self) {
        self.forgotten.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes a charge. All charges under its limit have the limit's parameters from now on: a policy may be replaced during
    /// an outage.
    pub(super) fn add(&self, limit: &Limit<A>, key: &str, cost: u64, now: Now) {
        self.note(limit, key, cost, now, true);
    }

    /// Puts back what the store did not take. What was noted meanwhile is newer.
    pub(super) fn put_back(&self, pending: &PendingCharges<A>) {
        let PendingCharges { limit, key, cost, now } = pending;
        self.note(limit, key, *cost, *now, false);
    }

    fn note(&self, limit: &Limit<A>, key: &str, cost: u64, now: Now, is_newest: bool) {
        if cost == 0 {
            return;
        }
        let mut by_limit = lock(&self.by_limit);
        let new = || LimitJournal { limit: Arc::new(limit.clone()), by_key: HashMap::new() };
        let of_limit = by_limit.entry(limit.name().into()).or_insert_with(new);
        if is_newest {
            of_limit.limit = Arc::new(limit.clone());
        }
        if let Some((charged, at)) = of_limit.by_key.get_mut(key) {
            *charged = charged.saturating_add(cost);
            if is_newest {
                *at = now;
            }
        } else if self.len() < self.most {
            self.len.fetch_add(1, Ordering::SeqCst);
            of_limit.by_key.insert(key.into(), (cost, now));
        } else {
            self.forget();
        }
    }

    /// Takes off what was given back.
    pub(super) fn take_off(&self, name: &str, key: &str, cost: u64) {
        let mut by_limit = lock(&self.by_limit);
        let Some(of_limit) = by_limit.get_mut(name) else { return };
        let Some((charged, _)) = of_limit.by_key.get_mut(key) else { return };
        *charged = charged.saturating_sub(cost);
        if *charged == 0 {
            of_limit.by_key.remove(key);
            self.len.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Removes one key's charges, of any limit. A limit goes with its last key.
    pub(super) fn pop(&self) -> Option<PendingCharges<A>> {
        let mut by_limit = lock(&self.by_limit);
        let of_limit = by_limit.values_mut().find(|of_limit| !of_limit.by_key.is_empty())?;
        let limit = Arc::clone(&of_limit.limit);
        let key = of_limit.by_key.keys().next()?.clone();
        let (cost, now) = of_limit.by_key.remove(&key)?;
        by_limit.retain(|_, of_limit| !of_limit.by_key.is_empty());
        self.len.fetch_sub(1, Ordering::SeqCst);
        Some(PendingCharges { limit, key, cost, now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::{Policy, Timestamp};

    fn limit(words: &str) -> Limit<Policy> {
        Limit::new("burst", words.parse().expect(words)).expect("a name")
    }

    fn at(us: u64) -> Now {
        Now::At(Timestamp::saturating_from_us(us))
    }

    #[test]
    fn charges_have_the_newest_parameters_of_their_limit() {
        let (old, new) = (limit("gcra 60/m burst 60"), limit("gcra 60/m burst 30"));
        for newest in ["alice", "bob"] {
            let journal = Journal::new(9);
            journal.add(&old, "alice", 3, Now::Store);
            journal.add(&new, newest, 3, Now::Store);
            while let Some(pending) = journal.pop() {
                assert_eq!(*pending.limit, new, "{}", pending.key);
            }
        }
    }

    #[test]
    fn what_is_put_back_is_older_than_what_was_noted_meanwhile() {
        let (old, new) = (limit("gcra 60/m burst 60"), limit("gcra 60/m burst 30"));
        let journal = Journal::new(9);
        journal.add(&old, "alice", 3, at(1));
        let pending = journal.pop().expect("a charge");
        journal.add(&new, "alice", 4, at(2));
        journal.put_back(&pending);
        let both = journal.pop().expect("both charges");
        assert_eq!((&*both.limit, both.cost, both.now), (&new, 7, at(2)));
        assert!(journal.pop().is_none());
    }

    #[test]
    fn a_limit_without_charges_leaves_nothing_behind() {
        let journal = Journal::new(1);
        let limit = limit("gcra 60/m burst 60");
        for _ in 0..2 {
            journal.add(&limit, "alice", 3, Now::Store);
            journal.add(&limit, "bob", 3, Now::Store); // there is no place
            journal.take_off("burst", "alice", 3);
            journal.add(&limit, "alice", 3, Now::Store);
            assert!(journal.pop().is_some());
            assert_eq!((journal.len(), lock(&journal.by_limit).len()), (0, 0));
        }
        assert_eq!(journal.forgotten(), 2);
    }
}
