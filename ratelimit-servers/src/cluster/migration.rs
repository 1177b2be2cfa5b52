//! Slot migration, at once or step by step.

use std::sync::{MutexGuard, PoisonError};

use super::view::ClusterView;
use super::{RedisCluster, slot_of};
use crate::{DEADLINE, RespClient, RespValue, password, wait_until};

/// The number of keys that one command moves.
const KEYS_AT_ONCE: &str = "100";
/// The time limit of one such command, in milliseconds.
const MIGRATE_TIMEOUT_MS: &str = "5000";

impl RedisCluster {
    /// Moves a slot with all its keys to a master, and returns when all running nodes know. Does
    /// nothing if that master already owns the slot.
    ///
    /// # Errors
    /// The error that a node replied.
    pub fn migrate(&self, slot: u16, to: usize) -> Result<(), String> {
        let _alone = self.alone();
        if self.master_of(slot)? == to {
            return Ok(());
        }
        self.begin(slot, to)?;
        self.finish(slot, to)
    }

    /// Begins to migrate a slot and leaves the migration incomplete: its keys stay where they are
    /// until [`move_key`](Self::move_key) or [`finish_migration`](Self::finish_migration).
    ///
    /// Until then the old node serves the keys that it still has and answers `ASK` for those that
    /// it does not have; it answers `TRYAGAIN` to a command on some of both.
    ///
    /// # Errors
    /// The slot is already there, or the error that a node replied.
    pub fn begin_migration(&self, slot: u16, to: usize) -> Result<(), String> {
        let _alone = self.alone();
        self.begin(slot, to)
    }

    fn begin(&self, slot: u16, to: usize) -> Result<(), String> {
        let from = self.master_of(slot)?;
        if from == to {
            return Err(format!("slot {slot} is at node {to} already"));
        }
        self.set_slot(to, slot, &["IMPORTING", self.id(from)])?;
        self.set_slot(from, slot, &["MIGRATING", self.id(to)])
    }

    /// Moves one key of a migrating slot to the slot's target. Returns whether the key existed.
    ///
    /// # Errors
    /// The slot is not migrating, or the error that a node replied.
    pub fn move_key(&self, key: &str) -> Result<bool, String> {
        let _alone = self.alone();
        let slot = slot_of(key.as_bytes());
        let from = self.master_of(slot)?;
        let view = self.view(from)?;
        let to = view.node(self.id(from)).and_then(|node| node.hands_over(slot));
        let to = to.ok_or_else(|| format!("node {from} is not moving slot {slot}: begin first"))?;
        let to = self.ids.iter().position(|id| id == to).ok_or("it goes to a strange node")?;
        let mut client = self.nodes[from].client()?;
        self.move_keys(&mut client, to, &[key.as_bytes()])
    }

    /// Moves the remaining keys of a migrating slot, assigns the slot to the target, and returns
    /// when all running nodes know.
    ///
    /// # Errors
    /// The error that a node replied.
    pub fn finish_migration(&self, slot: u16, to: usize) -> Result<(), String> {
        let _alone = self.alone();
        self.finish(slot, to)
    }

    fn finish(&self, slot: u16, to: usize) -> Result<(), String> {
        let from = self.master_of(slot)?;
        wait_until(DEADLINE, || {
            // Valkey 8.1 and 9.1 sometimes forget that they are importing when other slots move.
            if from != to {
                self.set_slot(to, slot, &["IMPORTING", self.id(from)])?;
            }
            self.move_all_keys(slot, from, to)
        })?;
        // No message of the old node may carry a higher epoch than the new one's.
        wait_until(DEADLINE, || self.knows_all_epochs(to))?;
        // The new node comes first, so that it answers redirected clients.
        let mut masters = self.running_masters()?;
        masters.sort_by_key(|node| [*node != to, *node != from]);
        let known_to = |node| self.set_slot(node, slot, &["NODE", self.id(to)]);
        masters.into_iter().try_for_each(known_to)?;
        self.settle(slot, to)
    }

    /// Serializes key moves and slot changes, because several tests may use one cluster
    /// concurrently.
    ///
    /// Two nodes that move keys to each other block each other until they count as dead. A node
    /// whose epoch rises because it gained a slot reclaims another slot that it is giving away: the
    /// new owner claims that one with a lower epoch, yields, and deletes the keys that it received.
    pub(super) fn alone(&self) -> MutexGuard<'_, ()> {
        self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that a node knows the epochs of all running masters, so that its next claim has a
    /// higher one.
    pub(super) fn knows_all_epochs(&self, node: usize) -> Result<(), String> {
        let masters = self.running_masters()?;
        masters.into_iter().try_for_each(|master| self.knows_epoch(node, master).map(drop))
    }

    /// The epoch of a master, which a node has to know.
    fn knows_epoch(&self, node: usize, master: usize) -> Result<u64, String> {
        let epoch = |view: ClusterView| view.node(self.id(master)).map_or(0, |master| master.epoch);
        let (due, known) = (self.view(master).map(epoch)?, self.view(node).map(epoch)?);
        if known >= due {
            return Ok(due);
        }
        Err(format!("node {node} has heard of epoch {known} of node {master}, not of {due}"))
    }

    fn running_masters(&self) -> Result<Vec<usize>, String> {
        let mut masters = Vec::new();
        for (node, _) in self.running() {
            if self.master_of_replica(node)?.is_none() {
                masters.push(node);
            }
        }
        Ok(masters)
    }

    /// Waits until all running nodes know a slot's owner, and repeats it to those that do not.
    fn settle(&self, slot: u16, to: usize) -> Result<(), String> {
        wait_until(DEADLINE, || {
            let Err(error) = self.all_see(slot, to) else { return Ok(()) };
            self.insist(slot, to).map_err(|why| format!("{error}: {why}"))?;
            Err(error)
        })
    }

    /// Tells the masters that do not know a slot's owner. An old message, such as one of a node
    /// elected meanwhile, may have overwritten what they knew.
    fn insist(&self, slot: u16, to: usize) -> Result<(), String> {
        let mut masters = self.running_masters()?;
        masters.sort_by_key(|node| *node != to);
        for node in masters {
            if self.sees(node, slot, to).is_err() {
                self.move_all_keys(slot, node, to)?;
                self.set_slot(node, slot, &["NODE", self.id(to)])?;
            }
        }
        // Replicas take no such command: they believe the highest epoch, which this gives to the
        // owner.
        self.nodes[to].command(&["CLUSTER", "BUMPEPOCH"])?.ok().map(drop)
    }

    /// Moves all keys of a slot that a node has.
    fn move_all_keys(&self, slot: u16, from: usize, to: usize) -> Result<(), String> {
        if from == to {
            return Ok(());
        }
        let slot = slot.to_string();
        let mut client = self.nodes[from].client()?;
        loop {
            let words = ["CLUSTER", "GETKEYSINSLOT", &slot, KEYS_AT_ONCE];
            let reply = client.command(&words)?.ok()?;
            let keys = reply.as_array().iter().filter_map(|key| match key {
                RespValue::Text(key) => Some(&key[..]),
                _ => None,
            });
            let keys: Vec<&[u8]> = keys.collect();
            if keys.is_empty() {
                return Ok(());
            }
            self.move_keys(&mut client, to, &keys)?;
        }
    }

    fn set_slot(&self, node: usize, slot: u16, what: &[&str]) -> Result<(), String> {
        let slot = slot.to_string();
        let words = [&["CLUSTER", "SETSLOT", &slot], what].concat();
        let message = |error| format!("node {node}: {}: {error}", words.join(" "));
        self.nodes[node].command(&words).and_then(RespValue::ok).map(drop).map_err(message)
    }

    /// Moves the keys; returns whether any of them existed.
    fn move_keys(&self, from: &mut RespClient, to: usize, keys: &[&[u8]]) -> Result<bool, String> {
        let port = self.nodes[to].port().to_string();
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", MIGRATE_TIMEOUT_MS];
        if let Some(password) = password(&self.plan.args) {
            words.extend(["AUTH", password]);
        }
        words.push("KEYS");
        let words: Vec<&[u8]> =
            words.into_iter().map(str::as_bytes).chain(keys.iter().copied()).collect();
        let reply = from.command(&words)?.ok()?;
        Ok(reply.as_text() != Some("NOKEY"))
    }

    /// Checks that every running node sees this owner of the slot with its current epoch, and that
    /// this epoch is the highest. A node that knows the owner but not the epoch would still believe
    /// an old message of the previous owner.
    fn all_see(&self, slot: u16, to: usize) -> Result<(), String> {
        for (node, _) in self.running() {
            self.sees(node, slot, to)?;
            let due = self.knows_epoch(node, to)?;
            let view = self.view(node)?;
            let rival = view.node(self.id(node)).filter(|myself| myself.is_master() && node != to);
            if rival.is_some_and(|rival| rival.epoch >= due) {
                return Err(format!("node {node} has no lower epoch than node {to}"));
            }
        }
        Ok(())
    }

    fn sees(&self, node: usize, slot: u16, to: usize) -> Result<(), String> {
        let view = self.view(node)?;
        if view.node(self.id(to)).is_some_and(|seen| seen.slots.contains(slot)) {
            return Ok(());
        }
        Err(format!("node {node} does not know that slot {slot} is node {to}'s"))
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_node_with_a_wrong_slot_owner_is_corrected() {
        let cluster = RedisCluster::start_with_replicas().expect("a cluster");
        let slot = slot_of(b"{a}");
        let from = cluster.master_of(slot).expect("an owner");
        let to = (from + 1) % 3;
        let old = &cluster.nodes[from];
        // The old node assigns the slot to the new one, while the others assign it to the old one,
        // which has the highest epoch.
        old.command(&["CLUSTER", "BUMPEPOCH"]).expect("a reply").ok().expect("bumped");
        cluster.set_slot(from, slot, &["NODE", cluster.id(to)]).expect("the node obeys");
        assert!(cluster.master_of(slot).is_err(), "no node claims it");
        cluster.settle(slot, to).expect("settled");
        assert_eq!(cluster.master_of(slot), Ok(to));
        cluster.wait_until_healthy(DEADLINE).expect("healthy");
    }
}
