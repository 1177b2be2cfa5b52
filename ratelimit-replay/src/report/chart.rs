//! The charts: SVG whose places are percentages, so that a browser stretches them to the page and
//! leaves their text as it is.

use std::collections::BTreeMap;

use maud::{Markup, html};
use ratelimit_core::Timestamp;

use crate::table::TextTable;
use crate::tally::Tally;
use crate::text::{count, duration, plural, time};
use crate::timeline::{Counts, TimeBucket, Timeline};

/// The whole of a chart, in thousandths of a percent.
const WHOLE: u64 = 100_000;
/// The most round numbers on an axis of counts.
const MAX_TICKS: u64 = 3;
/// The width of a character, of a page of 360 pixels.
const NARROW_CHAR: u64 = 2_600;
const MINUTE_US: u64 = 60_000_000;
const DAY_US: u64 = 86_400_000_000;

/// The axis of time that charts share.
struct Axis {
    buckets: Vec<(Timestamp, TimeBucket)>,
    width_us: u64,
    ticks: Vec<Tick>,
}

/// A round time.
struct Tick {
    place: u64,
    label: String,
    /// Whether the label is a date among times of day.
    begins_day: bool,
    /// Whether a narrow page has no room for the label.
    is_minor: bool,
}

impl Tick {
    /// From where to where the label reaches on a narrow page, with a space behind it.
    fn reach(&self) -> (u64, u64) {
        let width = (self.label.len() as u64 + 1) * NARROW_CHAR;
        let from = match anchor(self.place) {
            "start" => self.place,
            "end" => self.place.saturating_sub(width),
            _ => self.place.saturating_sub(width / 2),
        };
        (from, from + width)
    }
}

impl Axis {
    fn new(timeline: &Timeline) -> Self {
        let (buckets, width_us) = (timeline.buckets(), timeline.width_us());
        let mut axis = Self { buckets, width_us, ticks: Vec::new() };
        let [first, last] = axis.ends();
        let whole = width_us * axis.buckets.len() as u64;
        let (step_us, ticks) = timeline.ticks();
        let tick = |at: Timestamp| {
            let begins_day =
                step_us < DAY_US && axis.spans_days() && at.as_us().is_multiple_of(DAY_US);
            let label = match (date(first), date(last)) {
                _ if step_us < DAY_US && !begins_day => clock(at, step_us),
                (first, last) if first[..4] == last[..4] => date(at).split_off(5),
                _ => date(at),
            };
            let place = scale(at.saturating_us_since(first), WHOLE, whole);
            Tick { place, label, begins_day, is_minor: false }
        };
        axis.ticks = ticks.map(tick).collect();
        axis.mark_minor_ticks();
        axis
    }

    /// Keeps dates and, from both ends inwards, the times that have room beside what is kept.
    fn mark_minor_ticks(&mut self) {
        let count = self.ticks.len();
        let inwards = (0..count).map(|n| if n % 2 == 0 { n / 2 } else { count - 1 - n / 2 });
        let (days, times): (Vec<_>, Vec<_>) = inwards.partition(|n| self.ticks[*n].begins_day);
        let mut kept: Vec<(u64, u64)> = Vec::new();
        for place in days.into_iter().chain(times) {
            let (from, to) = self.ticks[place].reach();
            let is_free = kept.iter().all(|(begin, end)| to <= *begin || *end <= from);
            if is_free {
                kept.push((from, to));
            }
            self.ticks[place].is_minor = !is_free;
        }
    }

    /// When the first and the last bucket begin.
    fn ends(&self) -> [Timestamp; 2] {
        [self.buckets.first(), self.buckets.last()]
            .map(|end| end.map_or(Timestamp::ZERO, |(at, _)| *at))
    }

    fn spans_days(&self) -> bool {
        let [first, last] = self.ends().map(date);
        first != last
    }

    /// What the axis shows: the dates, and the zone of its times.
    fn title(&self) -> String {
        let [first, last] = self.ends().map(date);
        if first == last { format!("{first}, UTC") } else { format!("{first} to {last}, UTC") }
    }

    /// The beginning of a bucket, with its date if another bucket has another one.
    fn moment(&self, at: Timestamp) -> String {
        match (self.spans_days(), self.width_us) {
            (true, DAY_US..) => date(at),
            (true, width_us) => format!("{} {}", date(at), clock(at, width_us)),
            (false, width_us) => clock(at, width_us),
        }
    }

    /// One bar per bucket: denied requests stand on admitted ones. `counts` picks what is shown of
    /// a bucket.
    fn strip(&self, title: &str, highest: u64, counts: impl Fn(&TimeBucket) -> Counts) -> Markup {
        let (top, step) = top(highest);
        let rows =
            (1..=top / step).map(|n| (n * step, percent(WHOLE - scale(n * step, WHOLE, top))));
        let rows: Vec<_> = rows.collect();
        let slots = self.buckets.len() as u64;
        let counted =
            (0..).zip(&self.buckets).map(|(slot, (at, bucket))| (slot, at, counts(bucket)));
        html! {
            svg.strip role="img" aria-label=(format!("{title}. The table below has the numbers.")) {
                @for (_, y) in &rows { line x1="0" x2="100%" y1=(y) y2=(y) {} }
                @for tick in &self.ticks {
                    @let x = percent(tick.place);
                    line x1=(x) x2=(x) y1="0" y2="100%" {}
                }
                @for (slot, at, counts) in counted.filter(|(.., counts)| counts.total() > 0) {
                    @let [left, right] = [slot, slot + 1].map(|slot| scale(slot, WHOLE, slots));
                    @let admitted = bar_height(counts.admitted, top);
                    @let denied = bar_height(counts.denied, top).min(WHOLE - admitted);
                    @let x = percent(left + (right - left) / 20);
                    @let width = percent((right - left) * 9 / 10);
                    @let bars = [("of-denied", admitted + denied, denied), ("of-admitted", admitted, admitted)];
                    g {
                        title {
                            (time(*at)) ": "
                            @if counts.admitted > 0 { (count(counts.admitted)) " admitted, " }
                            (count(counts.denied)) " denied"
                        }
                        @for (class, top, height) in bars.into_iter().filter(|(.., height)| *height > 0) {
                            rect class=(class) x=(x) y=(percent(WHOLE - top)) width=(width) height=(percent(height)) {}
                        }
                    }
                }
                @for (tick, y) in &rows { text x="0" y=(y) dx="-.5em" dy=".35em" text-anchor="end" { (count(*tick)) } }
            }
        }
    }
}

/// All requests, and below them the denials of each limit, on one axis of time.
pub(super) fn over_time(tally: &Tally) -> Markup {
    let axis = Axis::new(&tally.timeline);
    let most = |of: &dyn Fn(&TimeBucket) -> u64| {
        axis.buckets.iter().map(|(_, b)| of(b)).max().unwrap_or(0)
    };
    let quiet = tally.limits.iter().filter(|counts| counts.denied == 0);
    let quiet: Vec<_> = quiet.map(|counts| counts.limit.name()).collect();
    // The limits are on one scale, so that they can be compared.
    let highest = most(&|bucket| bucket.by_limit.values().map(|c| c.denied).max().unwrap_or(0));
    let busiest = most(&|bucket| bucket.all.total());
    // For the longest number beside a strip.
    let room = count(top(busiest.max(highest)).0).len() + 1;
    html! {
        figure.over-time style=(format!("--room: {room}ch")) {
            p.legend { strong { "All requests" } span.of-admitted { "admitted" } span.of-denied { "denied" } }
            (axis.strip("All requests, admitted and denied", busiest, |b| b.all))
            @for (place, counts) in tally.limits.iter().enumerate().filter(|(_, counts)| counts.denied > 0) {
                @let (name, denied) = (counts.limit.name(), |b: &TimeBucket| b.limit(place).denied);
                @let verb = if counts.limit.is_shadow() { "would have denied" } else { "denied" };
                @let worst = axis.buckets.iter().rev().max_by_key(|(_, b)| denied(b));
                p.legend {
                    strong { (name) } (verb) " " (count(counts.denied))
                    @if let Some((at, bucket)) = worst {
                        ", most at " (axis.moment(*at)) ": " (count(denied(bucket)))
                    }
                }
                (axis.strip(&format!("Requests that {name} {verb}"), highest, |b| {
                    Counts { admitted: 0, denied: denied(b) }
                }))
            }
            svg.axis aria-hidden="true" {
                @for Tick { place, label, is_minor, .. } in &axis.ticks {
                    text.minor[*is_minor] x=(percent(*place)) y="1em" text-anchor=(anchor(*place)) { (label) }
                }
            }
            p.axis-title { (axis.title()) }
            @if !quiet.is_empty() { p.legend { "Denied nothing: " (quiet.join(", ")) } }
        }
        details { summary { "Numbers of these charts" } (numbers(tally, &axis.buckets)) }
    }
}

fn numbers(tally: &Tally, buckets: &[(Timestamp, TimeBucket)]) -> Markup {
    let names: Vec<_> =
        tally.limits.iter().map(|counts| format!("#{}", counts.limit.name())).collect();
    let names = names.iter().map(String::as_str);
    let columns: Vec<_> = ["@from", "#admitted", "#denied"].into_iter().chain(names).collect();
    let busy = buckets.iter().filter(|(_, bucket)| bucket.all.total() > 0);
    let rows = busy.map(|(at, bucket)| {
        let by_limit = (0..tally.limits.len()).map(|place| bucket.limit(place).denied);
        let counts = [bucket.all.admitted, bucket.all.denied].into_iter().chain(by_limit);
        std::iter::once(time(*at)).chain(counts.map(count)).collect()
    });
    let every = duration(tally.timeline.width_us());
    TextTable::new(&columns, rows)
        .html(&format!("Requests per {every}, and those that each limit denied"))
}

/// The callers by what they needed of a limit, on a logarithmic axis: a dot grows with the number
/// of callers.
pub(super) fn needs(needs: &BTreeMap<u64, u64>, capacity: u64) -> Markup {
    let most =
        needs.keys().copied().filter(|need| *need < u64::MAX).max().unwrap_or(1).max(capacity);
    // A need that no limit meets stands at the edge.
    let x = |need: u64| (4_000 + scale(log2(need), WHOLE - 8_000, log2(most))).min(WHOLE - 2_000);
    let is_rounded = needs.keys().any(|need| *need > 100);
    let rows = needs.iter().map(|(need, callers)| vec![count(*need), count(*callers)]);
    let ticks = (0..20).map(|power| 10_u64.saturating_pow(power)).take_while(|tick| *tick <= most);
    html! {
        figure {
            svg.dots role="img" aria-label="Callers by what they needed. The table below has the numbers." {
                line x1="0" x2="100%" y1="50%" y2="50%" {}
                line.limit-line x1=(percent(x(capacity))) x2=(percent(x(capacity))) y1="24%" y2="76%" {}
                @for (need, callers) in needs {
                    @let class = if *need <= capacity { "of-admitted" } else { "of-denied" };
                    circle class=(class) cx=(percent(x(*need))) cy="50%" r=(radius(*callers)) {
                        title { (plural(*callers, "caller", "callers")) ": " (count(*need)) }
                    }
                }
                text.limit-name x=(percent(x(capacity))) y="1em" text-anchor=(anchor(x(capacity))) { "limit " (count(capacity)) }
                @for tick in ticks {
                    text x=(percent(x(tick))) y="100%" dy="-.3em" text-anchor="middle" { (count(tick)) }
                }
            }
            p.axis-title { "needed at once" @if is_rounded { ", above 100 rounded up to two digits" } }
        }
        details {
            summary { "Numbers of this chart" }
            (TextTable::new(&["#needed at once", "#callers"], rows).html("Callers by what they needed at once"))
        }
    }
}

/// What the dots of the charts of needs mean.
pub(super) fn key_of_dots() -> Markup {
    html! {
        p.legend.dots-key {
            "Callers per dot:"
            @for callers in [1, 10, 100, 1_000] {
                @let r = radius(callers);
                span.sized {
                    svg aria-hidden="true" width=(2 * r) height=(2 * r) { circle class="of-admitted" cx=(r) cy=(r) r=(r) {} }
                    (count(callers))
                }
            }
            span.of-admitted { "that fit" }
            span.of-denied { "that do not" }
        }
    }
}

/// The radius of a dot that stands for so many callers.
const fn radius(callers: u64) -> u32 {
    4 + callers.ilog2()
}

/// The date of a time, such as `2026-03-01`.
fn date(at: Timestamp) -> String {
    time(at).chars().take(10).collect()
}

/// The time of day: hours and minutes, or everything if a step is shorter.
fn clock(at: Timestamp, step_us: u64) -> String {
    let text = time(at);
    let part = if step_us < MINUTE_US { text.get(11..) } else { text.get(11..16) };
    part.unwrap_or_default().trim_end_matches('Z').to_owned()
}

/// Which end of a label stands at its place, so that it stays within the chart.
const fn anchor(x: u64) -> &'static str {
    match x {
        0..=6_000 => "start",
        94_000.. => "end",
        _ => "middle",
    }
}

/// Where an axis of counts ends, and its step.
fn top(highest: u64) -> (u64, u64) {
    let step = round_step(highest);
    (highest.div_ceil(step).max(1).saturating_mul(step), step)
}

/// The least of 1, 2, 5, 10, 20, 50 … that reaches a number in a few steps.
fn round_step(highest: u64) -> u64 {
    let steps = (0..20)
        .flat_map(|power| [1, 2, 5].map(|n: u64| n.saturating_mul(10_u64.saturating_pow(power))));
    let mut steps = steps.filter(|step| highest.div_ceil(*step) <= MAX_TICKS);
    steps.next().unwrap_or(u64::MAX)
}

/// The binary logarithm in thousandths, straight between the powers of two.
fn log2(n: u64) -> u64 {
    let whole = n.max(1).ilog2();
    u64::from(whole) * 1_000 + scale(n.max(1) - (1 << whole), 1_000, 1 << whole)
}

/// The height of a bar: at least a fiftieth of the chart for what exists, so that one denial among
/// a million is seen.
fn bar_height(n: u64, top: u64) -> u64 {
    if n > 0 { scale(n, WHOLE, top).max(WHOLE / 50) } else { 0 }
}

/// `n · to / from`, without overflow.
fn scale(n: u64, to: u64, from: u64) -> u64 {
    u64::try_from(u128::from(n) * u128::from(to) / u128::from(from.max(1))).unwrap_or(u64::MAX)
}

fn percent(thousandths: u64) -> String {
    format!("{}.{:03}%", thousandths / 1_000, thousandths % 1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_denial_among_a_million_is_visible_and_nothing_leaves_the_chart() {
        let mut tally = Tally::default();
        for n in 0..1_000 {
            tally.timeline.count(Timestamp::saturating_from_us(n), n > 0, []);
        }
        let page = over_time(&tally).into_string();
        assert_eq!(page.matches("class=\"of-denied\" x=").count(), 1, "{page}");
        assert!(!page.contains("height=\"0.000%\"") && !page.contains("y=\"-"), "{page}");
    }

    #[test]
    fn a_time_has_its_date_where_the_requests_are_of_several_days() {
        // From 2026-03-01T13:00:00Z on.
        const FROM: u64 = 1_772_370_000_000_000;
        const HOUR_US: u64 = 60 * MINUTE_US;
        for (step_us, most, ticks, title) in [
            (1_000, "13:00:00.090000", "13:00:00 13:00:00.100000", "2026-03-01, UTC"),
            (MINUTE_US, "14:30", "13:00 13:30 14:00", "2026-03-01, UTC"),
            (
                HOUR_US / 2,
                "2026-03-03 10:00",
                "03-02 12:00 03-03 12:00",
                "2026-03-01 to 2026-03-04, UTC",
            ),
            (DAY_US, "2026-05-30", "03-08 04-07 05-07", "2026-03-01 to 2026-06-28, UTC"),
            (10 * DAY_US, "2028-08-17", "2026-03-08 2027-03-03", "2026-02-06 to 2029-05-21, UTC"),
        ] {
            let mut timeline = Timeline::default();
            for n in 0..120 {
                timeline.count(Timestamp::saturating_from_us(FROM + n * step_us), true, []);
            }
            let axis = Axis::new(&timeline);
            let labels: Vec<_> = axis.ticks.iter().map(|tick| &*tick.label).collect();
            assert!(labels.join(" ").starts_with(ticks), "{labels:?}");
            let moment = axis.moment(Timestamp::saturating_from_us(FROM + 90 * step_us));
            assert_eq!((&*moment, &*axis.title()), (most, title));
            let days = axis.ticks.iter().filter(|tick| tick.begins_day);
            assert_eq!(days.count() > 0, step_us == HOUR_US / 2);
        }
    }

    #[test]
    fn a_narrow_page_names_the_ends_and_the_dates_where_labels_do_not_overlap() {
        // From 2026-03-01T21:40:00Z on.
        const FROM: u64 = 1_772_401_200_000_000;
        for (minutes, labels) in [
            (2, "22:00 23:00 03-02 01:00 02:00"),
            (1, "22:00 22:30 23:00 23:30 03-02"),
            (30, "03-02 03-03 12:00 03-04 03-05"),
            (7_200, "2026-03-08 2027-03-03 2028-02-26"),
        ] {
            let mut timeline = Timeline::default();
            for n in 0..150 {
                let at = Timestamp::saturating_from_us(FROM + n * minutes * MINUTE_US);
                timeline.count(at, true, []);
            }
            let ticks = Axis::new(&timeline).ticks;
            let kept: Vec<_> = ticks.iter().filter(|tick| !tick.is_minor).collect();
            assert!(kept.is_sorted_by(|a, b| a.reach().1 <= b.reach().0), "{minutes}");
            let kept: Vec<_> = kept.iter().map(|tick| &*tick.label).collect();
            assert_eq!(kept.join(" "), labels);
        }
    }

    #[test]
    fn an_axis_has_few_and_round_numbers() {
        for (highest, step) in [(0, 1), (1, 1), (3, 1), (4, 2), (7, 5), (238, 100), (301, 200)] {
            assert_eq!(round_step(highest), step, "{highest}");
        }
        assert_eq!([1, 2, 3, 4, 1_024].map(log2), [0, 1_000, 1_500, 2_000, 10_000]);
    }
}
