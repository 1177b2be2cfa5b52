//! Traffic on a store while something fails, and whether what its callers saw is within the bounds
//! of the row: how much was admitted, which errors came and when, how late the latest answer was,
//! and when all keys were decided again.

use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;
use std::sync::MutexGuard;

use ratelimit_testkit::Admissions;

use crate::common::prelude::*;

/// By which a decision ends if the fault may last longer: a store's default.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
/// By which one ends that only a slow machine delays.
const PATIENT: Duration = Duration::from_secs(4);
/// What an answer may take beyond its deadline: what a store has to give charges back across slots,
/// a quarter of the deadline, and as much for a busy machine. What the runtime of the test itself
/// stood still comes on top.
const GRACE: Duration = Duration::from_millis(500);
/// How many tasks send requests in the mode Lua. Two more do in the mode CAS, for one key, and one
/// in MULTI.
const TASKS: u64 = 6;
const KEYS: u64 = 8;
/// Between two requests of a task.
const PAUSE: Duration = Duration::from_millis(6);

/// A row of the fault table: the name of the fault and its bounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    /// The kinds of errors that callers may see.
    pub(super) errors: &'static [ErrorKind],
    /// What one of the errors says.
    pub(super) says: &'static str,
    /// How many times its capacity each limit may admit more in an interval that meets the fault;
    /// `None` if any number.
    pub(super) more: Option<u64>,
    /// How long after the fault the last error may come.
    pub(super) recovers: Duration,
    pub(super) deadline: Duration,
}

/// The kinds of errors of a server that does not answer.
pub(super) const AWAY: &[ErrorKind] = &[ErrorKind::Unavailable, ErrorKind::Indeterminate];

impl Row {
    /// A fault that no caller notices.
    pub(super) const fn unnoticed(name: &'static str) -> Self {
        let (more, recovers) = (Some(0), Duration::ZERO);
        Self { name, errors: &[], says: "", more, recovers, deadline: PATIENT }
    }

    /// A fault that no server answers, which callers see as errors until three deadlines after its
    /// end. One of them says this.
    pub(super) const fn is_away(name: &'static str, says: &'static str) -> Self {
        Self { deadline: DEADLINE, ..Self::refuses(name, AWAY, says) }
    }

    /// A fault that a server answers, which callers see as errors of these kinds.
    pub(super) const fn refuses(
        name: &'static str,
        errors: &'static [ErrorKind],
        says: &'static str,
    ) -> Self {
        // One for a request that began during the fault, one for a call that waits behind it, and
        // one for the longest pause of a connector.
        Self { errors, says, recovers: DEADLINE.saturating_mul(3), ..Self::unnoticed(name) }
    }

    /// The fault may lose all states so many times.
    pub(super) const fn loses(self, more: u64) -> Self {
        Self { more: Some(more), ..self }
    }

    /// Measures a fault under the traffic of a store on these servers.
    pub(super) async fn measure(
        self,
        client: Client,
        [servers, url]: [&str; 2],
        fault: impl AsyncFnOnce(&Traffic),
    ) {
        let builder = RedisStore::builder().prefix(&prefix()).deadline(self.deadline);
        let store = builder.connect_lazy(&with_client(url, client)).expect("a URL");
        self.measure_on(client, servers, store, fault).await;
    }

    pub(super) async fn measure_on(
        self,
        client: Client,
        servers: &str,
        store: RedisStore,
        fault: impl AsyncFnOnce(&Traffic),
    ) {
        let traffic = Traffic::start(store);
        let begun = now_us();
        traffic.decides_all(begun).await;
        let injected = now_us();
        fault(&traffic).await;
        let mended = now_us();
        traffic.decides_all(mended).await;
        let (asks, outcome) = traffic.stops().await;
        let line = self.check(&outcome, [injected, mended], [client.name(), servers]);
        asks.check_ledger(&outcome, self.more == Some(0)).await;
        println!("{line}");
        if let Ok(file) = std::env::var("RATELIMIT_FAULTS") {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
            writeln!(file.expect("a file"), "{line}").expect("written");
        }
    }

    /// Checks what callers saw, and describes it: measured, and what may be.
    fn check(
        &self,
        outcome: &Outcome,
        [injected, mended]: [u64; 2],
        [client, on]: [&str; 2],
    ) -> String {
        let row = format!("{} | {client} | {on}", self.name);
        let mut kinds = BTreeMap::<_, u64>::new();
        let mut recovered = Duration::ZERO;
        for ([begin, end], error) in &outcome.errors {
            let kind = error.kind();
            *kinds.entry(format!("{kind:?}")).or_default() += 1;
            // One slot of a batch may be refused after another was charged.
            let cause = if let RedisError::InPart(cause) = error { cause.kind() } else { kind };
            // What a settlement meets if its reservation was lost.
            let is_lost = kind == ErrorKind::Ended && self.more != Some(0);
            // A machine that itself stands still says nothing about the store.
            if AWAY.contains(&kind) && outcome.stood_still > self.deadline / 2 {
                continue;
            }
            assert!(is_lost || self.errors.contains(&cause), "{row}: {kind:?}: {error}");
            recovered = recovered.max(Duration::from_micros(end.saturating_sub(mended)));
            let is_in_time = *end >= injected && recovered <= self.recovers;
            assert!(is_in_time, "{row}: {begin}..{end}, not {injected}..{mended}: {error}");
        }
        let says = |error: &RedisError| error.to_string().contains(self.says);
        let is_said = self.says.is_empty() || outcome.errors.iter().any(|(_, error)| says(error));
        assert!(is_said, "{row}: no error says {:?}: {kinds:?}", self.says);
        let (latest, deadline) = (outcome.latest, self.deadline + GRACE);
        let stood = outcome.stood_still;
        assert!(latest <= deadline + stood, "{row}: after {latest:?}, and {stood:?} stood still");

        let mut above = 0;
        for ((limit, key), book) in &outcome.books {
            let Err(excess) = book.check() else { continue };
            let percent = (excess.admitted - excess.bound) * 100;
            above = above.max(percent.div_ceil(excess.algorithm.capacity()));
            let Some(more) = self.more else { continue };
            let mut book = book.clone();
            let last = mended + us(self.recovers + self.deadline);
            book.allow([at(injected), at(last)], more * excess.algorithm.capacity());
            book.check().unwrap_or_else(|excess| panic!("{row}: {limit} {key}: {excess}"));
        }
        let most = self.more.map_or("any".to_owned(), |more| format!("{}%", more * 100));
        let errors: Vec<_> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let errors = if errors.is_empty() { "none".to_owned() } else { errors.join(" ") };
        let [latest, deadline, recovered, recovers] =
            [latest, deadline, recovered, self.recovers].map(|time| time.as_millis());
        let decisions = outcome.decisions;
        format!(
            "{row} | {decisions} | {above}% ≤ {most} | {errors} | {latest} ≤ {deadline} ms | \
             {recovered} ≤ {recovers} ms"
        )
    }
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).expect("a short time")
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_us(us).expect("now")
}

/// What callers saw.
#[derive(Default)]
struct Outcome {
    decisions: u64,
    errors: Vec<([u64; 2], RedisError)>,
    latest: Duration,
    /// How long the tasks did not run though they were due.
    stood_still: Duration,
    /// By limit and key, what was admitted.
    books: HashMap<(String, String), Admissions>,
    /// By key, when the last request began that was decided.
    decided: HashMap<String, u64>,
    /// By key, what was charged of the limit that never ends, and what may have been besides.
    ledger: HashMap<String, [u64; 2]>,
}

/// The limits of the traffic.
pub(super) struct Limits {
    /// Of each key.
    pub(super) own: Limit<AnyAlgorithm>,
    /// Of the hot key.
    hot: Limit<AnyAlgorithm>,
    /// Of the hot key, soon used up for good: what is lost of it is admitted once more.
    slow: Limit<AnyAlgorithm>,
    /// That the requests of all keys share.
    all: Limit<AnyAlgorithm>,
    pub(super) attempts: Limit<AnyAlgorithm>,
    /// Denies nothing and never ends: it counts what was charged.
    pub(super) ledger: Limit<AnyAlgorithm>,
}

const LEDGER: u64 = 100_000;

/// Tasks that send requests until the row stops them.
pub(super) struct Traffic {
    asks: Arc<Asks>,
    tasks: JoinSet<()>,
}

/// What the tasks share.
pub(super) struct Asks {
    pub(super) store: RedisStore,
    pub(super) limits: Limits,
    outcome: Mutex<Outcome>,
    is_over: AtomicBool,
    ids: AtomicU64,
}

impl Traffic {
    fn start(store: RedisStore) -> Self {
        let limits = Limits {
            own: limit("own", "gcra 30/s burst 10"),
            hot: limit("hot", "fixed-window 60/s"),
            slow: limit("slow", "sliding-log 15/h"),
            all: limit("all", "sliding-counter 90/s"),
            attempts: limit("attempts", "fixed-window 40/s count attempts"),
            ledger: limit("ledger", &format!("gcra {LEDGER}/3650d")),
        };
        let asks = Arc::new(Asks {
            store,
            limits,
            outcome: Mutex::default(),
            is_over: AtomicBool::new(false),
            ids: AtomicU64::new(1),
        });
        let mut tasks = JoinSet::new();
        for task in 0..TASKS + 3 {
            let asks = Arc::clone(&asks);
            tasks.spawn(async move {
                let (cas, multi) = (asks.store.in_mode::<Cas>(), asks.store.in_mode::<Multi>());
                let mut turn = task;
                while !asks.is_over.load(Ordering::Relaxed) {
                    match task {
                        0..TASKS => asks.in_lua(turn * 5, &format!("key-{}", turn % KEYS)).await,
                        TASKS.. if task < TASKS + 2 => asks.in_cas(&cas, turn).await,
                        _ => asks.in_multi(&multi).await,
                    }
                    turn += 1;
                    let clock = Instant::now();
                    tokio::time::sleep(PAUSE).await;
                    let late = clock.elapsed().saturating_sub(PAUSE);
                    let mut outcome = asks.outcome();
                    outcome.stood_still = outcome.stood_still.max(late);
                }
            });
        }
        Self { asks, tasks }
    }

    /// What the tasks ask, for requests beside theirs.
    pub(super) fn asks(&self) -> &Arc<Asks> {
        &self.asks
    }

    /// Waits until every key has been decided by a request that began after this time.
    async fn decides_all(&self, since: u64) {
        until(async || {
            let outcome = self.asks.outcome();
            let late: Vec<_> =
                outcome.decided.iter().filter(|(_, begun)| **begun <= since).collect();
            // The keys of the mode Lua, the hot one, the shared one, and one of each other mode.
            let all = usize::try_from(KEYS).expect("few") + 4;
            let last = outcome.errors.last().map(|(_, error)| error.to_string());
            let is_done = outcome.decided.len() == all && late.is_empty();
            is_done
                .then_some(())
                .ok_or_else(|| format!("{}, without {late:?}: {last:?}", outcome.decided.len()))
        })
        .await;
    }

    /// Waits until so many more requests are answered, whether decided or not.
    pub(super) async fn answers(&self, more: usize) {
        let count = |outcome: &Outcome| {
            usize::try_from(outcome.decisions).expect("few") + outcome.errors.len()
        };
        let due = count(&self.asks.outcome()) + more;
        until(async || (count(&self.asks.outcome()) >= due).then_some(()).ok_or("few answers"))
            .await;
    }

    /// Waits until so many more requests have failed.
    pub(super) async fn errors(&self, more: usize) {
        let due = self.asks.outcome().errors.len() + more;
        until(async || (self.asks.outcome().errors.len() >= due).then_some(()).ok_or("no error"))
            .await;
    }

    async fn stops(self) -> (Arc<Asks>, Outcome) {
        self.asks.is_over.store(true, Ordering::Relaxed);
        self.tasks.join_all().await;
        let outcome = std::mem::take(&mut *self.asks.outcome());
        (self.asks, outcome)
    }
}

impl Asks {
    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap()
    }

    pub(super) fn id(&self) -> u128 {
        self.ids.fetch_add(1, Ordering::Relaxed).into()
    }

    /// One of the requests of the mode Lua: batches for one key and across slots, reservations,
    /// refunds, resets.
    async fn in_lua(&self, turn: u64, key: &str) {
        let Limits { own, hot, slow, all, ledger, .. } = &self.limits;
        match turn % 9 {
            0..3 => self.acquire(&self.store, &[(hot, "hot", 1), (ledger, "hot", 1)]).await,
            3 => self.acquire(&self.store, &[(slow, "hot", 1)]).await,
            4 => self.acquire(&self.store, &[(own, key, 1), (ledger, key, 1)]).await,
            5 => self.acquire(&self.store, &[(own, key, 1), (all, "all", 1)]).await,
            6 => self.reserve_and_settle(&self.store, key).await,
            7 => {
                self.acquire(&self.store, &[(own, key, 2)]).await;
                self.give_back(Op::Refund, own, key, 1).await;
            }
            _ => {
                self.acquire(&self.store, &[(own, key, 1)]).await;
                if turn.is_multiple_of(11) {
                    self.give_back(Op::Reset, own, key, own.algorithm().capacity()).await;
                }
            }
        }
    }

    async fn in_cas(&self, store: &RedisStore<Cas>, turn: u64) {
        match turn % 3 {
            0 => self.reserve_and_settle(store, "of cas").await,
            _ => self.acquire(store, &[(&self.limits.own, "of cas", 1)]).await,
        }
    }

    async fn in_multi(&self, store: &RedisStore<Multi>) {
        self.acquire(store, &[(&self.limits.attempts, "of multi", 1)]).await;
    }

    /// Records decisions beside those of the tasks.
    pub(super) fn decided(&self, more: usize) {
        self.outcome().decisions += u64::try_from(more).expect("few");
    }

    /// Records that a caller gave up: one may have been charged.
    pub(super) fn gave_up(&self, key: &str) {
        self.outcome().ledger.entry(key.to_owned()).or_default()[1] += 1;
    }

    async fn acquire<S: Store<AnyAlgorithm, Error = RedisError>>(
        &self,
        store: &S,
        checks: &[(&Limit<AnyAlgorithm>, &str, u64)],
    ) {
        let _ = self.ask(store, checks, Op::Acquire, None, |cost| cost).await;
    }

    /// Reserves three and settles at one.
    async fn reserve_and_settle<S: Store<AnyAlgorithm, Error = RedisError>>(
        &self,
        store: &S,
        key: &str,
    ) {
        let (own, id) = (&self.limits.own, Some(self.id()));
        let reserved = self.ask(store, &[(own, key, 3)], Op::Acquire, id, |_| 1).await;
        if reserved.is_ok_and(|verdict| verdict.allowed()) {
            let _ = self.ask(store, &[(own, key, 1)], Op::Settle, id, |_| 0).await;
        }
    }

    /// Gives cost back: from then on as much more is admitted.
    async fn give_back(&self, op: Op, limit: &Limit<AnyAlgorithm>, key: &str, cost: u64) {
        let begin = now_us();
        let answer = self.ask(&self.store, &[(limit, key, 1)], op, None, |_| 0).await;
        let end = match answer {
            Ok(_) => now_us(),
            // It may still be executed.
            Err(ErrorKind::Indeterminate) => begin + us(Duration::from_secs(3_600)),
            Err(_) => return,
        };
        self.outcome().book(limit, key).allow([at(begin), at(end)], cost);
    }

    /// Sends a request and records what came of it. An admitted request counts at what `counts`
    /// makes of its cost.
    async fn ask<S: Store<AnyAlgorithm, Error = RedisError>>(
        &self,
        store: &S,
        checks: &[(&Limit<AnyAlgorithm>, &str, u64)],
        op: Op,
        id: Option<u128>,
        counts: impl Fn(u64) -> u64,
    ) -> Result<Verdict, ErrorKind> {
        let (begin, clock) = (now_us(), Instant::now());
        let answer = apply(store, checks, op, id).await;
        let (end, took) = (now_us(), clock.elapsed());
        let mut outcome = self.outcome();
        outcome.latest = outcome.latest.max(took);
        let is_allowed = answer.as_ref().is_ok_and(Verdict::allowed);
        let is_unknown = matches!(&answer, Err(error) if error.kind() == ErrorKind::Indeterminate);
        for (limit, key, cost) in checks {
            if limit.name() == "ledger" {
                let entry = outcome.ledger.entry((*key).to_owned()).or_default();
                entry[0] += if is_allowed { *cost } else { 0 };
                entry[1] += if is_unknown { *cost } else { 0 };
            } else if is_allowed && counts(*cost) > 0 {
                outcome.book(limit, key).add([at(begin), at(end)], counts(*cost));
            }
        }
        match answer {
            Ok(verdict) => {
                outcome.decisions += 1;
                for (_, key, _) in checks {
                    outcome.decided.insert((*key).to_owned(), begin);
                }
                Ok(verdict)
            }
            Err(error) => {
                let kind = error.kind();
                outcome.errors.push(([begin, end], error));
                Err(kind)
            }
        }
    }

    /// Nothing was charged more than once, and nothing lost if no state was.
    async fn check_ledger(&self, outcome: &Outcome, is_kept: bool) {
        for (key, [known, unknown]) in &outcome.ledger {
            let charged = LEDGER - peek(&self.store, &self.limits.ledger, key).await;
            let due = if is_kept { *known } else { 0 }..=known + unknown;
            assert!(due.contains(&charged), "{key}: {charged} charged, where {due:?} may be");
        }
    }
}

impl Outcome {
    fn book(&mut self, limit: &Limit<AnyAlgorithm>, key: &str) -> &mut Admissions {
        let name = (limit.name().to_owned(), key.to_owned());
        self.books.entry(name).or_insert_with(|| Admissions::new(*limit.algorithm()))
    }
}
