//! [`Watcher`]: looks on while inputs are read, and may end a replay.

use std::io;

use crate::input::{Batch, Batches};

/// Looks on while inputs are read, and may end a replay. `()` does neither.
pub trait Watcher {
    /// Whether the replay is to end now, with what was decided so far.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// Shows a line about the inputs: which line of theirs is skipped, and why.
    fn say(&self, line: &str) {
        let _ = line;
    }

    /// Begins to read an input: by default as it is asked for. A thread may read ahead.
    ///
    /// # Errors
    ///
    /// There is no thread.
    fn read(&self, input: Batches) -> io::Result<Box<dyn Iterator<Item = Batch>>> {
        Ok(Box::new(input))
    }
}

impl Watcher for () {}
