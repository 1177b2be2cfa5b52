//! What an error says about which server to ask.

use crate::error::RedisError;

/// How often a request follows to another server.
pub(crate) const MAX_REDIRECTIONS: usize = 8;

/// A server, as another one names it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place<'e> {
    /// Nothing, or a question mark, if it is the host that was asked.
    pub(crate) host: &'e str,
    pub(crate) port: u16,
}

/// What to do about an error.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Hint<'e> {
    /// The slot is kept there, from now on.
    Moved(Place<'e>),
    /// This once ask there.
    Ask(Place<'e>),
    /// The keys of the request are in two places at the moment.
    Again,
    /// It was not executed, and somebody else may be in charge by now.
    Elsewhere,
    /// It may have been executed, and somebody else may be in charge by now.
    Doubt,
    /// That is the answer.
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

/// Of what a server says after MOVED or ASK, the slot and who keeps it, the latter.
pub(crate) fn place(message: &str) -> Option<Place<'_>> {
    let (host, port) = message.split_ascii_whitespace().nth(1)?.rsplit_once(':')?;
    Some(Place { host, port: port.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_to_ask_is_read_from_what_a_server_says() {
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
