//! `ratelimit top`: who is limited now.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;

use futures_util::future::join_all;
use ratelimit_core::{Decision, Limits, Op, Policy};
use serde_json::json;
use tokio::time::sleep;

use crate::args::TopArgs;
use crate::bench::Servers;
use crate::caller::joined_names;
use crate::failure::Failure;
use crate::interrupt::{self, Interrupt};
use crate::policy;
use crate::store::{self, Keys, Redis, Remote, StoreUrl};
use crate::stored_key::StoredKey;
use crate::summary::{align, plain_table, push_table};
use crate::text::{count, duration, plural, printable, quoted};

/// How many callers are asked about at the same time.
const AT_ONCE: usize = 32;
/// The number of characters of a caller's name that are shown.
const NAME_CHARS: usize = 48;

/// What a scan found.
#[derive(Default)]
struct Found {
    keys: u64,
    callers: HashSet<String>,
    hidden: u64,
    /// Whether there may be more keys than were looked at.
    is_cut: bool,
    limited: Vec<Limited>,
    /// Where there are no keys: the prefixes of keys that may be another limiter's.
    other_prefixes: BTreeSet<String>,
}

/// A caller that a limit denies now.
struct Limited {
    /// The position of the limit in the policy.
    place: usize,
    caller: String,
    decision: Decision,
}

pub(super) fn run(args: &TopArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.policy)?;
    let redis = &*StoreUrl::lasting(&args.store, "list")?;
    let interrupt = Interrupt::catch()?;
    let mut found = super::block_on(scan(args, redis, &limits, &interrupt))?;
    // The longest wait first; a request that never fits has no wait.
    found.limited.sort_unstable_by(|a, b| {
        let wait = |limited: &Limited| limited.decision.retry_after_us.unwrap_or(u64::MAX);
        Reverse(wait(a))
            .cmp(&Reverse(wait(b)))
            .then_with(|| (a.place, &a.caller).cmp(&(b.place, &b.caller)))
    });
    let out = if args.json { lines(args, &limits, &found) } else { table(args, &limits, &found) };
    super::print(out.as_bytes())?;
    Ok(if interrupt.is_raised() { interrupt::EXIT_CODE } else { 0 })
}

/// Looks at the keys of all servers, in steps with pauses.
async fn scan(
    args: &TopArgs,
    redis: &Redis,
    limits: &Limits<Policy>,
    interrupt: &Interrupt,
) -> Result<Found, Failure> {
    let keys = Keys { prefix: &args.prefix, secret: None };
    let store = store::connect(redis, keys, limits).await?;
    let (plain, _) = store::split_tag(&args.store)?;
    let servers = Servers::open(redis, &plain).await?;
    let failed = |told: String| {
        Failure::Store(format!(
            "--store {}: {told}; the user needs SCAN on {}:*",
            redis, args.prefix
        ))
    };
    let mut found = Found::default();
    // A version is a number, so that `rl` does not find the keys of `rl:bench-…`.
    let pattern = format!("{}:[0-9]", literally(&args.prefix));
    for node in servers.nodes().await.map_err(failed)? {
        let mut cursor = "0".to_owned();
        loop {
            let (next, keys) = node.scan(&cursor, &pattern, args.count).await.map_err(failed)?;
            let room = usize::try_from(args.max_keys - found.keys).unwrap_or(usize::MAX);
            found.is_cut |= keys.len() > room;
            let mut fresh = Vec::new();
            for key in keys.iter().take(room) {
                found.keys += 1;
                match StoredKey::read(key, &args.prefix, &redis.tag) {
                    StoredKey::Identifier(name) if !found.callers.contains(&name) => {
                        found.callers.insert(name.clone());
                        fresh.push(name);
                    }
                    StoredKey::Hidden => found.hidden += 1,
                    StoredKey::Identifier(_) | StoredKey::Other => {}
                }
            }
            for callers in fresh.chunks(AT_ONCE) {
                let asked = callers.iter().map(|caller| peek(args, &store, limits, caller));
                for limited in join_all(asked).await {
                    let what = format!("--store {redis}");
                    found.limited.extend(limited.map_err(|error| Failure::store(&what, &error))?);
                }
            }
            if next == "0" || interrupt.is_raised() {
                break;
            }
            if found.keys >= args.max_keys {
                found.is_cut = true;
                break;
            }
            cursor = next;
            sleep(args.pause).await;
        }
    }
    if found.keys == 0 {
        found.other_prefixes = other_prefixes(args, &servers, interrupt).await.map_err(failed)?;
    }
    Ok(found)
}

/// The prefixes of the first keys that look like a limiter's.
async fn other_prefixes(
    args: &TopArgs,
    servers: &Servers,
    interrupt: &Interrupt,
) -> Result<BTreeSet<String>, String> {
    let mut prefixes = BTreeSet::new();
    for node in servers.nodes().await? {
        let (mut cursor, mut examined) = ("0".to_owned(), 0);
        loop {
            let (next, keys) = node.scan(&cursor, "*:[0-9]:*{", args.count).await?;
            prefixes
                .extend(keys.iter().filter_map(|key| StoredKey::prefix(key)).map(str::to_owned));
            examined += args.count;
            if next == "0"
                || !prefixes.is_empty()
                || examined >= args.max_keys
                || interrupt.is_raised()
            {
                break;
            }
            cursor = next;
            sleep(args.pause).await;
        }
    }
    Ok(prefixes)
}

/// A pattern of SCAN that matches this text only.
fn literally(text: &str) -> String {
    let mut pattern = String::new();
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

/// The limits that deny a request of this caller now. A key does not tell the name of its identifier, so every limit is
/// asked: one that has no state for it admits.
async fn peek(
    args: &TopArgs,
    store: &Remote,
    limits: &Limits<Policy>,
    caller: &str,
) -> Result<Vec<Limited>, ratelimit_redis::RedisError> {
    let keyed: Vec<_> = limits.iter().map(|limit| (limit, caller.into())).collect();
    let verdict = store.apply_to(&keyed, Op::Peek, args.cost).await?;
    let denied = verdict.decisions().iter().enumerate().filter(|(_, decision)| !decision.allowed);
    // A cost above the capacity is denied to everyone, and no news about this caller.
    let denied = denied.filter(|(_, decision)| decision.retry_after_us.is_some());
    Ok(denied
        .map(|(place, decision)| Limited { place, caller: caller.to_owned(), decision: *decision })
        .collect())
}

/// What the reader must know before trusting the list.
fn notes(args: &TopArgs, found: &Found) -> Vec<String> {
    let mut notes = Vec::new();
    if found.is_cut {
        notes.push(format!(
            "there are more keys than the {} that were looked at; raise --max-keys to see them",
            count(args.max_keys)
        ));
    }
    if found.keys == 0 {
        let others: Vec<_> = found.other_prefixes.iter().map(|prefix| quoted(prefix, 60)).collect();
        notes.push(match &others[..] {
            [] => format!("no key has the prefix {}", quoted(&args.prefix, 60)),
            _ => format!(
                "no key has the prefix {}; there are keys under {}, which --prefix would name",
                quoted(&args.prefix, 60),
                others.join(", ")
            ),
        });
    }
    if found.hidden > 0 {
        notes.push(format!(
            "{} a hash of an identifier, because the store has a secret or the identifier is longer than 128 bytes. \
             Whether such a caller is limited cannot be told from a key. Ask by name, with the secret if there is \
             one: ratelimit inspect KEY --policy {} --store URL --secret-file FILE",
            plural(found.hidden, "key holds", "keys hold"),
            args.policy.display(),
        ));
    }
    notes
}

fn table(args: &TopArgs, limits: &Limits<Policy>, found: &Found) -> String {
    let mut table = plain_table();
    table.set_header(["caller", "limit", "left", "of", "try again in"]);
    for Limited { place, caller, decision } in found.limited.iter().take(args.most) {
        let Some(limit) = limits.as_slice().get(*place) else { continue };
        let shadow = if limit.is_shadow() { " (shadow)" } else { "" };
        table.add_row([
            format!("{}={}", joined_names(limit.identifier_names()), printable(caller, NAME_CHARS)),
            format!("{}{shadow}", limit.name()),
            count(decision.remaining),
            count(decision.limit),
            decision.retry_after_us.map_or_else(|| "never".to_owned(), duration),
        ]);
    }
    align(&mut table, &[false, false, true, true, true]);
    let mut text = String::new();
    if !found.limited.is_empty() {
        push_table(&mut text, &table);
        text.push('\n');
    }
    // Writing into memory cannot fail.
    let hidden = match found.hidden {
        0 => String::new(),
        hidden => format!("; cannot tell for {}", plural(hidden, "hashed key", "hashed keys")),
    };
    let _ = writeln!(
        text,
        "{} limited now, of {} in {}{hidden}",
        count(found.limited.len() as u64),
        plural(found.callers.len() as u64, "caller", "callers"),
        plural(found.keys, "key", "keys"),
    );
    for note in notes(args, found) {
        let _ = writeln!(text, "\nnote: {note}");
    }
    text
}

fn lines(args: &TopArgs, limits: &Limits<Policy>, found: &Found) -> String {
    let mut text = String::new();
    for Limited { place, caller, decision } in found.limited.iter().take(args.most) {
        let Some(limit) = limits.as_slice().get(*place) else { continue };
        let line = json!({
            "value": caller, "identifiers": limit.identifier_names().collect::<Vec<_>>(),
            "name": limit.name(), "shadow": limit.is_shadow(), "limit": decision.limit,
            "remaining": decision.remaining, "retry_after_us": decision.retry_after_us,
        });
        text.push_str(&line.to_string());
        text.push('\n');
    }
    let totals = json!({
        "limited": found.limited.len(), "callers": found.callers.len(), "keys": found.keys,
        "hidden_keys": found.hidden, "max_keys_reached": found.is_cut,
    });
    text + &totals.to_string() + "\n"
}
