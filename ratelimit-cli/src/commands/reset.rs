//! `ratelimit reset`: forgets a caller.

use std::collections::BTreeSet;
use std::fmt::Write;

use ratelimit_core::store::Op;
use ratelimit_replay::caller::{Caller, list_identifiers};
use ratelimit_replay::decision_line::json_line;
use ratelimit_replay::failure::Failure;
use serde::Serialize;

use crate::args::{CallerArgs, ResetArgs};
use crate::inputs;
use crate::store::{self, in_each_mode};

/// The limits that apply to a caller.
#[derive(Serialize)]
struct Found<'r> {
    #[serde(flatten)]
    caller: &'r Caller,
    /// Those that have their full capacity again.
    reset: Vec<&'r str>,
    /// Those that stored nothing.
    absent: Vec<&'r str>,
}

pub(super) fn run(ResetArgs { caller: args, limit: only }: &ResetArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.policy)?;
    let caller = args.caller(&limits)?;
    let mut keyed = caller.keys(&limits);
    if let Some(only) = only {
        keyed.retain(|(limit, _)| limit.name() == only);
        if keyed.is_empty() {
            let display = caller.display();
            return Err(Failure::input(format!(
                "--limit: no limit {only:?} of the policy applies to {display}. {}",
                list_identifiers(&limits)
            )));
        }
    }
    let mut told = Found { caller: &caller, reset: Vec::new(), absent: Vec::new() };
    let unknown = store::block_on(async {
        let (store, failed) = store::of_caller(args, "reset", &limits).await?;
        for (limit, key) in &keyed {
            let state = in_each_mode!(&store, store => store.state(limit, key).await);
            let is_stored = state.map_err(&failed)?.is_some();
            let names = if is_stored { &mut told.reset } else { &mut told.absent };
            names.push(limit.name());
        }
        let _ = store::apply_to(&store, &keyed, Op::Reset, 1).await.map_err(&failed)?;
        super::unknown_of(&store, &keyed, &limits).await.map_err(failed)
    })?;
    super::print(if args.json {
        json_line(&told)
    } else {
        text(args, &told, caller.note_unmet(&limits), &unknown)
    })
}

fn text(
    args: &CallerArgs,
    told: &Found<'_>,
    unmet: Option<String>,
    unknown: &BTreeSet<String>,
) -> String {
    let Found { caller, reset, absent } = told;
    let mut text = format!("{}: ", caller.display());
    // Writing into memory cannot fail.
    let _ = match reset[..] {
        [] => writeln!(text, "nothing was reset"),
        _ => writeln!(text, "full capacity again in {}", reset.join(", ")),
    };
    if !absent.is_empty() {
        let _ = writeln!(text, "note: {}", super::not_stored(args, absent, "was"));
    }
    if let Some(note) = unmet {
        let _ = writeln!(text, "note: {note}");
    }
    if let Some(note) = super::unknown_states(unknown, "of this caller more is stored, and stays:")
    {
        let _ = writeln!(text, "note: {note}");
    }
    text
}
