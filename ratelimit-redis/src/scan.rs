//! Steps through the keys of a store, one server after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use std::vec;

use ratelimit_core::{Algorithm, Limits};

use crate::connection::slot::{self, Range};
use crate::connection::{Argument, Connection, Reply};
use crate::error::Result;
use crate::key::StoredKey;
use crate::store::{Inner, Mode, RedisStore};

/// How many identifiers to try in search of one per master.
const TRIES: u32 = 200_000;

/// The cursor with which a scan begins, and to which it returns.
const START: &str = "0";

/// The keys of a store, step by step, from one server after the other: [`RedisStore::scan`].
#[derive(Debug)]
pub struct Scan<'s, C> {
    inner: &'s Inner<C>,
    pattern: String,
    /// How many keys may still come.
    left: u64,
    count: u64,
    pause: Duration,
    /// An identifier of each server that is still to be scanned.
    servers: vec::IntoIter<String>,
    /// An identifier of the server being scanned, and the cursor.
    under_way: Option<(String, String)>,
    is_cut: bool,
}

impl<C: Connection> Scan<'_, C> {
    /// The keys of the next step, of which there may be none; `None` at the end.
    ///
    /// # Errors
    /// As of every command.
    pub async fn next(&mut self) -> Result<Option<Vec<String>>> {
        let (identifier, cursor) = match self.under_way.take() {
            Some(_) if self.left == 0 => {
                (self.is_cut, self.servers) = (true, Vec::new().into_iter());
                return Ok(None);
            }
            Some(under_way) => {
                tokio::time::sleep(self.pause).await;
                under_way
            }
            None => match self.servers.next() {
                Some(identifier) => (identifier, START.to_owned()),
                None => return Ok(None),
            },
        };
        let words = [
            Argument::Text("SCAN"),
            Argument::Text(&cursor),
            Argument::Text("MATCH"),
            Argument::Text(&self.pattern),
            Argument::Text("COUNT"),
            Argument::Number(self.count),
        ];
        let inner = self.inner;
        let via = inner.keys.shared(&identifier);
        let reply = inner.connection.send(&via, &words, inner.deadline()).await?;
        let (next, mut keys) = keys(&reply).ok_or_else(|| inner.peer.unexpected(&reply))?;
        let room = usize::try_from(self.left).unwrap_or(usize::MAX);
        self.is_cut |= keys.len() > room;
        keys.truncate(room);
        self.left -= keys.len() as u64;
        if next != START {
            self.under_way = Some((identifier, next));
        }
        Ok(Some(keys))
    }

    /// Whether there may be more keys than came.
    #[must_use]
    pub const fn is_cut(&self) -> bool {
        self.is_cut
    }
}

impl<M, C: Connection> RedisStore<M, C> {
    /// Steps through the keys of the store: at most `most` keys. In a step a server looks at about
    /// `count` of its keys; between two steps is a pause, in which it serves other clients.
    ///
    /// The user needs `+scan`. Keys that appear or move to another server during the scan can be
    /// missed.
    ///
    /// # Errors
    /// As of every command.
    pub async fn scan(&self, most: u64, count: u64, pause: Duration) -> Result<Scan<'_, C>> {
        let identifiers = self.one_of_each().await?.into_iter().map(|(_, of_one)| of_one).collect();
        Ok(self.scan_servers_of(identifiers, most, count, pause))
    }

    /// The same on the servers that keep these identifiers.
    pub(crate) fn scan_servers_of(
        &self,
        identifiers: Vec<String>,
        most: u64,
        count: u64,
        pause: Duration,
    ) -> Scan<'_, C> {
        Scan {
            inner: &self.inner,
            pattern: self.inner.keys.pattern(),
            left: most,
            count,
            pause,
            servers: identifiers.into_iter(),
            under_way: None,
            is_cut: false,
        }
    }
}

impl<M, C: Connection> RedisStore<M, C> {
    /// The [state names](ratelimit_core::Limit::state_name) of limits that have a state in a key of
    /// a [`scan`](Self::scan) and are not among these: of another policy, or of one that has
    /// changed. Empty for a key without states.
    ///
    /// # Errors
    /// As of every command.
    pub async fn unknown_states<A: Algorithm>(
        &self,
        limits: &Limits<A>,
        key: &str,
    ) -> Result<Vec<String>>
    where
        M: Mode<A>,
    {
        let mut names = self.state_names(key, M::SHARES_A_HASH).await?;
        names.retain(|name| !limits.iter().any(|limit| limit.state_name() == name));
        Ok(names)
    }

    /// The names of all states in a key, whichever policy wrote them. If limits `share_a_hash`, it
    /// has a field for each.
    async fn state_names(&self, key: &str, share_a_hash: bool) -> Result<Vec<String>> {
        let own = self.inner.keys.limit_of(key).filter(|_| self.read_key(key) != StoredKey::Other);
        match own {
            Some("") if share_a_hash => {}
            Some(name) if !name.is_empty() => {
                let name = name.split(['+', '!']).next().unwrap_or_default();
                return Ok(vec![name.to_owned()]);
            }
            _ => return Ok(Vec::new()),
        }
        let words = ["HGETALL", key].map(Argument::Text);
        let sent = self.inner.connection.send(key, &words, self.inner.deadline()).await;
        let fields = match sent {
            Err(error) if error.is_wrong_type() => return Ok(Vec::new()),
            reply => reply?,
        };
        let names = fields.strings().unwrap_or_default().into_iter().step_by(2);
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// The key on the server that the limits of an identifier share.
    #[must_use]
    pub fn shared_key(&self, identifier: &str) -> String {
        self.inner.keys.shared(identifier)
    }
}

impl<M, C: Connection> RedisStore<M, C> {
    /// What a key of a [`scan`](Self::scan) tells about its identifier.
    #[must_use]
    pub fn read_key(&self, key: &str) -> StoredKey {
        self.inner.keys.read(key)
    }

    /// Each server that keeps keys of this store, and an identifier whose keys it keeps.
    pub(crate) async fn one_of_each(&self) -> Result<Vec<(Arc<str>, String)>> {
        const ANY: &str = "health-check";
        let connection = &self.inner.connection;
        let any = || vec![(Arc::clone(self.inner.peer.address()), ANY.to_owned())];
        if !connection.is_cluster() || !self.inner.keys.are_spread() {
            return Ok(any());
        }
        let words = ["CLUSTER", "SLOTS"].map(Argument::Text);
        let reply = connection.send("", &words, self.inner.deadline()).await?;
        let ranges = slot::ranges(&reply, "").ok_or_else(|| self.inner.peer.unexpected(&reply))?;
        let mut found = BTreeMap::new();
        let master = |range: &Range| format!("{}:{}", range.host, range.port);
        let masters: BTreeSet<_> = ranges.iter().map(master).collect();
        for n in 0..TRIES {
            // The number stands first: what follows it may be outside of the tag.
            let identifier = format!("{n}-{ANY}");
            let slot = slot::of(&self.inner.keys.shared(&identifier));
            let owner = ranges.iter().find(|range| (range.first..=range.last).contains(&slot));
            if let Some(range) = owner {
                found.entry(master(range).into()).or_insert(identifier);
            }
            if found.len() == masters.len() {
                break;
            }
        }
        Ok(if found.is_empty() { any() } else { found.into_iter().collect() })
    }
}

/// Parses a reply of `SCAN`. The store's own keys are text.
fn keys(reply: &Reply) -> Option<(String, Vec<String>)> {
    let Reply::Array(parts) = reply else { return None };
    let [cursor, Reply::Array(keys)] = &parts[..] else { return None };
    let text = |reply: &Reply| reply.as_text().map(str::to_owned);
    Some((text(cursor)?, keys.iter().filter_map(text).collect()))
}
