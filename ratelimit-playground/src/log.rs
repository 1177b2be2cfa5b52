//! A log of the user's: read from the browser, replayed and reported.

use std::cell::RefCell;
use std::io::{self, Read};
use std::path::PathBuf;
use std::rc::Rc;

use ratelimit_core::{AnyAlgorithm, Limits, ManualClock, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::input::NamedInput;
use ratelimit_replay::replay::{Judge, Reading, Replay, ReplayedRequests};
use ratelimit_replay::summary::Report;
use ratelimit_replay::watcher::Watcher;
use ratelimit_replay::{arguments, policy, report, text};
use serde::Deserialize;
use serde_json::{Value, json};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

/// The names of the policies, as in the guide's examples of the tool.
const POLICY: &str = "policy.toml";
const OTHER: &str = "other.toml";

/// The most keys of a store, which no log in a browser reaches.
const KEYS: usize = 16 << 20;

#[wasm_bindgen]
extern "C" {
    /// The files of a request, as a worker reads them.
    #[derive(Clone)]
    pub type Files;

    /// The bytes of a file from here on, as many as are convenient; none at its end.
    #[wasm_bindgen(method, catch)]
    fn read(this: &Files, file: u32, offset: f64) -> Result<Vec<u8>, JsValue>;

    #[wasm_bindgen(js_namespace = performance, js_name = now)]
    fn now_ms() -> f64;
}

/// A file of the browser.
struct Bytes {
    files: Files,
    file: u32,
    /// A double, as JavaScript counts: exact up to 2^53.
    offset: f64,
    chunk: io::Cursor<Vec<u8>>,
}

impl Read for Bytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let taken = self.chunk.read(buffer)?;
        if taken > 0 || buffer.is_empty() {
            return Ok(taken);
        }
        let chunk = self.files.read(self.file, self.offset);
        let chunk = chunk.map_err(|_| {
            let kind = io::ErrorKind::PermissionDenied;
            io::Error::new(kind, "the browser refuses; if it has changed, choose it again")
        })?;
        self.offset += f64::from(u32::try_from(chunk.len()).unwrap_or(u32::MAX));
        self.chunk = io::Cursor::new(chunk);
        self.chunk.read(buffer)
    }
}

/// Keeps what is said of the lines.
struct Said(Rc<RefCell<Vec<String>>>);

impl Watcher for Said {
    fn say(&self, line: &str) {
        self.0.borrow_mut().push(line.to_owned());
    }
}

/// What to replay, and how.
#[derive(Debug, Deserialize)]
pub(crate) struct Request {
    policy: String,
    /// The policy to compare with.
    other: Option<String>,
    /// The names of the files.
    files: Vec<String>,
    /// How they are read, as the tool's options say it.
    options: String,
}

impl Request {
    fn inputs(&self, files: &Files) -> Vec<NamedInput> {
        let input = |(file, name): (u32, &String)| {
            let chunk = io::Cursor::default();
            let bytes = Bytes { files: files.clone(), file, offset: 0.0, chunk };
            NamedInput { name: PathBuf::from(name), bytes: Box::new(bytes) }
        };
        (0..).zip(&self.files).map(input).collect()
    }

    /// The page of the report, if something was decided; what was said of lines; and the error that
    /// ended the replay, if one did.
    pub(crate) fn replay(&self, files: &Files) -> Result<Value, Failure> {
        let begun_ms = now_ms();
        let said = Rc::new(RefCell::new(Vec::new()));
        let limits = policy::parse(POLICY, &self.policy)?;
        let other = self.other.as_deref().map(|text| policy::parse(OTHER, text)).transpose()?;
        let how = Reading { keeps_lines: true, ..Reading::default() };
        let watcher = Box::new(Said(Rc::clone(&said)));
        let inputs = self.inputs(files);
        let format = arguments::parse(&self.options).map_err(Failure::input)?;
        let mut requests = ReplayedRequests::new(inputs, &format, watcher, how);
        let (limits, note) = requests.applicable(limits)?;
        let other = other.map(|other| requests.applicable(other)).transpose()?;
        let this = limiter(&limits);
        let judge = Judge::new(&this, false, false).observing();
        let (other, other_note) = other.unzip();
        let other = other.as_ref().map(limiter);
        let replay = Replay {
            this: judge.map_err(|error| Failure::input(error.to_string()))?,
            other: other.as_ref().map(|other| Judge::new(other, false, false)),
            requests,
            decisions: None,
        };
        let outcome = pollster::block_on(replay.run());
        let other_note = other_note.flatten().map(|note| format!("{OTHER}: {note}"));
        let mut notes = outcome.notes(&limits, [note, other_note].into_iter().flatten());
        notes.extend(outcome.warnings(POLICY, other.is_some().then_some(OTHER)));
        notes.extend(outcome.ending());
        let decisions = text::plural(outcome.tally.decisions(), "decision", "decisions");
        let speed = format!("{decisions} in {:.1} s in this browser", (now_ms() - begun_ms) / 1e3);
        let comparison = outcome.comparison.as_ref().map(|comparison| (OTHER, comparison));
        let title = outcome.title(&self.files, POLICY);
        let told = Report { title, notes, tally: &outcome.tally, comparison, speed };
        let error = outcome.ended.as_ref().err().map(ToString::to_string);
        let page = (error.is_none() || !outcome.is_void).then(|| report::page(&told));
        Ok(json!({ "page": page, "said": *said.borrow(), "error": error }))
    }
}

fn limiter(limits: &Limits<AnyAlgorithm>) -> RateLimiter<MemoryStore<AnyAlgorithm, ManualClock>> {
    // A replay decides at the times of its log.
    let store = MemoryStore::builder().capacity(KEYS).clock(ManualClock::default()).build();
    RateLimiter::new(limits.clone(), store).allow_unlimited()
}
