//! [`Cluster`]: several servers, each of which keeps a part of the slots.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::link::{self, Link};
use super::lookup::{self, Lookup};
use super::node::{Endpoint, Settings};
use super::request::{Command, Request};
use super::route::{Hint, MAX_REDIRECTIONS, Place, hint};
use super::{Reply, Word, slot};
use crate::error::RedisError;

mod slots;

use slots::Range;

/// The first pause of one who has to wait for a slot; each next is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(50);

/// A cluster, and who keeps which slot as far as is known.
pub(crate) struct Cluster {
    seeds: Vec<Arc<Link>>,
    settings: Arc<Settings>,
    deadline: Duration,
    /// The seeds.
    address: Arc<str>,
    table: RwLock<Table>,
    lookup: Lookup,
}

/// Who keeps which slot.
struct Table {
    /// Those who keep slots, and others that were met.
    nodes: Vec<Arc<Link>>,
    /// For each slot the place of its owner among the nodes, or `NOBODY`.
    owners: Box<[u16]>,
}

const NOBODY: u16 = u16::MAX;

impl Table {
    fn new() -> Self {
        Self { nodes: Vec::new(), owners: vec![NOBODY; usize::from(slot::SLOTS)].into() }
    }

    fn owner(&self, slot: u16) -> Option<&Arc<Link>> {
        self.nodes.get(usize::from(self.owners[usize::from(slot)]))
    }

    fn node(&self, host: &str, port: u16) -> Option<(u16, &Arc<Link>)> {
        (0..).zip(&self.nodes).find(|(_, link)| is_at(link, host, port))
    }

    /// The node at this place, one that is new if need be.
    fn node_or(&mut self, endpoint: impl FnOnce() -> Link, host: &str, port: u16) -> u16 {
        if let Some((place, _)) = self.node(host, port) {
            return place;
        }
        self.nodes.push(Arc::new(endpoint()));
        u16::try_from(self.nodes.len() - 1).unwrap_or(NOBODY)
    }
}

fn is_at(link: &Link, host: &str, port: u16) -> bool {
    let endpoint = link.endpoint();
    endpoint.port == port && endpoint.host == host
}

impl Cluster {
    /// Nothing is asked yet.
    pub(crate) fn new(
        seeds: impl Iterator<Item = Endpoint>,
        settings: &Arc<Settings>,
        deadline: Duration,
    ) -> Self {
        let seeds: Vec<_> = seeds.map(|seed| Arc::new(Link::new(seed, deadline))).collect();
        Self {
            address: link::addresses(&seeds),
            seeds,
            settings: Arc::clone(settings),
            deadline,
            table: RwLock::new(Table::new()),
            lookup: Lookup::new(),
        }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Learns who keeps what, for the first time.
    pub(crate) async fn open(&self, until: Instant) -> Result<(), RedisError> {
        self.look(self.lookup.rounds(), until, None).await
    }

    /// Sends a request to the server that keeps this key, and follows to where that sends it.
    pub(crate) async fn ask<R: Request>(
        &self,
        until: Instant,
        key: &str,
        request: &R,
    ) -> Result<R::Answer, RedisError> {
        let slot = slot::of(key);
        self.look_if_due(until).await;
        let mut link = self.owner(slot, until).await?;
        let mut asking = false;
        let mut pause = FIRST_PAUSE;
        let mut redirections = 0;
        loop {
            let seen = self.lookup.rounds();
            let error = match link.ask(until, asking, request).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            match hint(&error) {
                Hint::Final => return Err(error),
                Hint::Doubt => {
                    self.lookup.doubt();
                    return Err(error);
                }
                Hint::Moved(to) => {
                    (link, asking) = (self.moved(slot, &to, &link), false);
                    self.lookup.soon();
                }
                Hint::Ask(to) => (link, asking) = (self.met(&to, &link), true),
                Hint::Again => {
                    if !wait(&mut pause, until).await {
                        return Err(error);
                    }
                    (link, asking) = (self.owner(slot, until).await?, false);
                    continue;
                }
                Hint::Elsewhere => match self.other_owner(slot, seen, until, &link).await {
                    // Who sent us there does not know better yet.
                    _ if asking => return Err(error),
                    None => return Err(error),
                    Some(other) => link = other,
                },
            }
            redirections += 1;
            // Nodes that do not agree get a moment in which to.
            let agreed = redirections < 3 || wait(&mut pause, until).await;
            if !agreed || redirections > MAX_REDIRECTIONS {
                return Err(self.no_server(&format!(
                    "slot {slot} is on its way, and one server sends to the next; the last said: {error}"
                )));
            }
        }
    }

    /// Sends a command to every server that keeps slots.
    pub(crate) async fn ask_each(
        &self,
        until: Instant,
        words: &[Word<'_>],
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.look_if_due(until).await;
        if self.masters().is_empty()
            && let Err(error) = self.look(self.lookup.rounds(), until, None).await
        {
            return vec![(Arc::clone(&self.address), Err(error))];
        }
        let words: Arc<[Vec<u8>]> = words.iter().map(|word| word.to_bytes()).collect();
        let mut tasks = JoinSet::new();
        for link in self.masters() {
            let words = Arc::clone(&words);
            tasks.spawn(async move {
                let words: Vec<Word<'_>> = words.iter().map(|word| Word::Bytes(word)).collect();
                let answer = link.ask(until, false, &Command(&words)).await;
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

    /// Those who keep slots.
    fn masters(&self) -> Vec<Arc<Link>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let keeps = |place: u16| table.owners.contains(&place);
        (0..)
            .zip(&table.nodes)
            .filter(|(place, _)| keeps(*place))
            .map(|(_, link)| link.clone())
            .collect()
    }

    fn known_owner(&self, slot: u16) -> Option<Arc<Link>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).owner(slot).cloned()
    }

    /// Who keeps a slot, if need be after a look.
    async fn owner(&self, slot: u16, until: Instant) -> Result<Arc<Link>, RedisError> {
        if let Some(link) = self.known_owner(slot) {
            return Ok(link);
        }
        self.look(self.lookup.rounds(), until, None).await?;
        self.known_owner(slot).ok_or_else(|| {
            self.no_server(&format!("no server keeps slot {slot}; assign it (CLUSTER ADDSLOTS)"))
        })
    }

    /// Who keeps a slot instead of one that does not serve it, if a look finds that somebody does.
    async fn other_owner(
        &self,
        slot: u16,
        seen: u64,
        until: Instant,
        instead: &Arc<Link>,
    ) -> Option<Arc<Link>> {
        if Instant::now() >= until || self.look(seen, until, Some(instead)).await.is_err() {
            // Let the next one see to it.
            self.lookup.doubt();
        }
        self.known_owner(slot).filter(|owner| !Arc::ptr_eq(owner, instead))
    }

    /// Notes that a slot is kept there, and by whom that is.
    fn moved(&self, slot: u16, to: &Place<'_>, asked: &Link) -> Arc<Link> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let (link, place) = self.met_in(&mut table, to, asked);
        table.owners[usize::from(slot)] = place;
        link
    }

    /// The server at a place that the one we asked named.
    fn met(&self, to: &Place<'_>, asked: &Link) -> Arc<Link> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        self.met_in(&mut table, to, asked).0
    }

    fn met_in(&self, table: &mut Table, to: &Place<'_>, asked: &Link) -> (Arc<Link>, u16) {
        let host = if matches!(to.host, "" | "?") { &asked.endpoint().host } else { to.host };
        let place = table.node_or(|| self.link(host, to.port), host, to.port);
        (Arc::clone(&table.nodes[usize::from(place)]), place)
    }

    fn link(&self, host: &str, port: u16) -> Link {
        Link::new(Endpoint::new(host, port, &self.settings), self.deadline)
    }

    async fn look_if_due(&self, until: Instant) {
        if self.lookup.is_due() {
            let now = Instant::now();
            // What is left is for the request itself.
            let half = now + until.saturating_duration_since(now) / 2;
            // Without news, what is known has to do.
            let _ = self.look(self.lookup.rounds(), half, None).await;
        }
    }

    /// Asks who keeps what, last of all the one who is in doubt.
    async fn look(
        &self,
        seen: u64,
        until: Instant,
        in_doubt: Option<&Arc<Link>>,
    ) -> Result<(), RedisError> {
        let look = async {
            let asked = self.candidates(in_doubt).into_iter();
            let ranges =
                lookup::first(asked.map(|link| slots::told_by(link, until)).collect()).await?;
            self.learn(&ranges);
            Ok(())
        };
        self.lookup.look(seen, until, look).await
    }

    /// Whom to ask, each once: the masters, beginning with another one every time, then the seeds.
    fn candidates(&self, in_doubt: Option<&Arc<Link>>) -> Vec<Arc<Link>> {
        let mut candidates = self.masters();
        let begin = self.lookup.rounds() % candidates.len().max(1) as u64;
        candidates.rotate_left(usize::try_from(begin).unwrap_or(0));
        for seed in &self.seeds {
            let Endpoint { host, port, .. } = seed.endpoint();
            if !candidates.iter().any(|known| is_at(known, host, *port)) {
                candidates.push(Arc::clone(seed));
            }
        }
        candidates.sort_by_key(|link| in_doubt.is_some_and(|doubted| Arc::ptr_eq(link, doubted)));
        candidates
    }

    /// Takes over what a node told. Connections to servers that are still there stay.
    fn learn(&self, ranges: &[Range]) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let mut new = Table::new();
        for Range { first, last, host, port } in ranges {
            let known = table.node(host, *port).map(|(_, link)| link);
            let known = known.or_else(|| self.seeds.iter().find(|seed| is_at(seed, host, *port)));
            if let (None, Some(known)) = (new.node(host, *port), known) {
                new.nodes.push(Arc::clone(known));
            }
            let place = new.node_or(|| self.link(host, *port), host, *port);
            new.owners[usize::from(*first)..=usize::from(*last)].fill(place);
        }
        *table = new;
    }

    fn no_server(&self, reason: &str) -> RedisError {
        RedisError::NoServer { address: Arc::clone(&self.address), reason: reason.into() }
    }
}

/// Waits, and longer the next time; whether the deadline leaves the time.
async fn wait(pause: &mut Duration, until: Instant) -> bool {
    if Instant::now() + *pause >= until {
        return false;
    }
    sleep(*pause).await;
    *pause = (*pause * 2).min(LAST_PAUSE);
    true
}
