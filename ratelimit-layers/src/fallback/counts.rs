//! [`OutageCounts`]: how many decisions were made without the store, by limit and choice.

use std::sync::Mutex;

use ratelimit_core::OnOutage;

use crate::lock;
use crate::observed::LimitOutcome;

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
    /// How many of all these the store may have charged as well: it was asked, and its answer did
    /// not come.
    pub undetermined: u64,
}

/// The counts of all limits that were ever decided without the store, ordered by limit and choice.
#[derive(Debug, Default)]
pub(super) struct OutageCounts(Mutex<Vec<OutageCount>>);

impl OutageCounts {
    pub(super) fn count(
        &self,
        limit: &str,
        choice: OnOutage,
        outcome: LimitOutcome,
        undetermined: bool,
    ) {
        let mut all = lock(&self.0);
        let known = all.binary_search_by(|count| {
            (*count.limit).cmp(limit).then((count.choice as u8).cmp(&(choice as u8)))
        });
        let at = known.unwrap_or_else(|at| {
            let (limit, [allowed, denied, spared, undetermined]) = (limit.into(), [0; 4]);
            let none = OutageCount { limit, choice, allowed, denied, spared, undetermined };
            all.insert(at, none);
            at
        });
        let count = &mut all[at];
        *match outcome {
            LimitOutcome::Allowed => &mut count.allowed,
            LimitOutcome::Denied | LimitOutcome::ShadowDenied => &mut count.denied,
            LimitOutcome::Spared => &mut count.spared,
        } += 1;
        count.undetermined += u64::from(undetermined);
    }

    pub(super) fn read(&self) -> Vec<OutageCount> {
        lock(&self.0).clone()
    }
}
