//! Ids in `decide`: each is charged once and settled once, and frees no other client's charge.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::HashMap;

use proptest::prelude::*;
use ratelimit_core::{
    Algorithm, Batch, Check, Concurrency, Decision, ErrorKind, FixedWindow, Gcra, Limit, Now, Op,
    Policy, PolicyState, Rate, Refusal, Reservation, ReservationId, SlidingLog, States, Timestamp,
    TokenBucket, WindowLog, Write, decide,
};

const ID: ReservationId = ReservationId::new(7);
const SECOND_US: u64 = 1_000_000;
const MINUTE_US: u64 = 60 * SECOND_US;

/// A minimal store.
#[derive(Clone, Debug, Default, PartialEq)]
struct Memory {
    states: HashMap<String, PolicyState>,
    reservations: HashMap<(String, ReservationId), (Reservation, Timestamp)>,
}

struct View<'a> {
    memory: &'a mut Memory,
    names: Vec<String>,
    id: Option<ReservationId>,
}

impl States<PolicyState> for View<'_> {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.memory.states.get(&self.names[position])
    }

    fn put(&mut self, position: usize, write: Write<PolicyState>) {
        let name = self.names[position].clone();
        match write {
            Write::Keep => {}
            Write::Put { state, .. } => drop(self.memory.states.insert(name, state)),
            Write::Remove => drop(self.memory.states.remove(&name)),
        }
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        let key = (self.names[position].clone(), self.id?);
        self.memory.reservations.get(&key).map(|(reservation, _)| reservation.clone())
    }

    fn fingerprint(&self) -> u64 {
        self.names.iter().flat_map(|name| name.bytes()).map(u64::from).sum()
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp) {
        if let Some(id) = self.id {
            self.memory
                .reservations
                .insert((self.names[position].clone(), id), (reservation, expires));
        }
    }
}

fn timestamp(us: u64) -> Timestamp {
    Timestamp::from_us(us).expect("a test's time")
}

fn gcra() -> Limit<Policy> {
    Limit::new("gcra", Gcra::new("1/s".parse().expect("a rate"), 10).expect("a limit").into())
        .expect("a name")
}

fn fixed() -> Limit<Policy> {
    Limit::new("fixed", FixedWindow::new("10/m".parse().expect("a rate")).expect("a limit").into())
        .expect("a name")
}

fn leases() -> Limit<Policy> {
    let leases = Concurrency::new("3/30s".parse().expect("a rate")).expect("a limit");
    Limit::new("leases", leases.into()).expect("a name")
}

impl Memory {
    /// Applies an operation to one key of these limits, at the same cost for all.
    fn apply(
        &mut self,
        limits: &[&Limit<Policy>],
        (op, id, cost): (Op, Option<ReservationId>, u64),
        at_us: u64,
    ) -> Result<Vec<Decision>, Refusal> {
        let check = |limit| Check { limit, key: "a", cost };
        let checks: Vec<_> = limits.iter().copied().map(check).collect();
        let batch =
            Batch::new(&checks).expect("different limits").op(op).now(Now::At(timestamp(at_us)));
        let batch = id.map_or(batch, |id| batch.id(id));
        let names = limits.iter().map(|limit| limit.name().to_owned()).collect();
        let mut held = View { memory: self, names, id };
        decide(&batch, timestamp(at_us), &mut held).map(|verdict| verdict.decisions().to_vec())
    }

    fn reservation(&self, limit: &Limit<Policy>) -> (Reservation, Timestamp) {
        self.reservations[&(limit.name().to_owned(), ID)].clone()
    }

    fn left(&mut self, limit: &Limit<Policy>, at_us: u64) -> u64 {
        self.apply(&[limit], (Op::Peek, None, 0), at_us).expect("decides")[0].remaining
    }
}

#[test]
fn an_ended_lease_is_not_renewed_by_another_reservation_of_its_batch() {
    let (mut memory, limits) = (Memory::default(), [&leases(), &gcra()]);
    let ended = 30 * SECOND_US;
    let mut apply = |asked, at_us| memory.apply(&limits, asked, at_us);
    apply((Op::Acquire, Some(ID), 3), 0).expect("fits");
    // Another caller takes the places of the lease.
    let next = apply((Op::Acquire, Some(ReservationId::new(8)), 3), ended).expect("fits");
    assert!(next[0].allowed);
    let unknown = Err(Refusal::UnknownReservation { id: ID });
    assert_eq!(apply((Op::Renew, Some(ID), 0), ended), unknown);
    // The rest is settled nevertheless.
    let settled = apply((Op::Settle, Some(ID), 0), ended).expect("gcra still has it");
    assert_eq!((settled[0].remaining, settled[1].remaining), (0, 7));
}

#[test]
fn a_charge_under_an_id_is_made_once_and_settled_once() {
    for limit in [gcra(), fixed(), leases()] {
        let mut memory = Memory::default();
        let whole = limit.algorithm().capacity();
        let mut apply = |asked, at_us| memory.apply(&[&limit], asked, at_us);
        let first = apply((Op::Acquire, Some(ID), 3), 0).expect("fits");
        assert_eq!((first[0].allowed, first[0].remaining), (true, whole - 3));
        assert_eq!(apply((Op::Acquire, Some(ID), 3), 0).expect("known"), first);
        // It waits to be settled, and its id accepts no other operation.
        let pending = Refusal::Pending { limit: limit.name().to_owned(), id: ID };
        for op in [Op::Refund, Op::Force, Op::Reset] {
            assert_eq!(apply((op, Some(ID), 1), 0), Err(pending.clone()));
        }
        let settled = apply((Op::Settle, Some(ID), 0), 0).expect("reserved");
        assert_eq!((settled[0].allowed, settled[0].remaining), (true, whole));
        assert_eq!(apply((Op::Settle, Some(ID), 0), 0).expect("the same once more"), settled);
        let stays = Refusal::Settled { limit: limit.name().to_owned(), id: ID, at: 0 };
        for (op, cost) in [(Op::Settle, 1), (Op::Acquire, 3), (Op::Renew, 0)] {
            assert_eq!(apply((op, Some(ID), cost), 0), Err(stays.clone()), "{op}");
        }
        assert_eq!(stays.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn a_settlement_of_other_limits_than_were_reserved_is_an_error_that_names_them() {
    let (mut memory, all) = (Memory::default(), [gcra(), fixed(), leases()]);
    let [gcra, fixed, leases] = &all;
    memory.apply(&[gcra, leases], (Op::Acquire, Some(ID), 2), 0).expect("fits");
    let others = |limit: &Limit<Policy>| Refusal::OtherChecks {
        limit: limit.name().to_owned(),
        id: ID,
        reserved: "gcra,leases".to_owned(),
    };
    for op in [Op::Settle, Op::Renew, Op::Acquire, Op::Refund] {
        let error = memory.apply(&[gcra], (op, Some(ID), 2), 0).expect_err("half of it");
        assert_eq!(error, others(gcra));
        assert!(error.to_string().contains("gcra,leases"), "{error}");
        let error = memory.apply(&[leases], (op, Some(ID), 2), 0);
        assert_eq!(error.expect_err("half of it"), others(leases).clone());
    }
    let error = memory.apply(&[gcra, fixed], (Op::Settle, Some(ID), 0), 0);
    assert_eq!(error.expect_err("another"), others(gcra));
    let error = memory.apply(&[fixed], (Op::Settle, Some(ID), 0), 0);
    assert_eq!(error.expect_err("another alone"), Refusal::UnknownReservation { id: ID });
    assert_eq!((memory.left(gcra, 0), memory.left(leases, 0)), (8, 1));
    // The lease has expired. The same limits settle the rest.
    memory.apply(&[gcra, leases], (Op::Settle, Some(ID), 0), MINUTE_US).expect("settles");
    // A reservation of one limit is settled alone.
    let id = ReservationId::new(99);
    memory.apply(&[fixed], (Op::Acquire, Some(ID), 2), 0).expect("fits");
    let error = memory.apply(&[gcra, fixed], (Op::Settle, Some(id), 0), 0);
    assert!(error.is_err());
}

#[test]
fn a_denied_reservation_charges_nothing_and_can_be_repeated() {
    let (limit, mut memory) = (fixed(), Memory::default());
    memory.apply(&[&limit], (Op::Acquire, None, 9), 0).expect("fits");
    let denied = memory.apply(&[&limit], (Op::Acquire, Some(ID), 2), 0).expect("decides");
    assert!(!denied[0].allowed && memory.reservations.is_empty());
    let unknown = Refusal::UnknownReservation { id: ID };
    assert_eq!(memory.apply(&[&limit], (Op::Settle, Some(ID), 0), 0), Err(unknown));
    let later = memory.apply(&[&limit], (Op::Acquire, Some(ID), 2), MINUTE_US).expect("decides");
    assert!(later[0].allowed);
}

#[test]
fn a_settlement_charges_what_is_missing_and_returns_what_still_counts() {
    let (limit, mut memory) = (fixed(), Memory::default());
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 4), 0).expect("fits");
    let more = memory.apply(&[&limit], (Op::Settle, Some(ID), 6), 0).expect("reserved");
    assert_eq!((more[0].cost, more[0].remaining), (6, 4));

    let mut memory = Memory::default();
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 4), 0).expect("fits");
    memory.apply(&[&limit], (Op::Acquire, None, 5), MINUTE_US).expect("the next window");
    let past = memory.apply(&[&limit], (Op::Settle, Some(ID), 1), MINUTE_US).expect("reserved");
    assert_eq!(past[0].remaining, 5, "what was charged in a window that is past counts no longer");

    let (limit, mut memory) = (gcra(), Memory::default());
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 10), 0).expect("fits");
    memory.apply(&[&limit], (Op::Acquire, None, 10), 10 * SECOND_US).expect("all is back");
    let past =
        memory.apply(&[&limit], (Op::Settle, Some(ID), 0), 10 * SECOND_US).expect("reserved");
    assert_eq!(past[0].remaining, 0, "it has flowed back already");
}

#[test]
fn a_renewed_reservation_lives_longer_and_returns_no_more() {
    let hour_us = Reservation::LIFE_US;
    let (limit, mut memory) = (fixed(), Memory::default());
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 10), 0).expect("fits");
    memory.apply(&[&limit], (Op::Renew, Some(ID), 0), MINUTE_US).expect("reserved");
    let (reservation, expires) = memory.reservation(&limit);
    assert_eq!((reservation.timestamp, reservation.since), (Timestamp::ZERO, timestamp(MINUTE_US)));
    assert_eq!(expires, timestamp(MINUTE_US + hour_us));
    memory.apply(&[&limit], (Op::Acquire, None, 10), MINUTE_US).expect("the next window");
    // After the first hour it can still be settled, but its charge belongs to an earlier window.
    let mut late = memory.clone();
    late.apply(&[&limit], (Op::Settle, Some(ID), 0), hour_us).expect("renewed");
    memory.apply(&[&limit], (Op::Settle, Some(ID), 0), MINUTE_US).expect("reserved");
    assert_eq!(memory.left(&limit, MINUTE_US), 0);

    let (limit, mut memory) = (gcra(), Memory::default());
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 10), 0).expect("fits");
    memory.apply(&[&limit], (Op::Renew, Some(ID), 0), 9 * SECOND_US).expect("reserved");
    memory.apply(&[&limit], (Op::Acquire, None, 10), 10 * SECOND_US).expect("all is back");
    memory.apply(&[&limit], (Op::Settle, Some(ID), 0), 10 * SECOND_US).expect("reserved");
    assert_eq!(memory.left(&limit, 10 * SECOND_US), 0);
}

#[test]
fn an_id_is_forgotten_when_its_reservation_ends() {
    for (limit, life_us) in [(gcra(), Reservation::LIFE_US), (leases(), 30 * SECOND_US)] {
        let mut memory = Memory::default();
        memory.apply(&[&limit], (Op::Acquire, Some(ID), 3), 0).expect("fits");
        let mut before = memory.clone();
        before.apply(&[&limit], (Op::Renew, Some(ID), 0), life_us - 1).expect("still alive");
        before.apply(&[&limit], (Op::Settle, Some(ID), 0), 2 * life_us - 2).expect("renewed");
        for op in [Op::Renew, Op::Settle] {
            let over = memory.apply(&[&limit], (op, Some(ID), 0), life_us);
            assert_eq!(over, Err(Refusal::UnknownReservation { id: ID }));
        }
        // The id can be used again.
        assert!(memory.apply(&[&limit], (Op::Acquire, Some(ID), 3), life_us).is_ok());
    }
}

#[test]
fn a_clock_that_goes_back_neither_loses_a_lease_nor_frees_another() {
    for limit in [fixed(), leases()] {
        let mut memory = Memory::default();
        memory.apply(&[&limit], (Op::Acquire, None, 1), 70 * SECOND_US).expect("fits");
        let before = memory.clone();
        memory.apply(&[&limit], (Op::Acquire, Some(ID), 2), 50 * SECOND_US).expect("fits");
        memory.apply(&[&limit], (Op::Settle, Some(ID), 0), 50 * SECOND_US).expect("reserved");
        assert_eq!(memory.states, before.states);
    }
}

#[test]
fn releasing_a_lease_after_a_reset_frees_no_other_lease() {
    let (limit, mut memory) = (leases(), Memory::default());
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 2), 0).expect("fits");
    memory.apply(&[&limit], (Op::Reset, None, 0), 1).expect("forgets");
    memory.apply(&[&limit], (Op::Acquire, None, 3), 2).expect("fits");
    memory.apply(&[&limit], (Op::Renew, Some(ID), 0), 3).expect("reserved");
    memory.apply(&[&limit], (Op::Settle, Some(ID), 0), 4).expect("reserved");
    assert_eq!(memory.left(&limit, 4), 0);
}

#[test]
fn a_batch_is_reserved_and_settled_as_a_whole() {
    let (gcra, fixed, leases) = (gcra(), fixed(), leases());
    let mut memory = Memory::default();
    let all = [&gcra, &fixed, &leases];
    let held = memory.apply(&all, (Op::Acquire, Some(ID), 3), 0).expect("fits");
    assert_eq!(held.iter().map(|decision| decision.remaining).collect::<Vec<_>>(), [7, 7, 0]);
    // Where one limit has forgotten the reservation, the others settle it.
    let at_us = 31 * SECOND_US;
    let settled = memory.apply(&all, (Op::Settle, Some(ID), 1), at_us).expect("two are reserved");
    assert_eq!(settled.iter().map(|decision| decision.remaining).collect::<Vec<_>>(), [10, 9, 3]);
    assert!(memory.apply(&[&leases], (Op::Settle, Some(ID), 1), at_us).is_err());
    // A batch that one limit denies is reserved in none.
    let other = ReservationId::new(8);
    let denied = memory.apply(&all, (Op::Acquire, Some(other), 4), at_us).expect("decides");
    assert_eq!(
        denied.iter().map(|decision| decision.allowed).collect::<Vec<_>>(),
        [true, true, false]
    );
    assert!(memory.apply(&all, (Op::Settle, Some(other), 0), at_us).is_err());
}

#[test]
fn an_operation_with_an_id_is_done_once() {
    let (limit, mut memory) = (fixed(), Memory::default());
    memory.apply(&[&limit], (Op::Acquire, None, 8), 0).expect("fits");
    let refund = memory.apply(&[&limit], (Op::Refund, Some(ID), 3), 0).expect("refunds");
    assert_eq!(refund[0].remaining, 5);
    assert_eq!(memory.apply(&[&limit], (Op::Refund, Some(ID), 3), 0).expect("done"), refund);
    let other_cost = memory.apply(&[&limit], (Op::Refund, Some(ID), 4), 0);
    assert!(matches!(other_cost, Err(Refusal::Settled { at: 3, .. })));
    assert_eq!(memory.left(&limit, 0), 5);
}

#[test]
fn an_impossible_operation_is_refused_and_writes_nothing() {
    let log = Limit::new(
        "log",
        Policy::from(SlidingLog::new("3/s".parse().expect("a rate")).expect("a limit")),
    )
    .expect("a name");
    let attempts = fixed().algorithm().by_attempts().expect("counts");
    let attempts = Limit::new("attempts", attempts).expect("a name");
    let fixed = fixed();
    let mut memory = Memory::default();
    for (limits, asked, kind) in [
        (vec![&fixed], (Op::Settle, None, 1), ErrorKind::Invalid),
        (vec![&fixed], (Op::Renew, None, 1), ErrorKind::Invalid),
        (vec![&fixed], (Op::Acquire, Some(ID), 0), ErrorKind::Invalid),
        (vec![&fixed], (Op::Settle, Some(ID), 1), ErrorKind::Invalid),
        (vec![&fixed, &log], (Op::Acquire, Some(ID), 1), ErrorKind::Unsupported),
        (vec![&fixed, &attempts], (Op::Acquire, Some(ID), 1), ErrorKind::Unsupported),
    ] {
        let refusal = memory.apply(&limits, asked, 0).expect_err("cannot be");
        assert_eq!(refusal.kind(), kind, "{asked:?}: {refusal}");
    }
    assert_eq!(memory, Memory::default());
}

#[test]
fn metadata_beyond_the_bound_is_refused_where_any_is_kept() {
    let log = Policy::from(WindowLog::new("3/s".parse().expect("a rate")).expect("a limit"));
    let log = Limit::new("log", log).expect("a name");
    let fixed = fixed();
    let bytes = [0; WindowLog::MAX_METADATA_BYTES + 1];
    let validated = |limit, bytes| {
        let check = Check { limit, key: "a", cost: 1 };
        Batch::one(&check).metadata(bytes).validate()
    };
    assert_eq!(validated(&log, &bytes[1..]), Ok(()));
    assert_eq!(validated(&fixed, &bytes), Ok(()), "it keeps none");
    let refusal = validated(&log, &bytes).expect_err("a byte too many");
    assert_eq!(refusal, Refusal::Metadata { limit: "log".to_owned(), bytes: 257, most: 256 });
    assert_eq!(
        refusal.to_string(),
        "limit \"log\": 257 bytes of metadata are more than the 256 that it keeps of a request; \
         shorten them"
    );
}

/// The remaining tokens of 1/s burst 10 when a reservation of 10 is settled at 2 after `wait_us`, with these other
/// charges in between.
fn left_after_settling(wait_us: u64, others: &[(u64, u64)]) -> u64 {
    let (mut memory, limit) = (Memory::default(), gcra());
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 10), 0).expect("reserves");
    for &(at_us, cost) in others {
        let decisions = memory.apply(&[&limit], (Op::Acquire, None, cost), at_us).expect("decides");
        assert!(decisions[0].allowed);
    }
    memory.apply(&[&limit], (Op::Settle, Some(ID), 2), wait_us).expect("settles")[0].remaining
}

#[test]
fn settling_returns_the_difference_less_what_may_have_refilled() {
    // Without other charges, the true cost might have been charged from the beginning.
    assert_eq!(left_after_settling(0, &[]), 8);
    assert_eq!(left_after_settling(SECOND_US, &[]), 9);
    assert_eq!(left_after_settling(5 * SECOND_US, &[]), 10);
    // With others in between, 5 of the 8 in excess may have refilled.
    assert_eq!(left_after_settling(5 * SECOND_US, &[(4 * SECOND_US, 4)]), 1 + 3);
    // All but the share of the last moment has refilled, and is not returned a second time.
    assert_eq!(left_after_settling(9_950_000, &[(9_900_000, 9)]), 0);
}

#[test]
fn repeating_an_id_at_another_cost_is_refused() {
    let (mut memory, limit) = (Memory::default(), gcra());
    memory.apply(&[&limit], (Op::Acquire, Some(ID), 1), 0).expect("reserves");
    for op in [Op::Acquire, Op::Peek] {
        memory.apply(&[&limit], (op, Some(ID), 1), 0).expect("the same once more");
        let refusal = memory.apply(&[&limit], (op, Some(ID), 11), 0).expect_err("another cost");
        assert_eq!(refusal, Refusal::Reserved { limit: "gcra".into(), id: ID, at: 1 });
        assert_eq!(refusal.kind(), ErrorKind::Invalid);
    }
}

/// One request of a random history.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Charged(u64),
    Reserved(u64),
    /// The n-th open reservation, at this percentage of its estimate.
    Settled(usize, u64),
}

fn histories() -> impl Strategy<Value = Vec<(u64, Asked)>> {
    let asked = prop_oneof![
        2 => (1_u64..=6).prop_map(Asked::Charged),
        2 => (1_u64..=10).prop_map(Asked::Reserved),
        3 => (0_usize..20, 0_u64..=100).prop_map(|(n, part)| Asked::Settled(n, part)),
    ];
    prop::collection::vec((0_u64..3 * SECOND_US, asked), 1..60)
}

proptest! {
    /// In true costs, each counted at the time of its charge, a bucket never admits more than its burst and its
    /// refill: no settlement returns the same tokens twice.
    #[test]
    fn settling_never_creates_capacity(history in histories(), whole_ticks in any::<bool>()) {
        let rate: Rate = if whole_ticks { "1/s" } else { "7/5s" }.parse().expect("a rate");
        for policy in [
            Policy::from(Gcra::new(rate, 10).expect("a limit")),
            TokenBucket::new(rate, 10).expect("a limit").into(),
        ] {
            let (limit, mut memory) = (Limit::new("l", policy).expect("a name"), Memory::default());
            // The time and the final cost of each charge.
            let mut charged: Vec<(u64, u64)> = Vec::new();
            let mut reserved: Vec<(usize, ReservationId, bool)> = Vec::new();
            let mut at_us = 0;
            for &(after_us, asked) in &history {
                at_us += after_us;
                let mut apply = |op, id, cost| {
                    memory.apply(&[&limit], (op, id, cost), at_us).expect("can be")[0].allowed
                };
                match asked {
                    Asked::Charged(cost) => {
                        if apply(Op::Acquire, None, cost) {
                            charged.push((at_us, cost));
                        }
                    }
                    Asked::Reserved(cost) => {
                        let id = ReservationId::new(reserved.len() as u128);
                        if apply(Op::Acquire, Some(id), cost) {
                            reserved.push((charged.len(), id, false));
                            charged.push((at_us, cost));
                        }
                    }
                    Asked::Settled(nth, part) => {
                        let open = reserved.iter_mut().filter(|(.., settled)| !settled);
                        let mut open: Vec<_> = open.collect();
                        if !open.is_empty() {
                            let nth = nth % open.len();
                            let (place, id, settled) = &mut *open[nth];
                            let cost = charged[*place].1 * part / 100;
                            apply(Op::Settle, Some(*id), cost);
                            charged[*place].1 = cost;
                            *settled = true;
                        }
                    }
                }
            }
            for (begin, &(since_us, _)) in charged.iter().enumerate() {
                let mut total = 0;
                for &(until_us, cost) in &charged[begin..] {
                    total += cost;
                    let flowed = (until_us - since_us) * rate.count() / rate.period_us();
                    prop_assert!(total <= 10 + flowed, "{} since {} until {}", total, since_us, until_us);
                }
            }
        }
    }
}
