//! [`follow`]: sends a request to whom the servers say, until one has taken it.
//!
//! Nothing is sent again but what a server has said that it did not execute, or what was never sent.

use std::future::Future;
use std::time::Duration;

use tokio::time::sleep;

use super::route::{Hint, MAX_REDIRECTIONS, Place, hint};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// The first pause of one who has to wait for a slot; each next is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(50);

/// Who is in charge, as far as is known: of a slot of a cluster, or of a service.
pub(crate) trait Route: Sync {
    /// A server.
    type To: Clone + Send + Sync;

    /// Who is in charge.
    fn owner(
        &self,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Self::To, RedisError>> + Send;

    /// The server to which the one that was asked sends us: from now on, or this once.
    fn sent_to(&self, place: &Place<'_>, asked: &Self::To, for_good: bool) -> Next<Self::To>;

    /// Whom to ask instead of one that does not serve. `asking`: another one sent us there for this once, and
    /// does not know better yet. `seen` is what [`rounds`](Self::rounds) was before.
    fn instead_of(
        &self,
        asked: &Self::To,
        asking: bool,
        seen: u64,
        deadline: Deadline,
    ) -> impl Future<Output = Next<Self::To>> + Send;

    /// How often was looked who is in charge.
    fn rounds(&self) -> u64;

    /// Who is in charge is to be looked into.
    fn doubt(&self);

    /// What is told if one server sends to the next for ever.
    fn astray(&self, last: RedisError) -> RedisError;
}

/// What to do after a server did not execute a request.
pub(crate) enum Next<T> {
    Ask(T),
    /// Wait a moment, and ask who is in charge then.
    Again,
    GiveUp,
}

/// What a request comes to, which `ask` sends to a server; with `ASKING` before it or not.
pub(crate) async fn follow<R: Route, T, F>(
    route: &R,
    deadline: Deadline,
    ask: impl Fn(R::To, bool) -> F + Sync,
) -> Result<T, RedisError>
where
    F: Future<Output = Result<T, RedisError>> + Send,
{
    let mut to = route.owner(deadline).await?;
    let (mut asking, mut redirections, mut pause) = (false, 0, FIRST_PAUSE);
    loop {
        let seen = route.rounds();
        let error = match ask(to.clone(), asking).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
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
            Hint::Again => Next::Again,
            Hint::Elsewhere => route.instead_of(&to, asking, seen, deadline).await,
        };
        match next {
            Next::GiveUp => return Err(error),
            Next::Again => {
                if !wait(&mut pause, deadline).await {
                    return Err(error);
                }
                (to, asking) = (route.owner(deadline).await?, false);
            }
            Next::Ask(next) => {
                (to, asking) = (next, asks);
                redirections += 1;
                // Servers that do not agree get a moment in which to.
                let agreed = redirections < 3 || wait(&mut pause, deadline).await;
                if !agreed || redirections > MAX_REDIRECTIONS {
                    return Err(route.astray(error));
                }
            }
        }
    }
}

/// Waits, and longer the next time; whether the deadline leaves the time.
async fn wait(pause: &mut Duration, deadline: Deadline) -> bool {
    if deadline.remaining() <= *pause {
        return false;
    }
    sleep(*pause).await;
    *pause = (*pause * 2).min(LAST_PAUSE);
    true
}
