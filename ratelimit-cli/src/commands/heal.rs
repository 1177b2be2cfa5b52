//! `ratelimit heal`: frees keys whose states are from the future.

use std::cmp::Reverse;
use std::fmt::Write as _;

use ratelimit_core::{Limits, Policy};
use ratelimit_redis::{HealOptions, Healed};
use serde_json::json;

use crate::args::HealArgs;
use crate::failure::Failure;
use crate::policy;
use crate::store::{self, Keys, Redis, Remote, StoreUrl};
use crate::stored_key::StoredKey;
use crate::summary::{align, plain_table, push_table};
use crate::text::{count, duration, plural, printable};

/// How many states the table shows.
const MOST: usize = 20;
/// The number of characters of a caller's name that are shown.
const NAME_CHARS: usize = 48;

pub(super) fn run(args: &HealArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.policy)?;
    let redis = StoreUrl::lasting(&args.store, "heal")?;
    let mut healed = super::block_on(heal(args, &redis, &limits))?;
    healed.states.sort_unstable_by(|a, b| {
        Reverse(a.ahead_us)
            .cmp(&Reverse(b.ahead_us))
            .then_with(|| (&a.key, &a.limit).cmp(&(&b.key, &b.limit)))
    });
    let caller = |key: &str| match StoredKey::read(key, &args.prefix, &redis.tag) {
        StoredKey::Identifier(name) => Some(name),
        StoredKey::Hidden | StoredKey::Other => None,
    };
    let out = if args.json { lines(args, &healed, caller) } else { table(args, &healed, caller) };
    super::print(out.as_bytes())?;
    Ok(0)
}

async fn heal(args: &HealArgs, redis: &Redis, limits: &Limits<Policy>) -> Result<Healed, Failure> {
    // Keys are read as they are, so that those of a store with a secret are healed without it.
    let keys = Keys { prefix: &args.prefix, secret: None };
    let store = store::connect(redis, keys, limits).await?;
    let options =
        HealOptions { dry_run: args.dry_run, max_keys: args.max_keys, ..HealOptions::default() };
    let healed = match &store {
        Remote::Lua(store) => store.heal(limits, options).await,
        Remote::Cas(store) => store.heal(limits, options).await,
        Remote::Multi(store) => store.heal(limits, options).await,
    };
    let what = format!("--store {redis}: the user needs SCAN on {}:*", args.prefix);
    healed.map_err(|error| Failure::store(&what, &error))
}

fn table(args: &HealArgs, healed: &Healed, caller: impl Fn(&str) -> Option<String>) -> String {
    let mut table = plain_table();
    table.set_header(["caller", "limit", "locked for"]);
    for state in healed.states.iter().take(MOST) {
        let caller = caller(&state.key).unwrap_or_else(|| state.key.clone());
        let (name, time) = (printable(&caller, NAME_CHARS), duration(state.ahead_us));
        table.add_row([name, state.limit.clone(), time]);
    }
    align(&mut table, &[false, false, true]);
    let mut text = String::new();
    if !healed.states.is_empty() {
        push_table(&mut text, &table);
        text.push('\n');
    }
    // Writing into memory cannot fail.
    let _ = writeln!(
        text,
        "{} from the future{}, in {}",
        plural(healed.states.len() as u64, "state", "states"),
        if args.dry_run { ", none healed (--dry-run)" } else { ", cut to a full limit as of now" },
        plural(healed.keys, "key", "keys"),
    );
    if healed.states.len() > MOST {
        let _ = writeln!(text, "\nnote: the table shows the longest {MOST}; --json lists all");
    }
    if healed.skipped > 0 {
        let skipped = plural(healed.skipped, "key was", "keys were");
        let _ = writeln!(
            text,
            "\nnote: {skipped} skipped, which no limit of the policy wrote or others kept changing"
        );
    }
    if healed.is_cut {
        let _ = writeln!(
            text,
            "\nnote: there are more keys than the {} that were looked at; raise --max-keys",
            count(args.max_keys)
        );
    }
    text
}

fn lines(args: &HealArgs, healed: &Healed, caller: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::new();
    for state in &healed.states {
        let line = json!({
            "value": caller(&state.key), "stored_key": state.key, "name": state.limit,
            "ahead_us": state.ahead_us,
        });
        text.push_str(&line.to_string());
        text.push('\n');
    }
    let totals = json!({
        "states": healed.states.len(), "dry_run": args.dry_run, "keys": healed.keys,
        "skipped": healed.skipped, "max_keys_reached": healed.is_cut,
    });
    text + &totals.to_string() + "\n"
}
