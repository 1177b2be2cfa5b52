//! [`OutageCounts`]: how many decisions were made without the store, by limit and choice.

use std::collections::BTreeMap;
use std::sync::Mutex;

use ratelimit_core::{Algorithm, Decision, Limit, OnOutage};

use crate::lock;

/// How many requests a limit decided without the store, by one choice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutageCount {
    /// The limit's name.
    pub limit: Box<str>,
    /// The choice by which it decided.
    pub choice: OnOutage,
    /// How many requests were allowed.
    pub allowed: u64,
    /// How many requests this limit denied, or would have denied if it is a shadow limit.
    pub denied: u64,
    /// How many requests this limit would have allowed, and another limit of the batch denied.
    pub spared: u64,
    /// How many of all these the store may have charged as well: it was asked, and its answer did not come.
    pub undetermined: u64,
}

/// What a limit did with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutageOutcome {
    Allowed,
    Denied,
    /// It would have allowed the request, which another limit of the batch denied.
    Spared,
    /// It would have denied the request, and is a shadow limit.
    ShadowDenied,
}

impl OutageOutcome {
    pub(crate) fn of<A: Algorithm>(
        limit: &Limit<A>,
        decision: &Decision,
        all_allowed: bool,
    ) -> Self {
        match (decision.allowed, all_allowed) {
            (true, true) => Self::Allowed,
            (true, false) => Self::Spared,
            (false, _) if limit.is_shadow() => Self::ShadowDenied,
            (false, _) => Self::Denied,
        }
    }

    #[cfg(feature = "metrics")]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Spared => "spared",
            Self::ShadowDenied => "shadow-denied",
        }
    }
}

const CHOICES: [OnOutage; 3] = [OnOutage::Open, OnOutage::Closed, OnOutage::Local];

/// The counts of all limits that were ever decided without the store, by limit and choice.
#[derive(Debug, Default)]
pub(super) struct OutageCounts(Mutex<BTreeMap<Box<str>, [OutageCount; CHOICES.len()]>>);

impl OutageCounts {
    pub(super) fn count(
        &self,
        limit: &str,
        choice: OnOutage,
        outcome: OutageOutcome,
        undetermined: bool,
    ) {
        let none = |choice| {
            let (limit, [allowed, denied, spared, undetermined]) = (limit.into(), [0; 4]);
            OutageCount { limit, choice, allowed, denied, spared, undetermined }
        };
        let mut all = lock(&self.0);
        if !all.contains_key(limit) {
            all.insert(limit.into(), CHOICES.map(none));
        }
        let mut counts = all.get_mut(limit).into_iter().flatten();
        let Some(count) = counts.find(|count| count.choice == choice) else { return };
        *match outcome {
            OutageOutcome::Allowed => &mut count.allowed,
            OutageOutcome::Denied | OutageOutcome::ShadowDenied => &mut count.denied,
            OutageOutcome::Spared => &mut count.spared,
        } += 1;
        count.undetermined += u64::from(undetermined);
    }

    /// All counts that are not zero, by limit and choice.
    pub(super) fn read(&self) -> Vec<OutageCount> {
        let all = lock(&self.0);
        let is_counted = |count: &&OutageCount| count.allowed + count.denied + count.spared > 0;
        all.values().flatten().filter(is_counted).cloned().collect()
    }
}
