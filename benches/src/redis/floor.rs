//! The floor of merging: what it costs to wait for a call and to be woken by it, with as little
//! around it as can be.
//!
//! While two calls are in flight, callers wait, and the next call charges all of them by one
//! script: the keys of all, each the same cost, all or nothing. It answers all callers of a call
//! alike, derives no `remaining` and no wait, has no deadline, no bound of keys, and charges a
//! caller that has gone.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::Notify;

use crate::measure::Fallible;

use super::plain::{CallsScript, Decides, keys};

const MOST_IN_FLIGHT: usize = 2;

/// Callers who share calls of a script.
pub(super) struct Floor<P>(Arc<FloorState<P>>);

struct FloorState<P> {
    plain: P,
    next: Mutex<NextCall>,
}

/// The call that the callers join who come now.
#[derive(Default)]
struct NextCall {
    in_flight: usize,
    callers: usize,
    keys: HashSet<String>,
    call: Arc<FloorCall>,
}

#[derive(Default)]
struct FloorCall {
    answer: OnceLock<Result<bool, String>>,
    news: Notify,
}

impl<P: CallsScript> Floor<P> {
    /// The script of `plain` charges each of its keys.
    pub(super) fn new(plain: P) -> Self {
        Self(Arc::new(FloorState { plain, next: Mutex::default() }))
    }
}

impl<P: CallsScript> FloorState<P> {
    fn next(&self) -> MutexGuard<'_, NextCall> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one call after the other, until no caller waits.
    async fn fly(&self) {
        loop {
            let NextCall { callers, keys, call, .. } = {
                let mut next = self.next();
                if next.callers == 0 {
                    next.in_flight -= 1;
                    return;
                }
                let in_flight = next.in_flight;
                std::mem::replace(&mut *next, NextCall { in_flight, ..NextCall::default() })
            };
            // The callers of one key are charged at once.
            let cost = callers.div_ceil(keys.len());
            let answer = self.plain.call(keys.into_iter().collect(), cost as u64).await;
            let _ = call.answer.set(answer.map_err(|error| error.to_string()));
            call.news.notify_waiters();
            tokio::task::yield_now().await;
        }
    }
}

impl<P: CallsScript> Decides for Floor<P> {
    async fn charge(&self, caller: &str, _cost: u64) -> Fallible<bool> {
        let call = {
            let mut next = self.0.next();
            next.callers += 1;
            next.keys.extend(keys(P::PREFIX, caller, self.0.plain.limits()));
            if next.in_flight < MOST_IN_FLIGHT {
                next.in_flight += 1;
                let shared = Arc::clone(&self.0);
                tokio::spawn(async move { shared.fly().await });
            }
            Arc::clone(&next.call)
        };
        loop {
            let news = call.news.notified();
            if let Some(answer) = call.answer.get() {
                return Ok(answer.clone()?);
            }
            news.await;
        }
    }
}
