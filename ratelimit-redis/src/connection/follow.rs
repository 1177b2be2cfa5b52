//! [`follow`]: sends a request to the server in charge, following redirections until one executes it.
//!
//! A request is repeated only if a server has said that it did not execute it, or if it was never sent.

use std::future::Future;
use std::time::Duration;

use ratelimit_core::{ErrorKind, StoreError as _};
use tokio::time::sleep;

use super::route::{Hint, MAX_REDIRECTIONS, Place, hint};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// The first pause while a slot is unavailable. Each next pause is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(50);

/// The known owner of a cluster's slot or of a Sentinel service.
pub(crate) trait Route: Sync {
    /// A server.
    type To: Clone + Send + Sync;

    /// The server in charge.
    fn owner(
        &self,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Self::To, RedisError>> + Send;

    /// The server to which the asked one redirects: for good, or for this request only.
    fn sent_to(&self, place: &Place<'_>, asked: &Self::To, for_good: bool) -> Next<Self::To>;

    /// The server to ask in place of one that does not serve. `asking`: another server redirected this
    /// request there once and knows no newer owner yet. `seen` is an earlier value of
    /// [`rounds`](Self::rounds).
    fn instead_of(
        &self,
        asked: &Self::To,
        asking: bool,
        seen: u64,
        deadline: Deadline,
    ) -> impl Future<Output = Next<Self::To>> + Send;

    /// How many look-ups of the owner have ended.
    fn rounds(&self) -> u64;

    /// Requests a look-up of the owner.
    fn doubt(&self);

    /// Whether a server may be in charge in a moment although this error says that none is: the cluster has been in
    /// that state for less than a deadline.
    fn may_pass(&self, _error: &RedisError) -> bool {
        false
    }

    /// Notes that a request was answered which had to wait.
    fn has_passed(&self) {}

    /// The error when servers redirect in a circle.
    fn astray(&self, last: RedisError) -> RedisError;
}

/// How to proceed after a server did not execute a request.
pub(crate) enum Next<T> {
    Ask(T),
    /// Wait a moment, then ask the owner at that time.
    Again,
    GiveUp,
}

/// What to do while keys of a request lie on two servers, because their slot moves: a server answers `TRYAGAIN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TryAgain {
    /// Wait until they lie on one.
    Wait,
    /// Return the error: the caller sends the keys apart.
    Return,
}

/// The result of a request that `ask` sends to a server, with or without `ASKING` before it.
pub(crate) async fn follow<R: Route, T, F>(
    route: &R,
    try_again: TryAgain,
    deadline: Deadline,
    ask: impl Fn(R::To, bool) -> F + Sync,
) -> Result<T, RedisError>
where
    F: Future<Output = Result<T, RedisError>> + Send,
{
    let (mut asking, mut redirections, mut pause) = (false, 0, FIRST_PAUSE);
    let mut to = owner(route, &mut pause, deadline).await?;
    // Why the last server did not execute it.
    let mut refused: Option<RedisError> = None;
    loop {
        let seen = route.rounds();
        let error = match ask(to.clone(), asking).await {
            Ok(answer) => {
                if pause != FIRST_PAUSE {
                    route.has_passed();
                }
                return Ok(answer);
            }
            Err(error) => match refused.take() {
                // That no time was left for another attempt says less than the answer to the last.
                Some(refused) if deadline.is_over() && error.kind() == ErrorKind::Unavailable => {
                    return Err(refused);
                }
                _ => error,
            },
        };
        let asks = matches!(hint(&error), Hint::Ask(_));
        let next = match hint(&error) {
            Hint::Final => Next::GiveUp,
            Hint::Doubt => {
                route.doubt();
                Next::GiveUp
            }
            Hint::Moved(place) => route.sent_to(&place, &to, true),
            Hint::Ask(place) => route.sent_to(&place, &to, false),
            Hint::Again if try_again == TryAgain::Return => Next::GiveUp,
            Hint::Again => Next::Again,
            Hint::Elsewhere => match route.instead_of(&to, asking, seen, deadline).await {
                Next::GiveUp if route.may_pass(&error) => Next::Again,
                next => next,
            },
        };
        match next {
            Next::GiveUp => return Err(error),
            Next::Again => {
                if !wait(&mut pause, deadline).await {
                    return Err(error);
                }
                let owner = owner(route, &mut pause, deadline).await;
                (to, asking) = match owner {
                    Err(_) if deadline.is_over() => return Err(error),
                    owner => (owner?, false),
                };
                refused = Some(error);
            }
            Next::Ask(next) => {
                (to, asking) = (next, asks);
                redirections += 1;
                // Servers that disagree get a moment to agree.
                let agreed = redirections < 3 || wait(&mut pause, deadline).await;
                if !agreed || redirections > MAX_REDIRECTIONS {
                    return Err(route.astray(error));
                }
            }
        }
    }
}

/// The server in charge, as soon as there is one.
async fn owner<R: Route>(
    route: &R,
    pause: &mut Duration,
    deadline: Deadline,
) -> Result<R::To, RedisError> {
    loop {
        match route.owner(deadline).await {
            Err(error) if route.may_pass(&error) && wait(pause, deadline).await => {}
            owner => return owner,
        }
    }
}

/// Pauses, longer each time. Returns whether the deadline leaves time for it.
async fn wait(pause: &mut Duration, deadline: Deadline) -> bool {
    if deadline.remaining() <= *pause {
        return false;
    }
    sleep(*pause).await;
    *pause = (*pause * 2).min(LAST_PAUSE);
    true
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A cluster that is down for longer than any deadline.
    struct Down;

    impl Route for Down {
        type To = ();

        async fn owner(&self, _: Deadline) -> Result<(), RedisError> {
            Ok(())
        }

        fn sent_to(&self, _: &Place<'_>, (): &(), _: bool) -> Next<()> {
            Next::GiveUp
        }

        async fn instead_of(&self, (): &(), _: bool, _: u64, _: Deadline) -> Next<()> {
            Next::GiveUp
        }

        fn rounds(&self) -> u64 {
            0
        }

        fn doubt(&self) {}

        fn may_pass(&self, _: &RedisError) -> bool {
            true
        }

        fn astray(&self, last: RedisError) -> RedisError {
            last
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_time_runs_out_the_error_is_the_servers_last_word() {
        let address: Arc<str> = "node".into();
        // Wherever in an attempt the time runs out.
        for within_ms in 2..200 {
            let deadline = Deadline::within(Duration::from_millis(within_ms));
            let asked = follow(&Down, TryAgain::Wait, deadline, async |(), _| {
                sleep(Duration::from_micros(700)).await;
                if deadline.is_over() {
                    let reason = "no time was left".to_owned();
                    return Err(RedisError::Unreachable { address: Arc::clone(&address), reason });
                }
                let (code, message) = ("CLUSTERDOWN".to_owned(), String::new());
                Err::<(), _>(RedisError::Server { address: Arc::clone(&address), code, message })
            });
            let error = asked.await.expect_err("it is down");
            assert!(matches!(error, RedisError::Server { .. }), "{within_ms}: {error}");
        }
    }
}
