//! [`Bar`]: how far the inputs have been read, and what is said meanwhile.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar on standard error, which is hidden where that is no terminal.
#[derive(Debug)]
pub(crate) struct Bar {
    bar: ProgressBar,
    pub(crate) silent: bool,
}

impl Bar {
    /// The bar of inputs of this length together, if each has one.
    pub(crate) fn new(bar: ProgressBar, length: Option<u64>) -> Self {
        let template = match length {
            Some(_) => {
                "{bar:40} {percent:>3}%  {bytes} of {total_bytes}, {bytes_per_sec}, {eta} to go"
            }
            None => "{spinner} {bytes} read, {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_length(length.unwrap_or_default());
        Self { bar, silent: false }
    }

    /// Writes a line to standard error, above the bar.
    pub(crate) fn say(&self, line: &str) {
        if !self.silent {
            // With standard error closed, the line has nowhere to go.
            self.bar.suspend(|| drop(writeln!(io::stderr(), "{line}")));
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
