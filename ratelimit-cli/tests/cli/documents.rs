//! Policy documents: those of the repository, random ones, and random ones with mistakes.

use std::ffi::OsStr;
use std::fs;

use proptest::prelude::*;
use proptest::{collection, option, sample};
use ratelimit_core::{Limit, OnOutage, Policy};
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::common::workspace;

/// The texts in documents that have a `[[limit]]`, each with the path of its file.
pub(crate) fn in_the_workspace() -> Vec<(String, String)> {
    let (mut found, mut folders) = (Vec::new(), vec![workspace(".")]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            if path.is_dir() && !name.starts_with('.') && name != "target" && name != "book" {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            let texts: Vec<&str> = match path.extension().and_then(OsStr::to_str) {
                Some("toml") => vec![&text],
                Some("md") => {
                    let blocks = text.split("```toml\n").skip(1);
                    blocks.filter_map(|rest| rest.split("```").next()).collect()
                }
                _ => continue,
            };
            let policies = texts.into_iter().filter(|text| text.contains("[[limit]]"));
            found.extend(policies.map(|text| (path.display().to_string(), text.to_owned())));
        }
    }
    found
}

/// Texts that are nearly rates, and rates.
pub(crate) fn rate_like() -> impl Strategy<Value = String> {
    let rate = (" ?0?[1-9][0-9]{0,16} ?/ ?(0?[1-9][0-9]{0,16})? ?(us|ms|s|m|h|d) ?")
        .prop_map(String::from);
    prop_oneof![rate, "[ 0-9/usmhd+.-]{0,9}"]
}

/// One limit with any of the options.
fn limit(name: String) -> impl Strategy<Value = Value> {
    let rate = (1..=10_000_u64, 1..=99_u64, sample::select(vec!["us", "ms", "s", "m", "h", "d"]));
    let burst_and_debt = [1, 0].map(|least| option::of(least..=1_000_u64));
    let key = option::of(collection::hash_set("[A-Za-z0-9._-]{1,64}", 0..3));
    let flags = [(); 2].map(|()| option::of(any::<bool>()));
    let words = [vec!["admitted", "attempts"], OnOutage::NAMES.to_vec()]
        .map(|names| option::of(sample::select(names)));
    let names = sample::select(Policy::NAMES.to_vec());
    let made = (names, rate, burst_and_debt, key, flags, words).prop_map(move |made| {
        let (algorithm, (n, times, unit), [burst, debt], key, [required, shadow], words) = made;
        let [count, on_outage] = words;
        let rate = format!("{n}/{times}{unit}");
        let has_burst = ["gcra", "token-bucket"].contains(&algorithm);
        let owes = (has_burst || algorithm == "fixed-window") && count != Some("attempts");
        let mut limit = json!({
            "name": name, "algorithm": algorithm, "rate": rate,
            "burst": burst.filter(|_| has_burst), "debt": debt.filter(|_| owes), "key": key,
            "count": count, "required": required, "shadow": shadow, "on_outage": on_outage,
        });
        if algorithm == "bucketed-window" {
            limit["bucket"] = json!(format!("{times}{unit}"));
            limit["rates"] = json!([rate, format!("{}/{}{unit}", 2 * n, 3 * times)]);
            limit["rate"] = Value::Null;
        }
        limit.as_object_mut().expect("fields").retain(|_, value| !value.is_null());
        limit
    });
    made.prop_filter("a limit that can be built", |l| Limit::<Policy>::deserialize(l).is_ok())
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
        let fields = limit.as_object_mut().expect("fields");
        for (field, value) in changes {
            match value {
                Some(value) => drop(fields.insert(field.to_owned(), value)),
                None => drop(fields.remove(field)),
            }
        }
        json!({ "limit": [limit] })
    })
}
