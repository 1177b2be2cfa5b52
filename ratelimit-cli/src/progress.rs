//! The progress bar, which appears only on a terminal and only for long inputs.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressState, ProgressStyle};

use crate::input::Progress;

/// A file shorter than this is read before a bar would be noticed.
const LARGE_BYTES: u64 = 8 << 20;
/// How long an input of unknown length may take before the bar appears.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time after which a speed is meaningful.
const SETTLED: Duration = Duration::from_secs(1);
/// The number of lines between two looks at the clock.
const LINES: u64 = 1 << 13;

/// The progress of a replay, on a terminal at standard error.
#[derive(Debug)]
pub(crate) struct Bar {
    progress: Progress,
    drawn: Option<ProgressBar>,
    started: Instant,
    terminal: bool,
    silent: bool,
}

impl Bar {
    pub(crate) fn new(progress: Progress) -> Self {
        let terminal = io::stderr().is_terminal();
        Self { progress, drawn: None, started: Instant::now(), terminal, silent: false }
    }

    /// The progress of a second pass, which repeats no complaint about a line.
    pub(crate) fn silent(progress: Progress) -> Self {
        Self { silent: true, ..Self::new(progress) }
    }

    /// Called for every line.
    pub(crate) fn line(&mut self, number: u64) {
        if !self.terminal || !number.is_multiple_of(LINES) {
            return;
        }
        if self.drawn.is_none() && self.worth_it() {
            self.drawn = Some(draw(self.progress.length, self.started));
        }
        if let Some(bar) = &self.drawn {
            bar.set_position(self.progress.bytes());
        }
    }

    /// Writes a line to standard error, above the bar.
    pub(crate) fn say(&self, line: &str) {
        if self.silent {
            return;
        }
        // With standard error closed, the line has nowhere to go.
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

fn draw(length: Option<u64>, started: Instant) -> ProgressBar {
    let (bar, template) = match length {
        Some(length) => {
            (ProgressBar::new(length), "{bar:40} {percent:>3}%  {bytes} of {total_bytes}{speed}")
        }
        None => (ProgressBar::new_spinner(), "{spinner} {bytes} read{speed}"),
    };
    let write_speed = move |state: &ProgressState, out: &mut dyn fmt::Write| {
        // A bar that cannot be written is dropped.
        let _ = out.write_str(&speed(state.pos(), length, started.elapsed()));
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.with_key("speed", write_speed)),
        Err(_) => bar,
    }
}

/// The speed since the beginning and the remaining time. Empty in the first moments, which predict nothing.
fn speed(bytes: u64, length: Option<u64>, elapsed: Duration) -> String {
    if elapsed < SETTLED || bytes == 0 {
        return String::new();
    }
    let (bytes, us) = (u128::from(bytes), elapsed.as_micros());
    let per_second = u64::try_from(bytes * 1_000_000 / us).unwrap_or(u64::MAX);
    let average = format!(", {}/s", HumanBytes(per_second));
    let Some(length) = length else { return average };
    let rest = u128::from(length).saturating_sub(bytes);
    let seconds = u64::try_from((rest * us / bytes).div_ceil(1_000_000)).unwrap_or(u64::MAX);
    format!("{average}, {} to go", HumanDuration(Duration::from_secs(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_is_an_average_and_appears_after_a_second() {
        let second = Duration::from_secs(1);
        assert_eq!(speed(8 << 20, Some(16 << 20), second / 1_000), "");
        assert_eq!(speed(0, None, second), "");
        assert_eq!(speed(6 << 20, None, second * 2), ", 3.00 MiB/s");
        assert_eq!(speed(2 << 20, Some(8 << 20), second), ", 2.00 MiB/s, 3 seconds to go");
        assert_eq!(speed(9 << 20, Some(8 << 20), second), ", 9.00 MiB/s, 0 seconds to go");
    }
}
