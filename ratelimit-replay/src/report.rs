//! The report: a replay as one self-contained HTML page, without scripts to run and without
//! requests to make.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use ratelimit_core::{Algorithm as _, AnyAlgorithm, Limit};

use crate::caller::{counts_by, joined_names};
use crate::compare::{Comparison, Differing};
use crate::suggest::setting;
use crate::summary::{
    Report, WARNING, by_limit, longest_wait, records_table, shown_caller, totals,
};
use crate::table::TextTable;
use crate::tally::{LimitTally, Offender, Tally};
use crate::text::{count, in_words, plural, printable, share, time};

mod chart;
mod data;

pub use data::data;

const STYLE: &str = include_str!("report/style.css");
/// The number of callers that a table of the page shows.
const CALLERS: usize = 100;
/// The number of denied callers that are shown before the others fold out.
const FIRST_CALLERS: usize = 10;
/// The number of characters of a name that are shown.
const NAME_CHARS: usize = 80;
/// The number of paths that are shown of a caller.
const PATHS: usize = 3;

/// The page. It answers in this order: what would have happened, who is hurt, is each limit right,
/// when, and what would another policy change.
pub fn page(report: &Report<'_>) -> String {
    let Report { title, notes, tally, comparison, speed } = report;
    let offenders = tally.offenders(usize::MAX);
    // What else the input has, such as bad lines.
    let others = totals(tally).rows.into_iter().skip(3).filter(|row| row[1] != "0");
    let headline = match (tally.requests, tally.denied) {
        (0, _) => "The input has no requests".to_owned(),
        (_, 0) if tally.nothing_applied() => "No limit applied to a request".to_owned(),
        (_, 0) => "No request would have been denied".to_owned(),
        (all, denied) => share(denied, all) + " of requests would have been denied",
    };
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Replay: " (headline) }
                // Without it, a browser asks a server for an icon.
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body { main {
                h1 { (headline) }
                p.lead {
                    (count(tally.denied)) " of " (plural(tally.requests, "request", "requests"))
                    @if tally.denied > 0 {
                        ", from " (plural(offenders.len() as u64, "caller", "callers"))
                    }
                    @for row in others { "; " (row[1]) " " (row[0]) }
                }
                @if let Some((name, comparison)) = comparison {
                    p.lead { (name) " " (comparison.sentence()) "." }
                }
                p.faint {
                    // A path breaks behind a slash, before it breaks anywhere.
                    @for (place, part) in title.split_inclusive('/').enumerate() {
                        @if place > 0 { wbr; }
                        (part)
                    }
                    @if let Some((first, last)) = &tally.span { ", " (time(*first)) " to " (time(*last)) }
                }
                @for note in notes {
                    @match note.strip_prefix(WARNING) {
                        Some(warning) => p.note.warning { strong { "Warning: " } (warning) },
                        None => p.note { (note) },
                    }
                }
                h2 { "Who is hurt" }
                (hurt(tally, &offenders))
                (by_records(tally))
                h2 { "Is the limit right?" }
                (chart::key_of_dots())
                @for counts in &tally.limits { (fit(counts)) }
                h2 { "Denials over time" }
                (chart::over_time(tally))
                @if let Some((name, comparison)) = comparison { (comparison_section(name, comparison)) }
                p.faint.last { (speed) ". All times are in UTC." }
            }
            script type="application/json" id="data" { (PreEscaped(data::embedded(report))) }
            }
        }
    };
    page.into_string()
}

/// The callers that were denied, each with what it takes to tell a customer from a crawler.
fn hurt(tally: &Tally, offenders: &[Offender<'_>]) -> Markup {
    let shown = &offenders[..offenders.len().min(CALLERS)];
    let (first, more) = shown.split_at(shown.len().min(FIRST_CALLERS));
    let all = plural(offenders.len() as u64, "caller", "callers");
    html! {
        @for kind in tally.blamable() {
            @let seen = kind.callers.len() as u64;
            p {
                (kind.name) ": "
                @if seen == 0 {
                    "no request has one"
                } @else {
                    strong { (count(kind.denied())) } " of " (plural(seen, "caller", "callers"))
                    " denied at least once, " (share(kind.denied(), seen))
                }
            }
        }
        @if !first.is_empty() {
            (offenders_table(tally, first, &format!(
                "Most denied first, {} of {all}. Below each: limits, paths and agent; open it for the first denied \
                 lines. The longest wait ends with an admitted request, or when the wait of the last denial is over: \
                 never, if the caller is denied for ever.",
                first.len()
            )))
        }
        @if !more.is_empty() {
            details {
                summary { (plural(more.len() as u64, "more caller", "more callers")) }
                (offenders_table(tally, more, &format!("{} to {} of {all}", first.len() + 1, shown.len())))
            }
        }
    }
}

fn offenders_table(tally: &Tally, offenders: &[Offender<'_>], caption: &str) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Callers that were denied" {
            table.hurt {
                caption { (caption) }
                thead { tr {
                    th scope="col" { "caller" }
                    @for name in ["requests", "denied", "share", "longest wait"] {
                        th.number scope="col" { (name) }
                    }
                } }
                @for offender in offenders { (offender_rows(tally, offender)) }
            }
        }
    }
}

/// The callers that a record decided.
fn by_records(tally: &Tally) -> Markup {
    let all = tally.records().len();
    let (shown, all) = (all.min(CALLERS) as u64, plural(all as u64, "record", "records"));
    let caption = format!("Those that decided most first, {} of {all}", count(shown));
    html! {
        @if shown > 0 {
            h2 { "Whom records decided" }
            (records_table(tally, CALLERS).html(&caption))
        }
    }
}

fn offender_rows(tally: &Tally, offender: &Offender<'_>) -> Markup {
    let Offender { name, value, requests, denials } = offender;
    html! {
        tbody {
            tr {
                th.name scope="row" { (shown_caller(name, value, NAME_CHARS)) }
                td.number { (count(*requests)) }
                td.number { (count(denials.requests)) }
                td.number { (share(denials.requests, *requests)) }
                td.number { (longest_wait(denials)) }
            }
            tr { td.more colspan="5" {
                details {
                    summary {
                        (by_limit(tally, denials))
                        @if let Some(details) = &denials.details {
                            @for (path, denied) in details.paths.top(PATHS) {
                                " · " (printable(path, NAME_CHARS)) "\u{a0}"
                                @if denied.others > 0 { "at most\u{a0}" }
                                "×" (count(denied.most))
                            }
                            @if let Some(agent) = &details.agent { " · " (printable(agent, NAME_CHARS)) }
                        }
                    }
                    @match &denials.details {
                        None => p.faint { "No line is kept: others were denied more often." },
                        Some(details) => {
                            @if details.before > 0 {
                                p.faint { "The first " (plural(details.before, "denied line is", "denied lines are")) " not kept." }
                            }
                            @for line in &details.lines { pre { (line) } }
                        }
                    }
                }
            } }
        }
    }
}

/// How a limit fits its callers.
fn fit(counts: &LimitTally) -> Markup {
    let limit = &counts.limit;
    let (algorithm, names) = (limit.algorithm(), counts_by(limit));
    let verb = if limit.is_shadow() { "would have denied" } else { "denied" };
    let (alone, none) = match algorithm {
        AnyAlgorithm::Lockout(_) => ("would lock out", "locks out"),
        _ => ("would deny", "denies"),
    };
    let observed = counts.needs.as_ref().zip(counts.nearness.as_ref());
    html! {
        section.limit aria-label=(format!("Limit {}", limit.name())) {
            h3 { (limit.name()) @if limit.is_shadow() { span.badge { "shadow: denies nothing" } } }
            p.faint { code { (in_words(algorithm, limit)) } " for each " (names) }
            @if counts.applied == 0 {
                p { "No request carried " code { (names) } ": check the format of the log and the " code { "key" }
                    @if !limit.conditions().is_empty() { " and " code { "when" } } " of the limit." }
            } @else if let Some((needs, nearness)) = observed {
                p {
                    "It " (verb) " " strong { (count(counts.denied)) } " of "
                    (plural(counts.applied, "request", "requests")) " (" (share(counts.denied, counts.applied))
                    "), from " strong { (count(nearness.histogram().callers_denied)) } " of "
                    (callers(needs.callers(), limit)) ". Alone it " (alone) " " (count(needs.callers_denied_by(algorithm))) " of them"
                    @if let Some(most) = needs.most_admitted() {
                        "; the busiest caller that fits needed " (count(most)) " of " (count(algorithm.capacity())) " at once"
                    }
                    @if let Some(enough) = needs.smallest(0) {
                        "; " code { (setting(&enough)) }
                        @if enough.capacity() > algorithm.capacity() { " " (none) " none." } @else { " is enough for all." }
                    } @else if algorithm.capacity() == 0 { "; its rate is 0." } @else { "; no limit of its kind is large enough for all." }
                }
                @if let Some(percent) = limit.warns_at_percent() {
                    p {
                        "It warned " strong { (plural(counts.warned, "time", "times")) } ", at "
                        (percent) " % of the limit."
                    }
                }
                (chart::needs(&needs.histogram(), algorithm.capacity()))
            }
        }
    }
}

/// So many callers of a limit, which are combinations where it counts by several identifiers.
fn callers(n: u64, limit: &Limit<AnyAlgorithm>) -> String {
    match limit.identifier_names().len() {
        0 | 1 => plural(n, "caller", "callers"),
        _ => plural(n, "combination", "combinations") + " of " + &joined_names(limit),
    }
}

/// Whom another policy would newly deny, and whom it would free.
fn comparison_section(name: &str, comparison: &Comparison) -> Markup {
    let [freed, denied] = comparison.total;
    let list = |title: &str, requests: u64, of: fn(&Differing) -> u64| {
        let callers = comparison.callers(CALLERS, of);
        let rows = callers.iter().map(|((name, value), differing)| {
            vec![shown_caller(name, value, NAME_CHARS), count(of(differing))]
        });
        let table = TextTable::new(&["caller", "#requests"], rows);
        html! {
            @if requests > 0 {
                div { h3 { (title) } (table.html(&plural(requests, "request", "requests"))) }
            }
        }
    };
    html! {
        h2 { "Compared with " (name) }
        p {
            @match comparison.callers.len() {
                0 => "The policies decide alike for every caller.",
                some => { (plural(some as u64, "caller differs.", "callers differ.")) }
            }
        }
        div.columns {
            (list("Newly denied", denied, |[_, only_other]| *only_other))
            (list("Freed", freed, |[only_this, _]| *only_this))
        }
    }
}
