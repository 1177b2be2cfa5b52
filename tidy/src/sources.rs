//! Rules about source files.

use crate::layers::Layers;
use crate::{File, assert_none, files, root, words};

/// No file is longer. A ratchet: it is only ever made smaller.
const MAX_LINES: usize = 600;

const CORE: &str = "ratelimit-core/src";
const ALGORITHMS: &str = "ratelimit-core/src/algorithm";
const LUA: &str = "ratelimit-redis/src/lua";

/// The modules of the core: each uses only those that stand before it. The files of
/// `algorithm/` stand after the trait.
const LAYERS: Layers = Layers {
    root: CORE,
    order: &[
        "timestamp",
        "error",
        "decision",
        "clock",
        "reservation",
        "op",
        "refusal",
        "rate",
        "algorithm",
        "in_memory",
        "entries",
        "work",
        "algorithm/",
        "builder",
        "attempts",
        "share",
        "identifiers",
        "limit",
        "batch",
        "stack",
        "quota",
        "policy",
        "limits_builder",
        "store",
        "limiter",
    ],
};

/// Words that have no place in the core's code: it has no input or output, no clock of its own, no
/// runtime and no floats. The standard library is there for the system's clock and for random ids.
const NOT_IN_CORE: [&str; 9] =
    ["std", "f32", "f64", "tokio", "print", "println", "eprint", "eprintln", "thread"];
const MAY_USE_STD: [&str; 5] = [
    "ratelimit-core/src/clock.rs",
    "ratelimit-core/src/identifiers.rs",
    "ratelimit-core/src/limiter/owned.rs",
    "ratelimit-core/src/reservation/random.rs",
    "ratelimit-core/src/lib.rs",
];
/// What is dropped may have to be released on the runtime of its user, also while a thread panics.
const MAY_USE_TOKIO: &str = "ratelimit-core/src/limiter/owned.rs";
/// A document may hold a fraction, which is read to be refused by the name of its limit.
const MAY_READ_FRACTIONS: &str = "ratelimit-core/src/policy/document.rs";

/// What marks work as not done. In two pieces each, so that this file has none.
const UNFINISHED: [&str; 6] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("to", "do!"),
    concat!("unimpl", "emented!"),
    concat!("db", "g!("),
    concat!("#[ign", "ore"),
];

fn too_long(file: &File) -> Option<String> {
    let count = file.text.lines().count();
    let path = &file.path;
    (count > MAX_LINES).then(|| {
        format!("{path}: {count} lines, above {MAX_LINES}; give a part of it its own file")
    })
}

fn unfinished(file: &File) -> Vec<String> {
    let marks = |line: &str| UNFINISHED.into_iter().find(|mark| line.contains(mark));
    let found = file.lines().filter_map(|(number, line)| Some((number, marks(line)?)));
    let path = &file.path;
    found
        .map(|(number, mark)| format!("{path}:{number}: {mark}: finish it or leave it out"))
        .collect()
}

fn impure(file: &File) -> Vec<String> {
    let allowed = |word: &str| match word {
        "std" => MAY_USE_STD.contains(&&*file.path),
        "tokio" | "thread" => file.path == MAY_USE_TOKIO,
        "f64" => file.path == MAY_READ_FRACTIONS,
        _ => false,
    };
    let bad = |word: &&str| NOT_IN_CORE.contains(word) && !allowed(word);
    let mut found = Vec::new();
    // What a feature brings in is named, not used.
    let is_feature = |line: &str| line.trim().starts_with("#[cfg(feature = ");
    let code = file.code().filter(|(_, line)| !is_feature(line));
    for (number, line) in code {
        for word in words(line).filter(bad) {
            found.push(format!(
                "{}:{number}: `{word}` in the core, which is pure: put it into a store or the clock",
                file.path
            ));
        }
    }
    found
}

/// The algorithm that a file belongs to: a folder holds the parts of the algorithm of its name.
fn algorithm_of(file: &File) -> &str {
    let below = file.path.trim_start_matches(ALGORITHMS).trim_start_matches('/');
    below.split(['/', '.']).next().unwrap_or_default()
}

/// Uses of one algorithm's file by another, by the module's name or by a type of it.
fn siblings(algorithms: &[File]) -> Vec<String> {
    let mut found = Vec::new();
    for sibling in algorithms {
        let public = sibling.code().filter_map(|(_, line)| {
            let line = line.strip_prefix("pub struct ").or(line.strip_prefix("pub enum "))?;
            words(line).next()
        });
        let names: Vec<&str> = public.chain([algorithm_of(sibling)]).collect();
        let others = algorithms.iter().filter(|file| algorithm_of(file) != algorithm_of(sibling));
        for file in others {
            for (number, line) in file.code() {
                for name in words(line).filter(|word| names.contains(word)) {
                    found.push(format!(
                        "{}:{number}: `{name}` of {}: an algorithm is read alone",
                        file.path, sibling.path
                    ));
                }
            }
        }
    }
    found
}

fn without_a_twin(algorithms: &[File], lua: &[File]) -> Vec<String> {
    let twin = |file: &&File| lua.iter().any(|lua| lua.stem() == algorithm_of(file));
    let missing = algorithms.iter().filter(|file| !twin(file));
    missing.map(|file| format!("{}: no {LUA}/{}.lua", file.path, algorithm_of(file))).collect()
}

#[test]
fn no_file_is_too_long() {
    assert_none(files("", &["rs", "lua"]).iter().filter_map(too_long));
}

#[test]
fn nothing_is_left_unfinished() {
    assert_none(files("", &["rs", "lua", "toml"]).iter().flat_map(unfinished));
    assert_none(files("scripts", &["", "sh"]).iter().flat_map(unfinished));
}

#[test]
fn the_core_is_pure() {
    assert_none(files(CORE, &["rs"]).iter().flat_map(impure));
}

#[test]
fn the_arrows_of_the_core_point_one_way() {
    let files = files(CORE, &["rs"]);
    assert_none(
        files.iter().filter(|file| file.stem() != "lib").flat_map(|file| LAYERS.upward(file)),
    );
}

#[test]
fn no_algorithm_knows_another() {
    let algorithms = files(ALGORITHMS, &["rs"]);
    assert!(algorithms.len() >= 5, "the algorithms are in {ALGORITHMS}");
    assert_none(siblings(&algorithms));
}

#[test]
fn every_algorithm_has_its_lua_twin() {
    // Until the Redis store has its scripts there is nothing to hold the algorithms against.
    if root().join(LUA).is_dir() {
        assert_none(without_a_twin(&files(ALGORITHMS, &["rs"]), &files(LUA, &["lua"])));
    }
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let core = |name: &str, text: &str| File::new(&format!("{CORE}/{name}"), text);
    let none = |found: &[String]| assert!(found.is_empty(), "{found:?}");

    assert!(too_long(&core("a.rs", &"\n".repeat(MAX_LINES + 1))).is_some());
    assert!(too_long(&core("a.rs", &"\n".repeat(MAX_LINES))).is_none());
    for mark in UNFINISHED {
        assert_eq!(unfinished(&core("a.rs", &format!("\n// {mark}"))).len(), 1);
    }

    for code in ["use std::time::Instant;", "let x: f64 = 1.0;", "println!(\"x\")"] {
        assert_eq!(impure(&core("gcra.rs", code)).len(), 1, "{code}");
    }
    none(&impure(&core("gcra.rs", "// no f64\nmod tests {\n    let x: f64;\n}")));
    none(&impure(&core("clock.rs", "std::time::Instant::now()")));
    assert_eq!(impure(&core("clock.rs", "as f64")).len(), 1);

    assert_eq!(LAYERS.upward(&core("tick.rs", "use crate::decision::Decision;")).len(), 1);
    assert_eq!(LAYERS.upward(&core("algorithm.rs", "use crate::limit::Limit;")).len(), 1);
    assert_eq!(LAYERS.upward(&core("algorithm/gcra.rs", "use crate::policy::Policy;")).len(), 1);
    assert_eq!(LAYERS.upward(&core("unknown.rs", "")).len(), 1);
    none(&LAYERS.upward(&core("algorithm/gcra.rs", "use crate::algorithm::Step;")));
    none(&LAYERS.upward(&core("policy/document.rs", "use crate::limit::Limit;")));

    let gcra = || core("algorithm/gcra.rs", "pub struct Gcra {");
    let by_type = core("algorithm/other.rs", "use crate::algorithm::{Gcra, Step};");
    let by_module = core("algorithm/other.rs", "use super::gcra;");
    let in_a_comment = core("algorithm/other.rs", "/// Like [`Gcra`](crate::Gcra).");
    assert_eq!(siblings(&[gcra(), by_type]).len(), 1);
    assert_eq!(siblings(&[gcra(), by_module]).len(), 1);
    let part = || core("algorithm/gcra/fast.rs", "use super::gcra;");
    none(&siblings(&[gcra(), part()]));
    none(&without_a_twin(&[part()], &[File::new("lua/gcra.lua", "")]));
    assert_eq!(without_a_twin(&[part()], &[File::new("lua/fast.lua", "")]).len(), 1);
    none(&siblings(&[gcra(), in_a_comment]));

    assert_eq!(without_a_twin(&[gcra()], &[]).len(), 1);
    none(&without_a_twin(&[gcra()], &[File::new("lua/gcra.lua", "")]));
}
