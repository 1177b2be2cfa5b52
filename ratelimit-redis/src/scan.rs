//! Steps through the keys of a store, one server after the other.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::connection::{Argument, Connection, Reply, slot};
use crate::error::RedisError;
use crate::store::RedisStore;

/// How many identifiers to try in search of one per master.
const TRIES: u32 = 200_000;

/// The cursor with which a scan begins, and to which it returns.
pub(crate) const START: &str = "0";

impl<M, C: Connection> RedisStore<M, C> {
    /// Each server that keeps keys of this store, and an identifier whose keys it keeps.
    pub(crate) async fn one_of_each(&self) -> Result<Vec<(Arc<str>, String)>, RedisError> {
        const ANY: &str = "health-check";
        let connection = &self.inner.connection;
        let any = || vec![(Arc::clone(connection.address()), ANY.to_owned())];
        if !connection.is_cluster() || !self.inner.keys.are_spread() {
            return Ok(any());
        }
        let words = ["CLUSTER", "SLOTS"].map(Argument::Text);
        let ranges = ranges(&connection.send("", &words, self.inner.deadline()).await?);
        let mut found = BTreeMap::new();
        let masters: std::collections::BTreeSet<_> = ranges.iter().map(|(_, _, of)| of).collect();
        for n in 0..TRIES {
            // The number stands first: what follows it may be outside of the tag.
            let identifier = format!("{n}-{ANY}");
            let slot = slot::of(&self.inner.keys.shared(&identifier));
            let owner = ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
            if let Some((_, _, master)) = owner {
                found.entry(Arc::<str>::from(&**master)).or_insert(identifier);
            }
            if found.len() == masters.len() {
                break;
            }
        }
        Ok(if found.is_empty() { any() } else { found.into_iter().collect() })
    }

    /// The next cursor and some keys of the store, on the server that keeps this identifier. The server looks at
    /// about `count` of its keys.
    pub(crate) async fn scanned(
        &self,
        identifier: &str,
        cursor: &str,
        count: u64,
    ) -> Result<(String, Vec<String>), RedisError> {
        let pattern = self.inner.keys.pattern();
        let words = [
            Argument::Text("SCAN"),
            Argument::Text(cursor),
            Argument::Text("MATCH"),
            Argument::Text(&pattern),
            Argument::Text("COUNT"),
            Argument::Number(count),
        ];
        let via = self.inner.keys.shared(identifier);
        let reply = self.inner.connection.send(&via, &words, self.inner.deadline()).await?;
        keys(&reply).ok_or_else(|| self.inner.unexpected(&reply))
    }
}

/// Parses a reply of `SCAN`. The store's own keys are text.
fn keys(reply: &Reply) -> Option<(String, Vec<String>)> {
    let Reply::Array(parts) = reply else { return None };
    let [Reply::Text(cursor), Reply::Array(keys)] = &parts[..] else { return None };
    let text = |reply: &Reply| match reply {
        Reply::Text(bytes) => String::from_utf8(bytes.clone()).ok(),
        _ => None,
    };
    Some((String::from_utf8(cursor.clone()).ok()?, keys.iter().filter_map(text).collect()))
}

/// Parses `CLUSTER SLOTS`: the first and the last slot of each range, and its master.
fn ranges(reply: &Reply) -> Vec<(u16, u16, String)> {
    let Reply::Array(ranges) = reply else { return Vec::new() };
    let number = |reply: &Reply| match reply {
        Reply::Integer(number) => u16::try_from(*number).ok(),
        _ => None,
    };
    let range = |range: &Reply| {
        let Reply::Array(parts) = range else { return None };
        let [first, last, Reply::Array(master), ..] = &parts[..] else { return None };
        let [host, port, ..] = &master[..] else { return None };
        let host = match host {
            Reply::Text(host) => String::from_utf8_lossy(host).into_owned(),
            _ => String::new(),
        };
        Some((number(first)?, number(last)?, format!("{host}:{}", number(port)?)))
    };
    ranges.iter().filter_map(range).collect()
}
