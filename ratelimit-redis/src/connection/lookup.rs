//! [`Lookup`]: finds the server in charge, once for all concurrent callers (*singleflight*).

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::link::Link;
use super::peer::Peer;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::runtime::{Home, StoreRuntime};

/// The minimum interval between look-ups: during an outage every request would start one. After a
/// slow look-up the pause is twice its duration, so that new callers do not spend their time on it,
/// up to the longest.
const REST: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_secs(1);
/// How long a look-up may take.
pub(crate) const LONGEST: Duration = Duration::from_secs(3);
/// How long to wait for one server before the next is asked as well.
pub(crate) const HEAD_START: Duration = Duration::from_millis(50);

/// Schedules look-ups and stores the last result. A caller that needs one starts a task, at most
/// one at a time, and may wait for it. Callers that give up or do not wait neither delay it nor are
/// delayed.
pub(crate) struct Lookup {
    /// The servers that are asked, for messages.
    pub(crate) peer: Peer,
    runtime: Arc<StoreRuntime>,
    look: Box<Look>,
    state: Arc<Mutex<LookupState>>,
    /// How many look-ups have ended, whatever the result.
    rounds: watch::Sender<u64>,
    /// How many doubts arose, and up to which one look-ups have settled them.
    doubts: AtomicU64,
    settled: Arc<AtomicU64>,
}

/// Looks, in the round of this number, and asks the doubted server last.
type Look = dyn Fn(u64, Option<&Arc<Link>>) -> BoxFuture<'static, Result<()>> + Send + Sync;

struct LookupState {
    /// The home of the look-up that is running, and its task.
    running: Option<(Arc<Home>, Option<AbortHandle>)>,
    /// No look-up starts before this time.
    rest_until: Instant,
    /// The result of the last look-up.
    last: Result<()>,
}

impl Lookup {
    pub(crate) fn new<F>(
        peer: Peer,
        runtime: &Arc<StoreRuntime>,
        look: impl Fn(u64, Option<&Arc<Link>>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let state = LookupState { running: None, rest_until: Instant::now(), last: Ok(()) };
        Self {
            peer,
            runtime: Arc::clone(runtime),
            look: Box::new(move |round, doubted| look(round, doubted).boxed()),
            state: Arc::new(Mutex::new(state)),
            rounds: watch::Sender::new(0),
            doubts: AtomicU64::new(0),
            settled: Arc::default(),
        }
    }

    /// The argument for [`look`](Self::look), to be read before a request is sent.
    pub(crate) fn rounds(&self) -> u64 {
        *self.rounds.borrow()
    }

    /// Notes that the known owner may be wrong.
    pub(crate) fn doubt(&self) {
        self.doubts.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether a look-up is due.
    fn is_due(&self) -> bool {
        self.doubts.load(Ordering::Acquire) != self.settled.load(Ordering::Acquire)
    }

    /// Starts a look-up if one is due. Returns whether it was; callers continue with what is known
    /// meanwhile.
    pub(crate) fn begin_if_due(&self) -> bool {
        let is_due = self.is_due();
        if is_due {
            // A request says it if there is no runtime.
            let _ = self.begin(None);
        }
        is_due
    }

    /// Starts a look-up, unless one is running or has just ended. Returns whether one runs now.
    fn begin(&self, doubted: Option<&Arc<Link>>) -> Result<bool> {
        let home = self.runtime.home().map_err(|reason| self.peer.no_server(reason))?;
        let mut state = self.state();
        match &state.running {
            Some((at, _)) if Arc::ptr_eq(at, home) => return Ok(true),
            // It may never go on, and would then learn what is long over.
            Some((_, task)) => {
                task.iter().for_each(AbortHandle::abort);
            }
            None if Instant::now() < state.rest_until => return Ok(false),
            None => {}
        }
        state.running = Some((Arc::clone(home), None));
        drop(state);
        let running = Running {
            state: Arc::clone(&self.state),
            home: Arc::clone(home),
            rounds: self.rounds.clone(),
            begun: Instant::now(),
            came_to: None,
        };
        let (settled, doubts) = (Arc::clone(&self.settled), self.doubts.load(Ordering::Acquire));
        let look = (self.look)(self.rounds(), doubted);
        let task = home.spawn(async move {
            let came_to = look.await;
            if came_to.is_ok() {
                settled.store(doubts, Ordering::Release);
            }
            running.end(came_to);
        });
        if let Some((at, of)) = &mut self.state().running
            && Arc::ptr_eq(at, home)
        {
            *of = Some(task);
        }
        Ok(true)
    }

    /// Waits for a look-up that ends after round `seen`; starts one if necessary.
    pub(crate) async fn look(
        &self,
        seen: u64,
        deadline: Deadline,
        doubted: Option<&Arc<Link>>,
    ) -> Result<()> {
        let mut rounds = self.rounds.subscribe();
        if *rounds.borrow_and_update() != seen {
            return Ok(());
        }
        let ended = async {
            while *rounds.borrow_and_update() == seen && self.begin(doubted)? {
                let _ = rounds.changed().await;
            }
            self.state().last.clone()
        };
        timeout_at(deadline.at(), ended).await.unwrap_or_else(|_| {
            let given = deadline.given();
            let remedy = self.runtime.home().map_or("", |home| home.remedy());
            let reason = format!("no server said within {given:?} which one is in charge{remedy}");
            Err(self.peer.no_server(reason))
        })
    }

    fn state(&self) -> MutexGuard<'_, LookupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The servers in another order each round: the first may be away, or know less than the others.
pub(crate) fn rotate(servers: &mut [Arc<Link>], round: u64) {
    let begin = round % servers.len().max(1) as u64;
    servers.rotate_left(usize::try_from(begin).unwrap_or(0));
}

/// A running look-up. It ends when this is dropped, even with its runtime: then callers start
/// another.
struct Running {
    state: Arc<Mutex<LookupState>>,
    home: Arc<Home>,
    rounds: watch::Sender<u64>,
    begun: Instant,
    came_to: Option<Result<()>>,
}

impl Running {
    fn end(mut self, came_to: Result<()>) {
        self.came_to = Some(came_to);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.running.as_ref().is_some_and(|(at, _)| Arc::ptr_eq(at, &self.home)) {
            // Another has taken over.
            return;
        }
        state.running = None;
        let has_ended = self.came_to.is_some();
        if let Some(came_to) = self.came_to.take() {
            let rest = (self.begun.elapsed() * 2).clamp(REST, LONGEST_REST);
            (state.rest_until, state.last) = (Instant::now() + rest, came_to);
        }
        drop(state);
        self.rounds.send_modify(|rounds| *rounds += u64::from(has_ended));
    }
}

/// The first success of several servers that are asked the same. Each is asked when the one before
/// has failed or has not answered within `head_start`, so a hanging server costs no more than that.
/// Each has its own deadline.
///
/// # Errors
/// If none succeeds, one of their errors: a server's reply rather than a failed connection.
pub(crate) async fn first<T>(
    mut asked: impl Iterator<Item = impl Future<Output = Result<T>>>,
    head_start: Duration,
) -> Result<T> {
    let mut running = FuturesUnordered::new();
    let mut last: Option<RedisError> = None;
    loop {
        let more = asked.next().map(|next| running.push(next)).is_some();
        let answer =
            if more { timeout(head_start, running.next()).await } else { Ok(running.next().await) };
        match answer {
            Ok(Some(Ok(answer))) => return Ok(answer),
            Ok(Some(Err(error))) if last.as_ref().is_none_or(|last| tells_more(&error, last)) => {
                last = Some(error);
            }
            // No server is left.
            Ok(None) if !more => {
                let no_server = || RedisError::Config("there is no server to ask".into());
                return Err(last.unwrap_or_else(no_server).of_a_lookup());
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

    fn unreachable() -> RedisError {
        RedisError::Unreachable { address: "h:1".into(), reason: "away".into() }
    }

    fn lookup<F>(look: impl Fn() -> F + Send + Sync + 'static) -> Lookup
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let runtime = StoreRuntime::default();
        Lookup::new(Peer::new("h:1"), &Arc::new(runtime), move |_, _| look())
    }

    fn patience() -> Deadline {
        Deadline::within(Duration::from_secs(5))
    }

    #[tokio::test]
    async fn a_doubt_stays_if_it_arises_during_a_look_up_or_the_look_up_fails() {
        let lookup = self::lookup(|| async {
            tokio::task::yield_now().await;
            Ok(())
        });
        lookup.doubt();
        let doubts = async { lookup.doubt() };
        let (found, ()) = futures_util::join!(lookup.look(0, patience(), None), doubts);
        found.expect("found");
        assert!(lookup.is_due());

        let looks = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&looks);
        let lookup = self::lookup(move || {
            count.fetch_add(1, Ordering::Relaxed);
            async { Err(unreachable()) }
        });
        lookup.doubt();
        lookup.look(0, patience(), None).await.expect_err("in vain");
        assert!(lookup.is_due());
        // A look-up so soon does not start; all callers get the last result.
        lookup.look(1, patience(), None).await.expect_err("in vain");
        assert_eq!(looks.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_gives_up_does_not_affect_the_look_up() {
        let lookup = lookup(|| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(())
        });
        for _ in 0..10 {
            let short = Deadline::within(Duration::from_millis(20));
            lookup.look(0, short, None).await.expect_err("it takes longer");
        }
        assert_eq!(lookup.rounds(), 0);
        lookup.look(0, patience(), None).await.expect("found");
        assert_eq!(lookup.rounds(), 1);
    }

    #[tokio::test]
    async fn of_several_errors_the_one_that_tells_most_is_returned() {
        let away = || Err::<(), _>(unreachable());
        let answers = [away(), Err(RedisError::Config("no".into())), away()];
        let asked = answers.into_iter().map(std::future::ready);
        let error = first(asked, HEAD_START).await.expect_err("none");
        assert!(matches!(error, RedisError::Config(_)), "{error}");
    }
}
