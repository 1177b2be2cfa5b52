//! `ratelimit inspect`: the stored states of a caller, and the decision that a request would get.

use std::fmt::Write;

use ratelimit_core::algorithm::{AnyState, BucketCount, LoggedCost, LoggedRequest};
use ratelimit_core::store::{Op, RecordStore as _};
use ratelimit_core::{Algorithm, AnyAlgorithm, Decision, Limit, Timestamp};
use ratelimit_replay::decision_line::{Told, caller_json};
use ratelimit_replay::failure::Failure;
use ratelimit_replay::policy;
use ratelimit_replay::records::{self, described as in_words};
use ratelimit_replay::text::{count, quote, time};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::InspectArgs;
use crate::inputs;
use crate::store::{self, in_each_mode};

/// How many entries of a log are shown to people.
const SHOWN: usize = 100;

/// What one limit stores for the caller, and what is left now.
#[derive(Serialize)]
struct StoredLimit<'l> {
    name: &'l str,
    shadow: bool,
    #[serde(flatten)]
    told: Told,
    /// By the field names of the algorithm's state; null for nothing.
    state: Value,
    /// The record of the caller, if one stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<Value>,
}

pub(super) fn run(InspectArgs { caller: args, own }: &InspectArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.policy)?;
    let numbers = policy::numbers(&own.numbers, &limits)?;
    let caller = args.caller(&limits)?;
    let out = store::block_on(async {
        let (store, failed) = store::of_caller(args, "inspect", &limits).await?;
        let deciding = |limit| numbers.as_ref().map_or(limit, |numbers| numbers.limit_of(limit));
        let keyed = caller.keys(&limits).into_iter();
        let keyed: Vec<_> = keyed.map(|(limit, key)| (deciding(limit), key)).collect();
        // The first peek shows what is available now, the second the decision on a request.
        let now = store::apply_to(&store, &keyed, Op::Peek, 0).await.map_err(&failed)?;
        let next = store::apply_to(&store, &keyed, Op::Peek, 1).await.map_err(&failed)?;
        let (mut found, mut text) = (Vec::new(), format!("{}\n", caller.display()));
        let decisions = now.decisions().iter().zip(next.decisions());
        for (position, ((limit, key), decided)) in keyed.iter().zip(decisions).enumerate() {
            let (account, (shown, next)) = (now.account(position), decided);
            let Decision { retry_after_us, allowed, cost, .. } = *next;
            let decision = Decision { retry_after_us, allowed, cost, ..*shown };
            let state = in_each_mode!(&store, store => store.state(limit, key).await);
            let state = fields(limit, state.map_err(&failed)?.as_ref());
            let (told, stored) =
                (super::check::sentence(limit, &decision, account.owed), described(&state));
            // Writing into memory cannot fail.
            let _ = writeln!(text, "  {told}\n    stored: {stored}");
            let record = if limit.is_overridable() {
                store.record(limit, key).await.map_err(&failed)?
            } else {
                None
            };
            if let Some(record) = &record {
                let _ = writeln!(text, "    record: {}", in_words(record));
            }
            let record = record.as_ref().map(records::fields);
            let (name, shadow) = (limit.name(), limit.is_shadow());
            found.push(StoredLimit {
                name,
                shadow,
                told: Told::new(&decision, account, false),
                state,
                record,
            });
        }
        if found.iter().all(|found| found.state.is_null() && found.record.is_none()) {
            let names: Vec<_> = found.iter().map(|found| found.name).collect();
            let _ = writeln!(text, "note: {}", super::not_stored(args, &names, "is"));
        }
        if let Some(note) = caller.note_unmet(&limits) {
            let _ = writeln!(text, "note: {note}");
        }
        let unknown = super::unknown_of(&store, &keyed, &limits).await.map_err(&failed)?;
        if let Some(note) = super::unknown_states(&unknown, "of this caller more is stored:") {
            let _ = writeln!(text, "note: {note}");
        }
        Ok(if args.json { caller_json(&caller, "limits", &found) } else { text })
    })?;
    super::print(out)
}

/// A state by its own field names, and the tokens of a token bucket.
fn fields(limit: &Limit<AnyAlgorithm>, state: Option<&AnyState>) -> Value {
    let entry = |e: &LoggedCost| json!({ "timestamp_us": e.timestamp.as_us(), "cost": e.cost });
    let entries = |entries: &[LoggedCost]| entries.iter().map(entry).collect::<Value>();
    let window = |start: Timestamp, count: u64, ends_us: u64| json!({ "start_us": start.as_us(), "count": count, "ends_us": ends_us });
    let Some(state) = state else { return Value::Null };
    match state {
        AnyState::Gcra(bucket) if limit.algorithm().name() == "token-bucket" => {
            let written = limit.algorithm().step(Some(state), Timestamp::ZERO, 0).decision;
            json!({
                "tokens": written.remaining, "timestamp_us": bucket.timestamp.as_us(),
                "full_at_us": bucket.tat_us,
            })
        }
        AnyState::Gcra(state) => json!({
            "tat_us": state.tat_us, "surplus": state.surplus, "timestamp_us": state.timestamp.as_us(),
        }),
        AnyState::FixedWindow(state) => window(state.start, state.count, state.ends_us),
        AnyState::FirstRequestWindow(state) => window(state.start, state.count, state.ends_us),
        AnyState::BucketedWindow(state) => {
            let bucket = |b: &BucketCount| json!({ "start_us": b.start.as_us(), "count": b.count });
            json!({ "buckets": state.buckets.iter().map(bucket).collect::<Value>() })
        }
        AnyState::SlidingCounter(state) => json!({
            "start_us": state.start.as_us(), "previous": state.previous, "current": state.current,
        }),
        AnyState::WindowLog(state) => {
            let entry = |e: &LoggedRequest| {
                let metadata = String::from_utf8_lossy(&e.metadata);
                json!({ "timestamp_us": e.timestamp.as_us(), "cost": e.cost, "metadata": metadata })
            };
            let entries: Value = state.entries.iter().map(entry).collect();
            json!({ "start_us": state.start.as_us(), "entries": entries })
        }
        AnyState::SlidingLog(state) => json!({ "entries": entries(&state.entries) }),
        AnyState::Concurrency(state) => json!({ "leases": entries(&state.entries) }),
        AnyState::Lockout(state) => {
            let mut fields = json!({
                "start_us": state.start.as_us(), "count": state.count,
                "newest_us": state.newest.as_us(), "lockouts": state.lockouts,
                "ends_us": state.ends_us,
            });
            if state.until_us > 0 {
                fields["locked_out_until_us"] = state.until_us.into();
            }
            fields
        }
    }
}

/// The same for people: `count 2, start 2026-03-01T09:00:00Z`, `leases 1`, and a line for each part
/// of a list.
fn described(value: &Value) -> String {
    let Some(fields) = value.as_object() else { return "nothing".to_owned() };
    let (mut words, mut below) = (Vec::new(), String::new());
    for (name, value) in fields {
        let plain = name.strip_suffix("_us");
        words.push(match (value, value.as_u64(), plain) {
            (Value::Array(parts), ..) => {
                let shown = parts.iter().take(SHOWN);
                below.extend(shown.map(|part| format!("\n      {}", described(part))));
                below.extend((parts.len() > SHOWN).then_some("\n      …"));
                format!("{name} {}", parts.len())
            }
            (_, Some(us), Some(name)) => {
                format!("{name} {}", time(Timestamp::saturating_from_us(us)))
            }
            (_, Some(number), None) => format!("{name} {}", count(number)),
            (text, ..) => format!("{name} {}", quote(text.as_str().unwrap_or_default(), 256)),
        });
    }
    words.join(", ") + &below
}
