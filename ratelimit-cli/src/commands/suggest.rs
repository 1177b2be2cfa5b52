//! `ratelimit suggest`.

use std::fs::File;
use std::io::{self, Write};

use ratelimit_core::{Algorithm as _, AnyAlgorithm, ConfigError, Limit, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_replay::caller::list_identifiers;
use ratelimit_replay::decision_line::json_lines;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::input::names_of;
use ratelimit_replay::policy;
use ratelimit_replay::replay::{Judge, Reading, Replay, ReplayOutcome, ReplayedRequests};
use ratelimit_replay::suggest::{Needs, is_finer_than_a_second, setting, with_algorithm};
use ratelimit_replay::table::TextTable;
use ratelimit_replay::text::{count, in_words, plural, share};
use serde_json::json;

use crate::args::{LogArgs, SuggestArgs};
use crate::inputs::is_dash;
use crate::interrupt::Interrupt;
use crate::{inputs, store};

/// One limit, and what is proposed for it.
struct Row<'l> {
    limit: &'l Limit<AnyAlgorithm>,
    needs: Needs,
    /// `None` if no caller was seen, or no limit of this kind is large enough.
    proposed: Option<AnyAlgorithm>,
    /// How many callers the proposal denied in a replay of all limits together.
    denied_together: u64,
    /// What callers needed if the requests of each second came spread evenly within it, and what is
    /// proposed then: of a limit that is finer than the times of the log.
    spread: Option<(Needs, Option<AnyAlgorithm>)>,
}

pub(super) fn run(args: &SuggestArgs) -> Result<u8, Failure> {
    let LogArgs { inputs: logs, format, .. } = &args.log;
    let format = format.read().map_err(Failure::input)?;
    for input in logs {
        // A pipe has nothing left the second time.
        let is_pipe = is_dash(input) || input.metadata().is_ok_and(|data| !data.is_file());
        if is_pipe && !input.is_dir() {
            let what = "the log is read twice, and a pipe only once; name a file";
            return Err(Failure::input(format!("INPUT {}: {what}", input.display())));
        }
    }
    let (name, text) = inputs::policy_text(&args.log.policy)?;
    let limits = policy::parse(&name, &text)?;
    let interrupt = Interrupt::default();
    interrupt.catch()?;
    pollster::block_on(async {
        let read = |what, how| inputs::requests(what, logs, &format, &interrupt, how);
        let mut requests = read("needs: ", Reading::default())?;
        let (limits, left_out) = requests.applicable(limits)?;
        let mut first = observe(&limits, requests).await?;
        if first.tally.nothing_applied() {
            return Err(Failure::input(format!(
                "{}: no limit applies to any request. {}",
                args.log.policy.display(),
                list_identifiers(&limits)
            )));
        }
        let too_many = first.tally.left_out();
        let needs = first.tally.limits.iter_mut().map(|counts| counts.needs.take());
        let rows = limits.iter().zip(needs).filter_map(|(limit, needs)| {
            let needs = needs?;
            let proposed = needs.smallest(args.target.part_of(needs.callers()));
            Some(Row { limit, needs, proposed, denied_together: 0, spread: None })
        });
        let mut rows: Vec<_> = rows.collect();
        if first.order.is_in_seconds && limits.iter().any(is_finer_than_a_second) {
            let again = Reading { silent: true, spread: true, ..Reading::default() };
            let spread = observe(&limits, read("spread: ", again)?).await?;
            let needs = spread.tally.limits.into_iter().filter_map(|counts| counts.needs);
            for (row, needs) in rows.iter_mut().zip(needs) {
                let proposed = needs.smallest(args.target.part_of(needs.callers()));
                row.spread = is_finer_than_a_second(row.limit).then_some((needs, proposed));
            }
        }
        let again = Reading { silent: true, ..Reading::default() };
        let again = read("check: ", again)?;
        let proposed = limiter(proposal(&limits, &rows).map_err(|error| no_proposal(&error))?);
        let second = replay(Judge::new(&proposed, true, false), again).await?;
        for (row, counts) in rows.iter_mut().zip(&second.tally.limits) {
            let nearness = counts.nearness.as_ref();
            row.denied_together =
                nearness.map_or(0, |nearness| nearness.histogram().callers_denied);
        }
        if let Some(path) = &args.write {
            let settings =
                rows.iter().filter_map(|row| Some((row.limit.name(), setting(&row.proposed?))));
            let proposed = policy::with_settings(&text, &settings.collect::<Vec<_>>());
            let written =
                File::create_new(path).and_then(|mut file| file.write_all(proposed.as_bytes()));
            written.map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => Failure::input(format!(
                    "--write {}: the file exists, and is left as it is; name a new one",
                    path.display()
                )),
                _ => Failure::writing(path, &error),
            })?;
        }
        let most = rows.iter().map(|row| row.needs.callers()).max().unwrap_or(0);
        let none = (args.target.is_some_share() && args.target.part_of(most) == 0).then(|| {
            let callers = plural(most, "caller", "callers");
            format!("--target allows to deny none of {callers}; raise it to leave some out")
        });
        let others = none.into_iter().chain(too_many).chain(left_out);
        let notes = second.notes(&limits, others).into_iter();
        let notes = notes.fold(String::new(), |text, note| text + "note: " + &note + "\n\n");
        let out = if args.json {
            // Standard output has a line per limit.
            let _ = io::stderr().write_all(notes.as_bytes());
            lines(&rows)
        } else {
            table(args, &notes, &rows)
        };
        super::print(out)
    })
}

fn limiter(limits: Limits<AnyAlgorithm>) -> RateLimiter<MemoryStore> {
    RateLimiter::new(limits, store::memory()).allow_unlimited()
}

fn no_proposal(error: &ConfigError) -> Failure {
    Failure::input(format!("no proposal: {error}"))
}

/// Reads the log once, to see what callers need of the limits.
async fn observe(
    limits: &Limits<AnyAlgorithm>,
    requests: ReplayedRequests,
) -> Result<ReplayOutcome, Failure> {
    let limiter = limiter(limits.clone());
    replay(Judge::only_observing(&limiter).map_err(|error| no_proposal(&error))?, requests).await
}

/// Reads the log once.
async fn replay(
    this: Judge<'_, MemoryStore>,
    requests: ReplayedRequests,
) -> Result<ReplayOutcome, Failure> {
    let replay = Replay { this, other: None, requests, decisions: None };
    let mut outcome = replay.run().await;
    std::mem::replace(&mut outcome.ended, Ok(())).map(|()| outcome)
}

/// The policy with the proposed limits in the place of its own.
fn proposal(
    limits: &Limits<AnyAlgorithm>,
    rows: &[Row<'_>],
) -> Result<Limits<AnyAlgorithm>, ConfigError> {
    let proposed = limits.iter().zip(rows).map(|(limit, row)| {
        let algorithm = row.proposed.unwrap_or(*limit.algorithm());
        let proposed = with_algorithm(limit, limit.name(), algorithm)?;
        Ok(if limit.is_shadow() { proposed.shadow() } else { proposed })
    });
    Limits::new(proposed.collect::<Result<Vec<_>, ConfigError>>()?)
}

fn lines(rows: &[Row<'_>]) -> String {
    let line = |row: &Row<'_>| {
        let told_by = |needs: &Needs, algorithm: &AnyAlgorithm| json!({ "algorithm": in_words(algorithm, row.limit), "callers_denied": needs.callers_denied_by(algorithm) });
        let told = |algorithm: &AnyAlgorithm| told_by(&row.needs, algorithm);
        let proposed = row.proposed.map(|algorithm| {
            let mut proposed = told(&algorithm);
            proposed["callers_denied_together"] = row.denied_together.into();
            proposed
        });
        let spread = row.spread.as_ref().map(|(needs, proposed)| {
            let told = |algorithm: &AnyAlgorithm| told_by(needs, algorithm);
            json!({ "now": told(row.limit.algorithm()), "proposed": proposed.as_ref().map(told) })
        });
        json!({
            "name": row.limit.name(), "callers": row.needs.callers(),
            "now": told(row.limit.algorithm()), "proposed": proposed, "spread": spread,
        })
    };
    json_lines(rows.iter().map(line))
}

fn table(args: &SuggestArgs, notes: &str, rows: &[Row<'_>]) -> String {
    let line = |row: &Row<'_>| {
        let (now, callers) = (row.limit.algorithm(), row.needs.callers());
        let denied = |denied| format!("{} ({})", count(denied), share(denied, callers));
        let mut cells = vec![row.limit.name().to_owned(), count(callers), in_words(now, row.limit)];
        cells.push(denied(row.needs.callers_denied_by(now)));
        match &row.proposed {
            Some(algorithm) => {
                cells.extend([
                    setting(algorithm),
                    denied(row.needs.callers_denied_by(algorithm)),
                    denied(row.denied_together),
                ]);
                if let Some((needs, proposed)) = &row.spread {
                    let shown = proposed.as_ref().map_or("nothing".to_owned(), setting);
                    cells.extend([denied(needs.callers_denied_by(now)), shown]);
                }
            }
            None if now.capacity() == 0 => cells.push("nothing: a rate of 0 denies all".to_owned()),
            None if callers == 0 => cells.push("no caller was seen".to_owned()),
            None => cells.push("nothing: no such limit is large enough".to_owned()),
        }
        cells
    };
    let mut columns =
        vec!["name", "#callers", "now", "#denied", "write", "#denied", "#with the others"];
    let is_spread = rows.iter().any(|row| row.spread.is_some());
    columns.extend(
        is_spread.then_some(["#denied if spread", "write if spread"]).into_iter().flatten(),
    );
    let table = TextTable::new(&columns, rows.iter().map(line)).text();
    let spread = "\"if spread\" is what the limit as it is denies, and what to write, if the requests of each second came\n\
                  spread evenly within it; the truth is between the two.\n";
    let locks_out = "Of a lockout, \"denied\" is the number of callers that it locks out, though some may not come back meanwhile.\n";
    let is_lockout = |row: &Row<'_>| matches!(row.limit.algorithm(), AnyAlgorithm::Lockout(_));
    names_of(&args.log.inputs)
        + "\n\n"
        + notes
        + &table
        + "\n\"denied\" is the number of callers that the limit alone denies at least once. \"with the others\" is the same\n\
         in a replay of all proposed limits together, in which a request that another limit denies is not charged.\n\
         Abusers are callers too: where the log has some, raise --target to leave them out.\n"
        + if is_spread { spread } else { "" }
        + if rows.iter().any(is_lockout) { locks_out } else { "" }
}
