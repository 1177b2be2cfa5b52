//! [`TopDenied`]: a store that lists the keys that are denied most, in bounded memory, by the
//! *space-saving* algorithm (Metwally, Agrawal and El Abbadi, "Efficient Computation of Frequent
//! and Top-k Elements in Data Streams", 2005).

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Mutex;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{Algorithm, Store, Verdict};

use crate::lock;
use crate::observed::{Observed, Observer};

/// How many locks the counted keys are spread over.
const SHARDS: usize = 16;
/// The most bytes of a key that are kept to be shown. Longer keys are still counted apart, by their
/// hashes.
const SHOWN_BYTES: usize = 128;

/// A store over any other that counts which keys each limit denies.
///
/// It counts a fixed number of keys by the *space-saving* algorithm (Metwally, Agrawal and El
/// Abbadi, 2005): a new key replaces the key with the fewest denials, and starts at that key's
/// count. Keys are spread over 16 lists. A key that receives more than one in `keys / 16` denials
/// of its list is therefore always listed, and a count is too high by at most [`Denied::over`].
/// Requests that are allowed cost nothing extra. What only a [shadow
/// limit](ratelimit_core::Limit::shadow) would have denied was allowed, and is not counted.
///
/// ```
/// use ratelimit_core::{FixedWindow, Limits, RateLimiter};
/// use ratelimit_layers::TopDenied;
/// use ratelimit_memory::MemoryStore;
///
/// let limits = Limits::builder().limit("login", FixedWindow::per_minute(2)).build()?;
/// let limiter = RateLimiter::new(limits, TopDenied::new(MemoryStore::new(), 1_000));
/// for _ in 0..5 {
///     limiter.check_now("mallory")?;
/// }
/// let top = limiter.store().top(10);
/// assert_eq!((&*top[0].limit, &*top[0].key, top[0].count), ("login", "mallory", 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type TopDenied<S> = Observed<S, DenialCounts>;

/// What a [`TopDenied`] has counted.
#[derive(Debug)]
pub struct DenialCounts {
    hasher: RandomState,
    shards: [Mutex<CountShard>; SHARDS],
    keys_per_shard: usize,
}

/// A key that was denied, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denied {
    /// The limit's name.
    pub limit: Box<str>,
    /// The denied key, cut to its first 128 bytes (at a character boundary).
    pub key: Box<str>,
    /// How many denials were counted since the store was made or last [forgot](TopDenied::forget).
    pub count: u64,
    /// By how many denials `count` may be too high.
    pub over: u64,
}

/// Some of the counted keys, by hash.
#[derive(Debug, Default)]
struct CountShard {
    counted: HashMap<u64, Denied>,
    /// The count and the hash of each key, fewest denials first.
    by_count: BTreeSet<(u64, u64)>,
}

impl<S> TopDenied<S> {
    /// Counts denials over `store`. It counts up to `keys` keys, rounded up to a multiple of 16, at
    /// least 16.
    #[must_use]
    pub fn new(store: S, keys: usize) -> Self {
        let (hasher, shards) = (RandomState::new(), Default::default());
        let keys_per_shard = keys.div_ceil(SHARDS).max(1);
        Self::around(store, DenialCounts { hasher, shards, keys_per_shard })
    }

    /// Returns the `most` keys with the most denials, in descending order.
    #[must_use]
    pub fn top(&self, most: usize) -> Vec<Denied> {
        let mut all = Vec::new();
        for shard in &self.observer.shards {
            all.extend(lock(shard).counted.values().cloned());
        }
        all.sort_by(|one, other| other.count.cmp(&one.count).then(one.key.cmp(&other.key)));
        all.truncate(most);
        all
    }

    /// Forgets all counts.
    pub fn forget(&self) {
        for shard in &self.observer.shards {
            *lock(shard) = CountShard::default();
        }
    }
}

impl DenialCounts {
    fn count<A: Algorithm>(&self, check: &Check<'_, A>) {
        let hash = self.hasher.hash_one((check.limit.fingerprint(), check.key));
        let position = usize::try_from(hash >> 32).unwrap_or_default() % self.shards.len();
        let mut shard = lock(&self.shards[position]);
        let CountShard { counted, by_count } = &mut *shard;
        let mut denied = if let Some(known) = counted.remove(&hash) {
            by_count.remove(&(known.count, hash));
            known
        } else {
            // A new key inherits the count of the key that it replaces, that with the fewest
            // denials: it may have had as many, forgotten since.
            let is_full = counted.len() >= self.keys_per_shard;
            let replaced = if is_full { by_count.pop_first() } else { None };
            let over = replaced.map_or(0, |(count, replaced)| {
                counted.remove(&replaced);
                count
            });
            let (limit, key) = (check.limit.name().into(), truncate_key(check.key).into());
            Denied { limit, key, count: over, over }
        };
        denied.count = denied.count.saturating_add(1);
        by_count.insert((denied.count, hash));
        counted.insert(hash, denied);
    }
}

/// The part of a key that is kept.
fn truncate_key(key: &str) -> &str {
    let end = (0..=SHOWN_BYTES.min(key.len())).rev().find(|end| key.is_char_boundary(*end));
    &key[..end.unwrap_or(0)]
}

impl Observer for DenialCounts {
    type Begun = ();

    fn begin<A: Algorithm>(&self, _: &Batch<'_, A>) {}

    fn end<A: Algorithm, S: Store<A>>(
        &self,
        _: &S,
        batch: &Batch<'_, A>,
        (): &(),
        said: Result<&Verdict, &S::Error>,
    ) {
        let Ok(verdict) = said else { return };
        if verdict.allowed() || batch.operation() != Op::Acquire {
            return;
        }
        let denied = verdict.denied_by().filter_map(|position| batch.checks().get(position));
        for check in denied.filter(|check| !check.limit.is_shadow()) {
            self.count(check);
        }
    }
}
