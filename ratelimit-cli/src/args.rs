//! What can be said on the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// The formats of `replay`, below its options.
const FORMATS: &str = r#"Trace lines (JSONL), one request per line:
  {"at_us": 9500000, "key": "k", "cost": 5, "op": "acquire"}
    at_us  microseconds since the Unix epoch, 0 or more
    key    who asks; or several identifiers: "keys": {"ip": "192.0.2.7", "user": "bob"}
    cost   a whole number, 0 or more; 1 if left out
    op     acquire (default); peek: what an acquire would be told, charging nothing; refund: gives the cost back,
           never above the capacity; force: charges whatever is left; reset: full capacity again
Trace lines (CSV): a header at_us,key,cost,op, and a column per further identifier. An empty cell is left out.

Decision lines (--decisions), one per request, in order:
  {"at_us":9500000,"key":"k","cost":5,"allowed":false,"limit":5,"remaining":3,"retry_after_us":3000000,"reset_after_us":2000000}
    limit           the capacity; remaining: whole units of cost left after this decision; both null where no limit
                    applies
    retry_after_us  until the same request fits; null if it never does
    reset_after_us  until the limit has recovered in full
  With several limits the line is the verdict, and "limits":[{"name":…,…}] holds the decision of each limit."#;

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
    /// Show what is stored for a caller, and what it would be told.
    Inspect(InspectArgs),
    /// Forget a caller: full capacity in every limit that applies.
    Reset(ResetArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// Where to keep the states: `memory`; `redis://[user:password@]host[:port][/db]`;
    /// `redis-sentinel://host[:port][,host[:port]…]/SERVICE[/db]`, the master that these name; or
    /// `redis-cluster://host[:port][,host[:port]…]`. Encrypted: `rediss://`, `rediss-sentinel://`,
    /// `rediss-cluster://`, with `?tls-ca=FILE` for an authority of your own and
    /// `&tls-cert=FILE&tls-key=FILE` for a certificate to show. `?mode=cas` compares and sets, and
    /// `?mode=multi` uses transactions, instead of scripts; `?client=fred` uses another client.
    /// On Redis a replay uses keys of its own, and removes them at the end.
    #[arg(long, value_name = "URL", default_value = "memory")]
    pub(crate) store: String,

    /// How to read the input.
    #[arg(long, value_enum, default_value_t = FormatArg::Auto)]
    pub(crate) format: FormatArg,

    /// Write one decision per line here, as JSON (`-`: standard output, and the summary goes to
    /// standard error). The fields are below.
    #[arg(long, value_name = "OUT.jsonl")]
    pub(crate) decisions: Option<PathBuf>,

    /// Write the summary as a page with a chart here.
    #[arg(long, value_name = "OUT.html")]
    pub(crate) report: Option<PathBuf>,

    /// Stop at the first bad line (exit code 2) instead of skipping it.
    #[arg(long)]
    pub(crate) strict: bool,

    /// The access log or trace, plain or gzipped; `-` for standard input.
    #[arg(value_name = "INPUT")]
    pub(crate) input: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// Told by the first line that is one of a known format.
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
    /// Whom to ask about: a bare key, or identifiers as the policy names them, such as
    /// `ip=192.0.2.7 user=bob`.
    #[arg(value_name = "KEY", required = true)]
    pub(crate) keys: Vec<String>,

    /// The policy: a TOML document of `[[limit]]` tables; `-` for standard input.
    #[arg(long, value_name = "POLICY.toml")]
    pub(crate) policy: PathBuf,

    /// What every key in Redis begins with.
    #[arg(long, value_name = "PREFIX", default_value = "rl")]
    pub(crate) prefix: String,

    /// One line of JSON instead of sentences.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// Where the states are: `redis://…` and the like (see `replay --help`), or `memory` for a caller
    /// never seen before.
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,

    /// What the request costs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cost: u64,

    /// What a window-log is to keep of the request, such as who made it.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) metadata: String,

    /// Only say what would be decided; charge nothing.
    #[arg(long)]
    pub(crate) peek: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// Where the states are: `redis://…` and the like (see `replay --help`).
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,
}

#[derive(Debug, Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    pub(crate) caller: CallerArgs,

    /// Where the states are: `redis://…` and the like (see `replay --help`).
    #[arg(long, value_name = "URL")]
    pub(crate) store: String,
}
