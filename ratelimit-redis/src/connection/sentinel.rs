//! What Sentinels say of the service that they watch.

use super::link::Link;
use super::reply::Reply;
use super::request::{Argument, Commands};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};

/// The master's address, as a Sentinel reports it.
pub(super) async fn master_by(
    sentinel: &Link,
    service: &str,
    deadline: Deadline,
) -> Result<(String, u16)> {
    let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service].map(Argument::Text);
    let reply = sentinel.ask(deadline, false, Commands::One(&words)).await.map_err(refused)?;
    if reply == Reply::Nil {
        return Err(RedisError::Config(format!(
            "the sentinel at {} watches no service {service:?}; name one that it does (SENTINEL \
                 MASTERS lists them) in the URL, redis-sentinel://host:port/SERVICE",
            sentinel.address()
        )));
    }
    place(&reply).ok_or_else(|| sentinel.endpoint.peer.unexpected(&reply))
}

/// Asks a server that a Sentinel names whether it is a master.
pub(super) async fn is_master(named: &Link, sentinel: &Link, deadline: Deadline) -> Result<()> {
    match named.ask(deadline, false, Commands::One(&[Argument::Text("ROLE")])).await {
        Ok(Reply::Array(parts)) if parts.first() == Some(&Reply::Text(b"master".to_vec())) => {
            Ok(())
        }
        // A user without permission for it goes without.
        Err(RedisError::Server { code, .. }) if code == "NOPERM" => Ok(()),
        Ok(_) => Err(sentinel.endpoint.peer.no_server(format!(
            "the sentinel at {} names {}, which is not a master yet",
            sentinel.address(),
            named.address()
        ))),
        Err(error) => Err(error),
    }
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
