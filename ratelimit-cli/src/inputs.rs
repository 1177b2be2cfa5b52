//! What the tool reads: policies, records and logs, from files and from standard input.

use std::fs::{self, File};
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use ratelimit_core::{AnyAlgorithm, Limits};
use ratelimit_replay::failure::Failure;
use ratelimit_replay::input::{NamedInput, decompressed};
use ratelimit_replay::policy;
use ratelimit_replay::records::{self, GivenRecord};
use ratelimit_replay::replay::{Format, Reading, ReplayedRequests};
use ratelimit_replay::watcher::Watcher;

use crate::interrupt::Interrupt;

const CHUNK_BYTES: usize = 128 * 1024;
/// The most chunks in the queue: enough to keep both threads busy, and little memory.
const CHUNKS: usize = 8;
/// How often a reader that waits for input checks the interrupt.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Whether a path stands for standard input or output.
pub(crate) fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The limits of the document at this path; `-` is standard input.
pub(crate) fn policy(path: &Path) -> Result<Limits<AnyAlgorithm>, Failure> {
    let (name, text) = policy_text(path)?;
    policy::parse(&name, &text)
}

/// The document at this path, and its name for people.
pub(crate) fn policy_text(path: &Path) -> Result<(String, String), Failure> {
    let stdin = is_dash(path);
    let name = if stdin { Path::new("standard input") } else { path }.display().to_string();
    let text = text(path).map_err(|error| {
        Failure::input(format!("{name}: the policy cannot be read: {error}; name a TOML file"))
    })?;
    Ok((name, text))
}

/// The records of a file, which are all of these limits; `-` is standard input.
pub(crate) fn records(
    path: &Path,
    limits: &Limits<AnyAlgorithm>,
) -> Result<Vec<GivenRecord>, Failure> {
    let name = format!("--records {}", path.display());
    let text = text(path).map_err(|error| {
        Failure::input(format!(
            "{name}: cannot be read: {error}; name a file of what ratelimit record list --json prints"
        ))
    })?;
    records::read(&name, &text, limits)
}

fn text(path: &Path) -> io::Result<String> {
    if is_dash(path) { io::read_to_string(io::stdin()) } else { fs::read_to_string(path) }
}

/// The requests of the inputs of these names; `-` is standard input.
pub(crate) fn requests(
    paths: &[PathBuf],
    format: &Format,
    interrupt: &Interrupt,
    how: Reading,
) -> Result<ReplayedRequests, Failure> {
    let bar = ProgressBar::no_length();
    let mut inputs = Vec::with_capacity(paths.len());
    let mut total = Some(0_u64);
    for path in paths {
        let (source, length) = InputSource::open(path, interrupt.clone(), &bar)?;
        total = total.zip(length).map(|(total, length)| total.saturating_add(length));
        inputs.push(NamedInput { name: path.clone(), bytes: Box::new(source) });
    }
    let template = match total {
        Some(_) => "{bar:40} {percent:>3}%  {bytes} of {total_bytes}, {bytes_per_sec}, {eta} to go",
        None => "{spinner} {bytes} read, {bytes_per_sec}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_length(total.unwrap_or_default());
    let terminal = Terminal { bar, interrupt: interrupt.clone() };
    Ok(ReplayedRequests::new(inputs, format, Box::new(terminal), how))
}

/// The user at a terminal.
struct Terminal {
    /// How far the inputs have been read, on standard error; hidden where that is no terminal.
    bar: ProgressBar,
    interrupt: Interrupt,
}

impl Watcher for Terminal {
    fn is_interrupted(&self) -> bool {
        self.interrupt.is_raised()
    }

    fn say(&self, line: &str) {
        // With standard error closed, the line has nowhere to go.
        self.bar.suspend(|| drop(writeln!(io::stderr(), "{line}")));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The decompressed bytes of an input.
///
/// A separate thread reads and decompresses them: waiting for a slow pipe then never delays an
/// interrupt, and decompression uses a second processor.
struct InputSource {
    chunks: Receiver<io::Result<Vec<u8>>>,
    chunk: Cursor<Vec<u8>>,
    interrupt: Interrupt,
}

impl InputSource {
    /// Opens the input of this name; `-` is standard input. Returns its length, too, if it has one.
    /// The bar shows what has been read, before decompression, as the length is.
    fn open(
        path: &Path,
        interrupt: Interrupt,
        bar: &ProgressBar,
    ) -> Result<(Self, Option<u64>), Failure> {
        let refuse = |error: io::Error| {
            Failure::input(format!(
                "{}: the input cannot be read: {error}; name an access log or a trace, or `-`",
                path.display()
            ))
        };
        let (mut length, mut input): (_, Box<dyn Read + Send>) = (None, Box::new(io::stdin()));
        if !is_dash(path) {
            let file = File::open(path).map_err(refuse)?;
            let metadata = file.metadata().map_err(refuse)?;
            if metadata.is_dir() {
                return Err(refuse(io::ErrorKind::IsADirectory.into()));
            }
            length = metadata.is_file().then_some(metadata.len());
            input = Box::new(file);
        }
        let (input, (sender, chunks)) = (bar.wrap_read(input), sync_channel(CHUNKS));
        let read = move || {
            if let Err(error) = send_chunks(input, &sender) {
                let _ = sender.send(Err(error));
            }
        };
        let thread = thread::Builder::new().name("input".to_owned()).spawn(read);
        thread.map_err(|error| Failure::input(format!("no thread for reading: {error}")))?;
        Ok((Self { chunks, chunk: Cursor::default(), interrupt }, length))
    }
}

impl Read for InputSource {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let taken = self.chunk.read(buffer)?;
            if taken > 0 || buffer.is_empty() {
                return Ok(taken);
            }
            match self.chunks.recv_timeout(LOOK_UP) {
                Ok(chunk) => self.chunk = Cursor::new(chunk?),
                Err(RecvTimeoutError::Disconnected) => return Ok(0),
                // The caller checks the interrupt before it trusts the end of the input.
                Err(RecvTimeoutError::Timeout) if self.interrupt.is_raised() => return Ok(0),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

fn send_chunks(
    input: impl Read + 'static,
    sender: &SyncSender<io::Result<Vec<u8>>>,
) -> io::Result<()> {
    let mut input = decompressed(input)?;
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let length = match input.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        chunk.truncate(length);
        if sender.send(Ok(chunk)).is_err() {
            return Ok(()); // the reader has gone
        }
    }
}
