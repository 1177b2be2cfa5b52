//! [`Peer`]: the server at the other end, and which of its words are passed on.
//!
//! A server quotes what it received: `unknown command 'HELLO', with args beginning with: '3' 'AUTH'
//! …`. Errors end in logs, and a login must not. So nothing that a server says about `AUTH` or
//! `HELLO` is passed on, no arguments, and no user's name. Our own words describe a refused login.

use std::sync::Arc;

use super::reply::Reply;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result, is_denied};

/// A server, or several, as messages name them.
#[derive(Clone)]
pub(crate) struct Peer {
    address: Arc<str>,
}

const LOG_IN: &str = "log in: give user and password in the URL, user:password@host";

/// Replaces words that are not passed on.
pub(super) const WITHHELD: &str = "(its words are not passed on, because they may quote a login)";

impl Peer {
    pub(crate) fn new(address: impl Into<Arc<str>>) -> Self {
        Self { address: address.into() }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// An error reply of the server, with the remedy if there is one.
    pub(crate) fn error(&self, code: &str, detail: &str) -> RedisError {
        let is_code = code.len() <= 20 && code.bytes().all(|byte| byte.is_ascii_uppercase());
        let shown = if is_code && !is_about_login(code) { code } else { "ERR" };
        server_error(&self.address, shown, &passed_on(code, detail))
    }

    /// The error for a reply that does not fit the request.
    pub(crate) fn unexpected(&self, answer: &Reply) -> RedisError {
        RedisError::Protocol { address: Arc::clone(&self.address), answer: answer.shape() }
    }

    /// The replies in an array.
    pub(super) fn array(&self, reply: Reply) -> Result<Vec<Reply>> {
        match reply {
            Reply::Array(replies) => Ok(replies),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(crate) fn unreachable(&self, reason: impl Into<String>) -> RedisError {
        RedisError::Unreachable { address: Arc::clone(&self.address), reason: reason.into() }
    }

    pub(crate) fn lost(&self, reason: impl Into<String>) -> RedisError {
        RedisError::Lost { address: Arc::clone(&self.address), reason: reason.into() }
    }

    /// The error when none of these servers is in charge.
    pub(crate) fn no_server(&self, reason: impl Into<String>) -> RedisError {
        RedisError::NoServer { address: Arc::clone(&self.address), reason: reason.into() }
    }

    /// The error when the deadline ends before a reply comes.
    pub(crate) fn timed_out(&self, deadline: Deadline) -> RedisError {
        RedisError::TimedOut { address: Arc::clone(&self.address), deadline: deadline.given() }
    }

    /// The error for a script that decided otherwise than the step of this limit.
    pub(crate) fn disagrees(&self, limit: &str) -> RedisError {
        RedisError::Disagrees { limit: limit.into(), address: Arc::clone(&self.address) }
    }

    /// The error when no time is left to send a request.
    pub(crate) fn too_late(&self, deadline: Deadline) -> RedisError {
        self.unreachable(format!("no time was left of {:?}; nothing was sent", deadline.given()))
    }
}

/// The part of a server's message that may be passed on.
fn passed_on(code: &str, detail: &str) -> String {
    let said = detail.split_once(", with args").map_or(detail, |(said, _)| said);
    let said = without_user(said);
    // Our own scripts send no login, and what they say names limits.
    if code.starts_with("RL") || !(is_about_login(code) || is_about_login(&said)) {
        return said;
    }
    let what = if said.contains("unknown command") { "unknown command " } else { "" };
    format!("{what}{WITHHELD}")
}

fn is_about_login(text: &str) -> bool {
    let is_login = |word: &str| ["AUTH", "HELLO"].iter().any(|it| word.eq_ignore_ascii_case(it));
    text.split(|c: char| !c.is_alphanumeric()).any(is_login)
}

/// The same without the name in `User alice has no permissions …`.
fn without_user(said: &str) -> String {
    const DENIED: &str = " has no permissions";
    let parts = said.split_once("User ").zip(said.split_once(DENIED));
    match parts {
        Some(((before, _), (_, after))) => format!("{before}this user{DENIED}{after}"),
        None => said.to_owned(),
    }
}

/// An error reply, by its code, with the remedy if there is one.
pub(super) fn server_error(address: &Arc<str>, code: &str, detail: &str) -> RedisError {
    let message = match remedy(code, detail) {
        Some(remedy) => format!("{detail} ({remedy})"),
        None => detail.to_owned(),
    };
    RedisError::Server { address: Arc::clone(address), code: code.to_owned(), message }
}

/// The error for a command that the server refused in a script, after one that wrote: its code and
/// message.
pub(crate) fn refused_in_part(address: &Arc<str>, refused: &str) -> RedisError {
    let (code, message) = refused.split_once(' ').unwrap_or((refused, ""));
    server_error(address, code, message).in_part()
}

/// What an operator can do about an error, or has to know.
pub(super) fn remedy(code: &str, detail: &str) -> Option<&'static str> {
    Some(match code {
        "NOAUTH" | "WRONGPASS" => LOG_IN,
        // A request too long for a client that has not logged in.
        "ERR" if detail.contains("unauthenticated") => LOG_IN,
        code if is_denied(code, detail) => ALLOW,
        "MOVED" | "ASK" => "the server is one of a cluster; use redis-cluster://",
        "CROSSSLOT" => "the keys of one request have to be of one slot",
        "READONLY" => "the server is a replica; name its master, or sentinels by redis-sentinel://",
        "MASTERDOWN" => {
            "the server is a replica that has lost its master; name the master, or \
                         sentinels by redis-sentinel://"
        }
        "CLUSTERDOWN" => "some slots have no master that answers; CLUSTER NODES tells which",
        "TRYAGAIN" => "the slot is on its way to another server",
        "LOADING" => "it has just started, and answers when it is done",
        "OOM" => "raise maxmemory, or give the limits a server of their own",
        "BUSY" => "a script does not end; SCRIPT KILL ends one that has not written",
        "NOREPLICAS" => "fewer replicas are in touch than min-replicas-to-write asks for",
        "MISCONF" => "the server cannot save and therefore refuses to write; see to its disk",
        _ => return None,
    })
}

const ALLOW: &str = "allow it by ACL SETUSER, or log in as a user with that permission";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_words_are_passed_on_without_what_may_quote_a_login() {
        let peer = Peer::new("h:1");
        for (code, detail, due) in [
            ("ERR", "value is no integer", "ERR: value is no integer"),
            (
                "ERR",
                "unknown command 'X', with args beginning with: 'y' ",
                "ERR: unknown command 'X'",
            ),
            ("ERR", "said 3 auth default x", &format!("ERR: {WITHHELD}")),
            ("ERR", "unknown command 'HELLO 3 x'", &format!("ERR: unknown command {WITHHELD}")),
            ("ERR", "unauthenticated length", &format!("ERR: unauthenticated length ({LOG_IN})")),
            ("AUTH", "bob x", &format!("ERR: {WITHHELD}")),
            ("s3cret", "y", "ERR: y"),
            (
                "BUSY",
                "x",
                "BUSY: x (a script does not end; SCRIPT KILL ends one that has not written)",
            ),
            ("OTHER", "y", "OTHER: y"),
            ("NOAUTH", "Authentication!", &format!("NOAUTH: Authentication! ({LOG_IN})")),
            (
                "MOVED",
                "3999 auth.example:1",
                &format!(
                    "MOVED: {WITHHELD} (the server is one of a cluster; use redis-cluster://)"
                ),
            ),
            ("RLOTHERS", "1 auth", "RLOTHERS: 1 auth"),
            ("RLPART", "ERR unknown command 'X', with args 'y'", "RLPART: ERR unknown command 'X'"),
            (
                "NOPERM",
                "User bob has no permissions to run the 'get' command",
                &format!("NOPERM: this user has no permissions to run the 'get' command ({ALLOW})"),
            ),
        ] {
            let said = peer.error(code, detail).to_string();
            assert_eq!(said, format!("Redis at h:1 answered {due}"));
        }
    }
}
