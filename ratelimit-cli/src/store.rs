//! Where the states are: what `--store` can say, and what is not there yet.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use ratelimit_core::{Batch, Limit, Limits, Policy, PolicyState, Store, Verdict};
use ratelimit_redis::{Cas, Lua, Multi, RedisError, RedisStore};

use crate::failure::Failure;

/// How long a call to a server may take. With connecting it stays below two seconds.
const DEADLINE: Duration = Duration::from_secs(1);

/// What `--store` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    Memory,
    Redis(RedisUrl),
}

/// A Redis, and how to decide on it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RedisUrl {
    /// Without what only this tool understands.
    url: String,
    /// Without its login and its options, for people.
    shown: String,
    mode: Mode,
}

// By hand: a URL may hold a password.
impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisUrl").field(&self.shown).field(&self.mode).finish()
    }
}

/// How a batch is decided on Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Lua,
    Cas,
    Multi,
}

const WRITE: &str = "write redis://[user:password@]host[:port][/db]";

impl StoreUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        let shown = redacted(text);
        let refuse = |what: &str| Failure::input(format!("--store {shown}: {what}"));
        let not_yet =
            |what: &str| refuse(&format!("{what} is not supported yet; use redis://host:port"));
        let Some((scheme, _)) = text.split_once("://").filter(|(scheme, _)| is_name(scheme)) else {
            return Err(refuse("accepted are memory and redis://host:port"));
        };
        match scheme {
            "redis" => {}
            "rediss" | "redis-sentinel" | "redis-cluster" => return Err(not_yet(scheme)),
            _ => {
                return Err(refuse(&format!(
                    "{scheme} is not known; accepted are memory and redis://host:port"
                )));
            }
        }
        let Some(parts) = Parts::of(text) else {
            return Err(refuse(&format!(
                "this is no URL of a Redis; {WRITE}, and in user and password %40 for @, %2F for /, \
                 %3A for :, %3F for ?, %23 for #"
            )));
        };
        let (mut client, mut mode, mut protocol) = (None, None, None);
        for pair in parts.query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            // Never the value, nor what may be one: it may be a password.
            let (name, value) = match pair.split_once('=') {
                Some((name, value)) if is_name(name) => (name, value),
                _ => return Err(refuse("what follows ? is not of the form name=value")),
            };
            let option = match name {
                "client" => &mut client,
                "mode" => &mut mode,
                "protocol" => &mut protocol,
                _ => {
                    return Err(refuse(&format!(
                        "the option {name} is not known; accepted are client, mode and protocol"
                    )));
                }
            };
            if option.replace(value).is_some() {
                return Err(refuse(&format!("{name} is given twice; give it once")));
            }
        }
        match client {
            None | Some("redis") => {}
            Some("fred") => return Err(not_yet("client=fred")),
            Some(_) => return Err(refuse("this client is not known; accepted is client=redis")),
        }
        let mode = match mode {
            None | Some("lua") => Mode::Lua,
            Some("cas") => Mode::Cas,
            Some("multi") => Mode::Multi,
            Some(_) => {
                return Err(refuse(
                    "this mode is not known; accepted are mode=lua, mode=cas and mode=multi",
                ));
            }
        };
        let mut url = text.split('?').next().unwrap_or(text).to_owned();
        if let Some(protocol) = protocol {
            if !matches!(protocol, "2" | "resp2" | "3" | "resp3") {
                let accepted = "accepted are protocol=resp2 and protocol=resp3";
                return Err(refuse(&format!("this protocol is not known; {accepted}")));
            }
            url.push_str("?protocol=");
            url.push_str(protocol);
        }
        Ok(Self::Redis(RedisUrl { url, shown, mode }))
    }

    /// The store for people, without user, password and options.
    pub(crate) fn display(&self) -> String {
        match self {
            Self::Memory => "memory".to_owned(),
            Self::Redis(redis) => redis.shown.clone(),
        }
    }
}

/// A word that gives nothing away: a scheme, or an option's name.
fn is_name(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || "+-_.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.len() <= 20
        && text.chars().all(word)
}

/// The parts of a URL that are fit to be seen.
struct Parts<'u> {
    scheme: &'u str,
    /// Host and port.
    address: &'u str,
    /// The database, with its slash.
    database: &'u str,
    query: Option<&'u str>,
}

impl<'u> Parts<'u> {
    /// `None` unless each part is beyond doubt: what is no host, port or number may be a password
    /// that somebody put in the wrong place, or did not escape.
    fn of(url: &'u str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://").filter(|(scheme, _)| is_name(scheme))?;
        let (place, query) = match rest.split_once('?') {
            Some((place, query)) => (place, Some(query)),
            None => (rest, None),
        };
        let (authority, database) = place.split_at(place.find('/').unwrap_or(place.len()));
        let address = authority.rsplit_once('@').map_or(authority, |(_, address)| address);
        let (host, port) = match address.strip_prefix('[').and_then(|host| host.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, port)) => (host, Some(port.strip_prefix(':')?)),
            None => match address.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (address, None),
            },
        };
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let named = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_host = if address.starts_with('[') {
            host.parse::<std::net::Ipv6Addr>().is_ok()
        } else {
            !host.is_empty() && host.chars().all(named)
        };
        let is_port = port.is_none_or(|port| digits(port) && port.parse::<u16>().is_ok());
        let is_database = database.len() <= 1 || digits(&database[1..]);
        let hides_more =
            authority.contains('#') || query.is_some_and(|query| query.contains(['@', '#']));
        (is_host && is_port && is_database && !hides_more).then_some(Self {
            scheme,
            address,
            database,
            query,
        })
    }
}

/// A URL for people: where the store is, and nothing that is, or might be, a password.
fn redacted(url: &str) -> String {
    match Parts::of(url) {
        Some(Parts { scheme, address, database, .. }) => format!("{scheme}://{address}{database}"),
        None => match url.split_once("://") {
            Some((scheme, _)) if is_name(scheme) => format!("{scheme}://***"),
            _ => "***".to_owned(),
        },
    }
}

/// A Redis in any mode. They decide alike, and keep their states apart.
#[derive(Debug)]
pub(crate) enum Remote {
    Lua(RedisStore<Lua>),
    Cas(RedisStore<Cas>),
    Multi(RedisStore<Multi>),
}

impl Store<Policy> for Remote {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, RedisError> {
        match self {
            Self::Lua(store) => store.apply(batch).await,
            Self::Cas(store) => store.apply(batch).await,
            Self::Multi(store) => store.apply(batch).await,
        }
    }
}

impl Remote {
    /// What is stored under a key.
    pub(crate) async fn state(
        &self,
        limit: &Limit<Policy>,
        key: &str,
    ) -> Result<Option<PolicyState>, RedisError> {
        match self {
            Self::Lua(store) => store.state(limit, key).await,
            Self::Cas(store) => store.state(limit, key).await,
            Self::Multi(store) => store.state(limit, key).await,
        }
    }
}

/// Connects to Redis, if the mode can decide these limits.
pub(crate) async fn connect(
    redis: &RedisUrl,
    prefix: &str,
    limits: &Limits<Policy>,
) -> Result<Remote, Failure> {
    let failed = |error| Failure::store(&format!("--store {}", redis.shown), &error);
    if redis.mode == Mode::Multi {
        RedisStore::<Multi>::supports(limits).map_err(failed)?;
    }
    let builder = RedisStore::builder().prefix(prefix).deadline(DEADLINE);
    let connected = match redis.mode {
        Mode::Lua => builder.connect(&redis.url).await.map(Remote::Lua),
        Mode::Cas => builder.cas().connect(&redis.url).await.map(Remote::Cas),
        Mode::Multi => builder.multi().connect(&redis.url).await.map(Remote::Multi),
    };
    connected.map_err(failed)
}

/// A prefix that no other run has: two replays at once must not see each other's states.
pub(crate) fn replay_prefix() -> String {
    // The only source of randomness that the standard library has; it is there against collisions.
    let random = |n: u8| RandomState::new().hash_one(n);
    format!("rl-replay-{:016x}{:016x}", random(0), random(1) ^ u64::from(std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_store_can_be() {
        assert_eq!(StoreUrl::parse("memory").expect("a store"), StoreUrl::Memory);
        for (text, url, mode) in [
            ("redis://h:1/2", "redis://h:1/2", Mode::Lua),
            ("redis://h:1?client=redis&mode=lua", "redis://h:1", Mode::Lua),
            ("redis://u:p@h/0?mode=cas", "redis://u:p@h/0", Mode::Cas),
            ("redis://h:1?mode=multi", "redis://h:1", Mode::Multi),
            (
                "redis://[::1]:1/?mode=cas&protocol=resp3",
                "redis://[::1]:1/?protocol=resp3",
                Mode::Cas,
            ),
        ] {
            let StoreUrl::Redis(redis) = StoreUrl::parse(text).expect(text) else {
                panic!("{text} is a Redis")
            };
            assert_eq!((&*redis.url, redis.mode), (url, mode));
            assert!(!format!("{redis:?}").contains("u:p"), "{redis:?}");
        }
    }

    #[test]
    fn what_cannot_be_used_says_what_can() {
        for (text, says) in [
            ("rediss://h:1", "not supported yet; use redis://"),
            ("redis-sentinel://h:1", "not supported yet"),
            ("redis-cluster://h:1,h:2", "not supported yet"),
            ("redis://h:1?client=fred", "client=fred is not supported yet"),
            ("redis://h:1?mode=x", "accepted are mode=lua, mode=cas and mode=multi"),
            ("redis://h:1?mode=cas&mode=lua", "mode is given twice"),
            ("redis://h:1?timeout=5", "the option timeout is not known"),
            ("redis://h:1?mode", "name=value"),
            ("redis://h:1?protocol=5", "protocol=resp3"),
            ("redis://h:1/x", "redis://[user:password@]host"),
            ("redis://", "redis://[user:password@]host"),
            ("memcached://h:1", "not known"),
            ("h:1", "accepted are"),
        ] {
            let error = StoreUrl::parse(text).expect_err(text);
            assert!(error.to_string().contains(says), "{text} → {error}");
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn no_user_and_no_password_is_ever_shown() {
        for (url, shown) in [
            ("redis://user:s3cret@h:1/2", "redis://h:1/2"),
            ("redis://:s3cret@h:1", "redis://h:1"),
            ("redis://s3cret@h:1", "redis://h:1"),
            ("redis://user:s3c@ret@h:1", "redis://h:1"),
            ("redis://user:s3cret@[::1]:1?mode=cas", "redis://[::1]:1"),
            ("redis://h:1", "redis://h:1"),
            // Not a URL, or not the one that was meant.
            ("user:s3cret@h", "***"),
            ("s3cret", "***"),
            ("redis://:s3cret", "redis://***"),
            ("redis://user:s3cret", "redis://***"),
            ("redis://user:s3cret%40127.0.0.1:1", "redis://***"),
            ("redis://user:1/s3cret@h:1", "redis://***"),
            ("redis://user:1?s3cret@h:1", "redis://***"),
            ("redis://user:1#s3cret@h:1", "redis://***"),
            ("redis://h:1?password=s3cret", "redis://h:1"),
            ("redis://h:1?s3cret", "redis://h:1"),
            ("redis://h:1?mode=s3cret", "redis://h:1"),
            ("redis://h:1?client=s3cret", "redis://h:1"),
            ("redis://h:1?password=x@s3cret", "redis://***"),
            ("rediss://user:s3cret@h:1", "rediss://h:1"),
        ] {
            assert_eq!(redacted(url), shown, "{url}");
            let said = match StoreUrl::parse(url) {
                Ok(store) => store.display(),
                Err(failure) => failure.to_string(),
            };
            assert!(!said.contains("s3c") && !said.contains("ret"), "{said}");
            assert!(!said.contains("user:s") && said.contains(shown), "{said}");
        }
    }

    #[test]
    fn no_two_replays_share_a_prefix() {
        assert_ne!(replay_prefix(), replay_prefix());
    }
}
