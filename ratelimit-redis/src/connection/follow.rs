//! [`ToSlot::follow`]: sends a request to the server in charge, following redirections until one
//! executes it.
//!
//! A request is repeated only if a server has said that it did not execute it, or if it was never
//! sent.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{ErrorKind, StoreError as _};
use tokio::time::sleep;

use super::link::Link;
use super::request::TryAgain;
use super::route::{Hint, MAX_REDIRECTIONS, hint};
use super::servers::ToSlot;
use crate::error::{RedisError, Result};

/// The first pause while a slot is unavailable. Each next pause is twice as long, up to the last.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(50);

impl ToSlot<'_> {
    /// The result of a request that `ask` sends to a server, with or without `ASKING` before it.
    pub(super) async fn follow<T, F>(
        &self,
        try_again: TryAgain,
        ask: impl Fn(Arc<Link>, bool) -> F + Sync,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send,
    {
        let (mut asking, mut redirections, mut pause) = (false, 0, FIRST_PAUSE);
        let mut to = self.owner(&mut pause).await?;
        // Why the last server did not execute it.
        let mut refused: Option<RedisError> = None;
        loop {
            let seen = self.lookup().rounds();
            let error = match ask(Arc::clone(&to), asking).await {
                Ok(answer) => {
                    if pause != FIRST_PAUSE {
                        self.has_passed();
                    }
                    return Ok(answer);
                }
                Err(error) => match refused.take() {
                    // That no time was left for another attempt says less than the answer to the
                    // last.
                    Some(refused)
                        if self.deadline.is_over() && error.kind() == ErrorKind::Unavailable =>
                    {
                        return Err(refused);
                    }
                    _ => error,
                },
            };
            let asks = matches!(hint(&error), Hint::Ask(_));
            let next = match hint(&error) {
                Hint::Final => return Err(error),
                Hint::Doubt => {
                    self.lookup().doubt();
                    return Err(error);
                }
                Hint::Moved(place) | Hint::Ask(place) => match self.sent_to(&place, &to, !asks) {
                    None => return Err(error),
                    next => next,
                },
                Hint::Again if try_again == TryAgain::Return => return Err(error),
                Hint::Again => None,
                Hint::Elsewhere => match self.instead_of(&to, asking, seen).await {
                    None if !self.may_pass(&error) => return Err(error),
                    next => next,
                },
            };
            let Some(next) = next else {
                // The owner in a moment.
                if !self.wait(&mut pause).await {
                    return Err(error);
                }
                let owner = self.owner(&mut pause).await;
                (to, asking) = match owner {
                    Err(_) if self.deadline.is_over() => return Err(error),
                    owner => (owner?, false),
                };
                refused = Some(error);
                continue;
            };
            (to, asking) = (next, asks);
            redirections += 1;
            // Servers that disagree get a moment to agree.
            let agreed = redirections < 3 || self.wait(&mut pause).await;
            if !agreed || redirections > MAX_REDIRECTIONS {
                return Err(self.astray(error));
            }
        }
    }

    /// The server in charge, as soon as there is one.
    pub(super) async fn owner(&self, pause: &mut Duration) -> Result<Arc<Link>> {
        // Why there was none so far: that a look-up ran out of time says less.
        let mut missing: Option<RedisError> = None;
        loop {
            match self.in_charge().await {
                Err(error) => {
                    let error = missing.take().filter(|_| self.deadline.is_over()).unwrap_or(error);
                    if !(self.may_pass(&error) && self.wait(pause).await) {
                        return Err(error);
                    }
                    missing = Some(error);
                }
                owner => return owner,
            }
        }
    }

    /// The server in charge, looked up if none is known or the known one is in doubt and away.
    pub(super) async fn in_charge(&self) -> Result<Arc<Link>> {
        let lookup = self.lookup();
        let is_due = lookup.begin_if_due();
        let seen = lookup.rounds();
        let look = |deadline| lookup.look(seen, deadline, None);
        match self.known() {
            Some(link) if !is_due || link.is_up() => return Ok(link),
            // The known one may be the doubted one. The rest of the deadline is for the request
            // itself; without news, the known one is used.
            Some(_) => drop(look(self.deadline.half()).await),
            None => look(self.deadline).await?,
        }
        self.known().ok_or_else(|| lookup.peer.no_server(self.unknown()))
    }

    /// The server to ask in place of one that does not serve. `asking`: another server redirected
    /// this request there once and knows no newer owner yet. `seen` is the number of look-ups that
    /// had ended before the request.
    async fn instead_of(&self, asked: &Arc<Link>, asking: bool, seen: u64) -> Option<Arc<Link>> {
        if asking {
            return None;
        }
        let lookup = self.lookup();
        if self.deadline.is_over() || lookup.look(seen, self.deadline, Some(asked)).await.is_err() {
            // Leaves the look-up to the next request.
            lookup.doubt();
        }
        self.known().filter(|known| !Arc::ptr_eq(known, asked))
    }

    /// Pauses, longer each time. Returns whether the deadline leaves time for it.
    async fn wait(&self, pause: &mut Duration) -> bool {
        if self.deadline.remaining() <= *pause {
            return false;
        }
        sleep(*pause).await;
        *pause = (*pause * 2).min(LAST_PAUSE);
        true
    }
}
