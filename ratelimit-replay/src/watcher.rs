//! [`Watcher`]: looks on while inputs are read, and may end a replay.

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
}

impl Watcher for () {}
