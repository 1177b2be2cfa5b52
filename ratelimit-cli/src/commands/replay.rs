//! `ratelimit replay`.

use std::fs::File;
use std::io::{self, Write};
use std::iter;
use std::path::Path;
use std::time::{Duration, Instant};

use ratelimit_core::{AnyAlgorithm, Limits, RateLimiter};
use ratelimit_replay::decision_line::json_line;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::records::GivenRecord;
use ratelimit_replay::replay::{Judge, Reading, Replay, ReplayOutcome};
use ratelimit_replay::summary::{self, Report, WARNING};
use ratelimit_replay::{report, text};

use crate::args::ReplayArgs;
use crate::inputs::is_dash;
use crate::interrupt::Interrupt;
use crate::store::{self, StoreUrl};
use crate::{files, inputs};

pub(super) fn run(args: &ReplayArgs) -> Result<u8, Failure> {
    check_dashes(args)?;
    let limits = inputs::policy(&args.log.policy)?;
    let other = args.compare.as_deref().map(inputs::policy).transpose()?;
    let records = args.records.as_deref().map(|path| inputs::records(path, &limits)).transpose()?;
    let records = records.unwrap_or_default();
    let url = StoreUrl::parse(&args.store)?;
    let is_detailed = args.report.is_some() || args.json;
    let how = Reading { strict: args.strict, keeps_lines: is_detailed, ..Reading::default() };
    let format = args.log.format.read().map_err(Failure::input)?;
    let interrupt = Interrupt::default();
    let mut requests = inputs::requests("", &args.log.inputs, &format, &interrupt, how)?;
    let (limits, note) = requests.applicable(limits)?;
    let (other, other_note) = other.map(|other| requests.applicable(other)).transpose()?.unzip();
    // Its own: concurrent replays must not see each other's states.
    let prefix = format!("rl-replay-{:032x}", fastrand::u128(..));
    let (outcome, elapsed, report) = store::block_on(async {
        let limiter = async |url: &StoreUrl,
                             limits: &Limits<AnyAlgorithm>,
                             prefix: &str,
                             records: &[GivenRecord]|
               -> Result<_, Failure> {
            let store = match records {
                [] => url.open(prefix, || Ok(None), limits).await?,
                _ => url.open_with(records, limits).await?,
            };
            Ok(RateLimiter::new(limits.clone(), store).allow_unlimited())
        };
        let this = limiter(&url, &limits, &prefix, &records).await?;
        let other = match &other {
            Some(limits) => {
                Some(limiter(&url, limits, &format!("{prefix}-other"), &records).await?)
            }
            None => None,
        };
        let (decisions, report) = files::outputs(args)?;
        let forgets = url != StoreUrl::Memory;
        let judge = Judge::new(&this, false, forgets);
        let judge = if is_detailed { judge.observing() } else { Ok(judge) };
        let judge = judge.map_err(|error| Failure::input(error.to_string()))?;
        let replay = Replay {
            this: judge.by_records(&records),
            other: other
                .as_ref()
                .map(|other| Judge::new(other, false, forgets).by_records(&records)),
            requests,
            decisions,
        };
        interrupt.catch()?;
        let started = Instant::now();
        let mut outcome = replay.run().await;
        let elapsed = started.elapsed();
        let overflowed =
            iter::once(&this).chain(&other).map(|limiter| limiter.store().overflowed());
        let overflowed = overflowed.sum();
        if overflowed > 0 {
            outcome.ended = Err(Failure::input(format!(
                "{} were decided on a bucket shared with others, because the memory store was \
                 full; replay a shorter log, or with --store redis://host:port",
                text::plural(overflowed, "check", "checks")
            )));
        }
        Ok((outcome, elapsed, report))
    })?;
    let other_note = other_note.flatten().map(|note| format!("--compare: {note}"));
    let left = outcome.left_behind.as_ref().map(|why| {
        format!(
            "the keys of this replay were not removed{why}. They begin with {prefix} and expire by themselves"
        )
    });
    let notes = outcome.notes(&limits, [note, other_note, left].into_iter().flatten());
    finish(args, &url, (outcome, elapsed), notes, report)
}

/// Writes the summary to standard output and the report to its file.
fn finish(
    args: &ReplayArgs,
    url: &StoreUrl,
    (outcome, elapsed): (ReplayOutcome, Duration),
    mut notes: Vec<String>,
    report: Option<File>,
) -> Result<u8, Failure> {
    let names = [Some(&*args.log.policy), args.compare.as_deref()];
    let [policy, other] = names.map(|path| path.map(printable_path).unwrap_or_default());
    notes.extend(outcome.warnings(&policy, args.compare.is_some().then_some(&other)));
    match &outcome.ended {
        Err(Failure::BrokenPipe) => return Err(Failure::BrokenPipe),
        // There is nothing to sum up, only a note about what was left behind.
        Err(failure)
            if outcome.is_void
                && !args.json
                && report.is_none()
                && !matches!(failure, Failure::Interrupted) =>
        {
            for note in notes {
                let _ = writeln!(io::stderr(), "note: {note}");
            }
            return outcome.ended.map(|()| 0);
        }
        _ => notes.extend(outcome.ending()),
    }
    let inputs: Vec<_> = args.log.inputs.iter().map(|input| printable_path(input)).collect();
    let title = outcome.title(&inputs, &policy);
    let ReplayOutcome { tally, ended, comparison, .. } = outcome;
    let decisions = text::plural(tally.decisions(), "decision", "decisions");
    // The microseconds say nothing beside milliseconds.
    let took = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX).saturating_mul(1_000);
    let took = text::duration(took.max(1_000));
    let speed = format!("{decisions} in {took}, store {}", url.display());
    let comparison = comparison.as_ref().map(|comparison| (&*other, comparison));
    for warning in notes.iter().filter(|note| note.starts_with(WARNING)) {
        let _ = writeln!(io::stderr(), "{warning}");
    }
    let told = Report { title, notes, tally: &tally, comparison, speed };
    let mut written = Ok(());
    if let (Some(path), Some(file)) = (&args.report, report) {
        written = files::fill(&file, report::page(&told).as_bytes())
            .map_err(|error| Failure::writing(path, &error));
    }
    let text = if args.json { json_line(&report::data(&told)) } else { summary::text(&told) };
    if args.decisions.as_deref().is_some_and(is_dash) {
        let _ = io::stderr().write_all(text.as_bytes());
    } else {
        super::print(text)?;
    }
    // The numbers are printed by now, even where the report could not be written.
    written.and(ended).map(|()| 0)
}

fn printable_path(path: &Path) -> String {
    text::printable(&path.display().to_string(), 200)
}

/// Refuses to read standard input twice, and to write a page to standard output.
fn check_dashes(args: &ReplayArgs) -> Result<(), Failure> {
    let policies = [("--policy -", &args.log.policy)].into_iter();
    let named = policies.chain(args.compare.iter().map(|path| ("--compare -", path)));
    let named = named.chain(args.records.iter().map(|path| ("--records -", path)));
    let named = named.chain(args.log.inputs.iter().map(|path| ("INPUT -", path)));
    let twice: Vec<_> = named.filter(|(_, path)| is_dash(path)).collect();
    if let [(one, _), (other, _), ..] = twice[..] {
        return Err(Failure::input(format!(
            "{one} and {other} are both standard input; name a file for one of them"
        )));
    }
    if args.report.as_deref().is_some_and(is_dash) {
        return Err(Failure::input(
            "--report -: a page is not written to standard output; name a file such as report.html",
        ));
    }
    Ok(())
}
