//! Derives from an error which server to ask next.

use crate::error::RedisError;

/// How many redirections a request follows.
pub(crate) const MAX_REDIRECTIONS: usize = 8;

/// A server, as another server names it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place<'e> {
    /// Empty or `?` for the host that was asked.
    pub(crate) host: &'e str,
    pub(crate) port: u16,
}

/// What an error says about the next step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Hint<'e> {
    /// The slot lies there from now on.
    Moved(Place<'e>),
    /// Ask there for this request only.
    Ask(Place<'e>),
    /// The request's keys lie on two servers at the moment.
    Again,
    /// The request was not executed, and another server may be in charge by now.
    Elsewhere,
    /// The request may have been executed, and another server may be in charge by now.
    Doubt,
    /// The error is the reply.
    Final,
}

pub(crate) fn hint(error: &RedisError) -> Hint<'_> {
    match error {
        RedisError::Unreachable { .. } | RedisError::NoServer { .. } => Hint::Elsewhere,
        RedisError::Lost { .. } | RedisError::TimedOut { .. } => Hint::Doubt,
        RedisError::Server { code, message, .. } => match code.as_str() {
            "MOVED" => place(message).map_or(Hint::Final, Hint::Moved),
            "ASK" => place(message).map_or(Hint::Final, Hint::Ask),
            "TRYAGAIN" => Hint::Again,
            "READONLY" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" => Hint::Elsewhere,
            _ => Hint::Final,
        },
        _ => Hint::Final,
    }
}

/// Parses the server in a MOVED or ASK message, which names the slot and its owner.
pub(crate) fn place(message: &str) -> Option<Place<'_>> {
    let (host, port) = message.split_ascii_whitespace().nth(1)?.rsplit_once(':')?;
    Some(Place { host, port: port.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirections_are_parsed_from_server_errors() {
        let place = |host, port| Place { host, port };
        for (code, message, due) in [
            ("MOVED", "3999 127.0.0.1:6381", Hint::Moved(place("127.0.0.1", 6381))),
            ("MOVED", "3999 127.0.0.1:6381 (and more)", Hint::Moved(place("127.0.0.1", 6381))),
            ("MOVED", "3999 fe80::1:6381", Hint::Moved(place("fe80::1", 6381))),
            ("MOVED", "3999 :6381", Hint::Moved(place("", 6381))),
            ("ASK", "3999 node-1.example:6381", Hint::Ask(place("node-1.example", 6381))),
            ("MOVED", "3999", Hint::Final),
            ("MOVED", "3999 h:x", Hint::Final),
            ("TRYAGAIN", "Multiple keys request during rehashing of slot", Hint::Again),
            ("CLUSTERDOWN", "The cluster is down", Hint::Elsewhere),
            ("LOADING", "Redis is loading the dataset in memory", Hint::Elsewhere),
            ("NOPERM", "", Hint::Final),
        ] {
            let error = RedisError::Server {
                address: "h:1".into(),
                code: code.into(),
                message: message.into(),
            };
            assert_eq!(hint(&error), due, "{code} {message}");
        }
    }
}
