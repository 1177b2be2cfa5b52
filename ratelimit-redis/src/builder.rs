//! [`Builder`]: configures a [`RedisStore`] and connects it.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::Clock;
use tokio::runtime::Handle;

use crate::client::Client;
use crate::connection::{IntoConnection, RedisConnection};
use crate::deadline::LONGEST;
use crate::error::Result;
use crate::key::{Keys, Tag};
use crate::mode::{Cas, Lua, Multi};
use crate::runtime::{Place, StoreRuntime};
use crate::store::{CrossSlot, Mode, RedisStore};
use crate::url::RedisUrl;

const DEFAULT_DEADLINE: Duration = Duration::from_secs(1);
const SHORTEST_DEADLINE: Duration = Duration::from_millis(1);

/// Configures and builds a [`RedisStore`].
#[derive(Clone)]
pub struct Builder<M = Lua> {
    keys: Keys,
    cross_slot: CrossSlot,
    deadline: Duration,
    client: Option<Client>,
    merge: Option<bool>,
    place: Place,
    clock: Option<Arc<dyn Clock>>,
    mode: PhantomData<M>,
}

// By hand: the secret must not show.
impl<M: Mode> fmt::Debug for Builder<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("mode", &M::NAME)
            .field("prefix", &self.keys.prefix)
            .field("cross_slot", &self.cross_slot)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl<M: Mode> Builder<M> {
    /// Sets the prefix of every key. The default is `rl`.
    #[must_use]
    pub fn prefix(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.keys.prefix);
        self
    }

    /// Sets what keeps identifiers together on a cluster. By default each identifier has its own
    /// tag. Stores that share limits need the same tag.
    #[must_use]
    pub fn tag(mut self, tag: Tag) -> Self {
        self.keys.tag = tag;
        self
    }

    /// Replaces every identifier in the keys, such as an address or an API key, by a hash keyed
    /// with this secret. Stores that share limits need the same secret.
    #[must_use]
    pub fn hide_identifiers(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.keys.set_secret(secret.as_ref());
        self
    }

    /// Sets how batches across slots of a cluster are decided. The default is
    /// [`CrossSlot::Reserve`].
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
        let Self { keys, cross_slot, deadline, client, merge, place, clock, mode: _ } = self;
        Builder { keys, cross_slot, deadline, client, merge, place, clock, mode: PhantomData }
    }

    /// Sets how long a decision may take, at least 1 ms. The default is 1 second.
    ///
    /// The deadline covers the whole decision: the wait for a connection, a script that is sent
    /// again by its text, redirections, the look-up of a new master, and the rounds of a mode
    /// without scripts. After it the store sends nothing more. A decision across slots of a cluster
    /// reserves a quarter of it for returning charges.
    ///
    /// Connecting continues when a decision is given up, so the deadline may be shorter than
    /// connecting takes.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline.clamp(SHORTEST_DEADLINE, LONGEST);
        self
    }

    /// Sets whether requests that wait for the connection go together in its next call. They do by
    /// default, unless the URL says `merge=off`.
    ///
    /// A merged request gets the decision that it would have got alone. It waits only while enough
    /// calls are out: two, or more where the way is long. On a cluster requests of one slot go
    /// together. Only the Lua mode merges, and only acquires that may fit: a request with an id,
    /// with metadata, at a given time or of a cost above a capacity is sent alone, as are peeks,
    /// forced charges, refunds and resets, and all requests to limits that count attempts or keep
    /// logs, bucketed windows or leases.
    #[must_use]
    pub fn merge(mut self, merge: bool) -> Self {
        self.merge = Some(merge);
        self
    }

    /// Sets the client to connect with, instead of the one in the URL. The default is `redis`.
    #[must_use]
    pub fn client(mut self, client: Client) -> Self {
        self.client = Some(client);
        self
    }

    /// Sets the runtime on which the store lives: its connections, and the calls that several
    /// requests share. By default it is that of [`connect`](Self::connect), or of the first request
    /// to a store that was built lazily. If a request comes from another runtime, and the first one
    /// has ended or is a `current_thread` runtime, the store starts a [thread of its
    /// own](Self::own_thread) and stays there. A store [over](Self::over) a client of your own
    /// leaves connections to that client.
    ///
    /// A runtime that you set must run: if you drive a `current_thread` runtime only now and
    /// then, or block all threads of a runtime, requests from elsewhere are `Unavailable`.
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.place = Place::Named(runtime);
        self
    }

    /// Lets the store live on a thread of its own from the start. Its connections and shared calls
    /// then depend on no caller's runtime; a caller still needs a tokio runtime with timers. Each
    /// request takes the way through that thread, which costs one that is alone a sixth of its
    /// speed.
    #[must_use]
    pub fn own_thread(mut self) -> Self {
        self.place = Place::OwnThread;
        self
    }

    /// Sets the program's clock, by which a request tells the windows of a calendar around its
    /// time, one before and one after included. It decides nothing: the script picks the window by
    /// the server's clock. By default it is the operating system's.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Connects to the server, the cluster, or the master that Sentinels name at this URL. See
    /// [`RedisUrl`].
    ///
    /// # Errors
    /// The URL or prefix is invalid, or no server can be reached within the deadline. To start
    /// without a server, use [`connect_lazy`](Self::connect_lazy).
    pub async fn connect(self, url: &str) -> Result<RedisStore<M>> {
        self.connect_to(&RedisUrl::parse(url)?).await
    }

    /// As [`connect`](Self::connect), with a parsed URL.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_to(self, url: &RedisUrl) -> Result<RedisStore<M>> {
        let deadline = self.deadline;
        let store = self.connect_lazy_to(url)?;
        store.inner.connection.connect(deadline).await?;
        Ok(store)
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
    /// # Errors
    /// The URL or prefix is invalid.
    pub fn connect_lazy(self, url: &str) -> Result<RedisStore<M>> {
        self.connect_lazy_to(&RedisUrl::parse(url)?)
    }

    /// As [`connect_lazy`](Self::connect_lazy), with a parsed URL.
    ///
    /// # Errors
    /// As [`connect_lazy`](Self::connect_lazy).
    pub fn connect_lazy_to(self, url: &RedisUrl) -> Result<RedisStore<M>> {
        self.contradicts(url)?;
        let runtime = Arc::new(StoreRuntime::new(self.place.clone()));
        let connection =
            RedisConnection::at(url, self.client, self.deadline, Arc::clone(&runtime))?;
        Self { merge: self.merge.or(url.merge()), ..self }.on(runtime, connection)
    }

    /// Refuses a URL that contradicts the builder.
    fn contradicts(&self, url: &RedisUrl) -> Result<()> {
        let text = |merge| if merge { "on" } else { "off" }.to_owned();
        let client = |client: Client| client.to_string();
        let options = [
            ("mode", url.mode().map(ToString::to_string), Some(M::NAME.to_string())),
            ("client", url.client().map(client), self.client.map(client)),
            ("merge", url.merge().map(text), self.merge.map(text)),
        ];
        for (name, given, built) in options {
            if let (Some(given), Some(built)) = (given, built)
                && given != built
            {
                return Err(url.refused(&format!(
                    "{name}={given} in the URL of a store that was built with {name}={built}; write the same, or \
                     leave it out"
                )));
            }
        }
        Ok(())
    }

    /// Builds a store over a connection of your own or over a client that your program already
    /// uses: see [`IntoConnection`]. The deadline applies to such a client too.
    ///
    /// # Errors
    /// The prefix contains braces, which would replace the hash tag, the secret is empty, or the
    /// client is one of a cluster.
    pub fn over<C: IntoConnection>(self, connection: C) -> Result<RedisStore<M, C::Connection>> {
        let runtime = Arc::new(StoreRuntime::new(self.place.clone()));
        self.on(runtime, connection)
    }

    fn on<C: IntoConnection>(
        self,
        runtime: Arc<StoreRuntime>,
        connection: C,
    ) -> Result<RedisStore<M, C::Connection>> {
        self.keys.validate()?;
        let Self { keys, cross_slot, deadline, merge, clock, .. } = self;
        let (connection, merges) = (connection.into_connection()?, merge.unwrap_or(true));
        Ok(RedisStore::new(connection, keys, cross_slot, (deadline, clock), merges, runtime))
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
            merge: None,
            place: Place::default(),
            clock: None,
            mode: PhantomData,
        }
    }

    /// Connects to the server at this URL with the defaults.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder().connect(url).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_contradicts_the_builder_is_refused_without_its_password() {
        let builder = RedisStore::builder().client(Client::default()).merge(true);
        for (url, says) in [
            ("redis://u:secret@h:1?mode=multi", "mode=lua"),
            ("redis://u:secret@h:1?mode=cas", "mode=lua"),
            #[cfg(all(feature = "redis", feature = "fred"))]
            ("redis://u:secret@h:1?client=fred", "client=redis"),
            ("redis://u:secret@h:1?merge=off", "merge=on"),
        ] {
            let url = RedisUrl::parse(url).expect(url);
            let error = builder.contradicts(&url).expect_err("contradicts").to_string();
            assert!(error.contains(says) && !error.contains("secret"), "{url}: {error}");
        }
        for url in ["redis://h:1", "redis://h:1?client=redis&mode=lua&merge=on"] {
            let url = RedisUrl::parse(url).expect(url);
            builder.contradicts(&url).expect("says the same");
        }
        let url = RedisUrl::parse("redis://h:1?mode=cas").expect("a URL");
        builder.cas().contradicts(&url).expect("its own mode");
    }
}
