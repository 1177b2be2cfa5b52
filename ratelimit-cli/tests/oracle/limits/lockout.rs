//! A lockout, from its charges.

use super::{Charge, Limit};

/// How it blocks, in a policy document: for how long first, how many times as long each further
/// time, for how long at most, and when that is forgotten.
pub(super) const BLOCK: &str = "block = \"2s\"\nfactor = 3\nlongest = \"10s\"\nforget = \"30s\"";
const BLOCK_US: u64 = 2_000_000;
const FACTOR: u64 = 3;
const LONGEST_US: u64 = 10_000_000;
const FORGET_US: u64 = 30_000_000;

/// A key of a lockout.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Locked {
    pub(super) start: u64,
    pub(super) used: u64,
    newest: u64,
    blocks: u32,
    pub(super) until: u64,
}

impl Locked {
    /// What ends by then, ends.
    fn pass(self, limit: &Limit, now: u64) -> Self {
        let used = if now >= self.start + limit.period.1 { 0 } else { self.used };
        let key = Self { used, ..self };
        if key.forgotten(limit) <= now { Self::default() } else { key }
    }

    /// When nothing of the key is remembered.
    pub(super) fn forgotten(&self, limit: &Limit) -> u64 {
        let window = if self.used > 0 { self.start + limit.period.1 } else { 0 };
        let quiet = self.newest.max(self.until) + FORGET_US;
        if self.blocks > 0 { window.max(quiet) } else { window }
    }
}

impl Limit {
    /// A key at this time. The charge that reaches the count begins a block.
    pub(super) fn locked(&self, history: &[Charge], now: u64) -> Locked {
        let mut key = Locked::default();
        for charge in history {
            key = key.pass(self, charge.at);
            if key.used == 0 {
                key.start = charge.at;
            }
            (key.used, key.newest, key.until) = (key.used + charge.cost, charge.at, 0);
            if key.used >= charge.count {
                let length = BLOCK_US * FACTOR.pow(key.blocks.min(9));
                (key.used, key.blocks) = (0, key.blocks + 1);
                key.until = charge.at + length.min(LONGEST_US);
            }
        }
        key.pass(self, now)
    }
}
