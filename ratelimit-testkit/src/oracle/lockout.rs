//! A lockout, from the history of its charges alone.

use ratelimit_core::{Algorithm as _, Lockout};

use super::AccountChange;

/// A key of a lockout, as its charges have left it.
#[derive(Default)]
pub(super) struct LockedKey {
    start_us: u64,
    pub(super) count: i128,
    newest_us: u64,
    pub(super) lockouts: u32,
    pub(super) until_us: u64,
}

impl LockedKey {
    pub(super) fn of(lockout: &Lockout, history: &[AccountChange], now_us: u64) -> Self {
        let mut key = Self::default();
        for event in history {
            key.pass_until(lockout, event.at_us);
            if key.count == 0 {
                key.start_us = event.at_us;
            }
            key.count += event.parts;
            if event.parts > 0 {
                (key.newest_us, key.until_us) = (event.at_us, 0);
            }
            if key.count >= i128::from(lockout.capacity()) {
                let mut length_us = u128::from(lockout.block_us());
                for _ in 0..key.lockouts {
                    let longer_us = length_us * u128::from(lockout.factor());
                    length_us = longer_us.min(lockout.longest_us().into());
                }
                (key.count, key.lockouts) = (0, key.lockouts + 1);
                key.until_us = event.at_us + u64::try_from(length_us).expect("at most the longest");
            }
        }
        key.pass_until(lockout, now_us);
        key
    }

    /// What ends by then, ends.
    fn pass_until(&mut self, lockout: &Lockout, now_us: u64) {
        if now_us >= self.start_us + lockout.window_us() {
            self.count = 0;
        }
        let quiet_us = self.newest_us.max(self.until_us);
        if self.count == 0 && now_us >= quiet_us + lockout.forget_us() {
            *self = Self::default();
        }
    }
}
