//! `ratelimit record`: records of single callers, set and cleared by an operator.

use std::env;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ratelimit_core::{AnyAlgorithm, Limit, Limits, RateLimiter, Record, Timestamp};
use ratelimit_redis::{RedisError, StoredKey};
use ratelimit_replay::caller::Caller;
use ratelimit_replay::decision_line::json_line;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::records::{described, fields, limit_named};
use ratelimit_replay::text::{plural, printable, quote, time};
use serde_json::{Value, json};

use crate::args::{CallerArgs, ClearRecordArgs, RecordCommand, ScanArgs, SetRecordArgs};
use crate::inputs;
use crate::store::{self, Redis, Remote, scan_failed};

/// How many keys the server examines in one step, and the pause between two.
const STEP: (u64, Duration) = (500, Duration::from_millis(5));

pub(super) fn run(command: &RecordCommand) -> Result<u8, Failure> {
    match command {
        RecordCommand::Set(args) => set(args),
        RecordCommand::Get(args) => get(args),
        RecordCommand::List(args) => list(args),
        RecordCommand::Clear(args) => clear(args),
    }
}

fn set(args: &SetRecordArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.of.caller.policy)?;
    let record = record(args, &limits)?;
    let (name, next) = (&*args.of.limit, record.clone());
    change(&args.of, &limits, Some(&record), async |limiter, caller| {
        if args.replace {
            limiter.replace_record(caller, name, next).await
        } else {
            limiter.set_record(caller, name, next).await
        }
    })
}

fn clear(args: &ClearRecordArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.caller.policy)?;
    change(args, &limits, None, async |limiter, caller| {
        limiter.clear_record(caller, &args.limit).await
    })
}

/// Changes a record, and prints who has changed what, when.
fn change(
    args: &ClearRecordArgs,
    limits: &Limits<AnyAlgorithm>,
    next: Option<&Record<AnyAlgorithm>>,
    change: impl AsyncFnOnce(
        &RateLimiter<Remote>,
        &Caller,
    ) -> Result<Option<Record<AnyAlgorithm>>, RedisError>,
) -> Result<u8, Failure> {
    limit_of(args, limits)?;
    let caller = args.caller.caller(limits)?;
    let before = store::block_on(async {
        let (store, failed) = store::of_caller(&args.caller, "change", limits).await?;
        let limiter = RateLimiter::new(limits.clone(), store);
        change(&limiter, &caller).await.map_err(failed)
    })?;
    let by = args.by.clone().or_else(user).unwrap_or_default();
    if by.is_empty() {
        // With standard error closed, the note has nowhere to go.
        let note = "note: the line does not tell who did this, because no variable such as USER names the user; add --by NAME";
        let _ = writeln!(io::stderr(), "{note}");
    }
    let at = now();
    super::print(if args.caller.json {
        json_line(&json!({
            "at_us": at.as_us(), "by": by, "caller": caller, "limit": args.limit,
            "before": before.as_ref().map(fields), "record": next.map(fields),
        }))
    } else {
        let in_words = |record: Option<&_>| record.map_or("none".to_owned(), described);
        let by = if by.is_empty() { String::new() } else { format!(" by {}", printable(&by, 60)) };
        format!(
            "{} {} under {}: {}{by} (before: {})\n",
            time(at),
            caller.display(),
            args.limit,
            in_words(next),
            in_words(before.as_ref()),
        )
    })
}

/// The user of this process, as shells, POSIX and Windows name it.
fn user() -> Option<String> {
    let names = ["USER", "LOGNAME", "USERNAME"].into_iter();
    names.filter_map(|name| env::var(name).ok()).find(|name| !name.is_empty())
}

fn limit_of<'l>(
    args: &ClearRecordArgs,
    limits: &'l Limits<AnyAlgorithm>,
) -> Result<&'l Limit<AnyAlgorithm>, Failure> {
    limit_named(limits, &args.limit).map_err(|why| Failure::input(format!("--limit: {why}")))
}

fn get(args: &CallerArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.policy)?;
    let caller = args.caller(&limits)?;
    let records = store::block_on(async {
        let (store, failed) = store::of_caller(args, "show", &limits).await?;
        let limiter = RateLimiter::new(limits.clone(), store);
        let records = limiter.records(&caller).await.map_err(failed)?;
        Ok(records
            .into_iter()
            .map(|(limit, record)| (limit.to_owned(), record))
            .collect::<Vec<_>>())
    })?;
    super::print(if args.json {
        let line =
            |(limit, record): &(String, _)| json!({ "limit": limit, "record": fields(record) });
        json_line(
            &json!({ "caller": caller, "records": records.iter().map(line).collect::<Value>() }),
        )
    } else {
        let mut text = format!(
            "{}: {}\n",
            caller.display(),
            plural(records.len() as u64, "record", "records")
        );
        for (limit, record) in &records {
            // Writing into memory cannot fail.
            let _ = writeln!(text, "  {limit}: {}", described(record));
        }
        text
    })
}

fn list(args: &ScanArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.policy)?;
    let redis = &*Redis::lasting(&args.store, "list")?;
    let (mut out, mut count, mut is_cut) = (String::new(), 0_u64, false);
    store::block_on(async {
        let failed = |error: RedisError| scan_failed(redis, &args.prefix, &error);
        let store = match store::connect(redis, &args.prefix, None, &limits).await? {
            Remote::Lua(store) => store,
            // Records lie under the same keys.
            Remote::Cas(store) => store.in_mode(),
            Remote::Multi(_) => {
                let remedy = "leave mode out of the URL";
                let refused =
                    format!("--store {}: transactions keep no records; {remedy}", redis.url);
                return Err(Failure::input(refused));
            }
        };
        let mut scan = store.scan(args.max_keys, STEP.0, STEP.1).await.map_err(failed)?;
        while let Some(keys) = scan.next().await.map_err(failed)? {
            for key in &keys {
                let found = store.records_in(&limits, key).await.map_err(failed)?;
                let Some((caller, records)) = found else { continue };
                let caller = match caller {
                    StoredKey::Identifier(name) => Some(name),
                    _ => None,
                };
                // The server removes a record a moment after its end.
                let standing = records.into_iter().filter(|(_, record)| record.stands_at(now()));
                for (limit, record) in standing {
                    count += 1;
                    let line = if args.json {
                        json_line(&json!({
                            "value": caller, "identifiers": limit.identifier_names().collect::<Vec<_>>(),
                            "limit": limit.name(), "record": fields(&record),
                        }))
                    } else {
                        let caller = caller
                            .as_deref()
                            .map_or("(hidden)".to_owned(), |name| quote(name, 200));
                        format!("{caller} under {}: {}\n", limit.name(), described(&record))
                    };
                    out += &line;
                }
            }
        }
        is_cut = scan.is_cut();
        Ok(())
    })?;
    if args.json {
        out += &json_line(&json!({ "records": count, "max_keys_reached": is_cut }));
    } else {
        let more = if is_cut { "; there are more keys: raise --max-keys" } else { "" };
        // Writing into memory cannot fail.
        let _ = writeln!(out, "{}{more}", plural(count, "record", "records"));
    }
    super::print(out)
}

/// The record that the arguments tell.
fn record(
    args: &SetRecordArgs,
    limits: &Limits<AnyAlgorithm>,
) -> Result<Record<AnyAlgorithm>, Failure> {
    let change = match &args.numbers {
        Some(numbers) => {
            let failed = |error| Failure::input(format!("--numbers: {error}"));
            let policy = limit_of(&args.of, limits)?.algorithm();
            Record::numbers(policy.at_numbers(numbers).map_err(failed)?)
        }
        None if args.blocked => Record::blocked(),
        None => Record::exempt(),
    };
    let (option, until) = match (args.lasts, args.until) {
        (Some(lasts), _) => ("--for", Duration::from_micros(now().as_us()).saturating_add(lasts)),
        (None, Some(until)) => ("--until", until.duration_since(UNIX_EPOCH).unwrap_or_default()),
        (None, None) => return Ok(change.forever()),
    };
    let us = u64::try_from(until.as_micros()).ok().and_then(Timestamp::from_us);
    let until = us.ok_or_else(|| {
        let last = time(Timestamp::MAX);
        let remedy = "take an earlier one, or --forever";
        Failure::input(format!("{option}: the last end that a record can have is {last}; {remedy}"))
    })?;
    if until <= now() {
        let past = "the record would have ended already; take a later end";
        return Err(Failure::input(format!("{option}: {past}")));
    }
    Ok(change.until(until))
}

pub(super) fn now() -> Timestamp {
    Timestamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
