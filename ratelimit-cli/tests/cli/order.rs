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

/// How long a request takes is the last field of a line, if its unit is known: a fraction of
/// seconds tells it, and a whole number does not. With a fraction, a line's time is the end.
#[test]
fn a_log_tells_how_long_a_request_holds_its_place() {
    let scene = Scene::new(&limit("jobs", "ip", "concurrency 3/30s", ""));
    let (mut named, mut plain) = (String::new(), String::new());
    for (at, took) in jobs() {
        let (at, took) = (at / 1_000_000, took / 1_000_000);
        named += &line(1, at + took, &format!(" \"-\" \"x\" {took}.000"));
        plain += &line(1, at, &format!(" \"-\" \"x\" {took}"));
    }
    scene.write("named", named);
    scene.write("plain", plain);
    let ran = scene.replay(&["named"]).says(&["jobs"]).lacks("cannot be replayed");
    let denied =
        |ran: &Ran| ran.out.lines().find(|line| line.contains("denied")).map(str::to_owned);
    assert_eq!(denied(&scene.replay(&["--duration-unit", "s", "plain"])), denied(&ran));
    scene.replay(&["plain"]).says(&["add --duration-unit us, ms or s"]);
}

/// In no order at all, the lines of a log are refused, unless the user wants them so.
#[test]
fn a_log_in_no_order_of_time_is_refused() {
    let scene = Scene::new(&limit("per-ip", "ip", "gcra 1/s", ""));
    let shuffled: String = (0..200).map(|n| line(1, n * 7_919 % 200 * 17, "")).collect();
    scene.write("log", shuffled);
    let ran = scene.replay(&["log"]).exits(2).says(&["log: ", "minutes", "--unsorted"]);
    let ran = ran.says(&["requests   200", "note: log: its lines are in no order"]);
    ran.lacks("decided so far");
    scene.replay(&["--unsorted", "log"]).exits(0).says(&["WARNING: ", "late"]);
}

/// 240 requests of 300 are denied that came evenly, because the log says only in which second.
#[test]
fn a_limit_finer_than_the_times_of_the_log_is_named() {
    let limits =
        limit("fine", "ip", "gcra 10/s", "burst = 1") + &limit("coarse", "ip", "gcra 9/m", "");
    let scene = Scene::new(&limits);
    scene.write("log", (0..300).map(|n| line(1, n / 5, "")).collect::<String>());
    let note = "note: fine: finer than the times of the log";
    scene.replay(&["log"]).exits(0).says(&[note]).lacks("coarse: finer");
    scene.command("suggest", &["--target", "0%", "log"]).exits(0).says(&[note]);
    let kept = "--target allows to deny none of 1 caller";
    scene.command("suggest", &["--target", "1%", "log"]).exits(0).says(&[kept]);
    let exact: Vec<_> = (0..300)
        .map(|n| format!("{{\"at_us\":{},\"keys\":{{\"ip\":\"a\"}}}}\n", n * 200_000))
        .collect();
    scene.write("trace", exact.concat());
    scene.replay(&["trace"]).exits(0).lacks("finer");
}
