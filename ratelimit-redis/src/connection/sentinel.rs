//! [`Sentinels`]: follows the master that Redis Sentinel names.

use std::sync::{Arc, PoisonError, RwLock};

use super::follow::{Route, follow};
use super::link::{self, Link};
use super::lookup::{self, Lookup};
use super::node::{Endpoint, Settings};
use super::request::Request;
use super::{Argument, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// The master of a service, found by asking Sentinels.
pub(crate) struct Sentinels {
    inner: Arc<SharedSentinel>,
    lookup: Lookup,
}

/// The data that a look-up needs.
struct SharedSentinel {
    sentinels: Vec<Arc<Link>>,
    service: String,
    /// The settings for the master.
    settings: Arc<Settings>,
    /// The known master; `None` before the first look-up.
    master: RwLock<Option<Arc<Link>>>,
}

impl Sentinels {
    /// Sends nothing yet. `settings` are for the master.
    pub(crate) fn new(
        sentinels: impl Iterator<Item = Endpoint>,
        service: &str,
        settings: &Arc<Settings>,
    ) -> Self {
        let sentinels: Vec<_> = sentinels.map(Link::new).collect();
        let address = link::addresses(&sentinels);
        let inner = Arc::new(SharedSentinel {
            sentinels,
            service: service.to_owned(),
            settings: Arc::clone(settings),
            master: RwLock::default(),
        });
        let looks = Arc::clone(&inner);
        let lookup = Lookup::new(&address, &settings.runtime, move |round, _| {
            Arc::clone(&looks).look(round)
        });
        Self { inner, lookup }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        self.lookup.address()
    }

    /// The master's address, or those of the Sentinels while the master is unknown.
    pub(crate) fn master_address(&self) -> Arc<str> {
        let master = self.inner.known_master();
        Arc::clone(master.as_deref().map_or(self.address(), Link::address))
    }

    /// Sends a request to the master.
    pub(crate) async fn ask(
        &self,
        deadline: Deadline,
        request: Request<'_>,
    ) -> Result<Reply, RedisError> {
        follow(self, request.try_again(), deadline, |link: Arc<Link>, _| async move {
            link.ask(deadline, false, request).await
        })
        .await
    }
}

impl Route for Sentinels {
    fn lookup(&self) -> &Lookup {
        &self.lookup
    }

    fn known(&self) -> Option<Arc<Link>> {
        self.inner.known_master()
    }

    fn unknown(&self) -> String {
        "no master is known yet".into()
    }
}

impl SharedSentinel {
    fn known_master(&self) -> Option<Arc<Link>> {
        self.master.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks the Sentinels, starting with another one each time: one of them may be outdated.
    async fn look(self: Arc<Self>, round: u64) -> Result<(), RedisError> {
        let deadline = lookup::deadline();
        let mut sentinels = self.sentinels.clone();
        lookup::rotate(&mut sentinels, round);
        let asked = sentinels.into_iter().map(|sentinel| self.named_by(sentinel, deadline));
        let master = lookup::first(asked, lookup::HEAD_START).await?;
        *self.master.write().unwrap_or_else(PoisonError::into_inner) = Some(master);
        Ok(())
    }

    /// The master that a Sentinel names, if that server is a master.
    async fn named_by(
        &self,
        sentinel: Arc<Link>,
        deadline: Deadline,
    ) -> Result<Arc<Link>, RedisError> {
        let (host, port) = self.place_by(&sentinel, deadline).await?;
        if let Some(known) = self.known_master().filter(|known| known.is_at(&host, port)) {
            return Ok(known);
        }
        let link = Link::new(Endpoint::new(&host, port, &self.settings));
        match link.ask(deadline, false, Request::question(&[Argument::Text("ROLE")])).await {
            Ok(Reply::Array(parts)) if parts.first() == Some(&Reply::Text(b"master".to_vec())) => {}
            // A user without permission for it goes without.
            Err(RedisError::Server { code, .. }) if code == "NOPERM" => {}
            Ok(_) => {
                let replica = format!(
                    "the sentinel at {} names {}, which is not a master yet",
                    sentinel.address(),
                    link.address()
                );
                return Err(RedisError::NoServer {
                    address: Arc::clone(sentinel.address()),
                    reason: replica,
                });
            }
            Err(error) => return Err(error),
        }
        Ok(link)
    }

    /// The master's address, as a Sentinel reports it.
    async fn place_by(
        &self,
        sentinel: &Arc<Link>,
        deadline: Deadline,
    ) -> Result<(String, u16), RedisError> {
        let service = &self.service;
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service].map(Argument::Text);
        let reply = match sentinel.ask(deadline, false, Request::question(&words)).await {
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
