//! [`OutageCounts`]: how many decisions were made without the store, by limit and choice.

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

/// The counts of all limits that were ever decided without the store, ordered by limit and choice.
#[derive(Debug, Default)]
pub(super) struct OutageCounts(Mutex<Vec<OutageCount>>);

impl OutageCounts {
    pub(super) fn count(
        &self,
        limit: &str,
        choice: OnOutage,
        outcome: OutageOutcome,
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
            OutageOutcome::Allowed => &mut count.allowed,
            OutageOutcome::Denied | OutageOutcome::ShadowDenied => &mut count.denied,
            OutageOutcome::Spared => &mut count.spared,
        } += 1;
        count.undetermined += u64::from(undetermined);
    }

    pub(super) fn read(&self) -> Vec<OutageCount> {
        lock(&self.0).clone()
    }
}
