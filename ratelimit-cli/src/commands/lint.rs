//! `ratelimit lint`: what is wrong with a policy.

use ratelimit_core::{AnyAlgorithm, Limit};
use serde_json::json;

use crate::args::LintArgs;
use crate::caller::check_names;
use crate::decision_line::json_lines;
use crate::failure::Failure;
use crate::policy::{self, Problem};
use crate::text::plural;

/// The exit code of a policy that has problems: as wherever it is read.
const WRONG: u8 = 2;

pub(super) fn run(args: &LintArgs) -> Result<u8, Failure> {
    let (name, text) = policy::text(&args.policy)?;
    let (limits, problems) = policy::problems(&text, |limit| unmet_demands(args, limit));
    let out = if args.json {
        lines(limits, &problems)
    } else {
        let limits = plural(limits as u64, "limit", "limits");
        let wrong = match problems.len() {
            0 => "no problem".to_owned(),
            some => plural(some as u64, "problem", "problems"),
        };
        let problems = problems.iter().map(|problem| format!("{name}: {}", problem.describe()));
        let summary = format!("{name}: {limits}, {wrong}");
        problems.chain([summary]).collect::<Vec<_>>().join("\n") + "\n"
    };
    super::print(out)?;
    Ok(if problems.is_empty() { 0 } else { WRONG })
}

/// Why a limit that can be read does not fit the service.
fn unmet_demands(args: &LintArgs, limit: &Limit<AnyAlgorithm>) -> Vec<String> {
    let unmet = args.identifiers.iter().filter_map(|names| check_names(limit, names).err());
    let mut refused: Vec<_> = unmet.map(|error| error.to_string()).collect();
    if args.fallback && limit.outage().is_none() {
        refused.push(format!(
            "limit {:?}: it does not declare what happens during an outage; add on_outage = \"open\", \"closed\" or \
             \"local\"",
            limit.name()
        ));
    }
    refused
}

fn lines(limits: usize, problems: &[Problem]) -> String {
    let line = |problem: &Problem| {
        let (line, column) = problem.place.unzip();
        json!({ "line": line, "column": column, "message": problem.message })
    };
    let totals = json!({ "limits": limits, "problems": problems.len() });
    json_lines(problems.iter().map(line).chain([totals]))
}
