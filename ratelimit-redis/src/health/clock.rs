//! Looks at a server's clock, and for states from its future.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::Now;
use ratelimit_core::{Clock, SystemClock, Timestamp};

use super::{Health, Severity};
use crate::concurrent::all;
use crate::connection::{Argument, Connection};
use crate::error::{RedisError, Result};
use crate::store::{Mode, NewestAt, RedisStore};

/// How far a server's clock may be from the program's, and a state ahead of the server's clock, in
/// microseconds.
const MOST_APART_US: u64 = 1_000_000;
/// No clock is right before 2020 or after 2100: it was never set, or counts something else than
/// time.
const EARLIEST_US: u64 = 1_577_836_800_000_000;
const LATEST_US: u64 = 4_102_444_800_000_000;

/// How many keys of each server are looked at, and in how many steps of as many of the server's
/// keys.
const SAMPLED: u64 = 100;
const STEPS: usize = 10;

impl<M: Mode, C: Connection> RedisStore<M, C> {
    /// Compares the clock of the server that keeps this identifier with the program's, and with a
    /// sample of states.
    pub(super) async fn look_at_clock(
        &self,
        health: &mut Health,
        address: &Arc<str>,
        identifier: &str,
    ) {
        let sample = self.sample(identifier).await;
        let key = self.inner.keys.shared(identifier);
        let before = SystemClock::new().now();
        // A server that does not answer is found otherwise.
        let Ok(now) = self.inner.now(&key, Now::Store, self.inner.deadline()).await else { return };
        if let Some((severity, message)) = judge(now, before, SystemClock::new().now()) {
            health.find(address, severity, message);
        }
        match sample {
            Ok(newest) => {
                if let Some(message) = from_the_future(&newest, now) {
                    health.find(address, Severity::Warning, message);
                }
            }
            Err(RedisError::Server { code, .. }) if code == "NOPERM" => {
                let unseen = "no states from the future were looked for";
                let message = super::forbidden(unseen, "SCAN", "+scan");
                health.find(address, Severity::Warning, message);
            }
            Err(_) => {}
        }
    }

    /// When the newest charges were made of a bounded number of states.
    async fn sample(&self, identifier: &str) -> Result<Vec<u64>> {
        let on = vec![identifier.to_owned()];
        let mut scan = self.scan_servers_of(on, SAMPLED, SAMPLED, Duration::ZERO);
        let mut sampled = Vec::new();
        for _ in 0..STEPS {
            let Some(keys) = scan.next().await? else { break };
            for newest in all(keys.iter().map(|key| self.newest_us(key))).await {
                match newest {
                    Ok(newest) => sampled.extend(newest),
                    Err(error) if error.is_wrong_type() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(sampled)
    }

    /// When the newest charge of a state was made, whatever its limit, in microseconds; `None` if
    /// the key holds no state of the mode, or one of an algorithm that is not built in.
    async fn newest_us(&self, key: &str) -> Result<Option<u64>> {
        let newest = self.inner.keys.limit_of(key).and_then(M::newest_at);
        let Some(NewestAt { command, arguments, times }) = newest else { return Ok(None) };
        let words = [&[command, key], arguments].concat();
        let words: Vec<_> = words.into_iter().map(Argument::Text).collect();
        let reply = self.inner.connection.send(key, &words, self.inner.deadline()).await?;
        Ok(times(&reply.strings().unwrap_or_default()).into_iter().max())
    }
}

/// What is wrong with a server's clock that read `now` between these times of the program's.
fn judge(now: Timestamp, before: Timestamp, after: Timestamp) -> Option<(Severity, String)> {
    if !(EARLIEST_US..LATEST_US).contains(&now.as_us()) {
        let message = format!(
            "its clock reads {} s since 1970, which cannot be; set it, and keep it by NTP",
            now.as_us() / 1_000_000
        );
        return Some((Severity::Error, message));
    }
    let (ahead_us, behind_us) = (now.saturating_us_since(after), before.saturating_us_since(now));
    let (apart_us, side) =
        if ahead_us > 0 { (ahead_us, "ahead of") } else { (behind_us, "behind") };
    (apart_us > MOST_APART_US).then(|| {
        let message = format!(
            "its clock is {} s {side} this program's; set whichever is wrong, and keep both by NTP. A server that \
             takes over from one whose clock is ahead denies callers until it reaches the same time",
            apart_us / 1_000_000
        );
        (Severity::Warning, message)
    })
}

/// The finding about states of these times, if some are from the future.
fn from_the_future(newest: &[u64], now: Timestamp) -> Option<String> {
    let ahead = newest.iter().map(|us| us.saturating_sub(now.as_us()));
    let ahead: Vec<_> = ahead.filter(|us| *us > MOST_APART_US).collect();
    let most_us = ahead.iter().max()?;
    Some(format!(
        "{} of {} states that were sampled are from the future, by up to {} s: its clock was set back, or it took \
         over from a server whose clock is ahead. They lock their keys until the clock reaches their times; free \
         them: ratelimit heal --policy POLICY --store URL, or RedisStore::heal",
        ahead.len(),
        newest.len(),
        most_us / 1_000_000
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: Timestamp = Timestamp::saturating_from_us(1_795_348_800_000_000);

    #[test]
    fn a_clock_is_judged_by_what_the_program_reads_before_and_after() {
        let judged = |now_us: u64, before_us: u64, after_us: u64| {
            let at = |us| Timestamp::saturating_from_us(us);
            judge(at(now_us), at(before_us), at(after_us)).map(|(severity, _)| severity)
        };
        let (noon, second) = (NOON.as_us(), 1_000_000);
        assert_eq!(judged(noon, noon, noon), None);
        assert_eq!(judged(noon + second, noon, noon), None);
        assert_eq!(judged(noon + second + 1, noon, noon), Some(Severity::Warning));
        assert_eq!(judged(noon - second - 1, noon, noon), Some(Severity::Warning));
        // A slow answer says nothing about the clock.
        assert_eq!(judged(noon + 5 * second, noon, noon + 9 * second), None);
        assert_eq!(judged(0, noon, noon), Some(Severity::Error));
        assert_eq!(judged(noon * 1_000, noon, noon), Some(Severity::Error));
    }
}
