//! `ratelimit formats`, and logs in a format of their own.

use crate::common::{BUCKET, Scene, gzip, limit, make_pipe};

const LINE: &str = "May 17 10:05:03 web1 nginx[1]: 192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET /t/acme HTTP/1.1\" 200 5\n";

#[test]
fn formats_lists_those_with_names_and_shows_what_an_input_would_be_read_as() {
    let scene = Scene::with(BUCKET, LINE.repeat(5));
    let all = scene.run(&["formats"]).exits(0);
    for name in ["combined", "caddy", "w3c", "--log-format", "--fields"] {
        assert!(all.out.contains(name), "{name}: {}", all.out);
    }
    let ran = scene.run(&["formats", "input"]).exits(0);
    let shown = "  2015-05-17T10:05:03Z  ip=192.0.2.7 path=/t/acme method=GET\n";
    assert!(ran.out.starts_with("input: access log in syslog\n"), "{}", ran.out);
    assert_eq!(ran.out.matches(shown).count(), 3, "{}", ran.out);
    let tenant = ["formats", "--json", "--identifier", "tenant=path~^/t/(.+)", "input"];
    scene.run(&tenant).exits(0).says(&["\"tenant\":\"acme\""]);
    scene.write("input", "{\"at_us\":5,\"key\":\"bob\",\"keys\":{\"plan\":\"free\"}}\n");
    scene.run(&["formats", "input"]).exits(0).says(&["  key=bob plan=free\n"]);
    scene.run(&["formats", "--json", "input"]).exits(0).says(&["\"key\":\"bob\""]);
    scene.write("input", "hello\n");
    scene.run(&["formats", "input"]).exits(2).says(&["its format is not known"]);
}

#[test]
fn a_format_of_its_own_decides_as_the_same_requests_in_a_known_one() {
    let scene = Scene::with(BUCKET, "");
    let known: Vec<_> = (0..9)
        .map(|n| {
            format!(
                "192.0.2.{} - - [17/May/2015:10:05:0{n} +0000] \"GET / HTTP/1.1\" 200 5\n",
                n % 2
            )
        })
        .collect();
    let own: Vec<_> =
        (0..9).map(|n| format!("10.0.0.1;2015-05-17 10:05:0{n};192.0.2.{}\n", n % 2)).collect();
    let json: Vec<_> = (0..9)
        .map(|n| {
            format!("{{\"t\":{},\"c\":{{\"ip\":\"192.0.2.{}\"}}}}\n", 1_431_857_103 - 3 + n, n % 2)
        })
        .collect();
    let known = known.concat();
    scene.write("known", &known);
    scene.write("own", own.concat());
    scene.write("json", json.concat());
    let due = scene.decision_lines(&["known"]);
    let format = "$_;$time_iso8601;$remote_addr";
    assert_eq!(scene.decision_lines(&["--log-format", format, "own"]), due);
    assert_eq!(scene.decision_lines(&["--fields", "ip=c.ip,time=t", "json"]), due);
    // Behind the last member of a gzip file may stand zeros.
    let mut padded = gzip(known.as_bytes());
    padded.extend([0; 700]);
    scene.write("padded", padded);
    assert_eq!(scene.decision_lines(&["padded"]), due);
    // Anything else may be a damaged member. What stands before it is decided.
    let mut with_rest = gzip(known.as_bytes());
    with_rest.extend(b"hello");
    scene.write("with-rest", with_rest);
    let ran = scene.replay(&["--decisions", "decided", "with-rest"]).exits(2);
    ran.says(&["its gzip data is damaged or cut off; check it with `gzip -t`"]);
    assert_eq!(scene.read("decided").lines().count(), known.lines().count());
    let ran = scene.replay(&["--log-format", "$status", "own"]).exits(2);
    ran.says(&["--log-format", "does not name the client"]);
}

#[test]
fn all_requests_of_one_line_and_time_are_decided() {
    let object = "{\"ip\":\"192.0.2.7\",\"t\":\"2015-05-17T10:05:03Z\"}";
    let scene = Scene::with(BUCKET, format!("[{}]\n", [object; 3].join(",")));
    assert_eq!(scene.decision_lines(&["--fields", "ip=ip,time=t", "input"]).lines().count(), 3);
}

#[test]
fn behind_a_proxy_the_client_is_the_first_of_those_that_it_forwards_if_the_option_says_so() {
    let scene = Scene::new(&limit("per-ip", "ip", "gcra 1/m", ""));
    let line = |forwarded: &str| {
        format!(
            "10.0.0.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 5 \"-\" \"curl/8\" \"{forwarded}\"\n"
        )
    };
    scene.write("input", line("192.0.2.7") + &line("192.0.2.9, 10.0.0.9") + &line("-"));
    let ran = scene.replay(&["input"]).exits(0);
    ran.says(&["note: addresses stand in quotes", "denied     2"]);
    let ran = scene.replay(&["--identifier", "ip=forwarded", "input"]).exits(0);
    let told = "note: 1 line tells no client in the forwarded addresses";
    ran.says(&["denied     0", told]).lacks("in quotes");
}

#[test]
fn of_two_durations_the_format_of_the_note_takes_the_first() {
    let line =
        "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 5 \"-\" \"curl/8\" ";
    for end in ["0.250 0.010\n", "\"203.0.113.9\" 0.250 0.010\n"] {
        let scene = Scene::with(BUCKET, format!("{line}{end}"));
        scene.run(&["formats", "input"]).exits(0).says(&["took=10 ms"]);
        let told = scene.replay(&["input"]).exits(0).says(&["two numbers"]).out;
        let format = told.split('\'').find(|part| part.starts_with("combined")).expect("a format");
        scene.run(&["formats", "--log-format", format, "input"]).exits(0).says(&["took=250 ms"]);
    }
}

#[test]
fn a_line_that_may_be_in_another_format_is_refused_with_a_remedy() {
    const TIME: &str = "[17/May/2015:10:05:03 +0000]";
    let end = format!("{TIME} \"GET /a HTTP/1.1\" 200 5 \"-\" \"curl/8\"");
    let caddy = |duration: &str| {
        format!(
            "{{\"ts\":1431857103.5,\"logger\":\"http.log.access\",\"request\":{{\"remote_ip\":\"192.0.2.7\"}},\"duration\":{duration}}}"
        )
    };
    let object = "{\"t\":1431857103,\"c\":{\"clientIp\":\"192.0.2.7\"}}".to_owned();
    let trace = "{\"at_us\":5,\"key\":\"k\"}".to_owned();
    let fields = "--fields ip=c.clientip,time=t";
    for (line, options, says) in [
        (format!("2015-05-17T10:05:03Z 10.0.0.5 192.0.2.7 - - {end}"), "", "--log-format"),
        (
            "2015-05-17T10:05:03Z a.example 10.0.0.9 192.0.2.7 \"GET /a HTTP/1.1\" 200 5 \"-\" x"
                .to_owned(),
            "",
            "its format is not known",
        ),
        (format!("10.0.0.5 - 192.0.2.7 - - {end}"), "", "--log-format"),
        (format!("10.0.0.5 - 192.0.2.7 - - {end}"), "--format combined --strict", "--log-format"),
        (format!("a.example {end} \"192.0.2.7\""), "", "--log-format"),
        (format!("443 {end}"), "", "the client is not to be seen"),
        (format!("192.0.2.7 - - {end} 90000"), "--duration-unit s", "is more than a day; if it"),
        (
            format!("192.0.2.7 - - {end} 90000.5"),
            "--log-format %h_%l_%u_%t_\"%r\"_%s_%b_\"%i\"_\"%i\"_%T",
            "a day; name the field",
        ),
        (caddy("500000000"), "", "tell the unit by --duration-unit ms or ns"),
        (
            caddy("90000.5"),
            "",
            "is more than a day; if it has another unit, tell it by --duration-unit",
        ),
        (caddy("0.5"), "--identifier a=b --identifier a=c", "names \"a\" twice"),
        (format!("192.0.2.7 {TIME}\r192.0.2.8 {TIME}"), "", "tr '\\r' '\\n'"),
        (object.clone(), fields, "has no field \"c.clientip\"; it has c.clientIp, t; did you mean"),
        (
            object.clone(),
            "--fields ip=c.clientIp,time=ts",
            "correct the option: line 1 has no field \"ts\"",
        ),
        (object, "--fields ip=a,time=t,ip=b", "names ip twice; write ip=a|b"),
        (trace.clone(), "--identifier a=b", "leave --identifier out"),
        (trace.clone(), "--line-time end", "leave --line-time out"),
        (trace.clone(), "--duration-unit us", "leave --duration-unit out"),
        (trace.replace("\"key\"", "\"cots\":5,\"key\""), "", "did you mean \"cost\"?"),
        ("at_us,key,duration\n5,k,5".to_owned(), "", "name it duration_us"),
    ] {
        let scene = Scene::with(BUCKET, line.clone() + "\n");
        let options: Vec<_> = options.split(' ').map(|option| option.replace('_', " ")).collect();
        let options = options.iter().map(String::as_str).filter(|option| !option.is_empty());
        let ran = scene.replay(&options.chain(["input"]).collect::<Vec<_>>()).exits(2);
        assert!(ran.err.contains(says), "{line}\n{}\nlacks {says}", ran.err);
        assert!(
            !ran.err.contains("with --format") || !ran.err.contains("--fields "),
            "{}",
            ran.err
        );
    }
}

#[test]
fn a_line_is_read_as_its_format_has_it() {
    const REQUEST: &str = "\"GET /a HTTP/1.1\" 200 5";
    let at = |time: &str| format!("192.0.2.7 - - [{time}] {REQUEST}");
    let caddy = "{\"ts\":1431857103.5,\"logger\":\"http.log.access\",\"request\":{\"remote_ip\":\"192.0.2.7\"},\"duration\":500}";
    let w3c = "#Fields: time c-ip cs(User-Agent) cs-method";
    for (lines, option, value, due) in [
        (
            format!(
                "2015-05-17T10:05:03.5Z 192.0.2.7, 10.0.0.7 - - [17/May/2015:10:05:03 +0000] {REQUEST}"
            ),
            "--format",
            "auto",
            "2015-05-17T10:05:03Z  ip=192.0.2.7",
        ),
        (
            format!("2015-05-17T10:05:03Z a.example 10.0.0.9 192.0.2.7 {REQUEST}"),
            "--log-format",
            "$time_iso8601 $host $_ $remote_addr \"$request\" $status $_",
            "2015-05-17T10:05:03Z  ip=192.0.2.7 path=/a method=GET host=a.example",
        ),
        (
            format!("2015-05-17T10:05:04Z {}", at("17/May/2015:10:05:03 +0000")),
            "--log-format",
            "$remote_addr $_ [$time_local] \"$request\" $status $_",
            "2015-05-17T10:05:03Z  ip=192.0.2.7",
        ),
        (
            at("17/May/2015:10:05:03 -0500"),
            "--log-format",
            "%h %^[%d:%t %^] \"%r\" %s %b",
            "2015-05-17T15:05:03Z  ip=192.0.2.7",
        ),
        (
            at("17/May/2015:10:05:03 - x"),
            "--log-format",
            "%h %^[%d:%t %^] \"%r\" %s %b",
            "2015-05-17T10:05:03Z",
        ),
        (
            format!("10.0.0.7 {}", at("17/May/2015:10:05:03 +0000")),
            "--log-format",
            "%{c}a %a %l %u %t \"%r\" %s %b",
            "ip=192.0.2.7",
        ),
        (
            at("2015-05-17 10:05:03 GMT"),
            "--log-format",
            "%h %l %u [%{%F %T %Z}t] \"%r\" %s %b",
            "2015-05-17T10:05:03Z",
        ),
        (
            at("17/May/2015:10:05:03 +0000") + " \"-\" \"-\" 1431857103.250",
            "--format",
            "combined",
            "10:05:03Z  ip=192.0.2.7 path=/a method=GET\n",
        ),
        (
            "#Fields: date time c-ip time-taken\n2015-05-17 10:05:03 192.0.2.7 2".to_owned(),
            "--duration-unit",
            "s",
            "10:05:01Z  ip=192.0.2.7 took=2 s",
        ),
        (caddy.to_owned(), "--duration-unit", "ms", "took=500 ms"),
        (caddy.to_owned(), "--duration-unit", "ns", "ip=192.0.2.7 took=0 µs"),
        (
            "{\"a\":\"-\",\"b\":\"192.0.2.7\",\"t\":1431857103}".to_owned(),
            "--fields",
            "ip=a|b,time=t",
            "ip=192.0.2.7",
        ),
        (
            format!(
                "#Date: 2015-05-17\n{w3c}\n23:59:59 192.0.2.7 \"a 10.0.0.9\" GET\n00:00:01 192.0.2.7 x GET"
            ),
            "--format",
            "auto",
            "2015-05-17T23:59:59Z  ip=192.0.2.7 method=GET\n  2015-05-18T00:00:01Z",
        ),
    ] {
        let scene = Scene::with(BUCKET, lines.clone() + "\n");
        let ran = scene.run(&["formats", option, value, "input"]).exits(0);
        assert!(ran.out.contains(due), "{lines}\n{}\nlacks {due}", ran.out);
    }
}

#[test]
fn a_line_with_other_fields_than_its_format_is_a_bad_line() {
    const REQUEST: &str = "\"GET /a HTTP/1.1\" 200 5";
    let at = |time: &str| format!("192.0.2.7 - - [{time}] {REQUEST}");
    let w3c = "#Fields: time c-ip cs(User-Agent) cs-method";
    for (lines, options, says) in [
        (
            format!("#Date: 2015-05-17\n{w3c}\n10:05:03 192.0.2.7 a b GET"),
            &[][..],
            "has 5 fields, and the header names 4",
        ),
        (format!("#Date: 2015-05-17\n{w3c}\n10:05:03 192.0.2.7 \"a b\""), &[], "has 3 fields"),
        (
            at("17/May/2015:10:05:03 +0000").replace("GET /a HTTP/1.1", "- - -"),
            &["--format", "combined"],
            "without a request",
        ),
        (
            format!("443 {}", at("17/May/2015:10:05:03 +0000")),
            &["--log-format", "$remote_addr $_ [$time_local] \"$request\" $_"],
            "has \"443\" in the place of the client's address",
        ),
        (
            at("2015-05-17 10:05:03 CET"),
            &["--log-format", "%h %l %u [%{%F %T %Z}t] \"%r\" %s %b"],
            "write %z",
        ),
    ] {
        let scene = Scene::with(BUCKET, lines + "\n");
        let arguments = [&["--strict"], options, &["input"]].concat();
        let ran = scene.replay(&arguments).exits(2);
        assert!(ran.err.contains(says), "{}\nlacks {says}", ran.err);
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_is_not_read_twice() {
    let scene = Scene::with(BUCKET, LINE);
    let pipe = scene.path("pipe");
    make_pipe(&pipe);
    scene.command("suggest", &["--target", "0%", "pipe"]).exits(2).says(&["name a file"]);
}
