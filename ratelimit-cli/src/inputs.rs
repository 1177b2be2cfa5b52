//! What the tool reads: policies, records and logs, from files and from standard input.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use ratelimit_core::{AnyAlgorithm, Limits};
use ratelimit_replay::failure::Failure;
use ratelimit_replay::input::{Batch, Batches, NamedInput};
use ratelimit_replay::policy;
use ratelimit_replay::records::{self, GivenRecord};
use ratelimit_replay::replay::{Format, Reading, ReplayedRequests};
use ratelimit_replay::watcher::Watcher;
use same_file::Handle;

use crate::interrupt::Interrupt;

/// The most batches that wait to be decided: enough to keep both threads busy, and little memory.
const BATCHES: usize = 8;
/// How often a replay that waits for input checks the interrupt.
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

/// The requests of the inputs of these names; `-` is standard input. What is done with them stands
/// before the bar, if they are read several times.
pub(crate) fn requests(
    what: &'static str,
    paths: &[PathBuf],
    format: &Format,
    interrupt: &Interrupt,
    how: Reading,
) -> Result<ReplayedRequests, Failure> {
    let bar = ProgressBar::no_length().with_prefix(what);
    let mut inputs = Vec::with_capacity(paths.len());
    let mut total = Some(0_u64);
    let mut taken = Vec::with_capacity(paths.len());
    for path in paths {
        let id = identity(path);
        if id.is_some() && taken.contains(&id) {
            let what = "is named twice, and its requests would count twice; name it once";
            return Err(Failure::input(format!("INPUT {}: {what}", path.display())));
        }
        taken.push(id);
        let (input, length) = open(path)?;
        total = total.zip(length).map(|(total, length)| total.saturating_add(length));
        inputs.push(NamedInput { name: path.clone(), bytes: Box::new(bar.wrap_read(input)) });
    }
    show_progress(&bar, total);
    let terminal = Terminal { bar, interrupt: interrupt.clone() };
    Ok(ReplayedRequests::new(inputs, format, Box::new(terminal), how))
}

/// What identifies a file by whatever name; `None` for what cannot be overwritten, such as a
/// terminal.
pub(crate) fn identity(path: &Path) -> Option<Handle> {
    Some(path).filter(|path| path.is_file()).and_then(|path| Handle::from_path(path).ok())
}

/// Lets a bar show how much is read of so many bytes, in 80 columns.
fn show_progress(bar: &ProgressBar, total: Option<u64>) {
    let template = match total {
        Some(_) => "{prefix}{bar:20} {percent:>3}% of {total_bytes}, {bytes_per_sec}, {eta} to go",
        None => "{prefix}{spinner} {bytes} read, {bytes_per_sec}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_length(total.unwrap_or_default());
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

    /// A separate thread reads, decompresses and parses an input: waiting for a slow pipe then
    /// never delays an interrupt, and a second processor has its share.
    fn read(&self, input: Batches) -> io::Result<Box<dyn Iterator<Item = Batch>>> {
        let (sender, batches) = sync_channel(BATCHES);
        let read = move || {
            for batch in input {
                if sender.send(batch).is_err() {
                    break; // the replay has ended
                }
            }
        };
        thread::Builder::new().name("input".to_owned()).spawn(read)?;
        Ok(Box::new(ReadAhead { batches, interrupt: self.interrupt.clone() }))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// What a thread has read.
struct ReadAhead {
    batches: Receiver<Batch>,
    interrupt: Interrupt,
}

impl Iterator for ReadAhead {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        loop {
            match self.batches.recv_timeout(LOOK_UP) {
                Ok(batch) => return Some(batch),
                Err(RecvTimeoutError::Disconnected) => return None,
                // The replay checks the interrupt before it trusts the end of the input.
                Err(RecvTimeoutError::Timeout) if self.interrupt.is_raised() => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// The input at this path, and its length, if it has one; `-` is standard input.
fn open(path: &Path) -> Result<(Box<dyn Read + Send>, Option<u64>), Failure> {
    if is_dash(path) {
        return Ok((Box::new(io::stdin()), None));
    }
    let refuse = |error: io::Error| {
        Failure::input(format!(
            "{}: the input cannot be read: {error}; name an access log or a trace, or `-`",
            path.display()
        ))
    };
    let file = File::open(path).map_err(refuse)?;
    let metadata = file.metadata().map_err(refuse)?;
    if metadata.is_dir() {
        return Err(refuse(io::ErrorKind::IsADirectory.into()));
    }
    let length = metadata.is_file().then_some(metadata.len());
    Ok((Box::new(file), length))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use indicatif::{ProgressDrawTarget, TermLike};

    use super::*;

    /// A wide terminal, and what was written on it.
    #[derive(Clone, Debug, Default)]
    struct Wide(Arc<Mutex<Vec<String>>>);

    impl TermLike for Wide {
        fn width(&self) -> u16 {
            200
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, line: &str) -> io::Result<()> {
            self.write_str(line)
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().expect("no panic").push(text.trim_end().to_owned());
            Ok(())
        }

        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_fits_80_columns_and_has_a_share_a_rate_and_an_end() {
        for (total, parts) in [
            (Some(1_047_552 << 20), &["spread: █", "10% of 1023.00 GiB", "/s, ", " to go"][..]),
            (None, &["102.30 GiB read, ", "/s"]),
        ] {
            let terminal = Wide::default();
            let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
            let bar = ProgressBar::with_draw_target(None, target);
            let bar = bar.with_prefix("spread: ");
            show_progress(&bar, total);
            bar.set_position((1_047_552 << 20) / 10);
            bar.tick();
            bar.force_draw();
            let written = terminal.0.lock().expect("no panic").clone();
            // As wide as they get at any speed.
            let widest = |line: &String| {
                let chars = |text: &str| text.chars().count();
                let rate = line.split(", ").find(|part| part.ends_with("/s")).map_or(0, chars);
                chars(line) - rate + chars("1023.99 GiB/s") + chars("59m") - chars("0s")
            };
            assert!(written.iter().map(widest).max() <= Some(80), "{written:?}");
            let has = |line: &String| parts.iter().all(|part| line.contains(part));
            assert!(written.iter().any(has), "{written:?}");
        }
    }
}
