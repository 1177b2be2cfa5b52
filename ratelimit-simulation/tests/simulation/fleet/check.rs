//! Holds what nodes recorded against what the limits promise.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use fastrand::Rng;
use ratelimit_core::algorithm::Share;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, OnOutage, RateLimiter, ReservationId, Source, Store, Timestamp,
    Verdict,
};
use ratelimit_redis::RedisStore;
use ratelimit_simulation::{Faults, ModelConnection, widen};
use ratelimit_testkit::Admissions;
use tokio::time::sleep;

use super::node::Record;
use super::{World, caller};
use crate::Counts;

impl World {
    /// After the faults, the store decides every request again, and after the longest recovery each
    /// key has room.
    pub(super) async fn is_well_again(self: &Arc<Self>) {
        self.network.set(Faults { way: Duration::from_millis(1), ..Faults::default() });
        sleep(Duration::from_secs(4)).await;
        self.is_idle().await;
        self.alive.lock().expect("no panic").clear();
        let mut random = Rng::with_seed(self.plan.seed);
        let store = self.store(ModelConnection::new(&self.network), &mut random);
        let limiter = RateLimiter::new(self.plan.limits(), store);
        let recovery_us = |algorithm: &AnyAlgorithm| {
            algorithm.step(None, Timestamp::ZERO, algorithm.capacity()).decision.reset_after_us
        };
        let limits = self.plan.limits();
        let longest_us = limits.iter().map(|limit| recovery_us(limit.algorithm())).max();
        // A sliding counter forgets at the end of the window after the last.
        sleep(Duration::from_micros(2 * longest_us.unwrap_or_default())).await;
        for user in 0..self.plan.users {
            match limiter.check(&caller(user)).await {
                Ok(verdict) if verdict.allowed() && verdict.source() != Source::Fallback => {}
                other => self.breaks(format!("not well again: {user}: {other:?}")),
            }
        }
    }

    /// What was drawn in advance and not used is back by itself: of a window that lasts, all is
    /// left that was not admitted.
    async fn is_idle(&self) {
        let limits = self.plan.limits();
        let lasts = |algorithm: &AnyAlgorithm| matches!(algorithm, AnyAlgorithm::FixedWindow(window) if window.window_us() > 60_000_000);
        if !self.plan.is_quiet {
            return;
        }
        let redis =
            RedisStore::builder().over(ModelConnection::new(&self.network)).expect("a prefix");
        for limit in limits.iter().filter(|limit| lasts(limit.algorithm())) {
            let mut admitted: BTreeMap<String, u64> = BTreeMap::new();
            {
                let settled = self.settled.lock().expect("no panic");
                for record in self.records.lock().expect("no panic").iter() {
                    let is_admitted = record.answer.as_ref().is_ok_and(Verdict::allowed);
                    for (name, key, cost) in &record.asked {
                        if *name == limit.name() && record.op == Op::Acquire && is_admitted {
                            let kept = charged_in_the_end(record, *cost, &settled);
                            *admitted.entry(key.clone()).or_default() += kept;
                        }
                    }
                }
            }
            for (key, admitted) in admitted {
                let check = Check { limit, key: &key, cost: 0 };
                let peeked = redis.apply(&Batch::one(&check).op(Op::Peek)).await;
                let (left, algorithm) =
                    (peeked.map(|verdict| verdict.remaining()), limit.algorithm());
                if left.as_ref().ok() != Some(&(algorithm.capacity() - admitted)) {
                    self.breaks(format!("{left:?} left of {algorithm} after {admitted} of {key}"));
                }
            }
        }
    }

    /// Holds what was admitted against the bounds.
    pub(super) fn check(&self) -> Result<Counts, String> {
        let records = self.records.lock().expect("no panic");
        let limits = self.plan.limits();
        let algorithm = |name: &str| {
            let limit = limits.iter().find(|limit| limit.name() == name).expect("one of both");
            *limit.algorithm()
        };
        let nodes = NonZeroU64::new(self.plan.nodes as u64).expect("some");
        let (mut counts, mut all, mut local) =
            (Counts::default(), BTreeMap::new(), BTreeMap::new());
        let widened = |name: &str| widen(&algorithm(name), self.plan.lifetime_us.unwrap_or(0));
        let settled = self.settled.lock().expect("no panic");
        let mut given_back: BTreeMap<String, u64> = BTreeMap::new();
        for record in records.iter() {
            let Ok(verdict) = &record.answer else {
                counts.add("errors", 1);
                continue;
            };
            counts.add("decisions", 1);
            let source = verdict.source();
            counts.add(source.name(), 1);
            let is_charged = record.op == Op::Acquire && verdict.allowed();
            counts.add("admitted", is_charged.into());
            for ((name, key, cost), server_us) in record.asked.iter().zip(&record.server_us) {
                let kept = charged_in_the_end(record, *cost, &settled);
                *given_back.entry(key.clone()).or_default() += cost - kept;
                if source == Source::Fallback {
                    let share = || algorithm(name).share(nodes).map(Admissions::new);
                    match self.plan.on_outage() {
                        OnOutage::Local if is_charged => local
                            .entry((record.node, *name, key))
                            .or_insert_with(|| share().expect("a share"))
                            .add(record.node_us, kept),
                        OnOutage::Closed if is_charged => {
                            return Err("admitted, though it is closed".to_owned());
                        }
                        _ => {}
                    }
                    continue;
                }
                let admissions =
                    all.entry((*name, key)).or_insert_with(|| Admissions::new(widened(name)));
                if is_charged {
                    admissions.add(*server_us, kept);
                }
            }
        }
        for ((name, key), admissions) in &mut all {
            for (reset, [begin, end]) in self.resets.lock().expect("no panic").iter() {
                if reset == *key {
                    let until = end.saturating_add_us(self.plan.lifetime_us.unwrap_or(0));
                    // What was reserved before is given back by the reset, and later by its
                    // settlement once more.
                    let twice = given_back.get(*key).copied().unwrap_or_default();
                    admissions.allow([*begin, until], algorithm(name).capacity());
                    admissions.allow([*begin, Timestamp::MAX], twice);
                }
            }
            let server = self.network.server_of(&format!("{{{key}}}"));
            for (lost, between) in self.losses.lock().expect("no panic").iter() {
                if *lost == server {
                    admissions.allow(*between, algorithm(name).capacity());
                }
            }
        }
        let checked = all.iter().map(|((name, key), admissions)| (*name, *key, admissions));
        let shares = local.iter().map(|((_, name, key), admissions)| (*name, *key, admissions));
        for (name, key, admissions) in checked.chain(shares) {
            admissions.check().map_err(|excess| format!("{name} of {key}: {excess}"))?;
        }
        let (served, admitted) = (self.served.load(SeqCst), counts.0.get("admitted").copied());
        if served > admitted.unwrap_or_default() {
            return Err(format!("{served} served, {admitted:?} admitted"));
        }
        if !self.plan.is_disturbed && counts.0.contains_key(Source::Fallback.name()) {
            return Err("a fallback decided, though nothing failed".to_owned());
        }
        Ok(counts)
    }
}

/// What of a cost stays charged: a reservation may be settled at less.
fn charged_in_the_end(record: &Record, cost: u64, settled: &BTreeMap<ReservationId, u64>) -> u64 {
    let settled = record.id.and_then(|id| settled.get(&id));
    settled.map_or(cost, |settled| cost.min(*settled))
}
