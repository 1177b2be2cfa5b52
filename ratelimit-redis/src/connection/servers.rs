//! [`Servers`]: which server is in charge of a key: the only one, one of a cluster, whose servers
//! share the slots, or the master of a service, which Sentinels name.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::attempts::{Attempts, Pace};
use super::endpoint::{Endpoint, Settings};
use super::link::Link;
use super::peer::Peer;
use super::request::{Argument, Commands};
use super::route::Place;
use super::sentinel;
use super::slot::{self, Range};
use crate::concurrent::first;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::url::Kind;

/// How long a look-up may take.
const LONGEST: Duration = Duration::from_secs(3);
/// During an outage every request would start a look-up.
pub(super) const PACE: Pace = Pace {
    rest: Duration::from_millis(50),
    longest_pause: Duration::from_millis(50),
    quick: LONGEST,
};
/// How long to wait for one server before the next is asked as well.
const HEAD_START: Duration = Duration::from_millis(50);

/// A cluster, and the known owner of each slot. One server, or the master of a service, owns one
/// slot with all keys.
pub(crate) struct Servers {
    pub(super) known: Arc<Known>,
    /// The look-ups of the owners.
    pub(super) lookups: Attempts,
    /// Per slot since when no server was in charge, and when that was last seen. In a planned
    /// failover that takes a moment: a node that hears of the old master's demotion before it hears
    /// of the new one knows no owner.
    down: Mutex<HashMap<u16, (Instant, Instant)>>,
}

/// What is known of the servers.
pub(super) struct Known {
    kind: Kind,
    /// The only server, some of the cluster, or Sentinels.
    seeds: Vec<Arc<Link>>,
    /// The service that the Sentinels watch.
    service: String,
    /// For the servers that keep the keys.
    settings: Arc<Settings>,
    table: RwLock<SlotTable>,
    /// How many look-ups have begun.
    rounds: AtomicUsize,
    /// How many doubts arose, and up to which one look-ups have settled them.
    doubts: AtomicU64,
    settled: AtomicU64,
}

/// The owner of each slot.
struct SlotTable {
    /// The owners of slots, and other servers that redirections named, by host and port.
    nodes: BTreeMap<(String, u16), Arc<Link>>,
    owners: Box<[Option<Arc<Link>>]>,
}

impl SlotTable {
    fn new(slots: usize) -> Self {
        Self { nodes: BTreeMap::new(), owners: vec![None; slots].into() }
    }

    /// The node at this address, which is added if it is new.
    fn node_or(&mut self, host: &str, port: u16, link: impl FnOnce() -> Arc<Link>) -> Arc<Link> {
        Arc::clone(self.nodes.entry((host.to_owned(), port)).or_insert_with(link))
    }
}

impl Servers {
    /// Sends nothing yet. `settings` are for the servers that keep the keys.
    pub(crate) fn new(
        seeds: impl Iterator<Item = Endpoint>,
        (kind, service): (Kind, &str),
        settings: &Arc<Settings>,
    ) -> Self {
        let seeds: Vec<_> = seeds.map(|seed| Arc::new(Link::new(seed))).collect();
        let addresses: Vec<_> = seeds.iter().map(|seed| &**seed.address()).collect();
        let peer = Peer::new(addresses.join(","));
        let slots = if kind == Kind::Cluster { usize::from(slot::SLOTS) } else { 1 };
        let mut table = SlotTable::new(slots);
        if kind == Kind::One {
            table.owners[0] = seeds.first().cloned();
        }
        let known = Arc::new(Known {
            kind,
            seeds,
            service: service.to_owned(),
            settings: Arc::clone(settings),
            table: RwLock::new(table),
            rounds: AtomicUsize::new(0),
            doubts: AtomicU64::new(0),
            settled: AtomicU64::new(0),
        });
        let awaited = (peer, "no server said which one is in charge");
        let look = Arc::clone(&known);
        let look = move |_| Arc::clone(&look).look();
        let lookups = Attempts::new(awaited, &settings.runtime, PACE, look);
        Self { known, lookups, down: Mutex::default() }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.known.kind == Kind::Cluster
    }

    /// Whether there is no other server.
    pub(super) fn is_alone(&self) -> bool {
        self.known.kind == Kind::One
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.lookups.peer
    }

    /// A number of the server that is known to keep this key, on a cluster: a hash of its address.
    pub(crate) fn server_of(&self, key: &str) -> Option<u64> {
        let owner = if self.is_cluster() { self.known.owner(slot::of(key)) } else { None }?;
        let mut hasher = DefaultHasher::new();
        owner.address().hash(&mut hasher);
        Some(hasher.finish())
    }

    /// Looks up the owners for the first time.
    pub(crate) async fn open(&self, deadline: Deadline) -> Result<()> {
        self.lookups.next(deadline).await
    }

    /// Waits for a look-up that ends after so many have. Starts one if necessary.
    pub(super) async fn look(&self, seen: u64, deadline: Deadline) -> Result<()> {
        if self.lookups.ended() == seen { self.lookups.next(deadline).await } else { Ok(()) }
    }

    /// Starts a look-up if the known owners are in doubt. Returns whether they are; callers
    /// continue with what is known meanwhile.
    pub(super) fn look_if_in_doubt(&self) -> bool {
        let is_in_doubt = self.known.is_in_doubt();
        if is_in_doubt {
            // A request says it if there is no runtime.
            let _ = self.lookups.begin();
        }
        is_in_doubt
    }

    /// Whether a server may be in charge of a slot in a moment although this error says that none
    /// is: the cluster has been in that state for less than a deadline.
    pub(super) fn may_pass(&self, slot: u16, error: &RedisError) -> bool {
        let is_down = match error {
            RedisError::NoServer { .. } => true,
            RedisError::Server { code, .. } => code == "CLUSTERDOWN",
            _ => false,
        };
        if !is_down || !self.is_cluster() {
            return false;
        }
        let (now, limit) = (Instant::now(), self.known.settings.limit);
        let mut down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, seen) = down.entry(slot).or_insert((now, now));
        if now - *seen >= limit {
            *since = now;
        }
        *seen = now;
        now - *since < limit
    }

    /// Notes that a request was answered which had to wait.
    pub(super) fn has_passed(&self, slot: u16) {
        self.down.lock().unwrap_or_else(PoisonError::into_inner).remove(&slot);
    }
}

impl Known {
    fn table(&self) -> RwLockReadGuard<'_, SlotTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The owners of slots.
    pub(super) fn masters(&self) -> Vec<Arc<Link>> {
        let table = self.table();
        let owns =
            |link: &&Arc<Link>| table.owners.iter().flatten().any(|owner| Arc::ptr_eq(owner, link));
        table.nodes.values().filter(owns).cloned().collect()
    }

    pub(super) fn owner(&self, slot: u16) -> Option<Arc<Link>> {
        self.table().owners[usize::from(slot)].clone()
    }

    /// Notes that a known owner may be wrong.
    pub(super) fn doubt(&self) {
        if self.kind != Kind::One {
            self.doubts.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn is_in_doubt(&self) -> bool {
        self.doubts.load(Ordering::Acquire) != self.settled.load(Ordering::Acquire)
    }

    /// The server at an address that the asked server named; it owns this slot from now on.
    pub(super) fn met(&self, to: &Place<'_>, asked: &Link, keeps: Option<u16>) -> Arc<Link> {
        let host = if matches!(to.host, "" | "?") { &asked.endpoint.host } else { to.host };
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let link = table.node_or(host, to.port, || self.link(host, to.port));
        if let Some(slot) = keeps {
            table.owners[usize::from(slot)] = Some(Arc::clone(&link));
        }
        link
    }

    fn link(&self, host: &str, port: u16) -> Arc<Link> {
        Arc::new(Link::new(Endpoint::new(host, port, &self.settings)))
    }

    /// The servers to ask, each once: the masters, then the seeds; those that are connected first,
    /// since they answer. Of Sentinels, whichever is connected: one of them may be outdated. Each
    /// round begins with another one: the first may be away, or know less than the others.
    fn candidates(&self) -> Vec<Arc<Link>> {
        let is_cluster = self.kind == Kind::Cluster;
        let mut candidates = if is_cluster { self.masters() } else { self.seeds.clone() };
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        let begin = round % candidates.len().max(1);
        candidates.rotate_left(begin);
        if is_cluster {
            for seed in &self.seeds {
                let Endpoint { host, port, .. } = &*seed.endpoint;
                if !candidates.iter().any(|known| known.is_at(host, *port)) {
                    candidates.push(Arc::clone(seed));
                }
            }
            candidates.sort_by_key(|link| !link.is_up());
        }
        candidates
    }

    /// Asks for the owners of the slots, or for the master.
    async fn look(self: Arc<Self>) -> Result<()> {
        let doubts = self.doubts.load(Ordering::Acquire);
        let (deadline, known) = (Deadline::within(LONGEST), &*self);
        let asked = known.candidates().into_iter().map(|link| async move {
            match known.kind {
                Kind::Sentinels => known.named_by(&link, deadline).await,
                _ => slot_table(&link, deadline).await,
            }
        });
        self.learn(&first(asked, HEAD_START).await?);
        self.settled.store(doubts, Ordering::Release);
        Ok(())
    }

    /// The master of a service that a Sentinel names, as the owner of the only slot, if that server
    /// is a master.
    async fn named_by(&self, sentinel: &Link, deadline: Deadline) -> Result<Vec<Range>> {
        let (host, port) = sentinel::master_by(sentinel, &self.service, deadline).await?;
        if !self.owner(0).is_some_and(|known| known.is_at(&host, port)) {
            let link = self.met(&Place { host: &host, port }, sentinel, None);
            sentinel::is_master(&link, sentinel, deadline).await?;
        }
        Ok(vec![Range { first: 0, last: 0, host, port }])
    }

    /// Takes over a node's slot table. Connections to servers that remain stay open. A slot without
    /// an owner keeps the known one, which redirects if it has a successor.
    pub(super) fn learn(&self, ranges: &[Range]) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let mut new = SlotTable::new(table.owners.len());
        // Sentinels have a login of their own.
        let seeds = if self.kind == Kind::Cluster { &*self.seeds } else { &[] };
        for Range { first, last, host, port } in ranges {
            let known = table.nodes.get(&(host.clone(), *port));
            let known = known.or_else(|| seeds.iter().find(|seed| seed.is_at(host, *port)));
            let link = || known.map_or_else(|| self.link(host, *port), Arc::clone);
            let link = new.node_or(host, *port, link);
            new.owners[usize::from(*first)..=usize::from(*last)].fill(Some(link));
        }
        for (slot, known) in table.owners.iter().enumerate() {
            if let (None, Some(link)) = (&new.owners[slot], known) {
                let Endpoint { host, port, .. } = &*link.endpoint;
                new.owners[slot] = Some(new.node_or(host, *port, || Arc::clone(link)));
            }
        }
        *table = new;
    }
}

/// The slot table of a node.
async fn slot_table(link: &Link, deadline: Deadline) -> Result<Vec<Range>> {
    let words = ["CLUSTER", "SLOTS"].map(Argument::Text);
    let asked = link.ask(deadline, false, Commands::One(&words)).await;
    let reply = asked.map_err(|error| match error {
        RedisError::Server { address, message, .. }
            if message.contains("cluster support disabled") =>
        {
            RedisError::Config(format!("Redis at {address} is no cluster; use redis://{address}"))
        }
        error => error,
    })?;
    let Endpoint { host, peer, .. } = &*link.endpoint;
    let ranges = slot::ranges(&reply, host).ok_or_else(|| peer.unexpected(&reply))?;
    if ranges.is_empty() {
        // A node that was reset, or that the others have forgotten.
        let reason = "it knows no owner of any slot; is it part of the cluster (CLUSTER MEET)?";
        return Err(peer.no_server(reason));
    }
    Ok(ranges)
}

#[cfg(test)]
pub(super) mod tests {
    use ratelimit_servers::RedisServer;

    use super::*;

    /// Servers with these seeds.
    pub(crate) fn servers(ports: &[u16], kind: Kind) -> Servers {
        let settings = Arc::new(Settings { limit: Duration::MAX, ..Settings::default() });
        let seeds = ports.iter().map(|port| Endpoint::new("127.0.0.1", *port, &settings));
        Servers::new(seeds, (kind, "service"), &settings)
    }

    pub(crate) fn range(first: u16, last: u16, port: u16) -> Range {
        Range { first, last, host: "127.0.0.1".into(), port }
    }

    #[test]
    fn another_sentinel_is_asked_first_each_round() {
        let known = servers(&[1, 2, 3], Kind::Sentinels).known;
        let asked = [(); 4].map(|()| known.candidates()[0].endpoint.port);
        assert_eq!(asked, [1, 2, 3, 1]);
    }

    #[tokio::test]
    async fn a_slot_that_a_table_does_not_name_keeps_its_owner() {
        let known = servers(&[1], Kind::Cluster).known;
        known.learn(&[range(0, 99, 1), range(100, 199, 2), range(200, 299, 3)]);
        // As a node sees it for a moment that has heard of the demotion of a master and not of its
        // successor.
        known.learn(&[range(0, 149, 1), range(250, 299, 3)]);
        let owner = |slot| known.owner(slot).map(|link| link.endpoint.port);
        assert_eq!(
            [0, 149, 150, 200, 299, 300].map(owner),
            [Some(1), Some(1), Some(2), Some(3), Some(3), None]
        );
        assert_eq!(known.masters().len(), 3);
    }

    #[tokio::test]
    async fn a_doubt_stays_if_it_arises_during_a_look_up_or_the_look_up_fails() {
        let args = ["--cluster-enabled", "yes"];
        let node = RedisServer::start_with(&RedisServer::binaries()[0], &args).expect("a node");
        node.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).expect("it is up");
        let known = servers(&[node.port()], Kind::Cluster).known;
        known.doubt();
        let arises = async { known.doubt() };
        let (looked, ()) = futures_util::join!(Arc::clone(&known).look(), arises);
        looked.expect("it answers");
        assert!(known.is_in_doubt());
        Arc::clone(&known).look().await.expect("it answers");
        assert!(!known.is_in_doubt());
        drop(node);
        known.doubt();
        Arc::clone(&known).look().await.expect_err("it is gone");
        assert!(known.is_in_doubt());
    }
}
