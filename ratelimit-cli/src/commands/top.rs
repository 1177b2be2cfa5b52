//! `ratelimit top`: who is limited now.

use std::collections::{BTreeSet, HashMap, HashSet};

use futures_util::future::join_all;
use ratelimit_core::store::Op;
use ratelimit_core::{
    Algorithm as _, AnyAlgorithm, Decision, ErrorKind, Limit, Limits, Numbers, Record, Store,
    StoreError as _,
};
use ratelimit_redis::{Mode, RedisError, RedisStore, StoredKey};
use ratelimit_replay::caller::key_as_arguments;
use ratelimit_replay::decision_line::json_lines;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::policy;
use ratelimit_replay::records::{described, fields};
use ratelimit_replay::summary::NAME_CHARS;
use ratelimit_replay::table::{TextTable, list};
use ratelimit_replay::text::{count, duration, plural, printable, quote};
use serde_json::json;

use super::record::now;
use super::unknown_states;
use crate::args::TopArgs;
use crate::inputs;
use crate::interrupt::Interrupt;
use crate::store::{self, Redis, in_each_mode, may_scan};

/// How many callers are asked about at the same time.
const AT_ONCE: usize = 32;

/// What a scan found.
#[derive(Default)]
struct ScanResult {
    keys: u64,
    callers: HashSet<String>,
    hidden: u64,
    /// How many callers have a state that no limit wrote, or a record that cannot be read.
    skipped: u64,
    /// The names of states that no limit of the policy has.
    unknown: BTreeSet<String>,
    /// Whether there may be more keys than were looked at.
    is_cut: bool,
    /// What kept the scan from a part of the keys.
    failed: Option<Failure>,
    limited: Vec<Limited>,
    /// The records that stand, by the position of the limit and its caller.
    records: HashMap<(usize, String), Record<AnyAlgorithm>>,
}

/// A caller that a limit denies now.
struct Limited {
    /// The position of the limit in the policy.
    place: usize,
    caller: String,
    /// Until its request would be admitted; `None` for never.
    wait_us: Option<u64>,
    decision: Decision,
}

impl ScanResult {
    fn record_of(&self, limited: &Limited) -> Option<&Record<AnyAlgorithm>> {
        self.records.get(&(limited.place, limited.caller.clone()))
    }
}

pub(super) fn run(args: &TopArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.scan.policy)?;
    let numbers = policy::numbers(&args.own.numbers, &limits)?;
    let redis = &*Redis::lasting(&args.scan.store, "list")?;
    let interrupt = Interrupt::catch()?;
    let mut found = store::block_on(async {
        let store = store::connect(redis, &args.scan.prefix, None, &limits).await?;
        in_each_mode!(&store, store => scan(args, redis, (&limits, numbers.as_ref()), &interrupt, store).await)
    })?;
    // A limit denies for ever whatever is above its capacity. That is no news about a caller of
    // which it has neither a state nor a record.
    let mut limited = std::mem::take(&mut found.limited);
    limited.retain(|one| {
        one.wait_us.is_some() || one.decision.reset_after_us > 0 || found.record_of(one).is_some()
    });
    // The longest wait first.
    let wait_us = |one: &Limited| one.wait_us.unwrap_or(u64::MAX);
    limited.sort_unstable_by(|a, b| {
        (wait_us(b), a.place, &a.caller).cmp(&(wait_us(a), b.place, &b.caller))
    });
    found.limited = limited;
    let out =
        if args.scan.json { lines(args, &limits, &found) } else { table(args, &limits, &found) };
    super::print(out)?;
    interrupt.check()?;
    found.failed.map_or(Ok(0), Err)
}

/// Looks at the keys of all servers, in steps with pauses. A failure does not lose what was found
/// before it, nor the keys of other servers.
async fn scan<M: Mode>(
    args: &TopArgs,
    redis: &Redis,
    (limits, numbers): (&Limits<AnyAlgorithm>, Option<&Numbers>),
    interrupt: &Interrupt,
    store: &RedisStore<M>,
) -> Result<ScanResult, Failure> {
    let failed = |error| Failure::store(&may_scan(redis, &args.scan.prefix), &error);
    let mut found = ScanResult::default();
    let limits_asked = limits.iter().map(|limit| numbers.map_or(limit, |own| own.limit_of(limit)));
    let limits_asked: Vec<_> = limits_asked.collect();
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
            let asked = callers.iter().map(|caller| peek(args, store, &limits_asked, caller));
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
            break;
        }
    }
    found.is_cut = scan.is_cut();
    match found.failed {
        Some(failure) if found.keys == 0 => Err(failure),
        _ => Ok(found),
    }
}

/// The limits that deny a request of this caller now. A key does not tell the name of its
/// identifier, so every limit is asked: one that has no state for it admits.
async fn peek<S: Store<AnyAlgorithm, Error = RedisError>>(
    args: &TopArgs,
    store: &S,
    limits: &[&Limit<AnyAlgorithm>],
    caller: &str,
) -> Result<Vec<Limited>, RedisError> {
    let keyed: Vec<_> = limits.iter().map(|limit| (*limit, caller.into())).collect();
    let verdict = store::apply_to(store, &keyed, Op::Peek, args.cost).await?;
    let denied = verdict.decisions().iter().enumerate().filter(|(_, decision)| !decision.allowed);
    let limited = denied.map(|(place, &decision)| {
        let wait_us = decision.retry_after_us;
        Limited { place, caller: caller.to_owned(), wait_us, decision }
    });
    Ok(limited.collect())
}

/// What the reader must know before trusting the list.
fn notes(args: &TopArgs, limits: &Limits<AnyAlgorithm>, found: &ScanResult) -> Vec<String> {
    let mut notes = Vec::new();
    let is_given = |name: &str| args.own.numbers.iter().any(|(limit, _)| limit == name);
    let open = limits.iter().filter(|limit| limit.max().is_some() && !is_given(limit.name()));
    let open: Vec<_> = open.map(Limit::name).collect();
    if !open.is_empty() {
        notes.push(format!(
            "requests may have numbers of their own under {}, which no state tells: all callers are judged by the \
             limit's; look by those of a plan with --numbers LIMIT=NUMBERS",
            open.join(", ")
        ));
    }
    let below = limits.iter().filter(|limit| limit.algorithm().capacity() < args.cost);
    let below: Vec<_> = below.map(Limit::name).collect();
    if !below.is_empty() {
        notes.push(format!(
            "a cost of {} is above the capacity of {}, which denies it to every caller: those are listed that have a state or \
             a record",
            count(args.cost),
            below.join(", ")
        ));
    }
    if !found.records.is_empty() {
        let stand = plural(found.records.len() as u64, "record stands", "records stand");
        notes.push(format!("{stand} under these limits; list them by ratelimit record list"));
    }
    if found.failed.is_some() {
        notes.push("stopped by an error: this is what was found before it".to_owned());
    }
    if found.is_cut {
        notes.push(format!(
            "there are more keys than the {} that were looked at; raise --max-keys to see them",
            count(args.scan.max_keys)
        ));
    }
    if found.skipped > 0 {
        let skipped = plural(found.skipped, "caller was", "callers were");
        notes.push(format!(
            "{skipped} skipped, with a state that no limit of the policy wrote, or a record of a newer version; inspect names it"
        ));
    }
    notes.extend(unknown_states(&found.unknown, "states were not looked at:"));
    if found.keys == 0 {
        let prefix = quote(&args.scan.prefix, 60);
        notes.push(format!(
            "no key has the prefix {prefix}; if the service uses another prefix, name it with --prefix"
        ));
    }
    if found.hidden > 0 {
        notes.push(format!(
            "{} a hash of an identifier, because the store has a secret or the identifier is longer than 128 bytes. \
             Whether such a caller is limited cannot be told from a key. Ask by name, with the secret if there is \
             one: ratelimit inspect KEY --policy {} --store URL --secret-file FILE",
            plural(found.hidden, "key holds", "keys hold"),
            args.scan.policy.display(),
        ));
    }
    notes
}

fn table(args: &TopArgs, limits: &Limits<AnyAlgorithm>, found: &ScanResult) -> String {
    let rows = found.limited.iter().take(args.most).map(|limited| {
        let Limited { place, caller, wait_us, decision } = limited;
        let limit = &limits.as_slice()[*place];
        let record = found.record_of(limited).map_or(String::new(), described);
        let shadow = if limit.is_shadow() { " (shadow)" } else { "" };
        let locked_out = if is_locked_out(limit, decision) { " (locked out)" } else { "" };
        let mut row = vec![
            printable(&key_as_arguments(limit, caller), NAME_CHARS),
            format!("{}{locked_out}{shadow}", limit.name()),
            count(decision.remaining),
            count(decision.limit),
            wait_us.map_or("never".to_owned(), duration),
        ];
        row.extend((!found.records.is_empty()).then_some(record));
        row
    });
    let mut columns = vec!["caller", "limit", "#left", "#of", "#retry in"];
    columns.extend((!found.records.is_empty()).then_some("record"));
    let table = TextTable::new(&columns, rows);
    let hidden = match found.hidden {
        0 => String::new(),
        hidden => format!("; cannot tell for {}", plural(hidden, "hashed key", "hashed keys")),
    };
    let summary = format!(
        "{} limited now, of {} in {}{hidden}",
        count(found.limited.len() as u64),
        plural(found.callers.len() as u64, "caller", "callers"),
        plural(found.keys, "key", "keys"),
    );
    list(&table, &summary, &notes(args, limits, found))
}

/// Whether a lockout blocks the caller, so that no cost is admitted.
fn is_locked_out(limit: &Limit<AnyAlgorithm>, decision: &Decision) -> bool {
    matches!(limit.algorithm(), AnyAlgorithm::Lockout(_)) && decision.remaining == 0
}

fn lines(args: &TopArgs, limits: &Limits<AnyAlgorithm>, found: &ScanResult) -> String {
    let line = |limited: &Limited| {
        let Limited { place, caller, wait_us, decision } = limited;
        let limit = &limits.as_slice()[*place];
        json!({
            "value": caller, "identifiers": limit.identifier_names().collect::<Vec<_>>(),
            "name": limit.name(), "shadow": limit.is_shadow(), "limit": decision.limit,
            "remaining": decision.remaining, "retry_after_us": wait_us,
            "locked_out": is_locked_out(limit, decision),
            "record": found.record_of(limited).map(fields),
        })
    };
    let totals = json!({
        "limited": found.limited.len(), "callers": found.callers.len(), "keys": found.keys,
        "hidden_keys": found.hidden, "records": found.records.len(), "skipped": found.skipped, "unknown": found.unknown, "max_keys_reached": found.is_cut,
        "error": found.failed.as_ref().map(Failure::to_string),
    });
    json_lines(found.limited.iter().take(args.most).map(line).chain([totals]))
}
