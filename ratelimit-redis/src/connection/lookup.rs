//! [`Lookup`]: finding out anew who is in charge, once for all who want to know at the same time.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::RedisError;

/// Nobody looks again so soon: during an outage every request would. After a look that took
/// long, the rest is twice as long: those who come then are not to spend their time on it.
const REST: Duration = Duration::from_millis(50);
/// How long the one who was asked is waited for until the next is asked as well.
const HEAD_START: Duration = Duration::from_millis(50);

/// When to look, and who does it.
pub(crate) struct Lookup {
    begun: Instant,
    /// Until when nobody looks again, since the beginning; 0 before the first look.
    rest_until_us: AtomicU64,
    /// How often somebody looked, with whatever outcome.
    rounds: AtomicU64,
    /// How often somebody met what made them doubt, and up to which of these it has been looked into.
    doubts: AtomicU64,
    settled: AtomicU64,
    /// Something was learnt by the way, and there may be more of it.
    soon: AtomicBool,
    /// Held by whoever looks.
    looking: Mutex<()>,
}

impl Lookup {
    pub(crate) fn new() -> Self {
        Self {
            begun: Instant::now(),
            rest_until_us: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            doubts: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            soon: AtomicBool::new(false),
            looking: Mutex::default(),
        }
    }

    /// For [`look`](Self::look), to be read before something is sent.
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Acquire)
    }

    /// Nobody is to send anything before somebody has looked.
    pub(crate) fn doubt(&self) {
        self.doubts.fetch_add(1, Ordering::AcqRel);
    }

    /// One of those who come is to look; the others go on with what is known.
    pub(crate) fn soon(&self) {
        self.soon.store(true, Ordering::Relaxed);
    }

    /// Whether to look before something is sent.
    pub(crate) fn is_due(&self) -> bool {
        if self.doubts.load(Ordering::Acquire) != self.settled.load(Ordering::Acquire) {
            return true;
        }
        self.soon.load(Ordering::Relaxed)
            && self.rested()
            && self.soon.swap(false, Ordering::AcqRel)
    }

    /// Looks, unless somebody else has since there had been `seen` rounds, or has only just.
    pub(crate) async fn look(
        &self,
        seen: u64,
        until: Instant,
        look: impl Future<Output = Result<(), RedisError>>,
    ) -> Result<(), RedisError> {
        let Ok(_alone) = timeout_at(until, self.looking.lock()).await else { return Ok(()) };
        if self.rounds() != seen || !self.rested() {
            return Ok(());
        }
        let doubts = self.doubts.load(Ordering::Acquire);
        let begin = Instant::now();
        let found = look.await;
        if found.is_ok() {
            self.settled.store(doubts, Ordering::Release);
        }
        let rest = REST.max(begin.elapsed() * 2);
        let rest_until = self.begun.elapsed() + rest;
        let rest_until_us = u64::try_from(rest_until.as_micros()).unwrap_or(u64::MAX);
        self.rest_until_us.store(rest_until_us, Ordering::Release);
        self.rounds.fetch_add(1, Ordering::AcqRel);
        found
    }

    fn rested(&self) -> bool {
        let rest_until_us = self.rest_until_us.load(Ordering::Acquire);
        self.begun.elapsed().as_micros() >= u128::from(rest_until_us)
    }
}

/// The first good answer of several who are asked the same. Each is asked when the one before has
/// failed, or has not answered for a little while, so that one who hangs costs no more than that. Each
/// has a deadline of its own.
///
/// # Errors
/// What one of them told, if none had an answer: rather what a server said than that it was not
/// reached.
pub(crate) async fn first<T, F>(asked: Vec<F>) -> Result<T, RedisError>
where
    T: Send + 'static,
    F: Future<Output = Result<T, RedisError>> + Send + 'static,
{
    let mut asked = asked.into_iter();
    let mut running = JoinSet::new();
    let mut told: Option<RedisError> = None;
    loop {
        let more = asked.next().map(|next| running.spawn(next)).is_some();
        let answer = if more {
            timeout(HEAD_START, running.join_next()).await
        } else {
            Ok(running.join_next().await)
        };
        match answer {
            Ok(Some(Ok(Ok(answer)))) => return Ok(answer),
            Ok(Some(Ok(Err(error))))
                if told.as_ref().is_none_or(|told| tells_more(&error, told)) =>
            {
                told = Some(error);
            }
            // Nobody is left.
            Ok(None) if !more => {
                let nobody = || RedisError::Config("there is no server to ask".into());
                return Err(told.unwrap_or_else(nobody).of_a_lookup());
            }
            _ => {}
        }
    }
}

fn tells_more(error: &RedisError, than: &RedisError) -> bool {
    let rank = |error: &RedisError| match error {
        RedisError::Config(_) => 2,
        RedisError::Server { .. } => 1,
        _ => 0,
    };
    rank(error) > rank(than)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn unreachable() -> RedisError {
        RedisError::Unreachable { address: "h:1".into(), reason: "away".into() }
    }

    #[tokio::test]
    async fn a_hundred_who_want_to_know_look_once() {
        let lookup = Arc::new(Lookup::new());
        let looks = Arc::new(AtomicU64::new(0));
        let seen = lookup.rounds();
        lookup.doubt();
        let mut tasks = JoinSet::new();
        for _ in 0..100 {
            let (lookup, looks) = (Arc::clone(&lookup), Arc::clone(&looks));
            tasks.spawn(async move {
                assert!(lookup.is_due() || looks.load(Ordering::SeqCst) == 1);
                let until = Instant::now() + Duration::from_secs(5);
                let look = async {
                    tokio::task::yield_now().await;
                    looks.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                };
                lookup.look(seen, until, look).await.expect("found");
            });
        }
        tasks.join_all().await;
        assert_eq!(looks.load(Ordering::SeqCst), 1);
        assert!(!lookup.is_due());
    }

    #[tokio::test]
    async fn a_doubt_during_a_look_and_one_after_a_look_in_vain_stay() {
        let lookup = Lookup::new();
        lookup.doubt();
        let until = Instant::now() + Duration::from_secs(5);
        let look = async {
            lookup.doubt();
            Ok(())
        };
        lookup.look(0, until, look).await.expect("found");
        assert!(lookup.is_due());

        let lookup = Lookup::new();
        lookup.doubt();
        lookup.look(0, until, async { Err(unreachable()) }).await.expect_err("in vain");
        assert!(lookup.is_due());
    }

    #[tokio::test]
    async fn who_hangs_or_is_away_does_not_keep_the_next_from_answering() {
        type Asked = std::pin::Pin<Box<dyn Future<Output = Result<u8, RedisError>> + Send>>;
        let hangs = || -> Asked { Box::pin(std::future::pending()) };
        let away = || -> Asked { Box::pin(async { Err(unreachable()) }) };
        let answers = |n| -> Asked { Box::pin(async move { Ok(n) }) };
        assert_eq!(first(vec![hangs(), away(), answers(3), answers(4)]).await.expect("one"), 3);
        assert_eq!(first(vec![away(), answers(2)]).await.expect("one"), 2);

        let config = || -> Asked { Box::pin(async { Err(RedisError::Config("no".into())) }) };
        let error = first(vec![away(), config(), away()]).await.expect_err("none");
        assert!(matches!(error, RedisError::Config(_)), "{error}");
    }
}
