//! [`RedisStore`]: a connection, a key prefix and the mode that decides batches.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratelimit_core::{
    Algorithm, KeepsEntries, Limit, MAX_INTEGER, Now, Reservation, ReservationId, Timestamp,
    WindowEntry,
};

use crate::connection::{Argument, Client, Connection, IntoConnection, RedisConnection, Reply};
use crate::deadline::{Deadline, LONGEST};
use crate::error::{RedisError, WRONG_TYPE};
use crate::key::{self, Keys, Tag};
use crate::reservation;
use crate::script::{Script, Scripts};
use crate::turns::Turns;
use crate::url::RedisUrl;

const DEFAULT_DEADLINE: Duration = Duration::from_secs(1);
const SHORTEST_DEADLINE: Duration = Duration::from_millis(1);

/// The mode that decides each batch in one script. It serves algorithms with a [twin in
/// Lua](crate::LuaProgram).
#[derive(Clone, Copy, Debug)]
pub enum Lua {}

/// The mode that steps in Rust and writes with compare-and-set. It serves any [`Algorithm`] whose state
/// has a [`Codec`](crate::Codec).
///
/// It reads the states, steps, and writes only if no state has changed meanwhile. After a bounded number
/// of attempts it returns [`Contended`](ratelimit_core::ErrorKind::Contended). If the server has `SET …
/// IFEQ`, a batch of one check needs no scripting.
#[derive(Clone, Copy, Debug)]
pub enum Cas {}

/// The mode that decides each batch in a transaction of native commands, without scripting. It serves
/// limits that count [attempts](ratelimit_core::Attempts) and are a
/// [`MultiProgram`](crate::MultiProgram).
///
/// A decision takes two round trips: one reads the entries, one charges. If other clients charged in
/// between and the limit is exceeded, a third one takes the excess back. A charge that arrives more than
/// a second late is made again; a bucketed window or a sliding log then counts it twice. An algorithm
/// that a transaction cannot decide does not compile:
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
    /// The mode's name in a store's URL.
    const NAME: &'static str;
    /// The commands that the server's user needs, as `ACL SETUSER` takes them, besides access to the
    /// keys (`~rl:*` for the prefix `rl`). A cluster also needs `+cluster|slots +asking`;
    /// [`RedisStore::health`] also needs `+info` and, on a cluster, `+cluster|info`.
    const COMMANDS: &'static str;
    /// The oldest Redis major version that has all of them.
    const OLDEST: u32;
}

impl Mode for Lua {
    const NAME: &'static str = "lua";
    const COMMANDS: &'static str = "+eval +evalsha +ping +hello +select +time +get +set +del \
        +unlink +hget +hmget +hset +hdel +pttl +pexpire +zadd +zrem +zrange +zcard +zcount +zremrangebyrank +rpush \
        +rpushx +lindex +llen +lrange +lset +ltrim";
    const OLDEST: u32 = 5;
}

impl Mode for Cas {
    const NAME: &'static str = "cas";
    const COMMANDS: &'static str =
        "+eval +evalsha +ping +hello +select +time +get +set +del +exists";
    const OLDEST: u32 = 5;
}

impl Mode for Multi {
    const NAME: &'static str = "multi";
    const COMMANDS: &'static str = "+multi +exec +ping +hello +select +time +del +pexpire \
        +hincrby +hdel +hgetall +zadd +zrem +zrange +rpush +rpushx +lrem +lrange";
    const OLDEST: u32 = 7;
}

/// What the store does with a batch whose keys lie in several slots of a cluster, and so on several
/// servers. A batch within one slot, or on a single server, is one script whatever you choose. [`Tag`]
/// keeps identifiers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrossSlot {
    /// Decides in two waves; the calls of a wave run concurrently. The first wave asks every server, and
    /// nothing is written if one denies. The second wave charges every server. If one denies now, because
    /// another client charged in between, the store takes the other charges back.
    ///
    /// No limit ever admits more than it may. If a caller stops after the second wave and before the charges
    /// are taken back, they stay: the caller is denied or gets no answer, and up to the batch's cost is
    /// unavailable until it refills. A charge also stays if it can no longer be told apart from other
    /// clients' charges, because a window ended in between; if the algorithm has no
    /// [`undo`](Algorithm::undo) (in Lua: no `undo`, `settle` or `mark`); or if the limit counts attempts.
    /// Two batches that compete for the last place of several limits may both be denied.
    ///
    /// In every other operation each server does its own part. If one part fails and another succeeds, the
    /// error is [`RedisError::InPart`]. A request under an id can be repeated and takes effect once.
    #[default]
    Reserve,
    /// Refuses the batch with [`RedisError::CrossSlot`] before it sends a request.
    Refuse,
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Multi {}
    impl Sealed for super::Lua {}
    impl Sealed for super::Cas {}
}

/// A [`Store`](ratelimit_core::Store) on Redis or a compatible server, in the mode `M`. See the [crate's
/// documentation](crate).
///
/// Cheap to clone; clones share the connection.
pub struct RedisStore<M = Lua, C = RedisConnection> {
    pub(crate) inner: Arc<Inner<C>>,
    mode: PhantomData<M>,
}

pub(crate) struct Inner<C> {
    pub(crate) connection: C,
    pub(crate) keys: Keys,
    pub(crate) cross_slot: CrossSlot,
    pub(crate) scripts: Scripts,
    /// Used by the compare-and-set mode.
    pub(crate) turns: Turns,
    deadline: Duration,
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

/// The key that caches a reply for a client that may repeat its request.
pub(crate) struct ReplyCache {
    pub(crate) key: String,
    pub(crate) life_ms: u64,
}

impl<C: Connection> Inner<C> {
    /// The deadline of a decision that begins now.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::within(self.deadline)
    }

    /// The reply cache of a request about a key, in that key's slot. `None` with a client that never
    /// repeats a request on its own.
    pub(crate) fn reply_cache(&self, key: &str) -> Option<ReplyCache> {
        self.connection.may_repeat().then(|| ReplyCache {
            key: key::of_answer(key, ReservationId::random()),
            life_ms: remember_ms(self.deadline),
        })
    }

    /// Calls a script by its hash, and by its text if the server does not know it. `words` begin with
    /// `EVALSHA` and the hash; `key` is one of them.
    pub(crate) async fn eval<'w>(
        &self,
        key: &str,
        script: &'w Script,
        words: &mut [Argument<'w>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let answer = self.connection.send(key, words, deadline).await;
        if !matches!(&answer, Err(RedisError::Server { code, .. }) if code == "NOSCRIPT") {
            return answer;
        }
        // The server restarted, was flushed, or never saw it. Nothing has run yet.
        words[0] = Argument::Text("EVAL");
        words[1] = Argument::Text(&script.text);
        self.connection.send(key, words, deadline).await
    }

    /// The time of a request: the one that it was given, or that of the server which keeps `key`.
    pub(crate) async fn now(
        &self,
        key: &str,
        now: Now,
        deadline: Deadline,
    ) -> Result<Timestamp, RedisError> {
        if let Now::At(now) = now {
            return Ok(now);
        }
        let reply = self.connection.send(key, &[Argument::Text("TIME")], deadline).await?;
        reply.as_time().ok_or_else(|| self.unexpected(&reply))
    }

    /// The admitted entries in a state that still count.
    pub(crate) async fn entries<A: KeepsEntries>(
        &self,
        limit: &Limit<A>,
        key: &str,
        state: Option<A::State>,
        now: Now,
        deadline: Deadline,
    ) -> Result<Vec<WindowEntry>, RedisError> {
        let Some(state) = state else { return Ok(Vec::new()) };
        let now = self.now(key, now, deadline).await?;
        Ok(limit.algorithm().entries_of(&state, now).to_vec())
    }

    /// The bytes of a limit's state under a key.
    pub(crate) async fn get<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<Vec<u8>>, RedisError> {
        match self
            .connection
            .send(key, &[Argument::Text("GET"), Argument::Text(key)], deadline)
            .await
        {
            Ok(Reply::Nil) => Ok(None),
            Ok(Reply::Text(bytes)) => Ok(Some(bytes)),
            Ok(other) => Err(self.unexpected(&other)),
            Err(RedisError::Server { code, .. }) if code == "WRONGTYPE" => {
                Err(RedisError::corrupt(limit, key, WRONG_TYPE))
            }
            Err(error) => Err(error),
        }
    }

    /// The limit's reservation under a key.
    pub(crate) async fn reservation<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<Reservation>, RedisError> {
        let Some(bytes) = self.get(limit, key, deadline).await? else { return Ok(None) };
        let reservation = reservation::decode(&bytes);
        reservation.map(Some).ok_or_else(|| RedisError::corrupt(limit, key, "not a hold"))
    }

    pub(crate) fn unexpected(&self, reply: &Reply) -> RedisError {
        RedisError::Protocol {
            address: Arc::clone(self.connection.address()),
            answer: reply.shape(),
        }
    }
}

/// Bounds how often a decision starts again because other clients changed its keys.
pub(crate) struct Rounds {
    begun: usize,
    most: usize,
    deadline: Deadline,
    /// The rounds that an expired state caused, without another client's write.
    expiries: usize,
}

impl Rounds {
    /// Allows `most` rounds, the first included, and none once the deadline is over.
    pub(crate) fn new(most: usize, deadline: Deadline) -> Self {
        Self { begun: 1, most, deadline, expiries: 0 }
    }

    /// Whether another round may begin.
    pub(crate) fn another(&mut self) -> bool {
        let another = !self.deadline.is_over() && self.begun < self.most;
        self.begun += usize::from(another);
        another
    }

    /// Whether another round may begin after a state that the last one read has expired. Each of the
    /// `states` can expire once, so these rounds are bounded without counting against `most`.
    pub(crate) fn another_after_expiry(&mut self, states: usize) -> bool {
        let free = self.expiries < states;
        self.expiries += usize::from(free);
        free || self.another()
    }

    /// The error when no round is left.
    pub(crate) fn contended(&self) -> RedisError {
        RedisError::Contended { attempts: self.begun }
    }

    /// The error to return for one that a later round met. If the deadline ended before that round could
    /// send anything, contention is the cause.
    pub(crate) fn told(&self, error: RedisError) -> RedisError {
        let has_charged_nothing = matches!(error, RedisError::Unreachable { .. });
        if self.begun > 1 && has_charged_nothing && self.deadline.is_over() {
            return self.contended();
        }
        error
    }
}

/// How long a reply stays cached: longer than a client keeps repeating. The client stops at the
/// deadline, but the server may execute later what was sent by then.
fn remember_ms(deadline: Duration) -> u64 {
    const MARGIN: Duration = Duration::from_secs(10);
    u64::try_from(deadline.saturating_add(MARGIN).as_millis()).unwrap_or(u64::MAX).min(MAX_INTEGER)
}

/// The time to live of a key whose state stops to matter at `expires`.
pub(crate) fn ttl_ms(expires: Timestamp, now: Timestamp, time: Now) -> u64 {
    (expires.saturating_us_since(now) + time.padding_us()).div_ceil(1_000).max(1)
}

// By hand: a derive would require `Clone` and `Debug` of the mode.
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
            .field("prefix", &self.inner.keys.prefix())
            .finish_non_exhaustive()
    }
}

impl<M, C> RedisStore<M, C> {
    /// The prefix of every key.
    #[must_use]
    pub fn prefix(&self) -> &str {
        self.inner.keys.prefix()
    }

    /// The same connection and prefix in another mode. The modes keep separate states.
    #[must_use]
    pub fn in_mode<N: Mode>(&self) -> RedisStore<N, C> {
        RedisStore { inner: Arc::clone(&self.inner), mode: PhantomData }
    }
}

/// Configures and builds a [`RedisStore`].
#[derive(Clone)]
pub struct Builder<M = Lua> {
    keys: Keys,
    cross_slot: CrossSlot,
    deadline: Duration,
    client: Option<Client>,
    mode: PhantomData<M>,
}

// By hand: the secret must not show.
impl<M: Mode> fmt::Debug for Builder<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("mode", &M::NAME)
            .field("prefix", &self.keys.prefix())
            .field("cross_slot", &self.cross_slot)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl<M: Mode> Builder<M> {
    /// Sets the prefix of every key. The default is `rl`.
    #[must_use]
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.keys.set_prefix(prefix);
        self
    }

    /// Sets what keeps identifiers together on a cluster. By default each identifier has its own tag.
    /// Stores that share limits need the same tag.
    #[must_use]
    pub fn tag(mut self, tag: Tag) -> Self {
        self.keys.set_tag(tag);
        self
    }

    /// Replaces every identifier in the keys, such as an address or an API key, by a hash keyed with
    /// this secret. Stores that share limits need the same secret.
    #[must_use]
    pub fn hide_identifiers(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.keys.set_secret(secret.as_ref());
        self
    }

    /// Sets how batches across slots of a cluster are decided. The default is [`CrossSlot::Reserve`].
    #[must_use]
    pub fn cross_slot(mut self, cross_slot: CrossSlot) -> Self {
        self.cross_slot = cross_slot;
        self
    }

    /// Selects the mode that runs any algorithm without Lua of its own.
    #[must_use]
    pub fn cas(self) -> Builder<Cas> {
        self.in_mode()
    }

    /// Selects the mode without scripting, for limits that count attempts.
    #[must_use]
    pub fn multi(self) -> Builder<Multi> {
        self.in_mode()
    }

    fn in_mode<N: Mode>(self) -> Builder<N> {
        let Self { keys, cross_slot, deadline, client, mode: _ } = self;
        Builder { keys, cross_slot, deadline, client, mode: PhantomData }
    }

    /// Sets how long a decision may take. The default is 1 second.
    ///
    /// The deadline covers the whole decision: the wait for a connection, a script that is sent again by
    /// its text, redirections, the look-up of a new master, and the rounds of a mode without scripts.
    /// After it the store sends nothing more. A decision across slots of a cluster reserves a quarter of
    /// it for returning charges.
    ///
    /// Connecting continues when a decision is given up, so the deadline may be shorter than connecting
    /// takes.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline.clamp(SHORTEST_DEADLINE, LONGEST);
        self
    }

    /// Sets the client to connect with, instead of the one in the URL. The default is `redis`.
    #[must_use]
    pub fn client(mut self, client: Client) -> Self {
        self.client = Some(client);
        self
    }

    /// Connects to the server, the cluster, or the master that Sentinels name at this URL. See
    /// [`RedisUrl`].
    ///
    /// # Errors
    /// The URL or prefix is invalid, or no server can be reached within the deadline. To start without a
    /// server, use [`connect_lazy`](Self::connect_lazy).
    pub async fn connect(self, url: &str) -> Result<RedisStore<M>, RedisError> {
        self.connect_to(&RedisUrl::parse(url)?).await
    }

    /// As [`connect`](Self::connect), with a parsed URL.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_to(self, url: &RedisUrl) -> Result<RedisStore<M>, RedisError> {
        self.contradicts(url)?;
        let connection = RedisConnection::at(url, self.client, self.deadline).await?;
        self.over(connection)
    }

    /// Builds a store without connecting. The first decision connects. While that fails, decisions
    /// return errors, and [`health`](RedisStore::health) says why.
    ///
    /// ```
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use ratelimit_redis::RedisStore;
    ///
    /// // Nothing listens there, or not yet.
    /// let store = RedisStore::builder().connect_lazy("redis://127.0.0.1:1")?;
    /// let health = store.health().await;
    /// assert!(!health.is_ready());
    /// println!("{}", health.findings()[0]);
    /// # Ok(())
    /// # }
    /// # tokio::runtime::Runtime::new()?.block_on(example())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Messages show a host only if it cannot be a password, as in `redis://user:password@host`.
    ///
    /// # Errors
    /// The URL or prefix is invalid.
    pub fn connect_lazy(self, url: &str) -> Result<RedisStore<M>, RedisError> {
        self.connect_lazy_to(&RedisUrl::parse(url)?)
    }

    /// As [`connect_lazy`](Self::connect_lazy), with a parsed URL.
    ///
    /// # Errors
    /// As [`connect_lazy`](Self::connect_lazy).
    pub fn connect_lazy_to(self, url: &RedisUrl) -> Result<RedisStore<M>, RedisError> {
        self.contradicts(url)?;
        let connection = RedisConnection::lazily_at(url, self.client, self.deadline)?;
        self.over(connection)
    }

    /// Refuses a URL that contradicts the builder.
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

    /// Builds a store over a connection of your own or over a client that your program already uses: see
    /// [`IntoConnection`]. The deadline applies to such a client too.
    ///
    /// # Errors
    /// The prefix contains braces, which would replace the hash tag, or the secret is empty.
    pub fn over<C: IntoConnection>(
        self,
        connection: C,
    ) -> Result<RedisStore<M, C::Connection>, RedisError> {
        self.keys.validate()?;
        let inner = Inner {
            connection: connection.into_connection(self.deadline),
            keys: self.keys,
            cross_slot: self.cross_slot,
            deadline: self.deadline,
            scripts: Scripts::default(),
            turns: Turns::default(),
            lacks_ifeq: AtomicBool::new(false),
        };
        Ok(RedisStore { inner: Arc::new(inner), mode: PhantomData })
    }
}

impl RedisStore {
    /// Starts a builder, which sets the prefix, the deadline and more.
    #[must_use]
    pub fn builder() -> Builder {
        Builder {
            keys: Keys::default(),
            cross_slot: CrossSlot::default(),
            deadline: DEFAULT_DEADLINE,
            client: None,
            mode: PhantomData,
        }
    }

    /// Connects to the server at this URL with the defaults.
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
    fn a_url_that_contradicts_the_builder_is_refused_without_its_password() {
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
