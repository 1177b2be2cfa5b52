//! The tool against a plain second reading of the log: the same log and policy, read by other
//! parsers and counted from the history of each key, give the same decisions, summary, report,
//! proposal and comparison, each limit by its name.
#![allow(missing_docs, clippy::expect_used, clippy::panic)]
#![allow(
    clippy::format_push_string,
    clippy::format_collect,
    clippy::assigning_clones,
    reason = "plain beats fast"
)]

mod generate;
mod limits;
mod logs;
mod replay;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use generate::Draw;
use limits::Limit;
use logs::Log;
use replay::Decided;

/// A policy and a log in a folder of their own.
struct Case {
    folder: TempDir,
    about: String,
    limits: Vec<Limit>,
    other: Vec<Limit>,
    log: Log,
    /// What the callers of each limit need.
    needs: Vec<Vec<u64>>,
}

impl Case {
    fn from_seed(
        seed: u64,
        limits: fn(&mut Draw) -> Vec<Limit>,
        log: fn(&[Limit], &mut Draw) -> String,
        read: fn(&str) -> Log,
    ) -> Self {
        let mut draw = Draw(seed);
        let limits = limits(&mut draw);
        let other = generate::change_limits(&limits, &mut draw);
        let log = log(&limits, &mut draw);
        let folder = TempDir::new().expect("a folder");
        for (name, text) in [
            ("policy.toml", generate::toml(&limits)),
            ("other.toml", generate::toml(&other)),
            ("log", log.clone()),
        ] {
            fs::write(folder.path().join(name), text).expect("writes");
        }
        let about = format!("seed {seed}:\n{}", generate::toml(&limits));
        let log = read(&log).without_undecidable(&limits);
        // Numbers of requests change what a caller needs.
        let has_numbers = log.requests.iter().any(|request| !request.numbers.is_empty());
        let needed = limits.iter().filter(|_| !has_numbers);
        let needs = needed.map(|limit| replay::needs(limit, &log.requests)).collect();
        Self { folder, about, limits, other, log, needs }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// What the tool prints on standard output. On standard error it names the first bad lines.
    fn run(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ratelimit"));
        let ran = command.current_dir(self.path()).args(arguments).output().expect("runs");
        let error = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{arguments:?}: {error}\n{}", self.about);
        let place = |line: &str| line.strip_prefix("line ")?.split(':').next()?.parse().ok();
        let mut named: Vec<usize> = error.lines().filter_map(place).collect();
        named.sort_unstable();
        let is_bad = named.iter().all(|line| self.log.bad.contains(line));
        assert!(is_bad && named.len() == self.log.bad.len().min(20), "{error}\n{}", self.about);
        String::from_utf8(ran.stdout).expect("text")
    }

    fn check(&self) {
        let decided = replay::replay_all(&self.limits, &self.log.requests);
        let options =
            ["--policy", "policy.toml", "--decisions", "out.jsonl", "--report", "out.html"];
        let data = self.run(
            &[&["replay", "log", "--unsorted", "--json", "--compare", "other.toml"], &options[..]]
                .concat(),
        );
        let data: Value = serde_json::from_str(&data).expect("JSON");
        self.check_decisions(&decided);
        self.check_counts(&data, &decided);
        self.check_page(&data, &decided);
        self.check_summary(&decided);
        self.check_comparison(&data["comparison"], &decided);
        self.check_proposal();
    }

    /// What the tool decides of each line, and no more.
    fn check_only_decisions(&self) {
        let decided = replay::replay_all(&self.limits, &self.log.requests);
        let _ = self.run(&["replay", "log", "--policy", "policy.toml", "--decisions", "out.jsonl"]);
        self.check_decisions(&decided);
    }

    fn check_decisions(&self, decided: &[Decided]) {
        let found = fs::read_to_string(self.path().join("out.jsonl")).expect("reads");
        assert_eq!(found.lines().count(), decided.len(), "{}", self.about);
        for (number, (found, decided)) in found.lines().zip(decided).enumerate() {
            let mut found: Value = serde_json::from_str(found).expect("JSON");
            for field in ["key", "keys", "cost"] {
                found.as_object_mut().expect("an object").remove(field);
            }
            let due = replay::line(decided, &self.limits);
            assert_eq!(found, due, "line {number} of {}\n{:?}", self.about, decided.request);
        }
    }

    /// The numbers of the report, by name.
    fn check_counts(&self, data: &Value, decided: &[Decided]) {
        let about = &self.about;
        let requests = || decided.iter().filter(|one| one.request.op == "acquire");
        let denied = requests().filter(|one| !one.allowed).count();
        let others = decided.len() - requests().count();
        let totals = ["requests", "admitted", "denied", "other_operations", "bad_lines"];
        let bad = self.log.bad.len();
        let due = [requests().count(), requests().count() - denied, denied, others, bad];
        assert_eq!(totals.map(|field| &data[field]), due.map(|n| json!(n)).each_ref(), "{about}");
        let at = || decided.iter().map(|one| one.request.at);
        assert_eq!(data["span_us"], json!([at().min(), at().max()]), "{about}");
        let notes = data["notes"].to_string();
        let Log { is_trace, behind, late, .. } = &self.log;
        let said = if *is_trace { "of a trace came after" } else { "came after a later one and" };
        for (lines, said) in [(late, "came more than 5 minutes"), (behind, said)] {
            let due = format!("{lines} line{} {said}", if *lines == 1 { "" } else { "s" });
            assert_eq!(notes.contains(said), *lines > 0, "{said}: {notes}\n{about}");
            assert!(*lines == 0 || notes.contains(&due), "{due}: {notes}\n{about}");
        }

        for (place, (limit, needs)) in self.limits.iter().zip(&self.needs).enumerate() {
            let found = &data["limits"][place];
            let [applied, denied] = replay::counts(limit, decided);
            let is_denied = |need: &&u64| **need > limit.capacity();
            let fitting = needs.iter().find(|need| **need <= limit.capacity());
            let found = json!({
                "name": found["name"], "shadow": found["shadow"], "identifiers": found["identifiers"],
                "when": found["when"],
                "applied": found["applied"], "denied": found["denied"],
                "callers_denied": found["nearness"]["callers_denied"],
                "capacity": found["needs"]["capacity"], "alone": found["needs"]["callers_denied_alone"],
                "most_admitted": found["needs"]["most_admitted"],
            });
            let due = json!({
                "name": limit.name, "shadow": limit.shadow, "identifiers": limit.identifiers,
                "when": limit.when.map(|(name, values, excludes)| {
                    let when = json!({ name: values });
                    if excludes { json!({ "not": when }) } else { when }
                }),
                "applied": applied, "denied": denied,
                "callers_denied": replay::callers(limit, decided)[0],
                "capacity": limit.capacity(), "alone": needs.iter().filter(is_denied).count(),
                "most_admitted": fitting,
            });
            assert_eq!(found, due, "{about}\n{needs:?}");
        }

        for row in data["identifiers"].as_array().expect("identifiers") {
            let name = row["name"].as_str().expect("a name");
            let mut callers: BTreeMap<&str, bool> = BTreeMap::new();
            for one in requests() {
                let Some(value) = one.request.caller.get(name) else { continue };
                let names = |limit: &&Limit| {
                    limit.identifiers.contains(&name)
                        || limit.identifiers.is_empty() && name == "key"
                };
                let counts = |denying: &str| {
                    self.limits.iter().filter(names).any(|limit| limit.name == denying)
                };
                *callers.entry(value).or_default() |= one.denying().any(counts);
            }
            let denied = callers.values().filter(|denied| **denied).count();
            let due = json!({
                "name": name, "callers": callers.len(), "callers_denied": denied, "uncounted": 0,
            });
            assert_eq!(*row, due, "{about}");
        }

        let due = replay::hurt(&self.limits, decided);
        let rows = data["denied_callers"].as_array().expect("callers");
        assert_eq!(rows.len(), due.len(), "{about}");
        for row in rows {
            let text = |field: &str| row[field].as_str().expect("a text").to_owned();
            let fields = ["identifier", "value", "requests", "denied", "by_limit"];
            let found: Value =
                fields.iter().map(|field| ((*field).to_owned(), row[field].clone())).collect();
            assert_eq!(found, due[&(text("identifier"), text("value"))], "{about}");
        }
        assert!(
            rows.windows(2).all(|two| two[0]["denied"].as_u64() >= two[1]["denied"].as_u64()),
            "{about}"
        );
    }

    /// The sentences of the page, each beside the name of its limit.
    fn check_page(&self, data: &Value, decided: &[Decided]) {
        let page = fs::read_to_string(self.path().join("out.html")).expect("reads");
        let width = data["bucket_us"].as_u64().expect("a width");
        for (limit, needs) in self.limits.iter().zip(&self.needs) {
            let name = &limit.name;
            let section = page
                .split("<section class=\"limit\"")
                .find(|part| part.contains(&format!("<h3>{name}")));
            let section = section.expect(name).split("</section>").next().expect("a section");
            let answers = replay::answers(limit, decided);
            let is_met = !answers.is_empty();
            let mut buckets: BTreeMap<u64, u64> = BTreeMap::new();
            for (at, _) in answers.iter().filter(|(_, answer)| !answer.allowed) {
                *buckets.entry(at / width).or_default() += 1;
            }
            let denied = buckets.values().sum::<u64>();
            let verb = if limit.shadow { "would have denied" } else { "denied" };
            let callers = replay::callers(limit, decided)[0];
            let start = format!("It {verb} <strong>{denied}</strong> of {} request", answers.len());
            let from = format!("from <strong>{callers}</strong> of {} c", needs.len());
            let alone = format!(
                "Alone it would deny {} of them",
                needs.iter().filter(|need| **need > limit.capacity()).count()
            );
            let enough = match (limit.is_bucket(), needs.first()) {
                (true, Some(enough)) => format!("<code>burst = {enough}</code>"),
                (false, Some(enough)) => format!("&quot;{}/", limit.with_capacity(*enough).count),
                (_, None) => String::new(),
            };
            for due in [&start, &from, &alone, &enough] {
                assert!(
                    !is_met || section.contains(due.as_str()),
                    "{name} lacks {due}: {section}\n{}",
                    self.about
                );
            }
            let most = format!("<strong>{name}</strong>{verb} {denied}, most at ");
            match (page.split_once(&most), buckets.values().max()) {
                (Some((_, rest)), Some(most)) => {
                    let (time, rest) = rest.split_once(": ").expect("a time");
                    assert!(
                        rest.starts_with(&format!("{most}</p>")),
                        "{name}: {rest:.40}\n{}",
                        self.about
                    );
                    // The first of those with as many, in UTC.
                    let first =
                        buckets.iter().find(|(_, denied)| *denied == most).expect("one").0 * width;
                    let of_day = first / 1_000_000 % 86_400;
                    let clock = format!("{:02}:{:02}", of_day / 3_600, of_day / 60 % 60);
                    assert!(time.contains(&clock), "{name}: {time} is not {clock}\n{}", self.about);
                }
                (None, None) => {}
                (found, due) => panic!("{name}: {found:?}, {due:?}\n{}", self.about),
            }
        }
    }

    /// The tables of the terminal.
    fn check_summary(&self, decided: &[Decided]) {
        let summary = self.run(&["replay", "log", "--policy", "policy.toml"]);
        for limit in &self.limits {
            let [applied, denied] = replay::counts(limit, decided);
            let names = match limit.identifiers.join(" + ") {
                none if none.is_empty() => "key".to_owned(),
                names => names,
            };
            let names = match limit.when {
                Some((name, [one, other], excludes)) => {
                    let not = if excludes { "not " } else { "" };
                    format!("{names} when {not}{name} = {one:?} or {other:?}")
                }
                None => names,
            };
            let due = format!("{} {} {names} {} {denied}", limit.name, limit.algorithm, applied);
            let rows =
                summary.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
            let row = rows
                .filter(|row| row.starts_with(&format!("{} {}", limit.name, limit.algorithm)))
                .collect::<Vec<_>>();
            assert!(
                row.len() == 1 && row[0].starts_with(&format!("{due} ")),
                "{row:?} is not {due}\n{}",
                self.about
            );
        }
    }

    fn check_comparison(&self, found: &Value, decided: &[Decided]) {
        let other = replay::replay_all(&self.other, &self.log.requests);
        let (mut both, mut only) = (0, [0, 0]);
        let mut callers: BTreeMap<(String, String), [u64; 2]> = BTreeMap::new();
        for (this, other) in
            decided.iter().zip(&other).filter(|(this, _)| this.request.op == "acquire")
        {
            both += u64::from(!this.allowed && !other.allowed);
            let (place, blamed) = match (this.allowed, other.allowed) {
                (false, true) => (0, replay::callers_to_blame(&self.limits, this)),
                (true, false) => (1, replay::callers_to_blame(&self.other, other)),
                _ => continue,
            };
            only[place] += 1;
            for caller in blamed {
                callers.entry(caller).or_default()[place] += 1;
            }
        }
        let fields = [
            "denied_by_both",
            "denied_only_by_this",
            "denied_only_by_other",
            "callers_that_differ",
        ];
        let due = [both, only[0], only[1], callers.len() as u64];
        assert_eq!(
            fields.map(|field| &found[field]),
            due.map(|n| json!(n)).each_ref(),
            "{}",
            self.about
        );
        for row in found["differing_callers"].as_array().expect("callers") {
            let text = |field: &str| row[field].as_str().expect("a text").to_owned();
            let [this, other] = callers[&(text("identifier"), text("value"))];
            assert_eq!(
                (&row["denied_only_by_this"], &row["denied_only_by_other"]),
                (&json!(this), &json!(other))
            );
        }
        for (limit, row) in self.other.iter().zip(found["limits"].as_array().expect("limits")) {
            let [_, denied] = replay::counts(limit, &other);
            assert_eq!(
                (&row["name"], &row["denied"]),
                (&json!(limit.name), &json!(denied)),
                "{}",
                self.about
            );
        }
    }

    /// What `suggest` proposes, alone and together.
    fn check_proposal(&self) {
        if self.needs.iter().all(Vec::is_empty) {
            return;
        }
        let said =
            self.run(&["suggest", "log", "--policy", "policy.toml", "--target", "25%", "--json"]);
        let rows: Vec<Value> =
            said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let propose = |(limit, needs): (&Limit, &Vec<u64>)| match needs.len() {
            0 => limit.clone(),
            callers => limit.with_capacity(needs.get(callers / 4).copied().unwrap_or(1)),
        };
        let proposed: Vec<_> = self.limits.iter().zip(&self.needs).map(propose).collect();
        let together = replay::replay_all(&proposed, &self.log.requests);
        let limits = self.limits.iter().zip(&self.needs);
        for (((limit, needs), proposed), row) in limits.zip(&proposed).zip(&rows) {
            let denied =
                |limit: &Limit| needs.iter().filter(|need| **need > limit.capacity()).count();
            let due = json!({ "name": limit.name, "callers": needs.len(), "now": denied(limit) });
            let found = json!({ "name": row["name"], "callers": row["callers"], "now": row["now"]["callers_denied"] });
            assert_eq!(found, due, "{}", self.about);
            if needs.is_empty() {
                assert_eq!(row["proposed"], Value::Null, "{}", self.about);
                continue;
            }
            let row = &row["proposed"];
            let algorithm = row["algorithm"].as_str().expect("an algorithm");
            let capacity = if limit.is_bucket() {
                algorithm.split(" burst ").nth(1).and_then(|rest| rest.split(' ').next())
            } else {
                algorithm.split('/').next().and_then(|head| head.rsplit(' ').next())
            };
            let due = if limit.is_bucket() { proposed.burst } else { proposed.count };
            assert_eq!(capacity, Some(&*due.to_string()), "{algorithm}\n{needs:?}\n{}", self.about);
            let found = [&row["callers_denied"], &row["callers_denied_together"]];
            let due = [denied(proposed), replay::callers(limit, &together)[0]];
            assert_eq!(found, due.map(|n| json!(n)).each_ref(), "{algorithm}\n{}", self.about);
        }
    }
}

#[test]
fn access_logs_are_read_and_decided_as_a_second_reader_does() {
    for seed in 0..10 {
        let log = |_: &[Limit], draw: &mut Draw| generate::access_log(draw);
        Case::from_seed(seed, generate::limits, log, logs::access_log).check();
    }
}

#[test]
fn json_traces_are_read_and_decided_as_a_second_reader_does() {
    for seed in 100..110 {
        Case::from_seed(seed, generate::limits, generate::jsonl, logs::jsonl).check();
    }
}

#[test]
fn csv_traces_are_read_and_decided_as_a_second_reader_does() {
    for seed in 200..210 {
        Case::from_seed(seed, generate::limits, generate::csv, logs::csv).check();
    }
}

/// Customers with numbers of their own, lockouts, and limits that admit nothing.
#[test]
fn traces_that_bring_numbers_are_decided_as_a_second_reader_does() {
    for seed in 300..320 {
        let limits = generate::limits_with_numbers;
        Case::from_seed(seed, limits, generate::jsonl, logs::jsonl).check_only_decisions();
        Case::from_seed(seed, limits, generate::csv, logs::csv).check_only_decisions();
    }
}
