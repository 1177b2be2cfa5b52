//! [`RedisStore::heal`]: frees the keys whose states are from the future.

use std::collections::BTreeSet;
use std::time::Duration;

use ratelimit_core::{Algorithm, ErrorKind, Limit, Limits, StoreError};

use crate::concurrent::all;
use crate::connection::{Argument, Connection};
use crate::error::{RedisError, Result};
use crate::store::{Mode, RedisStore, cut};

/// How many keys are looked at concurrently.
const AT_ONCE: usize = 32;

/// How often a key is looked at again, if others change it meanwhile.
const HEALS: usize = 32;

/// How [`RedisStore::heal`] looks through the keys of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealOptions {
    /// Find the states, and change nothing.
    pub dry_run: bool,
    /// Stop after this many keys of the store.
    pub max_keys: u64,
    /// How many keys a server looks at in one step.
    pub count: u64,
    /// The pause between two steps, in which the server serves other clients.
    pub pause: Duration,
}

impl Default for HealOptions {
    /// Heals, and stops after 100,000 keys: 500 per step, with pauses of 5 ms.
    fn default() -> Self {
        Self { dry_run: false, max_keys: 100_000, count: 500, pause: Duration::from_millis(5) }
    }
}

/// What [`RedisStore::heal`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Healed {
    /// The states from the future, each healed unless it was a dry run.
    pub states: Vec<HealedState>,
    /// How many keys were looked at.
    pub keys: u64,
    /// How many of them hold what no limit wrote, or could not be changed for all that others
    /// charge.
    pub skipped: u64,
    /// The [state names](ratelimit_core::Limit::state_name) of limits that have states there and
    /// are not among those that were asked for. Their states stay as they are.
    pub unknown: BTreeSet<String>,
    /// Whether there may be more keys than were looked at.
    pub is_cut: bool,
}

/// A state from the future.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HealedState {
    /// The key on the server.
    pub key: String,
    /// The limit's name.
    pub limit: String,
    /// By how much longer the state would have held its key than a full limit does, in
    /// microseconds.
    pub ahead_us: u64,
}

impl<M, C: Connection> RedisStore<M, C> {
    /// Looks through the keys of the store for states of these limits that are from the future of
    /// their server's clock, and cuts each to a full limit as of now: nothing is left, and it
    /// recovers as from empty.
    ///
    /// Such states come about when a server's clock is set back, or when a replica takes over whose
    /// clock is behind. Each locks its key until the clock reaches its time. Cutting one never
    /// admits more than the limit. Requests go on meanwhile: each key is cut in one piece. A state
    /// that holds its key no longer than the limit takes to recover from empty stays as it is. So
    /// does one whose caller has a [record](ratelimit_core::Record) under the limit, and a bucket
    /// under a limit that [accepts](Limit::accepts_up_to) numbers of requests, unless its own time
    /// is in the future: slower numbers hold a key for longer. It is cut by the numbers of the
    /// limit.
    ///
    /// The user needs `+scan` besides the permissions of the mode. Keys that appear, move to
    /// another server or are past `max_keys` during the scan can be missed: run it again.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use ratelimit_core::{Limits, AnyAlgorithm};
    /// use ratelimit_redis::{HealOptions, RedisStore};
    ///
    /// let limits = Limits::<AnyAlgorithm>::new([ratelimit_core::Limit::new("api", "gcra 10/s".parse()?)?])?;
    /// let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
    /// let healed = store.heal(&limits, HealOptions::default()).await?;
    /// println!("{} of {} keys were locked", healed.states.len(), healed.keys);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The first error of a server. What was healed before it stays healed.
    pub async fn heal<A: Algorithm>(
        &self,
        limits: &Limits<A>,
        options: HealOptions,
    ) -> Result<Healed>
    where
        M: Mode<A>,
    {
        let mut healed = Healed::default();
        let mut scan = self.scan(options.max_keys, options.count, options.pause).await?;
        while let Some(keys) = scan.next().await? {
            healed.keys += keys.len() as u64;
            for keys in keys.chunks(AT_ONCE) {
                for names in all(keys.iter().map(|key| self.unknown_states(limits, key))).await {
                    healed.unknown.extend(names?);
                }
                let found = keys.iter().map(|key| self.heal_key(limits, key, options.dry_run));
                for (key, found) in keys.iter().zip(all(found).await) {
                    let named = |(position, ahead_us): (usize, u64)| {
                        let limit = limits.as_slice().get(position)?.name().to_owned();
                        Some(HealedState { key: key.clone(), limit, ahead_us })
                    };
                    match found {
                        Ok(found) => healed.states.extend(found.into_iter().filter_map(named)),
                        Err(error)
                            if matches!(
                                error.kind(),
                                ErrorKind::Corrupt | ErrorKind::Contended
                            ) =>
                        {
                            healed.skipped += 1;
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        healed.is_cut = scan.is_cut();
        Ok(healed)
    }

    /// The state names of limits under which the identifier of a key has a record. Under its
    /// numbers a state may rightly hold its key for longer.
    async fn recorded<A: Algorithm>(
        &self,
        limits: &Limits<A>,
        key: &str,
    ) -> Result<BTreeSet<String>> {
        let beside = self.inner.keys.records_beside(key);
        let Some(records) = beside.filter(|_| limits.iter().any(Limit::is_overridable)) else {
            return Ok(BTreeSet::new());
        };
        let words = ["HGETALL", &records].map(Argument::Text);
        let reply = self.inner.connection.send(&records, &words, self.inner.deadline()).await?;
        let fields = reply.strings().unwrap_or_default().into_iter().step_by(2);
        Ok(fields.map(|field| String::from_utf8_lossy(field).into_owned()).collect())
    }

    /// Cuts the states of these limits under a key that are from the future, or only finds them:
    /// the position of each limit that has one, and by how much longer the state would hold its key
    /// than a full limit.
    async fn heal_key<A: Algorithm>(
        &self,
        limits: &Limits<A>,
        key: &str,
        dry_run: bool,
    ) -> Result<Vec<(usize, u64)>>
    where
        M: Mode<A>,
    {
        let lies_there = |(_, limit): &(usize, &Limit<A>)| {
            let keys = M::keys_of(self, limit, "");
            keys.iter().any(|own| self.inner.keys.lie_alike(own, key))
        };
        let recorded = self.recorded(limits, key).await?;
        let has_none = |(_, limit): &(usize, &Limit<A>)| !recorded.contains(limit.state_name());
        let limits = limits.iter().enumerate().filter(lies_there).filter(has_none);
        let (positions, limits): (Vec<_>, Vec<_>) = limits.unzip();
        if limits.is_empty() {
            return Ok(Vec::new());
        }
        let mut longest_us = vec![0; limits.len()];
        // What others change meanwhile is looked at again.
        for _ in 0..HEALS {
            let deadline = self.inner.deadline();
            let states = M::read_at(self, &limits, key, deadline).await?;
            let cuts = limits.iter().zip(&states.states).zip(&mut longest_us);
            let full: Vec<_> = cuts
                .map(|((limit, state), longest_us)| {
                    let (ahead_us, full) = cut(limit, state.as_ref(), states.now)?;
                    *longest_us = ahead_us.max(*longest_us);
                    Some(full)
                })
                .collect();
            if dry_run || full.iter().all(Option::is_none) {
                let found = positions.into_iter().zip(longest_us);
                return Ok(found.filter(|(_, ahead_us)| *ahead_us > 0).collect());
            }
            M::replace_at(self, &limits, key, states, full, deadline).await?;
        }
        Err(RedisError::Contended { attempts: HEALS })
    }
}
