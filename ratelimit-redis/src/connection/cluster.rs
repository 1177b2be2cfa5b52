//! [`Cluster`]: several servers that share the slots.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::follow::{Route, follow};
use super::link::{self, Link};
use super::lookup::{self, Lookup};
use super::node::{Endpoint, Settings};
use super::request::Request;
use super::route::{Hint, Place, hint};
use super::slot::{self, Range};
use super::{Argument, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// A cluster, and the known owner of each slot.
pub(crate) struct Cluster {
    inner: Arc<SharedCluster>,
    lookup: Lookup,
    /// Per slot since when no server was in charge, and when that was last seen. In a planned failover that takes a moment:
    /// a node that hears of the old master's demotion before it hears of the new one knows no owner.
    down: Mutex<HashMap<u16, (Instant, Instant)>>,
}

/// The data that a look-up needs.
struct SharedCluster {
    seeds: Vec<Arc<Link>>,
    settings: Arc<Settings>,
    table: RwLock<SlotTable>,
}

/// The route to the owner of a slot.
struct ToSlot<'c> {
    cluster: &'c Cluster,
    slot: u16,
}

/// The owner of each slot.
struct SlotTable {
    /// The owners of slots, and other servers that redirections named.
    nodes: Vec<Arc<Link>>,
    owners: Box<[Option<Arc<Link>>]>,
}

impl SlotTable {
    fn new() -> Self {
        Self { nodes: Vec::new(), owners: vec![None; usize::from(slot::SLOTS)].into() }
    }

    fn node(&self, host: &str, port: u16) -> Option<&Arc<Link>> {
        self.nodes.iter().find(|link| link.is_at(host, port))
    }

    /// The node at this address, which is added if it is new.
    fn node_or(&mut self, link: impl FnOnce() -> Arc<Link>, host: &str, port: u16) -> Arc<Link> {
        if let Some(known) = self.node(host, port) {
            return Arc::clone(known);
        }
        self.nodes.push(link());
        Arc::clone(&self.nodes[self.nodes.len() - 1])
    }
}

impl Cluster {
    /// Sends nothing yet.
    pub(crate) fn new(seeds: impl Iterator<Item = Endpoint>, settings: &Arc<Settings>) -> Self {
        let seeds: Vec<_> = seeds.map(Link::new).collect();
        let address = link::addresses(&seeds);
        let (settings, table) = (Arc::clone(settings), RwLock::new(SlotTable::new()));
        let inner = Arc::new(SharedCluster { seeds, settings, table });
        let looks = Arc::clone(&inner);
        let lookup = Lookup::new(&address, &inner.settings.runtime, move |round, doubted| {
            Arc::clone(&looks).look(looks.candidates(round, doubted))
        });
        Self { inner, lookup, down: Mutex::default() }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        self.lookup.address()
    }

    /// Reads the slot table for the first time.
    pub(crate) async fn open(&self, deadline: Deadline) -> Result<(), RedisError> {
        self.lookup.look(self.lookup.rounds(), deadline, None).await
    }

    /// Sends a request to the owner of this key's slot, and follows redirections.
    pub(crate) async fn ask(
        &self,
        deadline: Deadline,
        key: &str,
        request: Request<'_>,
    ) -> Result<Reply, RedisError> {
        let route = ToSlot { cluster: self, slot: slot::of(key) };
        follow(&route, request.try_again(), deadline, |link: Arc<Link>, asking| async move {
            link.ask(deadline, asking, request).await
        })
        .await
    }

    /// Sends a command to every server that owns slots.
    pub(crate) async fn ask_each(
        &self,
        deadline: Deadline,
        words: &[Argument<'_>],
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.lookup.begin_if_due();
        if self.inner.masters().is_empty()
            && let Err(error) = self.open(deadline).await
        {
            return vec![(Arc::clone(self.address()), Err(error))];
        }
        let asked = self.inner.masters().into_iter().map(|link| async move {
            let answer = link.ask(deadline, false, Request::command(words)).await;
            (Arc::clone(link.address()), answer)
        });
        let answers = join_all(asked).await;
        let moved = |error: &RedisError| matches!(hint(error), Hint::Elsewhere | Hint::Doubt);
        if answers.iter().any(|(_, answer)| answer.as_ref().is_err_and(moved)) {
            self.lookup.doubt();
        }
        answers
    }
}

impl Route for ToSlot<'_> {
    fn lookup(&self) -> &Lookup {
        &self.cluster.lookup
    }

    fn known(&self) -> Option<Arc<Link>> {
        self.cluster.inner.owner(self.slot)
    }

    fn unknown(&self) -> String {
        format!("no server keeps slot {}; assign it (CLUSTER ADDSLOTS)", self.slot)
    }

    fn sent_to(&self, place: &Place<'_>, asked: &Link, for_good: bool) -> Option<Arc<Link>> {
        if for_good {
            self.cluster.lookup.soon();
        }
        Some(self.cluster.inner.met(place, asked, for_good.then_some(self.slot)))
    }

    fn may_pass(&self, error: &RedisError) -> bool {
        let is_down = match error {
            RedisError::NoServer { .. } => true,
            RedisError::Server { code, .. } => code == "CLUSTERDOWN",
            _ => false,
        };
        if !is_down {
            return false;
        }
        let (now, limit) = (Instant::now(), self.cluster.inner.settings.limit);
        let mut down = self.cluster.down.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, seen) = down.entry(self.slot).or_insert((now, now));
        if now - *seen >= limit {
            *since = now;
        }
        *seen = now;
        now - *since < limit
    }

    fn has_passed(&self) {
        self.cluster.down.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.slot);
    }

    fn astray(&self, last: RedisError) -> RedisError {
        let slot = self.slot;
        self.cluster.lookup.nothing(format!(
            "slot {slot} is on its way, and one server sends to the next; the last said: {last}"
        ))
    }
}

impl SharedCluster {
    fn table(&self) -> RwLockReadGuard<'_, SlotTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The owners of slots.
    fn masters(&self) -> Vec<Arc<Link>> {
        let table = self.table();
        let owns =
            |link: &&Arc<Link>| table.owners.iter().flatten().any(|owner| Arc::ptr_eq(owner, link));
        table.nodes.iter().filter(owns).cloned().collect()
    }

    fn owner(&self, slot: u16) -> Option<Arc<Link>> {
        self.table().owners[usize::from(slot)].clone()
    }

    /// The server at an address that the asked server named; it owns this slot from now on.
    fn met(&self, to: &Place<'_>, asked: &Link, keeps: Option<u16>) -> Arc<Link> {
        let host = if matches!(to.host, "" | "?") { &asked.endpoint().host } else { to.host };
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let link = table.node_or(|| self.link(host, to.port), host, to.port);
        if let Some(slot) = keeps {
            table.owners[usize::from(slot)] = Some(Arc::clone(&link));
        }
        link
    }

    fn link(&self, host: &str, port: u16) -> Arc<Link> {
        Link::new(Endpoint::new(host, port, &self.settings))
    }

    /// The servers to ask, each once: the masters, starting with another one each round, then the seeds.
    fn candidates(&self, round: u64, in_doubt: Option<&Arc<Link>>) -> Vec<Arc<Link>> {
        let mut candidates = self.masters();
        lookup::rotate(&mut candidates, round);
        for seed in &self.seeds {
            let Endpoint { host, port, .. } = seed.endpoint();
            if !candidates.iter().any(|known| known.is_at(host, *port)) {
                candidates.push(Arc::clone(seed));
            }
        }
        // Connected servers first: they answer.
        candidates.sort_by_key(|link| {
            (in_doubt.is_some_and(|doubted| Arc::ptr_eq(link, doubted)), !link.is_up())
        });
        candidates
    }

    /// Reads the slot table of one of these.
    async fn look(self: Arc<Self>, asked: Vec<Arc<Link>>) -> Result<(), RedisError> {
        let deadline = lookup::deadline();
        let asked = asked.into_iter().map(|link| slot_table(link, deadline));
        self.learn(&lookup::first(asked, lookup::HEAD_START).await?);
        Ok(())
    }

    /// Takes over a node's slot table. Connections to servers that remain stay open. A slot without an owner keeps the known
    /// one, which redirects if it has a successor.
    fn learn(&self, ranges: &[Range]) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let mut new = SlotTable::new();
        for Range { first, last, host, port } in ranges {
            let known = table.node(host, *port);
            let known = known.or_else(|| self.seeds.iter().find(|seed| seed.is_at(host, *port)));
            let link = || known.map_or_else(|| self.link(host, *port), Arc::clone);
            let link = new.node_or(link, host, *port);
            new.owners[usize::from(*first)..=usize::from(*last)].fill(Some(link));
        }
        for (slot, known) in table.owners.iter().enumerate() {
            if let (None, Some(link)) = (&new.owners[slot], known) {
                let Endpoint { host, port, .. } = link.endpoint();
                new.owners[slot] = Some(new.node_or(|| Arc::clone(link), host, *port));
            }
        }
        *table = new;
    }
}

/// The slot table of a node.
async fn slot_table(link: Arc<Link>, deadline: Deadline) -> Result<Vec<Range>, RedisError> {
    let words = [Argument::Text("CLUSTER"), Argument::Text("SLOTS")];
    let reply = match link.ask(deadline, false, Request::question(&words)).await {
        Ok(reply) => reply,
        Err(RedisError::Server { address, code, message })
            if code == "ERR" && message.contains("cluster support disabled") =>
        {
            return Err(RedisError::Config(format!(
                "Redis at {address} is no cluster; use redis://{address}"
            )));
        }
        Err(error) => return Err(error),
    };
    let unexpected = || link.endpoint().peer.unexpected(&reply);
    let ranges = slot::ranges(&reply, &link.endpoint().host).ok_or_else(unexpected)?;
    if ranges.is_empty() {
        // A node that was reset, or that the others have forgotten.
        return Err(RedisError::NoServer {
            address: Arc::clone(link.address()),
            reason: "it knows no owner of any slot; is it part of the cluster (CLUSTER MEET)?"
                .into(),
        });
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;
    use ratelimit_servers::RedisServer;
    use tokio::net::TcpListener;

    use super::*;
    use crate::connection::follow::in_charge;

    #[tokio::test]
    async fn a_slot_that_a_table_does_not_name_keeps_its_owner() {
        let settings = Arc::new(Settings::default());
        let seeds = [Endpoint::new("h", 1, &settings)].into_iter();
        let inner = Cluster::new(seeds, &settings).inner;
        let range = |first, last, port| Range { first, last, host: "h".into(), port };
        inner.learn(&[range(0, 99, 1), range(100, 199, 2), range(200, 299, 3)]);
        // As a node sees it for a moment that has heard of the demotion of a master and not of its successor.
        inner.learn(&[range(0, 149, 1), range(250, 299, 3)]);
        let owner = |slot| inner.owner(slot).map(|link| link.endpoint().port);
        assert_eq!(
            [0, 149, 150, 200, 299, 300].map(owner),
            [Some(1), Some(1), Some(2), Some(3), Some(3), None]
        );
        assert_eq!(inner.masters().len(), 3);
    }

    #[tokio::test]
    async fn a_hanging_look_up_does_not_delay_requests_to_healthy_servers() {
        let server = RedisServer::start().expect("redis-server");
        let hangs = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let hung = hangs.local_addr().expect("bound").port();
        let limit = Duration::from_secs(20);
        let settings = Arc::new(Settings { limit, ..Settings::default() });
        let seeds = [Endpoint::new("127.0.0.1", hung, &settings)].into_iter();
        let cluster = Cluster::new(seeds, &settings);
        let range = |first, last, port| Range { first, last, host: "127.0.0.1".into(), port };
        cluster.inner.learn(&[range(0, 8_191, server.port()), range(8_192, 16_383, hung)]);
        let (first, last) = (0, slot::SLOTS - 1);
        let deadline = Deadline::within(limit);
        let link = cluster.inner.owner(first).expect("known");
        link.ask(deadline, false, Request::command(&[Argument::Text("PING")]))
            .await
            .expect("it is up");

        cluster.lookup.doubt();
        for _ in 0..100 {
            let route = ToSlot { cluster: &cluster, slot: first };
            let owner = in_charge(&route, deadline).now_or_never().expect("at once");
            assert!(Arc::ptr_eq(&owner.expect("known"), &link));
        }
        // Requests to the other server wait for the look-up: it may have a new owner.
        let route = ToSlot { cluster: &cluster, slot: last };
        assert!(in_charge(&route, deadline).now_or_never().is_none());
        assert_eq!(cluster.lookup.rounds(), 0, "it is still under way");
    }
}
