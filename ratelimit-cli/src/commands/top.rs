//! `ratelimit top`: who is limited now.

use std::time::Instant;

use ratelimit_core::{Algorithm as _, AnyAlgorithm, Decision, Limit};
use ratelimit_replay::caller::key_as_arguments;
use ratelimit_replay::decision_line::json_lines;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::policy;
use ratelimit_replay::records::{described, fields};
use ratelimit_replay::summary::NAME_CHARS;
use ratelimit_replay::table::{TextTable, list};
use ratelimit_replay::text::{count, duration, plural, printable, quote};
use serde_json::json;

use self::charges::Charged;
use self::scan::{Limited, ScanResult, Subject, scan};
use super::record::now;
use super::unknown_states;
use crate::args::TopArgs;
use crate::inputs;
use crate::interrupt::Interrupt;
use crate::store::{self, Redis, in_each_mode};

mod charges;
mod scan;
mod screen;
mod watch;

/// How many callers a list shows unless told otherwise.
const MOST: usize = 20;

pub(super) fn run(args: &TopArgs) -> Result<u8, Failure> {
    let limits = &inputs::policy(&args.scan.policy)?;
    let numbers = policy::numbers(&args.own.numbers, limits)?;
    let redis = &*Redis::lasting(&args.scan.store, "list")?;
    let interrupt = &Interrupt::default();
    interrupt.catch()?;
    let subject = Subject { args, redis, limits, numbers: numbers.as_ref(), interrupt };
    if let Some(every) = args.watch {
        return watch::run(&subject, every);
    }
    let found = store::block_on(async {
        let store = store::connect(redis, &args.scan.prefix, None, limits).await?;
        in_each_mode!(&store, store => scan(&subject, store).await)
    })?;
    super::print(output(&subject, &found))?;
    interrupt.check()?;
    found.failed.map_or(Ok(0), Err)
}

/// What a scan found, as the arguments want it.
fn output(subject: &Subject<'_>, found: &ScanResult) -> String {
    if subject.args.scan.json { lines(subject, found) } else { table(subject, found) }
}

/// A caller that a limit denies, as tables show it.
struct Row {
    caller: String,
    limit: String,
    left: u64,
    of: u64,
    /// Until its request would be admitted, from the moment `at`; `None` for never.
    wait_us: Option<u64>,
    at: Instant,
    /// Tenths of a unit per second, as far as it is known.
    charged: Option<u64>,
    record: String,
}

/// The columns of a row, as [`TextTable`] wants them. The last two are only shown where they may
/// say something.
const COLUMNS: [&str; 7] = ["caller", "limit", "#left", "#of", "#retry in", "#charged/s", "record"];

impl Row {
    fn new(subject: &Subject<'_>, found: &ScanResult, limited: &Limited) -> Self {
        let Limited { place, caller, wait_us, decision, at, charged, .. } = limited;
        let limit = subject.limit(*place);
        let shadow = if limit.is_shadow() { " (shadow)" } else { "" };
        let locked_out = if is_locked_out(limit, decision) { " (locked out)" } else { "" };
        Self {
            caller: printable(&key_as_arguments(limit, caller), NAME_CHARS),
            limit: format!("{}{locked_out}{shadow}", limit.name()),
            left: decision.remaining,
            of: decision.limit,
            wait_us: *wait_us,
            at: *at,
            charged: charged.map(Charged::tenths_per_second),
            record: found.record_of(limited).map_or(String::new(), described),
        }
    }

    /// The cells, with the wait as it is at this moment.
    fn cells(&self, wait: String) -> [String; COLUMNS.len()] {
        let charged = self.charged.map(|tenths| format!("{}.{}", count(tenths / 10), tenths % 10));
        let charged = charged.unwrap_or_else(|| "–".to_owned());
        let [left, of] = [self.left, self.of].map(count);
        [self.caller.clone(), self.limit.clone(), left, of, wait, charged, self.record.clone()]
    }
}

/// Which columns say something.
fn shown_columns(is_watched: bool, has_records: bool) -> [bool; COLUMNS.len()] {
    [true, true, true, true, true, is_watched, has_records]
}

/// What the reader must know before trusting the list.
fn notes(subject: &Subject<'_>, found: &ScanResult) -> Vec<String> {
    let Subject { args, limits, .. } = *subject;
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
    if let Some(failure) = &found.failed {
        let why = match failure {
            Failure::Interrupted => "interrupted",
            _ => "stopped by an error",
        };
        notes.push(format!("{why}: this is what was found before it"));
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

fn table(subject: &Subject<'_>, found: &ScanResult) -> String {
    let shown = shown_columns(subject.args.watch.is_some(), !found.records.is_empty());
    let most = subject.args.most.unwrap_or(MOST);
    let rows = found.limited.iter().take(most).map(|limited| {
        let row = Row::new(subject, found, limited);
        let wait = row.wait_us.map_or("never".to_owned(), duration);
        let cells = row.cells(wait).into_iter().zip(shown);
        cells.filter_map(|(cell, is_shown)| is_shown.then_some(cell)).collect()
    });
    let columns = COLUMNS.into_iter().zip(shown);
    let columns: Vec<_> = columns.filter_map(|(name, shown)| shown.then_some(name)).collect();
    list(&TextTable::new(&columns, rows), &summary(found), &notes(subject, found))
}

fn summary(found: &ScanResult) -> String {
    let hidden = match found.hidden {
        0 => String::new(),
        hidden => format!("; cannot tell for {}", plural(hidden, "hashed key", "hashed keys")),
    };
    format!(
        "{} limited now, of {} in {}{hidden}",
        count(found.limited.len() as u64),
        plural(found.callers.len() as u64, "caller", "callers"),
        plural(found.keys, "key", "keys"),
    )
}

/// Whether a lockout blocks the caller, so that no cost is admitted.
fn is_locked_out(limit: &Limit<AnyAlgorithm>, decision: &Decision) -> bool {
    matches!(limit.algorithm(), AnyAlgorithm::Lockout(_)) && decision.remaining == 0
}

fn lines(subject: &Subject<'_>, found: &ScanResult) -> String {
    let line = |limited: &Limited| {
        let Limited { place, caller, wait_us, decision, charged, .. } = limited;
        let limit = subject.limit(*place);
        json!({
            "value": caller, "identifiers": limit.identifier_names().collect::<Vec<_>>(),
            "name": limit.name(), "shadow": limit.is_shadow(), "limit": decision.limit,
            "remaining": decision.remaining, "retry_after_us": wait_us,
            "locked_out": is_locked_out(limit, decision),
            "record": found.record_of(limited).map(fields),
            "charged": charged.map(|charged| charged.units),
            "charged_within_us": charged.map(|charged| charged.within_us),
        })
    };
    let totals = json!({
        "limited": found.limited.len(), "callers": found.callers.len(), "keys": found.keys,
        "hidden_keys": found.hidden, "records": found.records.len(), "skipped": found.skipped, "unknown": found.unknown, "max_keys_reached": found.is_cut,
        "error": found.failed.as_ref().map(Failure::to_string), "at_us": now().as_us(),
    });
    let most = subject.args.most.unwrap_or(MOST);
    json_lines(found.limited.iter().take(most).map(line).chain([totals]))
}
