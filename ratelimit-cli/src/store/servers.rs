//! Stores on servers: their URLs, how to connect, and what to ask in whichever mode.

use std::borrow::Cow;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use ratelimit_core::store::{Batch, Check, Op, RecordStore};
use ratelimit_core::{
    AnyAlgorithm, Limit, Limits, Record, Refusal, Store, StoreError as _, Verdict,
};
use ratelimit_redis::{Cas, Lua, Multi, RedisError, RedisStore, RedisUrl, Tag};
use ratelimit_replay::failure::Failure;

use crate::args::CallerArgs;
use crate::store::secret;

/// The deadline of a call to a server. Including the connection it stays below two seconds.
const DEADLINE: Duration = Duration::from_secs(1);

/// A Redis, and how its keys are tagged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redis {
    pub(crate) url: RedisUrl,
    /// The option `tag`, which is this tool's.
    pub(crate) tag: Tag,
}

impl Redis {
    /// Parses a URL. The error ends with `or`.
    pub(super) fn parse(text: &str, or: &str) -> Result<Box<Self>, Failure> {
        let (plain, tag) = split_tag(text)?;
        // The error begins with the part of the URL that may be shown.
        let refused = |error| Failure::input(format!("--store {error}{or}"));
        Ok(Box::new(Self { url: RedisUrl::parse(&plain).map_err(refused)?, tag }))
    }

    /// A store that lasts, which this command needs: there is nothing in a new memory store to work
    /// on.
    pub(crate) fn lasting(text: &str, command: &str) -> Result<Box<Self>, Failure> {
        if text == "memory" {
            return Err(Failure::input(format!(
                "--store memory: there is nothing in it to {command}; name one that lasts, such as redis://host:port"
            )));
        }
        Self::parse(text, "")
    }
}

/// A URL without the option `tag`, and the tag.
///
/// # Errors
/// A tag that is none. The message does not quote it: the text may be a password in a wrong place.
fn split_tag(text: &str) -> Result<(String, Tag), Failure> {
    let Some((place, query)) = text.split_once('?') else {
        return Ok((text.to_owned(), Tag::default()));
    };
    let (tags, rest): (Vec<_>, Vec<_>) =
        query.split('&').partition(|option| option.starts_with("tag="));
    let tag = match tags[..] {
        [] => Some(Tag::default()),
        [tag] => percent_decode_str(&tag[4..]).decode_utf8().ok().and_then(|tag| parse_tag(&tag)),
        _ => None,
    };
    let tag = tag.ok_or_else(|| {
        Failure::input(
            "--store: the option tag is given once, as tag=identifier, tag=up-to:/ (any character), or tag=fixed:TEXT",
        )
    })?;
    let mark = if rest.is_empty() { "" } else { "?" };
    Ok((format!("{place}{mark}{}", rest.join("&")), tag))
}

fn parse_tag(value: &str) -> Option<Tag> {
    match value.split_once(':') {
        None if value == "identifier" => Some(Tag::Identifier),
        Some(("fixed", text)) if !text.is_empty() => Some(Tag::Fixed(text.to_owned())),
        Some(("up-to", end)) => end.parse().ok().map(Tag::UpTo),
        _ => None,
    }
}

/// A Redis store in one of its modes. All modes decide alike and keep separate states.
pub(crate) enum Remote {
    Lua(RedisStore<Lua>),
    Cas(RedisStore<Cas>),
    Multi(RedisStore<Multi>),
}

/// What to do with a store in whichever mode it is.
macro_rules! in_each_mode {
    ($remote:expr, $store:ident => $do:expr) => {
        match $remote {
            $crate::store::Remote::Lua($store) => $do,
            $crate::store::Remote::Cas($store) => $do,
            $crate::store::Remote::Multi($store) => $do,
        }
    };
}
pub(crate) use in_each_mode;

impl Store<AnyAlgorithm> for Remote {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, RedisError> {
        in_each_mode!(self, store => store.apply(batch).await)
    }
}

/// A transaction cannot decide by a record.
impl RecordStore<AnyAlgorithm> for Remote {
    async fn record(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
    ) -> Result<Option<Record<AnyAlgorithm>>, RedisError> {
        match self {
            Self::Lua(store) => store.record(limit, key).await,
            Self::Cas(store) => store.record(limit, key).await,
            Self::Multi(_) => Err(no_records(limit)),
        }
    }

    async fn exchange_record(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
        standing: Option<&Record<AnyAlgorithm>>,
        next: Option<&Record<AnyAlgorithm>>,
    ) -> Result<bool, RedisError> {
        match self {
            Self::Lua(store) => store.exchange_record(limit, key, standing, next).await,
            Self::Cas(store) => store.exchange_record(limit, key, standing, next).await,
            Self::Multi(_) => Err(no_records(limit)),
        }
    }
}

fn no_records(limit: &Limit<AnyAlgorithm>) -> RedisError {
    Refusal::NoRecords { limit: limit.name().to_owned() }.into()
}

/// Applies an operation to these limits, each at its own key, in one batch. A limiter would leave
/// out shadow limits, and would refuse a caller without a required identifier: the tool asks about
/// any caller.
pub(crate) async fn apply_to<S: Store<AnyAlgorithm, Error = RedisError>>(
    store: &S,
    keyed: &[(&Limit<AnyAlgorithm>, Cow<'_, str>)],
    op: Op,
    cost: u64,
) -> Result<Verdict, RedisError> {
    let checks: Vec<Check<'_, AnyAlgorithm>> =
        keyed.iter().map(|(limit, key)| Check { limit, key, cost }).collect();
    let batch = Batch::new(&checks)?;
    store.apply(&batch.op(op)).await
}

/// Connects to Redis in the mode of the URL, if that mode can decide these limits.
pub(crate) async fn connect(
    redis: &Redis,
    prefix: &str,
    secret: Option<&[u8]>,
    limits: &Limits<AnyAlgorithm>,
) -> Result<Remote, Failure> {
    let failed = |error: RedisError| Failure::store(&format!("--store {}", redis.url), &error);
    if redis.url.mode() == Some(Multi::NAME) {
        RedisStore::<Multi>::supports(limits).map_err(failed)?;
    }
    let builder = RedisStore::builder().prefix(prefix).tag(redis.tag.clone());
    let mut builder = builder.deadline(DEADLINE);
    if let Some(secret) = secret {
        builder = builder.hide_identifiers(secret);
    }
    let connected = match redis.url.mode() {
        Some(Cas::NAME) => builder.cas().connect_to(&redis.url).await.map(Remote::Cas),
        Some(Multi::NAME) => builder.multi().connect_to(&redis.url).await.map(Remote::Multi),
        _ => builder.connect_to(&redis.url).await.map(Remote::Lua),
    };
    connected.map_err(failed)
}

/// Why the keys of a store were not looked through, and what the user needs if the server refuses.
pub(crate) fn scan_failed(redis: &Redis, prefix: &str, error: &RedisError) -> Failure {
    let needs = if error.kind().is_outage() {
        String::new()
    } else {
        format!(": the user needs SCAN on {prefix}:*")
    };
    let what = format!("--store {}{needs}", redis.url);
    Failure::store(&what, error)
}

/// The store on a server that the arguments of a command name, and what to say of its errors.
pub(crate) async fn of_caller(
    args: &CallerArgs,
    command: &str,
    limits: &Limits<AnyAlgorithm>,
) -> Result<(Remote, impl Fn(RedisError) -> Failure), Failure> {
    let redis = Redis::lasting(&args.store, command)?;
    let secret = secret(args.secret_file.as_deref())?;
    let store = connect(&redis, &args.prefix, secret.as_deref(), limits).await?;
    Ok((store, move |error| Failure::store(&format!("--store {}", redis.url), &error)))
}

/// Runs a future that asks a server.
pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Store(format!("no runtime: {error}")))?
        .block_on(future)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreUrl;

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
    fn a_url_names_a_store_or_is_refused_and_no_login_is_shown() {
        for (url, shown) in [
            ("memory", "memory"),
            ("redis://h.example?client=redis&mode=lua", "redis://h.example"),
            ("rediss://user:s3cret@h/0?tls-ca=ca.pem&mode=multi", "rediss://h/0"),
            ("redis-sentinel://user:s3cret@h:1,h:2/cache/1", "redis-sentinel://h:1,h:2/cache/1"),
            ("rediss-cluster://user:s3cret@[::1]:1,h:2", "rediss-cluster://[::1]:1,h:2"),
            ("redis://user:s3cret", "redis://***"),
            ("redis://localhost:1?mode=s3cret", "accepted are mode=lua, mode=cas and mode=multi"),
            ("redis-cluster://h:1,h:2/1", "only database 0"),
            ("user:s3cret@h", "accepted are redis://"),
            ("memcached://h:1", "--store memory"),
        ] {
            let said = match StoreUrl::parse(url) {
                Ok(store) => store.display(),
                Err(failure) => failure.to_string(),
            };
            assert!(
                said.contains(shown) && !said.contains("s3c") && !said.contains("user:s"),
                "{said}"
            );
        }
        let lasting = |text| Redis::lasting(text, "list").expect_err(text).to_string();
        assert!(!lasting("memcached://h:1").contains("memory"));
        assert!(lasting("memory").contains("nothing in it to list; name one that lasts"));
    }
}
