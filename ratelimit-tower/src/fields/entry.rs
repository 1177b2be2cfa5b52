//! The content of the fields about one limit.

use http::header::HeaderValue;
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{Decision, Limit, Timestamp};

use super::{Fields, Unit, draft, whole_seconds};

/// The content of the fields about one limit, whatever their version.
#[derive(Clone, Debug)]
pub(crate) struct FieldEntry<'a> {
    pub(crate) name: &'a str,
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    /// The window in whole seconds; `None` if there is none, or none that can be said so.
    pub(crate) window_s: Option<u64>,
    /// Until there is more quota; `None` if nothing is missing, or it is not known.
    pub(crate) more_after_us: Option<u64>,
    /// Until nothing is missing; `None` if it is not known.
    pub(crate) reset_after_us: Option<u64>,
    pub(crate) unit: &'a Unit,
    pub(crate) partition_key: Option<[u8; 12]>,
    /// The `RateLimit-Policy` of this limit alone, if it was written before.
    pub(crate) policy: Option<&'a HeaderValue>,
}

/// The `RateLimit-Policy` of a limit, which hardly ever changes.
pub(crate) struct PolicyField {
    limit: u64,
    window_s: Option<u64>,
    value: HeaderValue,
}

impl PolicyField {
    /// The field of this limit for a new caller; `None` if each caller has its own.
    pub(crate) fn new<A: Quota + 'static>(limit: &Limit<A>, fields: &Fields) -> Option<Self> {
        if fields.partition_secret.is_some() {
            return None;
        }
        let new = limit.algorithm().step(None, Timestamp::ZERO, 0).decision;
        let entry = FieldEntry::new(limit, &new, fields);
        let value = draft::policy(&entry)?;
        Some(Self { limit: entry.limit, window_s: entry.window_s, value })
    }

    /// The field, if it is that of this entry. Of several windows, an algorithm tells the one that
    /// is nearest to its end.
    pub(crate) fn value_for(&self, entry: &FieldEntry<'_>) -> Option<&HeaderValue> {
        let is_same = self.limit == entry.limit && self.window_s == entry.window_s;
        is_same.then_some(&self.value)
    }
}

impl<'a> FieldEntry<'a> {
    /// The fields about this decision of this limit. Those of one that clients do not see have its
    /// own name.
    pub(crate) fn new<A: Quota + 'static>(
        limit: &'a Limit<A>,
        decision: &Decision,
        fields: &'a Fields,
    ) -> Self {
        let own = || {
            if limit.algorithm().has_leases() { &Unit::ConcurrentRequests } else { &Unit::Requests }
        };
        let set = fields.settings_of(limit.name()).and_then(|shown| shown.unit.as_ref());
        let unit = set.unwrap_or_else(own);
        // A window that is not a whole number of seconds is rounded up: the quota over a longer
        // time promises no more. One below a second cannot be said.
        let is_told = |us: &u64| *us >= 1_000_000 && *unit != Unit::ConcurrentRequests;
        let window_us = limit.algorithm().window_us(decision).filter(is_told);
        Self {
            name: fields.name_of(limit.name()).unwrap_or(limit.name()),
            limit: decision.limit,
            remaining: decision.remaining,
            window_s: window_us.map(whole_seconds),
            more_after_us: Some(decision.replenish_after_us).filter(|wait| *wait > 0),
            reset_after_us: Some(decision.reset_after_us),
            unit,
            partition_key: None,
            policy: None,
        }
    }

    /// The same of a limit of which places are free when other requests end: after this wait, if it
    /// is known.
    pub(crate) fn busy(mut self, wait_us: Option<u64>) -> Self {
        if self.reset_after_us != Some(0) {
            (self.more_after_us, self.reset_after_us) = (wait_us, wait_us);
        }
        self
    }
}
