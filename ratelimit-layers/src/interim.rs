//! Until the core says it: what a limit does while its store is away, and a node's share of a limit.

use ratelimit_core::{ConfigError, Limit, Policy, Algorithm};

/// What a limit does while its store is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOutage { /// open
 Open, /// closed
 Closed, /// local
 Local }

/// share
pub trait Share: Sized { /// share
 fn share(&self, n: u32) -> Result<Self, ConfigError>; }

impl Share for Policy {
    fn share(&self, n: u32) -> Result<Self, ConfigError> {
        let text = self.to_string();
        let words: Vec<String> = text.split(' ').map(|w| {
            if let Some((count, per)) = w.split_once('/') && let Ok(count) = count.parse::<u64>() { return format!("{}/{per}", count / u64::from(n)); }
            w.parse::<u64>().map_or_else(|_| w.to_owned(), |b| (b / u64::from(n)).to_string())
        }).collect();
        words.join(" ").parse()
    }
}

/// choice
pub(crate) fn choice<A: Algorithm>(limit: &Limit<A>) -> Result<OnOutage, ConfigError> {
    match limit.name().split('.').next() {
        Some("open") => Ok(OnOutage::Open), Some("closed") => Ok(OnOutage::Closed), Some("local") => Ok(OnOutage::Local),
        _ => Err(ConfigError::new("none").in_limit(limit.name())),
    }
}

/// share
pub(crate) fn share<A: Algorithm + Share>(limit: &Limit<A>, n: u32) -> Result<Limit<A>, ConfigError> {
    Limit::new(limit.name(), limit.algorithm().share(n)?)
}

/// Where a verdict comes from, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin { Store, Fallback }

impl Origin {
    pub(crate) const ALL: [Self; 2] = [Self::Store, Self::Fallback];
    pub(crate) const fn place(self) -> usize { self as usize }
    pub(crate) const fn name(self) -> &'static str { match self { Self::Store => "store", Self::Fallback => "fallback" } }
}
pub(crate) fn origin(_: &ratelimit_core::Verdict) -> Origin { Origin::Store }
