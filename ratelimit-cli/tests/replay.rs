//! What a replay reports, skips and refuses.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{BUCKET, Scene, TWO, gzip, workspace};

const GOOD: &str = "{\"at_us\": 5, \"key\": \"k\"}\n";

#[test]
fn bad_lines_are_named_counted_and_skipped() {
    let scene = Scene::new(BUCKET);
    scene.write("input", format!("{GOOD}nonsense\n\n{{\"at_us\": -5, \"key\": \"k\"}}\n{GOOD}"));
    let ran = scene.replay(&["--decisions", "out.jsonl", "input"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(scene.read("out.jsonl").lines().count(), 2);
    let named: Vec<_> = ran.err.lines().map(|line| line.split(':').next()).collect();
    assert_eq!(named, [Some("line 2"), Some("line 4")], "{}", ran.err);
    assert!(ran.out.contains("bad lines  2"), "{}", ran.out);
}

#[test]
fn many_bad_lines_do_not_flood_the_terminal() {
    let scene = Scene::new(BUCKET);
    scene.write("input", format!("{GOOD}{}", "{}\n".repeat(1_234)));
    let ran = scene.replay(&["input"]);
    assert_eq!(ran.err.lines().count(), 21, "{}", ran.err);
    assert!(ran.err.ends_with("… and 1,214 bad lines more\n"), "{}", ran.err);
    assert!(ran.out.contains("bad lines  1,234"), "{}", ran.out);
}

#[test]
fn a_line_without_the_identifiers_of_a_required_limit_is_a_bad_line() {
    let scene = Scene::new(&TWO.replace("rate = \"2/m\"", "rate = \"2/m\"\nrequired = true"));
    let user = "{\"at_us\": 5, \"keys\": {\"user\": \"bob\"}}\n";
    let ip = "{\"at_us\": 6, \"keys\": {\"ip\": \"192.0.2.7\"}}\n";
    scene.write("input", format!("{user}{ip}{user}"));
    let ran = scene.replay(&["--decisions", "out.jsonl", "input"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(scene.read("out.jsonl").lines().count(), 2);
    let due = "line 2: limit \"per-user\" is required and wants \"user\"; the request has identifier \"ip\"";
    assert!(ran.err.starts_with(due), "{}", ran.err);
    assert!(ran.out.contains("bad lines  1"), "{}", ran.out);
    assert_eq!(scene.replay(&["--strict", "input"]).code, 2);
}

#[test]
fn the_help_of_replay_explains_every_field_of_trace_and_decision_lines() {
    let scene = Scene::new(BUCKET);
    let help = scene.run(&["replay", "--help"]).out;
    for said in ["at_us", "\"keys\"", "cost", "acquire", "peek", "refund", "force", "reset", "null"]
    {
        assert!(help.contains(said), "{help}\nlacks {said}");
    }
    for field in ["allowed", "limit", "remaining", "retry_after_us", "reset_after_us", "limits"] {
        assert!(help.contains(&format!("\"{field}\":")), "{help}\nlacks {field}");
    }
}

const LOG: &str = "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 5\n";

#[test]
fn a_broken_first_line_affects_no_other_line() {
    let scene = Scene::new(BUCKET);
    for (name, input) in [
        ("JSONL trace", format!("{{\"at_us\": 5, \"ke\n{GOOD}{GOOD}")),
        ("access log", format!("{{ garbage\n{LOG}{LOG}")),
        ("CSV trace", "# a comment\nat_us,key\n5,k\n6,k\n".to_owned()),
    ] {
        scene.write("input", input);
        let ran = scene.replay(&["--decisions", "out.jsonl", "input"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(scene.read("out.jsonl").lines().count(), 2, "{ran:?}");
        assert!(ran.err.starts_with("line 1: ") && ran.err.lines().count() == 1, "{}", ran.err);
        assert!(ran.out.contains("bad lines  1") && ran.out.contains(name), "{}", ran.out);
        let ran = scene.replay(&["--strict", "--decisions", "out.jsonl", "input"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.starts_with("error: input: line 1: "), "{}", ran.err);
        assert_eq!(scene.read("out.jsonl"), "");
    }
    assert!(scene.replay(&["--strict", "input"]).err.contains("header"));
}

#[test]
fn an_input_without_a_request_exits_with_2_and_names_the_format_option() {
    let scene = Scene::new(BUCKET);
    for (input, more, says) in [
        ("hello\nworld\n".to_owned(), &[][..], "(2 bad lines); its format is not known"),
        ("at_us;key\n5;k\n".to_owned(), &[], "line 1: is a header separated by semicolons"),
        ("x\n".repeat(999), &[], "… and 979 bad lines more"),
        ("x\n".repeat(5_000), &[], "first 1,000 lines tells its format; name it with --format"),
        (GOOD.to_owned(), &["--format", "combined"], "no line of it is a request as access log"),
        (LOG.to_owned(), &["--format", "jsonl"], "or name its format with --format"),
        (
            "{\"at_us\":1,\"key\":\"k\",\"op\":\"settle\"}\n".to_owned(),
            &[],
            "is a request as JSONL trace (1 bad line)",
        ),
        (LOG.to_owned(), &["--format", "csv"], "begin it with a header"),
        ("hello\n".to_owned(), &["--strict"], "line 1: has no [TIME]"),
    ] {
        scene.write("input", &input);
        let ran = scene.replay(&[more, &["input"]].concat());
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(says), "{}\nlacks {says}", ran.err);
    }
}

#[test]
fn an_empty_input_is_no_error() {
    let scene = Scene::new(BUCKET);
    for input in ["", "\n\r\n", "at_us,key\n"] {
        scene.write("input", input);
        for more in [&[][..], &["--strict"]] {
            let ran = scene.replay(&[more, &["input"]].concat());
            assert_eq!(ran.code, 0, "{ran:?}");
            assert!(ran.out.contains("requests   0"), "{}", ran.out);
        }
    }
}

#[test]
fn strict_makes_the_first_bad_line_fatal_and_keeps_what_was_decided() {
    let scene = Scene::new(BUCKET);
    scene.write("input", format!("{GOOD}{GOOD}nonsense\n{GOOD}"));
    let ran = scene.replay(&["--strict", "--decisions", "out.jsonl", "input"]);
    assert_eq!(ran.code, 2);
    assert!(ran.err.contains("error: input: line 3: "), "{}", ran.err);
    assert_eq!(scene.read("out.jsonl").lines().count(), 2);
}

#[test]
fn invalid_utf8_and_overlong_lines_do_not_stop_a_replay() {
    let scene = Scene::new(BUCKET);
    let mut input = GOOD.as_bytes().to_vec();
    input.extend(b"{\"at_us\": 6, \"key\": \"\xff\xfe\"}\n\xff\x00\n");
    input.extend(vec![b'x'; 3 << 20]);
    input.extend(format!("\n{GOOD}").into_bytes());
    scene.write("input", input);
    let ran = scene.replay(&["--decisions", "out.jsonl", "input"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(scene.read("out.jsonl").lines().count(), 3);
    assert!(ran.err.contains("line 4: is longer than 1 MiB"), "{}", ran.err);
}

#[test]
fn the_summary_shows_denied_callers_with_times_and_limits() {
    let scene = Scene::new(TWO);
    let line = |second: u64, user: &str| {
        let at = second * 1_000_000;
        format!("{{\"at_us\":{at},\"keys\":{{\"ip\":\"a\",\"user\":\"{user}\"}}}}\n")
    };
    let trace: String = (0..4).map(|second| line(second, "u")).collect();
    scene.write("input", trace);
    let ran = scene.replay(&["input"]);
    for part in [
        "1970-01-01T00:00:00Z to 1970-01-01T00:00:03Z",
        "requests   4",
        "denied     2  50.0%",
        "per-user  fixed-window  user",
        "user=u       2  1970-01-01T00:00:02Z  1970-01-01T00:00:03Z  per-user ×2",
        "4 decisions in ",
        "store memory",
    ] {
        assert!(ran.out.contains(part), "{}\nlacks {part}", ran.out);
    }
    assert!(!ran.out.contains('\u{1b}'), "no colours outside of a terminal");
}

#[test]
fn a_policy_that_applies_to_no_request_causes_a_warning() {
    let scene = Scene::new(TWO);
    scene.write("input", "{\"at_us\": 5, \"key\": \"k\"}\n");
    let ran = scene.replay(&["input"]);
    assert_eq!(ran.code, 0);
    for part in ["no limit applied to any request", "per-ip wants ip", "has: key", "Change `key`"] {
        assert!(ran.out.contains(part), "{}\nlacks {part}", ran.out);
    }
}

#[test]
fn the_report_is_self_contained_and_escapes_its_input() {
    let scene = Scene::new(BUCKET);
    let line = "{\"at_us\": 5, \"key\": \"<script>alert(1)</script>\"}\n";
    scene.write("input", line.repeat(20));
    let ran = scene.replay(&["--report", "out.html", "input"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let page = scene.read("out.html");
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<svg"), "{page}");
    // The one script is data, which no browser runs.
    assert!(page.contains("&lt;script&gt;") && page.matches("<script").count() == 1, "{page}");
    assert!(page.contains("<script type=\"application/json\""), "{page}");
    assert!(!page.contains("http") && !page.contains("src="), "{page}");
}

#[test]
fn invalid_arguments_and_input_exit_with_2_and_the_remedy() {
    let scene = Scene::new(BUCKET);
    scene.write("input", GOOD);
    scene.write("broken.toml", "[[limit]]\nname = \"a\"\nalgorithm = \"gcra\"\nrate = \"0/s\"\n");
    scene.write("no-header", "key,cost\nk,1\n");
    scene.write("cut.gz", &gzip(GOOD.repeat(5_000).as_bytes())[..60]);
    let with_policy =
        |arguments: &[&'static str]| [&["replay", "--policy", "policy.toml"], arguments].concat();
    for (arguments, says) in [
        (vec!["replay", "--policy", "none.toml", "input"], &["none.toml", "name a TOML file"][..]),
        (
            vec!["replay", "--policy", "broken.toml", "input"],
            &["broken.toml", "line 4, column 8", "at least 1"],
        ),
        (vec!["replay", "input"], &["--policy"]),
        (vec!["replai"], &["replay"]),
        (with_policy(&["nowhere"]), &["nowhere", "name an access log"]),
        (with_policy(&["."]), &["directory"]),
        (
            with_policy(&["--format", "csv", "no-header"]),
            &["line 1: ", "no-header: no line", "at_us,key"],
        ),
        (with_policy(&["cut.gz"]), &["cut.gz: cannot be read after line"]),
        (with_policy(&["--decisions", "none/out", "input"]), &["none/out"]),
        (with_policy(&["--decisions", "input", "input"]), &["overwrite"]),
        (with_policy(&["--report", "policy.toml", "input"]), &["overwrite"]),
        (
            with_policy(&["--store", "rediss://:secret@h:1?tls-ca=none.pem", "input"]),
            &["--store rediss://h:1", "cannot read none.pem"],
        ),
        (
            with_policy(&["--store", "redis-cluster://:secret@h:1/2", "input"]),
            &["--store redis-cluster://h:1/2", "only database 0"],
        ),
        (with_policy(&["--store", "redis://h:1?client=secret", "input"]), &["client=fred"]),
    ] {
        let ran = scene.run(&arguments);
        assert_eq!(ran.code, 2, "{arguments:?}\n{ran:?}");
        assert!(ran.err.contains("error: "), "{arguments:?}\n{ran:?}");
        assert!(!ran.err.contains("secret"), "{ran:?}");
        for part in says {
            assert!(ran.err.contains(part), "{arguments:?}\n{}\nlacks {part}", ran.err);
        }
    }
    assert_eq!(scene.read("input"), GOOD);
}

#[test]
fn an_unreachable_redis_is_reported_within_two_seconds_and_without_the_password() {
    let scene = Scene::new(BUCKET);
    scene.write("input", GOOD);
    let (url, address) = closed_port();
    let started = Instant::now();
    let ran = scene.replay(&["--store", &url, "input"]);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(ran.err.contains(&address) && !ran.err.contains("secret"), "{}", ran.err);
}

#[test]
fn a_replay_that_fails_to_start_keeps_earlier_outputs() {
    let scene = Scene::new(BUCKET);
    scene.write("input", GOOD);
    scene.write("out.jsonl", "earlier");
    scene.write("out.html", "earlier");
    let outputs = ["--decisions", "out.jsonl", "--report", "out.html"];
    let (url, _) = closed_port();
    for (more, code) in [
        (&["--store", &url, "input"][..], 3),
        (&["nowhere"], 2),
        (&["--store", "redis://h:1?mode=x", "input"], 2),
    ] {
        let ran = scene.replay(&[&outputs, more].concat());
        assert_eq!(ran.code, code, "{ran:?}");
        assert_eq!(
            (scene.read("out.jsonl"), scene.read("out.html")),
            ("earlier".into(), "earlier".into())
        );
    }
    assert_eq!(scene.replay(&[&outputs[..], &["input"]].concat()).code, 0);
    assert!(scene.read("out.html").starts_with("<!DOCTYPE"));
}

#[cfg(unix)]
#[test]
fn an_output_never_overwrites_an_input_or_another_output() {
    let scene = Scene::new(BUCKET);
    scene.write("input", GOOD);
    for (link, of) in [("hard", "input"), ("hard-policy", "policy.toml")] {
        std::fs::hard_link(scene.path(of), scene.path(link)).expect("links");
    }
    for (link, of) in [("soft", "input"), ("dangling", "new")] {
        std::os::unix::fs::symlink(of, scene.path(link)).expect("links");
    }
    std::fs::create_dir(scene.path("d")).expect("creates");
    for arguments in [
        &["--decisions", "hard"][..],
        &["--decisions", "soft"],
        &["--decisions", "./d/../input"],
        &["--report", "hard-policy"],
        &["--decisions", "o", "--report", "./o"],
        &["--decisions", "d/../o", "--report", "o"],
        &["--decisions", "dangling", "--report", "new"],
    ] {
        let ran = scene.replay(&[arguments, &["input"]].concat());
        assert_eq!(ran.code, 2, "{arguments:?}\n{ran:?}");
        assert!(ran.err.contains("would overwrite"), "{}", ran.err);
        assert_eq!((scene.read("input"), scene.read("policy.toml")), (GOOD.into(), BUCKET.into()));
        assert!(!scene.path("o").exists() && !scene.path("new").exists());
    }
    let null = ["--decisions", "/dev/null", "--report", "/dev/null", "input"];
    assert_eq!(scene.replay(&null).code, 0);
}

#[test]
fn a_dash_names_standard_input_once_and_never_a_report() {
    let scene = Scene::new(BUCKET);
    scene.write("input", GOOD);
    let policy = |more: &[&str]| {
        scene.run_with_input(&[&["replay", "--policy", "-"], more].concat(), BUCKET.as_bytes())
    };
    let ran = policy(&["input"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("requests   1"), "{}", ran.out);
    let ran = scene.run(&["replay", "--policy", "-", "-"]);
    assert!(ran.code == 2 && ran.err.contains("both standard input"), "{ran:?}");
    let ran = scene.replay(&["--report", "-", "input"]);
    assert!(ran.code == 2 && ran.err.contains("--report -"), "{ran:?}");
    assert!(!scene.path("-").exists());
}

#[test]
fn a_damaged_gzip_is_reported_with_the_decisions_made_before_it() {
    let scene = Scene::new(BUCKET);
    let line =
        |n: u64| format!("{{\"at_us\":{},\"key\":\"k{}\"}}\n", n * 7_919, n * n * 31 % 9_973);
    let whole = gzip((0..10_000).map(line).collect::<String>().as_bytes());
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0xff);
    let mut wrong_sum = whole.clone();
    let sum = whole.len() - 8;
    wrong_sum[sum] ^= 1;
    for (input, all) in [(&whole[..middle], false), (&damaged[..], false), (&wrong_sum[..], true)] {
        scene.write("input.gz", input);
        let ran = scene.replay(&["--decisions", "out.jsonl", "input.gz"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        let decided = scene.read("out.jsonl").lines().count();
        assert!(if all { decided == 10_000 } else { (1..10_000).contains(&decided) }, "{decided}");
        assert!(ran.err.contains("its gzip data is damaged or cut off"), "{}", ran.err);
        // Damaged bytes may still form lines, but bad ones.
        let last = ran.err.lines().last().expect("an error");
        assert!(last.contains("input.gz: cannot be read after line "), "{last}");
        assert!(ran.out.contains("stopped by an error"), "{}", ran.out);
        assert!(ran.out.contains("requests"), "{}", ran.out);
    }
}

/// The URL of a closed port, and its address.
fn closed_port() -> (String, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    (format!("redis://user:secret@{address}/0"), address)
}

#[test]
fn a_closed_output_causes_no_panic() {
    let scene = Scene::new(BUCKET);
    scene.write("input", GOOD.repeat(100_000));
    let mut child = scene
        .ratelimit(&["replay", "--policy", "policy.toml", "--decisions", "-", "input"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ends");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{output:?}");
    assert_eq!(output.status.code(), Some(0));
}

#[cfg(unix)]
#[test]
fn an_interrupted_replay_ends_on_a_whole_line_and_reports_its_decisions() {
    let scene = Scene::new(BUCKET);
    let mut child = scene
        .ratelimit(&["replay", "--policy", "policy.toml", "--decisions", "out.jsonl", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("runs");
    // Enough input for the first decisions to reach the file: from then on the tool catches signals. The pipe
    // stays open, and the input ends within a line.
    let mut pipe = child.stdin.take().expect("a pipe");
    pipe.write_all(GOOD.repeat(5_000).as_bytes()).expect("writes");
    pipe.write_all(&GOOD.as_bytes()[..10]).expect("writes");
    let begun = || scene.path("out.jsonl").metadata().is_ok_and(|file| file.len() > 0);
    let started = Instant::now();
    while !begun() {
        assert!(started.elapsed() < Duration::from_secs(30), "no decision was ever written");
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let output = child.wait_with_output().expect("ends");
    drop(pipe);
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let summary = String::from_utf8_lossy(&output.stdout);
    assert!(summary.contains("interrupted: this is what was decided so far"), "{summary}");
    let decisions = scene.read("out.jsonl");
    assert!(decisions.ends_with("}\n"), "it ends within a line");
    for line in decisions.lines() {
        assert!(line.starts_with("{\"at_us\":5,") && line.ends_with('}'), "{line}");
    }
}

#[test]
fn every_limit_denies_a_part_of_the_example() {
    let scene = Scene::new(BUCKET);
    let log = workspace("examples/access.log");
    let policy = workspace("examples/policy.toml");
    let text = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let ran = scene.run(&[
        "replay",
        "--policy",
        &text(&policy),
        "--decisions",
        "out.jsonl",
        "--strict",
        &text(&log),
    ]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let lines = std::fs::read_to_string(log).expect("reads").lines().count();
    let decisions = scene.read("out.jsonl");
    assert_eq!(decisions.lines().count(), lines);
    for name in ["burst", "same-page", "per-user", "daily"] {
        assert!(decisions.contains(&format!("{{\"name\":\"{name}\",\"allowed\":false")), "{name}");
    }
}

/// Replays a real access log, if the environment names one: every line that is not blank is decided.
#[test]
fn a_real_log_is_decided_line_by_line() {
    let log = std::env::var_os("RATELIMIT_REAL_LOG").filter(|log| !log.is_empty());
    let Some(log) = log else { return };
    let scene = Scene::new(BUCKET);
    let policy = workspace("examples/policy.toml");
    let mut command = scene.ratelimit(&["replay", "--strict", "--decisions", "out.jsonl"]);
    let output = command.arg("--policy").arg(policy).arg(log).output().expect("runs");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(scene.read("out.jsonl").lines().count(), 10_000);
}
