//! [`Journal`]: what was admitted locally and is to be charged to the store when it is back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ratelimit_core::{Algorithm, Limit, Now};

use crate::lock;

/// One key's charges under one limit.
#[derive(Debug)]
pub(super) struct Pending<A> {
    /// The limit as the store knows it.
    pub(super) limit: Arc<Limit<A>>,
    pub(super) key: Box<str>,
    pub(super) cost: u64,
    /// The time of the last charge, if it was given.
    pub(super) now: Now,
}

#[derive(Debug)]
struct OfLimit<A> {
    limit: Arc<Limit<A>>,
    by_key: HashMap<Box<str>, (u64, Now)>,
}

/// Charges by limit and key, of at most so many keys. What finds no place is forgotten, and counted.
#[derive(Debug)]
pub(super) struct Journal<A> {
    most: usize,
    by_limit: Mutex<HashMap<Box<str>, OfLimit<A>>>,
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
        self.len.load(Ordering::Relaxed)
    }

    /// How many keys' charges were forgotten, because there was no place or the store could not take them.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    pub(super) fn forget(&self, keys: u64) {
        self.forgotten.fetch_add(keys, Ordering::Relaxed);
    }

    pub(super) fn add(&self, name: &str, limit: &Limit<A>, key: &str, cost: u64, now: Now) {
        if cost == 0 {
            return;
        }
        let mut by_limit = lock(&self.by_limit);
        if !by_limit.contains_key(name) {
            let empty = OfLimit { limit: Arc::new(limit.clone()), by_key: HashMap::new() };
            by_limit.insert(name.into(), empty);
        }
        let Some(of_limit) = by_limit.get_mut(name) else { return };
        if let Some((charged, at)) = of_limit.by_key.get_mut(key) {
            *charged = charged.saturating_add(cost);
            *at = now;
            return;
        }
        if self.len.load(Ordering::Relaxed) >= self.most {
            return self.forget(1);
        }
        of_limit.by_key.insert(key.into(), (cost, now));
        self.len.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes off what was given back.
    pub(super) fn take_off(&self, name: &str, key: &str, cost: u64) {
        let mut by_limit = lock(&self.by_limit);
        let Some(of_limit) = by_limit.get_mut(name) else { return };
        if let Some((charged, _)) = of_limit.by_key.get_mut(key) {
            *charged = charged.saturating_sub(cost);
            if *charged == 0 {
                of_limit.by_key.remove(key);
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Removes one key's charges.
    pub(super) fn pop(&self) -> Option<Pending<A>> {
        let mut by_limit = lock(&self.by_limit);
        let of_limit = by_limit.values_mut().find(|of_limit| !of_limit.by_key.is_empty())?;
        let key = of_limit.by_key.keys().next()?.clone();
        let (cost, now) = of_limit.by_key.remove(&key)?;
        self.len.fetch_sub(1, Ordering::Relaxed);
        Some(Pending { limit: Arc::clone(&of_limit.limit), key, cost, now })
    }

    /// Puts back what the store did not take.
    pub(super) fn put_back(&self, pending: &Pending<A>) {
        let Pending { limit, key, cost, now } = pending;
        self.add(limit.name(), limit, key, *cost, *now);
    }
}
