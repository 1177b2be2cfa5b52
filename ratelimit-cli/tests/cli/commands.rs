//! `check`, `inspect` and `reset`, as far as they work without a server.

use crate::common::{BUCKET, Scene, TWO, limit};

#[test]
fn a_check_says_its_decision_in_words_or_json_and_by_its_exit_code() {
    let words = "alice at cost 2: admitted\n  bucket (for each key) admits: 3 of 5 left, full again in 2 s\n";
    let json = "{\"key\":\"alice\",\"cost\":1,\"allowed\":true,\"limit\":5,\"remaining\":4,\
                \"retry_after_us\":0,\"reset_after_us\":1000000}\n";
    let two = TWO.as_str();
    let shadow = &(BUCKET.to_owned()
        + &BUCKET.replace("\"bucket\"", "\"stricter\"").replace('5', "1\nshadow = true"));
    let warning = &(BUCKET.to_owned() + "warn = \"80%\"\n");
    for (policy, arguments, code, says) in [
        (BUCKET, &["alice", "--cost", "2"][..], 0, &[words][..]),
        (BUCKET, &["alice", "--cost", "6"], 1, &["denies always"]),
        (BUCKET, &["alice", "--json", "--peek"], 0, &[json]),
        (
            two,
            &["ip=1.2.3.4", "--json"],
            0,
            &["{\"keys\":{\"ip\":\"1.2.3.4\"},\"cost\":1,", "\"limits\":[{\"name\":\"per-ip\","],
        ),
        // A value keeps its equals signs, and where no limit has identifiers a bare key does.
        (two, &["user=a=b", "--json"], 0, &["{\"user\":\"a=b\"}"]),
        (BUCKET, &["user=a=b", "--json"], 0, &["\"key\":\"user=a=b\""]),
        (
            two,
            &["ip=a", "usr=b"],
            2,
            &["counts by \"usr\". Of", "per-user needs user", "as key=usr=b"],
        ),
        (two, &["ip=a", "key=usr=b", "--json"], 0, &["{\"key\":\"usr=b\",\"keys\":{\"ip\":\"a\"}"]),
        (two, &["alice"], 2, &["\"alice\" is a bare key", "per-user needs user", "as ip=alice"]),
        (
            two,
            &["ip=a", "user=b", "--cost", "per-ip=3"],
            0,
            &["at cost 3 for per-ip, 1 for others: admitted", "0 of 3 left", "1 of 2 left"],
        ),
        (two, &["ip=a", "--cost", "per-pi=3"], 2, &["per-pi", "did you mean"]),
        (two, &["ip=a", "--cost", "2", "--cost", "3"], 2, &["two costs are given; give one"]),
        (
            two,
            &["ip=a", "--cost", "per-ip=2", "--cost", "per-ip=2"],
            2,
            &["two costs are given for per-ip"],
        ),
        (warning, &["alice", "--cost", "4"], 0, &["full again in 4 s; warns at 80 %\n"]),
        (two, &["ip=a", "--cost", "per-ip=x"], 2, &["\"x\" is no whole number"]),
        (BUCKET, &["a", "b"], 2, &["\"b\" is a second bare key"]),
        (two, &["ip=a", "ip=b"], 2, &["ip is given twice"]),
        (shadow, &["alice", "--cost", "2"], 0, &["\n  in shadow: stricter (for each key) denies"]),
        (
            shadow,
            &["alice", "--cost", "2", "--json"],
            0,
            &["\"shadow\":[{\"name\":\"stricter\",\"allowed\":false,\"limit\":1,"],
        ),
    ] {
        let arguments = [&["--store", "memory"], arguments].concat();
        Scene::new(policy).command("check", &arguments).exits(code).says(says);
    }
}

#[cfg(not(any(feature = "redis", feature = "fred")))]
#[test]
fn without_a_client_a_server_is_refused_with_the_feature_to_build_with() {
    let scene = Scene::new(BUCKET);
    let url = "redis://user:secret@localhost";
    for command in ["check", "inspect", "reset", "top", "heal", "replay"] {
        let caller = if ["top", "heal"].contains(&command) { &[][..] } else { &["alice"] };
        let ran = scene.command(command, &[&["--store", url], caller].concat()).exits(2);
        let installs = "cargo install ratelimit-cli --features redis";
        ran.says(&[installs, "cargo run --release --features redis --"]).lacks("secret");
    }
}

const COMMANDS: [&str; 10] =
    ["replay", "lint", "suggest", "check", "inspect", "reset", "top", "heal", "completions", "man"];

#[test]
fn every_shell_completes_every_command() {
    let scene = Scene::new(BUCKET);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = scene.run(&["completions", shell]).exits(0);
        ran.says(&COMMANDS).says(&["secret-file", "compare"]);
    }
    let script = scene.write("script", scene.run(&["completions", "bash"]).out);
    let checked = std::process::Command::new("bash").arg("-n").arg(script).output().expect("bash");
    assert!(checked.status.success(), "{checked:?}");
    assert_eq!(scene.run(&["completions", "tcsh"]).code, 2);
}

#[test]
fn no_line_of_help_is_wider_than_100_columns() {
    let scene = Scene::new(BUCKET);
    for command in COMMANDS {
        let help = scene.run(&[command, "--help"]).exits(0).out;
        let wide: Vec<_> = help.lines().filter(|line| line.chars().count() > 100).collect();
        assert!(wide.is_empty(), "{command}: {wide:#?}");
    }
}

#[test]
fn every_command_has_a_man_page() {
    let scene = Scene::new(BUCKET);
    assert_eq!(scene.run(&["man", "new/man1"]).code, 0);
    let top = scene.read("new/man1/ratelimit.1");
    for command in COMMANDS {
        let page = scene.read(&format!("new/man1/ratelimit-{command}.1"));
        assert!(page.contains(".TH ratelimit") && page.contains("SYNOPSIS"), "{page}");
        assert!(top.contains(&format!("ratelimit\\-{command}")), "{command} is not in {top}");
    }
    // The commands within a command have pages, to which its own refers.
    assert!(scene.read("new/man1/ratelimit-record-set.1").contains("blocked"));
    let page = scene.read("new/man1/ratelimit-replay.1");
    assert!(page.contains("at_us") && page.contains("compare"), "{page}");
    // What stands below the options is shown as it is, and a synopsis has the values of its
    // options.
    let (options, below) =
        page.split_once(".SH \"EXAMPLES AND FORMATS\"\n.nf\n").expect("examples");
    assert!(options.contains("POLICY.toml") && below.trim_end().ends_with("\n.fi"), "{page}");
    scene.write("file", "");
    scene.run(&["man", "file"]).exits(2).says(&["file: cannot be written"]);
}

#[test]
fn a_policy_is_wrong_at_a_line_and_a_column_and_lint_names_each_limit() {
    let gcra = "algorithm = \"gcra\"\nrate = \"1/s\"\n";
    let scene = Scene::new(&format!(
        "[[limit]]\nname = \"a\"\n{gcra}\n[[limit]]\nname = \"b\"\n{gcra}brust = 3\n\n[[limit]]\nname = \"c\"\nkey = [\"usr\"]\n\
         {gcra}on_outage = \"open\"\n\n[[limit]]\nname = \"a\"\n{gcra}burst = 0\n\n\
         [[limit]]\n{gcra}shadow = 1\nname = \"d\"\n"
    ));
    scene.write("input", "");
    let place = "policy.toml: line 10, column 1: unknown field `brust`";
    let below = "; did you mean \"burst\"?\n  10 | brust = 3\n     | ^";
    scene.replay(&["input"]).exits(2).says(&[place, below]).lacks("TOML parse error");

    let lint = |more: &[&str]| scene.run(&[&["lint", "policy.toml"], more].concat());
    let burst = "line 23, column 9: limit \"a\": burst is 0";
    let ran = lint(&[]).exits(2).says(&[place, burst, "line 28, column 10: shadow is 1"]);
    assert!(ran.out.ends_with("policy.toml: 5 limits, 3 problems\n"), "{}", ran.out);
    // Where only the limit without a name so far is wrong, it is one problem, and a reader of the
    // policy names its number.
    scene.write(
        "late.toml",
        format!("[[limit]]\nname = \"c\"\n{gcra}[[limit]]\n{gcra}burst = 0\nname = \"d\"\n"),
    );
    let ran = scene.run(&["lint", "late.toml"]).exits(2).says(&["line 8, column 9: burst is 0"]);
    assert!(ran.out.ends_with("late.toml: 2 limits, 1 problem\n"), "{}", ran.out);
    scene
        .run(&["replay", "--policy", "late.toml", "input"])
        .says(&["column 9: limit 2: burst is 0"]);

    let lines = lint(&["--identifiers", "key,user", "--fallback", "--json"]).json();
    let told: Vec<_> = lines.iter().map(|line| (&line["line"], line["message"].as_str())).collect();
    for (line, says) in [(1, "on_outage"), (12, "did you mean \"user\"?")] {
        let is_told =
            |(at, told): &(_, Option<&str>)| *at == line && told.is_some_and(|t| t.contains(says));
        assert!(told.iter().any(is_told), "{told:?}");
    }
    assert_eq!(lines.last(), Some(&serde_json::json!({ "limits": 5, "problems": 5, "notes": 0 })));

    scene.write("policy.toml", format!("[[limit]]\nname = \"a\"\n{gcra}"));
    let ran = lint(&["--identifiers", "key"]);
    assert_eq!((ran.code, &*ran.out), (0, "policy.toml: 1 limit, no problem\n"));
    // Of limits whose conditions exclude each other there is a note, and no problem.
    let when = |name: &str, when: &str| limit(name, "ip", "gcra 1/s", &format!("when = {when}"));
    let reads = when("reads", "{ method = ['GET', 'HEAD'] }");
    let others = when("writes", "{ not = { method = ['GET', 'HEAD'] } }")
        + &when("login", "{ method = 'POST', path = '/login' }").replace("1/s", "0/s");
    scene.write("policy.toml", reads + &others);
    let note = "policy.toml: note: line 7, column 1: limit \"writes\": no request meets both its conditions and \
                those of \"reads\"\n  7 | [[limit]]";
    let ran =
        lint(&["--identifiers", "ip,method,path"]).exits(0).says(&[note, "those of \"reads\"\n"]);
    assert!(ran.out.ends_with("policy.toml: 3 limits, no problem, 3 notes\n"), "{}", ran.out);
    ran.says(&["limit \"login\": it denies everything, because its rate is 0\n"]);
    scene.write("max.toml", limit("api", "ip", "gcra 9/s", "burst = 20\nmax = '10/s burst 19'"));
    let note = "limit \"api\": its own numbers (gcra 9/s burst 20) are larger than its max (gcra 10/s burst 19)";
    scene.run(&["lint", "max.toml"]).exits(0).says(&[note, "no problem, 1 note\n"]);
    scene.write(
        "max.toml",
        limit("api", "ip", "gcra 9/s", "burst = 19\nmax = 'gcra 10/s burst 19'"),
    );
    scene.run(&["lint", "max.toml"]).exits(0).says(&["1 limit, no problem\n"]);
    lint(&["--identifiers", "ip,methd,path"]).exits(2).says(&["did you mean \"methd\"?"]);
    for (warn, burst, says) in [
        ("80%", 1, "80 % of 1 are reached with the first request"),
        ("10%", 10, "10 % of 10 are reached with the first request"),
        ("11%", 10, "1 limit, no problem"),
        ("100%", 2, "1 limit, no problem"),
    ] {
        let fields = format!("burst = {burst}\nwarn = \"{warn}\"\n");
        scene.write("policy.toml", format!("[[limit]]\nname = \"a\"\n{gcra}{fields}"));
        assert!(lint(&[]).out.contains(says), "{warn} of {burst}");
    }
    lint(&["--identifiers", "key,"]).exits(2).says(&["--identifiers", "a value is required"]);
}

#[test]
fn an_error_points_to_the_field_that_is_wrong_wherever_the_algorithm_stands() {
    for (lines, place) in [
        (
            "max = '9/h'\nrate = '1/d'\nalgorithm = 'fixed-window'",
            "line 3, column 7: limit \"a\": max is of",
        ),
        ("max = 'fast'\nalgorithm = 'gcra'\nrate = '1/s'", "line 3, column 7: limit \"a\": max: "),
        (
            "debt = 5\nalgorithm = 'sliding-log'\nrate = '1/s'",
            "line 3, column 8: limit \"a\": debt has no meaning",
        ),
        (
            "rate = '0/s'\ndebt = 5\nalgorithm = 'gcra'",
            "line 4, column 8: limit \"a\": debt: a rate of 0",
        ),
        (
            "algorithm = 'gcra'\nrate = '1/s'\nmax = 'fixed-window 1/s'",
            "line 5, column 7: limit \"a\": max: the numbers",
        ),
    ] {
        let right = "[[limit]]\nname = \"right\"\nalgorithm = \"gcra\"\nrate = \"1/s\"\n";
        let scene = Scene::new(&format!("[[limit]]\nname = \"a\"\n{lines}\n{right}"));
        let ran = scene.run(&["lint", "policy.toml"]).exits(2).says(&[place]);
        assert!(ran.out.ends_with("2 limits, 1 problem\n"), "{ran:?}");
        scene.replay(&["none"]).exits(2).says(&[place]);
    }
}
