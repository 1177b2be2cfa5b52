//! Policy documents: those of the repository, random ones, and random ones with mistakes.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::{collection, option, sample};
use ratelimit_core::{Algorithm as _, OnOutage, Policy, Rate};
use ratelimit_testkit::AlgorithmKind;
use serde_json::{Value, json};

use crate::common::workspace;

/// The texts in documents that have a `[[limit]]`, each with the path of its file.
pub(crate) fn in_the_workspace() -> Vec<(String, String)> {
    let mut found = Vec::new();
    visit(&workspace("."), &mut |path, contents| {
        let texts: Vec<&str> = match path.rsplit_once('.') {
            Some((_, "toml")) => vec![contents],
            Some((_, "md")) => {
                let blocks = contents.split("```toml\n").skip(1);
                blocks.filter_map(|rest| rest.split("```").next()).collect()
            }
            _ => Vec::new(),
        };
        let policies = texts.into_iter().filter(|text| text.contains("[[limit]]"));
        found.extend(policies.map(|text| (path.to_owned(), text.to_owned())));
    });
    found
}

fn visit(folder: &Path, file: &mut impl FnMut(&str, &str)) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && !name.starts_with('.') && name != "target" && name != "book" {
            visit(&path, file);
        } else if let (Ok(contents), Some(path)) = (fs::read_to_string(&path), path.to_str()) {
            file(path, &contents);
        }
    }
}

/// A length of time in one of its forms.
fn period() -> impl Strategy<Value = String> {
    (0..=99_u64, sample::select(vec!["us", "ms", "s", "m", "h", "d"])).prop_map(|(times, unit)| {
        match times {
            0 => unit.to_owned(),
            times => format!("{times}{unit}"),
        }
    })
}

/// Texts that are nearly rates, and rates.
pub(crate) fn rate_like() -> impl Strategy<Value = String> {
    let rate = (" ?0?[1-9][0-9]{0,16} ?/ ?(0?[1-9][0-9]{0,16})? ?(us|ms|s|m|h|d) ?")
        .prop_map(String::from);
    prop_oneof![rate, "[ 0-9/usmhd+.-]{0,9}"]
}

/// A policy in fields of a document.
fn fields(policy: &Policy) -> Value {
    let text = policy.to_string();
    let (text, count) = match text.strip_suffix(" count attempts") {
        Some(text) => (text, "attempts"),
        None => (text.as_str(), "admitted"),
    };
    let (name, numbers) = text.split_once(' ').expect("a name and numbers");
    let mut limit = json!({ "algorithm": name, "count": count });
    if let Some((bucket, rates)) =
        numbers.strip_prefix("bucket ").and_then(|n| n.split_once(" rates "))
    {
        limit["bucket"] = json!(bucket);
        limit["rates"] = json!(rates.split(", ").collect::<Vec<_>>());
        return limit;
    }
    let mut words = numbers.split(' ');
    limit["rate"] = json!(words.next());
    while let (Some(field), Some(number)) = (words.next(), words.next()) {
        limit[field] = json!(number.parse::<u64>().expect("a number"));
    }
    limit
}

/// One limit with any of the options.
fn limit(name: String) -> impl Strategy<Value = Value> {
    let seeds: Vec<_> = AlgorithmKind::ALL.iter().flat_map(|kind| kind.seeds()).collect();
    let made =
        (sample::select(AlgorithmKind::ALL.to_vec()), 1..=10_000_u64, period(), 1..=1_000_u64);
    let made = made.prop_filter_map("a limit that can be built", |(kind, count, period, burst)| {
        let rate: Rate = format!("{count}/{period}").parse().ok()?;
        let exact =
            !kind.is_bucket() || ratelimit_core::algorithm::Refill::new(rate, burst).is_ok();
        exact.then(|| kind.policy(rate, burst))
    });
    let policy = prop_oneof![sample::select(seeds), made];
    let attempts =
        (policy, any::<bool>()).prop_map(|(policy, attempts)| match policy.by_attempts() {
            Some(counting) if attempts && policy.debt() == 0 => counting,
            _ => policy,
        });
    let key = option::of(collection::hash_set("[A-Za-z0-9._-]{1,64}", 0..3));
    let flags = (option::of(any::<bool>()), option::of(any::<bool>()));
    let outage = option::of(sample::select(OnOutage::NAMES.to_vec()));
    (attempts, key, flags, outage).prop_map(move |(policy, key, (required, shadow), on_outage)| {
        let mut limit = fields(&policy);
        limit["name"] = json!(name);
        let mut set = |field: &str, value: Value| {
            if !value.is_null() {
                limit[field] = value;
            }
        };
        set("key", json!(key));
        set("required", json!(required));
        set("shadow", json!(shadow));
        set("on_outage", json!(on_outage));
        limit
    })
}

/// A policy of one to three limits.
pub(crate) fn built() -> impl Strategy<Value = Value> {
    let names = collection::hash_set("[A-Za-z0-9._-]{1,64}", 1..=3);
    let limits = names.prop_flat_map(|names| names.into_iter().map(limit).collect::<Vec<_>>());
    (limits, any::<bool>()).prop_map(|(limits, has_schema)| {
        let mut document = json!({ "limit": limits });
        if has_schema {
            document["$schema"] = json!("ratelimit.schema.json");
        }
        document
    })
}

/// A value that a field may or may not accept.
fn value() -> impl Strategy<Value = Value> {
    let words = ["gcra", "token-bucket", "window-log", "bucketed-window", "concurrency", "leaky"];
    let others = ["attempts", "admitted", "all", "open", "closed", "local", "ip", "", "a b", "1s"];
    let text = prop_oneof![
        sample::select([&words[..], &others].concat()).prop_map(String::from),
        rate_like(),
        "[A-Za-z.é_-]{63,66}",
    ];
    let numbers =
        vec![json!(0), json!(1), json!(-1), json!(1.5), json!((1_u64 << 52) - 1), json!(u64::MAX)];
    let one = prop_oneof![
        4 => text.prop_map(Value::from),
        2 => sample::select(numbers),
        1 => any::<bool>().prop_map(Value::from),
        1 => Just(json!({ "a": 1 })),
    ];
    one.prop_recursive(1, 8, 5, |one| collection::vec(one, 0..6).prop_map(Value::from))
}

/// A policy in which a few fields are added, removed or replaced.
pub(crate) fn with_mistakes() -> impl Strategy<Value = Value> {
    let fields =
        "name key algorithm rate burst count required shadow on_outage bucket rates brust Name";
    let fields: Vec<_> = fields.split(' ').collect();
    let change = (sample::select(fields), option::weighted(0.8, value()));
    (limit("a".into()), collection::vec(change, 0..3)).prop_map(|(mut limit, changes)| {
        for (field, value) in changes {
            match (value, limit.as_object_mut()) {
                (Some(value), _) => limit[field] = value,
                (None, Some(fields)) => drop(fields.remove(field)),
                (None, None) => {}
            }
        }
        json!({ "limit": [limit] })
    })
}
