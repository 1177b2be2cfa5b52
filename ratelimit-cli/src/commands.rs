//! One file per command.

#[cfg(feature = "_servers")]
use std::borrow::Cow;
#[cfg(feature = "_servers")]
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

#[cfg(feature = "_servers")]
use ratelimit_core::{AnyAlgorithm, Limit, Limits};
#[cfg(feature = "_servers")]
use ratelimit_redis::RedisError;
use ratelimit_replay::failure::Failure;
#[cfg(feature = "_servers")]
use ratelimit_replay::text::quote;

#[cfg(feature = "_servers")]
use crate::args::CallerArgs;
use crate::args::Command;
#[cfg(feature = "_servers")]
use crate::store::{Remote, in_each_mode};

mod check;
mod documents;
mod formats;
#[cfg(feature = "_servers")]
mod heal;
#[cfg(feature = "_servers")]
mod inspect;
mod lint;
#[cfg(feature = "_servers")]
mod record;
mod replay;
#[cfg(feature = "_servers")]
mod reset;
mod suggest;
#[cfg(feature = "_servers")]
mod top;

/// How many names of states a note shows.
#[cfg(feature = "_servers")]
const SHOWN_NAMES: usize = 5;

/// Runs a command and returns its exit code.
pub(crate) fn run(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Replay(args) => replay::run(args),
        Command::Check(args) => check::run(args),
        Command::Formats(args) => formats::run(args),
        Command::Lint(args) => lint::run(args),
        Command::Suggest(args) => suggest::run(args),
        Command::Schema => documents::schema(),
        Command::Completions { shell } => documents::completions(*shell),
        Command::Man { folder } => documents::man(folder),
        #[cfg(feature = "_servers")]
        Command::Inspect(args) => inspect::run(args),
        #[cfg(feature = "_servers")]
        Command::Record { command } => record::run(command),
        #[cfg(feature = "_servers")]
        Command::Reset(args) => reset::run(args),
        #[cfg(feature = "_servers")]
        Command::Top(args) => top::run(args),
        #[cfg(feature = "_servers")]
        Command::Heal(args) => heal::run(args),
        #[cfg(not(feature = "_servers"))]
        _ => Err(crate::store::no_client()),
    }
}

/// That these limits have no state for a caller, and why that may be.
#[cfg(feature = "_servers")]
fn not_stored(args: &CallerArgs, limits: &[&str], verb: &str) -> String {
    let (limits, prefix) = (limits.join(", "), quote(&args.prefix, 60));
    format!(
        "nothing {verb} stored for this caller under the prefix {prefix} in {limits}; the service may name its limit or \
         identifier otherwise, use another prefix (--prefix), or hide identifiers by a secret (--secret-file)"
    )
}

/// That states were found which no limit of the policy has, and why that may be; none if there are
/// none.
#[cfg(feature = "_servers")]
fn unknown_states(names: &BTreeSet<String>, what: &str) -> Option<String> {
    let mut names = names.iter().map(|name| quote(name, 60));
    let mut shown: Vec<_> = names.by_ref().take(SHOWN_NAMES).collect();
    shown.extend(Some(names.count()).filter(|more| *more > 0).map(|more| format!("{more} more")));
    (!shown.is_empty()).then(|| {
        format!(
            "{what} stored under {}, which no limit of the policy is; if the service names a limit otherwise, or gives it another \
             algorithm or window, take the service's policy",
            shown.join(", ")
        )
    })
}

/// The names of states of these callers that no limit of the policy has.
#[cfg(feature = "_servers")]
async fn unknown_of(
    store: &Remote,
    keyed: &[(&Limit<AnyAlgorithm>, Cow<'_, str>)],
    limits: &Limits<AnyAlgorithm>,
) -> Result<BTreeSet<String>, RedisError> {
    let callers: BTreeSet<_> = keyed.iter().map(|(_, key)| key).collect();
    let mut unknown = BTreeSet::new();
    for caller in callers {
        let names = in_each_mode!(store, store => store.unknown_states(limits, &store.shared_key(caller)).await);
        unknown.extend(names?);
    }
    Ok(unknown)
}

/// Writes to standard output, which may be closed, and returns the exit code of success.
fn print(text: impl AsRef<[u8]>) -> Result<u8, Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_ref()).and_then(|()| out.flush());
    written.map(|()| 0).map_err(|error| Failure::writing(Path::new("standard output"), &error))
}
