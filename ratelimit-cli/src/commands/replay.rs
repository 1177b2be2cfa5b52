//! `ratelimit replay`.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use ratelimit_core::{Limits, Policy, RateLimiter, Store};
use ratelimit_memory::MemoryStore;

use crate::args::ReplayArgs;
use crate::caller::wanted;
use crate::failure::Failure;
use crate::files::{self, Outputs, is_dash};
use crate::interrupt::{self, Interrupt};
#[cfg(feature = "_servers")]
use crate::replay::forget;
use crate::replay::{Decisions, Ending, Outcome, Replay, Requests, Trouble};
use crate::report::Report;
use crate::store::StoreUrl;
#[cfg(feature = "_servers")]
use crate::store::{self, Keys, Redis};
use crate::summary::{Summary, speed};
use crate::{policy, report, text};

/// The most keys in the memory store of a replay: a bound that no realistic log reaches. At some hundred bytes
/// per key, the machine runs out of memory first.
const MEMORY_KEYS: usize = 64 << 20;

pub(super) fn run(args: &ReplayArgs) -> Result<u8, Failure> {
    check_dashes(args)?;
    let limits = policy::read(&args.log.policy)?;
    let other = args.compare.as_deref().map(policy::read).transpose()?;
    let store = StoreUrl::parse(&args.store)?;
    let interrupt = Interrupt::catch()?;
    let (mut requests, mut trouble) = Requests::open(&args.log, &interrupt, args.strict)?;
    let (limits, note) = requests.applicable(limits, &mut trouble)?;
    let (other, other_note) = match other {
        None => (None, None),
        Some(other) => {
            let (other, note) = requests.applicable(other, &mut trouble)?;
            (Some(other), note.map(|note| format!("--compare: {note}")))
        }
    };
    let job = Job { args, limits: limits.clone(), other, requests, trouble };
    let (outcome, mut notes, report) = match &store {
        StoreUrl::Memory => pollster::block_on(job.on_memory())?,
        #[cfg(feature = "_servers")]
        StoreUrl::Redis(url) => store::block_on(job.on_redis(url))?,
    };
    notes.splice(0..0, note.into_iter().chain(other_note));
    finish(args, &limits, &store, outcome, notes, report)
}

/// Everything that a replay needs except the store.
struct Job<'a> {
    args: &'a ReplayArgs,
    limits: Limits<Policy>,
    /// The limits to compare with.
    other: Option<Limits<Policy>>,
    requests: Requests,
    trouble: Trouble,
}

/// The outcome, the notes, and the file that awaits the report.
type Done = (Outcome, Vec<String>, Option<File>);

impl Job<'_> {
    async fn on_memory(self) -> Result<Done, Failure> {
        let Outputs { decisions, report } = Outputs::open(self.args)?;
        let limiter = |limits: &Limits<Policy>| {
            let store = MemoryStore::builder().capacity(MEMORY_KEYS).build();
            RateLimiter::new(limits.clone(), store).allow_unlimited()
        };
        let (this, other) = (limiter(&self.limits), self.other.as_ref().map(limiter));
        let mut outcome = self.replay((&this, other.as_ref()), decisions, false).await;
        let stores = [Some(&this), other.as_ref()];
        let overflowed = stores.into_iter().flatten().map(|one| one.store().overflowed()).sum();
        if overflowed > 0 {
            outcome.ending = Ending::Failed(Failure::input(format!(
                "{} were decided on a bucket shared with others, because the memory store was \
                 full; replay a shorter log, or with --store redis://host:port",
                text::plural(overflowed, "check", "checks")
            )));
        }
        Ok((outcome, Vec::new(), report))
    }

    #[cfg(feature = "_servers")]
    async fn on_redis(self, url: &Redis) -> Result<Done, Failure> {
        let prefix = store::own_prefix("rl-replay-");
        let connect = async |limits: &Limits<Policy>, prefix: &str| -> Result<_, Failure> {
            let store = store::connect(url, Keys { prefix, secret: None }, limits).await?;
            Ok(RateLimiter::new(limits.clone(), store).allow_unlimited())
        };
        let this = connect(&self.limits, &prefix).await?;
        let other = match &self.other {
            Some(limits) => Some(connect(limits, &format!("{prefix}-other")).await?),
            None => None,
        };
        let Outputs { decisions, report } = Outputs::open(self.args)?;
        let mut notes = Vec::new();
        let outcome = self.replay((&this, other.as_ref()), decisions, true).await;
        let mut used = vec![(&this, &outcome.touched)];
        used.extend(other.as_ref().zip(outcome.other.as_ref().map(|(_, touched)| touched)));
        // A store that has just failed would only time out again.
        let mut left = None;
        for (limiter, touched) in used {
            left = left.or(match &outcome.ending {
                Ending::Failed(Failure::Store(_)) if !touched.is_empty() => Some(String::new()),
                _ => forget(limiter, touched).await.err().map(|error| format!(": {error}")),
            });
        }
        if let Some(why) = left {
            notes.push(format!(
                "the keys of this replay were not removed{why}. They begin with {prefix} and \
                 expire by themselves"
            ));
        }
        Ok((outcome, notes, report))
    }

    async fn replay<S: Store<Policy>>(
        self,
        (limiter, other): (&RateLimiter<S>, Option<&RateLimiter<S>>),
        decisions: Option<Decisions>,
        forgets: bool,
    ) -> Outcome {
        let nearness = self.args.report.is_some() || self.args.json;
        let Self { requests, trouble, .. } = self;
        let replay = Replay { limiter, other, requests, trouble, decisions, forgets, nearness };
        replay.run().await
    }
}

/// Writes the summary to standard output and the report to its file.
fn finish(
    args: &ReplayArgs,
    limits: &Limits<Policy>,
    store: &StoreUrl,
    outcome: Outcome,
    mut notes: Vec<String>,
    report: Option<File>,
) -> Result<u8, Failure> {
    let Outcome { tally, format, order, ending, elapsed, other, .. } = outcome;
    notes.splice(0..0, order.note());
    let comparison = other.as_ref().map(|(comparison, _)| comparison);
    if let Some(other) = comparison.and_then(|comparison| comparison.tally.as_ref())
        && other.nothing_applied()
    {
        notes.push(
            "WARNING: no limit of the policy to compare with applied to any request".to_owned(),
        );
    }
    if tally.nothing_applied() {
        let names: Vec<_> = tally.unlimited_names.iter().map(String::as_str).collect();
        notes.push(format!(
            "WARNING: no limit applied to any request, so all were admitted. {} This input has: \
             {}. Change `key` in {}, or the input",
            wanted(limits),
            names.join(", "),
            args.log.policy.display()
        ));
    }
    let ended = match ending {
        Ending::Complete => {
            notes.extend((tally.decisions() == 0).then(|| "the input has no requests".to_owned()));
            Ok(0)
        }
        Ending::Interrupted => {
            notes.push("interrupted: this is what was decided so far".to_owned());
            Ok(interrupt::EXIT_CODE)
        }
        Ending::Failed(Failure::BrokenPipe) => return Err(Failure::BrokenPipe),
        // There is nothing to sum up, only a note about what was left behind.
        Ending::Failed(failure)
            if tally.decisions() + tally.bad_lines + tally.refused_operations == 0 =>
        {
            for note in notes {
                let _ = writeln!(io::stderr(), "note: {note}");
            }
            return Err(failure);
        }
        Ending::Failed(failure) if tally.decisions() == 0 => {
            notes.push(failure.to_string());
            Err(failure)
        }
        Ending::Failed(failure) => {
            notes.push("stopped by an error: this is what was decided so far".to_owned());
            Err(failure)
        }
    };
    let inputs: Vec<_> = args.log.inputs.iter().map(|input| shown(input)).collect();
    let format = format.unwrap_or(if tally.bad_lines > 0 { "unknown format" } else { "no lines" });
    let title = format!("{} ({format}) against {}", inputs.join(", "), shown(&args.log.policy));
    let speed = speed(tally.decisions(), elapsed, &store.display());
    let summary = Summary::new(title, notes, (&tally, limits), comparison, speed);
    let name = args.compare.as_deref().map(shown).unwrap_or_default();
    let comparison = comparison.map(|comparison| (&*name, comparison));
    if let (Some(path), Some(mut file)) = (&args.report, report) {
        let page = report::page(&Report { summary: &summary, limits, tally: &tally, comparison });
        let written = files::empty(&file).and_then(|()| file.write_all(page.as_bytes()));
        written.map_err(|error| Failure::writing(path, &error))?;
    }
    let text = if args.json {
        report::json(&Report { summary: &summary, limits, tally: &tally, comparison }) + "\n"
    } else {
        summary.to_text(&tally)
    };
    if args.decisions.as_deref().is_some_and(is_dash) {
        let _ = io::stderr().write_all(text.as_bytes());
    } else {
        super::print(text.as_bytes())?;
    }
    ended
}

fn shown(path: &Path) -> String {
    text::printable(&path.display().to_string(), 200)
}

/// Refuses to read standard input twice, and to write a page to standard output.
fn check_dashes(args: &ReplayArgs) -> Result<(), Failure> {
    let policies = [("--policy -", Some(&args.log.policy)), ("--compare -", args.compare.as_ref())];
    let inputs = args.log.inputs.iter().map(|input| ("INPUT -", Some(input)));
    let named = policies.into_iter().chain(inputs);
    let twice: Vec<_> = named.filter(|(_, path)| path.is_some_and(|path| is_dash(path))).collect();
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
