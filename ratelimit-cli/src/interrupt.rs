//! [`Interrupt`]: Ctrl-C as a flag, so that a replay can end cleanly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ratelimit_replay::failure::Failure;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// The exit code after an interrupt, as in shells.
pub(crate) const EXIT_CODE: u8 = 130;

/// Whether the user wants the tool to stop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches SIGINT and SIGTERM from now on. A second signal ends the tool at once, as the first
    /// does before this: a pipe may take for ever to open.
    pub(crate) fn catch(&self) -> Result<(), Failure> {
        for signal in [SIGINT, SIGTERM] {
            let code = EXIT_CODE.into();
            flag::register_conditional_shutdown(signal, code, Arc::clone(&self.0))
                .and_then(|_| flag::register(signal, Arc::clone(&self.0)))
                .map_err(|error| Failure::input(format!("signals cannot be caught: {error}")))?;
        }
        Ok(())
    }

    /// The failure of a tool that has been interrupted.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.is_raised() { Err(Failure::Interrupted) } else { Ok(()) }
    }

    /// Whether the flag has been raised.
    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
