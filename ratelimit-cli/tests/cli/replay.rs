//! What a replay reports, skips and refuses.

use std::io::Write;

use ratelimit_core::AnyAlgorithm;

use crate::common::{BUCKET, Ran, Scene, TWO, example, gzip, interrupt, limit, make_pipe, send};
use crate::make_access_log;

const GOOD: &str = "{\"at_us\": 5, \"key\": \"k\"}\n";

const LOG: &str = "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 5\n";

/// Replays an input, and checks the exit code, how many lines were decided, and what is said.
fn check(input: impl AsRef<[u8]>, more: &[&str], code: i32, decided: usize, says: &[&str]) -> Ran {
    let scene = Scene::with(BUCKET, input);
    let ran = scene.replay(&[&["--decisions", "out.jsonl"], more, &["input"]].concat());
    assert_eq!((ran.code, scene.read("out.jsonl").lines().count()), (code, decided), "{ran:?}");
    ran.says(says)
}

#[test]
fn bad_lines_are_named_counted_and_skipped_or_with_strict_fatal() {
    let bad = format!("{GOOD}nonsense\n\n{{\"at_us\": -5, \"key\": \"k\"}}\n{GOOD}");
    let ran = check(&bad, &[], 0, 2, &["bad lines  2"]);
    let named: Vec<_> = ran.err.lines().map(|line| line.split(':').next()).collect();
    assert_eq!(named, [Some("line 2"), Some("line 4")], "{}", ran.err);
    check(&bad, &["--strict"], 2, 1, &["error: input: line 2: "]);

    let many = format!("{}{}", GOOD.repeat(1_234), "{}\n".repeat(1_234));
    let ran = check(&many, &[], 0, 1_234, &["… and 1,214 bad lines more\n", "bad lines  1,234"]);
    assert_eq!(ran.err.lines().count(), 21, "{}", ran.err);
    // With more bad lines than good ones there is nothing to sum up.
    let ran =
        check(many + "{}\n", &[], 2, 1_234, &["only 1,234 of 2,469 lines can be read as JSONL"]);
    assert_eq!(ran.out, "");

    let mut odd = GOOD.as_bytes().to_vec();
    odd.extend(b"{\"at_us\": 6, \"key\": \"\xff\xfe\"}\n\xff\x00\n");
    odd.extend(vec![b'x'; 3 << 20]);
    odd.extend(format!("\n{GOOD}").into_bytes());
    check(odd, &[], 0, 3, &["line 4: is longer than 1 MiB"]);
    for empty in ["", "\n\r\n", "at_us,key\n"] {
        check(empty, &["--strict"], 0, 0, &["requests   0"]);
    }
}

/// Two per month by the clocks of Berlin, where April ends two hours before it does in UTC.
#[test]
fn a_replay_counts_by_the_months_of_a_time_zone() {
    let policy =
        limit("plan", "user", "fixed-window 2/month", "zone = \"Europe/Berlin\"\nanchor = 31");
    let trace = [
        ("2026-03-30T21:59:59Z", true),
        ("2026-03-30T21:59:59Z", true),
        ("2026-03-30T21:59:59Z", false),
        ("2026-03-30T22:00:00Z", true),
        ("2026-04-29T21:59:59Z", true),
        ("2026-04-29T21:59:59Z", false),
        ("2026-04-29T22:00:00Z", true),
        ("2027-02-27T23:00:00Z", true),
    ];
    let at_us = |text: &str| {
        let at = humantime::parse_rfc3339(text).expect(text);
        at.duration_since(std::time::UNIX_EPOCH).expect("since 1970").as_micros()
    };
    let line = |text| format!("{{\"at_us\": {}, \"keys\": {{\"user\": \"k\"}}}}\n", at_us(text));
    let scene = Scene::with(&policy, trace.map(|(at, _)| line(at)).concat());
    let options = ["--decisions", "out.jsonl", "--report", "out.html", "input"];
    scene.replay(&options).exits(0).says(&["plan", "fixed-window"]);
    let out = scene.read("out.jsonl");
    let allowed: Vec<_> = out.lines().map(|line| line.contains("\"allowed\":true")).collect();
    assert_eq!(allowed, trace.map(|(_, allowed)| allowed), "{out}");
    // A second before the 31st of March, and before the 30th of April.
    assert_eq!(out.matches("\"retry_after_us\":1000000").count(), 2, "{out}");
}

#[test]
fn the_first_line_that_parses_decides_the_format_and_a_broken_one_affects_no_other() {
    let jsonl = format!("{GOOD}  {GOOD}");
    for (first, rest, name) in [
        ("{\"at_us\": 5, \"ke", &*jsonl, "JSONL trace"),
        ("{\"a\": \"b,at_us,c\"}", &jsonl, "JSONL trace"),
        ("key,cost", &format!("{LOG}{LOG}"), "access log"),
        ("{ garbage", &LOG.replace("/ HTTP", "/?a,at_us,b HTTP").repeat(2), "access log"),
        ("# at_us, key, cost", "key,\"at_us\"\nk,5\nk,6\n", "CSV trace"),
    ] {
        let input = format!("{first}\n{rest}");
        let ran = check(&input, &[], 0, 2, &["bad lines  1", name]);
        assert!(ran.err.starts_with("line 1: ") && ran.err.lines().count() == 1, "{}", ran.err);
        check(&input, &["--strict"], 2, 0, &["error: input: line 1: "]);
    }
}

#[test]
fn an_input_without_a_request_exits_with_2_and_says_what_is_wrong_and_names_the_format_option() {
    let unknown_op = "{\"at_us\":1,\"key\":\"k\",\"op\":\"settle\"}\n";
    for (input, more, says) in [
        ("hello\nworld\n", &[][..], "its format is not known. Its first line is \"hello\""),
        ("hello\n{\nx\n", &[], "line 2: EOF"),
        ("at_us;key\n5;k\n", &[], "line 1: is a header separated by semicolons"),
        ("at_us,ip,ip\n", &[], "line 1: the header names \"ip\" twice"),
        (&"x\n".repeat(999), &[], "the client is not to be seen"),
        (&"{,\n".repeat(999), &[], "… and 979 bad lines more"),
        (&"x\n".repeat(5_000), &[], "none of its first 1,000 lines is a request: its format"),
        (GOOD, &["--format", "combined"], "no line of it is a request as combined"),
        (LOG, &["--format", "jsonl"], "or name its format with --format"),
        (unknown_op, &[], "is a request as JSONL trace (1 bad line)"),
        (LOG, &["--format", "csv"], "begin it with a header"),
        (GOOD, &["--format", "csv"], "line 1: comes before a header"),
        (
            "a 192.0.2.7 2015-05-17T10:05:03Z b\n",
            &[],
            "try --log-format '$_ $remote_addr $time_iso8601 $_'",
        ),
        // Without the mark that some editors write before it, and without all of its end.
        ("\u{feff}hello\r\n", &["--strict"], "got \"hello\""),
    ] {
        check(input, more, 2, 0, &[says]);
    }
    // Of what is no log at all, nothing else is said, and nothing is summed up.
    let ran = check("hello\nworld\n".repeat(2_000), &[], 2, 0, &[]);
    assert!(ran.out.is_empty() && ran.err.lines().count() == 1, "{ran:?}");
    // Nor of another program's JSON.
    let json = "{\"remote_addr\":\"192.0.2.7\",\"time\":\"2015-05-17T10:05:03Z\"}\n";
    let ran = check(json, &[], 2, 0, &["try --fields ip=remote_addr,time=time"]);
    assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
}

#[test]
fn a_line_without_the_identifiers_of_a_required_limit_is_a_bad_line() {
    let scene = Scene::new(&TWO.replace("rate = \"2/m\"", "rate = \"2/m\"\nrequired = true"));
    let user = "{\"at_us\": 5, \"keys\": {\"user\": \"bob\"}}\n";
    let ip = "{\"at_us\": 6, \"keys\": {\"ip\": \"192.0.2.7\"}}\n";
    scene.write("input", format!("{user}{ip}{user}"));
    let ran = scene.replay(&["input"]).exits(0).says(&["requests   2", "bad lines  1"]);
    let due = "line 2: limit \"per-user\" wants \"user\"; the request has identifier \"ip\"";
    assert!(ran.err.starts_with(due), "{ran:?}");
}

#[test]
fn the_summary_shows_denied_callers_with_times_and_limits() {
    let scene = Scene::new(&TWO);
    let line = |second: u64, user: &str| {
        let at = second * 1_000_000;
        format!("{{\"at_us\":{at},\"keys\":{{\"ip\":\"a\",\"user\":\"{user}\"}}}}\n")
    };
    let trace: String = (0..4).map(|second| line(second, "u")).collect();
    scene.write("input", trace);
    let ran = scene.replay(&["input"]).says(&[
        "1970-01-01T00:00:00Z to 1970-01-01T00:00:03Z",
        "requests   4",
        "denied     2  50.0%",
        "per-user  fixed-window  user",
        "1970-01-01T00:00:02Z  1970-01-01T00:00:03Z  per-user\u{a0}×2",
        "4 decisions in ",
        "store memory",
    ]);
    ran.lacks("\u{1b}"); // no colours outside of a terminal
}

#[test]
fn a_rate_of_0_denies_every_request_and_the_report_says_so() {
    let how = |name: &&str| match *name {
        "bucketed-window" => limit(name, "ip", "bucketed-window 0/s", "")
            .replace("rate = \"0/s\"", "bucket = \"1s\"\nrates = [\"0/1s\", \"9/5s\"]"),
        "lockout" => limit(name, "ip", "lockout 0/s", "block = \"1s\""),
        name => limit(name, "ip", &format!("{name} 0/s"), ""),
    };
    for name in AnyAlgorithm::NAMES {
        let policy = how(name) + &limit("others", "user", "gcra 1/s", "");
        let line = |n: u64| {
            format!("{{\"at_us\":{n},\"keys\":{{\"ip\":\"a\"}},\"cost\":{n},\"duration_us\":9}}\n")
        };
        let scene = Scene::with(&policy, (0..4).map(line).collect::<String>());
        let ran = scene.replay(&["--report", "out.html", "--json", "input"]).exits(0);
        let zero = &ran.json()[0]["limits"][0];
        assert_eq!((&zero["applied"], &zero["denied"]), (&4.into(), &3.into()), "{name}: {zero}");
        assert!(scene.read("out.html").contains("its rate is 0."), "{name}");
        let told = scene.decision_lines(&["input"]);
        assert_eq!(
            told.matches("\"allowed\":true,\"limit\":0,\"remaining\":0").count(),
            2,
            "{told}"
        );
        assert_eq!(told.matches("\"allowed\":false,\"limit\":0,\"remaining\":0,\"retry_after_us\":null,\"reset_after_us\":0").count(), 6, "{told}");
        scene
            .command("suggest", &["--target", "0%", "input"])
            .exits(0)
            .says(&["nothing: a rate of 0 denies all"]);
    }
}

#[test]
fn one_path_of_a_log_is_limited_by_a_condition() {
    let logins = "when = { method = \"POST\", path = \"/login*\" }";
    let policy = limit("login", "ip", "fixed-window 1/h", logins)
        + &limit("misspelt", "ip", "gcra 1/s", "when = { method = \"Post\" }")
        + &limit("unknown", "ip", "gcra 1/s", "when = { host = \"a\" }");
    let line = |request: &str| {
        format!("192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"{request} HTTP/1.1\" 200 5\n")
    };
    let log = ["POST /login", "GET /login", "POST /a", "POST /login?x", "GET /", "POST /login/b"];
    let scene = Scene::with(&policy, log.map(line).concat());
    let ran = scene.replay(&["--report", "out.html", "--json", "input"]).exits(0).says(&[
        "limit \"misspelt\": it applies when method = \"Post\", which no request meets; compare",
        "limit \"unknown\": its condition names \"host\", which no request has; requests have a bare",
    ]);
    let data = &ran.json()[0];
    let login = &data["limits"][0];
    assert_eq!((&login["applied"], &login["denied"]), (&3.into(), &2.into()), "{login}");
    assert_eq!(login["when"], serde_json::json!({ "method": ["POST"], "path": ["/login*"] }));
    let page = scene.read("out.html");
    let counts = "for each ip when method = &quot;POST&quot; and path = &quot;/login*&quot;";
    assert!(page.contains(counts), "{page}");
    scene.replay(&["input"]).says(&["ip when method = \"POST\" and path = \"/login*\"  "]);
}

#[test]
fn an_identifier_that_no_request_has_causes_a_warning_that_names_it_and_what_the_log_has() {
    let ran = Scene::with(&limit("burst", "ip", "gcra 1/s", ""), GOOD).replay(&["input"]).exits(0);
    assert_eq!(
        ran.err,
        "WARNING: policy.toml: no limit applied to any request\n\
         WARNING: policy.toml: limit \"burst\": it counts by \"ip\", which no request has; requests have a bare key; name \
         one of these, or add it\n"
    );
    ran.lacks("note: WARNING");
    let (policy, log) = example();
    let scene = Scene::new(&policy.replace(r#"["user"]"#, r#"["usr"]"#));
    scene.write("other.toml", policy.replace(r#"["ip", "path"]"#, r#"["ip", "country"]"#));
    let ran = scene.replay(&["--compare", "other.toml", &log]).exits(0);
    assert_eq!(
        ran.err,
        "WARNING: policy.toml: limit \"per-user\": it counts by \"usr\", which no request has; requests have a bare key, \
         \"ip\", \"path\", \"method\", \"user\"; did you mean \"user\"? (--identifier NAME=FIELD reads another from the log)\n\
         WARNING: other.toml: limit \"same-page\": it counts by \"country\", which no request has; requests have a bare \
         key, \"ip\", \"path\", \"method\", \"user\"; name one of these, or add it (--identifier NAME=FIELD reads another from the log)\n"
    );
    ran.says(&["token-bucket          usr                 0       0"]);
}

#[test]
fn invalid_arguments_and_input_exit_with_2_and_the_remedy_and_keep_earlier_outputs() {
    let scene = Scene::with(BUCKET, GOOD);
    let outputs = ["out.jsonl", "out.html"].map(|name| scene.write(name, "earlier"));
    scene.write("broken.toml", "[[limit]]\nname = \"a\"\nalgorithm = \"gcra\"\nrate = \"1/0s\"\n");
    scene.write("no-header", "key,cost\nk,1\n");
    let with_policy =
        |arguments: &[&'static str]| [&["replay", "--policy", "policy.toml"], arguments].concat();
    let with_outputs = |arguments: &[&'static str]| {
        with_policy(&[&["--decisions", "out.jsonl", "--report", "out.html"], arguments].concat())
    };
    for (arguments, says) in [
        (vec!["replay", "--policy", "none.toml", "input"], &["none.toml", "name a TOML file"][..]),
        (
            vec!["replay", "--policy", "broken.toml", "input"],
            &["broken.toml", "line 4, column 8", "a rate per 0 time"],
        ),
        (vec!["replay", "input"], &["--policy"]),
        (vec!["replai"], &["replay"]),
        (with_outputs(&["nowhere"]), &["nowhere", "name an access log"]),
        (with_policy(&["."]), &["directory"]),
        (
            with_policy(&["--format", "csv", "no-header"]),
            &["line 1: ", "no-header: no line", "at_us,key"],
        ),
        (with_policy(&["--decisions", "none/out", "input"]), &["none/out"]),
        (with_outputs(&["--store", "nowhere:secret", "input"]), &["redis"]),
        (vec!["suggest", "--policy", "policy.toml", "--target", "0.1", "input"], &["such as 0.1%"]),
        (vec!["suggest", "--policy", "policy.toml", "--target", "1%", "-"], &["name a file"]),
    ] {
        scene.run(&arguments).exits(2).says(&["error: "]).says(says).lacks("secret");
    }
    for output in outputs {
        assert_eq!(std::fs::read_to_string(output).expect("reads"), "earlier");
    }
}

#[cfg(unix)]
#[test]
fn an_output_never_overwrites_an_input_or_another_output() {
    let scene = Scene::with(BUCKET, GOOD);
    for (link, of) in [("hard", "input"), ("hard-policy", "policy.toml")] {
        std::fs::hard_link(scene.path(of), scene.path(link)).expect("links");
    }
    for (link, of) in [("soft", "input"), ("dangling", "new")] {
        std::os::unix::fs::symlink(of, scene.path(link)).expect("links");
    }
    std::fs::create_dir(scene.path("d")).expect("creates");
    for arguments in [
        &["--decisions", "input"][..],
        &["--decisions", "hard"],
        &["--decisions", "soft"],
        &["--decisions", "./d/../input"],
        &["--report", "hard-policy"],
        &["--report", "policy.toml"],
        &["--decisions", "o", "--report", "./o"],
        &["--decisions", "d/../o", "--report", "o"],
        &["--decisions", "dangling", "--report", "new"],
    ] {
        scene.replay(&[arguments, &["input"]].concat()).exits(2).says(&["would overwrite"]);
        assert_eq!((scene.read("input"), scene.read("policy.toml")), (GOOD.into(), BUCKET.into()));
    }
    let null = ["--decisions", "/dev/null", "--report", "/dev/null", "input"];
    scene.replay(&null).exits(0);
}

#[test]
fn a_dash_names_standard_input_once_and_never_a_report() {
    let scene = Scene::with(BUCKET, GOOD);
    let ran = scene.run_with_input(&["replay", "--policy", "-", "input"], BUCKET.as_bytes());
    ran.exits(0).says(&["requests   1"]);
    scene.run(&["replay", "--policy", "-", "-"]).exits(2).says(&["both standard input"]);
    scene.replay(&["--report", "-", "input"]).exits(2).says(&["--report -"]);
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
        let ran = scene.replay(&["--decisions", "out.jsonl", "input.gz"]).exits(2);
        let ran =
            ran.says(&["its gzip data is damaged or cut off", "stopped by an error", "requests"]);
        let decided = scene.read("out.jsonl").lines().count();
        assert!(if all { decided == 10_000 } else { (1..10_000).contains(&decided) }, "{decided}");
        // Damaged bytes may still form lines, but bad ones.
        let last = ran.err.lines().last().expect("an error");
        assert!(last.contains("input.gz: cannot be read after line "), "{last}");
    }
}

/// The lines of an access log wait to be sorted, and all of these lie within the time of it.
#[test]
fn the_lines_before_an_error_are_decided_though_they_wait_to_be_sorted() {
    let scene = Scene::new(BUCKET);
    let mut wrong_sum = gzip(LOG.repeat(100).as_bytes());
    let sum = wrong_sum.len() - 8;
    wrong_sum[sum] ^= 1;
    scene.write("input.gz", wrong_sum);
    let ran = scene.replay(&["--decisions", "out.jsonl", "input.gz"]).exits(2);
    ran.says(&["requests   100", "decided so far", "cannot be read after line 100: its gzip data"]);
    assert_eq!(scene.read("out.jsonl").lines().count(), 100);
    scene.write("input", LOG.repeat(7) + "nonsense\n" + LOG);
    let ran = scene.replay(&["--strict", "input"]).exits(2);
    ran.says(&["requests   7", "error: input: line 8: "]);
    // Of several inputs nothing is decided that is later than the last line before the error.
    let later = LOG.replace("17/May", "18/May");
    scene.write("later", &later);
    scene.replay(&["input.gz", "later"]).exits(2).says(&["requests   100"]);
}

#[test]
fn a_closed_output_causes_no_panic() {
    let scene = Scene::with(BUCKET, GOOD.repeat(100_000));
    let arguments = ["replay", "--policy", "policy.toml", "--decisions", "-", "input"];
    let mut child = scene.start(&arguments);
    drop(child.stdout.take());
    Ran::from(child.wait_with_output().expect("ends")).exits(0).lacks("panicked");
}

/// A pipe without a writer takes for ever to open.
#[cfg(target_os = "linux")]
#[test]
fn one_signal_ends_a_tool_that_opens_a_pipe() {
    use std::os::unix::process::ExitStatusExt as _;

    let scene = Scene::with(BUCKET, LOG);
    make_pipe(&scene.path("pipe"));
    for arguments in [&["pipe"][..], &["--decisions", "pipe", "input"]] {
        let replay = ["replay", "--policy", "policy.toml"];
        let mut child = scene.start(&[&replay, arguments].concat());
        let is_waiting = |pid: u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
            stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
        };
        send("-TERM", &child, || is_waiting(child.id()));
        let ended = child.wait().expect("ends");
        assert_eq!(ended.signal(), Some(15), "{ended}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_replay_ends_on_a_whole_line_and_reports_its_decisions() {
    let scene = Scene::new(BUCKET);
    let mut child =
        scene.start(&["replay", "--policy", "policy.toml", "--decisions", "out.jsonl", "-"]);
    // Enough input for the first decisions to reach the file: from then on the tool catches
    // signals. The pipe stays open, and the input ends within a line.
    let mut pipe = child.stdin.take().expect("a pipe");
    pipe.write_all(GOOD.repeat(5_000).as_bytes()).expect("writes");
    pipe.write_all(&GOOD.as_bytes()[..10]).expect("writes");
    let begun = || scene.path("out.jsonl").metadata().is_ok_and(|file| file.len() > 0);
    let ran = interrupt(child, begun);
    drop(pipe);
    ran.exits(130).says(&["interrupted: this is what was decided so far"]);
    let decisions = scene.read("out.jsonl");
    assert!(decisions.ends_with("}\n"), "it ends within a line");
    for line in decisions.lines() {
        assert!(line.starts_with("{\"at_us\":5,") && line.ends_with('}'), "{line}");
    }
}

#[test]
fn every_limit_denies_a_part_of_the_example_and_every_line_of_a_real_log_is_decided() {
    let (policy, log) = example();
    let scene = Scene::new(&policy);
    let decisions = scene.decision_lines(&["--strict", &log]);
    let lines = std::fs::read_to_string(log).expect("reads").lines().count();
    assert_eq!(decisions.lines().count(), lines);
    for name in ["burst", "same-page", "per-user", "daily"] {
        assert!(decisions.contains(&format!("{{\"name\":\"{name}\",\"allowed\":false")), "{name}");
    }
    // One that the environment names.
    if let Some(log) = std::env::var("RATELIMIT_REAL_LOG").ok().filter(|log| !log.is_empty()) {
        assert_eq!(scene.decision_lines(&["--strict", &log]).lines().count(), 10_000);
    }
}

#[test]
fn the_committed_log_is_what_its_generator_makes() {
    let committed = std::fs::read_to_string(example().1).expect("reads");
    // `assert_eq!` would print both logs.
    assert!(
        committed == make_access_log::read_committed_log(),
        "examples/access.log differs; make it anew with `cargo run -p ratelimit-cli --example \
         make_access_log > examples/access.log`"
    );
}

/// A caller whose requests cross the threshold of an enforced and of a shadow limit, and one whose
/// requests do not.
#[test]
fn a_replay_counts_the_warnings_of_each_limit_and_says_in_which_line() {
    let warns = |name: &str, more: &str| {
        limit(name, "ip", "fixed-window 5/d", &format!("warn = \"80%\"\n{more}"))
    };
    let policy = warns("enforced", "") + &warns("tried", "shadow = true");
    let line = |n: u64| {
        let ip = if n < 7 { "a" } else { "b" };
        format!("{{\"at_us\": {n}, \"keys\": {{\"ip\": \"{ip}\"}}}}\n")
    };
    let scene = Scene::with(&policy, (0..10).map(line).collect::<String>());
    let ran = scene.replay(&["--json", "--decisions", "out.jsonl", "input"]).exits(0);
    let found = &ran.json()[0]["limits"];
    assert_eq!((&found[0]["warned"], &found[1]["warned"]), (&1.into(), &1.into()), "{found}");
    let lines = scene.read("out.jsonl");
    let warned: Vec<_> =
        lines.lines().map(|line| line.matches("\"warned\":true").count()).collect();
    // The verdict, the limit and the shadow limit.
    assert_eq!(warned, [0, 0, 0, 3, 0, 0, 0, 0, 0, 0], "{lines}");
    scene.replay(&["input"]).exits(0).says(&["share  warned"]);
    let _page = scene.replay(&["--report", "page.html", "input"]).exits(0);
    let page = scene.read("page.html");
    assert_eq!(page.matches("It warned <strong>1 time</strong>, at 80 % of the limit.").count(), 2);
}

#[test]
fn the_numbers_are_told_though_the_report_cannot_be_written_and_an_input_counts_once() {
    let scene = Scene::with(BUCKET, GOOD);
    if std::path::Path::new("/dev/full").exists() {
        let ran = scene.replay(&["--report", "/dev/full", "input"]).exits(2);
        ran.says(&["requests   1", "/dev/full: cannot be written"]);
    }
    let scene = Scene::with(&limit("tenants", "tenant", "gcra 1/s", ""), LOG);
    scene
        .replay(&["input"])
        .exits(0)
        .says(&["(--identifier NAME=FIELD reads another from the log)"]);
    let ran = scene.replay(&["input", "./input"]).exits(2);
    ran.says(&["INPUT ./input: is named twice"]);
}
