//! [`Ledger`]: the slots of a process, at most so many, by a hash of the limits and keys of a
//! batch.

use std::sync::Arc;

use dashmap::mapref::one::Ref;
use dashmap::{DashMap, Entry};
use derive_where::derive_where;
use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{Algorithm, Limit, Timestamp};

use super::slot::{AllotmentSlot, EarlyEnd, Ended, Terms};
use crate::bounded::{BoundedMap, WideKeyHasher};

/// The slots of a process.
pub(super) struct Ledger<A: Algorithm> {
    slots: BoundedMap<LedgerEntry<A>>,
    /// The slots of several checks that have an allotment or a draw in flight, by the hash of each
    /// of their keys. The slot of a single check has the hash of its key.
    shared: DashMap<u128, Vec<SlotKey>>,
    hasher: WideKeyHasher,
}

/// A slot, and what its reservations are settled with.
#[derive_where(Default)]
pub(super) struct LedgerEntry<A: Algorithm> {
    pub(super) slot: AllotmentSlot,
    /// From the first draw on.
    pub(super) checks: Option<Arc<Checks<A>>>,
}

/// The limits and keys of a slot.
pub(super) struct Checks<A> {
    each: Box<[(Limit<A>, Box<str>)]>,
}

/// The slot of a batch.
pub(super) type SlotKey = u128;

/// An allotment that has ended, with its limits and keys.
pub(super) type EndedOf<A> = (Ended, Arc<Checks<A>>);

impl<A: Algorithm + Clone + PartialEq + 'static> Checks<A> {
    fn new(batch: &Batch<'_, A>) -> Self {
        let own = |check: &Check<'_, A>| (check.limit.clone(), check.key.into());
        Self { each: batch.checks().iter().map(own).collect() }
    }

    /// Whether its limits have these parameters. Their names and keys are those of the slot.
    fn are_of(&self, batch: &Batch<'_, A>) -> bool {
        let mut both = self.each.iter().zip(batch.checks());
        both.all(|((limit, _), check)| limit.algorithm() == check.limit.algorithm())
    }
}

impl<A> Checks<A> {
    /// The same checks at these costs.
    pub(super) fn costing<'c>(&'c self, costs: &[u64]) -> Vec<Check<'c, A>> {
        let each = self.each.iter().zip(costs);
        each.map(|((limit, key), cost)| Check { limit, key, cost: *cost }).collect()
    }

    fn keys(&self) -> impl Iterator<Item = &str> {
        self.each.iter().map(|(_, key)| &**key)
    }
}

impl<A: Algorithm + Clone + PartialEq + 'static> LedgerEntry<A> {
    /// The limits and keys of the batch, which are cloned only if they are new or have changed.
    fn checks(&mut self, batch: &Batch<'_, A>) -> Arc<Checks<A>> {
        let known = self.checks.as_ref().filter(|checks| checks.are_of(batch));
        let checks = known.map_or_else(|| Arc::new(Checks::new(batch)), Arc::clone);
        self.checks = Some(checks.clone());
        checks
    }
}

impl<A: Algorithm> Ledger<A> {
    pub(super) fn new(capacity: usize) -> Self {
        let (shared, hasher) = (DashMap::new(), WideKeyHasher::default());
        Self { slots: BoundedMap::new(capacity), shared, hasher }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.values.len()
    }

    fn key(&self, check: &Check<'_, A>) -> u128 {
        self.hasher.hash((check.limit.fingerprint(), check.key))
    }

    /// The hashes of the limits and keys of some checks.
    pub(super) fn keys(&self, checks: &[Check<'_, A>]) -> Vec<u128> {
        checks.iter().map(|check| self.key(check)).collect()
    }

    /// The slot of a batch: that of its key, or of all of its keys in their order.
    pub(super) fn slot_key(&self, batch: &Batch<'_, A>) -> SlotKey {
        match batch.checks() {
            [check] => self.key(check),
            _ => self.hasher.hash(self.keys(batch.checks())),
        }
    }
}

impl<A: Algorithm + Clone + PartialEq + 'static> Ledger<A> {
    /// Calls `act` on the slot of a batch, which is made if it is new, and ended if its limits have
    /// changed. Also returns the allotments that have ended by this: that of the slot itself, and
    /// those of slots that made room.
    pub(super) fn with<T>(
        &self,
        slot_key: SlotKey,
        batch: &Batch<'_, A>,
        (terms, now): (&Terms, Timestamp),
        act: impl FnOnce(&mut LedgerEntry<A>) -> T,
    ) -> (T, [Vec<EndedOf<A>>; 2]) {
        let [mut own, mut others] = [const { Vec::new() }; 2];
        let (acted, is_new) = {
            let (mut kept, is_new) = match self.slots.values.entry(slot_key) {
                Entry::Occupied(entry) => (entry.into_ref(), false),
                Entry::Vacant(entry) => (entry.insert(LedgerEntry::default()), true),
            };
            if kept.checks.as_ref().is_some_and(|checks| !checks.are_of(batch)) {
                let ended = kept.slot.change();
                // It is settled under the numbers that are in force now. Its record bounds what
                // that gives back.
                own.extend(ended.map(|ended| (ended, kept.checks(batch))));
            }
            (act(&mut kept), is_new)
        };
        if is_new {
            let gone = self.slots.make_room(slot_key, |kept| kept.slot.is_idle(terms, now));
            for (slot_key, mut kept) in gone.into_iter().flatten() {
                let Some(checks) = kept.checks else { continue };
                self.unshare(slot_key, &checks);
                others.extend(kept.slot.end(EarlyEnd::GivenBack).map(|ended| (ended, checks)));
            }
        }
        (acted, [own, others])
    }

    /// The limits and keys of a batch that is about to draw, which are known by its keys from now
    /// on.
    pub(super) fn checks(&self, slot_key: SlotKey, batch: &Batch<'_, A>) -> Arc<Checks<A>> {
        let keys = if batch.checks().len() > 1 { self.keys(batch.checks()) } else { Vec::new() };
        let checks = match self.slots.values.get_mut(&slot_key) {
            Some(mut kept) => kept.checks(batch),
            None => Arc::new(Checks::new(batch)),
        };
        for key in keys {
            let mut slot_keys = self.shared.entry(key).or_default();
            // A slot that has been removed meanwhile would stay known.
            if !slot_keys.contains(&slot_key) && self.slots.values.contains_key(&slot_key) {
                slot_keys.push(slot_key);
            }
            drop(slot_keys);
            self.shared.remove_if(&key, |_, slot_keys| slot_keys.is_empty());
        }
        checks
    }

    /// Forgets by which keys a slot that went is known.
    fn unshare(&self, slot_key: SlotKey, checks: &Checks<A>) {
        if checks.each.len() < 2 || self.slots.values.contains_key(&slot_key) {
            return;
        }
        for (limit, key) in &checks.each {
            let key = self.key(&Check { limit, key, cost: 0 });
            self.shared.remove_if_mut(&key, |_, slot_keys| {
                slot_keys.retain(|other| *other != slot_key);
                slot_keys.is_empty()
            });
        }
    }

    /// Calls `act` on a slot, if it is there.
    pub(super) fn at<T>(
        &self,
        slot_key: SlotKey,
        act: impl FnOnce(&mut LedgerEntry<A>) -> T,
    ) -> Option<T> {
        self.slots.values.get_mut(&slot_key).map(|mut kept| act(&mut kept))
    }

    /// Ends, by `end`, the allotments of all slots that name a key of the batch.
    pub(super) fn end_of(
        &self,
        batch: &Batch<'_, A>,
        end: impl Fn(&mut AllotmentSlot) -> Option<Ended>,
    ) -> Vec<EndedOf<A>> {
        let mut slot_keys = Vec::new();
        for key in self.keys(batch.checks()) {
            slot_keys.push(key);
            self.shared.remove_if_mut(&key, |_, sharing| {
                self.retain_drawn(sharing);
                slot_keys.extend(sharing.iter());
                sharing.is_empty()
            });
        }
        let end = |slot_key: SlotKey| {
            let mut kept = self.slots.values.get_mut(&slot_key)?;
            end(&mut kept.slot).zip(kept.checks.clone())
        };
        slot_keys.into_iter().filter_map(end).collect()
    }

    /// Keeps the places of slots with an allotment or a draw in flight. A slot that has ended is
    /// known again by its next draw.
    fn retain_drawn(&self, slot_keys: &mut Vec<SlotKey>) {
        let is_drawn = |kept: Ref<'_, _, LedgerEntry<A>>| !kept.slot.is_empty();
        slot_keys.retain(|slot_key| self.slots.values.get(slot_key).is_some_and(is_drawn));
    }

    /// Ends all allotments, in the order of their keys.
    pub(super) fn end_all(&self) -> Vec<EndedOf<A>> {
        let mut all = Vec::new();
        for mut kept in self.slots.values.iter_mut() {
            all.extend(kept.slot.end(EarlyEnd::GivenBack).zip(kept.checks.clone()));
        }
        self.shared.retain(|_, slot_keys| {
            self.retain_drawn(slot_keys);
            !slot_keys.is_empty()
        });
        all.sort_by(|(_, a), (_, b)| a.keys().cmp(b.keys()));
        all
    }
}
