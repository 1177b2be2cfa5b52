//! The report's numbers as JSON, embedded in the page for other programs.

use std::collections::BTreeMap;

use ratelimit_core::{Algorithm as _, AnyAlgorithm, Condition, Limit};
use serde_json::{Map, Value, json};

use super::{CALLERS, PATHS};
use crate::compare::{Comparison, Differing};
use crate::nearness::Nearness;
use crate::records;
use crate::summary::Report;
use crate::tally::{LimitTally, Offender, Tally};
use crate::text::in_words;

/// The JSON, safe within a `script` element.
pub(super) fn embedded(report: &Report<'_>) -> String {
    // These characters stand only in strings, where JSON admits escapes.
    let text = data(report).to_string();
    text.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// The numbers of a report.
pub fn data(report: &Report<'_>) -> Value {
    let tally = report.tally;
    let caller = |offender: &Offender<'_>| {
        let denials = offender.denials;
        let details = denials.details.as_deref();
        let paths = details.into_iter().flat_map(|details| details.paths.top(PATHS));
        let paths: Vec<_> = paths.map(|(path, count)| (path, count.most, count.others)).collect();
        json!({
            "identifier": offender.name, "value": offender.value,
            "requests": offender.requests, "denied": denials.requests,
            "by_limit": tally.by_limit(denials).collect::<BTreeMap<_, _>>(),
            "paths": paths, "agent": details.and_then(|details| details.agent.as_deref()),
            "first_us": denials.first.as_us(), "last_us": denials.last.as_us(),
            "spells": denials.spells,
            "denied_for_us": denials.denied_us().map(|(all_us, _)| all_us),
            "longest_us": denials.denied_us().map(|(_, longest_us)| longest_us),
        })
    };
    let buckets = tally.timeline.buckets().into_iter().map(|(at, bucket)| {
        let limits = (0..tally.limits.len()).map(|place| bucket.limit(place));
        let limits: Vec<_> = limits.map(|counts| [counts.admitted, counts.denied]).collect();
        json!({
            "at_us": at.as_us(), "admitted": bucket.all.admitted, "denied": bucket.all.denied,
            "limits": limits,
        })
    });
    let identifiers = tally.identifiers.iter().map(|tally| {
        json!({
            "name": tally.name, "callers": tally.callers.len(), "callers_denied": tally.denied(),
            "uncounted": tally.left_out,
        })
    });
    let records = tally.records().into_iter().take(CALLERS).map(|(limit, key, counts)| {
        json!({
            "value": key, "identifiers": limit.identifier_names().collect::<Vec<_>>(),
            "limit": limit.name(), "record": records::fields(&counts.record),
            "requests": counts.requests, "denied": counts.denied,
        })
    });
    json!({
        "title": report.title, "notes": report.notes,
        "span_us": tally.span.map(|(first, last)| [first.as_us(), last.as_us()]),
        "requests": tally.requests, "admitted": tally.admitted(), "denied": tally.denied,
        "other_operations": tally.other, "bad_lines": tally.bad_lines,
        "refused_operations": tally.refused_operations,
        "limits": limits(tally),
        "bucket_us": tally.timeline.width_us(), "buckets": buckets.collect::<Vec<_>>(),
        "identifiers": identifiers.collect::<Vec<_>>(),
        "denied_callers": tally.offenders(CALLERS).iter().map(caller).collect::<Vec<_>>(),
        "records": records.collect::<Vec<_>>(),
        "comparison": report.comparison.map(|(name, comparison)| comparison_section(name, comparison)),
    })
}

fn limits(tally: &Tally) -> Vec<Value> {
    let limit = |counts: &LimitTally| {
        let limit = &counts.limit;
        let needs = counts.needs.as_ref().map(|needs| {
            json!({
                "capacity": needs.algorithm.capacity(),
                "callers_denied_alone": needs.callers_denied_by(&needs.algorithm),
                "most_admitted": needs.most_admitted(),
                "denies_none": needs.smallest(0).map(|algorithm| in_words(&algorithm, limit)),
                "callers": needs.histogram().into_iter().collect::<Vec<_>>(),
                "uncounted": needs.left_out,
            })
        });
        json!({
            "name": limit.name(), "algorithm": in_words(limit.algorithm(), limit),
            "identifiers": limit.identifier_names().collect::<Vec<_>>(), "when": when(limit),
            "shadow": limit.is_shadow(),
            "applied": counts.applied, "denied": counts.denied,
            "warned": limit.warns_at_percent().map(|_| counts.warned), "needs": needs,
            "nearness": counts.nearness.as_ref().map(Nearness::histogram),
        })
    };
    tally.limits.iter().map(limit).collect()
}

/// The conditions as a document has them; null without any.
fn when(limit: &Limit<AnyAlgorithm>) -> Value {
    let of = |excludes: bool| {
        let conditions = limit.conditions().iter().filter(move |one| one.excludes() == excludes);
        let entry =
            |one: &Condition| (one.identifier().to_owned(), one.values().collect::<Value>());
        conditions.map(entry).collect::<Map<_, _>>()
    };
    let (mut when, not) = (of(false), of(true));
    if !not.is_empty() {
        when.insert("not".to_owned(), not.into());
    }
    if when.is_empty() { Value::Null } else { when.into() }
}

fn comparison_section(name: &str, comparison: &Comparison) -> Value {
    let caller = |((name, value), [this, other]): &((Box<str>, Box<str>), Differing)| {
        json!({
            "identifier": name, "value": value,
            "denied_only_by_this": this, "denied_only_by_other": other,
        })
    };
    let [this, other] = comparison.total;
    let callers = comparison.callers(CALLERS, |requests| requests.iter().sum());
    json!({
        "policy_file": name, "denied": comparison.tally.denied,
        "limits": limits(&comparison.tally),
        "denied_by_both": comparison.both,
        "denied_only_by_this": this, "denied_only_by_other": other,
        "callers_that_differ": comparison.callers.len(),
        "differing_callers": callers.into_iter().map(caller).collect::<Vec<_>>(),
    })
}
