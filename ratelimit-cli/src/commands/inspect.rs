//! `ratelimit inspect`: the stored states of a caller, and the decision that a request would get.

use std::fmt::Write;

use ratelimit_core::{Decision, Limit, LogEntry, Op, Policy, PolicyState, Timestamp, WindowEntry};

use crate::args::InspectArgs;
use crate::caller::Caller;
use crate::decision_line::{string, write_caller, write_decision};
use crate::failure::Failure;
use crate::policy;
use crate::store::{self, Keys, Secret, StoreUrl};
use crate::text::{count, plural, quoted, time};

/// What one limit stores for the caller.
struct Found<'l> {
    limit: &'l Limit<Policy>,
    state: Option<PolicyState>,
    decision: Decision,
}

pub(super) fn run(args: &InspectArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.caller.policy)?;
    let address = StoreUrl::lasting(&args.store, "inspect")?;
    let caller = Caller::from_args(&args.caller.keys, &limits)?;
    let secret = Secret::find(args.caller.secret_file.as_deref())?;
    let keys = Keys { prefix: &args.caller.prefix, secret: secret.as_ref() };
    let out = super::block_on(async {
        let store = store::connect(&address, keys, &limits).await?;
        let what = format!("--store {address}");
        let failed = |error| Failure::store(&what, &error);
        let keyed = caller.keys(&limits);
        // The first peek shows what is available now, the second the decision on a request.
        let now = store.apply_to(&keyed, Op::Peek, 0).await.map_err(failed)?;
        let next = store.apply_to(&keyed, Op::Peek, 1).await.map_err(failed)?;
        let decisions = now.decisions().iter().zip(next.decisions()).map(|(now, next)| Decision {
            retry_after_us: next.retry_after_us,
            allowed: next.allowed,
            cost: next.cost,
            ..*now
        });
        let mut found = Vec::new();
        for ((limit, key), decision) in keyed.iter().zip(decisions) {
            let state = store.state(limit, key).await.map_err(failed)?;
            found.push(Found { limit, state, decision });
        }
        if args.caller.json {
            return Ok(json(&caller, &found));
        }
        let mut text = sentences(&caller, &found);
        if found.iter().all(|found| found.state.is_none()) {
            let prefix = quoted(&args.caller.prefix, 60);
            // Writing into memory cannot fail.
            let _ = writeln!(
                text,
                "note: nothing is stored for this caller under the prefix {prefix}; if its service uses another prefix, \
                 name it with --prefix"
            );
        }
        Ok(text.into_bytes())
    })?;
    super::print(&out)?;
    Ok(0)
}

fn sentences(caller: &Caller<'_>, found: &[Found<'_>]) -> String {
    let mut lines = format!("{}\n", caller.display());
    for Found { limit, state, decision } in found {
        lines.push_str(if limit.is_shadow() { "  in shadow: " } else { "  " });
        lines.push_str(&super::check::sentence(limit, decision));
        lines.push_str("\n    stored: ");
        lines.push_str(&state.as_ref().map_or_else(|| "nothing".to_owned(), described));
        lines.push('\n');
    }
    lines
}

/// A state as people read it.
fn described(state: &PolicyState) -> String {
    match state {
        PolicyState::Gcra(state) => format!(
            "theoretical arrival time {} (surplus {}), last charged {}",
            time(Timestamp::saturating_from_us(state.tat_us)),
            plural(state.surplus, "unit", "units"),
            time(state.timestamp)
        ),
        PolicyState::TokenBucket(state) => format!(
            "{} and {} at {}",
            plural(state.tokens, "token", "tokens"),
            plural(state.remainder, "unit", "units"),
            time(state.timestamp)
        ),
        PolicyState::FixedWindow(state) => {
            format!("{} used in the window that began {}", count(state.count), time(state.start))
        }
        PolicyState::FirstRequestWindow(state) => {
            format!("{} used in the window that began {}", count(state.count), time(state.start))
        }
        PolicyState::BucketedWindow(state) => {
            let used = state.buckets.iter().fold(0_u64, |sum, b| sum.saturating_add(b.count));
            let newest = state.buckets.last().map(|bucket| time(bucket.start));
            format!(
                "{} used in {}, the newest of {}",
                count(used),
                plural(state.buckets.len() as u64, "bucket", "buckets"),
                newest.unwrap_or_default()
            )
        }
        PolicyState::SlidingCounter(state) => format!(
            "{} used in the window that began {}, {} in the one before",
            count(state.current),
            time(state.start),
            count(state.previous)
        ),
        PolicyState::WindowLog(state) => {
            let entries = state.entries.iter();
            let used = entries.fold(0_u64, |sum, entry| sum.saturating_add(entry.cost));
            let line = |entry: &WindowEntry| {
                let caller = String::from_utf8_lossy(&entry.metadata);
                let caller = if caller.is_empty() {
                    "an unnamed caller".into()
                } else {
                    quoted(&caller, 256)
                };
                format!("\n      {} {caller} at cost {}", time(entry.timestamp), count(entry.cost))
            };
            let by: String = state.entries.iter().map(line).collect();
            format!("{} used in the window that began {}, by{by}", count(used), time(state.start))
        }
        PolicyState::SlidingLog(state) => log("entry", "entries", &state.entries),
        PolicyState::Concurrency(state) => {
            log("moment of leases", "moments of leases", &state.leases)
        }
    }
}

/// Log entries as people read them, by moment.
fn log(one: &str, several: &str, entries: &[LogEntry]) -> String {
    let used = entries.iter().fold(0_u64, |sum, entry| sum.saturating_add(entry.cost));
    match entries.first().zip(entries.last()) {
        None => "an empty log".to_owned(),
        Some((first, last)) => format!(
            "{} with a cost of {} together, from {} to {}",
            plural(entries.len() as u64, one, several),
            count(used),
            time(first.timestamp),
            time(last.timestamp)
        ),
    }
}

fn json(caller: &Caller<'_>, found: &[Found<'_>]) -> Vec<u8> {
    let mut out = vec![b'{'];
    write_caller(&mut out, caller);
    out.extend_from_slice(b"\"limits\":[");
    for (place, Found { limit, state, decision }) in found.iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        out.extend_from_slice(b"{\"name\":");
        string(&mut out, limit.name());
        out.extend_from_slice(if limit.is_shadow() {
            b",\"shadow\":true,"
        } else {
            b",\"shadow\":false,"
        });
        write_decision(&mut out, decision);
        out.extend_from_slice(b",\"state\":");
        out.extend_from_slice(state_json(state.as_ref()).to_string().as_bytes());
        out.push(b'}');
    }
    out.extend_from_slice(b"]}\n");
    out
}

/// A state with its own field names.
fn state_json(state: Option<&PolicyState>) -> serde_json::Value {
    use serde_json::json;
    match state {
        None => serde_json::Value::Null,
        Some(PolicyState::Gcra(state)) => json!({
            "tat_us": state.tat_us, "surplus": state.surplus, "timestamp_us": state.timestamp.as_us(),
        }),
        Some(PolicyState::TokenBucket(state)) => json!({
            "tokens": state.tokens, "remainder": state.remainder, "timestamp_us": state.timestamp.as_us(),
            "full_at_us": state.full_at_us,
        }),
        Some(PolicyState::FixedWindow(state)) => json!({
            "start_us": state.start.as_us(), "count": state.count, "ends_us": state.ends_us,
        }),
        Some(PolicyState::FirstRequestWindow(state)) => json!({
            "start_us": state.start.as_us(), "count": state.count, "ends_us": state.ends_us,
        }),
        Some(PolicyState::BucketedWindow(state)) => {
            let buckets = state.buckets.iter();
            let buckets = buckets.map(|b| json!({ "start_us": b.start.as_us(), "count": b.count }));
            json!({ "buckets": buckets.collect::<Vec<_>>() })
        }
        Some(PolicyState::SlidingCounter(state)) => json!({
            "start_us": state.start.as_us(), "previous": state.previous, "current": state.current,
            "window_us": state.window_us,
        }),
        Some(PolicyState::WindowLog(state)) => {
            let entry = |e: &WindowEntry| {
                let metadata = String::from_utf8_lossy(&e.metadata);
                json!({ "timestamp_us": e.timestamp.as_us(), "cost": e.cost, "metadata": metadata })
            };
            let entries = state.entries.iter().map(entry).collect::<Vec<_>>();
            json!({ "start_us": state.start.as_us(), "entries": entries })
        }
        Some(PolicyState::SlidingLog(state)) => json!({ "entries": log_json(&state.entries) }),
        Some(PolicyState::Concurrency(state)) => json!({ "leases": log_json(&state.leases) }),
    }
}

fn log_json(entries: &[LogEntry]) -> Vec<serde_json::Value> {
    let entry =
        |e: &LogEntry| serde_json::json!({ "timestamp_us": e.timestamp.as_us(), "cost": e.cost });
    entries.iter().map(entry).collect()
}
