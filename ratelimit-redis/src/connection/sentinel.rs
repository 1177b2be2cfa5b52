//! What Sentinels say of the service that they watch.

use std::sync::Arc;

use super::link::Link;
use super::request::Request;
use super::route::Place;
use super::servers::SharedServers;
use super::slot::Range;
use super::{Argument, Reply};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};

impl SharedServers {
    /// The master of a service that a Sentinel names, as the owner of the only slot, if that server
    /// is a master.
    pub(super) async fn named_by(
        &self,
        sentinel: &Arc<Link>,
        service: &str,
        deadline: Deadline,
    ) -> Result<Vec<Range>> {
        let (host, port) = place_by(sentinel, service, deadline).await?;
        let named = || vec![Range { first: 0, last: 0, host: host.clone(), port }];
        if self.owner(0).is_some_and(|known| known.is_at(&host, port)) {
            return Ok(named());
        }
        let link = self.met(&Place { host: &host, port }, sentinel, None);
        match link.ask(deadline, false, Request::question(&[Argument::Text("ROLE")])).await {
            Ok(Reply::Array(parts)) if parts.first() == Some(&Reply::Text(b"master".to_vec())) => {}
            // A user without permission for it goes without.
            Err(RedisError::Server { code, .. }) if code == "NOPERM" => {}
            Ok(_) => {
                let (sentinel, named) = (&sentinel.endpoint.peer, link.address());
                return Err(sentinel.no_server(format!(
                    "the sentinel at {} names {named}, which is not a master yet",
                    sentinel.address()
                )));
            }
            Err(error) => return Err(error),
        }
        Ok(named())
    }
}

/// The master's address, as a Sentinel reports it.
async fn place_by(
    sentinel: &Arc<Link>,
    service: &str,
    deadline: Deadline,
) -> Result<(String, u16)> {
    let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service].map(Argument::Text);
    let reply = sentinel.ask(deadline, false, Request::question(&words)).await.map_err(refused)?;
    if reply == Reply::Nil {
        return Err(RedisError::Config(format!(
            "the sentinel at {} watches no service {service:?}; name one that it does (SENTINEL \
                 MASTERS lists them) in the URL, redis-sentinel://host:port/SERVICE",
            sentinel.address()
        )));
    }
    place(&reply).ok_or_else(|| sentinel.endpoint.peer.unexpected(&reply))
}

fn place(reply: &Reply) -> Option<(String, u16)> {
    let Reply::Array(parts) = reply else { return None };
    let [host, port] = &parts[..] else { return None };
    Some((host.as_text()?.to_owned(), port.as_text()?.parse().ok()?))
}

/// The error for a Sentinel's error reply, with the remedy if there is one.
fn refused(error: RedisError) -> RedisError {
    let RedisError::Server { address, code, message } = &error else { return error };
    match &**code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" => RedisError::Config(format!(
            "the sentinel at {address} refuses this login ({code}); give its own by \
             ?sentinel-user=…&sentinel-password=… in the URL"
        )),
        "ERR" if message.contains("unknown command") => RedisError::Config(format!(
            "Redis at {address} is no sentinel; name the sentinels (their port is 26379 unless set \
             otherwise), or use redis://{address}"
        )),
        _ => error,
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
