//! The summary of a replay, shared by the terminal and the report.

use std::fmt::Write;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use ratelimit_core::{Limits, Policy};

use crate::caller::joined_names;
use crate::compare::{Comparison, Difference, Differing};
use crate::tally::{Offender, Tally};
use crate::text::{count, plural, printable, share, time};

/// The number of most-denied callers that are shown.
const OFFENDERS: usize = 10;
/// The number of characters of a caller's name that are shown.
const NAME_CHARS: usize = 48;

/// The content of a summary, as words and numbers without a layout.
#[derive(Debug)]
pub(crate) struct Summary {
    /// What was replayed, against which policy and store.
    pub(crate) title: String,
    /// The first and the last time of the input.
    pub(crate) span: Option<(String, String)>,
    /// What the reader must know before trusting the rest.
    pub(crate) notes: Vec<String>,
    /// Name, number and, where it is meaningful, share.
    pub(crate) totals: Vec<(&'static str, String, String)>,
    pub(crate) limits: Section,
    pub(crate) shadow_limits: Section,
    pub(crate) identifier_names: Section,
    pub(crate) offenders: Section,
    pub(crate) comparison: Section,
    /// In how many requests another policy differs.
    compared: Option<String>,
    pub(crate) speed: String,
}

/// One table.
#[derive(Debug, Default)]
pub(crate) struct Section {
    pub(crate) title: &'static str,
    /// The columns' names, and whether they contain numbers.
    pub(crate) columns: Vec<(&'static str, bool)>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// What a summary needs beside the counts.
#[derive(Debug)]
pub(crate) struct Context<'c> {
    pub(crate) input: String,
    pub(crate) format: &'c str,
    pub(crate) policy: String,
    pub(crate) store: String,
    pub(crate) elapsed: Duration,
    pub(crate) notes: Vec<String>,
    pub(crate) comparison: Option<&'c Comparison>,
}

impl Summary {
    pub(crate) fn new(tally: &Tally, limits: &Limits<Policy>, context: Context<'_>) -> Self {
        let Context { input, format, policy, store, elapsed, notes, comparison } = context;
        let mut totals = vec![
            ("requests", count(tally.requests), String::new()),
            ("admitted", count(tally.admitted()), share(tally.admitted(), tally.requests)),
            ("denied", count(tally.denied), share(tally.denied, tally.requests)),
        ];
        if tally.other > 0 {
            totals.push(("other operations", count(tally.other), String::new()));
        }
        totals.push(("bad lines", count(tally.bad_lines), String::new()));
        if tally.refused_operations > 0 {
            totals.push(("refused operations", count(tally.refused_operations), String::new()));
        }
        Self {
            title: format!("{input} ({format}) against {policy}"),
            span: tally.span.map(|(first, last)| (time(first), time(last))),
            notes,
            totals,
            limits: limits_section(tally, limits, false),
            shadow_limits: limits_section(tally, limits, true),
            identifier_names: identifiers_section(tally),
            offenders: offenders_section(tally, limits),
            comparison: comparison.map_or_else(Section::default, comparison_section),
            compared: comparison.map(|comparison| {
                let Difference { only_this, only_other } = comparison.total;
                format!(
                    "Compared: {} denied only by this policy, {} only by the other, {} by both",
                    plural(only_this, "request", "requests"),
                    count(only_other),
                    count(comparison.both),
                )
            }),
            speed: speed(tally.decisions(), elapsed, &store),
        }
    }

    /// The summary for a terminal.
    pub(crate) fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing into memory cannot fail.
        let _ = writeln!(text, "{}", self.title);
        if let Some((first, last)) = &self.span {
            let _ = writeln!(text, "{first} to {last}");
        }
        for note in &self.notes {
            let _ = writeln!(text, "\nnote: {note}");
        }
        text.push('\n');
        let mut totals = plain_table();
        for (name, number, share) in &self.totals {
            totals.add_row([*name, number, share]);
        }
        align(&mut totals, &[false, true, true]);
        push_table(&mut text, &totals);
        for section in [
            &self.limits,
            &self.shadow_limits,
            &self.identifier_names,
            &self.offenders,
            &self.comparison,
        ] {
            if section.rows.is_empty() {
                continue;
            }
            let mut table = plain_table();
            table.set_header(section.columns.iter().map(|(name, _)| *name));
            for row in &section.rows {
                table.add_row(row);
            }
            align(
                &mut table,
                &section.columns.iter().map(|(_, number)| *number).collect::<Vec<_>>(),
            );
            let _ = writeln!(text, "\n{}", section.title);
            push_table(&mut text, &table);
        }
        if let Some(compared) = &self.compared {
            let _ = writeln!(text, "\n{compared}");
        }
        let _ = writeln!(text, "\n{}", self.speed);
        text
    }
}

pub(crate) fn plain_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table
}

pub(crate) fn align(table: &mut Table, numbers: &[bool]) {
    for (place, number) in numbers.iter().enumerate() {
        if let Some(column) = table.column_mut(place)
            && *number
        {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Appends a table with a margin and without trailing blanks.
pub(crate) fn push_table(text: &mut String, table: &Table) {
    for line in table.lines() {
        let _ = writeln!(text, " {}", line.trim_end());
    }
}

fn limits_section(tally: &Tally, limits: &Limits<Policy>, shadow: bool) -> Section {
    let tallied = limits.iter().zip(&tally.limits);
    let rows = tallied.filter(|(_, counts)| counts.is_shadow == shadow).map(|(limit, counts)| {
        vec![
            limit.name().to_owned(),
            limit.algorithm().name().to_owned(),
            joined_names(limit.identifier_names()),
            count(counts.applied),
            count(counts.denied),
            share(counts.denied, counts.applied),
        ]
    });
    Section {
        title: if shadow { "Shadow limits, which deny nothing" } else { "Limits" },
        columns: vec![
            ("name", false),
            ("algorithm", false),
            ("kept for each", false),
            ("applied to", true),
            (if shadow { "would have denied" } else { "denied" }, true),
            ("share", true),
        ],
        rows: rows.collect(),
    }
}

fn identifiers_section(tally: &Tally) -> Section {
    let rows = tally.identifiers.iter().map(|tally| {
        let (callers, denied) = (tally.callers.len() as u64, tally.denied());
        vec![tally.name.clone(), count(callers), count(denied), share(denied, callers)]
    });
    Section {
        title: "Callers",
        columns: vec![
            ("identifier", false),
            ("seen", true),
            ("denied at least once", true),
            ("share", true),
        ],
        rows: rows.collect(),
    }
}

fn offenders_section(tally: &Tally, limits: &Limits<Policy>) -> Section {
    let row = |offender: Offender<'_>| {
        vec![
            format!("{}={}", offender.name, printable(offender.value, NAME_CHARS)),
            count(offender.denials.requests),
            time(offender.denials.first),
            time(offender.denials.last),
            why(limits, &offender.denials.by_limit),
        ]
    };
    Section {
        title: "Denied most",
        columns: vec![
            ("caller", false),
            ("denied", true),
            ("first", false),
            ("last", false),
            ("by", false),
        ],
        rows: tally.offenders(OFFENDERS).into_iter().map(row).collect(),
    }
}

/// The limits that denied a caller, and how often.
pub(crate) fn why(limits: &Limits<Policy>, by_limit: &[u64]) -> String {
    let denied = limits.iter().zip(by_limit).filter(|(_, denied)| **denied > 0);
    let named = denied.map(|(limit, denied)| format!("{} ×{}", limit.name(), count(*denied)));
    named.collect::<Vec<_>>().join(", ")
}

/// The callers for whom another policy differs.
fn comparison_section(comparison: &Comparison) -> Section {
    let row = |caller: Differing<'_>| {
        vec![
            format!("{}={}", caller.name, printable(caller.value, NAME_CHARS)),
            count(caller.difference.only_this),
            count(caller.difference.only_other),
        ]
    };
    Section {
        title: "Callers for whom the policies differ",
        columns: vec![
            ("caller", false),
            ("denied only by this", true),
            ("denied only by the other", true),
        ],
        rows: comparison.callers(OFFENDERS).into_iter().map(row).collect(),
    }
}

fn speed(decisions: u64, elapsed: Duration, store: &str) -> String {
    let us = elapsed.as_micros().max(1);
    let per_second = u128::from(decisions) * 1_000_000 / us;
    format!(
        "{} in {}: {} decisions/s, store {store}",
        plural(decisions, "decision", "decisions"),
        crate::text::duration(u64::try_from(us).unwrap_or(u64::MAX)),
        count(u64::try_from(per_second).unwrap_or(u64::MAX)),
    )
}
