//! Where the states are: what `--store` can say, and what is not there yet.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use ratelimit_redis::RedisStore;

use crate::failure::Failure;

/// How long a call to a server may take. With connecting it stays below two seconds.
const DEADLINE: Duration = Duration::from_secs(1);

/// What `--store` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    Memory,
    /// A Redis URL, without what only this tool understands.
    Redis(String),
}

impl StoreUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(Failure::input(format!(
                "--store {:?}: accepted are memory and redis://host:port",
                redacted(text)
            )));
        };
        match scheme {
            "redis" => {}
            "rediss" | "redis-sentinel" | "redis-cluster" => return Err(not_yet(text, scheme)),
            _ => {
                return Err(Failure::input(format!(
                    "--store {}: {scheme} is not known; accepted are memory and redis://host:port",
                    redacted(text)
                )));
            }
        }
        let Some((address, query)) = rest.split_once('?') else {
            return Ok(Self::Redis(text.to_owned()));
        };
        let mut passed_on = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair {
                "client=redis" | "mode=lua" => {}
                "client=fred" | "mode=multi" | "mode=cas" => return Err(not_yet(text, pair)),
                _ if pair.starts_with("client=") || pair.starts_with("mode=") => {
                    return Err(Failure::input(format!(
                        "--store {}: {pair} is not known; accepted are client=redis and mode=lua",
                        redacted(text)
                    )));
                }
                _ => passed_on.push(pair),
            }
        }
        let query = passed_on.join("&");
        let mark = if query.is_empty() { "" } else { "?" };
        Ok(Self::Redis(format!("redis://{address}{mark}{query}")))
    }

    /// The store for people, without its password.
    pub(crate) fn display(&self) -> String {
        match self {
            Self::Memory => "memory".to_owned(),
            Self::Redis(url) => redacted(url),
        }
    }
}

fn not_yet(url: &str, what: &str) -> Failure {
    Failure::input(format!(
        "--store {}: {what} is not supported yet; use redis://host:port",
        redacted(url)
    ))
}

/// A URL without its password, however broken it is: nothing before the last `@` is shown but the
/// scheme and the user.
pub(crate) fn redacted(url: &str) -> String {
    let Some((login, rest)) = url.rsplit_once('@') else { return url.to_owned() };
    let (scheme, login) = login.split_once("://").unwrap_or(("", login));
    let user = login.split(':').next().unwrap_or_default();
    let mark = if scheme.is_empty() { "" } else { "://" };
    // Without a colon it may be a password that somebody took for a user.
    let login = if login.contains(':') { format!("{user}:***") } else { "***".to_owned() };
    format!("{scheme}{mark}{login}@{rest}")
}

/// Connects to Redis.
pub(crate) async fn connect(url: &str, prefix: &str) -> Result<RedisStore, Failure> {
    let what = format!("--store {}", redacted(url));
    let builder = RedisStore::builder().prefix(prefix).deadline(DEADLINE);
    builder.connect(url).await.map_err(|error| Failure::store(&what, &error))
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
        let redis = |url: &str| StoreUrl::Redis(url.to_owned());
        for (text, store) in [
            ("memory", StoreUrl::Memory),
            ("redis://h:1/2", redis("redis://h:1/2")),
            ("redis://h:1?client=redis&mode=lua", redis("redis://h:1")),
            ("redis://h:1?mode=lua&protocol=resp3", redis("redis://h:1?protocol=resp3")),
        ] {
            assert_eq!(StoreUrl::parse(text).expect(text), store);
        }
    }

    #[test]
    fn what_is_not_there_yet_says_what_to_use() {
        for (text, says) in [
            ("rediss://h:1", "not supported yet; use redis://"),
            ("redis-sentinel://h:1", "not supported yet"),
            ("redis-cluster://h:1", "not supported yet"),
            ("redis://h:1?client=fred", "client=fred is not supported yet"),
            ("redis://h:1?mode=multi", "mode=multi is not supported yet"),
            ("redis://h:1?mode=cas", "mode=cas is not supported yet"),
            ("redis://h:1?mode=x", "not known"),
            ("memcached://h:1", "not known"),
            ("h:1", "accepted are"),
        ] {
            let error = StoreUrl::parse(text).expect_err(text);
            assert!(error.to_string().contains(says), "{text} → {error}");
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn no_password_is_ever_shown() {
        for (url, shown) in [
            ("redis://u:secret@h:1/2", "redis://u:***@h:1/2"),
            ("redis://:secret@h:1", "redis://:***@h:1"),
            ("redis://secret@h:1", "redis://***@h:1"),
            ("redis://u:sec@ret@h:1", "redis://u:***@h:1"),
            ("u:secret@h", "u:***@h"),
            ("redis://h:1", "redis://h:1"),
        ] {
            assert_eq!(redacted(url), shown);
        }
    }

    #[test]
    fn no_two_replays_share_a_prefix() {
        assert_ne!(replay_prefix(), replay_prefix());
    }
}
