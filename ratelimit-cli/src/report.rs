//! The report: the summary as one self-contained HTML page.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::summary::{Section, Summary};
use crate::text::{count, duration, time};
use crate::timeline::{Bucket, Timeline};

const STYLE: &str = "
:root { color-scheme: light dark; --text: #1b1f24; --page: #fff; --faint: #667; --line: #d5d9de;
  --admitted: #4a90c2; --denied: #d1495b; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ea; --page: #15181c; --faint: #9aa3ad;
  --line: #33393f; --admitted: #5aa5da; --denied: #ef6f7f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.faint, figcaption { color: var(--faint); margin-top: .2rem; }
p.note { border-left: 4px solid var(--denied); padding-left: .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: .25rem .9rem .25rem 0; text-align: left;
  border-bottom: 1px solid var(--line); } th { color: var(--faint); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1.5rem 0; } svg { width: 100%; height: auto; }
.admitted { fill: var(--admitted); } .denied { fill: var(--denied); }
.axis { stroke: var(--line); } text { fill: var(--faint); font-size: 12px; }
.swatch { display: inline-block; width: .7em; height: .7em; margin: 0 .3em 0 .8em; }
.swatch.admitted { background: var(--admitted); } .swatch.denied { background: var(--denied); }
";

const WIDTH: u64 = 900;
const HEIGHT: u64 = 200;
/// The margin for the labels above and below the bars.
const MARGIN: u64 = 20;

/// The page.
pub(crate) fn page(summary: &Summary, timeline: &Timeline) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Replay: " (summary.title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (summary.title) }
                @if let Some((first, last)) = &summary.span {
                    p.faint { (first) " to " (last) }
                }
                @for note in &summary.notes { p.note { (note) } }
                table {
                    @for (name, number, share) in &summary.totals {
                        tr { td { (name) } td.number { (number) } td.number { (share) } }
                    }
                }
                (chart(timeline))
                @for section in [&summary.limits, &summary.identifier_names, &summary.offenders] {
                    (table(section))
                }
                p.faint { (summary.speed) }
            }
        }
    };
    page.into_string()
}

fn table(section: &Section) -> Markup {
    let class = |number: bool| number.then_some("number");
    html! {
        @if !section.rows.is_empty() {
            h2 { (section.title) }
            div.scroll { table {
                tr { @for (name, number) in &section.columns { th class=[class(*number)] { (name) } } }
                @for row in &section.rows {
                    tr {
                        @for (cell, (_, number)) in row.iter().zip(&section.columns) {
                            td class=[class(*number)] { (cell) }
                        }
                    }
                }
            } }
        }
    }
}

/// One bar per bucket: denied requests are stacked on admitted ones.
fn chart(timeline: &Timeline) -> Markup {
    let buckets = timeline.buckets();
    let total = |bucket: &Bucket| bucket.admitted + bucket.denied;
    let (Some((first, _)), Some((last, _))) = (buckets.first(), buckets.last()) else {
        return html! {};
    };
    let highest = buckets.iter().map(|(_, bucket)| total(bucket)).max().unwrap_or_default().max(1);
    let bottom = MARGIN + HEIGHT;
    let slots = buckets.len() as u64;
    // In thousandths of a unit: integers, but still smooth.
    let height = |n: u64| scaled(n, HEIGHT * 1_000, highest);
    let left = |slot: u64| scaled(slot, WIDTH * 1_000, slots);
    html! {
        figure {
            svg viewBox=(format!("0 0 {WIDTH} {}", bottom + MARGIN)) role="img"
                aria-label="Requests admitted and denied over time" {
                text x="0" y="14" { "at most " (count(highest)) " in " (duration(timeline.width_us())) }
                @for (slot, (start, bucket)) in (0..).zip(&buckets) {
                    @let x = left(slot);
                    @let width = (left(slot + 1) - x) * 9 / 10;
                    @let admitted = height(bucket.admitted);
                    @let denied = height(total(bucket)) - admitted;
                    @if total(bucket) > 0 {
                        g {
                            title {
                                (time(*start)) ": " (count(bucket.admitted)) " admitted, "
                                (count(bucket.denied)) " denied"
                            }
                            (bar("admitted", x, bottom * 1_000 - admitted, width, admitted))
                            (bar("denied", x, bottom * 1_000 - admitted - denied, width, denied))
                        }
                    }
                }
                line.axis x1="0" x2=(WIDTH) y1=(bottom) y2=(bottom) {}
                text x="0" y=(bottom + 15) { (time(*first)) }
                text x=(WIDTH) y=(bottom + 15) text-anchor="end" { (time(*last)) }
            }
            figcaption {
                "Requests every " (duration(timeline.width_us()))
                span.swatch.admitted {} "admitted" span.swatch.denied {} "denied"
            }
        }
    }
}

fn bar(class: &str, x: u64, y: u64, width: u64, height: u64) -> Markup {
    html! {
        @if height > 0 {
            rect class=(class) x=(decimal(x)) y=(decimal(y)) width=(decimal(width)) height=(decimal(height)) {}
        }
    }
}

/// `n · to / from`, without overflow.
fn scaled(n: u64, to: u64, from: u64) -> u64 {
    u64::try_from(u128::from(n) * u128::from(to) / u128::from(from.max(1))).unwrap_or(u64::MAX)
}

fn decimal(thousandths: u64) -> String {
    format!("{}.{:03}", thousandths / 1_000, thousandths % 1_000)
}
