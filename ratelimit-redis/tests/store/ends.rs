//! Each operation that ends something beside each request in flight: a proxy holds that request at
//! each place, and then releases, drops or cuts it. A model does the same in that order; the
//! answers and the final charges equal the model's.

use ratelimit_testkit::PureStore;

use crate::common::prelude::*;

/// A request: its operation, its cost, and under which id.
type Asked = (Op, u64, Option<u128>);

/// The ids of a reservation that was made before, and of one whose request is in flight.
const MADE: Option<u128> = Some(7);
const NEW: Option<u128> = Some(8);

const CAPACITY: u64 = 100;
/// A state of a few numbers, one of several windows, a log, and leases. What a bucket returns
/// depends on the moment: laws compare that at given times.
const NAMES: [&str; 4] = ["fixed-window", "sliding-counter", "sliding-log", "concurrency"];
const BEFORE: [Asked; 2] = [(Op::Acquire, 20, None), (Op::Acquire, 7, MADE)];
const UNDER_WAY: [Asked; 8] = [
    (Op::Acquire, 3, None),
    (Op::Acquire, 20, None),
    (Op::Acquire, 5, NEW),
    (Op::Settle, 2, MADE),
    (Op::Extend, 20, MADE),
    (Op::Reset, 0, None),
    (Op::Refund, 4, None),
    (Op::Force, 9, None),
];
const ENDS: [Asked; 10] = [
    (Op::Reset, 0, None),
    (Op::Refund, 8, None),
    (Op::Force, 60, None),
    (Op::Adopt, 10, None),
    (Op::Settle, 0, NEW),
    (Op::Settle, 0, MADE),
    (Op::Settle, 9, MADE),
    (Op::Settle, 2, MADE),
    (Op::Extend, 20, MADE),
    (Op::Renew, 0, MADE),
];
/// What is sent then, and once more, as a caller does who got no answer.
const CANCELS: [Asked; 2] = [(Op::Settle, 0, NEW), (Op::Settle, 0, MADE)];

/// Where a request is when something else ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// It waits for two calls that are on their way to the server.
    Queued,
    /// On its way to the server, in a call with others.
    Riding,
    /// What it has to send first is on its way to the server.
    Going,
    /// In the mode CAS, the states that it has read are on their way back.
    Reading,
    /// In the mode CAS, what it writes is on its way to the server.
    Writing,
    /// The last answer is on its way back.
    Coming,
}

/// What happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finish {
    Released,
    /// Its future is dropped, and then it is released.
    Dropped,
    /// Its connection is cut.
    Cut,
}

const FINISHES: [Finish; 3] = [Finish::Released, Finish::Dropped, Finish::Cut];

const fn places(is_cas: bool) -> &'static [Held] {
    if is_cas {
        &[Held::Going, Held::Reading, Held::Writing, Held::Coming]
    } else {
        &[Held::Queued, Held::Riding, Held::Going, Held::Coming]
    }
}

pub(crate) type Any = Arc<dyn DynStore<AnyAlgorithm>>;

pub(crate) fn in_mode(store: RedisStore, is_cas: bool) -> Any {
    if is_cas { Arc::new(store.in_mode::<Cas>()) } else { Arc::new(store) }
}

/// What an answer says that does not depend on the moment.
type Told = Result<(bool, u64), ErrorKind>;

async fn ask(
    store: &impl Store<AnyAlgorithm>,
    limit: &Limit<AnyAlgorithm>,
    key: &str,
    asked: Asked,
) -> Told {
    let (op, cost, id) = asked;
    match apply(store, &[(limit, key, cost)], op, id).await {
        Ok(verdict) => Ok((verdict.allowed(), verdict.remaining())),
        Err(error) => Err(error.kind()),
    }
}

/// What a model answers to these and to what is sent then, and what it has left before that. Time
/// passes between them.
async fn due(limit: &Limit<AnyAlgorithm>, order: &[Asked]) -> (Vec<Told>, u64) {
    let (model, mut told, mut left) = (PureStore::new(), Vec::new(), 0);
    for asked in BEFORE.iter().chain(order).chain(&CANCELS) {
        if told.len() == BEFORE.len() + order.len() {
            left = peek(&model, limit, "a").await;
        }
        told.push(ask(&model, limit, "a", *asked).await);
        model.clock().advance(Duration::from_millis(1));
    }
    (told.split_off(BEFORE.len()), left)
}

/// Waits until the proxy holds something back, or the task has ended without.
async fn holds<T>(proxy: &FaultProxy, task: &JoinHandle<T>) -> bool {
    let begin = Instant::now();
    while !proxy.is_holding() && !task.is_finished() {
        assert!(begin.elapsed() < PATIENCE, "nothing is held back");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    proxy.is_holding()
}

/// So many turns of the runtime that each task runs until it waits.
pub(crate) async fn turns() {
    for _ in 0..50 {
        yield_now().await;
    }
}

struct Scene {
    server: RedisServer,
    proxy: FaultProxy,
    /// Beside the proxy, and behind it.
    quiet: Any,
    held: Any,
    is_cas: bool,
}

impl Scene {
    /// CAS by one client: it reads in one message.
    async fn each(client: Client) -> Vec<Self> {
        let mut scenes = vec![Self::new(client, false).await];
        if client == Client::Redis {
            scenes.push(Self::new(client, true).await);
        }
        scenes
    }

    async fn new(client: Client, is_cas: bool) -> Self {
        let (server, proxy) = server_behind_proxy();
        let [quiet, held] =
            [server.url(), proxy.url()].map(async |url| in_mode(store(&url, client).await, is_cas));
        let (quiet, held) = (quiet.await, held.await);
        Self { server, proxy, quiet, held, is_cas }
    }

    /// Starts a request behind the proxy, which runs until it waits.
    async fn begins(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
        asked: Asked,
    ) -> JoinHandle<Told> {
        let (store, limit, key) = (Arc::clone(&self.held), limit.clone(), key.to_owned());
        let task = tokio::spawn(async move { ask(&store, &limit, &key, asked).await });
        turns().await;
        task
    }

    /// Begins a request, and others if it needs them, and holds it back at a place; `None` if it
    /// never is there.
    async fn holds(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
        under_way: Asked,
        place: Held,
    ) -> Option<(JoinHandle<Told>, Vec<JoinHandle<Told>>)> {
        let (proxy, one, pattern) = (&self.proxy, (Op::Acquire, 1, None), format!("{{{key}}}"));
        let rides = !self.is_cas && matches!(under_way, (Op::Acquire, _, None));
        let is_of_numbers = ["fixed-window", "sliding-counter"].contains(&limit.name());
        let mut others = Vec::new();
        match place {
            Held::Reading | Held::Writing | Held::Coming => proxy.hold_replies(&pattern),
            Held::Queued | Held::Riding if !rides || !is_of_numbers => return None,
            Held::Queued | Held::Riding => proxy.hold_requests(""),
            Held::Going => proxy.hold_requests(&pattern),
        }
        if matches!(place, Held::Queued | Held::Riding) {
            for other in ["b", "c"] {
                others.push(self.begins(limit, &format!("{other}{key}"), one).await);
            }
        }
        let task = self.begins(limit, key, under_way).await;
        if place == Held::Riding {
            others.push(self.begins(limit, &format!("d{key}"), one).await);
            proxy.hold_requests(&pattern);
        }
        let mut is_held = holds(proxy, &task).await;
        if self.is_cas && matches!(place, Held::Writing | Held::Coming) && is_held {
            proxy.hold_requests(&pattern);
            is_held = holds(proxy, &task).await;
        }
        if self.is_cas && place == Held::Coming && is_held {
            proxy.hold_replies(&pattern);
            is_held = holds(proxy, &task).await;
        }
        if !is_held {
            proxy.release();
            // It has nothing to write.
            let _answer = task.await;
            return None;
        }
        Some((task, others))
    }

    /// Whether it was held there.
    async fn run(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
        (under_way, ends, place, finish): (Asked, Asked, Held, Finish),
    ) -> Result<bool, String> {
        for asked in BEFORE {
            let _ = ask(&self.quiet, limit, key, asked).await;
        }
        let held = self.holds(limit, key, under_way, place).await;
        let Some((task, others)) = held else { return Ok(false) };
        let ended = ask(&self.quiet, limit, key, ends).await;
        match finish {
            Finish::Released => {}
            Finish::Dropped => {
                task.abort();
                turns().await;
            }
            Finish::Cut => self.proxy.cut_all(),
        }
        self.proxy.release();
        let answer = task.await.ok();
        for other in others {
            let _answer = other.await;
        }
        // What was sent before on this connection is done.
        let _ =
            until(async || apply(&self.held, &[(limit, "fence", 0)], Op::Peek, None).await).await;
        let left = peek(&self.quiet, limit, key).await;
        let mut is = vec![ended];
        for asked in CANCELS {
            is.push(ask(&self.quiet, limit, key, asked).await);
        }

        let is_lost =
            matches!(answer, Some(Err(ErrorKind::Unavailable | ErrorKind::Indeterminate)));
        let all: [&[Asked]; 3] = [&[ends], &[ends, under_way], &[under_way, ends]];
        let orders = match (place, finish) {
            (Held::Coming, _) => &all[2..],
            (_, Finish::Cut) if is_lost => &all[..1],
            // What writes nothing is decided by then.
            (Held::Reading, Finish::Released | Finish::Cut) => &all[1..],
            (_, Finish::Released | Finish::Cut) => &all[1..2],
            // It has not left, or is still to be written.
            (Held::Queued | Held::Reading, _) => &all[..1],
            (Held::Going, _) if self.is_cas => &all[..1],
            // Its states have changed meanwhile, or not.
            (Held::Writing, _) => &all[..2],
            (Held::Riding | Held::Going, _) => &all[1..2],
        };
        let mut told = Vec::new();
        for order in orders {
            let (mut due, model_left) = due(limit, order).await;
            let its =
                order.iter().position(|asked| *asked == under_way).filter(|_| order.len() > 1);
            let its = its.map(|place| due.remove(place));
            let is_answered =
                answer.is_some_and(|answer| its == Some(answer)) || is_lost || answer.is_none();
            if is_answered && left == model_left && is == due {
                return Ok(true);
            }
            told.push(format!("{order:?}: {its:?}, {model_left} left, {due:?}"));
        }
        Err(format!("{answer:?}, {left} left, {is:?}\n{}", told.join("\n")))
    }
}

async fn what_ends_beside_a_call_in_flight_leaves_what_their_order_leaves(client: Client) {
    let (mut tried, mut held, mut broken) = (usize::from(client == Client::Fred), 0, Vec::new());
    for scene in Scene::each(client).await {
        let limits: Vec<_> =
            every(CAPACITY).into_iter().filter(|limit| NAMES.contains(&limit.name())).collect();
        // The server knows all scripts.
        for limit in &limits {
            for asked in BEFORE.iter().chain(&UNDER_WAY) {
                let _ = ask(&scene.held, limit, "fence", *asked).await;
            }
        }
        for under_way in UNDER_WAY {
            for ends in ENDS {
                for place in places(scene.is_cas) {
                    for finish in FINISHES {
                        // Each with another limit; only those of a few numbers ride with others.
                        tried += 1;
                        let (limit, key) = (&limits[(tried + tried / 4) % 4], format!("k{tried}"));
                        let case = (under_way, ends, *place, finish);
                        match scene.run(limit, &key, case).await {
                            Ok(is_held) => held += usize::from(is_held),
                            Err(why) => broken.push(format!("{} {case:?}: {why}", limit.name())),
                        }
                    }
                }
            }
        }
        let forever = outliving(&scene.server, client.name(), 1 << 50);
        assert!(forever.is_empty(), "{forever:?}");
    }
    let told = broken[..broken.len().min(8)].join("\n");
    assert!(broken.is_empty(), "{} of {held}: {told}", broken.len());
    assert!(held > 400, "{held} of {tried}");
}

with_each_client!(what_ends_beside_a_call_in_flight_leaves_what_their_order_leaves);
