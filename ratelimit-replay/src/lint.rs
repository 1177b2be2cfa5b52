//! What is wrong with a policy, and what of it is easily overlooked.

use ratelimit_core::{Algorithm as _, AnyAlgorithm, Limit};
use serde_json::json;

use crate::caller::check_names;
use crate::decision_line::json_lines;
use crate::policy::{Findings, Problem, findings};

/// What a service demands of its policy.
#[derive(Clone, Debug, Default)]
pub struct Demands {
    /// The identifiers that it gives, `key` for the bare key; `None` for any.
    pub identifiers: Option<Vec<String>>,
    /// Whether each limit must declare what happens during an outage.
    pub fallback: bool,
}

/// The mistakes of a document, and what of it is easily overlooked.
#[must_use]
pub fn lint(text: &str, demands: &Demands) -> Findings {
    findings(text, |limit| unmet(demands, limit), notes)
}

/// What is easily overlooked of a limit behind these.
fn notes(limit: &Limit<AnyAlgorithm>, earlier: &[Limit<AnyAlgorithm>]) -> Vec<String> {
    let apart = earlier.iter().filter(|other| other.is_apart_from(limit));
    let apart: Vec<_> = apart.map(|other| format!("{:?}", other.name())).collect();
    let told = (!apart.is_empty()).then(|| {
        format!(
            "limit {:?}: no request meets both its conditions and those of {}",
            limit.name(),
            apart.join(", ")
        )
    });
    // Requests may bring larger numbers.
    let nothing = (limit.algorithm().capacity() == 0 && limit.max().is_none())
        .then(|| format!("limit {:?}: it denies everything, because its rate is 0", limit.name()));
    let beyond = limit.max().filter(|max| !limit.algorithm().is_within(max)).map(|max| {
        format!(
            "limit {:?}: its own numbers ({}) are larger than its max ({max}): requests that bring numbers get fewer than \
             those that bring none",
            limit.name(),
            limit.algorithm()
        )
    });
    told.into_iter().chain(nothing).chain(beyond).collect()
}

/// Why a limit that can be read does not fit the service.
fn unmet(demands: &Demands, limit: &Limit<AnyAlgorithm>) -> Vec<String> {
    let unmet = demands.identifiers.iter().filter_map(|names| check_names(limit, names).err());
    let mut refused: Vec<_> = unmet.map(|error| error.to_string()).collect();
    let capacity = limit.algorithm().capacity();
    if let Some(percent) = limit.warns_at_percent()
        && capacity > 0
        && limit.max().is_none()
        && u128::from(percent.get()) * u128::from(capacity) <= 100
    {
        refused.push(format!(
            "limit {:?}: {percent} % of {capacity} are reached with the first request of each caller, which is no \
             warning; raise warn, or leave it out",
            limit.name()
        ));
    }
    if demands.fallback && limit.outage().is_none() {
        refused.push(format!(
            "limit {:?}: it does not declare what happens during an outage; add on_outage = \"open\", \"closed\" or \
             \"local\"",
            limit.name()
        ));
    }
    refused
}

/// A line of JSON for each problem and each note, and one with the totals.
#[must_use]
pub fn lines(Findings { limits, problems, notes }: &Findings) -> String {
    let line = |(what, is_note): (&Problem, bool)| {
        let (line, column) = what.place.unzip();
        json!({ "line": line, "column": column, "message": what.message, "note": is_note })
    };
    let totals = json!({ "limits": limits, "problems": problems.len(), "notes": notes.len() });
    let problems = problems.iter().map(|problem| (problem, false));
    json_lines(problems.chain(notes.iter().map(|note| (note, true))).map(line).chain([totals]))
}
