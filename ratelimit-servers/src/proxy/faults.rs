//! The requested faults of a proxy, and its open connections.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state that all threads of a proxy share.
#[derive(Debug, Default)]
pub(super) struct Faults {
    state: Mutex<FaultState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct FaultState {
    pub(super) swallow: CountedFault,
    pub(super) cut: CountedFault,
    pub(super) hangs: bool,
    /// The connections with a lower number are silent.
    pub(super) audible_from: usize,
    pub(super) delay: Range<Duration>,
    pub(super) accepts: bool,
    pub(super) accepted: usize,
    /// Both ends of every open connection, the client's first; the server's may still be missing.
    open: HashMap<usize, Vec<TcpStream>>,
}

/// A fault that happens to a number of requests that contain a pattern.
#[derive(Debug, Default)]
pub(super) struct CountedFault {
    pattern: Vec<u8>,
    left: usize,
    pub(super) done: usize,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Passes,
    /// The request passes, and its reply does not.
    ReplySwallowed,
    Cut,
}

impl CountedFault {
    pub(super) fn set(&mut self, pattern: &str, left: usize) {
        (self.pattern, self.left) = (pattern.as_bytes().to_vec(), left);
    }

    /// Whether the fault happens to this request.
    fn takes(&mut self, request: &[u8]) -> bool {
        let pattern = &self.pattern[..];
        let matches =
            || pattern.is_empty() || request.windows(pattern.len()).any(|part| part == pattern);
        let takes = self.left > 0 && matches();
        self.left -= usize::from(takes);
        takes
    }
}

impl Faults {
    /// Changes which connections wait.
    pub(super) fn change(&self, change: impl FnOnce(&mut FaultState)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    pub(super) fn fate(&self, request: &[u8]) -> Fate {
        let mut state = self.state();
        if state.cut.takes(request) {
            state.cut.done += 1;
            Fate::Cut
        } else if state.swallow.takes(request) {
            Fate::ReplySwallowed
        } else {
            Fate::Passes
        }
    }

    /// Waits out the time for which the proxy hangs.
    pub(super) fn wait_out(&self) {
        drop(self.changed.wait_while(self.state(), |state| state.hangs));
    }

    /// Waits until bytes of this connection may pass.
    pub(super) fn wait_to_pass(&self, id: usize) {
        let is_stuck = |state: &mut FaultState| state.hangs || id < state.audible_from;
        let state = self.changed.wait_while(self.state(), is_stuck);
        let delay = state.unwrap_or_else(PoisonError::into_inner).delay.clone();
        if !delay.is_empty() {
            let width = delay.end.saturating_sub(delay.start);
            std::thread::sleep(delay.start + width.mul_f64(fastrand::f64()));
        }
    }

    /// Registers an accepted connection under a new number.
    pub(super) fn accepted_one(&self, client: TcpStream) -> usize {
        let mut state = self.state();
        let id = state.accepted;
        state.accepted += 1;
        state.open.insert(id, vec![client]);
        id
    }

    /// Registers the server's end of a connection, unless the connection has been cut meanwhile.
    pub(super) fn connected(&self, id: usize, server: TcpStream) -> bool {
        let mut state = self.state();
        let ends = state.open.get_mut(&id);
        ends.map(|ends| ends.push(server)).is_some()
    }

    pub(super) fn cut_one(&self, id: usize) {
        if let Some(ends) = self.state().open.remove(&id) {
            shut(&ends);
        }
    }

    pub(super) fn cut_all(&self) {
        self.state().open.drain().for_each(|(_, ends)| shut(&ends));
    }

    pub(super) fn state(&self) -> MutexGuard<'_, FaultState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shut(ends: &[TcpStream]) {
    for end in ends {
        // An error means that the end is already shut.
        let _ = end.shutdown(Shutdown::Both);
    }
}
