//! `ratelimit heal`: frees keys whose states are from the future.

use ratelimit_redis::{HealOptions, Healed, HealedState, StoredKey};
use ratelimit_replay::decision_line::json_lines;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::summary::NAME_CHARS;
use ratelimit_replay::table::{TextTable, list};
use ratelimit_replay::text::{count, duration, plural, printable};
use serde_json::json;

use crate::args::HealArgs;
use crate::inputs;
use crate::store::{self, Redis, in_each_mode, scan_failed};

/// How many states the table shows.
const MOST: usize = 20;

pub(super) fn run(args: &HealArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.scan.policy)?;
    let redis = Redis::lasting(&args.scan.store, "heal")?;
    let scan = &args.scan;
    let options =
        HealOptions { dry_run: args.dry_run, max_keys: scan.max_keys, ..HealOptions::default() };
    let (store, mut healed) = store::block_on(async {
        // Keys are read as they are, so that those of a store with a secret are healed without it.
        let store = store::connect(&redis, &scan.prefix, None, &limits).await?;
        let healed = in_each_mode!(&store, store => store.heal(&limits, options).await);
        healed
            .map(|healed| (store, healed))
            .map_err(|error| scan_failed(&redis, &scan.prefix, &error))
    })?;
    healed.states.sort_unstable_by(|a, b| {
        (b.ahead_us, &a.key, &a.limit).cmp(&(a.ahead_us, &b.key, &b.limit))
    });
    let caller = |key: &str| match in_each_mode!(&store, store => store.read_key(key)) {
        StoredKey::Identifier(name) => Some(name),
        _ => None,
    };
    let out = if scan.json { lines(args, &healed, caller) } else { table(args, &healed, caller) };
    super::print(out)
}

fn table(args: &HealArgs, healed: &Healed, caller: impl Fn(&str) -> Option<String>) -> String {
    let rows = healed.states.iter().take(MOST).map(|state| {
        let caller = caller(&state.key).unwrap_or_else(|| state.key.clone());
        vec![printable(&caller, NAME_CHARS), state.limit.clone(), duration(state.ahead_us)]
    });
    let table = TextTable::new(&["caller", "limit", "#locked for"], rows);
    let summary = format!(
        "{} from the future{}, in {}",
        plural(healed.states.len() as u64, "state", "states"),
        if args.dry_run {
            ", none healed (--dry-run)"
        } else {
            ", cut to a used-up limit as of now"
        },
        plural(healed.keys, "key", "keys"),
    );
    let mut notes = Vec::new();
    if healed.states.len() > MOST {
        notes.push(format!("the table shows the longest {MOST}; --json lists all"));
    }
    if healed.skipped > 0 {
        let skipped = plural(healed.skipped, "key was", "keys were");
        notes.push(format!(
            "{skipped} skipped, which no limit of the policy wrote or others kept changing"
        ));
    }
    notes.extend(super::unknown_states(&healed.unknown, "states were left as they are:"));
    if healed.is_cut {
        notes.push(format!(
            "there are more keys than the {} that were looked at; raise --max-keys",
            count(args.scan.max_keys)
        ));
    }
    list(&table, &summary, &notes)
}

fn lines(args: &HealArgs, healed: &Healed, caller: impl Fn(&str) -> Option<String>) -> String {
    let line = |state: &HealedState| {
        json!({
            "value": caller(&state.key), "stored_key": state.key, "name": state.limit,
            "ahead_us": state.ahead_us,
        })
    };
    let totals = json!({
        "states": healed.states.len(), "dry_run": args.dry_run, "keys": healed.keys,
        "skipped": healed.skipped, "unknown": healed.unknown, "max_keys_reached": healed.is_cut,
    });
    json_lines(healed.states.iter().map(line).chain([totals]))
}
