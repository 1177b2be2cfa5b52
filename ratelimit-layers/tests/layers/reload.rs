//! A policy is replaced as a whole, keeps its states, and stays where the new one is broken.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, ConfigError, Limits, ManualClock, RateLimiter};
use ratelimit_layers::{Fallback, Part, PolicyChanges, Reload, ReloadError};

use crate::common::{BEGIN, Memory, memory};

const EVERY: Duration = Duration::from_secs(1);

fn policy(limits: &[(&str, u64)]) -> String {
    let table = |(name, burst): &(&str, u64)| {
        format!("[[limit]]\nname = '{name}'\nalgorithm = 'gcra'\nrate = '60/m'\nburst = {burst}\n")
    };
    limits.iter().map(table).collect()
}

fn limits(document: &str) -> Limits<AnyAlgorithm> {
    toml::from_str(document).expect("a policy")
}

fn reload(document: &str) -> Reload<Memory> {
    Reload::new(limits(document), memory(&ManualClock::new(BEGIN)))
}

fn capacity(reload: &Reload<Memory>) -> u64 {
    reload.limiter().request("nobody").cost(0).peek_now().expect("decides").limit()
}

/// Whether a caller may be without a limit is a choice of the service, and no part of the policy.
#[test]
fn what_a_limiter_admits_without_a_limit_outlives_a_replacement_and_holds_in_each_part() {
    let document = |burst| policy(&[("burst", burst)]) + "key = ['ip']\n";
    for allows in [false, true] {
        let store = Arc::new(memory(&ManualClock::new(BEGIN)));
        let limiter = RateLimiter::new(limits(&document(5)), store);
        let reload = Reload::over(if allows { limiter.allow_unlimited() } else { limiter });
        let part = reload.part(["burst"]).expect("it is there");
        for burst in [5, 9] {
            reload.read(&document(burst)).expect("a policy");
            for limiter in [reload.limiter(), part.limiter()] {
                assert_eq!(limiter.check_now("a bare key").is_ok(), allows, "burst {burst}");
            }
        }
    }
}

#[test]
fn conditions_are_replaced_with_a_policy_hold_in_each_part_and_keep_the_states() {
    let document = |path: &str| {
        policy(&[("burst", 5)]) + &format!("key = ['ip']\nwhen = {{ path = '{path}' }}\n")
    };
    let reload = reload(&document("/a"));
    let part = reload.part(["burst"]).expect("it is there");
    part.require(&[Some("ip"), Some("path")], false).expect("it has both");
    let remaining = |path: &str| {
        let verdict = part.limiter().check_now(&[("ip", "a"), ("path", path)]);
        verdict.ok().map(|verdict| verdict.remaining())
    };
    assert_eq!((remaining("/a"), remaining("/b")), (Some(4), None));
    let changes = reload.read(&document("/b")).expect("a policy");
    assert_eq!(changes.to_string(), "changed burst");
    assert_eq!((remaining("/a"), remaining("/b")), (None, Some(3)));
    let unknown = document("/a").replace("path =", "pth =");
    let error = reload.read(&unknown).expect_err("no request has it").to_string();
    assert!(error.contains("condition names \"pth\"") && error.contains("\"path\""), "{error}");
}

#[test]
fn over_a_fallback_a_policy_without_a_choice_is_not_taken() {
    let silent = policy(&[("burst", 5)]);
    let open = |burst| policy(&[("burst", burst)]) + "on_outage = 'open'\n";
    let in_force = limits(&open(20));
    let fallback =
        Fallback::builder().build(memory(&ManualClock::new(BEGIN)), &in_force).expect("a choice");
    let checked = move |limits: &Limits<AnyAlgorithm>| fallback.validate(limits);
    let reload = reload(&open(20)).validate(checked.clone()).expect("valid");
    let error = reload.read(&silent).expect_err("no choice").to_string();
    assert!(error.contains("burst") && error.contains("on_outage"), "{error}");
    assert_eq!(capacity(&reload), 20);
    let changes = reload.read(&open(5)).expect("a choice");
    assert_eq!((changes.to_string(), capacity(&reload)), ("changed burst".into(), 5));
    // Nor is it taken at first.
    assert!(self::reload(&silent).validate(checked).is_err());
}

#[test]
fn a_request_is_decided_by_the_old_limits_or_the_new_ones_never_by_some_of_each() {
    let known = [[("a", 1_000), ("b", 1_001)], [("c", 2_000), ("d", 2_001)]];
    let policies = known.map(|limits| policy(&limits));
    let reload = reload(&policies[0]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let limiter = reload.limiter();
                    let verdict = limiter.request("alice").peek_now().expect("decides");
                    let told: Vec<_> =
                        limiter.named(&verdict).map(|d| (d.name(), d.limit)).collect();
                    assert!(known.iter().any(|known| told == *known), "{told:?}");
                }
            });
        }
        for nth in 1..=500 {
            assert!(!reload.read(&policies[nth % 2]).expect("a policy").is_empty());
        }
        over.store(true, Ordering::Relaxed);
    });
}

/// A file, and everything that a watch on it told.
struct Watched {
    folder: tempfile::TempDir,
    path: PathBuf,
    reload: Reload<Memory>,
    reports: Arc<Mutex<Vec<String>>>,
    _watch: ratelimit_layers::Watch,
}

fn in_words(said: Result<PolicyChanges, Arc<ReloadError>>) -> String {
    match said {
        Ok(changes) => changes.to_string(),
        Err(error) => format!("error: {error}"),
    }
}

/// Watches a new file with this policy. What the test does from here on falls between two looks.
async fn watch_file(document: &str) -> Watched {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("policy.toml");
    fs::write(&path, document).expect("writes");
    let reload = reload(document);
    let reports: Arc<Mutex<Vec<String>>> = Arc::default();
    let heard = Arc::clone(&reports);
    let watch = reload.watch(&path, EVERY, move |said| {
        let said = in_words(said);
        heard.lock().expect("no panic").push(said.clone());
        assert!(!said.contains("loud"), "as the test wants it");
    });
    tokio::time::sleep(EVERY / 2).await;
    Watched { folder, path, reload, reports, _watch: watch }
}

impl Watched {
    /// Lets the watch look this often.
    async fn looks(&self, count: u32) {
        tokio::time::sleep(EVERY * count).await;
    }

    fn take_reports(&self) -> Vec<String> {
        std::mem::take(&mut self.reports.lock().expect("no panic"))
    }
}

/// As editors save: into a new file, which takes the name of the old one.
fn replace(path: &Path, document: &str) {
    let new = path.with_extension("new");
    fs::write(&new, document).expect("writes");
    fs::rename(&new, path).expect("renames");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_written_or_replaced_is_read() {
    let watched = watch_file(&policy(&[("burst", 20)])).await;
    watched.looks(5).await;
    assert_eq!(watched.take_reports(), Vec::<String>::new());

    fs::write(&watched.path, policy(&[("burst", 9)])).expect("writes");
    watched.looks(5).await;
    assert_eq!(
        (watched.take_reports(), capacity(&watched.reload)),
        (vec!["changed burst".into()], 9)
    );

    replace(&watched.path, &policy(&[("burst", 8), ("more", 30)]));
    watched.looks(5).await;
    assert_eq!(watched.take_reports(), ["added more; changed burst"]);
    // A symbolic link that moves is followed.
    let other = watched.folder.path().join("other.toml");
    fs::write(&other, policy(&[("burst", 7)])).expect("writes");
    let link = watched.folder.path().join("link");
    std::os::unix::fs::symlink(&other, &link).expect("links");
    fs::rename(&link, &watched.path).expect("renames");
    watched.looks(5).await;
    assert_eq!(watched.take_reports(), ["removed more; changed burst"]);
}

#[tokio::test(start_paused = true)]
async fn a_broken_file_is_an_error_once_and_the_policy_stays() {
    let watched = watch_file(&policy(&[("burst", 20)])).await;
    replace(&watched.path, "[[limit]]\nname = 'burst'\n");
    watched.looks(9).await;
    let told = watched.take_reports();
    assert_eq!((told.len(), capacity(&watched.reload)), (1, 20), "{told:?}");
    assert!(told[0].contains("policy.toml") && told[0].contains("line 1"), "{told:?}");
    let last = watched.reload.last_error().expect("the last one failed");
    assert_eq!(told[0], format!("error: {last}"));

    fs::remove_file(&watched.path).expect("removes");
    watched.looks(9).await;
    let told = watched.take_reports();
    assert!(told.len() == 1 && told[0].contains("cannot be read"), "{told:?}");
    assert_eq!(capacity(&watched.reload), 20);

    replace(&watched.path, &policy(&[("burst", 5)]));
    watched.looks(5).await;
    assert_eq!(watched.take_reports(), ["changed burst"]);
    assert!(watched.reload.last_error().is_none());

    // The policy that was in force before the mistake is taken, too.
    replace(&watched.path, "");
    watched.looks(5).await;
    replace(&watched.path, &policy(&[("burst", 5)]));
    watched.looks(5).await;
    assert!(watched.reload.last_error().is_none());
    assert_eq!(capacity(&watched.reload), 5);
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_those_who_are_told_or_asked_ends_no_watch() {
    let watched = watch_file(&policy(&[("burst", 20)])).await;
    replace(&watched.path, &policy(&[("loud", 5)]));
    watched.looks(5).await;
    assert_eq!(watched.take_reports(), ["added loud; removed burst"]);
    let valid = |limits: &Limits<AnyAlgorithm>| {
        assert_ne!(limits.as_slice()[0].name(), "wrong", "as the test wants it");
        let refused = limits.as_slice()[0].name() == "refused";
        if refused { Err(ConfigError::new("as the test wants it")) } else { Ok(()) }
    };
    let _ = watched.reload.clone().validate(valid).expect("valid");
    replace(&watched.path, &policy(&[("wrong", 5)]));
    watched.looks(5).await;
    let told = watched.take_reports();
    assert!(told.len() == 1 && told[0].ends_with("the function given to `validate` panicked"));
    assert!(told[0].contains("policy.toml: "), "{told:?}");
    assert!(watched.reload.last_error().is_some());
    replace(&watched.path, &policy(&[("refused", 5)]));
    watched.looks(5).await;
    let told = watched.take_reports();
    assert!(told.len() == 1 && told[0].ends_with("policy.toml: as the test wants it"), "{told:?}");
    // Without a file, none is named.
    let refused = watched.reload.read(&policy(&[("refused", 5)])).expect_err("refused");
    assert_eq!(refused.to_string(), "as the test wants it");
    replace(&watched.path, &policy(&[("right", 7)]));
    watched.looks(5).await;
    assert_eq!((watched.take_reports().len(), capacity(&watched.reload)), (1, 7));
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_still_being_written_is_not_taken() {
    let watched = watch_file(&policy(&[("burst", 20), ("more", 30)])).await;
    watched.looks(3).await;
    // Each piece would be a policy of its own, and is there at one look only.
    for count in [1, 2, 3, 4] {
        let written: Vec<_> = [("burst", 9), ("a", 1), ("b", 2), ("c", 3)][..count].to_vec();
        fs::write(&watched.path, policy(&written)).expect("writes");
        watched.looks(1).await;
        assert_eq!(capacity(&watched.reload), 20, "{count}");
    }
    watched.looks(2).await;
    assert_eq!(watched.take_reports(), ["added a, b, c; removed more; changed burst"]);
}

/// Every field that a `[[limit]]` may have, as the parser lists them: a field that is new has no
/// row below.
fn fields() -> BTreeSet<String> {
    let unknown =
        toml::from_str::<Limits<AnyAlgorithm>>("[[limit]]\nnone = 1\n").expect_err("unknown");
    let unknown = unknown.to_string();
    let (_, listed) = unknown.split_once("expected one of ").expect("a list");
    listed.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Each field alone, in a policy of two limits of which the other one stays. All users of the
/// policy see it, and the change names its limit.
#[test]
fn a_reload_takes_each_field_that_differs_alone() {
    const GCRA: &[(&str, &str)] = &[("algorithm", "'gcra'"), ("rate", "'60/m'")];
    const WINDOW: &[(&str, &str)] = &[("algorithm", "'fixed-window'"), ("rate", "'60/m'")];
    const BUCKETS: &[(&str, &str)] =
        &[("algorithm", "'bucketed-window'"), ("bucket", "'1s'"), ("rates", "['9/2s']")];
    const MONTHS: &[(&str, &str)] = &[("algorithm", "'fixed-window'"), ("rate", "'60/month'")];
    const LOCKOUT: &[(&str, &str)] =
        &[("algorithm", "'lockout'"), ("rate", "'3/m'"), ("block", "'1h'"), ("factor", "2")];
    let rows = [
        ("name", "'other'", GCRA),
        ("key", "['ip']", GCRA),
        ("when", "{ path = '/a' }", GCRA),
        ("algorithm", "'sliding-counter'", GCRA),
        ("rate", "'61/m'", GCRA),
        ("burst", "7", GCRA),
        ("debt", "5", GCRA),
        ("max", "'90/m'", GCRA),
        ("count", "'attempts'", WINDOW),
        ("required", "true", GCRA),
        ("shadow", "true", GCRA),
        ("overridable", "true", GCRA),
        ("on_outage", "'open'", GCRA),
        ("warn", "'80%'", GCRA),
        ("bucket", "'2s'", BUCKETS),
        ("rates", "['8/2s']", BUCKETS),
        ("zone", "'Asia/Kolkata'", MONTHS),
        ("anchor", "15", MONTHS),
        ("block", "'2h'", LOCKOUT),
        ("factor", "3", LOCKOUT),
        ("longest", "'9h'", LOCKOUT),
        ("forget", "'9d'", LOCKOUT),
    ];
    let named = rows.iter().map(|(field, ..)| (*field).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(named, fields(), "each field has a row");
    for (field, value, rest) in rows {
        let limit = |differs: bool| {
            let mut fields: BTreeMap<_, _> = rest.iter().copied().collect();
            fields.insert("name", "'limit'");
            fields.extend(differs.then_some((field, value)));
            let lines = fields.iter().map(|(field, value)| format!("{field} = {value}\n"));
            "[[limit]]\n".to_owned() + &lines.collect::<String>()
        };
        let documents = [false, true].map(|differs| policy(&[("stays", 9)]) + &limit(differs));
        for [old, new] in [[0, 1], [1, 0]].map(|order| order.map(|at: usize| &*documents[at])) {
            let reload = reload(old);
            let (whole, part) = (Part::from(&reload), reload.part(["*"]).expect("all"));
            let _seen = part.limiter();
            let changes = reload.read(new).expect("a policy");
            let name = if field == "name" { "added" } else { "changed limit" };
            assert!(changes.to_string().contains(name), "{field}: {changes}");
            assert!(!changes.to_string().contains("stays"), "{field}: {changes}");
            // Compared as text as well, in case the comparison itself misses a field.
            let due = limits(new);
            assert_ne!(format!("{due:?}"), format!("{:?}", limits(old)), "{field}");
            for limiter in [reload.limiter(), whole.limiter(), part.limiter()] {
                assert_eq!(*limiter.limits(), due, "{field}");
                assert_eq!(format!("{:?}", limiter.limits()), format!("{due:?}"), "{field}");
            }
            assert!(reload.read(new).expect("a policy").is_empty(), "{field}");
        }
    }
}

/// A policy differs in its limits, and in their order.
#[test]
fn a_reload_takes_another_order_and_other_limits() {
    let all = [("a", 1), ("b", 2), ("c", 3)];
    let reload = reload(&policy(&all[..2]));
    for (limits, told) in [
        (vec![all[1], all[0]], "reordered"),
        (vec![all[1], all[0], all[2]], "added c"),
        (vec![all[1], all[2]], "removed a"),
    ] {
        assert_eq!(reload.read(&policy(&limits)).expect("a policy").to_string(), told);
        let limiter = reload.limiter();
        let verdict = limiter.request("alice").peek_now().expect("decides");
        let said: Vec<_> = limiter.named(&verdict).map(|one| (one.name(), one.limit)).collect();
        assert_eq!(said, limits);
    }
}

/// Of several parts, each refuses what it cannot use, wherever it stands among them.
#[test]
fn a_reload_meets_what_each_of_several_parts_requires() {
    let parts = [("a", "ip"), ("b", "user"), ("c", "key")];
    let limit = |name: &str, key: &str, algorithm: &str| {
        format!("[[limit]]\nname = '{name}.one'\nkey = ['{key}']\n{algorithm}\n")
    };
    let (gcra, leases) =
        ("algorithm = 'gcra'\nrate = '1/s'", "algorithm = 'concurrency'\nrate = '1/30s'");
    let right = parts.map(|(name, key)| limit(name, key, gcra));
    for order in [[0, 1, 2], [1, 2, 0], [2, 0, 1]] {
        let reload = reload(&right.concat());
        for (name, key) in order.map(|place: usize| parts[place]) {
            let part = reload.part([format!("{name}.*")]).expect("it is there");
            part.require(&[Some(key)], false).expect("it suits");
        }
        for (place, (name, key)) in parts.into_iter().enumerate() {
            for wrong in [limit(name, "other", gcra), limit(name, key, leases), String::new()] {
                let mut limits = right.clone();
                limits[place] = wrong;
                let refused = reload.read(&limits.concat()).expect_err("it does not suit a part");
                assert!(refused.to_string().contains(&format!("\"{name}.")), "{refused}");
                assert_eq!(*reload.limiter().limits(), self::limits(&right.concat()));
            }
        }
    }
}
