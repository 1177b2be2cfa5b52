//! The charts: SVG without text, which stretches to any width. Labels are text of the page, so that they stay readable.

use maud::{Markup, html};
use ratelimit_core::Timestamp;

use crate::nearness::Histogram;
use crate::table::Table;
use crate::text::{count, duration, time};
use crate::timeline::{Bucket, Counts, Timeline};

/// The charts' own units, in thousandths. A browser stretches them to the page.
const WIDTH: u64 = 1_000_000;
const HEIGHT: u64 = 100_000;

/// One bar per bucket: denied requests stand on admitted ones. `counts` picks what is shown of a bucket.
pub(super) fn over_time(
    title: &str,
    timeline: &Timeline,
    denied: &'static str,
    counts: impl Fn(&Bucket) -> Counts,
) -> Markup {
    let buckets: Vec<(Timestamp, Counts)> =
        timeline.buckets().into_iter().map(|(at, bucket)| (at, counts(&bucket))).collect();
    let (Some((first, _)), Some((last, _))) = (buckets.first(), buckets.last()) else {
        return html! {};
    };
    let highest = buckets.iter().map(|(_, counts)| counts.total()).max().unwrap_or(0).max(1);
    let slots = buckets.len() as u64;
    let height = |n: u64| scaled(n, HEIGHT, highest);
    let left = |slot: u64| scaled(slot, WIDTH, slots);
    let every = duration(timeline.width_us());
    let end = Timestamp::saturating_from_us(last.as_us().saturating_add(timeline.width_us()));
    let of_denied = format!("#{denied}");
    let columns = ["@from", "#admitted", of_denied.as_str()];
    let rows = buckets
        .iter()
        .map(|(start, counts)| vec![time(*start), count(counts.admitted), count(counts.denied)]);
    html! {
        figure {
            div.axis { span { "up to " (count(highest)) " per " (every) } }
            svg viewBox=(format!("0 0 {} {}", WIDTH / 1_000, HEIGHT / 1_000)) preserveAspectRatio="none"
                role="img" aria-label=(format!("{title}, admitted and {denied}. The table below has the numbers.")) {
                title { (title) }
                @for (slot, (start, counts)) in (0..).zip(&buckets).filter(|(_, (_, c))| c.total() > 0) {
                    @let x = left(slot);
                    @let width = left(slot + 1) - x;
                    @let bar = (x + width / 20, width * 9 / 10);
                    @let admitted = visible(counts.admitted, height(counts.admitted), HEIGHT);
                    @let rest = visible(counts.denied, height(counts.total()) - height(counts.admitted), HEIGHT);
                    @let top = HEIGHT.saturating_sub(admitted + rest);
                    g {
                        title {
                            (time(*start)) ": " (count(counts.admitted)) " admitted, "
                            (count(counts.denied)) " " (denied)
                        }
                        (rect("hit", (x, width), 0, HEIGHT))
                        (rect("of-denied", bar, top, rest))
                        (rect("of-admitted", bar, top + rest, HEIGHT - top - rest))
                    }
                }
            }
            div.axis { span { (time(*first)) } span { (time(end)) } }
            figcaption.legend {
                span.of-admitted { "admitted" } span.of-denied { (denied) }
            }
        }
        details {
            summary { "Numbers of this chart" }
            (Table::new(&columns, rows).html(&format!("{title}, every {every}")))
        }
    }
}

/// How near the callers came to a limit: a row and a bar per bin. The chart is its own table.
pub(super) fn nearness(histogram: &Histogram, denied: &str) -> Markup {
    let highest = histogram.bins.iter().copied().max().unwrap_or(0).max(histogram.denied).max(1);
    let tenths = (0_u64..).zip(&histogram.bins);
    html! {
        table.bars {
            caption { "Callers by the least share of the capacity that was left to them" }
            tbody {
                (bar_row(denied, "of-denied", histogram.denied, highest))
                @for (tenth, callers) in tenths {
                    @let (name, class) = match tenth {
                        0 => ("nothing left".to_owned(), "of-near"),
                        1 => ("up to 10% left".to_owned(), "of-near"),
                        _ => (format!("{}% to {}% left", (tenth - 1) * 10, tenth * 10), "of-admitted"),
                    };
                    (bar_row(&name, class, *callers, highest))
                }
            }
        }
        @if histogram.uncounted > 0 {
            p.faint {
                (count(histogram.uncounted))
                " requests of further callers are left out, because there were too many callers to tell apart."
            }
        }
    }
}

fn bar_row(name: &str, class: &str, callers: u64, highest: u64) -> Markup {
    html! {
        tr.none[callers == 0] {
            th scope="row" { (name) }
            td.bar {
                svg viewBox="0 0 1000 1" preserveAspectRatio="none" aria-hidden="true" {
                    (rect(class, (0, visible(callers, scaled(callers, WIDTH, highest), WIDTH)), 0, 1_000))
                }
            }
            td.number { (count(callers)) }
        }
    }
}

/// At least a hundredth of the chart for what exists, so that one denial among a million is seen.
fn visible(n: u64, length: u64, whole: u64) -> u64 {
    if n > 0 { length.max(whole / 100) } else { 0 }
}

fn rect(class: &str, (x, width): (u64, u64), y: u64, height: u64) -> Markup {
    html! {
        @if height > 0 && width > 0 {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_denial_among_a_million_is_visible_and_nothing_leaves_the_chart() {
        let mut timeline = Timeline::default();
        for n in 0..1_000 {
            timeline.count(Timestamp::saturating_from_us(n), n > 0, []);
        }
        let page = over_time("Requests", &timeline, "denied", |bucket| bucket.all).into_string();
        assert_eq!(page.matches("class=\"of-denied\" x=").count(), 1, "{page}");
        assert!(!page.contains("height=\"0.000\"") && !page.contains("y=\"-"), "{page}");
    }
}
