//! The order of a log's lines decides nothing: neither that of a server which writes a line when it
//! has answered, nor that of several servers and rotated files.

use crate::common::{Ran, Scene, TWO, gzip, limit};

/// A line of a caller, so many seconds after ten o'clock, with these fields behind its size.
fn line(caller: u64, second: u64, more: &str) -> String {
    let (minute, second) = (second / 60, second % 60);
    format!(
        "192.0.2.{caller} - - [17/May/2015:10:{minute:02}:{second:02} +0000] \"GET / HTTP/1.1\" 200 5{more}\n"
    )
}

/// A line per second, of a few callers in bursts.
fn log() -> Vec<String> {
    (0..2_000).map(|second| line(second * second / 7 % 5, second, "")).collect()
}

/// The same lines, each up to 59 places later.
fn shuffled_lines() -> Vec<String> {
    let mut lines: Vec<_> = log().into_iter().enumerate().collect();
    lines.sort_by_key(|(place, _)| place + place * 37 % 60);
    lines.into_iter().map(|(_, line)| line).collect()
}

/// The decisions of these inputs, and what was printed.
fn decide_inputs(inputs: &[(&str, Vec<u8>)]) -> (String, Ran) {
    let scene = Scene::new(&TWO.replace("1/s", "1/9s"));
    for (name, contents) in inputs {
        scene.write(name, contents);
    }
    let names: Vec<_> = inputs.iter().map(|(name, _)| *name).collect();
    let ran = scene.replay(&[&["--decisions", "out.jsonl"], &*names].concat()).exits(0);
    (scene.read("out.jsonl"), ran)
}

#[test]
fn a_log_decides_alike_in_whatever_order_its_servers_and_files_come() {
    let lines = log();
    let (due, ran) = decide_inputs(&[("log", lines.concat().into())]);
    assert!(!ran.out.contains("note"), "{}", ran.out);
    assert!(due.contains("\"allowed\":false") && due.contains("\"allowed\":true"));

    let (found, ran) = decide_inputs(&[("log", shuffled_lines().concat().into())]);
    assert_eq!(found, due);
    let note = ran.out.lines().find(|line| line.starts_with("note: ")).expect("a note");
    assert!(note.contains("came after a later one and were sorted by time"), "{note}");
    assert!(ran.out.find("note: ") < ran.out.find("requests"), "{}", ran.out);

    let of_host =
        |host: usize| lines.iter().skip(host).step_by(3).map(String::as_str).collect::<String>();
    let hosts =
        [("a", of_host(0).into()), ("b", gzip(of_host(1).as_bytes())), ("c", of_host(2).into())];
    assert_eq!(decide_inputs(&hosts).0, due);

    let (first, last) = lines.split_at(900);
    let rotated = [
        ("access.log", last.concat().into()),
        ("access.log.1.gz", gzip(first.concat().as_bytes())),
    ];
    let (found, ran) = decide_inputs(&rotated);
    assert_eq!(found, due);
    assert!(!ran.out.contains("note"), "{}", ran.out);
}

#[test]
fn a_line_that_comes_too_late_to_be_sorted_is_counted_and_said_first() {
    let mut lines = log();
    lines.rotate_left(1);
    let scene = Scene::with(&TWO, lines.concat());
    let numbers = &scene.replay(&["--json", "input"]).json()[0];
    assert_eq!((&numbers["requests"], &numbers["bad_lines"]), (&2_000.into(), &0.into()));
    let note = numbers["notes"][0].as_str().expect("a note");
    assert!(note.starts_with("WARNING: 1 line came more than 5 minutes"), "{note}");
}

#[test]
fn a_trace_is_decided_in_the_order_of_its_lines_and_says_so() {
    let line = |at| format!("{{\"at_us\": {at}, \"keys\": {{\"ip\": \"a\"}}}}\n");
    let (decided, ran) = decide_inputs(&[("trace", [9, 5, 7].map(line).concat().into())]);
    ran.says(&["note: 2 lines of a trace came after a later one"]);
    assert_eq!(decided.lines().map(|line| &line[9..10]).collect::<Vec<_>>(), ["9", "5", "7"]);
}

#[test]
fn of_a_limit_on_requests_at_the_same_time_a_log_says_nothing() {
    let jobs = limit("jobs", "ip", "concurrency 2/30s", "");
    let scene = Scene::with(&(TWO.clone() + &jobs), log().concat());
    let note = "note: jobs: a concurrency limit cannot be replayed";
    scene.replay(&["--decisions", "out.jsonl", "input"]).exits(0).says(&[note]);
    let decided = scene.read("out.jsonl");
    scene.command("suggest", &["--target", "0%", "input"]).exits(0).says(&[note]);
    scene.write("policy.toml", jobs);
    scene.replay(&["input"]).exits(2).says(&[&note[6..]]);
    scene.write("policy.toml", &*TWO);
    assert_eq!(decided, scene.decision_lines(&["input"]));
}

/// Requests of one caller that overlap, each with the time that it took: up to 35 s, under leases
/// of 30 s.
fn jobs() -> Vec<(u64, u64)> {
    let job = |n: u64| (60_000_000 + n * n * 7_919 % 400_000_000, n * 7_654_321 % 35_000_000);
    let mut jobs: Vec<_> = (0..300).map(job).collect();
    jobs.sort_unstable();
    jobs
}

#[test]
fn a_request_holds_its_place_for_as_long_as_it_took() {
    let jobs_limit = limit("jobs", "ip", "concurrency 3/30s", "");
    // A limit beside it whose charges cannot be reserved.
    let scene = Scene::new(&(limit("log", "ip", "sliding-log 900/s", "") + &jobs_limit));
    let mut places: Vec<u64> = Vec::new();
    let due = jobs().into_iter().map(|(at, took)| {
        places.retain(|until| *until > at);
        let is_free = places.len() < 3;
        places.extend(is_free.then_some(at + took.min(30_000_000)));
        is_free
    });
    let due: Vec<_> = due.collect();
    assert!(due.contains(&true) && due.contains(&false));

    let traced = |(at, took)| {
        format!("{{\"at_us\":{at},\"keys\":{{\"ip\":\"a\"}},\"duration_us\":{took}}}\n")
    };
    scene.write("trace", jobs().into_iter().map(traced).collect::<String>());
    scene.replay(&["--decisions", "out.jsonl", "trace"]).exits(0).lacks("note");
    let decided = scene.read("out.jsonl");
    let allowed: Vec<_> =
        decided.lines().map(|line| line.contains("cost\":1,\"allowed\":true")).collect();
    assert_eq!(allowed, due);
    // Also beside leases of the same requests that last longer and deny none.
    let wide = limit("wide", "ip", "concurrency 900/60s", "");
    for policy in [jobs_limit.clone() + &wide, wide + &jobs_limit] {
        scene.write("policy.toml", policy);
        scene.replay(&["--decisions", "out.jsonl", "trace"]).exits(0);
        let decided = scene.read("out.jsonl");
        let allowed = decided.lines().map(|line| line.contains("cost\":1,\"allowed\":true"));
        assert_eq!(allowed.collect::<Vec<_>>(), due);
    }
    scene.write("policy.toml", limit("log", "ip", "sliding-log 900/s", "") + &jobs_limit);

    // The same in a log, in whole seconds.
    let (mut named, mut plain) = (String::new(), String::new());
    for (at, took) in jobs() {
        let (at, took) = (at / 1_000_000, took / 1_000_000);
        named += &line(1, at, &format!(" \"-\" \"x\" {took}.000"));
        plain += &line(1, at, &format!(" \"-\" \"x\" {took}"));
    }
    scene.write("named", named);
    scene.write("plain", plain);
    let ran = scene.replay(&["named"]).says(&["jobs"]).lacks("note");
    let denied =
        |ran: &Ran| ran.out.lines().find(|line| line.contains("denied")).map(str::to_owned);
    assert_eq!(denied(&scene.replay(&["--duration-unit", "s", "plain"])), denied(&ran));
    scene.replay(&["plain"]).says(&["add --duration-unit us, ms or s"]);

    // What is proposed denies nothing, and one less denies.
    scene.write("policy.toml", jobs_limit);
    let proposed = &scene.command("suggest", &["--target", "0%", "--json", "trace"]).json()[0];
    let algorithm = proposed["proposed"]["algorithm"].as_str().expect("an algorithm");
    let most = (0..jobs().len()).map(|n| {
        let (at, _) = jobs()[n];
        jobs()[..=n].iter().filter(|(from, took)| from + (*took).min(30_000_000) > at).count()
    });
    assert_eq!(algorithm, format!("concurrency {}/30s", most.max().expect("jobs")));
}
