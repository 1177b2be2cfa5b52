//! Law 13 through every layer, while the store answers, fails, or does what it is asked and never
//! says so: whatever has an id and is sent twice counts once.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, DynStore, ErrorKind, Limit, ManualClock, OnOutage, ReservationId, Store as _,
    StoreError as _,
};
use ratelimit_layers::{Fallback, Metrics, OnRecovery, TopDenied, Traced};
use tokio::time::{Instant, sleep_until, timeout};

use crate::common::{
    BEGIN, Fake, Mode, PAUSE, UNAVAILABLE, allotments, cache, fallback, limit, paused_runtime,
};

/// Of both choices that decide something, and one that counts leases.
fn all() -> [Limit<AnyAlgorithm>; 4] {
    let limit = |name, words, choice| limit(name, words).on_outage(choice);
    [
        limit("local", "gcra 30/h burst 9", OnOutage::Local),
        limit("open", "fixed-window 9/d", OnOutage::Open),
        limit("closed", "gcra 30/h burst 9", OnOutage::Closed),
        limit("leases", "concurrency 6/h", OnOutage::Local),
    ]
}

pub(crate) type Stack = Arc<dyn DynStore<AnyAlgorithm>>;
pub(crate) type MakeStack = fn(&Arc<Fake>, &ManualClock) -> Stack;

/// A layer of every kind around the store, and all of them in the order of the guide.
pub(crate) const STACKS: [(&str, MakeStack); 5] = [
    ("none", |fake, _| Arc::clone(fake) as Stack),
    ("cache", |fake, clock| Arc::new(cache(Arc::clone(fake), clock))),
    ("allotments", |fake, clock| Arc::new(allotments(Arc::clone(fake), clock))),
    ("fallback", |fake, clock| {
        let settings = Fallback::builder().failures(1).on_recovery(OnRecovery::Charge);
        Arc::new(fallback(settings, Arc::clone(fake), clock, &all()))
    }),
    ("all", |fake, clock| {
        let saving = allotments(cache(Arc::clone(fake), clock), clock);
        let around = fallback(Fallback::builder().failures(1), saving, clock, &all());
        Arc::new(Metrics::new(Traced::new(TopDenied::new(around, 16))))
    }),
];

/// How long a caller waits for an answer: longer than a fallback.
const PATIENCE: Duration = Duration::from_millis(110);
/// The time from one request to the next: enough for two answers.
const STEP: Duration = Duration::from_millis(250);

const OPS: [Op; 9] = [
    Op::Acquire,
    Op::Acquire,
    Op::Acquire,
    Op::Settle,
    Op::Extend,
    Op::Force,
    Op::Refund,
    Op::Reset,
    Op::Adopt,
];

/// The answer to a request: what remains, or why there is none.
type Told = Result<(bool, u64), ErrorKind>;

/// The answers to random requests, where those with an id are sent once or twice, and what the
/// store has left then.
async fn send_random(make: MakeStack, seed: u64, times: usize) -> (Vec<Told>, Vec<u64>) {
    let (clock, mut random, all) = (ManualClock::new(BEGIN), Rng::with_seed(seed), all());
    let fake = Arc::new(Fake::new(&clock));
    let (store, mut told) = (make(&fake, &clock), Vec::new());
    for _ in 0..60 {
        let mut begun = Instant::now();
        match random.u8(..12) {
            0 => fake.set([UNAVAILABLE, Mode::ChargesAndHangs][random.usize(..2)]),
            1 => {
                fake.set(Mode::Answers);
                // The next request is the probe.
                begun += PAUSE;
                sleep_until(begun).await;
            }
            2 => clock.advance(Duration::from_secs(random.u64(..300))),
            _ => {}
        }
        let (key, some) = (["alice", "bob"][random.usize(..2)], 1 + random.usize(..2));
        let first = random.usize(..all.len());
        let checks: Vec<_> = (0..some)
            .map(|nth| Check {
                limit: &all[(first + nth) % all.len()],
                key,
                cost: random.u64(1..5),
            })
            .collect();
        let batch = Batch::new(&checks).expect("distinct").op(OPS[random.usize(..OPS.len())]);
        let batch = match random.u128(..5) {
            id @ 1..=3 => batch.id(ReservationId::new(id)),
            4 => batch.id(ReservationId::new(4)).settled_once(),
            _ => batch,
        };
        for time in 0..if batch.reservation_id().is_some() { times } else { 1 } {
            let answer = timeout(PATIENCE, store.apply(&batch)).await;
            if time == 0 {
                told.push(answer.map_or(Err(ErrorKind::Indeterminate), |answer| {
                    let answer = answer.map(|verdict| (verdict.allowed(), verdict.remaining()));
                    answer.map_err(|error| error.kind())
                }));
            }
        }
        sleep_until(begun + STEP).await;
    }
    let left = all.iter().flat_map(|limit| ["alice", "bob"].map(|key| fake.remaining(limit, key)));
    (told, left.collect())
}

#[test]
fn what_has_an_id_and_is_sent_twice_counts_once_through_every_layer() {
    for (name, make) in STACKS {
        let (mut done, mut refused) = (0, 0);
        for seed in 0..20 {
            let run = |times| paused_runtime().block_on(send_random(make, seed, times));
            let (once, twice) = (run(1), run(2));
            assert_eq!(once, twice, "{name}, seed {seed}");
            done += once.0.iter().filter(|told| told.is_ok()).count();
            refused += once.0.len();
        }
        assert!(done > refused / 4, "{name}: {done} of {refused}");
    }
}
