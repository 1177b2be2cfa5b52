//! [`Cluster`]: several servers that share the slots.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::follow::{Next, Route, follow};
use super::link::{self, Link};
use super::lookup::{self, Lookup};
use super::node::{Endpoint, Settings};
use super::request::{Command, Question, Request};
use super::route::{Hint, Place, hint};
use super::slot::{self, Range};
use super::{Argument, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// A cluster, and the known owner of each slot.
pub(crate) struct Cluster {
    inner: Arc<Inner>,
    lookup: Lookup,
    /// Per slot since when no server was in charge, and when that was last seen. In a planned failover that takes a moment:
    /// a node that hears of the old master's demotion before it hears of the new one knows no owner.
    down: Mutex<HashMap<u16, (Instant, Instant)>>,
}

/// The data that a look-up needs.
struct Inner {
    seeds: Vec<Arc<Link>>,
    settings: Arc<Settings>,
    /// A connection without replies for this long is replaced.
    limit: Duration,
    /// The seeds' addresses.
    address: Arc<str>,
    table: RwLock<Table>,
}

/// The route to the owner of a slot.
struct ToSlot<'c> {
    cluster: &'c Cluster,
    slot: u16,
}

/// The owner of each slot.
struct Table {
    /// The owners of slots, and other servers that redirections named.
    nodes: Vec<Arc<Link>>,
    /// Per slot the index of its owner in `nodes`, or `NO_OWNER`.
    owners: Box<[u16]>,
}

const NO_OWNER: u16 = u16::MAX;

impl Table {
    fn new() -> Self {
        Self { nodes: Vec::new(), owners: vec![NO_OWNER; usize::from(slot::SLOTS)].into() }
    }

    fn owner(&self, slot: u16) -> Option<&Arc<Link>> {
        self.nodes.get(usize::from(self.owners[usize::from(slot)]))
    }

    fn node(&self, host: &str, port: u16) -> Option<(u16, &Arc<Link>)> {
        (0..).zip(&self.nodes).find(|(_, link)| is_at(link, host, port))
    }

    /// The index of the node at this address, which is added if it is new.
    fn node_or(&mut self, link: impl FnOnce() -> Arc<Link>, host: &str, port: u16) -> u16 {
        if let Some((place, _)) = self.node(host, port) {
            return place;
        }
        self.nodes.push(link());
        u16::try_from(self.nodes.len() - 1).unwrap_or(NO_OWNER)
    }
}

fn is_at(link: &Link, host: &str, port: u16) -> bool {
    let endpoint = link.endpoint();
    endpoint.port == port && endpoint.host == host
}

impl Cluster {
    /// Sends nothing yet.
    pub(crate) fn new(
        seeds: impl Iterator<Item = Endpoint>,
        settings: &Arc<Settings>,
        limit: Duration,
    ) -> Self {
        let seeds: Vec<_> = seeds.map(|seed| Arc::new(Link::new(seed, limit))).collect();
        let address = link::addresses(&seeds);
        let lookup = Lookup::new(&address, &settings.runtime);
        let (settings, table) = (Arc::clone(settings), RwLock::new(Table::new()));
        Self {
            inner: Arc::new(Inner { seeds, settings, limit, address, table }),
            lookup,
            down: Mutex::default(),
        }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        &self.inner.address
    }

    /// Reads the slot table for the first time.
    pub(crate) async fn open(&self, deadline: Deadline) -> Result<(), RedisError> {
        self.look(self.lookup.rounds(), deadline, None).await
    }

    /// Sends a request to the owner of this key's slot, and follows redirections.
    pub(crate) async fn ask<R: Request>(
        &self,
        deadline: Deadline,
        key: &str,
        request: &R,
    ) -> Result<R::Answer, RedisError> {
        let route = ToSlot { cluster: self, slot: slot::of(key) };
        follow(&route, R::TRY_AGAIN, deadline, |link: Arc<Link>, asking| async move {
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
        self.look_if_due();
        if self.inner.masters().is_empty()
            && let Err(error) = self.look(self.lookup.rounds(), deadline, None).await
        {
            return vec![(Arc::clone(self.address()), Err(error))];
        }
        let words: Arc<[Vec<u8>]> = words.iter().map(|word| word.to_bytes()).collect();
        let mut tasks = JoinSet::new();
        for link in self.inner.masters() {
            let words = Arc::clone(&words);
            tasks.spawn(async move {
                let words: Vec<Argument<'_>> =
                    words.iter().map(|word| Argument::Bytes(word)).collect();
                let answer = link.ask(deadline, false, &Command(&words)).await;
                (Arc::clone(link.address()), answer)
            });
        }
        let answers = tasks.join_all().await;
        let moved = |error: &RedisError| matches!(hint(error), Hint::Elsewhere | Hint::Doubt);
        if answers.iter().any(|(_, answer)| answer.as_ref().is_err_and(moved)) {
            self.lookup.doubt();
        }
        answers
    }

    /// Starts a look-up if one is due. Callers continue with the known table meanwhile.
    fn look_if_due(&self) -> bool {
        let is_due = self.lookup.is_due();
        if is_due {
            self.lookup.begin(|| self.looking(None));
        }
        is_due
    }

    /// Waits for a look-up.
    async fn look(
        &self,
        seen: u64,
        deadline: Deadline,
        in_doubt: Option<&Arc<Link>>,
    ) -> Result<(), RedisError> {
        self.lookup.look(seen, deadline, || self.looking(in_doubt)).await
    }

    /// Reads the slot table, from the doubted node last.
    fn looking(
        &self,
        in_doubt: Option<&Arc<Link>>,
    ) -> impl Future<Output = Result<(), RedisError>> + Send + 'static {
        let asked = self.inner.candidates(self.lookup.rounds(), in_doubt);
        let inner = Arc::clone(&self.inner);
        async move {
            let deadline = lookup::deadline();
            let asked = asked.into_iter().map(|link| slot_table(link, deadline));
            let ranges = lookup::first(asked.collect(), lookup::HEAD_START).await?;
            inner.learn(&ranges);
            Ok(())
        }
    }
}

impl Route for ToSlot<'_> {
    type To = Arc<Link>;

    async fn owner(&self, deadline: Deadline) -> Result<Arc<Link>, RedisError> {
        let Self { cluster, slot } = *self;
        let (is_due, seen) = (cluster.look_if_due(), cluster.lookup.rounds());
        let known = cluster.inner.owner(slot);
        match known {
            Some(link) if !is_due || link.is_up() => return Ok(link),
            // The known owner may be the doubted one. The rest of the deadline is for the request
            // itself; without news, the known table is used.
            Some(_) => drop(cluster.look(seen, deadline.half(), None).await),
            None => cluster.look(seen, deadline, None).await?,
        }
        cluster.inner.owner(slot).ok_or_else(|| {
            let reason = format!("no server keeps slot {slot}; assign it (CLUSTER ADDSLOTS)");
            cluster.inner.no_server(reason)
        })
    }

    fn sent_to(&self, place: &Place<'_>, asked: &Arc<Link>, for_good: bool) -> Next<Arc<Link>> {
        let slot = for_good.then_some(self.slot);
        let link = self.cluster.inner.met(place, asked, slot);
        if for_good {
            self.cluster.lookup.soon();
        }
        Next::Ask(link)
    }

    async fn instead_of(
        &self,
        asked: &Arc<Link>,
        asking: bool,
        seen: u64,
        deadline: Deadline,
    ) -> Next<Arc<Link>> {
        if asking {
            return Next::GiveUp;
        }
        if deadline.is_over() || self.cluster.look(seen, deadline, Some(asked)).await.is_err() {
            // Leaves the look-up to the next request.
            self.doubt();
        }
        match self.cluster.inner.owner(self.slot) {
            Some(owner) if !Arc::ptr_eq(&owner, asked) => Next::Ask(owner),
            _ => Next::GiveUp,
        }
    }

    fn rounds(&self) -> u64 {
        self.cluster.lookup.rounds()
    }

    fn doubt(&self) {
        self.cluster.lookup.doubt();
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
        let (now, limit) = (Instant::now(), self.cluster.inner.limit);
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
        self.cluster.inner.no_server(format!(
            "slot {slot} is on its way, and one server sends to the next; the last said: {last}"
        ))
    }
}

impl Inner {
    /// The owners of slots.
    fn masters(&self) -> Vec<Arc<Link>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let keeps = |place: u16| table.owners.contains(&place);
        (0..)
            .zip(&table.nodes)
            .filter(|(place, _)| keeps(*place))
            .map(|(_, link)| link.clone())
            .collect()
    }

    fn owner(&self, slot: u16) -> Option<Arc<Link>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).owner(slot).cloned()
    }

    /// The server at an address that the asked server named; it owns this slot from now on.
    fn met(&self, to: &Place<'_>, asked: &Link, keeps: Option<u16>) -> Arc<Link> {
        let host = if matches!(to.host, "" | "?") { &asked.endpoint().host } else { to.host };
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let place = table.node_or(|| self.link(host, to.port), host, to.port);
        if let Some(slot) = keeps {
            table.owners[usize::from(slot)] = place;
        }
        Arc::clone(&table.nodes[usize::from(place)])
    }

    fn link(&self, host: &str, port: u16) -> Arc<Link> {
        Arc::new(Link::new(Endpoint::new(host, port, &self.settings), self.limit))
    }

    /// The servers to ask, each once: the masters, starting with another one each round, then the seeds.
    fn candidates(&self, round: u64, in_doubt: Option<&Arc<Link>>) -> Vec<Arc<Link>> {
        let mut candidates = self.masters();
        let begin = round % candidates.len().max(1) as u64;
        candidates.rotate_left(usize::try_from(begin).unwrap_or(0));
        for seed in &self.seeds {
            let Endpoint { host, port, .. } = seed.endpoint();
            if !candidates.iter().any(|known| is_at(known, host, *port)) {
                candidates.push(Arc::clone(seed));
            }
        }
        // Connected servers first: they answer.
        candidates.sort_by_key(|link| {
            (in_doubt.is_some_and(|doubted| Arc::ptr_eq(link, doubted)), !link.is_up())
        });
        candidates
    }

    /// Takes over a node's slot table. Connections to servers that remain stay open. A slot without an owner keeps the known
    /// one, which redirects if it has a successor.
    fn learn(&self, ranges: &[Range]) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let mut new = Table::new();
        for Range { first, last, host, port } in ranges {
            let known = table.node(host, *port).map(|(_, link)| link);
            let known = known.or_else(|| self.seeds.iter().find(|seed| is_at(seed, host, *port)));
            let link = || known.map_or_else(|| self.link(host, *port), Arc::clone);
            let place = new.node_or(link, host, *port);
            new.owners[usize::from(*first)..=usize::from(*last)].fill(place);
        }
        for (slot, known) in (0..).zip(&table.owners) {
            if new.owners[slot] == NO_OWNER
                && let Some(link) = table.nodes.get(usize::from(*known))
            {
                let Endpoint { host, port, .. } = link.endpoint();
                new.owners[slot] = new.node_or(|| Arc::clone(link), host, *port);
            }
        }
        *table = new;
    }

    fn no_server(&self, reason: String) -> RedisError {
        RedisError::NoServer { address: Arc::clone(&self.address), reason }
    }
}

/// The slot table of a node.
async fn slot_table(link: Arc<Link>, deadline: Deadline) -> Result<Vec<Range>, RedisError> {
    let words = [Argument::Text("CLUSTER"), Argument::Text("SLOTS")];
    let reply = match link.ask(deadline, false, &Question(&words)).await {
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
    use futures_util::FutureExt;
    use ratelimit_servers::RedisServer;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_slot_that_a_table_does_not_name_keeps_its_owner() {
        let settings = Arc::new(Settings::default());
        let seeds = [Endpoint::new("h", 1, &settings)].into_iter();
        let inner = Cluster::new(seeds, &settings, Duration::from_secs(1)).inner;
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
        let settings = Arc::new(Settings::default());
        let seeds = [Endpoint::new("127.0.0.1", hung, &settings)].into_iter();
        let limit = Duration::from_secs(20);
        let cluster = Cluster::new(seeds, &settings, limit);
        let range = |first, last, port| Range { first, last, host: "127.0.0.1".into(), port };
        cluster.inner.learn(&[range(0, 8_191, server.port()), range(8_192, 16_383, hung)]);
        let (first, last) = (0, slot::SLOTS - 1);
        let deadline = Deadline::within(limit);
        let link = cluster.inner.owner(first).expect("known");
        link.ask(deadline, false, &Command(&[Argument::Text("PING")])).await.expect("it is up");

        cluster.lookup.doubt();
        for _ in 0..100 {
            let route = ToSlot { cluster: &cluster, slot: first };
            let owner = route.owner(deadline).now_or_never().expect("at once");
            assert!(Arc::ptr_eq(&owner.expect("known"), &link));
        }
        // Requests to the other server wait for the look-up: it may have a new owner.
        let route = ToSlot { cluster: &cluster, slot: last };
        assert!(route.owner(deadline).now_or_never().is_none());
        assert_eq!(cluster.lookup.rounds(), 0, "it is still under way");
    }
}
