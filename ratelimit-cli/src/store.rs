//! The store that `--store` names.

use std::borrow::Cow;
use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::ops::Deref;
use std::path::Path;
use std::time::Duration;

use ratelimit_core::{Batch, Check, Limit, Limits, Op, Policy, PolicyState, Store, Verdict};
use ratelimit_redis::{Cas, Lua, Mode, Multi, RedisError, RedisStore, RedisUrl, Tag};

use percent_encoding::percent_decode_str;

use crate::failure::Failure;

/// The deadline of a call to a server. Including the connection it stays below two seconds.
pub(crate) const DEADLINE: Duration = Duration::from_secs(1);

/// The value of `--store`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    Memory,
    Redis(Box<Redis>),
}

/// A Redis, and how its keys are tagged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redis {
    url: RedisUrl,
    /// The option `tag`, which is this tool's.
    pub(crate) tag: Tag,
}

impl Redis {
    /// Parses a URL. The error ends with `or`.
    fn parse(text: &str, or: &str) -> Result<Box<Self>, Failure> {
        let (plain, tag) = split_tag(text)?;
        // The error begins with the part of the URL that may be shown.
        let refused = |error| Failure::input(format!("--store {error}{or}"));
        Ok(Box::new(Self { url: RedisUrl::parse(&plain).map_err(refused)?, tag }))
    }
}

impl Deref for Redis {
    type Target = RedisUrl;

    fn deref(&self) -> &RedisUrl {
        &self.url
    }
}

impl fmt::Display for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

/// The secret that hides identifiers. It is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

impl Secret {
    /// The environment variable that holds a secret.
    pub(crate) const VARIABLE: &str = "RATELIMIT_SECRET";

    /// The secret in a file, or else in the environment. On the command line, other users could read it.
    pub(crate) fn find(file: Option<&Path>) -> Result<Option<Self>, Failure> {
        let Some(path) = file else {
            let secret = env::var_os(Self::VARIABLE).map(OsString::into_encoded_bytes);
            return Ok(secret.map(Self));
        };
        let secret = fs::read(path).map_err(|error| {
            let path = path.display();
            Failure::input(format!("--secret-file {path}: cannot be read: {error}; name a file"))
        })?;
        // Editors end a file with a line break, which is not part of the secret.
        let secret = secret.strip_suffix(b"\n").unwrap_or(&secret);
        Ok(Some(Self(secret.strip_suffix(b"\r").unwrap_or(secret).to_vec())))
    }
}

/// What the keys of a store are made of, beside identifiers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys<'k> {
    pub(crate) prefix: &'k str,
    pub(crate) secret: Option<&'k Secret>,
}

impl StoreUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        Redis::parse(text, "; or use --store memory").map(Self::Redis)
    }

    /// A store that lasts, which this command needs: there is nothing in a new memory store to work on.
    pub(crate) fn lasting(text: &str, command: &str) -> Result<Box<Redis>, Failure> {
        match text {
            "memory" => Err(Failure::input(format!(
                "--store memory: there is nothing in it to {command}; name one that lasts, such as \
                 redis://host:port"
            ))),
            text => Redis::parse(text, ""),
        }
    }

    /// The store's name for people, without user, password and options.
    pub(crate) fn display(&self) -> String {
        match self {
            Self::Memory => "memory".to_owned(),
            Self::Redis(redis) => redis.url.to_string(),
        }
    }
}

/// A URL without the option `tag`, and the tag.
///
/// # Errors
/// A tag that is none. The message does not quote it: the text may be a password in a wrong place.
pub(crate) fn split_tag(text: &str) -> Result<(String, Tag), Failure> {
    let Some((place, query)) = text.split_once('?') else {
        return Ok((text.to_owned(), Tag::default()));
    };
    let mut tag = None;
    let mut rest = Vec::new();
    for option in query.split('&') {
        let Some(value) = option.strip_prefix("tag=") else {
            rest.push(option);
            continue;
        };
        let parsed =
            percent_decode_str(value).decode_utf8().ok().and_then(|value| parse_tag(&value));
        if parsed.is_none() || tag.is_some() {
            return Err(Failure::input(
                "--store: the option tag is given once, as tag=identifier, tag=up-to:/ (any character), or \
                 tag=fixed:TEXT",
            ));
        }
        tag = parsed;
    }
    let mark = if rest.is_empty() { "" } else { "?" };
    Ok((format!("{place}{mark}{}", rest.join("&")), tag.unwrap_or_default()))
}

fn parse_tag(value: &str) -> Option<Tag> {
    if value == "identifier" {
        return Some(Tag::Identifier);
    }
    if let Some(text) = value.strip_prefix("fixed:") {
        return (!text.is_empty()).then(|| Tag::Fixed(text.to_owned()));
    }
    let mut end = value.strip_prefix("up-to:")?.chars();
    end.next().filter(|_| end.next().is_none()).map(Tag::UpTo)
}

/// A Redis store in one of its modes. All modes decide alike and keep separate states.
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
    /// Applies an operation to these limits, each at its own key, in one batch. A limiter would leave out shadow limits,
    /// and would refuse a caller without a required identifier: the tool asks about any caller.
    pub(crate) async fn apply_to(
        &self,
        keyed: &[(&Limit<Policy>, Cow<'_, str>)],
        op: Op,
        cost: u64,
    ) -> Result<Verdict, RedisError> {
        let checks: Vec<Check<'_, Policy>> =
            keyed.iter().map(|(limit, key)| Check { limit, key, cost }).collect();
        let batch = Batch::new(&checks)?;
        self.apply(&batch.op(op)).await
    }

    /// The state that is stored under a key.
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

/// Connects to Redis in the mode of the URL, if that mode can decide these limits.
pub(crate) async fn connect(
    redis: &Redis,
    keys: Keys<'_>,
    limits: &Limits<Policy>,
) -> Result<Remote, Failure> {
    connect_in(redis.mode(), redis, keys, limits).await
}

/// Connects in this mode, or in Lua if there is none.
pub(crate) async fn connect_in(
    mode: Option<&str>,
    redis: &Redis,
    keys: Keys<'_>,
    limits: &Limits<Policy>,
) -> Result<Remote, Failure> {
    supports(mode, redis, limits)?;
    let builder = RedisStore::builder().prefix(keys.prefix).tag(redis.tag.clone());
    let builder = builder.deadline(DEADLINE);
    let builder = match keys.secret {
        Some(Secret(secret)) => builder.hide_identifiers(secret),
        None => builder,
    };
    let connected = match mode {
        Some(Cas::NAME) => builder.cas().connect_to(redis).await.map(Remote::Cas),
        Some(Multi::NAME) => builder.multi().connect_to(redis).await.map(Remote::Multi),
        _ => builder.connect_to(redis).await.map(Remote::Lua),
    };
    connected.map_err(|error| failed(redis, &error))
}

/// Refuses limits that the mode cannot decide.
pub(crate) fn supports(
    mode: Option<&str>,
    redis: &RedisUrl,
    limits: &Limits<Policy>,
) -> Result<(), Failure> {
    if mode == Some(Multi::NAME) {
        RedisStore::<Multi>::supports(limits).map_err(|error| failed(redis, &error))?;
    }
    Ok(())
}

fn failed(redis: &RedisUrl, error: &RedisError) -> Failure {
    Failure::store(&format!("--store {redis}"), error)
}

/// A unique prefix that begins with this text: concurrent replays must not see each other's states.
pub(crate) fn own_prefix(begin: &str) -> String {
    // The only source of randomness in the standard library; it prevents collisions.
    let random = |n: u8| RandomState::new().hash_one(n);
    format!("{begin}{:016x}{:016x}", random(0), random(1) ^ u64::from(std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_redis_urls_name_a_store() {
        assert_eq!(StoreUrl::parse("memory").expect("a store"), StoreUrl::Memory);
        for (text, shown, mode) in [
            ("redis://10.0.0.1:1/2", "redis://10.0.0.1:1/2", None),
            ("redis://h.example?client=redis&mode=lua", "redis://h.example", Some("lua")),
            ("redis://localhost?client=fred&mode=cas", "redis://localhost", Some("cas")),
            ("rediss://u:p@h/0?tls-ca=ca.pem&mode=multi", "rediss://h/0", Some("multi")),
            ("redis-sentinel://u:p@h:1,h:2/cache/1", "redis-sentinel://h:1,h:2/cache/1", None),
            ("rediss-cluster://u:p@[::1]:1,h:2", "rediss-cluster://[::1]:1,h:2", None),
        ] {
            let store = StoreUrl::parse(text).expect(text);
            assert_eq!(store.display(), shown);
            let StoreUrl::Redis(redis) = &store else { panic!("{text} is a Redis") };
            assert_eq!(redis.mode(), mode);
            assert!(!format!("{redis:?}").contains("u:p"), "{redis:?}");
        }
    }

    #[test]
    fn a_tag_is_an_option_of_the_url() {
        for (url, plain, tag) in [
            ("redis://h", "redis://h", Tag::Identifier),
            ("redis://h?tag=identifier", "redis://h", Tag::Identifier),
            ("redis://h?tag=up-to:/", "redis://h", Tag::UpTo('/')),
            ("redis://h?mode=cas&tag=up-to:%26", "redis://h?mode=cas", Tag::UpTo('&')),
            ("redis://h?tag=fixed:a%20b&mode=cas", "redis://h?mode=cas", Tag::Fixed("a b".into())),
        ] {
            assert_eq!(split_tag(url).expect(url), (plain.to_owned(), tag), "{url}");
        }
        for url in [
            "redis://h?tag=",
            "redis://h?tag=up-to:",
            "redis://h?tag=up-to:ab",
            "redis://h?tag=fixed:",
            "redis://h?tag=fixed:a&tag=fixed:a",
            "redis://h?tag=s3cret",
        ] {
            let said = split_tag(url).expect_err(url).to_string();
            assert!(said.contains("tag=up-to:/") && !said.contains("s3cret"), "{said}");
        }
    }

    #[test]
    fn a_secret_is_never_shown() {
        assert_eq!(format!("{:?}", Secret(b"s3cret".to_vec())), "Secret(***)");
    }

    #[test]
    fn an_invalid_store_is_refused_with_what_is_accepted() {
        for (text, says) in [
            ("redis://h:1?client=x", "accepted are client=redis and client=fred"),
            ("redis://h:1?mode=x", "accepted are mode=lua, mode=cas and mode=multi"),
            ("redis://h:1?timeout=5", "the option timeout is not known"),
            ("redis-cluster://h:1,h:2/1", "only database 0"),
            ("redis://h:1/x", "redis://[user:password@]host"),
            ("memcached://h:1", "not known"),
            ("h:1", "accepted are redis://"),
            ("h:1", "--store memory"),
        ] {
            let error = StoreUrl::parse(text).expect_err(text);
            assert!(error.to_string().contains(says), "{text} → {error}");
            assert_eq!(error.exit_code(), 2);
        }
        let lasting = |text| StoreUrl::lasting(text, "list").expect_err(text).to_string();
        assert!(!lasting("memcached://h:1").contains("memory"));
        assert!(lasting("memory").contains("nothing in it to list; name one that lasts"));
    }

    #[test]
    fn no_user_and_no_password_is_ever_shown() {
        for (url, shown) in [
            ("redis://user:s3cret@h:1/2", "redis://h:1/2"),
            ("redis://user:s3cret@[::1]:1?mode=cas", "redis://[::1]:1"),
            ("redis-cluster://user:s3cret@h:1,h:2", "redis-cluster://h:1,h:2"),
            ("user:s3cret@h", "***"),
            ("redis://user:s3cret", "redis://***"),
            ("redis://user:1?s3cret@h:1", "redis://***"),
            ("redis://localhost:1?mode=s3cret", "redis://localhost:1"),
            ("redis-sentinel://[::1]:1?sentinel-password=s3cret", "redis-sentinel://[::1]:1"),
            ("redis://s3cret", "redis://***"),
        ] {
            let said = match StoreUrl::parse(url) {
                Ok(store) => store.display(),
                Err(failure) => failure.to_string(),
            };
            assert!(!said.contains("s3c") && !said.contains("user:s"), "{said}");
            assert!(said.contains(shown), "{said}");
        }
    }

    #[test]
    fn no_two_runs_share_a_prefix() {
        let (one, other) = (own_prefix("rl-replay-"), own_prefix("rl-replay-"));
        assert!(one.starts_with("rl-replay-") && one != other, "{one} {other}");
    }
}
