//! A headless Chromium that is asked over a pipe, by its debugging protocol.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

/// How long an answer may take before the test fails instead of waiting for ever.
const PATIENCE: Duration = Duration::from_secs(120);

/// Counts the colours of a picture, and how light it is, from 0 to 255.
const COLOURS: &str = r#"(async (picture) => {
  const image = new Image();
  image.src = "data:image/png;base64," + picture;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  const colours = new Set();
  let sum = 0;
  for (let i = 0; i < data.length; i += 4) {
    colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
    sum += data[i] + data[i + 1] + data[i + 2];
  }
  return { width: image.width, colours: colours.size, lightness: Math.round(sum * 4 / 3 / data.length) };
})"#;

/// A running browser with one page. It ends when it is dropped.
pub struct Chromium {
    child: Child,
    stdin: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    last_id: u64,
    /// What the page has told without being asked.
    pub events: Vec<Value>,
    _profile: TempDir,
}

/// The browser that `RATELIMIT_CHROMIUM` names, or one on `PATH`. Without one, a line says that the
/// test is skipped.
pub fn find_browser() -> Option<PathBuf> {
    let told = env::var_os("RATELIMIT_CHROMIUM").map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let places = env::split_paths(&path).flat_map(|folder| names.map(|name| folder.join(name)));
    let browser = told.or_else(|| places.into_iter().find(|place| place.is_file()));
    if browser.is_none() {
        // A test that passes shows nothing that is printed by a macro.
        let skipped = "skipped: no chromium here (set RATELIMIT_CHROMIUM to one)";
        writeln!(io::stderr(), "{skipped}").expect("writes");
    }
    browser
}

impl Chromium {
    /// Starts the program.
    pub fn start(program: &PathBuf) -> Self {
        let profile = TempDir::new().expect("a directory");
        // The browser reads its third file and writes its fourth.
        let script = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-extensions"])
            .args(["--remote-debugging-pipe", "about:blank"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh runs");
        let stdin = child.stdin.take().expect("a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, messages) = channel();
        thread::spawn(move || {
            for message in stdout.split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { break };
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let mut this = Self {
            child,
            stdin,
            messages,
            session: None,
            last_id: 0,
            events: Vec::new(),
            _profile: profile,
        };
        let page = this.ask("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": page["targetId"], "flatten": true });
        let session = this.ask("Target.attachToTarget", &attach);
        this.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            this.ask(&format!("{domain}.enable"), &json!({}));
        }
        this
    }

    /// Sends a command and returns its result.
    pub fn ask(&mut self, method: &str, params: &Value) -> Value {
        self.last_id += 1;
        let id = self.last_id;
        let mut command = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        self.stdin.write_all(format!("{command}\0").as_bytes()).expect("the browser listens");
        loop {
            let message = self.next();
            if message["id"] == id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events.push(message);
        }
    }

    fn next(&self) -> Value {
        self.messages.recv_timeout(PATIENCE).expect("the browser answers")
    }

    /// Opens a page light and dark, narrow and wide, and looks at it each time: what it looks like
    /// counts if that says so.
    pub fn open_each_way(&mut self, url: &str, look: impl Fn(&mut Self, &str) -> bool) {
        for (scheme, width) in [("light", 360), ("light", 1_280), ("dark", 360), ("dark", 1_280)] {
            let shown = format!("{url}, {scheme}, {width} px");
            let size =
                json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
            self.ask("Emulation.setDeviceMetricsOverride", &size);
            let media = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
            self.ask("Emulation.setEmulatedMedia", &json!({ "features": media }));
            self.events.clear();
            self.ask("Page.navigate", &json!({ "url": url }));
            while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
                let message = self.next();
                self.events.push(message);
            }
            if look(self, &shown) {
                let [wide, colours, lightness] = self.look();
                assert!(wide == width && colours > 10, "{shown}: {wide} px, {colours} colours");
                let as_wanted = if scheme == "dark" { lightness < 120 } else { lightness > 190 };
                assert!(as_wanted, "{shown}: a lightness of {lightness}");
            }
        }
    }

    /// The value of a JavaScript expression in the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.ask("Runtime.evaluate", &params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// What the page looks like: the width of its picture, how many colours that has, and how light
    /// it is, from 0 to 255.
    fn look(&mut self) -> [u64; 3] {
        let shot = self.ask("Page.captureScreenshot", &json!({ "format": "png" }));
        let seen = self.evaluate(&format!("{COLOURS}({})", shot["data"]));
        ["width", "colours", "lightness"].map(|field| seen[field].as_u64().expect(field))
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
