//! `top` on real servers, and the options of a store's keys.

use crate::common::{BUCKET, Ran, Scene, limit, write_gcra};
use ratelimit_servers::{RedisCluster, RedisServer};
use serde_json::{Value, json};

/// Uses up the bucket of some callers, and a little of others.
fn charge(scene: &Scene, url: &str, more: &[&str]) {
    for (caller, cost) in [("a b}%", "5"), ("carol", "5"), ("acme/dave", "5"), ("erin", "1")] {
        let arguments = [caller, "--cost", cost, "--store", url];
        scene.command("check", &[&arguments[..], more].concat()).exits(0);
    }
}

fn top(scene: &Scene, url: &str, more: &[&str]) -> Vec<Value> {
    scene.command("top", &[&["--json", "--store", url], more].concat()).exits(0).json()
}

fn callers(lines: &[Value]) -> Vec<&str> {
    let mut callers: Vec<_> = lines.iter().filter_map(|line| line["value"].as_str()).collect();
    callers.sort_unstable();
    callers
}

/// One token per hour, so that the test's own time changes nothing.
fn scene() -> Scene {
    Scene::new(&BUCKET.replace("1/s", "1/h"))
}

#[test]
fn those_who_are_limited_now_are_listed_on_one_server_and_on_every_node_of_a_cluster() {
    let (one, cluster) =
        (RedisServer::start().expect("a server"), RedisCluster::start().expect("a cluster"));
    for url in [one.url(), cluster.url()] {
        for mode in ["lua", "cas"] {
            let scene = scene();
            let url = format!("{url}?mode={mode}");
            charge(&scene, &url, &["--prefix", mode]);
            let lines = top(&scene, &url, &["--prefix", mode, "--count", "1", "--pause", "1us"]);
            assert_eq!(callers(&lines), ["a b}%", "acme/dave", "carol"], "{url}: {lines:?}");
            let totals = json!({ "limited": 3, "callers": 4, "keys": 4, "hidden_keys": 0, "records": 0, "skipped": 0, "unknown": [], "max_keys_reached": false, "error": null, "at_us": lines[3]["at_us"] });
            assert_eq!(lines[3], totals, "{url}");
            let wait = lines[0]["retry_after_us"].as_u64().expect("a wait");
            assert!((3_000_000_000..=3_600_000_000).contains(&wait), "{wait}");
            // Looking charges nothing.
            assert_eq!(top(&scene, &url, &["--prefix", mode, "--cost", "5"])[4]["limited"], 4);
            assert_eq!(callers(&top(&scene, &url, &["--prefix", mode])).len(), 3);
        }
    }
}

#[test]
fn who_is_locked_out_is_told_and_until_when() {
    let server = RedisServer::start().expect("a server");
    let how = "block = \"1h\"\nfactor = 2";
    let scene = Scene::new(&limit("login", "account", "lockout 3/5m", how));
    let url = server.url();
    for (account, failures) in [("alice", "3"), ("bob", "2")] {
        let account = format!("account={account}");
        scene.command("check", &[&account, "--cost", failures, "--store", &url]).exits(0);
    }
    let text = scene.command("top", &["--store", &url]).exits(0);
    text.says(&["account=alice", "login (locked out)", "1 limited now, of 2 callers"]);
    // Three more are more than bob has left, and block nothing.
    let lines = top(&scene, &url, &["--cost", "3"]);
    let locked = |line: &Value| (line["value"].clone(), line["locked_out"].clone());
    let due = [(json!("alice"), json!(true)), (json!("bob"), json!(false))];
    assert_eq!(lines[..2].iter().map(locked).collect::<Vec<_>>(), due);
    let of = |account: &str| scene.command("inspect", &[account, "--store", &url]).exits(0);
    of("account=alice").says(&["lockouts 1", "locked_out_until 2"]);
    of("account=bob").says(&["count 2", "lockouts 0"]).lacks("locked_out_until");
}

/// In both modes that decide by records.
#[test]
fn callers_with_records_and_those_denied_for_ever_are_listed_longest_wait_first() {
    for mode in ["lua", "cas"] {
        lists_callers_with_records(mode);
    }
}

fn lists_callers_with_records(mode: &str) {
    let server = RedisServer::start().expect("a server");
    let url = format!("{}?mode={mode}", server.url());
    let scene = Scene::new(&limit("api", "user", "gcra 10/h", "burst = 10\noverridable = true"));
    let run = |words: &[&str]| {
        scene.run(&[words, &["--policy", "policy.toml", "--store", &url]].concat())
    };
    let set = |user: &str, change: &[&str]| {
        run(&[&["record", "set", user, "--limit", "api", "--replace"], change].concat()).exits(0);
    };
    let check = |user: &str, cost: &str| run(&["check", user, "--cost", cost]).exits(0);
    for (user, cost) in
        [("user=used", "10"), ("user=open", "1"), ("user=exempt", "10"), ("user=small", "9")]
    {
        check(user, cost);
    }
    set("user=blocked", &["--blocked", "--forever"]); // without a state
    set("user=nothing", &["--numbers", "0/s", "--forever"]);
    set("user=exempt", &["--exempt", "--forever"]);
    set("user=later", &["--blocked", "--for", "2h"]);
    set("user=small", &["--numbers", "1/h burst 1", "--for", "9h"]);
    let lines = top(&scene, &url, &[]);
    let told = |line: &Value| {
        (line["value"].as_str().expect("a caller").to_owned(), line["retry_after_us"].is_null())
    };
    let due =
        [("blocked", true), ("nothing", true), ("later", false), ("small", false), ("used", false)];
    // What small has used, it has used under its numbers, too.
    let told: Vec<_> = lines[..lines.len() - 1].iter().map(told).collect();
    let mut sorted = told.clone();
    sorted.sort_by_key(|(_, never)| !never);
    assert_eq!(told, sorted);
    let names: std::collections::BTreeSet<_> =
        told.iter().map(|(name, never)| (&**name, *never)).collect();
    assert_eq!(names, due.into_iter().collect());
    assert_eq!(lines[0]["record"]["blocked"], json!(true));
    let used = lines.iter().find(|line| line["value"] == "used").expect("limited");
    assert!(used["record"].is_null());
    let totals = lines.last().expect("totals");
    assert_eq!((&totals["limited"], &totals["records"]), (&json!(5), &json!(5)));
    run(&["top"]).says(&["never", "blocked for ever", "gcra 1/h burst 1 until", "5 records stand"]);
    // Above the capacity: those that have a state or a record, but no others.
    let lines = top(&scene, &url, &["--cost", "11"]);
    let never =
        lines.iter().filter(|line| line["value"].is_string() && line["retry_after_us"].is_null());
    assert_eq!(never.count(), 6, "{lines:?}");
    run(&["top", "--cost", "11"]).says(&["a cost of 11 is above the capacity of api"]);
    run(&["inspect", "user=blocked"])
        .says(&["denies for ever: a record blocks", "record: blocked for ever"]);
    // A record that this version cannot read.
    let unknown = ["HSET", "rl:1:#records:{zed}", "api/gcra", "9 - paused"];
    server.command(&unknown).expect("it answers").ok().expect("written");
    run(&["top"]).exits(0).says(&["5 limited now", "1 caller was skipped", "a newer version"]);
}

#[test]
fn a_caller_is_reset_under_one_limit() {
    let server = RedisServer::start().expect("a server");
    let url = server.url();
    let two = ["short", "long"].map(|name| limit(name, "ip", "gcra 3/h", ""));
    let scene = Scene::new(&(two.concat() + &limit("other", "user", "gcra 3/h", "")));
    scene.command("check", &["ip=a", "--cost", "3", "--store", &url]).exits(0);
    let reset = |limit: &str| scene.command("reset", &["ip=a", "--store", &url, "--limit", limit]);
    reset("short").exits(0).says(&["full capacity again in short\n"]).lacks("long");
    scene
        .command("inspect", &["ip=a", "--store", &url])
        .says(&["short (for each ip) admits: 3 of 3", "long (for each ip) denies: 0 of 3"]);
    for wrong in ["shrt", "other"] {
        reset(wrong).exits(2).says(&[
            "--limit: no limit",
            wrong,
            "of the policy applies to ip=a",
            "short needs ip",
        ]);
    }
}

#[test]
fn a_prefix_without_keys_and_a_cap_on_keys_that_is_reached_are_told() {
    let server = RedisServer::start().expect("a server");
    let scene = scene();
    charge(&scene, &server.url(), &["--prefix", "app"]);
    let of = |command: &[&str], prefix: &str| {
        let more = ["--store", &server.url(), "--prefix", prefix];
        scene.command(command[0], &[&command[1..], &more].concat()).exits(0)
    };
    for (command, says) in [
        (&["top"][..], "no key has the prefix \"ap\""),
        (&["inspect", "carol"], "nothing is stored for this caller under the prefix \"ap\""),
    ] {
        of(command, "ap").says(&[says]);
        of(command, "app").lacks("prefix");
    }
    of(&["top", "--max-keys", "2"], "app").says(&["more keys than the 2"]);
    let lines = of(&["top", "--max-keys", "2", "--count", "1", "--json"], "app").json();
    let totals = lines.last().expect("totals");
    assert_eq!((&totals["keys"], &totals["max_keys_reached"]), (&json!(2), &json!(true)));

    server
        .command(&["SET", "app:1::{zed}", "of others"])
        .expect("it answers")
        .ok()
        .expect("written");
    of(&["top"], "app").says(&["3 limited now, of 5 callers in 5 keys", "1 caller was skipped"]);
}

#[test]
fn a_tag_and_a_secret_find_the_states_of_a_store_that_has_them() {
    let server = RedisServer::start().expect("a server");
    let scene = scene();
    let tagged = format!("{}?tag=up-to:/", server.url());
    charge(&scene, &tagged, &["--prefix", "tagged"]);
    let lines = top(&scene, &tagged, &["--prefix", "tagged"]);
    assert_eq!(callers(&lines), ["a b}%", "acme/dave", "carol"]);
    let fixed = format!("{}?tag=fixed:acme", server.url());
    charge(&scene, &fixed, &["--prefix", "fixed"]);
    assert_eq!(callers(&top(&scene, &fixed, &["--prefix", "fixed"])).len(), 3);

    scene.write("secret", "open sesame\n");
    let secret = ["--secret-file", "secret"];
    charge(&scene, &server.url(), &secret);
    let lines = top(&scene, &server.url(), &[]);
    assert_eq!((callers(&lines).len(), &lines[0]["hidden_keys"]), (0, &json!(4)));
    let url = server.url();
    scene.command("top", &["--store", &url]).exits(0).says(&[
        "0 limited now, of 0 callers in 4 keys; cannot tell for 4 hashed keys\n",
        "note: 4 keys hold a hash",
        "ratelimit inspect KEY --policy policy.toml --store URL --secret-file FILE\n",
    ]);
    let inspect = ["inspect", "carol", "--policy", "policy.toml", "--json", "--store", &url];
    let remaining = |arguments: &[&str], variable: Option<&str>| {
        let mut command = scene.ratelimit(&[&inspect[..], arguments].concat());
        command
            .env_remove("RATELIMIT_SECRET")
            .envs(variable.map(|value| ("RATELIMIT_SECRET", value)));
        let ran = Ran::from(command.output().expect("runs")).exits(0);
        ran.json()[0]["limits"][0]["remaining"].as_u64().expect("a number")
    };
    assert_eq!(remaining(&secret, None), 0);
    assert_eq!(remaining(&[], Some("open sesame")), 0);
    assert_eq!(remaining(&[], Some("another")), 5);
    assert_eq!(remaining(&[], None), 5);
    // Without the secret, or for a limit of another name, nothing is found and nothing is said to
    // be reset.
    let reset = |more: &[&str]| {
        scene.command("reset", &[&["carol", "--store", &url], more].concat()).exits(0)
    };
    reset(&[]).says(&[
        "carol: nothing was reset\nnote: nothing was stored",
        "in bucket",
        "--secret-file",
    ]);
    scene.write("policy.toml", BUCKET.replace("1/s", "1/h").replace("\"bucket\"", "\"buckt\""));
    reset(&secret).says(&["nothing was reset", "in buckt"]).lacks("capacity");
    assert_eq!(reset(&[&secret[..], &["--json"]].concat()).json()[0]["absent"], json!(["buckt"]));
    scene
        .command("inspect", &[&["carol", "--store", &url], &secret[..]].concat())
        .says(&["in buckt", "--secret-file"]);
    scene.write("policy.toml", BUCKET.replace("1/s", "1/h"));
    assert_eq!(remaining(&secret, None), 0);
    reset(&secret).says(&["carol: full capacity again in bucket\n"]).lacks("note");
    assert_eq!(remaining(&secret, None), 5);
}

#[test]
fn a_caller_that_a_state_from_the_future_locks_is_freed_by_heal() {
    let (scene, server) = (scene(), RedisServer::start().expect("a server"));
    let url = server.url();
    let secret = ["--secret-file", "secret"];
    scene.write("secret", "open sesame\n");
    charge(&scene, &url, &secret);
    charge(&scene, &url, &[]);
    let key = "rl:1::{carol}";
    let future = [4_000_003_600_000_000, 0, 3_999_999_999_999_999];
    for key in [key, "rl:1::{#0123456789abcdef0123456789abcdef}"] {
        write_gcra(&server, key, "bucket", future);
    }
    let heal = |more: &[&str]| scene.command("heal", &[&["--store", &url], more].concat()).exits(0);
    for (more, done) in [(&["--dry-run"][..], "none healed"), (&[], "cut to a used-up limit")] {
        let parts = ["carol ", "{#0123456789abcdef", "2 states from the future", done, "in 9 keys"];
        heal(more).says(&parts);
    }
    let done = "0 states from the future, cut to a used-up limit as of now, in 9 keys\n";
    assert_eq!(heal(&[]).out, done);
    let lines = top(&scene, &url, &[]);
    let carol = lines.iter().find(|line| line["value"] == "carol").expect("denied for an hour");
    assert!(carol["retry_after_us"].as_u64().expect("a wait") <= 3_600_000_000, "{carol}");
}

#[test]
fn states_of_limits_that_the_policy_lacks_are_named() {
    let server = RedisServer::start().expect("a server");
    let policy = |bucket: &str, log: &str| {
        let log = limit("log", "key", &format!("sliding-log 9/{log}"), "");
        BUCKET.replace("1/s", "1/h").replace("\"bucket\"", bucket)
            + &log.replace("key = [\"key\"]\n", "")
    };
    let scene = Scene::new(&policy("\"bucket\"", "d"));
    let url = |mode: &str| format!("{}?mode={mode}", server.url());
    for mode in ["lua", "cas"] {
        charge(&scene, &url(mode), &["--prefix", mode]);
    }
    for (bucket, log, unknown) in [
        ("\"bucket\"", "d", &[][..]),
        ("\"buckt\"", "d", &["bucket/gcra"]),
        ("\"bucket\"", "h", &["log/sliding-log/1d"]),
        ("\"buckt\"", "h", &["bucket/gcra", "log/sliding-log/1d"]),
    ] {
        scene.write("policy.toml", policy(bucket, log));
        for mode in ["lua", "cas"] {
            let run = |command: &[&str], more: &[&str]| {
                let on = ["--store", &url(mode), "--prefix", mode];
                scene.command(command[0], &[&command[1..], &on, more].concat()).exits(0)
            };
            // Of one caller only what lies in one key is found.
            let shared: Vec<_> = unknown.iter().filter(|name| name.starts_with("bucket")).collect();
            let of_caller = if mode == "lua" { shared } else { Vec::new() };
            for (command, found) in [
                (&["top"][..], unknown.iter().collect()),
                (&["heal"], unknown.iter().collect()),
                (&["inspect", "carol"], of_caller),
            ] {
                let ran = run(command, &[]);
                for name in unknown {
                    let is_said = ran.out.contains(&format!("\"{name}\""));
                    assert_eq!(is_said, found.contains(&name), "{bucket}/{log} {mode}: {ran:?}");
                }
                let says = ran.out.contains("no limit of the policy is; if the service");
                assert_eq!(says, !found.is_empty(), "{bucket}/{log} {mode}: {ran:?}");
                if command.len() == 1 {
                    let lines = run(command, &["--json"]).json();
                    assert_eq!(
                        lines.last().expect("totals")["unknown"],
                        json!(unknown),
                        "{lines:?}"
                    );
                }
            }
        }
    }
    // What is reset leaves the others' as they are, and says so.
    let of_carol = ["carol", "--store", &url("lua"), "--prefix", "lua"];
    scene.command("reset", &of_carol).says(&["\"bucket/gcra\"", "stays"]);
    scene.write("policy.toml", policy("\"bucket\"", "d"));
    scene.command("reset", &of_carol).says(&["full capacity again in bucket, log\n"]).lacks("note");
}

/// Which commands, in place of what they need, and what the error names.
type Row<'r> = (&'r [&'r str], &'r [(&'r str, &'r str)], [&'r str; 2]);

#[test]
fn each_error_of_an_argument_names_it_and_the_remedy() {
    let limits = [("per-ip", "ip", ""), ("per-user", "user", "required = true")];
    let limits = limits.map(|(name, key, more)| limit(name, key, "window-log 2/h", more));
    let scene = Scene::new(&limits.concat());
    scene.write("trial.toml", limit("trial", "path", "gcra 2/h", "shadow = true") + &limits[0]);
    scene.write("empty", "\n");
    let (long, of_caller) = ("x".repeat(257), &["check", "inspect", "reset"][..]);
    let of_store = &["check", "inspect", "reset", "top", "heal"][..];
    let rows: &[Row<'_>] = &[
        (of_store, &[("--policy", "none.toml")], ["none.toml", "name a TOML file"]),
        (of_store, &[("--store", "redi://h")], ["--store ", "accepted are redis://"]),
        (&of_store[1..], &[("--store", "memory")], ["--store memory", "such as redis://host:port"]),
        (of_store, &[("--prefix", "a{b}")], ["--prefix", "choose one without"]),
        (of_caller, &[("--secret-file", "none")], ["--secret-file none", "name a file"]),
        (of_caller, &[("--secret-file", "empty")], ["--secret-file empty", "leave it out if"]),
        (of_caller, &[("KEY", "ipp=a")], ["\"ipp\"", "per-ip needs ip"]),
        (of_caller, &[("KEY", "alice")], ["\"alice\" is a bare key", "such as ip=alice"]),
        (&["check"], &[("KEY", "ip=a")], ["KEY: limit \"per-user\"", "add the missing identifier"]),
        (
            &["check"],
            &[("--policy", "trial.toml"), ("KEY", "path=/")],
            ["KEY: to path=/ only shadow limits apply", "per-ip needs ip"],
        ),
        (&["check"], &[("--cost", "per-pi=3")], ["--cost: ", "did you mean \"per-ip\"?"]),
        (&["check"], &[("--cost", "per-ip=x")], ["--cost", "such as 5 or input=812"]),
        (&["check"], &[("--metadata", &long)], ["--metadata: 257 bytes", "shorten them"]),
        (&["top"], &[("--count", "0")], ["--count", "1..=10000"]),
    ];
    for (commands, given, says) in rows {
        for command in *commands {
            // The port is closed: nothing is asked of a server.
            let needs = [("--policy", "policy.toml"), ("--store", "redis://127.0.0.1:1")];
            let needs =
                needs.into_iter().filter(|(name, _)| given.iter().all(|one| one.0 != *name));
            let has_key = given.iter().any(|one| one.0 == "KEY") || !of_caller.contains(command);
            let mut arguments = vec![*command];
            arguments.extend(if has_key { &[][..] } else { &["ip=a", "user=b"] });
            for (name, value) in needs.chain(given.iter().copied()) {
                arguments.extend(Some(name).filter(|name| *name != "KEY"));
                arguments.push(value);
            }
            let ran = scene.run(&arguments).exits(2).says(says);
            assert!(ran.err.starts_with("error: "), "{ran:?}");
            assert!(says[0].starts_with("--store") || !ran.err.contains("--store"), "{ran:?}");
        }
    }
}

#[test]
fn what_was_found_is_kept_when_a_server_stalls() {
    let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
    let scene = scene();
    let callers: Vec<_> = (0..24).map(|n| format!("caller-{n}")).collect();
    for caller in &callers {
        let charge = [caller, "--cost", "5", "--store", &cluster.url()];
        scene.command("check", &charge).exits(0);
    }
    let of = |node: usize| {
        let slots = callers.iter().map(|caller| cluster.slot_of(&format!("{{{caller}}}")));
        slots.filter(|slot| cluster.master_of(*slot).expect("a master") == node).count()
    };
    let (lost, found) = (of(1), of(0) + of(2));
    assert!(lost > 0 && found > 0, "{lost} {found}");
    cluster.proxies()[1].hang(true);
    let ran = scene.command("top", &["--json", "--store", &cluster.url()]).exits(3);
    let lines = ran.json();
    assert_eq!((self::callers(&lines).len(), &lines[found]["limited"]), (found, &json!(found)));
    assert!(lines[found]["error"].as_str().is_some_and(|error| ran.err.contains(error)), "{ran:?}");
    let ran = scene.command("top", &["--store", &cluster.url()]).exits(3);
    ran.says(&["note: stopped by an error", &format!("{found} limited now"), "error: --store"]);

    // In the middle of a server: only what a later step asks is not answered.
    cluster.proxies()[1].hang(false);
    for proxy in cluster.proxies() {
        proxy.cut_matching(&callers[7], 1_000);
    }
    let lines = scene
        .command("top", &["--json", "--count", "1", "--store", &cluster.url()])
        .exits(3)
        .json();
    let totals = lines.last().expect("totals");
    assert!(
        !self::callers(&lines).contains(&&*callers[7]) && totals["error"].is_string(),
        "{totals}"
    );
}

#[test]
fn each_of_two_limits_that_deny_a_caller_is_listed_with_its_own_wait() {
    const HOUR_US: u64 = 3_600_000_000;
    let server = RedisServer::start().expect("a server");
    let all = [("short", "gcra 3/3h"), ("long", "gcra 3/300d")];
    let all = all.map(|(name, words)| limit(name, "ip", words, ""));
    for order in [[0, 1], [1, 0]] {
        let scene = Scene::new(&order.map(|place: usize| all[place].clone()).concat());
        let prefix = format!("order-{}", order[0]);
        let on = ["ip=a", "--cost", "3", "--store", &server.url(), "--prefix", &prefix];
        scene.command("check", &on).exits(0);
        let lines = top(&scene, &server.url(), &["--prefix", &prefix]);
        let waits = ["short", "long"].map(|name| {
            let line = lines.iter().find(|line| line["name"] == name).expect(name);
            line["retry_after_us"].as_u64().expect("a wait").div_ceil(HOUR_US)
        });
        assert_eq!(waits, [1, 2_400], "{lines:?}");
    }
}
