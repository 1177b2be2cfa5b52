//! `ratelimit lint`: what is wrong with a policy, and what of it is easily overlooked.

use ratelimit_core::{Algorithm as _, AnyAlgorithm, Limit};
use ratelimit_replay::caller::check_names;
use ratelimit_replay::decision_line::json_lines;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::policy::{self, Findings, Problem};
use ratelimit_replay::text::plural;
use serde_json::json;

use crate::args::LintArgs;
use crate::inputs;

/// The exit code of a policy that has problems: as wherever it is read.
const WRONG: u8 = 2;

pub(super) fn run(args: &LintArgs) -> Result<u8, Failure> {
    let (name, text) = inputs::policy_text(&args.policy)?;
    let found = policy::findings(&text, |limit| unmet_demands(args, limit), notes);
    super::print(if args.json { lines(&found) } else { sentences(&name, &found) })?;
    Ok(if found.problems.is_empty() { 0 } else { WRONG })
}

fn sentences(name: &str, Findings { limits, problems, notes }: &Findings) -> String {
    let limits = plural(*limits as u64, "limit", "limits");
    let wrong = match problems.len() {
        0 => "no problem".to_owned(),
        some => plural(some as u64, "problem", "problems"),
    };
    let told = match notes.len() {
        0 => String::new(),
        some => format!(", {}", plural(some as u64, "note", "notes")),
    };
    let problems = problems.iter().map(|problem| format!("{name}: {}", problem.describe()));
    let notes = notes.iter().map(|note| format!("{name}: note: {}", note.describe()));
    let summary = format!("{name}: {limits}, {wrong}{told}");
    problems.chain(notes).chain([summary]).collect::<Vec<_>>().join("\n") + "\n"
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
fn unmet_demands(args: &LintArgs, limit: &Limit<AnyAlgorithm>) -> Vec<String> {
    let unmet = args.identifiers.iter().filter_map(|names| check_names(limit, names).err());
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
    if args.fallback && limit.outage().is_none() {
        refused.push(format!(
            "limit {:?}: it does not declare what happens during an outage; add on_outage = \"open\", \"closed\" or \
             \"local\"",
            limit.name()
        ));
    }
    refused
}

fn lines(Findings { limits, problems, notes }: &Findings) -> String {
    let line = |(what, is_note): (&Problem, bool)| {
        let (line, column) = what.place.unzip();
        json!({ "line": line, "column": column, "message": what.message, "note": is_note })
    };
    let totals = json!({ "limits": limits, "problems": problems.len(), "notes": notes.len() });
    let problems = problems.iter().map(|problem| (problem, false));
    json_lines(problems.chain(notes.iter().map(|note| (note, true))).map(line).chain([totals]))
}
