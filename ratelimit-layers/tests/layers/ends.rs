//! Every operation that ends or changes something, while something else is in flight, through every
//! layer: a denial, a charge, a draw or a reservation that is answered late, done late, dropped
//! before or after it is done, or ends by a panic of the store.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, Limit, ManualClock, OnOutage, ReservationId, Store, SyncStore as _,
};
use tokio::time::sleep;

use crate::common::{
    BEGIN, Fake, ID, Memory, Mode, ask, limit, memory, paused_runtime, remaining, run_until_idle,
};
use crate::repeats::{MakeStack, STACKS, Stack};

/// Less than a fallback waits.
const MOMENT: Duration = Duration::from_millis(20);

/// A request: an operation at a cost, under an id or none, which a layer drew or the caller chose,
/// under one of two versions of the limit.
#[derive(Clone, Copy, Debug)]
struct Asked {
    op: Op,
    cost: u64,
    id: Option<(ReservationId, bool)>,
    is_reloaded: bool,
}

const fn plain(op: Op, cost: u64) -> Asked {
    Asked { op, cost, id: None, is_reloaded: false }
}

const fn of_reservation(op: Op, cost: u64) -> Asked {
    Asked { id: Some((ID, false)), ..plain(op, cost) }
}

const DRAWN: Asked = Asked { id: Some((ReservationId::new(43), true)), ..plain(Op::Acquire, 3) };

/// What is in flight: what fits, what does not, and an estimate.
const UNDER_WAY: [Asked; 3] = [plain(Op::Acquire, 3), plain(Op::Acquire, 990), DRAWN];

/// What comes meanwhile.
const ENDS: [Asked; 9] = [
    plain(Op::Reset, 0),
    plain(Op::Refund, 4),
    plain(Op::Force, 9),
    plain(Op::Adopt, 100),
    plain(Op::Peek, 1),
    of_reservation(Op::Settle, 2),
    of_reservation(Op::Extend, 20),
    of_reservation(Op::Renew, 0),
    Asked { is_reloaded: true, ..plain(Op::Acquire, 1) },
];

/// What another process charges then, so that nothing is hidden by a limit that is full.
const OTHER: Asked = plain(Op::Force, 50);

/// How the store does what is in flight, and whether its future is dropped once the other is done.
const FATES: [(Mode, bool); 6] = [
    (Mode::Answers, false),
    (Mode::Late(MOMENT), false),
    (Mode::Delayed(MOMENT), false),
    (Mode::ChargesAndHangs, true),
    (Mode::Hangs, true),
    (Mode::Panics, false),
];

/// The limit before a reload and after it.
fn versions() -> [Limit<AnyAlgorithm>; 2] {
    [1_000, 900]
        .map(|most| limit("daily", &format!("fixed-window {most}/d")).on_outage(OnOutage::Open))
}

impl Asked {
    fn limit(self) -> Limit<AnyAlgorithm> {
        versions()[usize::from(self.is_reloaded)].clone()
    }

    fn batch<'c>(self, check: &'c Check<'c, AnyAlgorithm>) -> Batch<'c, AnyAlgorithm> {
        let batch = Batch::one(check).op(self.op);
        match self.id {
            None => batch,
            Some((id, false)) => batch.id(id),
            Some((id, true)) => batch.id(id).settled_once(),
        }
    }

    async fn send(self, store: Stack) {
        let limit = self.limit();
        let check = Check { limit: &limit, key: "alice", cost: self.cost };
        // What is refused changes nothing.
        let _ = store.apply(&self.batch(&check)).await;
    }

    fn of_memory(self, store: &Memory) {
        let limit = self.limit();
        let check = Check { limit: &limit, key: "alice", cost: self.cost };
        let _ = store.apply_now(&self.batch(&check));
    }
}

/// What comes first: a reservation, and requests enough for a draw.
fn before() -> impl Iterator<Item = Asked> {
    std::iter::once(of_reservation(Op::Acquire, 7)).chain([plain(Op::Acquire, 1); 7])
}

/// What is left in a store of its own that does these in their order.
fn remaining_after(order: &[Asked], last: &Limit<AnyAlgorithm>) -> u64 {
    let store = memory(&ManualClock::new(BEGIN));
    before().chain(order.iter().copied()).for_each(|asked| asked.of_memory(&store));
    remaining(&store, last, "alice")
}

async fn run(
    make: MakeStack,
    under_way: Asked,
    ends: Asked,
    (mode, is_dropped): (Mode, bool),
) -> Result<(), String> {
    let clock = ManualClock::new(BEGIN);
    let fake = Arc::new(Fake::new(&clock));
    let store = make(&fake, &clock);
    for asked in before() {
        asked.send(store.clone()).await;
    }
    fake.once(mode);
    let task = tokio::spawn(under_way.send(store.clone()));
    run_until_idle().await;
    ends.send(store.clone()).await;
    OTHER.of_memory(&fake.memory);
    if is_dropped {
        task.abort();
    }
    let _ended = task.await;
    // Allotments end, and go back.
    run_until_idle().await;
    clock.advance(Duration::from_secs(1));
    sleep(Duration::from_secs(1)).await;
    run_until_idle().await;

    let last = ends.limit();
    let orders = [
        vec![under_way, ends, OTHER],
        vec![ends, under_way, OTHER],
        vec![ends, OTHER, under_way],
        vec![ends, OTHER],
    ];
    // What was answered has been done, and before the other where nothing delayed it.
    let all: Vec<u64> = match mode {
        Mode::Answers | Mode::Late(_) => &orders[..1],
        Mode::Delayed(_) => &orders[..3],
        Mode::ChargesAndHangs => &orders[..],
        _ => &orders[3..],
    }
    .iter()
    .map(|order| remaining_after(order, &last))
    .collect();
    let mut forfeited = 0;
    store.report_counts(&mut |name, count| {
        forfeited += if name.contains("forfeited") { count } else { 0 };
    });
    let is = fake.remaining(&last, "alice");
    let (fewest, most) = (all.iter().min().expect("one"), all.iter().max().expect("one"));
    let told = format!("{is} left of {all:?}, {forfeited} forfeited");
    if is > *most || is + forfeited < *fewest || (forfeited == 0 && !all.contains(&is)) {
        return Err(told);
    }
    // And the layers know it: what is left is admitted, and no more.
    let is_more_admitted = ask(&store, &last, "alice", is + 1).await.allowed();
    if is_more_admitted || (is > 0 && !ask(&store, &last, "alice", is).await.allowed()) {
        return Err(format!(
            "{told}: {}",
            if is_more_admitted { "more is admitted" } else { "it is denied" }
        ));
    }
    Ok(())
}

#[test]
fn what_comes_while_something_is_under_way_leaves_what_some_order_of_both_leaves() {
    for (name, make) in STACKS {
        for under_way in UNDER_WAY {
            for ends in ENDS {
                for fate in FATES {
                    if let Err(broken) = paused_runtime().block_on(run(make, under_way, ends, fate))
                    {
                        panic!("{name}: {under_way:?}, {fate:?}, beside {ends:?}: {broken}");
                    }
                }
            }
        }
    }
}
