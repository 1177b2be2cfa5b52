//! [`Servers::ask`]: sends a request to the server in charge, following redirections until one
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
use super::reply::Reply;
use super::request::{Argument, Commands, TryAgain};
use super::route::{Hint, MAX_REDIRECTIONS, Place, hint};
use super::servers::Servers;
use super::slot;
use crate::concurrent::all;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};

/// The first pause while a slot is unavailable. Each next pause is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(50);

impl Servers {
    /// Sends a request to the owner of this key's slot, and follows redirections.
    pub(crate) async fn ask(
        &self,
        deadline: Deadline,
        key: &str,
        commands: Commands<'_>,
        try_again: TryAgain,
    ) -> Result<Reply> {
        let slot = if self.is_cluster() { slot::of(key) } else { 0 };
        let ask =
            |link: Arc<Link>, asking| async move { link.ask(deadline, asking, commands).await };
        self.follow(slot, deadline, try_again, ask).await
    }

    /// Sends a command to every server that keeps keys.
    pub(crate) async fn ask_each(
        &self,
        deadline: Deadline,
        words: &[Argument<'_>],
    ) -> Vec<(Arc<str>, Result<Reply>)> {
        let command = Commands::One(words);
        if !self.is_cluster() {
            let answer = self.ask(deadline, "", command, TryAgain::Wait).await;
            let master = self.known.owner(0);
            let address = master.as_deref().map_or(self.peer().address(), Link::address);
            return vec![(Arc::clone(address), answer)];
        }
        self.look_if_in_doubt();
        if self.known.masters().is_empty()
            && let Err(error) = self.open(deadline).await
        {
            return vec![(Arc::clone(self.peer().address()), Err(error))];
        }
        let asked = self.known.masters().into_iter().map(|link| async move {
            let answer = link.ask(deadline, false, command).await;
            (Arc::clone(link.address()), answer)
        });
        let answers = all(asked).await;
        let moved = |error: &RedisError| matches!(hint(error), Hint::Elsewhere | Hint::Doubt);
        if answers.iter().any(|(_, answer)| answer.as_ref().is_err_and(moved)) {
            self.known.doubt();
        }
        answers
    }

    /// The result of a request that `ask` sends to a server, with or without `ASKING` before it.
    async fn follow<T, F>(
        &self,
        slot: u16,
        deadline: Deadline,
        try_again: TryAgain,
        ask: impl Fn(Arc<Link>, bool) -> F + Sync,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send,
    {
        let (mut redirections, mut pause) = (0, FIRST_PAUSE);
        // Where the last server sent it, and whether for this request only.
        let mut sent: Option<(Arc<Link>, bool)> = None;
        // Why the last server did not execute it.
        let mut refused: Option<RedisError> = None;
        loop {
            let to = match sent.take() {
                None => self.in_charge(slot, deadline).await.map(|link| (link, false)),
                Some(to) => Ok(to),
            };
            let seen = self.lookups.ended();
            let answer = match &to {
                Ok((link, asking)) => ask(Arc::clone(link), *asking).await,
                Err(error) => Err(error.clone()),
            };
            let error = match (answer, refused.take()) {
                (Ok(answer), _) => {
                    if pause != FIRST_PAUSE {
                        self.has_passed(slot);
                    }
                    return Ok(answer);
                }
                // That no time was left for another attempt says less than the answer to the last.
                (Err(error), Some(refused))
                    if deadline.is_over() && error.kind() == ErrorKind::Unavailable =>
                {
                    return Err(refused);
                }
                (Err(error), _) => error,
            };
            sent = match (hint(&error), to.ok()) {
                (Hint::Moved(place), Some((asked, _))) => self.sent_to(&place, &asked, Some(slot)),
                (Hint::Ask(place), Some((asked, _))) => self.sent_to(&place, &asked, None),
                (Hint::Elsewhere, Some((asked, asking))) => {
                    self.instead_of(&asked, asking, seen, (slot, deadline)).await
                }
                _ => None,
            };
            if sent.is_some() {
                redirections += 1;
                // Servers that disagree get a moment to agree.
                let agreed = redirections < 3 || wait(deadline, &mut pause).await;
                if !agreed || redirections > MAX_REDIRECTIONS {
                    return Err(self.astray(slot, error));
                }
                continue;
            }
            let waits = match hint(&error) {
                Hint::Again => try_again == TryAgain::Wait,
                Hint::Elsewhere => self.may_pass(slot, &error),
                Hint::Doubt => {
                    self.known.doubt();
                    false
                }
                Hint::Moved(_) | Hint::Ask(_) | Hint::Final => false,
            };
            // The owner in a moment.
            if !waits || !wait(deadline, &mut pause).await {
                return Err(error);
            }
            refused = Some(error);
        }
    }

    /// The server in charge, looked up if none is known or the known one is in doubt and away.
    async fn in_charge(&self, slot: u16, deadline: Deadline) -> Result<Arc<Link>> {
        let is_in_doubt = self.look_if_in_doubt();
        let seen = self.lookups.ended();
        match self.known.owner(slot) {
            Some(link) if !is_in_doubt || link.is_up() => return Ok(link),
            // The known one may be the doubted one. The rest of the deadline is for the request
            // itself; without news, the known one is used.
            Some(_) => drop(self.look(seen, deadline.half()).await),
            None => self.look(seen, deadline).await?,
        }
        self.known.owner(slot).ok_or_else(|| {
            self.peer().no_server(if self.is_cluster() {
                format!("no server keeps slot {slot}; assign it (CLUSTER ADDSLOTS)")
            } else {
                "no master is known yet".into()
            })
        })
    }

    /// The server to ask in place of one that does not serve. `asking`: another server redirected
    /// this request there once and knows no newer owner yet. `seen` is the number of look-ups that
    /// had ended before the request.
    async fn instead_of(
        &self,
        asked: &Arc<Link>,
        asking: bool,
        seen: u64,
        (slot, deadline): (u16, Deadline),
    ) -> Option<(Arc<Link>, bool)> {
        if asking || self.is_alone() {
            return None;
        }
        if deadline.is_over() || self.look(seen, deadline).await.is_err() {
            // Leaves the look-up to the next request.
            self.known.doubt();
        }
        let known = self.known.owner(slot).filter(|known| !Arc::ptr_eq(known, asked));
        known.map(|link| (link, false))
    }

    /// The server to which the asked one redirects: for good, if it names the slot, or for this
    /// request only. Only servers of a cluster redirect.
    fn sent_to(
        &self,
        place: &Place<'_>,
        asked: &Link,
        keeps: Option<u16>,
    ) -> Option<(Arc<Link>, bool)> {
        if !self.is_cluster() {
            return None;
        }
        if keeps.is_some() {
            // Other slots may have moved as well.
            self.known.doubt();
        }
        Some((self.known.met(place, asked, keeps), keeps.is_none()))
    }

    /// The error when servers redirect in a circle.
    fn astray(&self, slot: u16, last: RedisError) -> RedisError {
        if !self.is_cluster() {
            return last;
        }
        self.peer().no_server(format!(
            "slot {slot} is on its way, and one server sends to the next; the last said: {last}"
        ))
    }
}

/// Pauses, longer each time. Returns whether the deadline leaves time for it.
async fn wait(deadline: Deadline, pause: &mut Duration) -> bool {
    if deadline.remaining() <= *pause {
        return false;
    }
    sleep(*pause).await;
    *pause = (*pause * 2).min(LAST_PAUSE);
    true
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt;
    use ratelimit_servers::RedisServer;
    use tokio::net::TcpListener;

    use super::*;
    use crate::connection::attempts::Attempts;
    use crate::connection::peer::Peer;
    use crate::connection::servers::PACE;
    use crate::connection::servers::tests::{range, servers};
    use crate::url::Kind;

    /// A cluster in which look-ups find nothing new, and take so long.
    fn cluster(look_ms: u64) -> Servers {
        let mut servers = servers(&[1], Kind::Cluster);
        let look = move |_| async move {
            sleep(Duration::from_millis(look_ms)).await;
            Ok(())
        };
        let awaited = (Peer::new("node"), "nothing");
        servers.lookups = Attempts::new(awaited, &Arc::default(), PACE, look);
        servers
    }

    fn says(code: &str, message: String) -> RedisError {
        RedisError::Server { address: "node".into(), code: code.into(), message }
    }

    #[tokio::test(start_paused = true)]
    async fn when_time_runs_out_in_a_look_up_the_error_is_the_one_before() {
        for within_ms in 40..400 {
            let cluster = cluster(30);
            let deadline = Deadline::within(Duration::from_millis(within_ms));
            let asked = cluster.follow(7, deadline, TryAgain::Wait, async |_, _| Ok(()));
            let error = asked.await.expect_err("no server keeps it").to_string();
            assert!(error.contains("no server keeps slot 7"), "{within_ms}: {error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_time_runs_out_the_error_is_the_servers_last_word() {
        let cluster = cluster(0);
        cluster.known.learn(&[range(0, 0, 1)]);
        // Wherever in an attempt the time runs out.
        for within_ms in 2..200 {
            let deadline = Deadline::within(Duration::from_millis(within_ms));
            let asked = cluster.follow(0, deadline, TryAgain::Wait, async |_, _| {
                sleep(Duration::from_micros(700)).await;
                let down = says("CLUSTERDOWN", String::new());
                let late = cluster.peer().too_late(deadline);
                Err::<(), _>(if deadline.is_over() { late } else { down })
            });
            let error = asked.await.expect_err("it is down");
            assert!(matches!(error, RedisError::Server { .. }), "{within_ms}: {error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_send_in_a_circle_end_a_request_after_a_few_redirections() {
        let cluster = cluster(0);
        cluster.known.learn(&[range(0, 0, 1)]);
        let asked = AtomicUsize::new(0);
        let deadline = Deadline::within(Duration::from_secs(9));
        let sent = cluster.follow(0, deadline, TryAgain::Wait, async |link, _| {
            asked.fetch_add(1, Ordering::Relaxed);
            let other = 3 - link.endpoint.port;
            Err::<(), _>(says("MOVED", format!("0 127.0.0.1:{other}")))
        });
        let error = sent.await.expect_err("no server keeps it").to_string();
        assert!(error.contains("one server sends to the next"), "{error}");
        assert_eq!(asked.into_inner(), 9);
    }

    #[tokio::test]
    async fn a_hanging_look_up_does_not_delay_requests_to_healthy_servers() {
        let server = RedisServer::start().expect("redis-server");
        let hangs = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let hung = hangs.local_addr().expect("bound").port();
        let cluster = servers(&[hung], Kind::Cluster);
        cluster.known.learn(&[range(0, 8_191, server.port()), range(8_192, 16_383, hung)]);
        let deadline = Deadline::within(Duration::from_secs(20));
        let (link, ping) = (cluster.known.owner(0).expect("known"), [Argument::Text("PING")]);
        link.ask(deadline, false, Commands::One(&ping)).await.expect("it is up");

        cluster.known.doubt();
        for _ in 0..100 {
            let owner = cluster.in_charge(0, deadline).now_or_never().expect("at once");
            assert!(Arc::ptr_eq(&owner.expect("known"), &link));
        }
        // Requests to the other server wait for the look-up: it may have a new owner.
        assert!(cluster.in_charge(slot::SLOTS - 1, deadline).now_or_never().is_none());
        assert_eq!(cluster.lookups.ended(), 0, "it is still under way");
    }
}
