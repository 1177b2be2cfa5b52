//! [`Sentinels`]: follows the master that Redis Sentinel names.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use super::follow::{Next, Route, follow};
use super::link::{self, Link};
use super::lookup::{self, Lookup};
use super::node::{Endpoint, Settings};
use super::request::{Question, Request};
use super::route::Place;
use super::{Argument, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// The master of a service, found by asking Sentinels.
pub(crate) struct Sentinels {
    inner: Arc<Inner>,
    lookup: Lookup,
}

/// The data that a look-up needs.
struct Inner {
    sentinels: Vec<Arc<Link>>,
    service: String,
    /// The settings for the master.
    settings: Arc<Settings>,
    /// A connection without replies for this long is replaced.
    limit: Duration,
    /// The Sentinels' addresses.
    address: Arc<str>,
    /// The known master; `None` before the first look-up.
    master: RwLock<Option<Arc<Link>>>,
}

impl Sentinels {
    /// Sends nothing yet. `settings` are for the master.
    pub(crate) fn new(
        sentinels: impl Iterator<Item = Endpoint>,
        service: &str,
        settings: &Arc<Settings>,
        limit: Duration,
    ) -> Self {
        let sentinels: Vec<_> = sentinels.map(|at| Arc::new(Link::new(at, limit))).collect();
        let address = link::addresses(&sentinels);
        let lookup = Lookup::new(&address, &settings.runtime);
        let inner = Inner {
            sentinels,
            service: service.to_owned(),
            settings: Arc::clone(settings),
            limit,
            address,
            master: RwLock::default(),
        };
        Self { inner: Arc::new(inner), lookup }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        &self.inner.address
    }

    /// The master's address, or those of the Sentinels while the master is unknown.
    pub(crate) fn master_address(&self) -> Arc<str> {
        let master = self.inner.known_master();
        Arc::clone(master.as_deref().map_or(self.address(), Link::address))
    }

    /// Sends a request to the master.
    pub(crate) async fn ask<R: Request>(
        &self,
        deadline: Deadline,
        request: &R,
    ) -> Result<R::Answer, RedisError> {
        follow(self, R::TRY_AGAIN, deadline, |link: Arc<Link>, _| async move {
            link.ask(deadline, false, request).await
        })
        .await
    }

    /// Waits for a look-up.
    async fn look(&self, seen: u64, deadline: Deadline) -> Result<(), RedisError> {
        self.lookup.look(seen, deadline, || self.looking()).await
    }

    /// Asks the Sentinels, starting with another one each time: one of them may be outdated.
    fn looking(&self) -> impl Future<Output = Result<(), RedisError>> + Send + 'static {
        let inner = Arc::clone(&self.inner);
        let round = self.lookup.rounds();
        async move {
            let deadline = lookup::deadline();
            let mut sentinels = inner.sentinels.clone();
            let begin = round % sentinels.len().max(1) as u64;
            sentinels.rotate_left(usize::try_from(begin).unwrap_or(0));
            let asked = sentinels.into_iter().map(|sentinel| {
                Arc::clone(&inner).named_by(sentinel, inner.known_master(), deadline)
            });
            let master = lookup::first(asked.collect(), lookup::HEAD_START).await?;
            *inner.master.write().unwrap_or_else(PoisonError::into_inner) = Some(master);
            Ok(())
        }
    }
}

impl Route for Sentinels {
    type To = Arc<Link>;

    async fn owner(&self, deadline: Deadline) -> Result<Arc<Link>, RedisError> {
        let (is_due, seen) = (self.lookup.is_due(), self.lookup.rounds());
        if is_due {
            self.lookup.begin(|| self.looking());
        }
        match self.inner.known_master() {
            Some(link) if !is_due || link.is_up() => return Ok(link),
            // The rest of the deadline is for the request itself; without news, the known master is
            // used.
            Some(_) => drop(self.look(seen, deadline.half()).await),
            None => self.look(seen, deadline).await?,
        }
        self.inner.known_master().ok_or_else(|| self.inner.no_server("no master is known yet"))
    }

    /// Only servers of a cluster redirect.
    fn sent_to(&self, _: &Place<'_>, _: &Arc<Link>, _: bool) -> Next<Arc<Link>> {
        Next::GiveUp
    }

    async fn instead_of(
        &self,
        asked: &Arc<Link>,
        asking: bool,
        seen: u64,
        deadline: Deadline,
    ) -> Next<Arc<Link>> {
        if asking {
            return Next::GiveUp;
        }
        if deadline.is_over() || self.look(seen, deadline).await.is_err() {
            // Leaves the look-up to the next request.
            self.doubt();
        }
        match self.inner.known_master() {
            Some(master) if !Arc::ptr_eq(&master, asked) => Next::Ask(master),
            _ => Next::GiveUp,
        }
    }

    fn rounds(&self) -> u64 {
        self.lookup.rounds()
    }

    fn doubt(&self) {
        self.lookup.doubt();
    }

    fn astray(&self, last: RedisError) -> RedisError {
        last
    }
}

impl Inner {
    fn known_master(&self) -> Option<Arc<Link>> {
        self.master.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The master that a Sentinel names, if that server is a master.
    async fn named_by(
        self: Arc<Self>,
        sentinel: Arc<Link>,
        known: Option<Arc<Link>>,
        deadline: Deadline,
    ) -> Result<Arc<Link>, RedisError> {
        let (host, port) = self.place_by(&sentinel, deadline).await?;
        let is_there = |link: &Arc<Link>| {
            let endpoint = link.endpoint();
            endpoint.port == port && endpoint.host == host
        };
        if let Some(known) = known.filter(is_there) {
            return Ok(known);
        }
        let link = Link::new(Endpoint::new(&host, port, &self.settings), self.limit);
        match link.ask(deadline, false, &Question(&[Argument::Text("ROLE")])).await {
            Ok(Reply::Array(parts)) if parts.first() == Some(&Reply::Text(b"master".to_vec())) => {}
            // A user without permission for it goes without.
            Err(RedisError::Server { code, .. }) if code == "NOPERM" => {}
            Ok(_) => {
                let replica = format!(
                    "the sentinel at {} names {}, which is not a master yet",
                    sentinel.address(),
                    link.address()
                );
                return Err(self.no_server(&replica));
            }
            Err(error) => return Err(error),
        }
        Ok(Arc::new(link))
    }

    /// The master's address, as a Sentinel reports it.
    async fn place_by(
        &self,
        sentinel: &Link,
        deadline: Deadline,
    ) -> Result<(String, u16), RedisError> {
        let service = &self.service;
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service].map(Argument::Text);
        let reply = match sentinel.ask(deadline, false, &Question(&words)).await {
            Ok(reply) => reply,
            Err(RedisError::Server { address, code, message }) => {
                return Err(refused(&address, &code, &message));
            }
            Err(error) => return Err(error),
        };
        if reply == Reply::Nil {
            return Err(RedisError::Config(format!(
                "the sentinel at {} watches no service {service:?}; name one that it does (SENTINEL \
                 MASTERS lists them) in the URL, redis-sentinel://host:port/SERVICE",
                sentinel.address()
            )));
        }
        place(&reply).ok_or_else(|| sentinel.endpoint().peer.unexpected(&reply))
    }

    fn no_server(&self, reason: &str) -> RedisError {
        RedisError::NoServer { address: Arc::clone(&self.address), reason: reason.into() }
    }
}

fn place(reply: &Reply) -> Option<(String, u16)> {
    let Reply::Array(parts) = reply else { return None };
    let [Reply::Text(host), Reply::Text(port)] = &parts[..] else { return None };
    let port = std::str::from_utf8(port).ok()?.parse().ok()?;
    Some((String::from_utf8(host.clone()).ok()?, port))
}

/// The error for a Sentinel's error reply, with the remedy if there is one.
fn refused(address: &Arc<str>, code: &str, message: &str) -> RedisError {
    match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" => RedisError::Config(format!(
            "the sentinel at {address} refuses this login ({code}); give its own by \
             ?sentinel-user=…&sentinel-password=… in the URL"
        )),
        "ERR" if message.contains("unknown command") => RedisError::Config(format!(
            "Redis at {address} is no sentinel; name the sentinels (their port is 26379 unless set \
             otherwise), or use redis://{address}"
        )),
        _ => RedisError::Server {
            address: Arc::clone(address),
            code: code.to_owned(),
            message: message.to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_host_and_a_port() {
        let reply = |parts: &[&str]| {
            Reply::Array(parts.iter().map(|part| Reply::Text(part.as_bytes().to_vec())).collect())
        };
        assert_eq!(place(&reply(&["::1", "6379"])), Some(("::1".into(), 6379)));
        for parts in [&["h"][..], &["h", "x"], &["h", "65536"], &["h", "1", "2"]] {
            assert_eq!(place(&reply(parts)), None, "{parts:?}");
        }
    }
}
