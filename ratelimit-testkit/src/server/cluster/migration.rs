//! Slots on the move: all at once, or step by step.

use super::{RedisCluster, slot_of};
use crate::server::{DEADLINE, RespClient, RespValue, password, wait_until};

/// How many keys are moved by one command.
const KEYS_AT_ONCE: &str = "100";
/// How long moving some keys may take, in milliseconds.
const MIGRATE_TIMEOUT_MS: &str = "5000";

impl RedisCluster {
    /// Moves a slot with all its keys to a master, and returns when all running nodes know. Does nothing
    /// if the slot is there already.
    ///
    /// # Errors
    /// What a node replied instead.
    pub fn migrate(&self, slot: u16, to: usize) -> Result<(), String> {
        if self.master_of(slot)? == to {
            return Ok(());
        }
        self.begin_migration(slot, to)?;
        self.finish_migration(slot, to)
    }

    /// Begins to move a slot, and leaves it half way: its keys stay where they are until
    /// [`move_key`](Self::move_key) or [`finish_migration`](Self::finish_migration).
    ///
    /// Until then the old node answers for the keys that it still has, and with `ASK` for those that it
    /// has not; a command on some of both is answered with `TRYAGAIN`.
    ///
    /// # Errors
    /// It is there already, or what a node replied instead.
    pub fn begin_migration(&self, slot: u16, to: usize) -> Result<(), String> {
        let from = self.master_of(slot)?;
        if from == to {
            return Err(format!("slot {slot} is at node {to} already"));
        }
        self.set_slot(to, slot, &["IMPORTING", self.id(from)])?;
        self.set_slot(from, slot, &["MIGRATING", self.id(to)])
    }

    /// Moves one key of a slot that is half way to where the slot is going. Says whether the key was
    /// there to move.
    ///
    /// # Errors
    /// The slot is not half way, or what a node replied instead.
    pub fn move_key(&self, key: &str) -> Result<bool, String> {
        let slot = slot_of(key.as_bytes());
        let from = self.master_of(slot)?;
        let view = self.view(from)?;
        let to = view.node(self.id(from)).and_then(|node| node.hands_over(slot));
        let to = to.ok_or_else(|| format!("node {from} is not moving slot {slot}: begin first"))?;
        let to = self.ids.iter().position(|id| id == to).ok_or("it goes to a strange node")?;
        let mut client = self.nodes[from].client()?;
        self.move_keys(&mut client, to, &[key.as_bytes()])
    }

    /// Moves what is left of a slot that is half way, gives the slot to the new node, and returns when
    /// all running nodes know.
    ///
    /// # Errors
    /// What a node replied instead.
    pub fn finish_migration(&self, slot: u16, to: usize) -> Result<(), String> {
        let from = self.master_of(slot)?;
        let text = slot.to_string();
        let mut client = self.nodes[from].client()?;
        loop {
            let words = ["CLUSTER", "GETKEYSINSLOT", &text, KEYS_AT_ONCE];
            let reply = client.command(&words)?.ok()?;
            let keys: Vec<&[u8]> = reply.as_array().iter().filter_map(bytes).collect();
            if keys.is_empty() {
                break;
            }
            self.move_keys(&mut client, to, &keys)?;
        }
        // The new node first: what is redirected to it is then answered.
        let others = self.running().map(|(node, _)| node).filter(|node| ![from, to].contains(node));
        let mut told = vec![to, from];
        for node in others {
            if self.master_of_replica(node)?.is_none() {
                told.push(node);
            }
        }
        told.into_iter().try_for_each(|node| self.set_slot(node, slot, &["NODE", self.id(to)]))?;
        wait_until(DEADLINE, || self.all_see(slot, to))
    }

    /// Takes back what [`begin_migration`](Self::begin_migration) began, on every running master. Keys that have
    /// been moved by then are not moved back.
    ///
    /// # Errors
    /// What a node replied instead.
    pub fn abandon_migration(&self, slot: u16) -> Result<(), String> {
        for (node, _) in self.running() {
            if self.master_of_replica(node)?.is_none() {
                self.set_slot(node, slot, &["STABLE"])?;
            }
        }
        Ok(())
    }

    fn set_slot(&self, node: usize, slot: u16, what: &[&str]) -> Result<(), String> {
        let slot = slot.to_string();
        let words = [&["CLUSTER", "SETSLOT", &slot], what].concat();
        let told = |told| format!("node {node}: {}: {told}", words.join(" "));
        self.nodes[node].command(&words).and_then(RespValue::ok).map(drop).map_err(told)
    }

    /// Says whether any of the keys was there.
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

    /// Whether every running node takes this one for the slot's.
    fn all_see(&self, slot: u16, to: usize) -> Result<(), String> {
        for (number, _) in self.running() {
            let view = self.view(number)?;
            let owner = view.node(self.id(to)).is_some_and(|node| node.slots.contains(slot));
            if !owner {
                return Err(format!("node {number} does not know that slot {slot} is node {to}'s"));
            }
        }
        Ok(())
    }
}

fn bytes(value: &RespValue) -> Option<&[u8]> {
    match value {
        RespValue::Text(text) => Some(text),
        _ => None,
    }
}
