//! The report page: its numbers are those of the decisions file. Comparisons the oracle checks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::common::{BUCKET, Scene, example, json_lines, limit};
use ratelimit_servers::contrast::stand_out;

static POLICY: LazyLock<String> = LazyLock::new(|| {
    limit("per-ip", "ip", "gcra 1/s", "burst = 4")
        + &limit("stricter", "ip", "fixed-window 20/m", "shadow = true")
        + &limit("page", "ip path", "sliding-log 6/10s", "")
});
static OTHER: LazyLock<String> = LazyLock::new(|| {
    limit("per-ip", "ip", "gcra 2/s", "burst = 3")
        + &limit("per-path", "path", "gcra 1/s", "burst = 9")
});

/// A thousand requests of callers that differ in how often they come, the most frequent with markup
/// in its name.
fn trace() -> String {
    let mut lines = String::new();
    let (mut at_us, mut random) = (1_000_000_000_u64, 7_u64);
    for _ in 0..1_000 {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let draw = random >> 33;
        at_us += draw % 400_000;
        // The smaller numbers come more often.
        let ip = (draw % 12) * (draw / 12 % 12) / 11;
        let ip = if ip == 0 { "</script><b>&".to_owned() } else { format!("192.0.2.{ip}") };
        let path = draw / 144 % 3;
        let _ = writeln!(
            lines,
            "{}",
            json!({ "at_us": at_us, "keys": { "ip": ip, "path": format!("/{path}") } })
        );
    }
    lines
}

/// The JSON in a page.
fn embedded(page: &str) -> Value {
    let (_, rest) =
        page.split_once("<script type=\"application/json\" id=\"data\">").expect("data");
    let (data, rest) = rest.split_once("</script>").expect("an end");
    assert_eq!(rest, "</body></html>", "the data are the last element");
    serde_json::from_str(data).expect("JSON")
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().expect(field)
}

/// The decision of a limit in a decision line, if it decided.
fn of_limit<'l>(line: &'l Value, name: &str) -> Option<&'l Value> {
    let listed = |field: &str| line[field].as_array().into_iter().flatten();
    listed("limits").chain(listed("shadow")).find(|limit| limit["name"] == name)
}

fn is_allowed(value: &Value) -> bool {
    value["allowed"].as_bool().expect("a decision")
}

/// Replays the trace with these arguments, and returns the page's data and the decision lines.
fn replay(more: &[&str]) -> (Value, Vec<Value>) {
    let scene = Scene::with(&POLICY, trace());
    scene.write("other.toml", &*OTHER);
    let arguments = ["--decisions", "out.jsonl", "--report", "out.html", "input"];
    scene.replay(&[&arguments[..], more].concat()).exits(0);
    let page = scene.read("out.html");
    // The callers' names are escaped, and the page asks for nothing.
    assert!(page.contains("&lt;/script&gt;&lt;b&gt;&amp;") && !page.contains("</script><b>"));
    assert!(!page.contains("http") && !page.contains("src="), "{page}");
    (embedded(&page), json_lines(&scene.read("out.jsonl")))
}

#[test]
fn totals_and_charts_are_those_of_the_decisions() {
    let (data, lines) = replay(&[]);
    let denied = lines.iter().filter(|line| !is_allowed(line)).count() as u64;
    assert!(denied > 50 && denied < 950, "{denied}");
    assert_eq!((number(&data, "requests"), number(&data, "denied")), (1_000, denied));
    assert_eq!(number(&data, "admitted"), 1_000 - denied);
    let at = |line: &Value| number(line, "at_us");
    assert_eq!(data["span_us"], json!([at(&lines[0]), at(&lines[999])]));

    let width = number(&data, "bucket_us");
    let names = ["per-ip", "stricter", "page"];
    // Of each bucket what each limit admitted and denied, and then all together.
    let mut due: BTreeMap<u64, [[u64; 2]; 4]> = BTreeMap::new();
    for line in &lines {
        let bucket = due.entry(at(line) / width * width).or_default();
        let by_limit = names.map(|name| of_limit(line, name));
        for (counts, decision) in bucket.iter_mut().zip(by_limit.into_iter().chain([Some(line)])) {
            counts[0] += u64::from(decision.is_some_and(is_allowed));
            counts[1] += u64::from(decision.is_some_and(|decision| !is_allowed(decision)));
        }
    }
    let bucket = |(at, counts): (&u64, &[[u64; 2]; 4])| {
        let [limits @ .., [admitted, denied]] = counts;
        json!({ "at_us": at, "admitted": admitted, "denied": denied, "limits": limits })
    };
    let shown = data["buckets"].as_array().expect("buckets").iter();
    let shown = shown.filter(|bucket| bucket["admitted"] != 0 || bucket["denied"] != 0);
    assert_eq!(shown.cloned().collect::<Vec<_>>(), due.iter().map(bucket).collect::<Vec<_>>());
    for (place, limit) in data["limits"].as_array().expect("limits").iter().enumerate() {
        let [admitted, denied] =
            [0, 1].map(|of| due.values().map(|counts| counts[place][of]).sum());
        let numbers = ["applied", "denied"].map(|field| number(limit, field));
        assert_eq!((&limit["name"], numbers), (&json!(names[place]), [admitted + denied, denied]));
        assert_eq!(limit["shadow"], json!(place == 1));
        assert!(denied > 0, "{limit}");
    }
}

#[test]
fn callers_are_those_of_the_decisions() {
    let (data, lines) = replay(&[]);
    let key = |line: &Value, name: &str| {
        let part = |kind: &str| line["keys"][kind].as_str().expect(kind).to_owned();
        if name == "page" { part("ip") + " " + &part("path") } else { part("ip") }
    };
    for limit in data["limits"].as_array().expect("limits") {
        let name = limit["name"].as_str().expect("a name");
        // `None` is a denied caller.
        let mut least: BTreeMap<String, Option<u64>> = BTreeMap::new();
        for line in &lines {
            let Some(decision) = of_limit(line, name) else { continue };
            let tenths = (number(decision, "remaining") * 10).div_ceil(number(decision, "limit"));
            let seen = is_allowed(decision).then_some(tenths);
            let least = least.entry(key(line, name)).or_insert(seen);
            *least = (*least).min(seen);
        }
        let mut bins = [0_u64; 11];
        for tenths in least.values().flatten() {
            bins[usize::try_from(*tenths).expect("at most 10")] += 1;
        }
        let denied = least.values().filter(|least| least.is_none()).count();
        let due = json!({ "callers_denied": denied, "least_left": bins, "uncounted": 0 });
        assert_eq!(limit["nearness"], due, "{name}");
    }

    // Both enforced limits name the address first.
    let mut seen: BTreeMap<String, Vec<&Value>> = BTreeMap::new();
    for line in &lines {
        seen.entry(key(line, "per-ip")).or_default().push(line);
    }
    let callers = data["denied_callers"].as_array().expect("callers");
    for caller in callers {
        assert_eq!(caller["identifier"], "ip");
        let of_caller = &seen[caller["value"].as_str().expect("a value")];
        let denied: Vec<_> = of_caller.iter().filter(|line| !is_allowed(line)).collect();
        let on_path = denied.iter().filter(|line| line["keys"]["path"] == caller["paths"][0][0]);
        assert_eq!(caller["paths"][0][1], on_path.count(), "{caller}");
        let told = ["requests", "denied", "first_us", "last_us"].map(|field| number(caller, field));
        let [first, last] = [0, denied.len() - 1].map(|place| number(denied[place], "at_us"));
        assert_eq!(told, [of_caller.len() as u64, denied.len() as u64, first, last], "{caller}");
    }
    let denied = seen.values().filter(|of_caller| !of_caller.iter().all(|line| is_allowed(line)));
    let shown: BTreeSet<_> = callers.iter().map(|caller| caller["value"].as_str()).collect();
    assert!(shown.len() > 2 && shown.len() == denied.count(), "{shown:?}");
    let due = json!({ "name": "ip", "callers": seen.len(), "callers_denied": callers.len(), "uncounted": 0 });
    assert_eq!(data["identifiers"][0], due);
}

#[test]
fn a_spell_of_denials_ends_with_an_admission_or_with_the_longest_wait_of_its_last() {
    let window = "[[limit]]\nname = \"window\"\nalgorithm = \"fixed-window\"\nrate = \"17/m\"\n";
    let line = |(ms, cost)| format!("{{\"at_us\":{ms}000,\"key\":\"k\",\"cost\":{cost}}}\n");
    let trace = [
        (60_000, 5),
        (60_500, 1), // denied for 500 ms
        (60_800, 1), // in the same spell
        (61_000, 1),
        (61_500, 1), // denied for 500 ms
        (65_000, 6), // denied for ever
        (70_000, 3), // which this ends after 5 s
        (70_000, 5), // denied for 3 s
        (71_000, 1), // which this ends after 1 s
        (80_000, 5),
        (80_000, 3), // denied for 3 s by the bucket, and for 40 s by the window
    ];
    let scene = Scene::with(&(BUCKET.to_owned() + window), trace.map(line).concat());
    let caller = &scene.replay(&["--json", "input"]).json()[0]["denied_callers"][0];
    let told = ["spells", "denied_for_us", "longest_us"].map(|field| number(caller, field));
    assert_eq!(told, [5, 47_000_000, 40_000_000]);
}

#[test]
fn a_caller_that_is_denied_for_ever_waits_for_ever() {
    let line =
        |ms: u64, cost: u64| format!("{{\"at_us\":{ms}000,\"key\":\"k\",\"cost\":{cost}}}\n");
    let scene = Scene::with(BUCKET, [line(1, 5), line(1, 1), line(9_000, 6)].concat());
    let ran = scene.replay(&["--json", "--report", "out.html", "input"]).exits(0);
    let caller = &ran.json()[0]["denied_callers"][0];
    let told = ["spells", "denied_for_us", "longest_us"].map(|field| caller[field].clone());
    assert_eq!(told, [json!(2), json!(null), json!(null)]);
    assert!(scene.read("out.html").contains(">never</td>"), "the page says never");
    scene.replay(&["input"]).exits(0).says(&["  never  "]);
}

#[test]
fn the_page_answers_in_order_and_a_limit_is_right_as_suggest_says() {
    let (policy, log) = example();
    let scene = Scene::new(&(policy + "\n" + &limit("host", "host", "gcra 1/s", "")));
    scene.write("other.toml", &*OTHER);
    scene.replay(&["--report", "out.html", "--compare", "other.toml", &log]).exits(0);
    let (page, mut rest) = (scene.read("out.html"), "");
    for (place, part) in [
        "<h1>7.8% of requests would have been denied</h1>",
        "323 of 4,153 requests, from 6 callers",
        "<p class=\"lead\">other.toml would newly deny ",
        "policy.toml, 2026-03-01",
        "<h2>Who is hurt</h2>",
        "ip=192.0.2.80",
        "ExampleBot/1.4",
        "<pre>192.0.2.80 - - [",
        "<h2>Is the limit right?</h2>",
        "Callers per dot:",
        "from <strong>1</strong> of 325 callers",
        "Alone it would deny 1 of them; the busiest caller that fits needed 25 of 30 at once; <code>burst = 101</code> denies none.",
        "from <strong>4</strong> of 2,752 combinations of ip + path",
        "No request carried <code>host</code>",
        "<h2>Denials over time</h2>",
        "most at 09:16:30: 47",
        ">2026-03-01, UTC</p>",
        "Denied nothing: host",
        "<h2>Compared with other.toml</h2>",
        "<h3>Newly denied</h3>",
    ]
    .iter()
    .enumerate()
    {
        let from = if place == 0 { &*page } else { rest };
        rest = from.split_once(part).expect(part).1;
    }
    let proposed = scene.command("suggest", &["--target", "0%", "--json", &log]).exits(0).json();
    let data = embedded(&page);
    for (limit, row) in data["limits"].as_array().expect("limits").iter().zip(&proposed) {
        let (needs, is_met) = (&limit["needs"], number(limit, "applied") > 0);
        assert_eq!(needs["callers_denied_alone"], row["now"]["callers_denied"], "{row}");
        assert!(!is_met || needs["denies_none"] == row["proposed"]["algorithm"], "{row}");
        let callers: Vec<[u64; 2]> =
            serde_json::from_value(needs["callers"].clone()).expect("pairs");
        assert_eq!(callers.iter().map(|[_, callers]| callers).sum::<u64>(), number(row, "callers"));
    }
}

#[test]
fn shadow_limits_are_told_as_what_they_would_have_denied() {
    let scene = Scene::with(&POLICY, trace());
    let ran = scene.replay(&["--json", "--report", "out.html", "input"]).exits(0);
    let data = embedded(&scene.read("out.html"));
    assert_eq!(ran.json(), [data], "as JSON the summary is the page's data");
    scene.replay(&["input"]).says(&["Shadow limits, which deny nothing", "would have denied"]);
    assert!(scene.read("out.html").contains("shadow: denies nothing"));
    // Alone, a shadow limit denies nothing, and applies.
    let shadow = BUCKET.to_owned() + "shadow = true\n";
    scene.write("policy.toml", shadow);
    scene.write("input", "{\"at_us\": 5, \"key\": \"k\"}\n".repeat(9));
    scene.replay(&["--report", "out.html", "input"]).exits(0).lacks("WARNING");
    let data = embedded(&scene.read("out.html"));
    assert_eq!((number(&data, "denied"), number(&data["limits"][0], "denied")), (0, 4));
}

#[test]
fn a_year_of_requests_makes_a_page_no_larger_than_an_hour() {
    let scene = Scene::new(BUCKET);
    let size = |step_us: u64| {
        let line = |n: u64| format!("{{\"at_us\": {}, \"key\": \"k{}\"}}\n", n * step_us, n % 900);
        scene.write("input", (0..9_000).map(line).collect::<String>());
        scene.replay(&["--report", "out.html", "input"]).exits(0);
        let page = scene.read("out.html");
        let buckets = embedded(&page)["buckets"].as_array().expect("buckets").len();
        assert!(buckets <= 180, "{buckets}");
        page.len()
    };
    let (hour, year) = (size(400_000), size(3_504_000_000));
    assert!(hour < 300_000 && year < 300_000, "{hour} {year}");
}

#[test]
fn ten_callers_show_and_the_others_fold_out() {
    let scene = Scene::new(BUCKET);
    let page = |callers: usize| {
        let line = |n: usize| format!("{{\"at_us\": 5, \"key\": \"k{}\"}}\n", n % callers);
        scene.write("input", (0..callers * 9).map(line).collect::<String>());
        scene.replay(&["--report", "out.html", "input"]).exits(0);
        scene.read("out.html")
    };
    for (callers, first, more) in [
        (10, "Most denied first, 10 of 10 callers.", None),
        (
            11,
            "Most denied first, 10 of 11 callers.",
            Some(("1 more caller", "11 to 11 of 11 callers")),
        ),
        (
            1_200,
            "Most denied first, 10 of 1,200 callers.",
            Some(("90 more callers", "11 to 100 of 1,200 callers")),
        ),
    ] {
        let page = page(callers);
        assert!(page.contains(first), "{first}");
        let (before, folded) = page.split_once(" more caller").unwrap_or((&page, ""));
        assert_eq!(before.matches("<th class=\"name\"").count(), 10);
        if let Some((summary, caption)) = more {
            assert!(page.contains(&format!("<summary>{summary}</summary>")), "{summary}");
            assert!(folded.contains(&format!("<caption>{caption}</caption>")), "{caption}");
            let folded = folded.split("</table>").next().unwrap_or_default();
            assert_eq!(folded.matches("<th class=\"name\"").count(), callers.min(100) - 10);
        }
    }
}

#[cfg(any(feature = "redis", feature = "fred"))]
#[test]
fn a_comparison_on_redis_says_the_same_and_leaves_no_key() {
    let server = ratelimit_servers::RedisServer::start().expect("a server");
    let in_memory = replay(&["--compare", "other.toml"]);
    let mut on_redis = replay(&["--compare", "other.toml", "--store", &server.url()]);
    on_redis.0["title"] = in_memory.0["title"].clone();
    assert_eq!(on_redis, in_memory);
    assert_eq!(crate::common::keys(&server), 0);
}

#[test]
fn text_and_bars_stand_out_in_light_and_in_dark() {
    let style = include_str!("../../../ratelimit-replay/src/report/style.css");
    let blocks: Vec<_> = style.split(":root {").skip(1).collect();
    assert_eq!(blocks.len(), 3, "light, dark and print");
    let colours =
        [("text", 7.0), ("faint", 4.5), ("near", 4.5), ("admitted", 3.0), ("denied", 3.0)];
    for block in blocks {
        for (colour, least) in colours {
            stand_out(block, &[(colour, "page", least), (colour, "card", least)]);
        }
        // Also where both are grey.
        stand_out(block, &[("denied", "admitted", 3.0)]);
    }
}
