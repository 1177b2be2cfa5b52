//! `ratelimit lint`: what is wrong with a policy, and what of it is easily overlooked.

use ratelimit_replay::failure::Failure;
use ratelimit_replay::lint::{Demands, lines, lint};
use ratelimit_replay::policy::Findings;
use ratelimit_replay::text::plural;

use crate::args::LintArgs;
use crate::inputs;

/// The exit code of a policy that has problems: as wherever it is read.
const WRONG: u8 = 2;

pub(super) fn run(args: &LintArgs) -> Result<u8, Failure> {
    let (name, text) = inputs::policy_text(&args.policy)?;
    let (identifiers, fallback) = (args.identifiers.clone(), args.fallback);
    let found = lint(&text, &Demands { identifiers, fallback });
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
