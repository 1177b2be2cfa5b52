//! [`RedisStore`]: a connection, a prefix, and the mode in which batches are decided.

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
/// It asks twice: what there is, and then to charge. A third time takes back what was charged too much, where
/// others were quicker. A charge that comes more than a second late is made anew; one of a bucketed window or
/// a sliding log then counts twice. What a transaction cannot decide does not compile:
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
    /// The commands that a user of the server has to be allowed, as `ACL SETUSER` takes them, beside
    /// the keys: `~rl:*` for the prefix `rl`. On a cluster `+cluster|slots +asking` come to them, and for
    /// [`RedisStore::health`] `+info` and, on a cluster, `+cluster|info`.
    const COMMANDS: &'static str;
    /// The oldest Redis that has all of them, by its first number.
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

/// What becomes of a batch whose keys lie in different slots of a cluster, and so on different servers, none
/// of which can decide it alone. Batches of one slot, and all on a single server, are one script
/// whatever is chosen; see [`Tag`] for keeping identifiers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrossSlot {
    /// It is decided in two waves of calls, those of a wave at the same time: first every server is
    /// asked, and nothing is written if one of them denies; then every server is charged. If one of
    /// them denies now, because somebody came in between, what the others charged is given back.
    ///
    /// No limit ever admits more than it may. Who is stopped between the charges of the second wave
    /// and what is given back leaves charged what was: the caller is denied, or never told, and up to the
    /// batch's cost is lost to the others until it flows back by itself. So is what cannot be told apart
    /// any more from what others were charged meanwhile, because a window ended in between, or by an
    /// algorithm of your own that has no [`undo`](Algorithm::undo) (in Lua neither `undo` nor `settle` nor
    /// a `mark`); and limits that count attempts have counted this one. Two batches that compete for the
    /// last place of several limits may both be denied it.
    ///
    /// Every other operation is done by each server for its own part. If one of them fails and another
    /// does not, the error is [`RedisError::InPart`]: under an id the same can be asked for again, and is
    /// done once.
    #[default]
    Reserve,
    /// It is refused with [`RedisError::CrossSlot`], before anything is asked.
    Refuse,
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
    pub(crate) keys: Keys,
    pub(crate) cross_slot: CrossSlot,
    pub(crate) scripts: Scripts,
    /// Of the mode that compares and sets.
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

/// Where an answer is remembered for a client that may send its request again.
pub(crate) struct ReplyCache {
    pub(crate) key: String,
    pub(crate) life_ms: u64,
}

impl<C: Connection> Inner<C> {
    /// When a decision that begins now has to have ended.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::within(self.deadline)
    }

    /// Where the answer of a request about a key is to be remembered, in its slot; `None` with a client
    /// that never sends a request again by itself.
    pub(crate) fn reply_cache(&self, key: &str) -> Option<ReplyCache> {
        self.connection.may_repeat().then(|| ReplyCache {
            key: key::of_answer(key, ReservationId::random()),
            life_ms: remember_ms(self.deadline),
        })
    }

    /// Calls a script by its hash, and by its text if the server does not know it. `words` begin with
    /// `EVALSHA` and the hash; `key` is one of theirs.
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

    /// The moment that a request is made at: the one it was given, or that of the server which keeps `key`.
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

    /// What a state tells of who was admitted and still counts.
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

    /// The bytes under a key of a limit.
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

    /// The hold under a key of a limit.
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

/// How often something is begun anew that others came in between.
pub(crate) struct Rounds {
    begun: usize,
    most: usize,
    deadline: Deadline,
    /// How often nobody came in between, and it was begun anew because a state had expired.
    expiries: usize,
}

impl Rounds {
    /// So often, the first time included, and not again once the deadline is over.
    pub(crate) fn new(most: usize, deadline: Deadline) -> Self {
        Self { begun: 1, most, deadline, expiries: 0 }
    }

    /// Whether there is to be another one.
    pub(crate) fn another(&mut self) -> bool {
        let another = !self.deadline.is_over() && self.begun < self.most;
        self.begun += usize::from(another);
        another
    }

    /// Whether there is to be another one after a state has expired that was read in the one before. That is
    /// nobody's doing, and needs no time to end: each of so many states can expire once.
    pub(crate) fn another_after_expiry(&mut self, states: usize) -> bool {
        let free = self.expiries < states;
        self.expiries += usize::from(free);
        free || self.another()
    }

    /// What is told when there is none.
    pub(crate) fn contended(&self) -> RedisError {
        RedisError::Contended { attempts: self.begun }
    }

    /// What an error is that a later round met: if no time was left for it, it is that others came in between.
    pub(crate) fn told(&self, error: RedisError) -> RedisError {
        let has_charged_nothing = matches!(error, RedisError::Unreachable { .. });
        if self.begun > 1 && has_charged_nothing && self.deadline.is_over() {
            return self.contended();
        }
        error
    }
}

/// For how long an answer is remembered: longer than a client goes on sending. It ends with its request at
/// the deadline; what it has sent by then may be executed later.
fn remember_ms(deadline: Duration) -> u64 {
    const MARGIN: Duration = Duration::from_secs(10);
    u64::try_from(deadline.saturating_add(MARGIN).as_millis()).unwrap_or(u64::MAX).min(MAX_INTEGER)
}

/// How long a key lives whose state stops to matter at `expires`.
pub(crate) fn ttl_ms(expires: Timestamp, now: Timestamp, time: Now) -> u64 {
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
            .field("prefix", &self.inner.keys.prefix())
            .finish_non_exhaustive()
    }
}

impl<M, C> RedisStore<M, C> {
    /// What every key begins with.
    #[must_use]
    pub fn prefix(&self) -> &str {
        self.inner.keys.prefix()
    }

    /// The same connection and prefix in the other mode. The modes keep their states apart.
    #[must_use]
    pub fn in_mode<N: Mode>(&self) -> RedisStore<N, C> {
        RedisStore { inner: Arc::clone(&self.inner), mode: PhantomData }
    }
}

/// How a [`RedisStore`] is to be built.
#[derive(Clone)]
pub struct Builder<M = Lua> {
    keys: Keys,
    cross_slot: CrossSlot,
    deadline: Duration,
    client: Option<Client>,
    mode: PhantomData<M>,
}

// By hand, because of the secret.
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
    /// What every key begins with; `rl` unless told otherwise.
    #[must_use]
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.keys.set_prefix(prefix);
        self
    }

    /// What keeps identifiers together on a cluster; each by itself unless told otherwise. Stores that
    /// are to share their limits have to agree on it.
    #[must_use]
    pub fn tag(mut self, tag: Tag) -> Self {
        self.keys.set_tag(tag);
        self
    }

    /// Hides every identifier in the keys, such as an address or an API key, behind a hash that nobody
    /// computes without this secret. Stores that are to share their limits need the same one.
    #[must_use]
    pub fn hide_identifiers(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.keys.set_secret(secret.as_ref());
        self
    }

    /// What becomes of a batch whose keys lie in different slots of a cluster.
    #[must_use]
    pub fn cross_slot(mut self, cross_slot: CrossSlot) -> Self {
        self.cross_slot = cross_slot;
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
        let Self { keys, cross_slot, deadline, client, mode: _ } = self;
        Builder { keys, cross_slot, deadline, client, mode: PhantomData }
    }

    /// How long a decision may take; 1 second unless told otherwise.
    ///
    /// That is one moment for all that a decision takes: the wait for a connection, a script that has to be
    /// sent anew, redirections, the look-up of a new master, the rounds of a mode without scripts. What
    /// cannot be sent before is not sent. In several slots of a cluster, a quarter of it is kept for giving
    /// back what was charged in vain.
    ///
    /// Connecting goes on by itself when a decision is given up: a deadline shorter than connecting takes
    /// does no harm.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline.clamp(SHORTEST_DEADLINE, LONGEST);
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
    /// A URL or prefix that cannot be used, or servers that cannot be reached within the deadline. To start
    /// all the same, take [`connect_lazy`](Self::connect_lazy).
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

    /// The same without connecting: a store for servers that may be away. The first decision connects; as
    /// long as that fails, decisions are errors, and [`health`](RedisStore::health) says why.
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
    /// Messages show a host only where it cannot be a password, as in `redis://user:password@host`.
    ///
    /// # Errors
    /// A URL or prefix that cannot be used.
    pub fn connect_lazy(self, url: &str) -> Result<RedisStore<M>, RedisError> {
        self.connect_lazy_to(&RedisUrl::parse(url)?)
    }

    /// The same with a URL that has been read.
    ///
    /// # Errors
    /// As [`connect_lazy`](Self::connect_lazy).
    pub fn connect_lazy_to(self, url: &RedisUrl) -> Result<RedisStore<M>, RedisError> {
        self.contradicts(url)?;
        let connection = RedisConnection::lazily_at(url, self.client, self.deadline)?;
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
    /// A prefix that holds braces, which would take the hash tag's place, or an empty secret.
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
    /// Where to say by which prefix and with which deadline.
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
