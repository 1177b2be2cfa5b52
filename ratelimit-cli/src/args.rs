//! The command-line arguments.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use ratelimit_core::{AnyAlgorithm, Limits};
use ratelimit_replay::arguments::FormatArgs;
use ratelimit_replay::caller::Caller;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::suggest::DeniedShare;

/// Try rate limits on yesterday's traffic, and look into the ones in use.
///
/// Exit codes: 0 done; 1 denied (only `check`); 2 wrong use or input; 3 the store could not be
/// reached or failed; 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "ratelimit", version, max_term_width = 100, after_help = include_str!("help/examples.txt"))]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replay an access log or a trace through a policy, at its own times.
    #[command(after_long_help = include_str!("help/replay.txt"))]
    Replay(ReplayArgs),
    /// Propose the smallest limits that deny no more than a share of the callers in a log.
    ///
    /// The policy is where to begin: algorithms, rates of buckets and lengths of windows stay; the
    /// burst of a bucket and the count of a window are proposed. The inputs are read twice.
    #[command(after_long_help = include_str!("help/suggest.txt"))]
    Suggest(SuggestArgs),
    /// Report the mistakes of a policy. Exits with 2 if there are any.
    #[command(after_long_help = include_str!("help/lint.txt"))]
    Lint(LintArgs),
    /// List the formats of logs, or show what an input would be read as.
    #[command(after_long_help = include_str!("help/formats.txt"))]
    Formats(FormatsArgs),
    /// Check one request now, and charge it. Exits with 1 if it is denied.
    #[command(after_long_help = include_str!("help/check.txt"))]
    Check(CheckArgs),
    /// Show a caller's stored state, and how its next request would be decided.
    #[command(after_long_help = include_str!("help/inspect.txt"))]
    Inspect(InspectArgs),
    /// Give a caller its full capacity back, in every limit that applies, or in one.
    #[command(after_long_help = include_str!("help/reset.txt"))]
    Reset(ResetArgs),
    /// Set, show, list and clear records of single callers: other numbers, blocked, or exempt.
    #[command(after_long_help = include_str!("help/record.txt"))]
    Record {
        #[command(subcommand)]
        command: RecordCommand,
    },
    /// List the callers that are being limited now.
    #[command(after_long_help = include_str!("help/top.txt"))]
    Top(TopArgs),
    /// Free callers that are locked by states from the future, after a server's clock was ahead.
    #[command(after_long_help = include_str!("help/heal.txt"))]
    Heal(HealArgs),
    /// Print the JSON schema of policies, with which editors complete and check them.
    #[command(after_help = include_str!("help/schema.txt"))]
    Schema,
    /// Print a script that completes this tool's arguments in a shell.
    #[command(after_help = include_str!("help/completions.txt"))]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the man pages of this tool and its commands.
    Man {
        /// The folder to write to, such as ~/.local/share/man/man1. It is made if it is missing.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

/// A policy, and what to replay against it.
#[derive(Debug, Args)]
pub(crate) struct LogArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    #[command(flatten)]
    pub(crate) format: FormatArgs,

    /// The access logs or traces, plain or compressed; `-` for standard input.
    ///
    /// Several, such as the logs of several servers or rotated ones, are decided together by their
    /// times. The lines of an access log are sorted within five minutes; those of a trace keep
    /// their order.
    #[arg(value_name = "INPUT", required = true)]
    pub(crate) inputs: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct FormatsArgs {
    #[command(flatten)]
    pub(crate) format: FormatArgs,

    /// The access log or trace whose first requests are shown, as they would be read.
    #[arg(value_name = "INPUT")]
    pub(crate) inputs: Vec<PathBuf>,

    /// One line of JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    pub(crate) log: LogArgs,

    /// The store that keeps the states: `memory`, `redis://host:port` or another URL.
    ///
    /// The URLs are `redis://[user:password@]host[:port][/db]`;
    /// `redis-sentinel://host[:port][,host[:port]…]/SERVICE[/db]`, the master that these name; or
    /// `redis-cluster://host[:port][,host[:port]…]`. Encrypted: `rediss://`, `rediss-sentinel://`,
    /// `rediss-cluster://`, with `?tls-ca=FILE` for an authority of your own and
    /// `&tls-cert=FILE&tls-key=FILE` for a certificate to show. At a Unix socket:
    /// `redis+unix:///path`. `?mode=cas` compares and sets, and `?mode=multi` uses transactions,
    /// instead of scripts; `?client=fred` uses another client. On Redis a replay uses keys of its
    /// own, and removes them at the end. Redis needs a build with the feature `redis` or `fred`.
    #[arg(long, value_name = "URL", default_value = "memory")]
    pub(crate) store: String,

    /// Write one decision per line here, as JSON.
    ///
    /// With `-` the decisions go to standard output, and the summary to standard error. The fields
    /// are below.
    #[arg(long, value_name = "OUT.jsonl")]
    pub(crate) decisions: Option<PathBuf>,

    /// Write a page here: what would have been denied, who is hurt, whether each limit is right,
    /// and when.
    ///
    /// It needs no network. Its numbers are also in it as JSON (the element with the id `data`).
    #[arg(long, value_name = "OUT.html")]
    pub(crate) report: Option<PathBuf>,

    /// Print the numbers of the summary and the report as one line of JSON instead of sentences.
    #[arg(long)]
    pub(crate) json: bool,

    /// Decide every request by this policy as well, and show whom it would newly deny and whom it
    /// would free.
    #[arg(long, value_name = "OTHER.toml")]
    pub(crate) compare: Option<PathBuf>,

    /// Decide by these records of single callers: lines of JSON, as `record list --json` prints
    /// them. Only in memory.
    ///
    /// A line is below. A record stands from the beginning of the input until its end.
    #[arg(long, value_name = "RECORDS.jsonl")]
    pub(crate) records: Option<PathBuf>,

    /// Stop at the first bad line (exit code 2) instead of skipping it.
    #[arg(long)]
    pub(crate) strict: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LintArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// The identifiers that the service gives, such as `ip,user`: a limit that counts by another
    /// one is a problem.
    ///
    /// `key` is the bare key, by which a limit without `key = […]` counts.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) identifiers: Option<Vec<String>>,

    /// Require that each limit declares `on_outage`, as a `Fallback` does.
    #[arg(long)]
    pub(crate) fallback: bool,

    /// One line of JSON per problem instead of sentences.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SuggestArgs {
    #[command(flatten)]
    pub(crate) log: LogArgs,

    /// The most callers of each limit that may be denied at least once, such as `0.1%`.
    #[arg(long, value_name = "SHARE", value_parser = DeniedShare::parse)]
    pub(crate) target: DeniedShare,

    /// Write the policy with the proposed limits here, to a new file. All else stays as it is in
    /// the policy.
    #[arg(long, value_name = "OUT.toml")]
    pub(crate) write: Option<PathBuf>,

    /// One line of JSON per limit instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A caller, and where its states are.
#[derive(Debug, Args)]
pub(crate) struct CallerArgs {
    /// The caller: a bare key, or identifiers as the policy names them, such as
    /// `ip=192.0.2.7 user=bob`. Beside identifiers, `key=…` is a bare key.
    #[arg(value_name = "KEY", required = true)]
    pub(crate) keys: Vec<String>,

    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// The store: `redis://…` and other URLs (see `replay --help`). `check` also takes `memory`, in
    /// which every caller is new.
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,

    /// The prefix of every key in Redis.
    #[arg(long, value_name = "PREFIX", default_value = "rl", value_parser = prefix)]
    pub(crate) prefix: String,

    /// The file with the secret of a store that hides identifiers; or set `RATELIMIT_SECRET`.
    ///
    /// For a store with a tag, the URL says which: `?tag=up-to:/` or `?tag=fixed:TEXT`.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,

    /// The length of the network that an IPv6 address `ip=…` is counted by, as in the HTTP layer;
    /// 128 takes it as it is.
    #[arg(long, value_name = "BITS", default_value_t = 64, value_parser = clap::value_parser!(u8).range(1..=128))]
    pub(crate) ipv6_prefix: u8,

    /// One line of JSON instead of sentences.
    #[arg(long)]
    pub(crate) json: bool,
}

impl CallerArgs {
    /// The caller, as these limits count it.
    pub(crate) fn caller(&self, limits: &Limits<AnyAlgorithm>) -> Result<Caller, Failure> {
        Caller::from_args(&self.keys, limits, self.ipv6_prefix)
    }
}

/// The numbers of one customer.
#[derive(Debug, Args)]
pub(crate) struct NumbersArgs {
    /// Other numbers for a limit, as a customer has them: `api="100/s burst 200"`. May be repeated.
    ///
    /// The name of the limit's algorithm may be left out. The limit says in the policy which it
    /// accepts (`max`).
    #[arg(long, value_name = "LIMIT=NUMBERS", value_parser = numbers)]
    pub(crate) numbers: Vec<(String, String)>,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    #[command(flatten)]
    pub(crate) own: NumbersArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// Reset the caller under this limit only.
    #[arg(long, value_name = "LIMIT")]
    pub(crate) limit: Option<String>,
}

/// What to do with records.
#[derive(Debug, Subcommand)]
pub(crate) enum RecordCommand {
    /// Set the record of a caller under a limit. All processes decide by it from now on.
    Set(SetRecordArgs),
    /// Show the records of a caller.
    Get(CallerArgs),
    /// List the records of all callers.
    List(ScanArgs),
    /// Clear the record of a caller under a limit: the policy decides again.
    Clear(ClearRecordArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ClearRecordArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// The name of the limit.
    #[arg(long, value_name = "LIMIT")]
    pub(crate) limit: String,

    /// Who does this, for the line that is printed; the user of this process by default.
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
}

#[allow(clippy::struct_excessive_bools, reason = "each is an argument")]
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true))]
#[command(group = clap::ArgGroup::new("end").required(true))]
pub(crate) struct SetRecordArgs {
    #[command(flatten)]
    pub(crate) of: ClearRecordArgs,

    /// Other numbers for the caller: `"100/s burst 200"`.
    #[arg(long, value_name = "NUMBERS", group = "change")]
    pub(crate) numbers: Option<String>,

    /// Deny the caller.
    #[arg(long, group = "change")]
    pub(crate) blocked: bool,

    /// Allow the caller, and charge nothing.
    #[arg(long, group = "change")]
    pub(crate) exempt: bool,

    /// For how long from now, such as `2h`.
    #[arg(long = "for", value_name = "TIME", group = "end", value_parser = humantime::parse_duration)]
    pub(crate) lasts: Option<Duration>,

    /// Until when, such as `2027-01-31T00:00:00Z`.
    #[arg(long, value_name = "TIME", group = "end", value_parser = parse_time)]
    pub(crate) until: Option<SystemTime>,

    /// Until it is cleared.
    #[arg(long, group = "end")]
    pub(crate) forever: bool,

    /// Set it even if it lowers what a record of the caller has raised.
    #[arg(long)]
    pub(crate) replace: bool,
}

fn parse_time(text: &str) -> Result<SystemTime, String> {
    humantime::parse_rfc3339_weak(text)
        .map_err(|error| format!("{error}; write a date and a time, such as 2027-01-31T00:00:00Z"))
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    #[command(flatten)]
    pub(crate) own: NumbersArgs,

    /// The cost of the request: under all limits, or under one; 1 by default. May be
    /// repeated.
    #[arg(long, value_name = "N|LIMIT=N", value_parser = cost)]
    pub(crate) cost: Vec<(Option<String>, u64)>,

    /// Metadata for a window-log to keep with the request, such as the name of its sender.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) metadata: String,

    /// Decide, but charge nothing.
    #[arg(long)]
    pub(crate) peek: bool,
}

/// Which keys of a store to look at.
#[derive(Debug, Args)]
pub(crate) struct ScanArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// Where the states are: `redis://…` and the like (see `replay --help`). On a cluster, every
    /// master is scanned.
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,

    /// The prefix of every key in Redis.
    #[arg(long, value_name = "PREFIX", default_value = "rl", value_parser = prefix)]
    pub(crate) prefix: String,

    /// Stop after this many keys.
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_keys: u64,

    /// One line of JSON per row instead of a table, and one with the totals.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) scan: ScanArgs,

    #[command(flatten)]
    pub(crate) own: NumbersArgs,

    /// What a request costs: a caller is limited if a request at this cost is denied now.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cost: u64,

    /// Show at most this many callers, those that must wait longest first. 20 unless given.
    #[arg(long, value_name = "N")]
    pub(crate) most: Option<usize>,

    /// Look again and again, with this pause after each scan: as a live table in a terminal, and
    /// otherwise as one list after the other.
    ///
    /// The keys of the live table are in its last line. It scrolls through all callers.
    #[arg(long, value_name = "PAUSE", num_args = 0..=1, require_equals = true, default_missing_value = "2s", value_parser = watch_pause)]
    pub(crate) watch: Option<Duration>,

    /// How many keys the server examines in one step.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) count: u64,

    /// The pause between two steps, in which the server serves other clients.
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = humantime::parse_duration)]
    pub(crate) pause: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct HealArgs {
    #[command(flatten)]
    pub(crate) scan: ScanArgs,

    /// List the states, and change nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The pause between two scans, which leaves the server to its other clients.
fn watch_pause(text: &str) -> Result<Duration, String> {
    const LEAST: Duration = Duration::from_millis(100);
    let pause = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let refused = || "the pause is at least 100ms, such as 2s".to_owned();
    (pause >= LEAST).then_some(pause).ok_or_else(refused)
}

/// A prefix that leaves the tag of a key to the store, which refuses all others.
fn prefix(text: &str) -> Result<String, String> {
    let is_plain = !text.contains(['{', '}']) && !text.chars().any(char::is_control);
    let refused = || "it contains braces or control characters; choose one without".to_owned();
    is_plain.then(|| text.to_owned()).ok_or_else(refused)
}

/// The name of a limit, and other numbers for it.
fn numbers(text: &str) -> Result<(String, String), String> {
    let (limit, numbers) = text.split_once('=').ok_or_else(|| {
        format!("{text:?} names no limit; write it before the numbers, as api=\"100/s burst 200\"")
    })?;
    Ok((limit.to_owned(), numbers.to_owned()))
}

/// A cost, and the limit under which it is one.
fn cost(text: &str) -> Result<(Option<String>, u64), String> {
    let (limit, number) = match text.rsplit_once('=') {
        Some((limit, number)) => (Some(limit.to_owned()), number),
        None => (None, text),
    };
    let wrong = |_| format!("{number:?} is no whole number, such as 5 or input=812");
    Ok((limit, number.parse().map_err(wrong)?))
}
