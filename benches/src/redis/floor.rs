//! The floor of merging: what it costs to wait for a call and to be woken by it, with as little around it as can be.
//!
//! It counts the callers who wait for the call in flight, and charges that many by one call of the plain loop's script.
//! It knows one key, one limit and one cost, answers all callers of a call alike, derives no `remaining` and no wait,
//! has no deadline, and charges a caller that has gone.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use redis::aio::ConnectionManager;
use tokio::sync::Notify;

use crate::measure::Fallible;

use super::plain::{Decides, RedisRs};

/// Callers of one key who share calls of the plain loop.
pub(super) struct Floor(Arc<FloorState>);

struct FloorState {
    plain: RedisRs<ConnectionManager>,
    next: Mutex<NextCall>,
}

/// The call that the callers join who come now.
#[derive(Default)]
struct NextCall {
    is_under_way: bool,
    cost: u64,
    call: Arc<FloorCall>,
}

#[derive(Default)]
struct FloorCall {
    answer: OnceLock<Result<bool, String>>,
    news: Notify,
}

impl Floor {
    pub(super) fn new(plain: RedisRs<ConnectionManager>) -> Self {
        Self(Arc::new(FloorState { plain, next: Mutex::default() }))
    }
}

impl FloorState {
    fn next(&self) -> MutexGuard<'_, NextCall> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one call after the other, until no caller waits.
    async fn fly(&self, caller: String) {
        loop {
            let (cost, call) = {
                let mut next = self.next();
                let NextCall { cost, call, .. } = std::mem::take(&mut *next);
                next.is_under_way = cost > 0;
                (cost, call)
            };
            if cost == 0 {
                return;
            }
            let answer = self.plain.charge(&caller, cost).await;
            let _ = call.answer.set(answer.map_err(|error| error.to_string()));
            call.news.notify_waiters();
            tokio::task::yield_now().await;
        }
    }
}

impl Decides for Floor {
    async fn charge(&self, caller: &str, cost: u64) -> Fallible<bool> {
        let call = {
            let mut next = self.0.next();
            next.cost += cost;
            if !next.is_under_way {
                next.is_under_way = true;
                let (shared, caller) = (Arc::clone(&self.0), caller.to_owned());
                tokio::spawn(async move { shared.fly(caller).await });
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
