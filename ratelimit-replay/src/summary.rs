//! The summary of a replay, shared by the terminal and the report.

use std::fmt::Write;

use ratelimit_core::{AnyAlgorithm, Limit};

use crate::address::client_as_counted;
use crate::caller::{counts_by, key_as_arguments};
use crate::compare::Comparison;
use crate::records::described;
use crate::table::TextTable;
use crate::tally::{Denials, Tally};
use crate::text::{count, duration, plural, printable, share, time};

/// The number of callers that a table of the summary shows.
const CALLERS: usize = 10;
/// The number of characters of a caller's name that a terminal shows.
pub const NAME_CHARS: usize = 48;

/// How a note begins that goes to standard error, before everything else.
pub const WARNING: &str = "WARNING: ";

/// What a terminal and the page show.
pub struct Report<'r> {
    /// What was replayed, against which policy.
    pub title: String,
    /// What the reader must know before trusting the rest.
    pub notes: Vec<String>,
    /// The counts.
    pub tally: &'r Tally,
    /// The name and the result of the policy to compare with.
    pub comparison: Option<(&'r str, &'r Comparison)>,
    /// How long it took, on which store.
    pub speed: String,
}

/// The summary of a replay for a terminal.
pub fn text(report: &Report<'_>) -> String {
    let Report { title, notes, tally, comparison, speed } = report;
    let mut text = format!("{title}\n");
    // Writing into memory cannot fail.
    if let Some((first, last)) = tally.span {
        let _ = writeln!(text, "{} to {}", time(first), time(last));
    }
    for note in notes.iter().filter(|note| !note.starts_with(WARNING)) {
        let _ = writeln!(text, "\nnote: {note}");
    }
    let _ = write!(text, "\n{}", totals(tally).text());
    let differing = comparison.map(|(_, comparison)| differing_table(comparison));
    let differing = differing.map(|table| ("Callers for whom the policies differ", table));
    let tables = [
        ("Limits", limits_table(tally, false)),
        ("Shadow limits, which deny nothing", limits_table(tally, true)),
        ("Callers", identifiers_table(tally)),
        ("Denied most", offenders_table(tally)),
        ("Decided by records", records_table(tally, CALLERS)),
    ];
    for (title, table) in
        tables.iter().chain(&differing).filter(|(_, table)| !table.rows.is_empty())
    {
        let _ = write!(text, "\n{title}\n{}", table.text());
    }
    if let Some((name, comparison)) = comparison {
        let _ = writeln!(text, "\n{name} {}", comparison.sentence());
    }
    text + "\n" + speed + "\n"
}

/// Name, number and, where it is meaningful, share.
pub(crate) fn totals(tally: &Tally) -> TextTable {
    let of_requests = |n| share(n, tally.requests);
    let rows = [
        ("requests", tally.requests, String::new()),
        ("admitted", tally.admitted(), of_requests(tally.admitted())),
        ("denied", tally.denied, of_requests(tally.denied)),
        ("bad lines", tally.bad_lines, String::new()),
        ("other operations", tally.other, String::new()),
        ("refused operations", tally.refused_operations, String::new()),
    ];
    let shown = rows.into_iter().filter(|(name, n, _)| *n > 0 || !name.ends_with("operations"));
    let rows = shown.map(|(name, n, share)| vec![name.to_owned(), count(n), share]);
    TextTable::new(&["", "#", "#"], rows)
}

fn differing_table(comparison: &Comparison) -> TextTable {
    let callers = comparison.callers(CALLERS, |requests| requests.iter().sum()).into_iter();
    let rows = callers.map(|((name, value), [only_this, only_other])| {
        vec![shown_caller(name, value, NAME_CHARS), count(*only_other), count(*only_this)]
    });
    TextTable::new(&["caller", "#newly denied", "#freed"], rows)
}

fn limits_table(tally: &Tally, shadow: bool) -> TextTable {
    let tallied = tally.limits.iter().filter(|counts| counts.limit.is_shadow() == shadow);
    let rows = tallied.map(|counts| {
        let limit = &counts.limit;
        let mut row = vec![
            limit.name().to_owned(),
            limit.algorithm().name().to_owned(),
            counts_by(limit),
            count(counts.applied),
            count(counts.denied),
            share(counts.denied, counts.applied),
        ];
        let warned = || limit.warns_at_percent().map_or_else(String::new, |_| count(counts.warned));
        row.extend(tally.warn().then(warned));
        row
    });
    let denied = if shadow { "#would have denied" } else { "#denied" };
    let mut columns = vec!["name", "algorithm", "counts by", "#applied to", denied, "#share"];
    columns.extend(tally.warn().then_some("#warned"));
    TextTable::new(&columns, rows)
}

fn identifiers_table(tally: &Tally) -> TextTable {
    let rows = tally.blamable().map(|tally| {
        let (callers, denied) = (tally.callers.len() as u64, tally.denied());
        vec![tally.name.clone(), count(callers), count(denied), share(denied, callers)]
    });
    let columns = ["identifier", "#seen", "#denied at least once", "#share"];
    TextTable::new(&columns, rows)
}

/// The callers denied most.
fn offenders_table(tally: &Tally) -> TextTable {
    let rows = tally.offenders(CALLERS).into_iter().map(|offender| {
        let denials = offender.denials;
        vec![
            shown_caller(offender.name, offender.value, NAME_CHARS),
            count(offender.requests),
            count(denials.requests),
            share(denials.requests, offender.requests),
            longest_wait(denials),
            time(denials.first),
            time(denials.last),
            by_limit(tally, denials),
        ]
    });
    let columns =
        ["caller", "#requests", "#denied", "#share", "#longest wait", "@first", "@last", "by"];
    TextTable::new(&columns, rows)
}

/// The limits that denied a caller, with how often. A name and its number stay on one line.
pub(crate) fn by_limit(tally: &Tally, denials: &Denials) -> String {
    let by = tally.by_limit(denials);
    let by = by.map(|(name, denied)| format!("{name}\u{a0}×{}", count(denied)));
    by.collect::<Vec<_>>().join(", ")
}

/// How long a caller was denied at once.
pub(crate) fn longest_wait(denials: &Denials) -> String {
    denials.denied_us().map_or("never".to_owned(), |(_, longest_us)| duration(longest_us))
}

/// The records that decided most.
pub(crate) fn records_table(tally: &Tally, most: usize) -> TextTable {
    let rows = tally.records().into_iter().take(most).map(|(limit, key, counts)| {
        vec![
            printable(&key_as_arguments(limit, key), NAME_CHARS),
            limit.name().to_owned(),
            described(&counts.record),
            count(counts.requests),
            count(counts.denied),
        ]
    });
    TextTable::new(&["caller", "limit", "record", "#requests", "#denied"], rows)
}

/// A note on the records that decided no request, and on how a log names their callers.
pub(crate) fn idle_records(tally: &Tally) -> Option<String> {
    let mut idle = tally.records();
    let all = idle.len() as u64;
    idle.retain(|(.., counts)| counts.requests == 0);
    let (limit, key, _) = idle.first()?;
    let network = |(limit, key, _): &(&Limit<AnyAlgorithm>, &str, _)| {
        let is_address = limit.identifier_names().eq(["ip"]);
        let counted = client_as_counted(key, 64);
        (is_address && *key != counted).then(|| format!("; a log counts {key} as {counted}"))
    };
    Some(format!(
        "{} of {} decided no request, such as {} under {}{}",
        count(idle.len() as u64),
        plural(all, "record", "records"),
        printable(&key_as_arguments(limit, key), 80),
        limit.name(),
        idle.iter().find_map(network).unwrap_or_default()
    ))
}

/// A caller as a table shows it.
pub(crate) fn shown_caller(identifier: &str, value: &str, chars: usize) -> String {
    format!("{identifier}={}", printable(value, chars))
}
