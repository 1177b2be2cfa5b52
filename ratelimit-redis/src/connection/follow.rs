//! [`follow`]: sends a request to the server in charge, following redirections until one executes it.
//!
//! A request is repeated only if a server has said that it did not execute it, or if it was never sent.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{ErrorKind, StoreError as _};
use tokio::time::sleep;

use super::link::Link;
use super::lookup::Lookup;
use super::route::{Hint, MAX_REDIRECTIONS, Place, hint};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// The first pause while a slot is unavailable. Each next pause is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(50);

/// The owner of a cluster's slot or of a Sentinel service, as far as it is known.
pub(crate) trait Route: Sync {
    fn lookup(&self) -> &Lookup;

    /// The server that is known to be in charge.
    fn known(&self) -> Option<Arc<Link>>;

    /// Why no server is known after a look-up.
    fn unknown(&self) -> String;

    /// The server to which the asked one redirects: for good, or for this request only. Only servers of a cluster
    /// redirect.
    fn sent_to(&self, _: &Place<'_>, _asked: &Link, _for_good: bool) -> Option<Arc<Link>> {
        None
    }

    /// Whether a server may be in charge in a moment although this error says that none is: the cluster has been in
    /// that state for less than a deadline.
    fn may_pass(&self, _error: &RedisError) -> bool {
        false
    }

    /// Notes that a request was answered which had to wait.
    fn has_passed(&self) {}

    /// The error when servers redirect in a circle.
    fn astray(&self, last: RedisError) -> RedisError {
        last
    }
}

/// How to proceed after a server did not execute a request.
enum Next {
    Ask(Arc<Link>),
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
    ask: impl Fn(Arc<Link>, bool) -> F + Sync,
) -> Result<T, RedisError>
where
    F: Future<Output = Result<T, RedisError>> + Send,
{
    let (mut asking, mut redirections, mut pause) = (false, 0, FIRST_PAUSE);
    let mut to = owner(route, &mut pause, deadline).await?;
    // Why the last server did not execute it.
    let mut refused: Option<RedisError> = None;
    loop {
        let seen = route.lookup().rounds();
        let error = match ask(Arc::clone(&to), asking).await {
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
                route.lookup().doubt();
                Next::GiveUp
            }
            Hint::Moved(place) => route.sent_to(&place, &to, true).map_or(Next::GiveUp, Next::Ask),
            Hint::Ask(place) => route.sent_to(&place, &to, false).map_or(Next::GiveUp, Next::Ask),
            Hint::Again if try_again == TryAgain::Return => Next::GiveUp,
            Hint::Again => Next::Again,
            Hint::Elsewhere => match instead_of(route, &to, asking, seen, deadline).await {
                Some(other) => Next::Ask(other),
                None if route.may_pass(&error) => Next::Again,
                None => Next::GiveUp,
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
) -> Result<Arc<Link>, RedisError> {
    // Why there was none so far: that a look-up ran out of time says less.
    let mut missing: Option<RedisError> = None;
    loop {
        match in_charge(route, deadline).await {
            Err(error) => {
                let error = missing.take().filter(|_| deadline.is_over()).unwrap_or(error);
                if !(route.may_pass(&error) && wait(pause, deadline).await) {
                    return Err(error);
                }
                missing = Some(error);
            }
            owner => return owner,
        }
    }
}

/// The server in charge, looked up if none is known or the known one is in doubt and away.
pub(crate) async fn in_charge<R: Route>(
    route: &R,
    deadline: Deadline,
) -> Result<Arc<Link>, RedisError> {
    let lookup = route.lookup();
    let is_due = lookup.begin_if_due();
    let seen = lookup.rounds();
    let look = |deadline| lookup.look(seen, deadline, None);
    match route.known() {
        Some(link) if !is_due || link.is_up() => return Ok(link),
        // The known one may be the doubted one. The rest of the deadline is for the request itself; without news, the
        // known one is used.
        Some(_) => drop(look(deadline.half()).await),
        None => look(deadline).await?,
    }
    route.known().ok_or_else(|| lookup.nothing(route.unknown()))
}

/// The server to ask in place of one that does not serve. `asking`: another server redirected this request there once
/// and knows no newer owner yet. `seen` is the number of look-ups that had ended before the request.
async fn instead_of<R: Route>(
    route: &R,
    asked: &Arc<Link>,
    asking: bool,
    seen: u64,
    deadline: Deadline,
) -> Option<Arc<Link>> {
    if asking {
        return None;
    }
    let lookup = route.lookup();
    if deadline.is_over() || lookup.look(seen, deadline, Some(asked)).await.is_err() {
        // Leaves the look-up to the next request.
        lookup.doubt();
    }
    route.known().filter(|known| !Arc::ptr_eq(known, asked))
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
    use super::*;
    use crate::connection::node::{Endpoint, Settings};

    /// A cluster that is down for longer than any deadline.
    struct Down(Lookup, Arc<Link>);

    impl Route for Down {
        fn lookup(&self) -> &Lookup {
            &self.0
        }

        fn known(&self) -> Option<Arc<Link>> {
            Some(Arc::clone(&self.1))
        }

        fn unknown(&self) -> String {
            String::new()
        }

        fn may_pass(&self, _: &RedisError) -> bool {
            true
        }
    }

    /// A cluster in which no server keeps a slot, as look-ups of 30 ms find out.
    struct Nowhere(Lookup);

    impl Route for Nowhere {
        fn lookup(&self) -> &Lookup {
            &self.0
        }

        fn known(&self) -> Option<Arc<Link>> {
            None
        }

        fn unknown(&self) -> String {
            "no server keeps it".to_owned()
        }

        fn may_pass(&self, _: &RedisError) -> bool {
            true
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_time_runs_out_in_a_look_up_the_error_is_the_one_before() {
        let settings = Arc::new(Settings::default());
        for within_ms in 40..400 {
            let lookup = Lookup::new(&"node".into(), &settings.runtime, |_, _| async {
                sleep(Duration::from_millis(30)).await;
                Ok(())
            });
            let deadline = Deadline::within(Duration::from_millis(within_ms));
            let owner = owner(&Nowhere(lookup), &mut FIRST_PAUSE.clone(), deadline).await;
            let error = owner.err().expect("no server keeps it").to_string();
            assert!(error.contains("no server keeps it"), "{within_ms}: {error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_time_runs_out_the_error_is_the_servers_last_word() {
        let address: Arc<str> = "node".into();
        let settings = Arc::new(Settings::default());
        let link = Link::new(Endpoint::new("node", 1, &settings));
        let lookup = Lookup::new(&address, &settings.runtime, |_, _| std::future::ready(Ok(())));
        let route = Down(lookup, link);
        // Wherever in an attempt the time runs out.
        for within_ms in 2..200 {
            let deadline = Deadline::within(Duration::from_millis(within_ms));
            let asked = follow(&route, TryAgain::Wait, deadline, async |_, _| {
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
