//! The command-line arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use ratelimit_core::Rate;
use ratelimit_redis::{Cas, Lua, Mode, Multi};

use crate::help;
use crate::suggest::Share;

/// Try rate limits on yesterday's traffic, and look into the ones in use.
///
/// Exit codes: 0 done; 1 denied (only `check`); 2 wrong use or input; 3 the store could not be
/// reached or failed; 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "ratelimit", version, max_term_width = 100, after_help = help::EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Decide every request of an access log or a trace, at the log's own time.
    #[command(after_long_help = help::REPLAY)]
    Replay(ReplayArgs),
    /// Decide one request of a caller now, and charge it. Exits with 1 if it is denied.
    #[command(after_long_help = help::CHECK)]
    Check(CheckArgs),
    /// Show what is stored for a caller, and how its next request would be decided.
    #[command(after_long_help = help::INSPECT)]
    Inspect(InspectArgs),
    /// Forget a caller: full capacity in every limit that applies.
    #[command(after_long_help = help::RESET)]
    Reset(ResetArgs),
    /// Say what is wrong with a policy. Exits with 2 if anything is.
    #[command(after_long_help = help::LINT)]
    Lint(LintArgs),
    /// Propose limits that would have denied no more than a share of their callers in a log.
    #[command(after_long_help = help::SUGGEST)]
    Suggest(SuggestArgs),
    /// List the callers that a limit denies now, by a bounded scan of the store's keys.
    #[command(after_long_help = help::TOP)]
    Top(TopArgs),
    /// Free callers that are locked by states from the future, after a server's clock was ahead.
    #[command(after_long_help = help::HEAL)]
    Heal(HealArgs),
    /// Measure decisions on your own server: decisions per second, latency, processor time.
    #[command(after_long_help = help::BENCH)]
    Bench(BenchArgs),
    /// Print the JSON schema of policies, by which editors complete and check them.
    #[command(after_help = help::SCHEMA)]
    Schema,
    /// Print a script that completes this tool's arguments in a shell.
    #[command(after_help = help::COMPLETIONS)]
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

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// The store that keeps the states: `memory`, `redis://host:port` or another URL.
    ///
    /// The URLs are `redis://[user:password@]host[:port][/db]`;
    /// `redis-sentinel://host[:port][,host[:port]…]/SERVICE[/db]`, the master that these name; or
    /// `redis-cluster://host[:port][,host[:port]…]`. Encrypted: `rediss://`, `rediss-sentinel://`,
    /// `rediss-cluster://`, with `?tls-ca=FILE` for an authority of your own and
    /// `&tls-cert=FILE&tls-key=FILE` for a certificate to show. `?mode=cas` compares and sets, and
    /// `?mode=multi` uses transactions, instead of scripts; `?client=fred` uses another client.
    /// On Redis a replay uses keys of its own, and removes them at the end.
    #[arg(long, value_name = "URL", default_value = "memory")]
    pub(crate) store: String,

    /// The format of the input.
    #[arg(long, value_enum, default_value_t = FormatArg::Auto)]
    pub(crate) format: FormatArg,

    /// The unit of the number at the end of an access log's lines, which tells how long each request took.
    ///
    /// Seconds with decimals, as `$request_time` of nginx writes them, need no unit. Limits on requests at the same time
    /// are left out where the input tells no durations.
    #[arg(long, value_enum, value_name = "UNIT")]
    pub(crate) duration_unit: Option<UnitArg>,

    /// Write one decision per line here, as JSON.
    ///
    /// With `-` the decisions go to standard output, and the summary to standard error. The fields are below.
    #[arg(long, value_name = "OUT.jsonl")]
    pub(crate) decisions: Option<PathBuf>,

    /// Write a page with charts here: requests over time, and who was denied.
    ///
    /// It also shows how near callers came to each limit and for how long they were denied. It needs no network; its numbers are also in it as JSON (the element with the id `data`).
    #[arg(long, value_name = "OUT.html")]
    pub(crate) report: Option<PathBuf>,

    /// Print the numbers of the summary and the report as one line of JSON instead of sentences.
    #[arg(long)]
    pub(crate) json: bool,

    /// Decide every request by this policy as well, with states of its own, and show the callers for whom they
    /// differ.
    #[arg(long, value_name = "OTHER.toml")]
    pub(crate) compare: Option<PathBuf>,

    /// Stop at the first bad line (exit code 2) instead of skipping it.
    #[arg(long)]
    pub(crate) strict: bool,

    /// The access logs or traces, plain or gzipped; `-` for standard input.
    ///
    /// Several, such as the logs of several servers or rotated ones, are decided together by their times. The lines of an
    /// access log are sorted within five minutes; those of a trace keep their order.
    #[arg(value_name = "INPUT", required = true)]
    pub(crate) inputs: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct LintArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// The identifiers that the service gives, such as `ip,user`: a limit that is kept by another one is a problem.
    ///
    /// `key` stands for the bare key, which a limit without `key = […]` is kept by.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) identifiers: Option<Vec<String>>,

    /// Require of each limit that it says what becomes of requests in an outage, as a `Fallback` does.
    #[arg(long)]
    pub(crate) fallback: bool,

    /// One line of JSON per problem instead of sentences.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SuggestArgs {
    /// The policy to begin with: a TOML document of `[[limit]]` tables; `-` for standard input.
    ///
    /// Algorithms, rates of
    /// buckets and lengths of windows stay; the burst of a bucket and the count of a window are proposed.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// The most callers of each limit that may be denied at least once, such as `0.1%`.
    #[arg(long, value_name = "SHARE", value_parser = Share::parse)]
    pub(crate) target: Share,

    /// How to read the input.
    #[arg(long, value_enum, default_value_t = FormatArg::Auto)]
    pub(crate) format: FormatArg,

    /// The unit of the number at the end of an access log's lines, as in `replay`.
    #[arg(long, value_enum, value_name = "UNIT")]
    pub(crate) duration_unit: Option<UnitArg>,

    /// One line of JSON per limit instead of a table.
    #[arg(long)]
    pub(crate) json: bool,

    /// The access logs or traces, plain or gzipped. They are read twice, and sorted as `replay` sorts them.
    #[arg(value_name = "INPUT", required = true)]
    pub(crate) inputs: Vec<PathBuf>,
}

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum UnitArg {
    /// Microseconds, as `%D` of Apache.
    Us,
    /// Milliseconds.
    Ms,
    /// Seconds, as `%T` of Apache.
    S,
}

impl UnitArg {
    pub(crate) const fn us(self) -> u64 {
        match self {
            Self::Us => 1,
            Self::Ms => 1_000,
            Self::S => 1_000_000,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// Decided by the first line of a known format.
    Auto,
    /// An access log in Common or Combined format.
    Combined,
    /// A trace, one JSON object per line.
    Jsonl,
    /// A trace as CSV with a header.
    Csv,
}

#[derive(Debug, Args)]
pub(crate) struct CallerArgs {
    /// The caller: a bare key, or identifiers as the policy names them, such as
    /// `ip=192.0.2.7 user=bob`.
    #[arg(value_name = "KEY", required = true)]
    pub(crate) keys: Vec<String>,

    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// The prefix of every key in Redis.
    #[arg(long, value_name = "PREFIX", default_value = "rl")]
    pub(crate) prefix: String,

    /// The file with the secret of a store that hides identifiers; or set `RATELIMIT_SECRET`.
    ///
    /// For a store with a tag, the URL says which: `?tag=up-to:/` or `?tag=fixed:TEXT`.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,

    /// One line of JSON instead of sentences.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// Where the states are: `redis://…` and the like (see `replay --help`). On a cluster, every master is scanned.
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,

    /// The prefix of every key in Redis.
    #[arg(long, value_name = "PREFIX", default_value = "rl")]
    pub(crate) prefix: String,

    /// What a request costs: a caller is limited if a request at this cost is denied now.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cost: u64,

    /// Show at most this many callers, those that must wait longest first.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) most: usize,

    /// Stop after this many keys.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub(crate) max_keys: u64,

    /// How many keys the server examines in one step.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) count: u64,

    /// The pause between two steps, in which the server serves other clients.
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = length_of_time)]
    pub(crate) pause: Duration,

    /// One line of JSON per caller instead of a table, and one with the totals.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct HealArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// Where the states are: `redis://…` and the like (see `replay --help`). On a cluster, every master is scanned.
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,

    /// The prefix of every key in Redis.
    #[arg(long, value_name = "PREFIX", default_value = "rl")]
    pub(crate) prefix: String,

    /// List the states, and change nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Stop after this many keys.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub(crate) max_keys: u64,

    /// One line of JSON per state instead of a table, and one with the totals.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// The store: `redis://…` and other URLs (see `replay --help`), or `memory`, in which every caller is new.
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,

    /// The cost of the request.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cost: u64,

    /// Metadata for a window-log to keep with the request, such as the name of its sender.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) metadata: String,

    /// Decide, but charge nothing.
    #[arg(long)]
    pub(crate) peek: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// The store: `redis://…` and other URLs (see `replay --help`).
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,
}

#[derive(Debug, Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// The store: `redis://…` and other URLs (see `replay --help`).
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The store: `redis://…` and other URLs (see `replay --help`), or `memory`.
    ///
    /// On Redis the benchmark uses keys of its own, which begin with `rl:bench-`, and removes them at the end, also
    /// when it is interrupted or fails. The user needs SCAN and UNLINK, and INFO for the server's time.
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,

    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input. Each caller has every identifier
    /// that the policy names.
    #[arg(long, value_name = "POLICY.toml", conflicts_with = "limit")]
    pub(crate) policy: Option<PathBuf>,

    /// One limit instead of a policy: the algorithm and its numbers, such as `gcra 10/s burst 20` or
    /// `fixed-window 100/m count attempts`.
    #[arg(long, value_name = "LIMIT", default_value = "gcra 100/s burst 1000000")]
    pub(crate) limit: String,

    /// The mode of the store on Redis, unless the URL names one. Transactions decide only limits that count attempts.
    #[arg(long, value_enum)]
    pub(crate) mode: Option<ModeArg>,

    /// The number of concurrent requests on one connection, or several numbers, separated by commas.
    ///
    /// Several are measured one after another. All tasks run on one thread, which bounds the result.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 16, 256],
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) tasks: Vec<u32>,

    /// The number of callers, each equally likely; several numbers as for --tasks.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 100_000],
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) keys: Vec<u32>,

    /// The length of each measurement, such as `500ms`, `5s` or `2m`: one per number of tasks and of keys.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = length_of_time)]
    pub(crate) duration: Duration,

    /// Also write one line of JSON per measurement to this file (`-`: to standard output, and the table goes to
    /// standard error).
    #[arg(long, value_name = "OUT.jsonl")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// One script per decision.
    Lua,
    /// Compare and set.
    Cas,
    /// Transactions of native commands.
    Multi,
}

impl ModeArg {
    /// The name of the mode in the URL of a store.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Lua => Lua::NAME,
            Self::Cas => Cas::NAME,
            Self::Multi => Multi::NAME,
        }
    }
}

/// The longest that one measurement may take.
const LONGEST: Duration = Duration::from_secs(3_600);

/// A length of time in the form that the period of a rate has.
fn length_of_time(text: &str) -> Result<Duration, String> {
    let rate = format!("1/{text}").parse::<Rate>();
    let length = rate.map(|rate| Duration::from_micros(rate.period_us()));
    match length {
        Ok(length) if length <= LONGEST => Ok(length),
        Ok(_) => Err("an hour is the most; write 1h or less".to_owned()),
        Err(_) => Err("write a length of time such as 500ms, 5s or 2m".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_benchmark_has_defaults_and_takes_several_numbers() {
        let bench = |more: &[&str]| {
            let arguments = ["ratelimit", "bench", "--store", "memory"].iter().chain(more);
            match Cli::try_parse_from(arguments).expect("arguments").command {
                Command::Bench(args) => args,
                other => panic!("{other:?}"),
            }
        };
        let args = bench(&[]);
        assert_eq!((args.tasks, args.keys), (vec![1, 16, 256], vec![1, 100_000]));
        assert_eq!((args.duration, args.mode), (Duration::from_secs(5), None));
        let args = bench(&["--tasks", "2,3", "--keys", "7", "--duration", "250ms"]);
        assert_eq!((args.tasks, args.keys), (vec![2, 3], vec![7]));
        assert_eq!(args.duration, Duration::from_millis(250));
    }
}
