//! Reads `CLUSTER SLOTS`: the ranges of slots and their masters.

use std::sync::Arc;

use crate::connection::link::Link;
use crate::connection::request::Question;
use crate::connection::slot::SLOTS;
use crate::connection::{Argument, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// A range of slots, both ends included, and its master.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// Asks a node.
pub(crate) async fn told_by(link: Arc<Link>, deadline: Deadline) -> Result<Vec<Range>, RedisError> {
    let words = [Argument::Text("CLUSTER"), Argument::Text("SLOTS")];
    let reply = match link.ask(deadline, false, &Question(&words)).await {
        Ok(reply) => reply,
        Err(RedisError::Server { address, code, message })
            if code == "ERR" && message.contains("cluster support disabled") =>
        {
            return Err(RedisError::Config(format!(
                "Redis at {address} is no cluster; use redis://{address}"
            )));
        }
        Err(error) => return Err(error),
    };
    let unexpected = || link.endpoint().peer.unexpected(&reply);
    let ranges = ranges(&reply, &link.endpoint().host).ok_or_else(unexpected)?;
    if ranges.is_empty() {
        // A node that was reset, or that the others have forgotten.
        return Err(RedisError::NoServer {
            address: Arc::clone(link.address()),
            reason: "it knows nobody who keeps slots; is it part of the cluster (CLUSTER MEET)?"
                .into(),
        });
    }
    Ok(ranges)
}

/// The ranges in a reply. `asked` is the host of the node that sent it.
fn ranges(reply: &Reply, asked: &str) -> Option<Vec<Range>> {
    let Reply::Array(entries) = reply else { return None };
    let mut ranges = Vec::with_capacity(entries.len());
    for entry in entries {
        let Reply::Array(parts) = entry else { return None };
        let [Reply::Integer(first), Reply::Integer(last), Reply::Array(master), ..] = &parts[..]
        else {
            return None;
        };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let [host, Reply::Integer(port), ..] = &master[..] else { return None };
        if first > last || last >= SLOTS {
            return None;
        }
        let host = match host {
            Reply::Text(host) => std::str::from_utf8(host).ok()?,
            Reply::Nil => "",
            _ => return None,
        };
        let host = match host {
            // A node that should be addressed by name and has none.
            "?" => address_in(master).unwrap_or(asked),
            // The host that was asked.
            "" => asked,
            host => host,
        };
        ranges.push(Range { first, last, host: host.to_owned(), port: u16::try_from(*port).ok()? });
    }
    Some(ranges)
}

/// A node's address, from the details that newer servers send after its id.
fn address_in(master: &[Reply]) -> Option<&str> {
    let Some(Reply::Array(pairs)) = master.get(3) else { return None };
    let ip = pairs.chunks_exact(2).find_map(|pair| match pair {
        [Reply::Text(name), Reply::Text(value)] if name == b"ip" => Some(value),
        _ => None,
    });
    std::str::from_utf8(ip?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Reply {
        Reply::Text(text.into())
    }

    fn entry(first: i64, last: i64, node: Vec<Reply>) -> Reply {
        Reply::Array(vec![Reply::Integer(first), Reply::Integer(last), Reply::Array(node)])
    }

    #[test]
    fn hosts_are_parsed_in_every_form_a_server_sends() {
        let ip = Reply::Array(vec![text("ip"), text("10.0.0.7")]);
        for (node, host) in [
            (vec![text("127.0.0.1"), Reply::Integer(1), text("id")], "127.0.0.1"),
            (vec![text("::1"), Reply::Integer(1), text("id"), Reply::Array(vec![])], "::1"),
            (vec![text("one.example"), Reply::Integer(1), text("id")], "one.example"),
            (vec![text(""), Reply::Integer(1), text("id")], "asked"),
            (vec![Reply::Nil, Reply::Integer(1), text("id")], "asked"),
            (vec![text("?"), Reply::Integer(1), text("id"), ip], "10.0.0.7"),
            (vec![text("?"), Reply::Integer(1), text("id"), Reply::Array(vec![])], "asked"),
        ] {
            let reply = Reply::Array(vec![entry(0, 16_383, node)]);
            let due = Range { first: 0, last: 16_383, host: host.into(), port: 1 };
            assert_eq!(ranges(&reply, "asked"), Some(vec![due]));
        }
    }

    #[test]
    fn a_reply_that_is_no_slot_table_is_refused() {
        let node = || vec![text("h"), Reply::Integer(1)];
        assert_eq!(ranges(&Reply::Array(vec![]), "asked"), Some(vec![]));
        for reply in [
            Reply::Nil,
            Reply::Array(vec![Reply::Nil]),
            Reply::Array(vec![entry(0, 16_384, node())]),
            Reply::Array(vec![entry(-1, 5, node())]),
            Reply::Array(vec![entry(6, 5, node())]),
            Reply::Array(vec![entry(0, 5, vec![text("h"), Reply::Integer(65_536)])]),
            Reply::Array(vec![entry(0, 5, vec![])]),
        ] {
            assert_eq!(ranges(&reply, "asked"), None, "{reply:?}");
        }
    }
}
