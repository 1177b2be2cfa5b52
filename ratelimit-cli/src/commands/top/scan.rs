//! [`scan`]: looks through the keys of a store for the callers that a limit denies now.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Instant;

use futures_util::future::join_all;
use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::Op;
use ratelimit_core::{
    AnyAlgorithm, Decision, ErrorKind, Limit, Limits, Numbers, Record, StoreError as _,
};
use ratelimit_redis::{Mode, RedisError, RedisStore, StoredKey};

use super::charges::Charged;
use crate::args::TopArgs;
use crate::commands::record::now;
use crate::interrupt::Interrupt;
use crate::store::{self, Redis, scan_failed};
use ratelimit_replay::failure::Failure;

/// How many callers are asked about at the same time.
const AT_ONCE: usize = 32;

/// What is looked at, and by which limits.
pub(super) struct Subject<'s> {
    pub(super) args: &'s TopArgs,
    pub(super) redis: &'s Redis,
    pub(super) limits: &'s Limits<AnyAlgorithm>,
    pub(super) numbers: Option<&'s Numbers>,
    pub(super) interrupt: &'s Interrupt,
}

impl Subject<'_> {
    /// A limit of the policy, at the numbers of the arguments if there are some.
    pub(super) fn limit(&self, place: usize) -> &Limit<AnyAlgorithm> {
        let limit = &self.limits.as_slice()[place];
        self.numbers.map_or(limit, |own| own.limit_of(limit))
    }
}

/// What a scan found.
#[derive(Default)]
pub(super) struct ScanResult {
    pub(super) keys: u64,
    pub(super) callers: HashSet<String>,
    pub(super) hidden: u64,
    /// How many callers have a state that no limit wrote, or a record that cannot be read.
    pub(super) skipped: u64,
    /// The names of states that no limit of the policy has.
    pub(super) unknown: BTreeSet<String>,
    /// Whether there may be more keys than were looked at.
    pub(super) is_cut: bool,
    /// What kept the scan from a part of the keys.
    pub(super) failed: Option<Failure>,
    /// The longest wait first.
    pub(super) limited: Vec<Limited>,
    /// The records that stand, by the position of the limit and its caller.
    pub(super) records: HashMap<(usize, String), Record<AnyAlgorithm>>,
}

/// A caller that a limit denies now.
pub(super) struct Limited {
    /// The position of the limit in the policy.
    pub(super) place: usize,
    pub(super) caller: String,
    /// Until its request would be admitted; `None` for never.
    pub(super) wait_us: Option<u64>,
    pub(super) decision: Decision,
    /// When it was asked about.
    pub(super) at: Instant,
    /// Its state, if the scan is one of several.
    pub(super) state: Option<AnyState>,
    /// What the limit has charged it since the scan before, if that one found it limited as well.
    pub(super) charged: Option<Charged>,
}

impl ScanResult {
    pub(super) fn record_of(&self, limited: &Limited) -> Option<&Record<AnyAlgorithm>> {
        self.records.get(&(limited.place, limited.caller.clone()))
    }

    /// Leaves out what is no news, and puts the longest wait first.
    fn sort(&mut self) {
        // A limit denies for ever whatever is above its capacity. That is no news about a caller
        // of which it has neither a state nor a record.
        let mut limited = std::mem::take(&mut self.limited);
        limited.retain(|one| {
            one.wait_us.is_some()
                || one.decision.reset_after_us > 0
                || self.record_of(one).is_some()
        });
        let wait_us = |one: &Limited| one.wait_us.unwrap_or(u64::MAX);
        limited.sort_unstable_by(|a, b| {
            (wait_us(b), a.place, &a.caller).cmp(&(wait_us(a), b.place, &b.caller))
        });
        self.limited = limited;
    }
}

/// Looks at the keys of all servers, in steps with pauses. A failure does not lose what was found
/// before it, nor the keys of other servers.
pub(super) async fn scan<M: Mode>(
    subject: &Subject<'_>,
    store: &RedisStore<M>,
) -> Result<ScanResult, Failure> {
    let Subject { args, redis, limits, interrupt, .. } = *subject;
    let failed = |error: RedisError| scan_failed(redis, &args.scan.prefix, &error);
    let mut found = ScanResult::default();
    let asked: Vec<_> = (0..limits.as_slice().len()).map(|place| subject.limit(place)).collect();
    let looks = limits.iter().any(Limit::is_overridable);
    let mut scan = store.scan(args.scan.max_keys, args.count, args.pause).await.map_err(failed)?;
    'scan: loop {
        let keys = match scan.next().await.map_err(failed) {
            Ok(Some(keys)) => keys,
            Ok(None) => break,
            // The next step is on the next server.
            Err(failure) => {
                found.failed.get_or_insert(failure);
                continue;
            }
        };
        found.keys += keys.len() as u64;
        let mut fresh = Vec::new();
        for key in &keys {
            match store.read_key(key) {
                StoredKey::Identifier(name) => {
                    fresh.extend(found.callers.insert(name.clone()).then_some(name));
                }
                StoredKey::Hidden => found.hidden += 1,
                _ => {}
            }
        }
        for keys in keys.chunks(AT_ONCE) {
            let asked = keys.iter().filter(|_| looks).map(|key| store.records_in(limits, key));
            for records in join_all(asked).await {
                match records {
                    Ok(Some((StoredKey::Identifier(name), records))) => {
                        fresh.extend(found.callers.insert(name.clone()).then(|| name.clone()));
                        let standing =
                            records.into_iter().filter(|(_, record)| record.stands_at(now()));
                        let placed = standing.filter_map(|(limit, record)| {
                            let place = limits.iter().position(|one| one.name() == limit.name())?;
                            Some(((place, name.clone()), record))
                        });
                        found.records.extend(placed);
                    }
                    Ok(Some(_)) => found.hidden += 1,
                    Ok(None) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => found.skipped += 1,
                    Err(error) => {
                        found.failed.get_or_insert(failed(error));
                        break 'scan;
                    }
                }
            }
            for names in join_all(keys.iter().map(|key| store.unknown_states(limits, key))).await {
                match names.map_err(failed) {
                    Ok(names) => found.unknown.extend(names),
                    Err(failure) => {
                        found.failed.get_or_insert(failure);
                        break 'scan;
                    }
                }
            }
        }
        for callers in fresh.chunks(AT_ONCE) {
            let asked = callers.iter().map(|caller| peek(args, store, &asked, caller));
            for limited in join_all(asked).await {
                let what = format!("--store {}", redis.url);
                match limited {
                    Ok(limited) => found.limited.extend(limited),
                    Err(error) if error.kind() == ErrorKind::Corrupt => found.skipped += 1,
                    Err(error) => {
                        found.failed.get_or_insert(Failure::store(&what, &error));
                        break 'scan;
                    }
                }
            }
        }
        if interrupt.is_raised() {
            found.failed.get_or_insert(Failure::Interrupted);
            break;
        }
    }
    found.is_cut = scan.is_cut();
    match found.failed {
        Some(failure) if found.keys == 0 => Err(failure),
        _ => {
            found.sort();
            Ok(found)
        }
    }
}

/// The limits that deny a request of this caller now. A key does not tell the name of its
/// identifier, so every limit is asked: one that has no state for it admits.
async fn peek<M: Mode>(
    args: &TopArgs,
    store: &RedisStore<M>,
    limits: &[&Limit<AnyAlgorithm>],
    caller: &str,
) -> Result<Vec<Limited>, RedisError> {
    let keyed: Vec<_> = limits.iter().map(|limit| (*limit, caller.into())).collect();
    let verdict = store::apply_to(store, &keyed, Op::Peek, args.cost).await?;
    let at = Instant::now();
    let mut limited = Vec::new();
    for (place, &decision) in verdict.decisions().iter().enumerate() {
        if decision.allowed {
            continue;
        }
        let state = match args.watch {
            Some(_) => store.state(limits[place], caller).await?,
            None => None,
        };
        let wait_us = decision.retry_after_us;
        let (caller, charged) = (caller.to_owned(), None);
        limited.push(Limited { place, caller, wait_us, decision, at, state, charged });
    }
    Ok(limited)
}
