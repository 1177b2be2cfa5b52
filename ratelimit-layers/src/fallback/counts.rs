//! [`Counts`]: how many decisions were made without the store, by limit and choice.

use std::sync::atomic::{AtomicU64, Ordering};

use ratelimit_core::{Algorithm, Decision, Limit, OnOutage};

use crate::by_limit::ByLimit;

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
pub(crate) enum Outcome {
    Allowed,
    Denied,
    /// It would have allowed the request, which another limit of the batch denied.
    Spared,
    /// It would have denied the request, and is a shadow limit.
    ShadowDenied,
}

impl Outcome {
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

/// The counters of one limit and choice.
#[derive(Debug, Default)]
struct Counters {
    allowed: AtomicU64,
    denied: AtomicU64,
    spared: AtomicU64,
    undetermined: AtomicU64,
}

/// The counters of all limits that were ever decided without the store.
#[derive(Debug, Default)]
pub(super) struct Counts(ByLimit<[Counters; CHOICES.len()]>);

impl Counts {
    pub(super) fn count(
        &self,
        limit: &str,
        choice: OnOutage,
        outcome: Outcome,
        undetermined: bool,
    ) {
        self.0.with(limit, Default::default, |counters| {
            counters[place(choice)].count(outcome, undetermined);
        });
    }

    /// All counts that are not zero, by limit and choice.
    pub(super) fn read(&self) -> Vec<OutageCount> {
        let all = self.0.map(|limit, counters| {
            CHOICES.map(|choice| counters[place(choice)].read(limit, choice))
        });
        let mut all: Vec<_> = all
            .into_iter()
            .flatten()
            .filter(|count| count.allowed + count.denied + count.spared > 0)
            .collect();
        all.sort_by(|one, other| {
            one.limit.cmp(&other.limit).then(place(one.choice).cmp(&place(other.choice)))
        });
        all
    }
}

const fn place(choice: OnOutage) -> usize {
    match choice {
        OnOutage::Open => 0,
        OnOutage::Closed => 1,
        OnOutage::Local => 2,
    }
}

impl Counters {
    fn count(&self, outcome: Outcome, undetermined: bool) {
        let counter = match outcome {
            Outcome::Allowed => &self.allowed,
            Outcome::Denied | Outcome::ShadowDenied => &self.denied,
            Outcome::Spared => &self.spared,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if undetermined {
            self.undetermined.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn read(&self, limit: &str, choice: OnOutage) -> OutageCount {
        OutageCount {
            limit: limit.into(),
            choice,
            allowed: self.allowed.load(Ordering::Relaxed),
            denied: self.denied.load(Ordering::Relaxed),
            spared: self.spared.load(Ordering::Relaxed),
            undetermined: self.undetermined.load(Ordering::Relaxed),
        }
    }
}
