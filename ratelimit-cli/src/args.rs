//! The command-line arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use ratelimit_core::Rate;
use ratelimit_redis::{Cas, Lua, Mode, Multi};

use crate::suggest::Share;

/// The formats of `replay`, below its options.
const FORMATS: &str = r#"Trace lines (JSONL), one request per line:
  {"at_us": 9500000, "key": "k", "cost": 5, "op": "acquire"}
    at_us  microseconds since the Unix epoch, 0 or more
    key    the caller; or several identifiers: "keys": {"ip": "192.0.2.7", "user": "bob"}
    cost   a whole number, 0 or more; 1 if left out
    op     acquire (default); peek: decides as acquire and charges nothing; refund: gives the cost back,
           never above the capacity; force: charges whatever is left; reset: full capacity again
Trace lines (CSV): a header at_us,key,cost,op, and a column per further identifier. An empty cell is left out.

Decision lines (--decisions), one per request, in order:
  {"at_us":9500000,"key":"k","cost":5,"allowed":false,"limit":5,"remaining":3,"retry_after_us":3000000,"reset_after_us":2000000}
    limit           the capacity; remaining: whole units of cost left after this decision; both null where no limit
                    applies
    retry_after_us  until the same request fits; null if it never does
    reset_after_us  until the limit has recovered in full
  With several limits the line is the verdict, and "limits":[{"name":…,…}] holds the decision of each limit. With
  shadow limits, "shadow":[{"name":…,…}] holds what each of them would have decided."#;

/// Where a completion script belongs.
const COMPLETIONS: &str = "\
Load it when the shell starts:
  bash  ratelimit completions bash > ~/.local/share/bash-completion/completions/ratelimit
  zsh   ratelimit completions zsh > DIR/_ratelimit, where DIR is in $fpath
  fish  ratelimit completions fish > ~/.config/fish/completions/ratelimit.fish";

/// How an editor finds the schema.
const SCHEMA: &str = "\
Save it beside your policies, and name it in them:
  ratelimit schema > ratelimit.schema.json
  TOML  a first line `#:schema ./ratelimit.schema.json` (taplo, Even Better TOML)
  YAML  a first line `# yaml-language-server: $schema=./ratelimit.schema.json`
  JSON  a first field `\"$schema\": \"./ratelimit.schema.json\"`
This tool reads TOML. A program that uses ratelimit-core reads the other formats as well.";

/// Try rate limits on yesterday's traffic, and look into the ones in use.
///
/// Exit codes: 0 done; 1 denied (only `check`); 2 wrong use or input; 3 the store could not be
/// reached or failed; 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "ratelimit", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Decide every request of an access log or a trace, at the log's own time.
    #[command(after_long_help = FORMATS)]
    Replay(ReplayArgs),
    /// Ask for one decision, now: may this caller do this? Exits with 1 if not.
    Check(CheckArgs),
    /// Show what is stored for a caller, and how its next request would be decided.
    Inspect(InspectArgs),
    /// Forget a caller: full capacity in every limit that applies.
    Reset(ResetArgs),
    /// Propose limits that would have denied no more than a share of their callers in a log.
    Suggest(SuggestArgs),
    /// Show who is limited now, by a scan that lets others' requests pass.
    Top(TopArgs),
    /// Measure decisions on your own server: how many per second, how long one takes, what it costs the server.
    Bench(BenchArgs),
    /// Print the JSON schema of policies, by which editors complete and check them.
    #[command(after_help = SCHEMA)]
    Schema,
    /// Print a script that completes this tool's arguments in a shell.
    #[command(after_help = COMPLETIONS)]
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

    /// The store that keeps the states: `memory`; `redis://[user:password@]host[:port][/db]`;
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

    /// Write one decision per line here, as JSON (`-`: standard output, and the summary goes to
    /// standard error). The fields are below.
    #[arg(long, value_name = "OUT.jsonl")]
    pub(crate) decisions: Option<PathBuf>,

    /// Write a page with charts here: requests over time, how near callers came to each limit, who was denied and
    /// for how long. It needs no network; its numbers are also in it as JSON (the element with the id `data`).
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

    /// The access log or trace, plain or gzipped; `-` for standard input.
    #[arg(value_name = "INPUT")]
    pub(crate) input: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct SuggestArgs {
    /// The policy to begin with: a TOML document of `[[limit]]` tables; `-` for standard input. Algorithms, rates of
    /// buckets and lengths of windows stay; the burst of a bucket and the count of a window are proposed.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// The most callers of each limit that may be denied at least once, such as `0.1%`.
    #[arg(long, value_name = "SHARE", value_parser = Share::parse)]
    pub(crate) target: Share,

    /// How to read the input.
    #[arg(long, value_enum, default_value_t = FormatArg::Auto)]
    pub(crate) format: FormatArg,

    /// One line of JSON per limit instead of a table.
    #[arg(long)]
    pub(crate) json: bool,

    /// The access log or trace, plain or gzipped. It is read twice.
    #[arg(value_name = "INPUT")]
    pub(crate) input: PathBuf,
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

    /// The file with the secret that hides identifiers in keys; or set the environment variable `RATELIMIT_SECRET`.
    /// How keys are tagged stands in the URL: `?tag=up-to:/` or `?tag=fixed:TEXT`.
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

    /// What every key in Redis begins with.
    #[arg(long, value_name = "PREFIX", default_value = "rl")]
    pub(crate) prefix: String,

    /// What a request costs: a caller is limited if a request at this cost is denied now.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cost: u64,

    /// The most callers that are shown, those that must wait longest first.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) most: usize,

    /// The most keys that are looked at.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub(crate) max_keys: u64,

    /// How many keys the server examines in one step.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) count: u64,

    /// How long to pause between two steps, so that others' requests pass.
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = length_of_time)]
    pub(crate) pause: Duration,

    /// One line of JSON per caller instead of a table, and one with the totals.
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
    /// The store: `redis://…` and other URLs (see `replay --help`), or `memory`. On Redis the benchmark uses keys
    /// of its own, which begin with `rl:bench-`, and removes them at the end, also when it is interrupted or fails. The user needs SCAN and UNLINK, and INFO for the server's time.
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

    /// The number of concurrent requests on one connection. Several numbers, separated by commas, are measured one
    /// after another. All tasks run on one thread, which bounds the result.
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
