//! Ends a test whose store hangs, or takes far too long.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long a store may take for a request, and a test in all.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    request: Duration,
    test: Duration,
}

/// For a store that has kept to it so far: more than a busy machine needs.
const PATIENCE: Patience =
    Patience { request: Duration::from_secs(60), test: Duration::from_secs(600) };
/// Once one test has ended so: its store is known to be broken, and each of the others would take
/// as long.
const LITTLE_PATIENCE: Patience =
    Patience { request: Duration::from_secs(2), test: Duration::from_secs(10) };

/// Whether a test of this process has ended so.
static HAS_HUNG: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The number of requests of the test on this thread.
    static REQUESTS: RefCell<Option<Arc<AtomicU64>>> = const { RefCell::new(None) };
}

/// Notes that a store was asked.
pub(crate) fn note_request() {
    REQUESTS.with_borrow(|requests| {
        if let Some(requests) = requests {
            requests.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Runs a test on a thread of its own, and fails if its store hangs. The thread then stays until
/// the process ends.
///
/// # Panics
/// As the test does, or because it hangs.
pub(crate) fn run(test: impl FnOnce() + Send + 'static) {
    let patience = if HAS_HUNG.load(Ordering::Relaxed) { LITTLE_PATIENCE } else { PATIENCE };
    match run_within(patience, test) {
        Ok(Ok(())) => {}
        Ok(Err(panic)) => resume_unwind(panic),
        Err(message) => {
            HAS_HUNG.store(true, Ordering::Relaxed);
            panic!("{message}");
        }
    }
}

/// The outcome of a test, or why it was given up.
pub(crate) fn run_within(
    patience: Patience,
    test: impl FnOnce() + Send + 'static,
) -> Result<Result<(), Box<dyn Any + Send>>, String> {
    let (requests, begun) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let (sender, outcome) = channel();
    let noted = Arc::clone(&requests);
    thread::spawn(move || {
        REQUESTS.set(Some(noted));
        // A test that was given up has no receiver any more.
        let _ = sender.send(catch_unwind(AssertUnwindSafe(test)));
    });
    let (mut seen, mut seen_at) = (0, begun);
    loop {
        let wait = patience.request.saturating_sub(seen_at.elapsed());
        match outcome.recv_timeout(wait.min(patience.request / 8)) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Disconnected) => return Err("the test's thread has ended".into()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = requests.load(Ordering::Relaxed);
        if now != seen {
            (seen, seen_at) = (now, Instant::now());
        }
        if seen_at.elapsed() >= patience.request {
            let within = patience.request;
            return Err(format!(
                "the store hangs: after {seen} requests, none was answered within {within:?}"
            ));
        }
        if begun.elapsed() >= patience.test {
            let within = patience.test;
            return Err(format!(
                "the store is too slow for this test: {seen} requests took {within:?}; lower `Harness::CASES` if \
                 it is meant to be as slow"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HARDLY: Patience =
        Patience { request: Duration::from_millis(50), test: Duration::from_millis(200) };

    fn given_up(test: impl FnOnce() + Send + 'static) -> String {
        run_within(HARDLY, test).expect_err("it hangs")
    }

    #[test]
    fn a_store_that_hangs_or_never_ends_fails_its_test() {
        // A future that is never ready, and a lock that is never released.
        let never = || crate::harness::block_on(std::future::pending());
        assert!(given_up(never).contains("after 0 requests"));
        let asked_once = || {
            note_request();
            thread::sleep(Duration::MAX);
        };
        assert!(given_up(asked_once).contains("after 1 requests"));
        let for_ever = || {
            loop {
                note_request();
                thread::yield_now();
            }
        };
        assert!(given_up(for_ever).contains("too slow"));
    }

    #[test]
    fn a_test_that_ends_has_its_own_outcome() {
        let patience = PATIENCE;
        assert!(matches!(run_within(patience, || {}), Ok(Ok(()))));
        let panic = run_within(patience, || panic!("broken")).expect("it ends").expect_err("so");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"broken"));
    }
}
