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
    pub(super) hold: Hold,
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

/// What is held back: nothing by default.
#[derive(Debug, Default)]
pub(super) struct Hold {
    requests: Option<Vec<u8>>,
    /// To requests that contain this.
    replies: Option<Vec<u8>>,
    /// Whether something waits for the end of this hold.
    pub(super) holds_some: bool,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Passes,
    /// The request passes, and its reply does not.
    ReplySwallowed,
    /// The request passes, and its reply waits for the end of a hold.
    ReplyHeld,
    Cut,
}

impl CountedFault {
    pub(super) fn set(&mut self, pattern: &str, left: usize) {
        (self.pattern, self.left) = (pattern.as_bytes().to_vec(), left);
    }

    /// Whether the fault happens to this request.
    fn takes(&mut self, request: &[u8]) -> bool {
        let takes = self.left > 0 && contains(request, &self.pattern);
        self.left -= usize::from(takes);
        takes
    }
}

impl Hold {
    pub(super) fn requests(pattern: &str) -> Self {
        Self { requests: Some(pattern.as_bytes().to_vec()), ..Self::default() }
    }

    pub(super) fn replies(pattern: &str) -> Self {
        Self { replies: Some(pattern.as_bytes().to_vec()), ..Self::default() }
    }

    /// Whether it holds back these requests, and what comes after them.
    fn holds_requests(&self, bytes: &[u8]) -> bool {
        self.requests.as_ref().is_some_and(|pattern| contains(bytes, pattern))
    }

    /// Whether it holds back the reply to this request.
    fn holds_reply(&self, request: &[u8]) -> bool {
        self.replies.as_ref().is_some_and(|pattern| contains(request, pattern))
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
        } else if state.hold.holds_reply(request) {
            Fate::ReplyHeld
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

    /// Waits for the end of a hold of these requests, or for that of their connection.
    pub(super) fn wait_while_requests_are_held(&self, id: usize, bytes: &[u8]) {
        self.wait_while_held(id, |hold| hold.holds_requests(bytes));
    }

    /// Waits for the end of a hold of replies, or for that of their connection.
    pub(super) fn wait_while_replies_are_held(&self, id: usize) {
        self.wait_while_held(id, |hold| hold.replies.is_some());
    }

    fn wait_while_held(&self, id: usize, holds: impl Fn(&Hold) -> bool) {
        let is_held = |state: &mut FaultState| {
            let is_held = state.open.contains_key(&id) && holds(&state.hold);
            state.hold.holds_some |= is_held;
            is_held
        };
        drop(self.changed.wait_while(self.state(), is_held));
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
        self.change(|state| {
            if let Some(ends) = state.open.remove(&id) {
                shut(&ends);
            }
        });
    }

    pub(super) fn cut_all(&self) {
        self.change(|state| state.open.drain().for_each(|(_, ends)| shut(&ends)));
    }

    pub(super) fn state(&self) -> MutexGuard<'_, FaultState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the bytes contain a pattern; the empty one is in all.
fn contains(bytes: &[u8], pattern: &[u8]) -> bool {
    pattern.is_empty() || bytes.windows(pattern.len()).any(|part| part == pattern)
}

fn shut(ends: &[TcpStream]) {
    for end in ends {
        // An error means that the end is already shut.
        let _ = end.shutdown(Shutdown::Both);
    }
}
