//! [`Peer`]: the server at the other end, and which of its words are passed on.
//!
//! A server quotes what it received: `unknown command 'HELLO', with args beginning with: '3' 'AUTH' …`.
//! Errors end in logs, and a password must not. So no word of a server about a login is passed on; our
//! own words describe the refusal. All other messages are passed on without the arguments of a command,
//! and not at all if they contain a user or a password.

use std::sync::Arc;

use super::node::Settings;
use crate::deadline::Deadline;
use crate::error::{RedisError, is_denied};

/// A server, or several, as messages name them.
#[derive(Clone)]
pub(crate) struct Peer {
    address: Arc<str>,
    login: Login,
}

/// The secrets that must not appear in messages.
#[derive(Clone)]
enum Login {
    Known {
        user: Option<Arc<str>>,
        password: Option<Arc<str>>,
    },
    /// The login of an external client, which may log in at any time.
    Unknown,
}

/// Replaces words that are not passed on.
const WITHHELD: &str = "(its words are not passed on, because they may quote a login)";

/// The parts of a server's message by which the store distinguishes errors.
const TELLING: [&str; 10] = [
    "unknown command",
    "DB index",
    "unauthenticated",
    "syntax error",
    "ACL failure in script",
    "executing the script can't",
    "No permissions to access a key",
    "NOPERM",
    "cluster support disabled",
    "max number of clients",
];

impl Peer {
    /// A server with the login that we use there, if any.
    pub(crate) fn new(address: Arc<str>, user: Option<&str>, password: Option<&str>) -> Self {
        // The default user, which every server has, reveals nothing.
        let user = user.filter(|user| !user.is_empty() && *user != "default");
        let password = password.filter(|password| !password.is_empty());
        let login = Login::Known { user: user.map(Arc::from), password: password.map(Arc::from) };
        Self { address, login }
    }

    /// The server of a client that logs in itself.
    pub(crate) fn of_given_client(address: &str) -> Self {
        Self { address: address.into(), login: Login::Unknown }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// An error reply of the server, with the remedy if there is one.
    pub(crate) fn error(&self, code: &str, detail: &str) -> RedisError {
        let is_code = code.len() <= 20 && code.bytes().all(|byte| byte.is_ascii_uppercase());
        let code = if is_code && !self.gives_away(code) { code } else { "ERR" };
        server_error(&self.address, code, &self.passed_on(code, detail))
    }

    /// The error for a reply that does not fit the request.
    pub(crate) fn unexpected(&self, answer: &super::Reply) -> RedisError {
        RedisError::Protocol { address: Arc::clone(&self.address), answer: answer.shape() }
    }

    pub(crate) fn unreachable(&self, reason: impl Into<String>) -> RedisError {
        RedisError::Unreachable { address: Arc::clone(&self.address), reason: reason.into() }
    }

    pub(crate) fn lost(&self, reason: impl Into<String>) -> RedisError {
        RedisError::Lost { address: Arc::clone(&self.address), reason: reason.into() }
    }

    /// The error when the deadline ends before a reply comes.
    pub(crate) fn timed_out(&self, deadline: Deadline) -> RedisError {
        RedisError::TimedOut { address: Arc::clone(&self.address), deadline: deadline.given() }
    }

    /// The error when no time is left to send a request.
    pub(crate) fn too_late(&self, deadline: Deadline) -> RedisError {
        self.unreachable(format!("no time was left of {:?}; nothing was sent", deadline.given()))
    }

    /// The part of a server's message that may be passed on.
    fn passed_on(&self, code: &str, detail: &str) -> String {
        match code {
            // A server's address, which the store parses.
            "MOVED" | "ASK" if super::route::place(detail).is_some() => return detail.to_owned(),
            // Contains another error.
            "RLPART" => {
                let (code, detail) = detail.split_once(' ').unwrap_or((detail, ""));
                return format!("{code} {}", self.passed_on(code, detail));
            }
            // A message of our own scripts.
            code if code.starts_with("RL") => return detail.to_owned(),
            _ => {}
        }
        let said = match detail.split_once(", with args beginning with") {
            Some((command, _)) if detail.contains("unknown command") => command,
            _ => detail,
        };
        let said = if let Login::Known { user: Some(user), .. } = &self.login {
            said.replace(&format!("User {user} has"), "this user has")
        } else {
            said.to_owned()
        };
        if !self.gives_away(&said) {
            return said;
        }
        let telling = TELLING.iter().filter(|part| said.contains(**part));
        telling.copied().chain([WITHHELD]).collect::<Vec<_>>().join(" ")
    }

    /// Whether this text contains or may contain a login.
    fn gives_away(&self, text: &str) -> bool {
        match &self.login {
            Login::Unknown => text.split(|c: char| !c.is_alphanumeric()).any(|word| {
                word.eq_ignore_ascii_case("AUTH") || word.eq_ignore_ascii_case("HELLO")
            }),
            Login::Known { user, password } => {
                let is_whole = |user: &str| {
                    text.match_indices(user).any(|(at, _)| {
                        let before = text[..at].chars().next_back();
                        let after = text[at + user.len()..].chars().next();
                        ![before, after].into_iter().flatten().any(char::is_alphanumeric)
                    })
                };
                password.as_deref().is_some_and(|password| text.contains(password))
                    || user.as_deref().is_some_and(is_whole)
            }
        }
    }

    /// The error for a refused login: what was tried, and what to check. Of the server's message, it
    /// uses only the kind.
    pub(crate) fn refused_login(
        &self,
        settings: &Settings,
        code: &str,
        detail: &str,
    ) -> RedisError {
        let address = &self.address;
        let tried = settings.tried();
        let said = |part: &str| detail.to_ascii_lowercase().contains(part);
        let config = |message: String| RedisError::Config(message);
        match code {
            "NOPROTO" => return config(format!("Redis at {address} {NO_HELLO}")),
            "ERR" if said("unknown command") && said("select") && !said("auth") => {
                return config(format!(
                    "Redis at {address} does not know SELECT; leave the database out of the URL"
                ));
            }
            "ERR" if said("unknown command") && settings.resp3 => {
                return config(format!("Redis at {address} {NO_HELLO}"));
            }
            "ERR" if said("unknown command") && settings.password.is_some() => {
                return config(format!(
                    "Redis at {address} does not know AUTH; allow the command there, or leave \
                     user:password@host out of the URL"
                ));
            }
            "ERR" if said("wrong number of arguments") && settings.password.is_some() => {
                return config(format!(
                    "Redis at {address} refused {tried}: it is older than Redis 6 and knows no users; \
                     write :password@host in the URL"
                ));
            }
            "ERR" if said("not allowed in cluster mode") => {
                return config(format!(
                    "Redis at {address} is one of a cluster, which has only database 0; use \
                     redis-cluster://{address}"
                ));
            }
            _ => {}
        }
        let (code, message) = match code {
            "WRONGPASS" => {
                ("WRONGPASS", format!("the user or the password is wrong, tried by {tried}"))
            }
            "NOAUTH" => ("NOAUTH", format!("it wants a login, and refused {tried}")),
            "NOPERM" => (
                "NOPERM",
                format!("the user may not do what it takes to connect, tried by {tried}, SELECT and PING"),
            ),
            "DENIED" => (
                "DENIED",
                "it is in protected mode and refuses connections from other machines; set a password there, and \
                 give it in the URL"
                    .into(),
            ),
            "ERR" if said("max number of clients") || said("max + cluster") => {
                ("ERR", "max number of clients reached; raise maxclients".into())
            }
            "ERR" if said("db index") => (
                "ERR",
                "DB index is out of range; choose a database that it has (CONFIG GET databases)".into(),
            ),
            code => {
                let known = remedy(code, "").is_some();
                let code = if known { code } else { "ERR" };
                (code, format!("it refused {tried} {WITHHELD}"))
            }
        };
        server_error(address, code, &message)
    }
}

const NO_HELLO: &str = "does not know HELLO 3, which protocol=resp3 in the URL asks for; use \
                        protocol=resp2";

/// An error reply, by its code, with the remedy if there is one.
pub(crate) fn server_error(address: &Arc<str>, code: &str, detail: &str) -> RedisError {
    let message = match remedy(code, detail) {
        Some(remedy) => format!("{detail} ({remedy})"),
        None => detail.to_owned(),
    };
    RedisError::Server { address: Arc::clone(address), code: code.to_owned(), message }
}

/// What an operator can do about an error, or has to know.
fn remedy(code: &str, detail: &str) -> Option<&'static str> {
    Some(match code {
        "NOAUTH" | "WRONGPASS" => "log in: give user and password in the URL, user:password@host",
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

    fn message(peer: &Peer, code: &str, detail: &str) -> (String, String) {
        match peer.error(code, detail) {
            RedisError::Server { code, message, .. } => (code, message),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_servers_words_are_passed_on_unless_they_may_quote_a_login() {
        let known = Peer::new("h:1".into(), Some("bob"), Some("s3cret"));
        for (code, detail, due) in [
            ("ERR", "value is no integer", "value is no integer"),
            ("ERR", "bobsleigh is no login", "bobsleigh is no login"),
            ("ERR", "unknown command 'X', with args beginning with: 'y' ", "unknown command 'X'"),
            ("ERR", "unknown command 's3cret'", &format!("unknown command {WITHHELD}")),
            ("ERR", "syntax error near bob", &format!("syntax error {WITHHELD}")),
            ("ERR", "so you are bob", WITHHELD),
            (
                "MOVED",
                "3999 s3cret:1",
                "3999 s3cret:1 (the server is one of a cluster; use redis-cluster://)",
            ),
            (
                "MOVED",
                "to s3cret",
                &format!("{WITHHELD} (the server is one of a cluster; use redis-cluster://)"),
            ),
            ("RLCORRUPT", "1 bob", "1 bob"),
            ("RLPART", "ERR xs3cretx", &format!("ERR {WITHHELD}")),
            (
                "NOPERM",
                "User bob has no permissions to run the 'get' command",
                &format!("this user has no permissions to run the 'get' command ({ALLOW})"),
            ),
        ] {
            assert_eq!(message(&known, code, detail), (code.into(), due.into()), "{code} {detail}");
        }
        assert_eq!(message(&known, "OTHER", "y").0, "OTHER");
        assert_eq!(message(&known, "s3cret", "y").0, "ERR");
    }

    #[test]
    fn words_about_logins_are_withheld_when_the_login_is_unknown() {
        let unknown = Peer::of_given_client("h:1");
        assert_eq!(message(&unknown, "ERR", "said 3 auth default x").1, WITHHELD);
        assert_eq!(message(&unknown, "NOAUTH", "Authentication required.").1.find("Auth"), Some(0));
    }

    #[test]
    fn errors_are_distinguished_alike_whatever_the_login() {
        for telling in TELLING {
            for secret in telling.split(' ') {
                for peer in [
                    Peer::new("h:1".into(), Some(secret), None),
                    Peer::new("h:1".into(), None, Some(secret)),
                ] {
                    let (_, message) = message(&peer, "ERR", &format!("so it {telling} was"));
                    assert!(message.contains(telling), "{secret}: {message}");
                }
            }
        }
    }
}
