//! [`Sentinels`]: servers that say which other one is the master.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::time::Instant;

use super::link::{self, Link};
use super::lookup::{self, Lookup};
use super::node::{Endpoint, Settings};
use super::request::{Question, Request};
use super::route::{Hint, MAX_REDIRECTIONS, hint};
use super::{Reply, Word};
use crate::error::RedisError;
use crate::url::Service;

/// The master of a service, found by asking sentinels.
pub(crate) struct Sentinels {
    inner: Arc<Inner>,
    /// The master as far as is known; `None` before the first look.
    master: RwLock<Option<Arc<Link>>>,
    lookup: Lookup,
}

/// What each of those who ask needs.
struct Inner {
    sentinels: Vec<Arc<Link>>,
    service: Service,
    /// For the master.
    settings: Arc<Settings>,
    deadline: Duration,
    /// The sentinels.
    address: Arc<str>,
}

impl Sentinels {
    /// Nothing is asked yet. `settings` are how to get into the master.
    pub(crate) fn new(
        sentinels: impl Iterator<Item = Endpoint>,
        service: &Service,
        settings: &Arc<Settings>,
        deadline: Duration,
    ) -> Self {
        let sentinels: Vec<_> = sentinels.map(|at| Arc::new(Link::new(at, deadline))).collect();
        let inner = Inner {
            address: link::addresses(&sentinels),
            sentinels,
            service: service.clone(),
            settings: Arc::clone(settings),
            deadline,
        };
        Self { inner: Arc::new(inner), master: RwLock::default(), lookup: Lookup::new() }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        &self.inner.address
    }

    /// The master's, or those of the sentinels while nobody knows it.
    pub(crate) fn master_address(&self) -> Arc<str> {
        let master = self.known_master();
        Arc::clone(master.as_deref().map_or(self.address(), Link::address))
    }

    /// Sends a request to the master.
    pub(crate) async fn ask<R: Request>(
        &self,
        until: Instant,
        request: &R,
    ) -> Result<R::Answer, RedisError> {
        if self.lookup.is_due() {
            let now = Instant::now();
            // What is left is for the request itself. Without news, what is known has to do.
            let half = now + until.saturating_duration_since(now) / 2;
            let _ = self.look(self.lookup.rounds(), half).await;
        }
        let mut link = self.master(until).await?;
        let mut redirections = 0;
        loop {
            let seen = self.lookup.rounds();
            let error = match link.ask(until, false, request).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            redirections += 1;
            match hint(&error) {
                Hint::Doubt => {
                    self.lookup.doubt();
                    return Err(error);
                }
                Hint::Elsewhere if redirections <= MAX_REDIRECTIONS => {
                    match self.other_master(seen, until, &link).await {
                        Some(other) => link = other,
                        None => return Err(error),
                    }
                }
                _ => return Err(error),
            }
        }
    }

    fn known_master(&self) -> Option<Arc<Link>> {
        self.master.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn master(&self, until: Instant) -> Result<Arc<Link>, RedisError> {
        if let Some(link) = self.known_master() {
            return Ok(link);
        }
        self.look(self.lookup.rounds(), until).await?;
        self.known_master().ok_or_else(|| self.inner.no_server("nobody has been found yet"))
    }

    /// Who is the master instead of one that does not serve, if a look finds that somebody is.
    async fn other_master(
        &self,
        seen: u64,
        until: Instant,
        instead: &Arc<Link>,
    ) -> Option<Arc<Link>> {
        if Instant::now() >= until || self.look(seen, until).await.is_err() {
            // Let the next one see to it.
            self.lookup.doubt();
        }
        self.known_master().filter(|master| !Arc::ptr_eq(master, instead))
    }

    async fn look(&self, seen: u64, until: Instant) -> Result<(), RedisError> {
        let look = async {
            // Beginning with another one every time: one of them may be behind.
            let mut sentinels = self.inner.sentinels.clone();
            let begin = self.lookup.rounds() % sentinels.len().max(1) as u64;
            sentinels.rotate_left(usize::try_from(begin).unwrap_or(0));
            let asked = sentinels.into_iter().map(|sentinel| {
                Arc::clone(&self.inner).named_by(sentinel, self.known_master(), until)
            });
            let master = lookup::first(asked.collect()).await?;
            *self.master.write().unwrap_or_else(PoisonError::into_inner) = Some(master);
            Ok(())
        };
        self.lookup.look(seen, until, look).await
    }
}

impl Inner {
    /// The master that a sentinel names, if it is one.
    async fn named_by(
        self: Arc<Self>,
        sentinel: Arc<Link>,
        known: Option<Arc<Link>>,
        until: Instant,
    ) -> Result<Arc<Link>, RedisError> {
        let (host, port) = self.place_by(&sentinel, until).await?;
        let is_there = |link: &Arc<Link>| {
            let endpoint = link.endpoint();
            endpoint.port == port && endpoint.host == host
        };
        if let Some(known) = known.filter(is_there) {
            return Ok(known);
        }
        let link = Link::new(Endpoint::new(&host, port, &self.settings), self.deadline);
        match link.ask(until, false, &Question(&[Word::Text("ROLE")])).await {
            Ok(Reply::Array(parts)) if parts.first() == Some(&Reply::Text(b"master".to_vec())) => {}
            // Whoever may not ask for it goes without.
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

    /// Where a sentinel says that the master is.
    async fn place_by(&self, sentinel: &Link, until: Instant) -> Result<(String, u16), RedisError> {
        let service = &self.service;
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &service.name].map(Word::Text);
        let reply = match sentinel.ask(until, false, &Question(&words)).await {
            Ok(reply) => reply,
            Err(RedisError::Server { address, code, message }) => {
                return Err(refused(&address, &code, &message));
            }
            Err(error) => return Err(error),
        };
        if reply == Reply::Nil {
            let named = if service.is_certain {
                format!("service {:?}", service.name)
            } else {
                // It may be a password.
                "service of the name in the URL".into()
            };
            return Err(RedisError::Config(format!(
                "the sentinel at {} watches no {named}; name one that it does (SENTINEL \
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

/// What a sentinel answered that is no answer, with the remedy where there is one.
fn refused(address: &Arc<str>, code: &str, message: &str) -> RedisError {
    match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" => RedisError::Config(format!(
            "the sentinel at {address} lets nobody ask with this login ({code}); give its own by \
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
