//! The report: a replay as one self-contained HTML page, without scripts to run and without requests to make.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::caller::joined_names;
use crate::compare::Comparison;
use crate::summary::{Summary, offenders_table};
use crate::table::Table;
use crate::tally::{LimitTally, Tally};
use crate::text::{count, plural, share, time};

mod chart;
mod data;

const STYLE: &str = include_str!("report/style.css");
/// The number of callers that a table of the page shows.
const CALLERS: usize = 100;
/// The number of characters of a caller's name that are shown.
const NAME_CHARS: usize = 80;

/// What the page shows.
pub(crate) struct Report<'r> {
    pub(crate) summary: &'r Summary,
    pub(crate) tally: &'r Tally,
    /// The name and the result of the policy to compare with.
    pub(crate) comparison: Option<(&'r str, &'r Comparison)>,
}

/// The numbers of the page as one line of JSON.
pub(crate) fn json(report: &Report<'_>) -> String {
    data::data(report).to_string()
}

/// The page.
pub(crate) fn page(report: &Report<'_>) -> String {
    let Report { summary, tally, comparison } = report;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Replay: " (summary.title) }
                // Without it, a browser asks a server for an icon.
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body { main {
                h1 { (breakable(&summary.title)) }
                @if let Some((first, last)) = &tally.span {
                    p.faint { (time(*first)) " to " (time(*last)) ", all times in UTC" }
                }
                @for note in &summary.notes { p.note { (note) } }
                dl.cards {
                    @for row in &summary.totals.rows {
                        div { dt { (row[0]) } dd { (row[1]) " " small { (row[2]) } } }
                    }
                }
                h2 { "Requests over time" }
                (chart::over_time("Requests over time", &tally.timeline, "denied", |b| b.all))
                h2 { "Limits" }
                @for (place, counts) in tally.limits.iter().enumerate() {
                    (limit_card(tally, place, counts))
                }
                (denied_callers(tally))
                @if let Some((name, comparison)) = comparison { (compared(tally, name, comparison)) }
                p.faint.last { (summary.speed) }
            }
            script type="application/json" id="data" { (PreEscaped(data::embedded(report))) }
            }
        }
    };
    page.into_string()
}

/// A text whose paths break behind a slash, before they break anywhere.
fn breakable(text: &str) -> Markup {
    html! { @for part in text.split_inclusive('/') { (part) wbr; } }
}

fn limit_card(tally: &Tally, place: usize, counts: &LimitTally) -> Markup {
    let limit = &counts.limit;
    let denied = if limit.is_shadow() { "would have denied" } else { "denied" };
    let title = format!("Requests to which {} applied", limit.name());
    html! {
        section.limit aria-label=(format!("Limit {}", limit.name())) {
            h3 { (limit.name()) @if limit.is_shadow() { span.badge { "shadow: denies nothing" } } }
            p.faint {
                code { (limit.algorithm()) } " for each " (joined_names(limit.identifier_names()))
            }
            p {
                (denied[..1].to_uppercase()) (&denied[1..]) " " strong { (count(counts.denied)) } " of "
                (plural(counts.applied, "request", "requests")) ", "
                (share(counts.denied, counts.applied))
            }
            @if counts.applied > 0 {
                div.columns {
                    div {
                        h4 { "Over time" }
                        (chart::over_time(&title, &tally.timeline, denied, |bucket| bucket.limit(place)))
                    }
                    @if let Some(nearness) = &counts.nearness {
                        div {
                            h4 { "How near callers came" }
                            (chart::nearness(&nearness.histogram(), denied))
                        }
                    }
                }
            }
        }
    }
}

/// Who was denied, how often and for how long.
fn denied_callers(tally: &Tally) -> Markup {
    let table = offenders_table(tally, CALLERS, NAME_CHARS);
    let (shown, denied) = (table.rows.len() as u64, tally.offenders(usize::MAX).len() as u64);
    html! {
        h2 { "Who was denied" }
        @for kind in &tally.identifiers {
            p {
                (kind.name) ": " strong { (count(kind.denied())) } " of "
                (plural(kind.callers.len() as u64, "caller", "callers")) " denied at least once, "
                (share(kind.denied(), kind.callers.len() as u64))
            }
        }
        @if shown > 0 {
            p.faint {
                "A spell of denials begins with a denied request. It ends with the wait of its last denial, or with an admitted request before that."
            }
            (table.html(&format!("Most denied first, {} of {}", count(shown), plural(denied, "caller", "callers"))))
        }
    }
}

/// What another policy would have decided.
fn compared(tally: &Tally, name: &str, comparison: &Comparison) -> Markup {
    let differing = comparison.differing();
    let shown = (CALLERS as u64).min(differing);
    let other = &comparison.tally;
    let limits = other.limits.iter().map(|counts| {
        let limit = &counts.limit;
        let name = limit.name().to_owned() + if limit.is_shadow() { " (shadow)" } else { "" };
        vec![name, limit.algorithm().to_string(), count(counts.applied), count(counts.denied)]
    });
    let columns = ["name", "policy", "#applied to", "#denied"];
    html! {
        h2 { "Compared with " (name) }
        dl.cards {
            div { dt { "denied by this policy" } dd {
                (count(tally.denied)) " " small { (share(tally.denied, tally.requests)) }
            } }
            div { dt { "denied by the other" } dd {
                (count(other.denied)) " " small { (share(other.denied, other.requests)) }
            } }
            div { dt { "by both" } dd { (count(comparison.both)) } }
            div { dt { "only by this" } dd { (count(comparison.total.only_this)) } }
            div { dt { "only by the other" } dd { (count(comparison.total.only_other)) } }
        }
        (Table::new(&columns, limits).html(&format!("The limits of {name}")))
        @if differing == 0 {
            p { "The policies decided alike for every caller." }
        } @else {
            h3 { (plural(differing, "caller", "callers")) " with a difference" }
            (comparison.table(CALLERS, NAME_CHARS).html(
                &format!("Largest difference first, {} of {}", count(shown), plural(differing, "caller", "callers")),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The relative luminance of a colour such as `#1a2b3c`, as WCAG 2 defines it.
    fn luminance(colour: &str) -> f64 {
        let part = |place: usize| {
            let part = u8::from_str_radix(&colour[place..place + 2], 16).expect("a colour");
            let part = f64::from(part) / 255.0;
            if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)
    }

    #[test]
    fn text_and_bars_stand_out_in_light_and_in_dark() {
        let blocks: Vec<_> = STYLE.split(":root {").skip(1).collect();
        assert_eq!(blocks.len(), 2, "light and dark");
        for block in blocks {
            let colour = |name: &str| {
                let (_, rest) = block.split_once(&format!("--{name}: ")).expect(name);
                luminance(&rest[..7])
            };
            for (name, least) in
                [("text", 7.0), ("faint", 4.5), ("near", 4.5), ("admitted", 4.5), ("denied", 4.5)]
            {
                for under in ["page", "card"] {
                    let (a, b) = (colour(name), colour(under));
                    let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                    assert!(contrast >= least, "--{name} on --{under}: {contrast:.2}");
                }
            }
        }
    }
}
