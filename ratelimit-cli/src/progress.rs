//! A progress bar for those who wait: only on a terminal, and only if there is something to wait for.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::input::Progress;

/// A file shorter than this is read before anybody looks up.
const LARGE_BYTES: u64 = 8 << 20;
/// How long an input of unknown length may take before a bar appears.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many lines pass between two looks at the clock.
const LINES: u64 = 1 << 13;

/// How far a replay is, for a terminal on standard error.
#[derive(Debug)]
pub(crate) struct Bar {
    progress: Progress,
    drawn: Option<ProgressBar>,
    started: Instant,
    terminal: bool,
}

impl Bar {
    pub(crate) fn new(progress: Progress) -> Self {
        let terminal = io::stderr().is_terminal();
        Self { progress, drawn: None, started: Instant::now(), terminal }
    }

    /// Called for every line.
    pub(crate) fn line(&mut self, number: u64) {
        if !self.terminal || !number.is_multiple_of(LINES) {
            return;
        }
        if self.drawn.is_none() && self.worth_it() {
            self.drawn = Some(draw(self.progress.length));
        }
        if let Some(bar) = &self.drawn {
            bar.set_position(self.progress.bytes());
        }
    }

    /// Writes a line to standard error, above the bar.
    pub(crate) fn say(&self, line: &str) {
        // Where standard error is closed there is nobody to tell.
        let write = || drop(writeln!(io::stderr(), "{line}"));
        match &self.drawn {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.drawn {
            bar.finish_and_clear();
        }
    }

    fn worth_it(&self) -> bool {
        match self.progress.length {
            Some(length) => length > LARGE_BYTES,
            None => self.started.elapsed() > PATIENCE,
        }
    }
}

fn draw(length: Option<u64>) -> ProgressBar {
    let (bar, template) = match length {
        Some(length) => (
            ProgressBar::new(length),
            "{bar:40} {percent:>3}%  {bytes} of {total_bytes}, {bytes_per_sec}, {eta} to go",
        ),
        None => (ProgressBar::new_spinner(), "{spinner} {bytes} read, {bytes_per_sec}"),
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
