//! [`Network`]: the way between nodes and servers, which delays, loses, cuts and repeats what it
//! carries.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use ratelimit_redis::{Argument, Connection, Deadline, RedisError, Reply};
use ratelimit_servers::slot_of;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::server::ModelServer;

tokio::task_local! {
    static IS_REPEATED: Arc<AtomicBool>;
}

/// Lets the network execute again what this future sends, and notes whether it does. Only requests
/// under an id count once however often they are sent.
pub async fn may_repeat<F: Future>(is_repeated: Arc<AtomicBool>, future: F) -> F::Output {
    IS_REPEATED.scope(is_repeated, future).await
}

/// How the network fails: chances per thousand messages, and delays.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The connection is refused, so nothing is sent.
    pub refused: u64,
    /// The request never arrives, and no one says so.
    pub lost_request: u64,
    /// The request is executed, and its reply never arrives.
    pub lost_reply: u64,
    /// The connection is cut before the request is executed, or after it.
    pub cut: u64,
    /// The request arrives a second time later, if it may.
    pub repeated: u64,
    /// The request takes a second longer, in which its caller may have given up.
    pub late: u64,
    /// The longest ordinary way in one direction.
    pub way: Duration,
}

impl Faults {
    /// Each chance at random, up to this one.
    #[must_use]
    pub fn drawn(self, random: &mut Rng) -> Self {
        let mut up_to = |per_mille| random.u64(..=per_mille);
        Self {
            refused: up_to(self.refused),
            lost_request: up_to(self.lost_request),
            lost_reply: up_to(self.lost_reply),
            cut: up_to(self.cut),
            repeated: up_to(self.repeated),
            late: up_to(self.late),
            way: self.way,
        }
    }
}

/// Servers, and the way to them. Several share the slots of a cluster.
#[derive(Debug)]
pub struct Network {
    servers: Vec<ModelServer>,
    faults: Mutex<Faults>,
    random: Mutex<Rng>,
    /// Until when each server executes nothing.
    hangs_until: Mutex<Vec<Instant>>,
    is_reachable: Vec<AtomicBool>,
}

/// What became of a message: the server's replies, or a cut.
type Delivered = Option<Result<Vec<Reply>, String>>;

/// The words of a command.
type Command = Vec<Vec<u8>>;
/// A command, or those of a transaction.
type Message = Vec<Command>;

impl Network {
    /// A network to these servers whose faults a seed decides. It works at first.
    #[must_use]
    pub fn new(servers: Vec<ModelServer>, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            faults: Mutex::default(),
            random: Mutex::new(Rng::with_seed(seed)),
            hangs_until: Mutex::new(vec![Instant::now(); servers.len()]),
            is_reachable: servers.iter().map(|_| AtomicBool::new(true)).collect(),
            servers,
        })
    }

    /// The servers.
    #[must_use]
    pub fn servers(&self) -> &[ModelServer] {
        &self.servers
    }

    /// The server of a key's slot.
    #[must_use]
    pub fn server_of(&self, key: &str) -> usize {
        usize::from(slot_of(key.as_bytes())) * self.servers.len() / SLOTS
    }

    /// Sets how the network fails from now on.
    pub fn set(&self, faults: Faults) {
        *lock(&self.faults) = faults;
    }

    /// Stops a server for so long. What arrives meanwhile is executed afterwards.
    pub fn hang(&self, server: usize, time: Duration) {
        lock(&self.hangs_until)[server] = Instant::now() + time;
    }

    /// Sets whether a server listens. Messages on their way to one that does not are cut.
    pub fn set_reachable(&self, server: usize, is_reachable: bool) {
        self.is_reachable[server].store(is_reachable, Ordering::SeqCst);
    }

    fn is_reachable(&self, server: usize) -> bool {
        self.is_reachable[server].load(Ordering::SeqCst)
    }

    /// Sends a message, which travels whether its caller waits or not.
    fn post(self: &Arc<Self>, server: usize, message: Message) -> oneshot::Receiver<Delivered> {
        let (tell, told) = oneshot::channel();
        let faults = *lock(&self.faults);
        let mut random = lock(&self.random);
        let mut happens = |per_mille: u64| random.u64(..1_000) < per_mille;
        let (is_lost, is_reply_lost) = (happens(faults.lost_request), happens(faults.lost_reply));
        let (is_cut, is_cut_first) = (happens(faults.cut), happens(500));
        let note = |is_repeated: &Arc<AtomicBool>| is_repeated.store(true, Ordering::SeqCst);
        let is_repeated = happens(faults.repeated) && IS_REPEATED.try_with(note).is_ok();
        let late = if happens(faults.late) { Duration::from_secs(1) } else { Duration::ZERO };
        let way_us = u64::try_from(faults.way.as_micros()).unwrap_or(u64::MAX);
        let mut way = || Duration::from_micros(random.u64(..=way_us));
        let (there, back, again) = (way() + late, way(), way() * 10);
        drop(random);
        if is_repeated {
            let (network, message) = (Arc::clone(self), message.clone());
            tokio::spawn(async move {
                pass(there + again).await;
                network.arrive(server, message).await;
            });
        }
        let network = Arc::clone(self);
        tokio::spawn(async move {
            pass(there).await;
            if is_lost {
                return;
            }
            let reply =
                if is_cut && is_cut_first { None } else { network.arrive(server, message).await };
            pass(back).await;
            if !is_reply_lost {
                // A caller that has given up does not read it.
                let _ = tell.send(reply.filter(|_| !is_cut));
            }
        });
        told
    }

    /// A message arrives at a server.
    async fn arrive(&self, server: usize, message: Message) -> Delivered {
        let until = lock(&self.hangs_until)[server];
        pass(until.saturating_duration_since(Instant::now())).await;
        if !self.is_reachable(server) {
            return None;
        }
        let server = &self.servers[server];
        let execute = |words: &Command| self.one_slot(words).and_then(|()| server.execute(words));
        Some(message.iter().map(execute).collect())
    }

    /// Refuses a script whose keys lie in different slots of a cluster.
    fn one_slot(&self, words: &[Vec<u8>]) -> Result<(), String> {
        let [name, _, count, rest @ ..] = words else { return Ok(()) };
        if self.servers.len() == 1 || !name.starts_with(b"EVAL") {
            return Ok(());
        }
        let count = String::from_utf8_lossy(count).parse().unwrap_or(0);
        let mut slots = rest.iter().take(count).map(|key| slot_of(key));
        let first = slots.next();
        if slots.all(|slot| Some(slot) == first) {
            return Ok(());
        }
        Err("CROSSSLOT Keys in request don't hash to the same slot".into())
    }
}

const SLOTS: usize = 16_384;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sleeps; not at all for no time, where the timer would take a millisecond.
async fn pass(time: Duration) {
    if !time.is_zero() {
        sleep(time).await;
    }
}

/// A node's connection to all servers, until the node crashes.
#[derive(Clone, Debug)]
pub struct ModelConnection {
    network: Arc<Network>,
    is_up: Arc<AtomicBool>,
    address: Arc<str>,
}

impl ModelConnection {
    /// The connection of a node that is up.
    #[must_use]
    pub fn new(network: &Arc<Network>) -> Self {
        let (network, is_up) = (Arc::clone(network), Arc::new(AtomicBool::new(true)));
        Self { network, is_up, address: "model:6379".into() }
    }

    /// The node crashes: what is in flight arrives, and nothing more is sent.
    pub fn crash(&self) {
        self.is_up.store(false, Ordering::SeqCst);
    }

    async fn ask_one(
        &self,
        server: usize,
        arguments: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let replies = self.ask(server, vec![words(arguments)], deadline).await?;
        Ok(replies.into_iter().next().unwrap_or(Reply::Nil))
    }

    async fn ask(
        &self,
        server: usize,
        message: Message,
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let address = || Arc::clone(&self.address);
        let refused = lock(&self.network.faults).refused;
        let is_refused = lock(&self.network.random).u64(..1_000) < refused;
        let is_up = self.is_up.load(Ordering::SeqCst) && self.network.is_reachable(server);
        if is_refused || !is_up || deadline.is_over() {
            let reason = "the model refuses".into();
            return Err(RedisError::Unreachable { address: address(), reason });
        }
        let told = self.network.post(server, message);
        match timeout_at(deadline.at(), told).await {
            Ok(Ok(Some(Ok(replies)))) => Ok(replies),
            Ok(Ok(Some(Err(refused)))) => {
                let (code, message) = refused.split_once(' ').unwrap_or((&refused, ""));
                let (code, message) = (code.to_owned(), message.to_owned());
                Err(RedisError::Server { address: address(), code, message })
            }
            Ok(Ok(None)) => {
                Err(RedisError::Lost { address: address(), reason: "the model cuts".into() })
            }
            Ok(Err(_)) | Err(_) => {
                sleep_until(deadline.at()).await;
                Err(RedisError::TimedOut { address: address(), deadline: deadline.given() })
            }
        }
    }
}

fn words(arguments: &[Argument<'_>]) -> Command {
    let word = |argument: &Argument<'_>| match argument {
        Argument::Text(text) => text.as_bytes().to_vec(),
        Argument::Bytes(bytes) => bytes.to_vec(),
        Argument::Number(number) => number.to_string().into_bytes(),
    };
    arguments.iter().map(word).collect()
}

impl Connection for ModelConnection {
    async fn send(
        &self,
        key: &str,
        arguments: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let server = self.network.server_of(key);
        self.ask_one(server, arguments, deadline).await
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let all = commands.iter().map(|arguments| words(arguments)).collect();
        self.ask(self.network.server_of(key), all, deadline).await
    }

    async fn send_to_each(
        &self,
        arguments: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        let mut replies = Vec::new();
        for server in 0..self.network.servers.len() {
            let reply = self.ask_one(server, arguments, deadline).await;
            replies.push((Arc::clone(&self.address), reply));
        }
        replies
    }

    fn is_cluster(&self) -> bool {
        self.network.servers.len() > 1
    }

    fn server_of(&self, key: &str) -> Option<u64> {
        self.is_cluster().then(|| self.network.server_of(key) as u64)
    }

    fn address(&self) -> &Arc<str> {
        &self.address
    }
}
