//! Finds the smallest limits that would have denied no more than a share of their callers.
//!
//! A caller counts as denied by its first denial. Before that the limit has admitted all of the caller's requests, so a
//! larger capacity never denies a caller that a smaller one admits, and a binary search finds the smallest capacity.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use ratelimit_core::{Algorithm, Batch, Now, Op, Policy, Store, Timestamp, Verdict, Write};
use ratelimit_memory::MemoryError;

use crate::text::decimal;

/// The requests that a limit saw: a store that admits everything and remembers it.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    limits: Mutex<HashMap<String, Requests>>,
}

impl Recorder {
    /// The requests that this limit saw.
    pub(crate) fn take(&self, limit: &str) -> Requests {
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        limits.remove(limit).unwrap_or_default()
    }
}

impl Store<Policy> for Recorder {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        let Now::At(at) = batch.time() else { return Ok(Verdict::several(Vec::new())) };
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let decisions = batch.checks().iter().map(|check| {
            let requests = limits.entry(check.limit.name().to_owned()).or_default();
            requests.push(check.key, at, check.cost, batch.operation());
            // A peek by a new caller, which every limit admits.
            check.limit.algorithm().step(None, at, 0).decision
        });
        Ok(Verdict::several(decisions.collect()))
    }
}

/// The requests of one limit, in the order of the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Requests {
    keys: HashMap<Box<str>, usize>,
    log: Vec<Request>,
    /// The largest sum of costs of one key.
    most: u64,
    sums: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    at: Timestamp,
    key: usize,
    cost: u64,
    op: Op,
}

impl Requests {
    fn push(&mut self, key: &str, at: Timestamp, cost: u64, op: Op) {
        let key = self.keys.get(key).copied().unwrap_or_else(|| {
            let place = self.keys.len();
            self.keys.insert(key.into(), place);
            self.sums.push(0);
            place
        });
        if matches!(op, Op::Acquire | Op::Force) {
            self.sums[key] = self.sums[key].saturating_add(cost);
            self.most = self.most.max(self.sums[key]);
        }
        self.log.push(Request { at, key, cost, op });
    }

    /// The number of callers.
    pub(crate) fn callers(&self) -> u64 {
        self.keys.len() as u64
    }

    /// How many callers this policy denies at least once.
    pub(crate) fn denied(&self, policy: &Policy) -> u64 {
        let mut states = vec![None; self.keys.len()];
        let mut is_denied = vec![false; self.keys.len()];
        let mut denied = 0;
        for Request { at, key, cost, op } in &self.log {
            if is_denied[*key] {
                continue;
            }
            let state = &mut states[*key];
            let step = match op {
                Op::Acquire => Some(policy.step(state.as_ref(), *at, *cost)),
                Op::Refund => policy.refund(state.as_ref(), *at, *cost),
                Op::Force => policy.force(state.as_ref(), *at, *cost),
                Op::Reset => {
                    *state = None;
                    None
                }
                _ => None,
            };
            let Some(step) = step else { continue };
            if *op == Op::Acquire && !step.decision.allowed {
                is_denied[*key] = true;
                denied += 1;
            }
            match step.write {
                Write::Keep => {}
                Write::Put { state: next, .. } => *state = Some(next),
                Write::Remove => *state = None,
            }
        }
        denied
    }

    /// The policy with the smallest capacity that denies at most this many callers; `None` if the algorithm has no
    /// capacity that is large enough.
    pub(crate) fn smallest(&self, policy: &Policy, most_denied: u64) -> Option<Policy> {
        // A capacity of all that a caller ever asked for denies nothing.
        let (mut low, mut high) = (1, self.most.max(1).saturating_mul(counts(policy)[0]));
        let mut best = None;
        while low <= high {
            let middle = low + (high - low) / 2;
            let wide = with_capacity(policy, middle);
            if wide.is_some_and(|wide| self.denied(&wide) > most_denied) {
                low = middle + 1;
            } else {
                // A capacity that cannot be configured is too large.
                best = wide.or(best);
                high = middle - 1;
            }
        }
        best
    }
}

/// The counts of a policy that has several windows, and 1 for every other.
fn counts(policy: &Policy) -> Vec<u64> {
    match policy {
        Policy::BucketedWindow(windows) => windows.windows().iter().map(|w| w.limit).collect(),
        Policy::BucketedWindowAttempts(windows) => {
            windows.algorithm().windows().iter().map(|w| w.limit).collect()
        }
        _ => vec![1],
    }
}

/// The same policy with another capacity: the burst of a bucket, the count of a window. Of several windows, this is the
/// count of the first; the others keep their ratio to it.
fn with_capacity(policy: &Policy, capacity: u64) -> Option<Policy> {
    let is_bucket = matches!(policy.name(), "gcra" | "token-bucket");
    let counts = counts(policy);
    let scaled = |count: u64| {
        let count = u128::from(count) * u128::from(capacity);
        u64::try_from(count.div_ceil(u128::from(counts[0].max(1)))).ok()
    };
    let mut windows = counts.iter();
    let mut words = Vec::new();
    let text = policy.to_string();
    let mut given = text.split_whitespace();
    while let Some(word) = given.next() {
        match word.split_once('/') {
            Some(_) if is_bucket => words.push(format!("{word} burst {capacity}")),
            Some((_, period)) => words.push(format!("{}/{period}", scaled(*windows.next()?)?)),
            None if word == "burst" => drop(given.next()),
            None => words.push(word.to_owned()),
        }
    }
    words.join(" ").parse().ok()
}

/// The share of callers that may be denied, in millionths of a percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share(u64);

impl Share {
    const WHOLE: u64 = 100_000_000;

    /// Parses a share such as `0.1%`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let refused =
            || "write a share of 0% to 100% with at most 6 decimals, such as 0.1%".to_owned();
        let number = text.strip_suffix('%').ok_or_else(refused)?;
        let is_exact = number.split_once('.').is_none_or(|(_, decimals)| decimals.len() <= 6);
        let (whole, millionths) = decimal(number).filter(|_| is_exact).ok_or_else(refused)?;
        let part = whole.saturating_mul(1_000_000).saturating_add(millionths.unwrap_or(0));
        if part <= Self::WHOLE { Ok(Self(part)) } else { Err(refused()) }
    }

    /// The most that this share of a number is, in whole ones.
    pub(crate) fn of(self, callers: u64) -> u64 {
        let part = u128::from(callers) * u128::from(self.0) / u128::from(Self::WHOLE);
        u64::try_from(part).unwrap_or(callers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_exact() {
        for (text, of) in
            [("0%", 0), ("0.1%", 1), ("0.199999%", 1), ("0.2%", 2), ("50%", 500), ("100%", 1_000)]
        {
            assert_eq!(Share::parse(text).map(|share| share.of(1_000)), Ok(of), "{text}");
        }
        for text in ["", "%", "1", "-1%", "100.1%", "0.0000001%", "1e2%", ".5%", "1.%"] {
            assert!(Share::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_smallest_capacity_is_the_first_that_denies_few_enough() {
        for words in [
            "gcra 1/s burst 3",
            "token-bucket 1/2s",
            "fixed-window 3/5s",
            "first-request-window 3/5s",
            "window-log 3/5s count attempts",
            "sliding-counter 3/5s",
            "sliding-log 3/5s",
            "bucketed-window bucket 1s rates 1/1s,3/5s",
        ] {
            let mut requests = Requests::default();
            let mut random = 1_u64;
            for n in 0..3_000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let draw = random >> 40;
                let key = format!("k{}", draw % 30 * (draw / 30 % 30) / 29);
                let at = Timestamp::saturating_from_us(1_000_000_000 + n * 20_000);
                let op = match n % 50 {
                    13 => Op::Reset,
                    27 => Op::Peek,
                    _ => Op::Acquire,
                };
                requests.push(&key, at, draw / 900 % 3, op);
            }
            let policy: &Policy = &words.parse().expect(words);
            let mut last = u64::MAX;
            for most in [0, 1, 5, 20] {
                let found = requests.smallest(policy, most).expect(words);
                assert!(requests.denied(&found) <= most, "{words}: {found}");
                let capacity = match found.name() {
                    "bucketed-window" => counts(&found)[0],
                    _ => found.capacity(),
                };
                // Every smaller one denies more.
                for less in 1..capacity {
                    let less = with_capacity(policy, less).expect(words);
                    assert!(requests.denied(&less) > most, "{words}: {less} beside {found}");
                }
                assert!(capacity <= last, "{words}: {found}");
                last = capacity;
            }
        }
    }
}
