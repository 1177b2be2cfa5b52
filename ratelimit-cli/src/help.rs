//! The texts that `--help` and the man pages show below the options. A test compares the fields of JSON with what the
//! commands print (`tests/json.rs`).

/// First steps.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ratelimit replay access.log --policy policy.toml --report report.html
  ratelimit check ip=192.0.2.7 --policy policy.toml --store redis://localhost
A policy is a TOML file. The smallest has one limit, of 5 requests per second for each address:
  [[limit]]
  name = \"burst\"
  key = [\"ip\"]
  algorithm = \"gcra\"
  rate = \"5/s\"";

/// The formats of `replay`.
pub(crate) const REPLAY: &str = r#"Trace lines (JSONL), one request per line:
  {"at_us": 9500000, "key": "k", "cost": 5, "op": "acquire"}
    at_us  microseconds since the Unix epoch, 0 or more
    key    the caller; or several identifiers: "keys": {"ip": "192.0.2.7", "user": "bob"}
    cost   a whole number, 0 or more; 1 if left out
    op     acquire (default); peek: decides as acquire and charges nothing; refund: gives the cost back,
           never above the capacity; force: charges whatever is left; reset: full capacity again
    duration_us  how long the request took: so long it holds its place under a concurrency limit, at most the lease
Trace lines (CSV): a header at_us,key,cost,op, and a column per further identifier. An empty cell is left out.

Decision lines (--decisions), one per request, in order:
  {"at_us":9500000,"key":"k","cost":5,"allowed":false,"limit":5,"remaining":3,"retry_after_us":3000000,"reset_after_us":2000000}
    limit           the capacity; remaining: whole units of cost left after this decision; both null where no limit
                    applies
    retry_after_us  until the same request fits; null if it never does
    reset_after_us  until the limit has recovered in full
  With several limits the line is the verdict, and "limits":[{"name":…,…}] holds the decision of each limit. With
  shadow limits, "shadow":[{"name":…,…}] holds what each of them would have decided.

Summary (--json), one object, which is also in the report:
  title, notes        what was replayed; what to know before trusting the numbers
  span_us             [first, last] time of the input
  requests            those that asked to be admitted: admitted + denied
  other_operations    peeks, refunds, forced charges and resets; refused_operations: those that the store lacks
  bad_lines           lines that were skipped
  limits              per limit: name, policy, identifiers, shadow, applied, denied (requests), and nearness:
                      callers_denied; least_left: of the other callers, how many once had nothing left, up to one
                      tenth of the capacity, two tenths …; uncounted: requests of callers beyond the first 1,048,576
  bucket_us, buckets  requests over time: at_us, admitted, denied, and limits: [admitted, denied] per limit
  identifiers         per identifier name: name, callers, callers_denied
  denied_callers      those denied most: identifier, value, denied, by_limit (per limit's name), first_us, last_us;
                      spells of denials, denied_for_us: their length together, longest_us
  comparison          of --compare: policy_file, denied, limits, denied_by_both, denied_only_by_this,
                      denied_only_by_other, callers_that_differ (their number), differing_callers"#;

/// The fields of `suggest --json`.
pub(crate) const SUGGEST: &str = r#"JSON (--json), one line per limit:
  {"name":"burst","callers":812,"now":{"policy":"gcra 5/s burst 30","callers_denied":9},"proposed":{…}}
    callers                  the callers that the limit applied to
    now, proposed            the limit as it is and as proposed; proposed is null if no limit is large enough
    callers_denied           how many callers the limit alone denies at least once
    callers_denied_together  the same in a replay of all proposed limits together"#;

/// The fields of `lint --json`.
pub(crate) const LINT: &str = r#"Of a limit that cannot be read, the first mistake is named.

JSON (--json), one line per problem, then one with the totals:
  {"line":7,"column":9,"message":"limit \"burst\": a burst of 0 admits nothing; write at least 1"}
  {"limits":3,"problems":1}
    line, column  where, from 1; null if the whole document is at fault
    message       what is wrong, and what is accepted"#;

/// The fields of `check --json`.
pub(crate) const CHECK: &str = r#"JSON (--json), one line:
  {"key":"alice","cost":1,"allowed":true,"limit":5,"remaining":4,"retry_after_us":0,"reset_after_us":1000000}
    key, keys        the caller: its bare key, and its identifiers by name
    limit            the capacity; remaining: what is left of it after this decision
    retry_after_us   until the same request fits; null if it never does
    reset_after_us   until the limit has recovered in full
    limits, shadow   with several limits, the same of each, with its name; of shadow limits, what they would have
                     decided"#;

/// The fields of `inspect --json`.
pub(crate) const INSPECT: &str = r#"JSON (--json), one line:
  {"key":"alice","limits":[{"name":"burst","shadow":false,"allowed":true,"limit":5,"remaining":5,"retry_after_us":0,"reset_after_us":0,"state":null}]}
    key, keys  the caller: its bare key, and its identifiers by name
    shadow     whether the limit only decides and never denies
    remaining  what is left of the capacity (limit) now; allowed, retry_after_us: of a request at cost 1
    state      what is stored, null for nothing, by the field names of the algorithm's state:
               gcra                  tat_us (theoretical arrival time), surplus, timestamp_us
               token-bucket          tokens (at timestamp_us), timestamp_us, full_at_us
               fixed-window, first-request-window  start_us, count, ends_us
               bucketed-window       buckets: start_us, count
               sliding-counter       start_us, previous, current, window_us
               window-log            start_us, entries: timestamp_us, cost, metadata
               sliding-log           entries: timestamp_us, cost
               concurrency           leases: timestamp_us, cost"#;

/// The fields of `reset --json`.
pub(crate) const RESET: &str = r#"JSON (--json), one line:
  {"key":"alice","reset":["burst","daily"]}
    key, keys  the caller: its bare key, and its identifiers by name
    reset      the names of the limits that have their full capacity again"#;

/// What `top` cannot tell, and its fields.
pub(crate) const TOP: &str = r#"A store with a secret keeps a hash in place of each identifier, and so does every store where an identifier is longer
than 128 bytes. Such keys are counted, because a key does not tell whose it is. Ask for a caller by name:
  ratelimit inspect KEY --policy POLICY.toml --store URL --secret-file FILE

JSON (--json), one line per limited caller, then one with the totals:
  {"value":"192.0.2.7","identifiers":["ip"],"name":"burst","shadow":false,"limit":30,"remaining":0,"retry_after_us":200000}
  {"limited":1,"callers":812,"keys":812,"hidden_keys":0,"max_keys_reached":false}
    value             the caller: the value of the limit's identifiers, joined by | where there are several
    name, shadow      the limit, and whether it only decides and never denies
    limit, remaining  the capacity, and what is left of it
    limited           how many callers and limits are limited now; --most cuts the list, not this number
    callers, keys     how many were looked at; hidden_keys: those with a hash, of which nothing is told
    max_keys_reached  whether --max-keys ended the scan"#;

/// The fields of `heal`, and what it does.
pub(crate) const HEAL: &str = r#"A server's clock that was ahead and is set back, or a replica that takes over with a clock that is behind, leaves states
from the future: they lock their callers until the clock reaches their times. Each that holds its caller for longer than
its limit takes to recover from empty is cut to a full limit as of now: nothing is left, and it recovers from there.
No limit admits more for it. Requests go on meanwhile. Run it again if servers have changed during the scan.

JSON (--json), one line per state from the future, then one with the totals:
  {"value":"192.0.2.7","stored_key":"rl:1::{192.0.2.7}","name":"burst","ahead_us":3599800000}
  {"states":1,"dry_run":false,"keys":812,"skipped":0,"max_keys_reached":false}
    value             the caller; null where the key holds a hash
    stored_key, name  the key on the server, and the limit
    ahead_us          for how much longer than a full limit the state would have held its key
    states            how many there were; dry_run: whether they were left as they are
    keys, skipped     how many keys were looked at; and not understood
    max_keys_reached  whether --max-keys ended the scan"#;

/// How an editor finds the schema.
pub(crate) const SCHEMA: &str = "\
Save it beside your policies, and name it in them:
  ratelimit schema > ratelimit.schema.json
  TOML  a first line `#:schema ./ratelimit.schema.json` (taplo, Even Better TOML)
  YAML  a first line `# yaml-language-server: $schema=./ratelimit.schema.json`
  JSON  a first field `\"$schema\": \"./ratelimit.schema.json\"`
This tool reads TOML. A program that uses ratelimit-core reads the other formats as well.";

/// Where a completion script belongs.
pub(crate) const COMPLETIONS: &str = "\
Load it when the shell starts:
  bash  ratelimit completions bash > ~/.local/share/bash-completion/completions/ratelimit
  zsh   ratelimit completions zsh > DIR/_ratelimit, where DIR is in $fpath
  fish  ratelimit completions fish > ~/.config/fish/completions/ratelimit.fish";
