//! [`Servers`]: several servers, one of which is in charge of a key: a cluster, whose servers share
//! the slots, or the servers of a service, whose master Sentinels name.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use tokio::time::Instant;

use super::link::Link;
use super::lookup::{self, Lookup};
use super::node::{Endpoint, Settings};
use super::peer::Peer;
use super::request::Request;
use super::route::{Hint, Place, hint};
use super::slot::{self, Range};
use super::{Argument, Reply};
use crate::concurrent::all;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};

/// A cluster, and the known owner of each slot; or a service, which is one slot to its master.
pub(crate) struct Servers {
    inner: Arc<SharedServers>,
    lookup: Lookup,
    /// Per slot since when no server was in charge, and when that was last seen. In a planned
    /// failover that takes a moment: a node that hears of the old master's demotion before it hears
    /// of the new one knows no owner.
    down: Mutex<HashMap<u16, (Instant, Instant)>>,
}

/// The data that a look-up needs.
pub(super) struct SharedServers {
    /// Of the cluster, or Sentinels.
    seeds: Vec<Arc<Link>>,
    /// The service that the Sentinels watch; `None` for a cluster.
    service: Option<String>,
    /// For the servers that keep the keys.
    settings: Arc<Settings>,
    table: RwLock<SlotTable>,
}

/// The route to the owner of a slot.
pub(super) struct ToSlot<'s> {
    servers: &'s Servers,
    slot: u16,
    pub(super) deadline: Deadline,
}

/// The owner of each slot.
struct SlotTable {
    /// The owners of slots, and other servers that redirections named.
    nodes: Vec<Arc<Link>>,
    owners: Box<[Option<Arc<Link>>]>,
}

impl SlotTable {
    fn new(slots: usize) -> Self {
        Self { nodes: Vec::new(), owners: vec![None; slots].into() }
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

impl Servers {
    /// Sends nothing yet. `settings` are for the servers that keep the keys. The seeds are
    /// Sentinels if they name the master of a `service`, and of a cluster otherwise.
    pub(crate) fn new(
        seeds: impl Iterator<Item = Endpoint>,
        service: Option<&str>,
        settings: &Arc<Settings>,
    ) -> Self {
        let seeds: Vec<_> = seeds.map(Link::new).collect();
        let addresses: Vec<_> = seeds.iter().map(|seed| &**seed.address()).collect();
        let peer = Peer::new(addresses.join(","));
        let (service, settings) = (service.map(str::to_owned), Arc::clone(settings));
        let slots = if service.is_some() { 1 } else { usize::from(slot::SLOTS) };
        let table = RwLock::new(SlotTable::new(slots));
        let inner = Arc::new(SharedServers { seeds, service, settings, table });
        let looks = Arc::clone(&inner);
        let lookup = Lookup::new(peer, &inner.settings.runtime, move |round, doubted| {
            Arc::clone(&looks).look(looks.candidates(round, doubted))
        });
        Self { inner, lookup, down: Mutex::default() }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.inner.service.is_none()
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.lookup.peer
    }

    /// A number of the server that is known to keep this key, on a cluster: a hash of its address.
    pub(crate) fn server_of(&self, key: &str) -> Option<u64> {
        let owner = if self.is_cluster() { self.inner.owner(slot::of(key)) } else { None }?;
        let mut hasher = DefaultHasher::new();
        owner.address().hash(&mut hasher);
        Some(hasher.finish())
    }

    /// Reads the slot table for the first time.
    pub(crate) async fn open(&self, deadline: Deadline) -> Result<()> {
        self.lookup.look(self.lookup.rounds(), deadline, None).await
    }

    /// Sends a request to the owner of this key's slot, and follows redirections.
    pub(crate) async fn ask(
        &self,
        deadline: Deadline,
        key: &str,
        request: Request<'_>,
    ) -> Result<Reply> {
        let slot = if self.is_cluster() { slot::of(key) } else { 0 };
        let route = ToSlot { servers: self, slot, deadline };
        route
            .follow(request.try_again, |link: Arc<Link>, asking| async move {
                link.ask(deadline, asking, request).await
            })
            .await
    }

    /// Sends a command to every server that keeps keys.
    pub(crate) async fn ask_each(
        &self,
        deadline: Deadline,
        words: &[Argument<'_>],
    ) -> Vec<(Arc<str>, Result<Reply>)> {
        if !self.is_cluster() {
            let answer = self.ask(deadline, "", Request::command(words)).await;
            let master = self.inner.owner(0);
            let address = master.as_deref().map_or(self.peer().address(), Link::address);
            return vec![(Arc::clone(address), answer)];
        }
        self.lookup.begin_if_due();
        if self.inner.masters().is_empty()
            && let Err(error) = self.open(deadline).await
        {
            return vec![(Arc::clone(self.peer().address()), Err(error))];
        }
        let asked = self.inner.masters().into_iter().map(|link| async move {
            let answer = link.ask(deadline, false, Request::command(words)).await;
            (Arc::clone(link.address()), answer)
        });
        let answers = all(asked).await;
        let moved = |error: &RedisError| matches!(hint(error), Hint::Elsewhere | Hint::Doubt);
        if answers.iter().any(|(_, answer)| answer.as_ref().is_err_and(moved)) {
            self.lookup.doubt();
        }
        answers
    }
}

impl ToSlot<'_> {
    pub(super) fn lookup(&self) -> &Lookup {
        &self.servers.lookup
    }

    /// The server that is known to be in charge.
    pub(super) fn known(&self) -> Option<Arc<Link>> {
        self.servers.inner.owner(self.slot)
    }

    /// Why no server is known after a look-up.
    pub(super) fn unknown(&self) -> String {
        if self.servers.is_cluster() {
            format!("no server keeps slot {}; assign it (CLUSTER ADDSLOTS)", self.slot)
        } else {
            "no master is known yet".into()
        }
    }

    /// The server to which the asked one redirects: for good, or for this request only. Only
    /// servers of a cluster redirect.
    pub(super) fn sent_to(
        &self,
        place: &Place<'_>,
        asked: &Link,
        for_good: bool,
    ) -> Option<Arc<Link>> {
        if !self.servers.is_cluster() {
            return None;
        }
        if for_good {
            // Other slots may have moved as well.
            self.lookup().doubt();
        }
        Some(self.servers.inner.met(place, asked, for_good.then_some(self.slot)))
    }

    /// Whether a server may be in charge in a moment although this error says that none is: the
    /// cluster has been in that state for less than a deadline.
    pub(super) fn may_pass(&self, error: &RedisError) -> bool {
        let is_down = match error {
            RedisError::NoServer { .. } => true,
            RedisError::Server { code, .. } => code == "CLUSTERDOWN",
            _ => false,
        };
        if !is_down || !self.servers.is_cluster() {
            return false;
        }
        let (now, limit) = (Instant::now(), self.servers.inner.settings.limit);
        let mut down = self.servers.down.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, seen) = down.entry(self.slot).or_insert((now, now));
        if now - *seen >= limit {
            *since = now;
        }
        *seen = now;
        now - *since < limit
    }

    /// Notes that a request was answered which had to wait.
    pub(super) fn has_passed(&self) {
        self.servers.down.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.slot);
    }

    /// The error when servers redirect in a circle.
    pub(super) fn astray(&self, last: RedisError) -> RedisError {
        if !self.servers.is_cluster() {
            return last;
        }
        let slot = self.slot;
        self.lookup().peer.no_server(format!(
            "slot {slot} is on its way, and one server sends to the next; the last said: {last}"
        ))
    }
}

impl SharedServers {
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

    pub(super) fn owner(&self, slot: u16) -> Option<Arc<Link>> {
        self.table().owners[usize::from(slot)].clone()
    }

    /// The server at an address that the asked server named; it owns this slot from now on.
    pub(super) fn met(&self, to: &Place<'_>, asked: &Link, keeps: Option<u16>) -> Arc<Link> {
        let host = if matches!(to.host, "" | "?") { &asked.endpoint.host } else { to.host };
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

    /// The servers to ask, each once: the masters, starting with another one each round, then the
    /// seeds. Of Sentinels another one each round, whichever is connected: one of them may be
    /// outdated.
    fn candidates(&self, round: u64, in_doubt: Option<&Arc<Link>>) -> Vec<Arc<Link>> {
        if self.service.is_some() {
            let mut sentinels = self.seeds.clone();
            lookup::rotate(&mut sentinels, round);
            return sentinels;
        }
        let mut candidates = self.masters();
        lookup::rotate(&mut candidates, round);
        for seed in &self.seeds {
            let Endpoint { host, port, .. } = &seed.endpoint;
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

    /// Reads the slot table of one of these, or the master's place.
    async fn look(self: Arc<Self>, asked: Vec<Arc<Link>>) -> Result<()> {
        let (deadline, servers) = (Deadline::within(lookup::LONGEST), &*self);
        let asked = asked.into_iter().map(|link| async move {
            match &servers.service {
                None => slot_table(link, deadline).await,
                Some(service) => servers.named_by(&link, service, deadline).await,
            }
        });
        self.learn(&lookup::first(asked, lookup::HEAD_START).await?);
        Ok(())
    }

    /// Takes over a node's slot table. Connections to servers that remain stay open. A slot without
    /// an owner keeps the known one, which redirects if it has a successor.
    fn learn(&self, ranges: &[Range]) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let mut new = SlotTable::new(table.owners.len());
        // Sentinels have a login of their own.
        let seeds = if self.service.is_none() { &*self.seeds } else { &[] };
        for Range { first, last, host, port } in ranges {
            let known = table.node(host, *port);
            let known = known.or_else(|| seeds.iter().find(|seed| seed.is_at(host, *port)));
            let link = || known.map_or_else(|| self.link(host, *port), Arc::clone);
            let link = new.node_or(link, host, *port);
            new.owners[usize::from(*first)..=usize::from(*last)].fill(Some(link));
        }
        for (slot, known) in table.owners.iter().enumerate() {
            if let (None, Some(link)) = (&new.owners[slot], known) {
                let Endpoint { host, port, .. } = &link.endpoint;
                new.owners[slot] = Some(new.node_or(|| Arc::clone(link), host, *port));
            }
        }
        *table = new;
    }
}

/// The slot table of a node.
async fn slot_table(link: Arc<Link>, deadline: Deadline) -> Result<Vec<Range>> {
    let words = ["CLUSTER", "SLOTS"].map(Argument::Text);
    let asked = link.ask(deadline, false, Request::question(&words)).await;
    let reply = asked.map_err(|error| match error {
        RedisError::Server { address, message, .. }
            if message.contains("cluster support disabled") =>
        {
            RedisError::Config(format!("Redis at {address} is no cluster; use redis://{address}"))
        }
        error => error,
    })?;
    let Endpoint { host, peer, .. } = &link.endpoint;
    let ranges = slot::ranges(&reply, host).ok_or_else(|| peer.unexpected(&reply))?;
    if ranges.is_empty() {
        // A node that was reset, or that the others have forgotten.
        let reason = "it knows no owner of any slot; is it part of the cluster (CLUSTER MEET)?";
        return Err(peer.no_server(reason));
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;
    use ratelimit_servers::RedisServer;
    use tokio::net::TcpListener;
    use tokio::time::sleep;

    use super::*;
    use crate::connection::follow::FIRST_PAUSE;
    use crate::connection::request::TryAgain;

    /// Servers with these seeds.
    fn servers(ports: &[u16], service: Option<&str>) -> Servers {
        let settings = Arc::new(Settings { limit: Duration::MAX, ..Settings::default() });
        let seeds = ports.iter().map(|port| Endpoint::new("127.0.0.1", *port, &settings));
        Servers::new(seeds, service, &settings)
    }

    /// A cluster in which look-ups find nothing new, and take so long.
    fn cluster(look_ms: u64) -> Servers {
        let servers = servers(&[1], None);
        let runtime = &servers.inner.settings.runtime;
        let lookup = Lookup::new(Peer::new("node"), runtime, move |_, _| async move {
            sleep(Duration::from_millis(look_ms)).await;
            Ok(())
        });
        Servers { lookup, ..servers }
    }

    fn range(first: u16, last: u16, port: u16) -> Range {
        Range { first, last, host: "127.0.0.1".into(), port }
    }

    fn says(code: &str, message: String) -> RedisError {
        RedisError::Server { address: "node".into(), code: code.into(), message }
    }

    #[tokio::test(start_paused = true)]
    async fn when_time_runs_out_in_a_look_up_the_error_is_the_one_before() {
        for within_ms in 40..400 {
            let cluster = cluster(30);
            let deadline = Deadline::within(Duration::from_millis(within_ms));
            let route = ToSlot { servers: &cluster, slot: 7, deadline };
            let owner = route.owner(&mut FIRST_PAUSE.clone()).await;
            let error = owner.err().expect("no server keeps it").to_string();
            assert!(error.contains("no server keeps slot 7"), "{within_ms}: {error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_time_runs_out_the_error_is_the_servers_last_word() {
        let cluster = cluster(0);
        cluster.inner.learn(&[range(0, 0, 1)]);
        // Wherever in an attempt the time runs out.
        for within_ms in 2..200 {
            let deadline = Deadline::within(Duration::from_millis(within_ms));
            let route = ToSlot { servers: &cluster, slot: 0, deadline };
            let asked = route.follow(TryAgain::Wait, async |_, _| {
                sleep(Duration::from_micros(700)).await;
                let down = says("CLUSTERDOWN", String::new());
                let late = cluster.lookup.peer.too_late(deadline);
                Err::<(), _>(if deadline.is_over() { late } else { down })
            });
            let error = asked.await.expect_err("it is down");
            assert!(matches!(error, RedisError::Server { .. }), "{within_ms}: {error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_send_in_a_circle_end_a_request_after_a_few_redirections() {
        let cluster = cluster(0);
        cluster.inner.learn(&[range(0, 0, 1)]);
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let deadline = Deadline::within(Duration::from_secs(9));
        let route = ToSlot { servers: &cluster, slot: 0, deadline };
        let sent = route.follow(TryAgain::Wait, async |link, _| {
            asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let other = 3 - link.endpoint.port;
            Err::<(), _>(says("MOVED", format!("0 127.0.0.1:{other}")))
        });
        let error = sent.await.expect_err("no server keeps it").to_string();
        assert!(error.contains("one server sends to the next"), "{error}");
        assert_eq!(asked.into_inner(), 9);
    }

    #[test]
    fn another_sentinel_is_asked_first_each_round() {
        let inner = servers(&[1, 2, 3], Some("service")).inner;
        let asked = |round| inner.candidates(round, None)[0].endpoint.port;
        assert_eq!([0, 1, 2, 3].map(asked), [1, 2, 3, 1]);
    }

    #[tokio::test]
    async fn a_slot_that_a_table_does_not_name_keeps_its_owner() {
        let inner = servers(&[1], None).inner;
        inner.learn(&[range(0, 99, 1), range(100, 199, 2), range(200, 299, 3)]);
        // As a node sees it for a moment that has heard of the demotion of a master and not of its
        // successor.
        inner.learn(&[range(0, 149, 1), range(250, 299, 3)]);
        let owner = |slot| inner.owner(slot).map(|link| link.endpoint.port);
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
        let cluster = servers(&[hung], None);
        cluster.inner.learn(&[range(0, 8_191, server.port()), range(8_192, 16_383, hung)]);
        let deadline = Deadline::within(Duration::from_secs(20));
        let route = |slot| ToSlot { servers: &cluster, slot, deadline };
        let [first, last] = [0, slot::SLOTS - 1].map(route);
        let (link, ping) = (first.known().expect("known"), [Argument::Text("PING")]);
        link.ask(deadline, false, Request::command(&ping)).await.expect("it is up");

        cluster.lookup.doubt();
        for _ in 0..100 {
            let owner = first.in_charge().now_or_never().expect("at once");
            assert!(Arc::ptr_eq(&owner.expect("known"), &link));
        }
        // Requests to the other server wait for the look-up: it may have a new owner.
        assert!(last.in_charge().now_or_never().is_none());
        assert_eq!(cluster.lookup.rounds(), 0, "it is still under way");
    }
}
