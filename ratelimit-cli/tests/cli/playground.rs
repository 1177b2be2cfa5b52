//! The playground as a headless Chromium shows it: it counts as the tool does, and asks for nothing
//! once it is loaded. Without a Chromium or the target of browsers, the tests say that they are
//! skipped; `scripts/test` installs both.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Scene, example, gzip, workspace};
use ratelimit_servers::chromium::{self, Chromium};

/// What overflows the page, which editors and the report may scroll in.
const WRONG: &str = "[...document.querySelectorAll('html, main, main *')]
    .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.closest('.editor, input'))
    .map(e => e.tagName + ': ' + e.textContent.slice(0, 80))";

/// Resolves once an expression is true.
fn until(expression: &str) -> String {
    format!(
        "new Promise((done) => {{ const look = () => ({expression}) ? done(true) : setTimeout(look, 10); look(); }})"
    )
}

/// Whether a report is there, whole, and is of a log whose name contains these words.
fn with_name(log: &str) -> String {
    let page = "document.querySelector('#report').contentDocument";
    format!(
        "{page}?.readyState === 'complete' && {page}.querySelector('#data') && {page}.body.textContent.includes('{log}')"
    )
}

/// Whether the newest replay has ended well, its report is of this log, and the field names it.
fn of(log: &str) -> String {
    let status = "document.querySelector('#status').textContent";
    let field = "document.querySelector('#files').files[0]?.name";
    format!(
        "{status} === 'Done: the report of {log} stands below.' && {field} === '{log}' && {}",
        with_name(log)
    )
}

/// Takes the example, and resolves once its report is there.
fn report_of_example() -> String {
    let begin = "document.querySelector('#status').textContent = ''; document.querySelector('#example').click()";
    format!("(async () => {{ {begin}; await {}; }})()", until(&of("access.log")))
}

/// The page with all its files.
static FOLDER: LazyLock<Option<TempDir>> = LazyLock::new(|| {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output().expect("rustc runs");
    let sysroot = String::from_utf8(sysroot.stdout).expect("a path");
    let target = Path::new(sysroot.trim()).join("lib/rustlib/wasm32-unknown-unknown");
    if !target.is_dir() {
        // A test that passes shows nothing that is printed by a macro.
        writeln!(io::stderr(), "skipped: no target wasm32-unknown-unknown here").expect("writes");
        return None;
    }
    let folder = TempDir::new().expect("a directory");
    let built =
        Command::new(workspace("scripts/playground")).arg(folder.path()).arg("dev").status();
    assert!(built.expect("it runs").success());
    Some(folder)
});

/// A static server on a port of its own, and the paths that it was asked for.
#[derive(Clone)]
struct Site {
    url: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Site {
    fn start(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/", listener.local_addr().expect("an address"));
        let site = Self { url, asked: Arc::default() };
        let (folder, serving) = (folder.to_owned(), site.clone());
        // It ends with the test program.
        thread::spawn(move || {
            for stream in listener.incoming() {
                // A browser closes connections that it has opened in advance.
                let _ = stream.and_then(|stream| serving.answer(stream, &folder));
            }
        });
        site
    }

    fn answer(&self, mut stream: TcpStream, folder: &Path) -> io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        for line in lines {
            if line?.is_empty() {
                break;
            }
        }
        let Some(path) = first.split(' ').nth(1) else { return Ok(()) };
        self.asked.lock().expect("no panic").push(path.to_owned());
        let name = if path == "/" { "index.html" } else { path.trim_start_matches('/') };
        let (status, body) = match fs::read(folder.join(name)) {
            Ok(body) => ("200 OK", body),
            Err(_) => ("404 Not Found", Vec::new()),
        };
        let kind = match Path::new(name).extension().and_then(|end| end.to_str()) {
            Some("html") => "text/html",
            Some("css") => "text/css",
            Some("js") => "text/javascript",
            _ => "application/octet-stream",
        };
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&body)
    }

    fn asked(&self) -> usize {
        self.asked.lock().expect("no panic").len()
    }
}

/// A site and a browser, if both can be had.
fn site_and_browser() -> Option<(Site, Chromium)> {
    let program = chromium::find_browser()?;
    let site = Site::start(FOLDER.as_ref()?.path());
    let mut browser = Chromium::start(&program);
    // A page that is not in front gets no focus.
    browser.ask("Emulation.setFocusEmulationEnabled", &json!({ "enabled": true }));
    Some((site, browser))
}

fn ready(browser: &mut Chromium) {
    browser.evaluate(&until("document.documentElement.dataset.ready !== undefined"));
}

fn open(browser: &mut Chromium, url: &str) {
    // Another address: one that differs in what is behind the # only is not loaded anew.
    browser.ask("Page.navigate", &json!({ "url": "about:blank" }));
    browser.ask("Page.navigate", &json!({ "url": url }));
    browser.evaluate(&until("location.href !== 'about:blank'"));
    ready(browser);
}

/// Chooses these files, as a user does.
fn choose(browser: &mut Chromium, files: &[PathBuf]) {
    let input = browser
        .ask("Runtime.evaluate", &json!({ "expression": "document.querySelector('#files')" }));
    let object = &input["result"]["objectId"];
    browser.ask("DOM.setFileInputFiles", &json!({ "files": files, "objectId": object }));
}

fn set(browser: &mut Chromium, id: &str, value: &str) {
    browser.evaluate(&format!(
        "{{ const e = document.getElementById('{id}'); e.value = {}; e.dispatchEvent(new Event('input', {{ bubbles: true }})); }}",
        json!(value)
    ));
}

fn report(browser: &mut Chromium) -> Value {
    let text = browser.evaluate(
        "document.querySelector('#report').contentDocument.querySelector('#data').textContent",
    );
    serde_json::from_str(text.as_str().expect("a text")).expect("JSON")
}

#[test]
fn the_playground_counts_as_the_tool_and_asks_for_nothing() {
    let Some((site, mut browser)) = site_and_browser() else { return };
    let (policy, log) = example();
    let stricter = policy.replace("650/d", "300/d").replace("= 30", "= 60");
    let scene = Scene::new(&policy);
    scene.write("other.toml", &stricter);
    let log = fs::read(log).expect("reads");
    scene.write("access.log", &log);
    scene.write("access.log.gz", gzip(&log));

    open(&mut browser, &site.url);
    let loaded = site.asked();
    browser.events.clear();
    choose(&mut browser, &[scene.path("access.log")]);
    browser.evaluate(&until(&of("access.log")));
    let told = scene.replay(&["--json", "access.log"]).exits(0).json();
    assert_eq!(report(&mut browser), told[0]);

    browser.evaluate("document.querySelector('#comparison').open = true");
    set(&mut browser, "other", &stricter);
    choose(&mut browser, &[scene.path("access.log.gz")]);
    browser.evaluate(&until(&of("access.log.gz")));
    let told =
        scene.replay(&["--json", "--compare", "other.toml", "access.log.gz"]).exits(0).json();
    assert_eq!(report(&mut browser), told[0]);

    // The field that a click has emptied names them again if no other is chosen.
    choose(&mut browser, &["access.log", "access.log.gz"].map(|name| scene.path(name)));
    browser.evaluate(&until(
        "document.querySelector('#status').textContent === 'Done: the report of 2 logs stands below.'",
    ));
    let named = browser.evaluate(
        "(() => { const e = document.querySelector('#files'); const names = () => Array.from(e.files, ({ name }) => name).join();
          e.addEventListener('click', (event) => event.preventDefault()); e.click(); const clicked = names();
          e.dispatchEvent(new Event('cancel')); return [clicked, names()]; })()",
    );
    assert_eq!(named, json!(["", "access.log,access.log.gz"]));

    // Its own worker and the page of the report are no requests.
    assert_eq!(site.asked(), loaded, "{:?}", site.asked);
    let asked =
        browser.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
    let asked = asked.filter_map(|event| event["params"]["request"]["url"].as_str());
    let asked =
        asked.filter(|url| !["blob:", "data:", "about:"].iter().any(|own| url.starts_with(own)));
    assert_eq!(asked.collect::<Vec<_>>(), Vec::<&str>::new());
}

#[test]
fn a_policy_is_marked_as_lint_tells_and_shared_without_the_log() {
    let Some((site, mut browser)) = site_and_browser() else { return };
    let wrong = example().0.replace("burst     = 30", "burts     = 30");
    let scene = Scene::new(&wrong);
    open(&mut browser, &site.url);
    set(&mut browser, "policy", &wrong);
    let told = scene.run(&["lint", "policy.toml", "--json"]).exits(2).json();
    let marked = browser.evaluate(
        "[document.querySelector('.editor mark').textContent, document.querySelector('#policy-problems').textContent,
          document.querySelector('#policy').ariaInvalid]",
    );
    assert_eq!(marked[0], "burts     = 30");
    let says = format!(
        "line {}, column {}: {}",
        told[0]["line"],
        told[0]["column"],
        told[0]["message"].as_str().expect("a text")
    );
    assert_eq!([&marked[1], &marked[2]], [&json!(says), &json!("true")]);

    // A column counts characters, and an editor's place does not.
    set(&mut browser, "policy", "# 😀\n\nname = \"😀\" x");
    let before = browser.evaluate(
        "(() => { const e = document.querySelector('#policy'); document.querySelector('#policy-problems button').click();
          return e.value.slice(0, e.selectionStart); })()",
    );
    assert_eq!(before, "# 😀\n\nname = \"😀\" ");

    // A replay that is cancelled leaves nothing, and one of a right policy follows.
    let right = "# größe\n[[limit]]\nname = \"one\"\nkey = [\"ip\"]\nalgorithm = \"gcra\"\nrate = \"1/s\"\n";
    set(&mut browser, "policy", right);
    let cancelled = browser.evaluate(
        "(() => { const shows = () => !document.querySelector('#running').hidden;
          document.querySelector('#example').click(); const ran = shows(); document.querySelector('#cancel').click();
          return [ran, shows(), document.querySelector('#status').textContent, document.querySelector('#report').hidden]; })()",
    );
    assert_eq!(cancelled, json!([true, false, "Cancelled.", true]));
    browser.evaluate(&report_of_example());
    assert_eq!(report(&mut browser)["limits"][0]["name"], "one");

    browser.evaluate("document.querySelector('#share').click()");
    let link = browser.evaluate("document.querySelector('#link').value");
    let link = link.as_str().expect("a link");
    assert!(link.len() < site.url.len() + 30 + right.len() * 3 / 2, "{link}");
    open(&mut browser, link);
    let shown = browser.evaluate(
        "[document.querySelector('#policy').value, document.querySelector('#report').hidden]",
    );
    assert_eq!(shown, json!([right, true]));

    // A mailer may cut a link off or change it: the page takes the whole parts and names the
    // others.
    set(&mut browser, "options", "--ipv6-prefix 56");
    browser.evaluate("document.querySelector('#comparison').open = true");
    set(&mut browser, "other", right);
    browser.evaluate("document.querySelector('#share').click()");
    let link = browser.evaluate("document.querySelector('#link').value");
    let link = link.as_str().expect("a link");
    let (_, hash) = link.split_once('#').expect("a hash");
    let names = ["policy", "other", "options"].map(|name| hash.find(&format!("&{name}=")));
    let [policy, other, options] = names.map(|at| at.expect("a part"));
    let (own, how) = (example().0, "--ipv6-prefix 56");
    for (damaged, told, whole) in [
        (hash.to_owned(), "", json!([right, right, how])),
        (hash[..hash.len() - 1].to_owned(), "its options", json!([right, right, ""])),
        (hash[..options].to_owned(), "its options", json!([right, right, ""])),
        (
            hash[..options - 4].to_owned(),
            "its second policy and its options",
            json!([right, "", ""]),
        ),
        (
            hash[..other - 4].to_owned(),
            "its policy, its second policy, and its options",
            json!([own, "", ""]),
        ),
        (
            hash[..policy].to_owned(),
            "its policy, its second policy, and its options",
            json!([own, "", ""]),
        ),
        // No base64, no UTF-8, and another character.
        (hash.replace("&other=", "&other=*"), "its second policy", json!([right, "", how])),
        (hash.replace("&other=", "&other=_w"), "its second policy", json!([right, "", how])),
        (hash.replacen("&policy=I", "&policy=J", 1), "its policy", json!([own, right, how])),
    ] {
        open(&mut browser, &format!("{}#{damaged}", site.url));
        let shown = browser.evaluate(
            "[document.querySelector('#link-problem').textContent, ['policy', 'other', 'options'].map((id) => document.getElementById(id).value)]",
        );
        let says = format!("The link is damaged: {told} cannot be read.");
        assert_eq!(shown, json!([if told.is_empty() { "" } else { &says }, whole]), "{damaged}");
    }
}

#[test]
fn options_tell_how_a_log_is_read_as_those_of_the_tool_and_are_shared() {
    let Some((site, mut browser)) = site_and_browser() else { return };
    let policy = "[[limit]]\nname = \"tenant\"\nkey = [\"tenant\"]\nalgorithm = \"fixed-window\"\nrate = \"30/h\"\n";
    let scene = Scene::new(policy);
    let json_line = |n| {
        let line = json!({ "client": { "ip": format!("192.0.2.{}", n % 9) }, "ts": 1_772_355_600 + n, "customer": n % 3 });
        format!("{line}\n")
    };
    scene.write("json.log", (0..200).map(json_line).collect::<String>());
    let text_line = |n| {
        format!(
            "192.0.2.1 [01/Mar/2026:09:00:{:02} +0000] \"GET /t/{}/x HTTP/1.1\"\n",
            n % 60,
            n % 5
        )
    };
    scene.write("own.log", (0..200).map(text_line).collect::<String>());
    open(&mut browser, &site.url);
    set(&mut browser, "policy", policy);
    for (log, options) in [
        ("json.log", ["--fields", "ip=client.ip,time=ts", "--identifier", "tenant=customer"]),
        (
            "own.log",
            [
                "--log-format",
                "$remote_addr [$time_local] \"$request\"",
                "--identifier",
                "tenant=path~^/t/([^/]+)",
            ],
        ),
    ] {
        let words = options.map(|word| format!("'{word}'")).join(" ");
        set(&mut browser, "options", &words);
        choose(&mut browser, &[scene.path(log)]);
        browser.evaluate(&until(&of(log)));
        let told = scene.replay(&[&["--json"], &options[..], &[log]].concat()).exits(0).json();
        assert!(told[0]["denied"].as_u64() > Some(0), "{told:?}");
        assert_eq!(report(&mut browser), told[0]);

        browser.evaluate("document.querySelector('#share').click()");
        let link = browser.evaluate("document.querySelector('#link').value");
        open(&mut browser, link.as_str().expect("a link"));
        assert_eq!(browser.evaluate("document.querySelector('#options').value"), words);
        choose(&mut browser, &[scene.path(log)]);
        browser.evaluate(&until(&of(log)));
        assert_eq!(report(&mut browser), told[0]);
    }

    for wrong in [
        "--fields ip",
        "--identifier tenant",
        "--format ngnix",
        "--colour",
        "--fields a --format csv",
    ] {
        set(&mut browser, "options", wrong);
        let told = browser.evaluate(
            "[document.querySelector('#options-problem').textContent.split('\\n')[0], document.querySelector('#options').ariaInvalid,
              getComputedStyle(document.querySelector('#options')).borderColor === getComputedStyle(document.querySelector('#options-problem')).color]",
        );
        let words: Vec<_> = wrong.split(' ').collect();
        let ran = scene.replay(&[&words[..], &["own.log"]].concat()).exits(2);
        let says = ran.err.lines().next().and_then(|line| line.strip_prefix("error: "));
        assert_eq!(told, json!([says, "true", true]));
    }
}

#[test]
fn the_frame_is_as_high_as_its_report() {
    let Some((site, mut browser)) = site_and_browser() else { return };
    let scene = Scene::new("");
    scene.write(
        "short.log",
        "192.0.2.1 - - [01/Mar/2026:09:00:01 +0000] \"GET / HTTP/1.1\" 200 1\n",
    );
    let fits = until(
        "((e) => Math.abs(e.clientHeight - e.contentDocument.querySelector('main').getBoundingClientRect().height) < 1)
          (document.querySelector('#report'))",
    );
    let fold = |is_open: bool| {
        format!(
            "for (const e of document.querySelector('#report').contentDocument.querySelectorAll('details')) e.open = {is_open}; 0"
        )
    };
    let resize = |browser: &mut Chromium, width: u64| {
        let screen =
            json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false });
        browser.ask("Emulation.setDeviceMetricsOverride", &screen);
    };
    open(&mut browser, &site.url);
    resize(&mut browser, 360);
    browser.evaluate(&report_of_example());
    browser.evaluate(&fits);
    for step in [&fold(true), &fold(false)] {
        browser.evaluate(step);
        browser.evaluate(&fits);
    }
    resize(&mut browser, 1_200);
    browser.evaluate(&fits);
    choose(&mut browser, &[scene.path("short.log")]);
    browser.evaluate(&until(&of("short.log")));
    browser.evaluate(&fits);
}

#[test]
fn a_replay_that_fails_tells_why_and_leaves_no_report_of_another() {
    let Some((site, mut browser)) = site_and_browser() else { return };
    let (policy, log) = example();
    let scene = Scene::new(&policy);
    scene.write("unknown.log", "nothing to be seen\n".repeat(20));
    scene.write("cut.gz", &gzip(&fs::read(log).expect("reads"))[..20_000]);
    open(&mut browser, &site.url);
    browser.evaluate(&report_of_example());
    for (log, has_report) in [("unknown.log", false), ("cut.gz", true)] {
        browser.evaluate("document.querySelector('#status').className = ''");
        choose(&mut browser, &[scene.path(log)]);
        browser.evaluate(&until("document.querySelector('#status').className === 'wrong'"));
        let shown = browser.evaluate(
            "[document.querySelector('#status').textContent, !document.querySelector('#report').hidden, !document.querySelector('#save').hidden]",
        );
        let ran = scene.replay(&["--json", log]).exits(2);
        let says = ran.err.lines().last().and_then(|line| line.strip_prefix("error: "));
        assert_eq!(shown, json!([says, has_report, has_report]));
        if has_report {
            browser.evaluate(&until(&with_name(log)));
            assert_eq!(report(&mut browser), ran.json()[0]);
        }
    }

    // Beside the place for it, and on the report: a browser would leave the page for the file.
    for (log, target) in
        [("beside.log", "window"), ("onto.log", "document.querySelector('#report').contentWindow")]
    {
        let dropped = browser.evaluate(&format!(
            "(() => {{ const dataTransfer = new DataTransfer(); dataTransfer.items.add(new File(['192.0.2.1 - - [01/Mar/2026:09:00:01 +0000] \"GET / HTTP/1.1\" 200 1'], '{log}'));
              return {target}.dispatchEvent(new DragEvent('drop', {{ dataTransfer, cancelable: true }})); }})()"
        ));
        assert_eq!(dropped, json!(false), "{target}");
        browser.evaluate(&until(&of(log)));
        assert_eq!(report(&mut browser)["requests"], 1, "{target}");
    }
}

#[test]
fn the_playground_fits_light_and_dark_wide_and_narrow_and_obeys_keys() {
    let Some((site, mut browser)) = site_and_browser() else { return };
    browser.open_each_way(&site.url, |browser, shown| {
        ready(browser);
        let drawn = "document.querySelector('#drawing').shadowRoot.querySelector('desc').textContent";
        let before = browser.evaluate(drawn);
        browser.evaluate("scene.elements.rate.value = 20; scene.dispatchEvent(new Event('input'))");
        assert_ne!(browser.evaluate(drawn), before, "{shown}");
        // A click in the middle of the time axis.
        let clicked = browser.evaluate(&format!(
            "(() => {{ scene.elements.pattern.value = 'none'; scene.dispatchEvent(new Event('input'));
              const {{ left, width }} = document.querySelector('#drawing').shadowRoot.querySelector('svg').getBoundingClientRect();
              document.querySelector('#drawing').dispatchEvent(new MouseEvent('click', {{ clientX: left + width * .6 }}));
              return {drawn}; }})()"
        ));
        assert!(clicked.as_str().is_some_and(|text| text.contains("1 of 1 requests admitted")), "{shown}: {clicked}");
        browser.evaluate(&report_of_example());
        assert_eq!(browser.evaluate(WRONG), json!([]), "{shown}");
        let inside = browser.evaluate("(() => { const e = document.querySelector('#report').contentDocument.documentElement; return e.scrollWidth - e.clientWidth; })()");
        assert_eq!(inside, 0, "{shown}: the report");
        let papers = browser.evaluate("[document, document.querySelector('#report').contentDocument].map((d) => getComputedStyle(d.body).backgroundColor)");
        assert_eq!(papers[0], papers[1], "{shown}");

        // What the key Tab reaches: every control that shows.
        browser.evaluate("scrollTo(0, 0)");
        let all = "[...document.querySelectorAll('button, input, select, textarea, summary, a[href]')].filter(e => e.checkVisibility())";
        browser.evaluate(&format!("window.missing = new Set({all}); document.addEventListener('focusin', (e) => missing.delete(e.target)); {all}[0].focus(); 0"));
        let count = browser.evaluate(&format!("{all}.length")).as_u64().expect("a number");
        assert!(count > 15, "{count} controls");
        for _ in 0..count + 2 {
            for kind in ["keyDown", "keyUp"] {
                let key = json!({ "type": kind, "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9 });
                browser.ask("Input.dispatchKeyEvent", &key);
            }
        }
        let missing = browser.evaluate("[...missing].map(e => e.outerHTML)");
        assert_eq!(missing, json!([]), "{shown}");
        let nameless = browser.evaluate(&format!("{all}.filter(e => !e.labels?.length && !e.textContent.trim()).map(e => e.outerHTML)"));
        assert_eq!(nameless, json!([]), "{shown}");
        true
    });
}
