//! [`Watch`]: a task that looks at a file.
//!
//! It compares the file's contents, once per interval, and asks the operating system for no events.
//! Editors and configuration maps replace a file by renaming another, or by moving a symbolic link:
//! a watch on the old file then hears nothing more, and network file systems send no events at all.
//! A modification time can stay the same. A policy is small, so that reading it costs less than
//! getting these cases right.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, Store};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::{MAX_DOCUMENT_BYTES, PolicyChanges, Reload, ReloadError, parse_limits};

/// A task that replaces the limits when a file changes. It ends when this value is dropped.
#[must_use = "the file is watched until this value is dropped"]
#[derive(Debug)]
pub struct Watch {
    /// A single one, which ends with the set.
    _task: JoinSet<()>,
}

impl<S: Store<AnyAlgorithm> + 'static> Reload<S> {
    /// Looks at this file once per `every`, at least a millisecond, and replaces the limits when it
    /// has changed. `told` gets every change and every error, and the watch goes on if it panics;
    /// [`last_error`](Self::last_error) keeps the last error.
    ///
    /// A changed file is read when it is the same at two looks in a row, so that a file that is
    /// being written is not taken for a policy. A file that is missing at one look is a file that
    /// is being replaced; at two, it is an error. A broken file is an error once, until it changes
    /// again, and the limits in force stay. Call it within a tokio runtime.
    pub fn watch(
        &self,
        path: impl Into<PathBuf>,
        every: Duration,
        mut told: impl FnMut(Result<PolicyChanges, Arc<ReloadError>>) + Send + 'static,
    ) -> Watch {
        let (reload, path) = (self.clone(), path.into());
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut looks = interval(every.max(Duration::from_millis(1)));
            looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            // What was seen at the last look, and at the last one that was acted upon: the text, or
            // why it cannot be read.
            let (mut seen, mut judged) = (None, None);
            loop {
                looks.tick().await;
                let document = document(&path).await;
                let look = Some(document.as_ref().map_err(ToString::to_string).cloned());
                let before = std::mem::replace(&mut seen, look.clone());
                if before != look || judged == look {
                    continue;
                }
                judged = look;
                match reload.attempt(Some(&path), || parse_limits(Some(&path), &document?)) {
                    Ok(changes) if changes.is_empty() => {}
                    // Code of others: its panic, which the panic hook reports, does not end the
                    // watch.
                    said => _ = catch_unwind(AssertUnwindSafe(|| told(said))),
                }
            }
        });
        Watch { _task: task }
    }
}

/// The text of a file that is no longer than a policy may be.
pub(super) async fn document(path: &Path) -> Result<String, ReloadError> {
    let read = async {
        let bytes = tokio::fs::metadata(path).await?.len();
        if bytes > MAX_DOCUMENT_BYTES {
            let most = format!("it has {bytes} bytes, and a policy at most {MAX_DOCUMENT_BYTES}");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, most));
        }
        tokio::fs::read_to_string(path).await
    };
    read.await.map_err(|error| ReloadError::File { path: path.into(), error })
}
