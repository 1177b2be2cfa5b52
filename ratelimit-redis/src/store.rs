//! [`RedisStore`]: a connection, a prefix, and the mode in which batches are decided.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratelimit_core::{Algorithm, Hold, KeepsEntries, Limit, Now, Tick, WindowEntry};

use crate::connection::{Client, Connection, IntoConnection, RedisConnection, Reply, Word};
use crate::error::{RedisError, WRONG_TYPE};
use crate::hold;
use crate::script::{Script, Scripts};
use crate::url::RedisUrl;

const DEFAULT_PREFIX: &str = "rl";
const DEFAULT_DEADLINE: Duration = Duration::from_secs(1);

/// The mode in which each batch is one script, for algorithms with a [twin in Lua](crate::LuaProgram).
#[derive(Clone, Copy, Debug)]
pub enum Lua {}

/// The mode in which a batch is decided here and compared and set there, for any
/// [`Algorithm`] whose state has a [`Codec`](crate::Codec).
///
/// It reads the states, steps in Rust, and writes only if nothing has changed meanwhile, a bounded
/// number of times; then it answers [`Contended`](ratelimit_core::ErrorKind::Contended). Where the
/// server has `SET … IFEQ`, a batch of one check needs no scripting.
#[derive(Clone, Copy, Debug)]
pub enum Cas {}

/// The mode in which each batch is a transaction of native commands, with no scripting, for limits that
/// count [attempts](ratelimit_core::Attempts): those that are a [`MultiProgram`](crate::MultiProgram).
///
/// It asks twice: what there is, and then to charge. What a transaction cannot decide does not
/// compile:
///
/// ```compile_fail,E0277
/// # use ratelimit_core::{Gcra, RateLimiter, Limits, Limit};
/// # use ratelimit_redis::{Multi, RedisStore};
/// # async fn example(limits: Limits<Gcra>) -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::builder().multi().connect("redis://127.0.0.1:6379").await?;
/// let limiter = RateLimiter::new(limits, store);
/// limiter.check("alice").await?; // Gcra is no MultiProgram
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Multi {}

/// [`Lua`], [`Cas`] or [`Multi`].
pub trait Mode: sealed::Sealed {
    /// What the mode is called in a store's URL.
    const NAME: &'static str;
}

impl Mode for Lua {
    const NAME: &'static str = "lua";
}

impl Mode for Cas {
    const NAME: &'static str = "cas";
}

impl Mode for Multi {
    const NAME: &'static str = "multi";
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Multi {}
    impl Sealed for super::Lua {}
    impl Sealed for super::Cas {}
}

/// A [`Store`](ratelimit_core::Store) on Redis or a server that speaks as it does, in the mode `M`. See
/// the [crate's documentation](crate).
///
/// Cheap to clone; clones share the connection.
pub struct RedisStore<M = Lua, C = RedisConnection> {
    pub(crate) inner: Arc<Inner<C>>,
    mode: PhantomData<M>,
}

pub(crate) struct Inner<C> {
    pub(crate) connection: C,
    pub(crate) prefix: String,
    pub(crate) scripts: Scripts,
    /// Whether the server has refused `SET … IFEQ`.
    lacks_ifeq: AtomicBool,
}

impl<C> Inner<C> {
    /// Whether it is worth trying `SET … IFEQ`.
    pub(crate) fn may_have_ifeq(&self) -> bool {
        !self.lacks_ifeq.load(Ordering::Relaxed)
    }

    pub(crate) fn note_lack_of_ifeq(&self) {
        self.lacks_ifeq.store(true, Ordering::Relaxed);
    }
}

impl<C: Connection> Inner<C> {
    /// Calls a script by its hash, and by its text if the server does not know it. `words` begin with
    /// `EVALSHA` and the hash; `key` is one of theirs.
    pub(crate) async fn eval<'w>(
        &self,
        key: &str,
        script: &'w Script,
        words: &mut [Word<'w>],
    ) -> Result<Reply, RedisError> {
        let answer = self.connection.send(key, words).await;
        if !matches!(&answer, Err(RedisError::Server { code, .. }) if code == "NOSCRIPT") {
            return answer;
        }
        // The server restarted, was flushed, or never saw it. Nothing has run yet.
        words[0] = Word::Text("EVAL");
        words[1] = Word::Text(&script.text);
        self.connection.send(key, words).await
    }

    /// The moment that a request is made at: the one it was given, or that of the server which keeps `key`.
    pub(crate) async fn now(&self, key: &str, now: Now) -> Result<Tick, RedisError> {
        if let Now::At(now) = now {
            return Ok(now);
        }
        let reply = self.connection.send(key, &[Word::Text("TIME")]).await?;
        reply.as_time().ok_or_else(|| self.unexpected(&reply))
    }

    /// What a state tells of who was admitted and still counts.
    pub(crate) async fn entries<A: KeepsEntries>(
        &self,
        limit: &Limit<A>,
        key: &str,
        state: Option<A::State>,
        now: Now,
    ) -> Result<Vec<WindowEntry>, RedisError> {
        let Some(state) = state else { return Ok(Vec::new()) };
        let now = self.now(key, now).await?;
        Ok(limit.algorithm().entries_of(&state, now).to_vec())
    }

    /// The bytes under a key of a limit.
    pub(crate) async fn get<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<Vec<u8>>, RedisError> {
        match self.connection.send(key, &[Word::Text("GET"), Word::Text(key)]).await {
            Ok(Reply::Nil) => Ok(None),
            Ok(Reply::Text(bytes)) => Ok(Some(bytes)),
            Ok(other) => Err(self.unexpected(&other)),
            Err(RedisError::Server { code, .. }) if code == "WRONGTYPE" => {
                Err(RedisError::corrupt(limit, key, WRONG_TYPE))
            }
            Err(error) => Err(error),
        }
    }

    /// The hold under a key of a limit.
    pub(crate) async fn hold<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<Hold>, RedisError> {
        let Some(bytes) = self.get(limit, key).await? else { return Ok(None) };
        let hold = hold::decode(&bytes);
        hold.map(Some).ok_or_else(|| RedisError::corrupt(limit, key, "not a hold"))
    }

    pub(crate) fn unexpected(&self, reply: &Reply) -> RedisError {
        RedisError::Protocol {
            address: Arc::clone(self.connection.address()),
            answer: format!("{reply:?}"),
        }
    }
}

/// How long a key lives whose state stops to matter at `expires`.
pub(crate) fn ttl_ms(expires: Tick, now: Tick, time: Now) -> u64 {
    (expires.saturating_us_since(now) + time.padding_us()).div_ceil(1_000).max(1)
}

// By hand, because no mode needs to be cloned or shown.
impl<M, C> Clone for RedisStore<M, C> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), mode: PhantomData }
    }
}

impl<M: Mode, C: fmt::Debug> fmt::Debug for RedisStore<M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("mode", &M::NAME)
            .field("connection", &self.inner.connection)
            .field("prefix", &self.inner.prefix)
            .finish_non_exhaustive()
    }
}

impl<M, C> RedisStore<M, C> {
    /// What every key begins with.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.inner.prefix
    }

    /// The same connection and prefix in the other mode. The modes keep their states apart.
    #[must_use]
    pub fn in_mode<N: Mode>(&self) -> RedisStore<N, C> {
        RedisStore { inner: Arc::clone(&self.inner), mode: PhantomData }
    }
}

/// How a [`RedisStore`] is to be built.
#[derive(Clone, Debug)]
pub struct Builder<M = Lua> {
    prefix: String,
    deadline: Duration,
    client: Option<Client>,
    mode: PhantomData<M>,
}

impl<M: Mode> Builder<M> {
    /// What every key begins with; `rl` unless told otherwise.
    #[must_use]
    pub fn prefix(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.prefix);
        self
    }

    /// The mode in which any algorithm runs, without Lua of its own.
    #[must_use]
    pub fn cas(self) -> Builder<Cas> {
        self.in_mode()
    }

    /// The mode without scripting, for limits that count attempts.
    #[must_use]
    pub fn multi(self) -> Builder<Multi> {
        self.in_mode()
    }

    fn in_mode<N: Mode>(self) -> Builder<N> {
        let Self { prefix, deadline, client, mode: _ } = self;
        Builder { prefix, deadline, client, mode: PhantomData }
    }

    /// How long a command may take, connecting included; 1 second unless told otherwise.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The client to connect by, if not the one that the URL asks for: `redis` unless told otherwise.
    #[must_use]
    pub fn client(mut self, client: Client) -> Self {
        self.client = Some(client);
        self
    }

    /// Connects to what is at this URL: a server, the master that sentinels name, or a cluster. See
    /// [`RedisUrl`].
    ///
    /// # Errors
    /// A URL or prefix that cannot be used, or servers that cannot be reached within the deadline.
    pub async fn connect(self, url: &str) -> Result<RedisStore<M>, RedisError> {
        self.connect_to(&RedisUrl::parse(url)?).await
    }

    /// The same with a URL that has been read.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_to(self, url: &RedisUrl) -> Result<RedisStore<M>, RedisError> {
        self.contradicts(url)?;
        let connection = RedisConnection::at(url, self.client, self.deadline).await?;
        self.over(connection)
    }

    /// Refuses a URL that says otherwise.
    fn contradicts(&self, url: &RedisUrl) -> Result<(), RedisError> {
        let refuse = |asked: String, built: String| {
            Err(url.refused(&format!(
                "{asked} in the URL of a store that was built with {built}; write the same, or leave it \
                 out"
            )))
        };
        match (url.mode(), url.client(), self.client) {
            (Some(mode), ..) if mode != M::NAME => {
                refuse(format!("mode={mode}"), format!("mode={}", M::NAME))
            }
            (_, Some(asked), Some(built)) if asked != built => {
                refuse(format!("client={asked}"), format!("client={built}"))
            }
            _ => Ok(()),
        }
    }

    /// A store over a connection of your own, or over a client that your program has already: see
    /// [`IntoConnection`]. The deadline holds for such a client too.
    ///
    /// # Errors
    /// A prefix that holds braces, which would take the hash tag's place.
    pub fn over<C: IntoConnection>(
        self,
        connection: C,
    ) -> Result<RedisStore<M, C::Connection>, RedisError> {
        if self.prefix.contains(['{', '}']) || self.prefix.chars().any(char::is_control) {
            return Err(RedisError::Config(format!(
                "the prefix {:?} holds braces or control characters; choose one without",
                self.prefix
            )));
        }
        let inner = Inner {
            connection: connection.into_connection(self.deadline),
            prefix: self.prefix,
            scripts: Scripts::default(),
            lacks_ifeq: AtomicBool::new(false),
        };
        Ok(RedisStore { inner: Arc::new(inner), mode: PhantomData })
    }
}

impl RedisStore {
    /// Where to say by which prefix and with which deadline.
    #[must_use]
    pub fn builder() -> Builder {
        Builder {
            prefix: DEFAULT_PREFIX.into(),
            deadline: DEFAULT_DEADLINE,
            client: None,
            mode: PhantomData,
        }
    }

    /// Connects to the server at this URL, with everything as by default.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    pub async fn connect(url: &str) -> Result<Self, RedisError> {
        Self::builder().connect(url).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_contradicts_is_refused_with_the_remedy_and_without_its_password() {
        let builder = RedisStore::builder().client(Client::default());
        for (url, says) in [
            ("redis://u:secret@h:1?mode=multi", "mode=lua"),
            ("redis://u:secret@h:1?mode=cas", "mode=lua"),
            #[cfg(all(feature = "redis", feature = "fred"))]
            ("redis://u:secret@h:1?client=fred", "client=redis"),
        ] {
            let url = RedisUrl::parse(url).expect(url);
            let error = builder.contradicts(&url).expect_err("contradicts").to_string();
            assert!(error.contains(says) && !error.contains("secret"), "{url}: {error}");
        }
        for url in ["redis://h:1", "redis://h:1?client=redis&mode=lua"] {
            let url = RedisUrl::parse(url).expect(url);
            builder.contradicts(&url).expect("says the same");
        }
        let url = RedisUrl::parse("redis://h:1?mode=cas").expect("a URL");
        builder.cas().contradicts(&url).expect("its own mode");
    }
}
