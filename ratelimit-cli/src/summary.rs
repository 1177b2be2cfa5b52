//! The summary of a replay, shared by the terminal and the report.

use std::fmt::Write;
use std::time::Duration;

use crate::caller::joined_names;
use crate::compare::Comparison;
use crate::table::Table;
use crate::tally::Tally;
use crate::text::{count, duration, plural, printable, share, time};

/// The number of callers that a table of the summary shows.
const CALLERS: usize = 10;
/// The number of characters of a caller's name that a terminal shows.
pub(crate) const NAME_CHARS: usize = 48;

/// The content of a summary.
#[derive(Debug)]
pub(crate) struct Summary {
    /// What was replayed, against which policy and store.
    pub(crate) title: String,
    /// What the reader must know before trusting the rest.
    pub(crate) notes: Vec<String>,
    /// Name, number and, where it is meaningful, share.
    pub(crate) totals: Table,
    /// Below their titles.
    tables: Vec<(&'static str, Table)>,
    /// In how many requests another policy differs.
    compared: Option<String>,
    pub(crate) speed: String,
}

impl Summary {
    /// `title` says what was replayed, against which policy.
    pub(crate) fn new(
        title: String,
        notes: Vec<String>,
        tally: &Tally,
        comparison: Option<&Comparison>,
        speed: String,
    ) -> Self {
        let of_requests =
            |name: &str, n: u64| vec![name.to_owned(), count(n), share(n, tally.requests)];
        let plain = |name: &str, n: u64| vec![name.to_owned(), count(n), String::new()];
        let mut totals = vec![
            plain("requests", tally.requests),
            of_requests("admitted", tally.admitted()),
            of_requests("denied", tally.denied),
        ];
        totals.extend((tally.other > 0).then(|| plain("other operations", tally.other)));
        totals.push(plain("bad lines", tally.bad_lines));
        let refused = tally.refused_operations;
        totals.extend((refused > 0).then(|| plain("refused operations", refused)));
        let mut tables = vec![
            ("Limits", limits_table(tally, false)),
            ("Shadow limits, which deny nothing", limits_table(tally, true)),
            ("Callers", identifiers_table(tally)),
            ("Denied most", offenders_table(tally, CALLERS, NAME_CHARS)),
        ];
        let differing = comparison.map(|comparison| comparison.table(CALLERS, NAME_CHARS));
        tables.extend(differing.map(|table| ("Callers for whom the policies differ", table)));
        Self {
            title,
            notes,
            totals: Table::new(&["", "#", "#"], totals),
            tables,
            compared: comparison.map(|comparison| {
                format!(
                    "Compared: {} denied only by this policy, {} only by the other, {} by both",
                    plural(comparison.total.only_this, "request", "requests"),
                    count(comparison.total.only_other),
                    count(comparison.both),
                )
            }),
            speed,
        }
    }

    /// The summary for a terminal.
    pub(crate) fn to_text(&self, tally: &Tally) -> String {
        let mut text = format!("{}\n", self.title);
        // Writing into memory cannot fail.
        if let Some((first, last)) = tally.span {
            let _ = writeln!(text, "{} to {}", time(first), time(last));
        }
        for note in &self.notes {
            let _ = writeln!(text, "\nnote: {note}");
        }
        text.push('\n');
        text.push_str(&self.totals.text());
        for (title, table) in self.tables.iter().filter(|(_, table)| !table.rows.is_empty()) {
            let _ = write!(text, "\n{title}\n{}", table.text());
        }
        for line in self.compared.iter().chain([&self.speed]) {
            let _ = writeln!(text, "\n{line}");
        }
        text
    }
}

fn limits_table(tally: &Tally, shadow: bool) -> Table {
    let tallied = tally.limits.iter().filter(|counts| counts.limit.is_shadow() == shadow);
    let rows = tallied.map(|counts| {
        let limit = &counts.limit;
        vec![
            limit.name().to_owned(),
            limit.algorithm().name().to_owned(),
            joined_names(limit.identifier_names()),
            count(counts.applied),
            count(counts.denied),
            share(counts.denied, counts.applied),
        ]
    });
    let denied = if shadow { "#would have denied" } else { "#denied" };
    let columns = ["name", "algorithm", "kept for each", "#applied to", denied, "#share"];
    Table::new(&columns, rows)
}

fn identifiers_table(tally: &Tally) -> Table {
    let rows = tally.identifiers.iter().map(|tally| {
        let (callers, denied) = (tally.callers.len() as u64, tally.denied());
        vec![tally.name.clone(), count(callers), count(denied), share(denied, callers)]
    });
    let columns = ["identifier", "#seen", "#denied at least once", "#share"];
    Table::new(&columns, rows)
}

/// The callers denied most, with so many characters of each name.
pub(crate) fn offenders_table(tally: &Tally, most: usize, chars: usize) -> Table {
    let rows = tally.offenders(most).into_iter().map(|offender| {
        let denials = offender.denials;
        // A name and its number stay on one line.
        let by =
            tally.by_limit(denials).map(|(name, denied)| format!("{name}\u{a0}×{}", count(denied)));
        vec![
            shown_caller(offender.name, offender.value, chars),
            count(denials.requests),
            count(denials.spells),
            duration(denials.denied_us()),
            duration(denials.longest_us()),
            time(denials.first),
            time(denials.last),
            by.collect::<Vec<_>>().join(", "),
        ]
    });
    let columns =
        ["caller", "#denied", "#times", "#denied for", "#longest", "@first", "@last", "by"];
    Table::new(&columns, rows)
}

/// A caller as a table shows it.
pub(crate) fn shown_caller(identifier: &str, value: &str, chars: usize) -> String {
    format!("{identifier}={}", printable(value, chars))
}

/// How fast a store decided.
pub(crate) fn speed(decisions: u64, elapsed: Duration, store: &str) -> String {
    let us = elapsed.as_micros().max(1);
    let per_second = u128::from(decisions) * 1_000_000 / us;
    format!(
        "{} in {}: {} decisions/s, store {store}",
        plural(decisions, "decision", "decisions"),
        duration(u64::try_from(us).unwrap_or(u64::MAX)),
        count(u64::try_from(per_second).unwrap_or(u64::MAX)),
    )
}
