//! Every law of an algorithm catches an algorithm that breaks it, and the sound one passes on the
//! same walks.

use std::sync::atomic::{AtomicU64, Ordering};

use ratelimit_core::algorithm::{FixedWindowState, InMemory, MaybeStep, Recovery, Step, Write};
use ratelimit_core::for_memory::Compact;
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, FixedWindow, Rate, Timestamp};
use ratelimit_testkit::AlgorithmProperty as Property;
use ratelimit_testkit::{AlgorithmHarness, Instance, algorithm_regression, try_same_algorithm};

/// Writes the flaws of a fixed window, and a harness for each.
macro_rules! flaws {
    ($($(#[$doc:meta])* $wrong:ident,)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Wrong {
            $($(#[$doc])* $wrong,)+
        }

        $(
            struct $wrong;

            impl AlgorithmHarness for $wrong {
                type Algorithm = Window;

                fn limits() -> Vec<Instance<Window>> {
                    [(1, 3), (4, 7_000), (2, 300_000_000), (7, 300_000_000), (60, 300_000_000)]
                        .map(|(limit, us)| {
                            let text = format!("{limit} per {us} us");
                            Instance::new(text, Window::new(Wrong::$wrong, limit, us))
                        })
                        .into()
                }

                fn excess(
                    window: &Window,
                    admitted: &[(Timestamp, u64)],
                    at: Timestamp,
                    cost: u64,
                ) -> Option<String> {
                    let of = |at: Timestamp| at.as_us() / window.sound.window_us();
                    let same = admitted.iter().filter(|(earlier, _)| of(*earlier) == of(at));
                    let total = same.map(|(_, cost)| cost).sum::<u64>() + cost;
                    (total > window.capacity()).then(|| format!("{total} in one window"))
                }
            }
        )+
    };
}

flaws! {
    Nothing,
    /// It tests `current > limit` before the charge.
    OneTooMany,
    /// It reports waits in whole milliseconds.
    WaitsInMilliseconds,
    /// It reports a reset after the window has ended.
    ResetsLate,
    /// It charges denials.
    ChargesDenials,
    /// An expired state still counts.
    OutlivesItself,
    /// At a time before the window the count is forgotten.
    MintsWhenTimeGoesBack,
    /// The difference of two times underflows.
    PanicsWhenTimeGoesBack,
    /// A peek opens a window.
    PeeksBeginWindows,
    /// The window keeps the length of the limit that opened it.
    KeepsTheOldWindow,
    /// A forced charge writes back no more than this limit can hold.
    ForgivesTheOther,
    /// A refund creates capacity.
    RefundsMore,
    /// A refund before the window creates capacity.
    RefundsMoreBehind,
    /// Every thousandth request is admitted for free.
    Remembers,
    /// An in-place step does not write.
    WritesNothingInPlace,
    /// A fast step counts from the epoch.
    FastStepByTheEpoch,
    /// A settlement returns charges that no longer count.
    SettlesWhatIsPast,
    /// A settlement goes by the limit's own numbers, also of what was charged under others.
    SettlesByItsOwnNumbers,
    /// An extension counts as made when the reservation was.
    ExtendsWhatIsPast,
    /// A settlement above the reservation charges the whole cost again.
    SettlesTheWhole,
    /// Its capacity is one more than the step's.
    HasOneMore,
    /// Its states never expire.
    NeverExpires,
    /// A renewal refunds.
    RenewsAndGivesBack,
    /// Metadata fills the window.
    CountsMetadata,
}

/// A fixed window with one of the flaws.
#[derive(Debug)]
struct Window {
    sound: FixedWindow,
    wrong: Wrong,
    asked: AtomicU64,
}

fn sound(limit: u64, window_us: u64) -> FixedWindow {
    FixedWindow::new(Rate::per_us(limit, window_us).expect("a rate")).expect("a limit")
}

impl Window {
    fn new(wrong: Wrong, limit: u64, window_us: u64) -> Self {
        Self { sound: sound(limit, window_us), wrong, asked: AtomicU64::new(0) }
    }

    fn is(&self, wrong: Wrong) -> bool {
        self.wrong == wrong
    }
}

impl Algorithm for Window {
    type State = FixedWindowState;

    fn capacity(&self) -> u64 {
        self.sound.capacity() + u64::from(self.is(Wrong::HasOneMore))
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let (asked, all) = (self.asked.fetch_add(1, Ordering::Relaxed), self.capacity());
        let opens = |now| self.sound.step(None, now, 1).write;
        let mut due = self.sound.step(state, now, cost);
        if let (Wrong::NeverExpires, Write::Put { expires, .. }) = (self.wrong, &mut due.write) {
            *expires = Timestamp::MAX;
        }
        let denied = !due.decision.allowed;
        let mut told = due.decision;
        match (self.wrong, state) {
            (Wrong::OneTooMany, _) if denied && cost == told.remaining + 1 => {
                self.force(state, now, cost).expect("it can be forced")
            }
            (Wrong::WaitsInMilliseconds, _) => {
                told.retry_after_us = told.retry_after_us.map(|us| us / 1_000 * 1_000);
                Step { decision: told, ..due }
            }
            (Wrong::ResetsLate, _) if told.reset_after_us > 0 => {
                told.reset_after_us += 5;
                Step { decision: told, ..due }
            }
            (Wrong::ChargesDenials, Some(_)) if denied => {
                let write = self.force(state, now, all).expect("it can be forced").write;
                Step { write, ..due }
            }
            (Wrong::OutlivesItself, Some(past)) if past.ends_us == now.as_us() => {
                self.sound.step(state, Timestamp::saturating_from_us(past.ends_us - 1), cost)
            }
            (Wrong::MintsWhenTimeGoesBack, Some(later)) if now < later.start => {
                self.sound.step(None, now, cost)
            }
            (Wrong::PanicsWhenTimeGoesBack, Some(later)) => {
                assert!(now >= later.start, "the difference underflows");
                due
            }
            (Wrong::PeeksBeginWindows, None) if cost == 0 => {
                Step { write: opens(now).map(|open| FixedWindowState { count: 0, ..open }), ..due }
            }
            (Wrong::KeepsTheOldWindow, Some(old)) => {
                sound(all, old.ends_us - old.start.as_us()).step(state, now, cost)
            }
            (Wrong::Remembers, _) if asked % 1_000 == 999 => {
                self.sound.step(state, now, 0).costing(cost)
            }
            _ => due,
        }
    }

    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let is_behind = state.is_some_and(|state| now < state.start);
        let more = self.is(Wrong::RefundsMore) || is_behind && self.is(Wrong::RefundsMoreBehind);
        self.sound.refund(state, now, cost.saturating_add(u64::from(more && cost > 0)))
    }

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let most = if self.is(Wrong::ForgivesTheOther) { self.capacity() } else { u64::MAX };
        let capped =
            |left: FixedWindowState| FixedWindowState { count: left.count.min(most), ..left };
        Some(self.sound.force(state, now, cost)?.map(capped))
    }

    fn reservation_us(&self) -> Option<u64> {
        self.sound.reservation_us()
    }

    fn charged_at(&self, state: Option<&Self::State>, now: Timestamp) -> Timestamp {
        self.sound.charged_at(state, now)
    }

    fn recovery(&self) -> Option<Recovery> {
        self.sound.recovery()
    }

    fn record(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
        before: Option<&Reservation>,
    ) -> Reservation {
        let sound = self.sound.record(state, now, cost, before);
        match before {
            Some(before) if self.is(Wrong::ExtendsWhatIsPast) => {
                let counts = before.counts.saturating_add(cost);
                Reservation { timestamp: before.timestamp, counts, ..sound }
            }
            _ if self.is(Wrong::SettlesByItsOwnNumbers) => Reservation { terms: [0; 3], ..sound },
            _ => sound,
        }
    }

    fn settle(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        match reservation.cost.checked_sub(cost) {
            Some(back) if self.is(Wrong::SettlesWhatIsPast) => {
                Some(self.refund(state, now, back)?.costing(cost))
            }
            None if self.is(Wrong::SettlesTheWhole) => self.force(state, now, cost),
            _ => self.sound.settle(state, now, reservation, cost),
        }
    }

    fn renew(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        of: &Reservation,
    ) -> Step<Self::State> {
        let refunded =
            self.refund(state, now, of.cost).filter(|_| self.is(Wrong::RenewsAndGivesBack));
        refunded.unwrap_or_else(|| self.sound.renew(state, now, of))
    }

    fn metadata_bytes(&self) -> Option<usize> {
        self.is(Wrong::CountsMetadata).then_some(8)
    }

    fn annotate(&self, state: &mut Self::State, _: &[u8]) {
        if self.is(Wrong::CountsMetadata) {
            state.count = self.capacity();
        }
    }
}

impl InMemory for Window {
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        let forgets = self.is(Wrong::WritesNothingInPlace);
        let step = self.step(Some(state), now, cost);
        step.map(|next| *state = if forgets { *state } else { next })
    }

    fn to_compact(state: &Self::State) -> Option<Compact> {
        let span_us = state.ends_us - state.start.as_us();
        Some(Compact { at: state.start, span_us, extra: state.count })
    }

    fn from_compact(compact: Compact) -> Option<Self::State> {
        let Compact { at, span_us, extra } = compact;
        let ends_us = at.as_us().saturating_add(span_us);
        Some(FixedWindowState { start: at, count: extra, ends_us })
    }

    fn has_fast_step(&self) -> bool {
        self.is(Wrong::FastStepByTheEpoch)
    }

    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
        // Only in the even seconds since the epoch.
        let even = (now.as_us() / 1_000_000).is_multiple_of(2) && self.has_fast_step();
        let step = self.step(Self::from_compact(state).as_ref(), now, cost);
        even.then(|| step.map(|state| Self::to_compact(&state).expect("it is compact")))
    }
}

const CASES: u32 = 256;

/// Checks that each of these properties fails under its own law, and that the reported case fails
/// again.
fn check_is_caught<T: AlgorithmHarness>(by: &[Property]) {
    for property in by {
        let Err(failure) = try_same_algorithm::<T>(*property, CASES) else {
            panic!("{property:?} does not catch {}", std::any::type_name::<T>())
        };
        assert_eq!(failure.law, property.law(), "{failure}");
        let text = failure.case;
        let again = std::panic::catch_unwind(|| algorithm_regression::<T>(*property, &text));
        assert!(again.is_err(), "{property:?} holds on the case\n{text}");
        algorithm_regression::<Nothing>(*property, &text);
    }
}

#[test]
fn the_sound_algorithm_keeps_every_law_on_the_same_walks() {
    for property in Property::ALL {
        let outcome = try_same_algorithm::<Nothing>(*property, CASES);
        assert!(outcome.is_ok(), "{}", outcome.expect_err("not kept"));
    }
}

#[test]
fn each_flaw_is_caught_by_the_properties_that_name_its_law() {
    check_is_caught::<OneTooMany>(&[
        Property::NeverAdmitsMoreThanItsBound,
        Property::WhatIsLeftIsWhatFits,
    ]);
    check_is_caught::<WaitsInMilliseconds>(&[Property::RetryAfterIsHonest]);
    check_is_caught::<ResetsLate>(&[Property::RetryAfterIsHonest]);
    check_is_caught::<ChargesDenials>(&[Property::ADenialChargesNothing]);
    check_is_caught::<OutlivesItself>(&[Property::ExpiredIsAbsent]);
    // No moment admits more than the limit here, but the window does.
    check_is_caught::<MintsWhenTimeGoesBack>(&[
        Property::TimeGoingBackMintsNothing,
        Property::NeverAdmitsMoreThanItsBound,
    ]);
    check_is_caught::<PanicsWhenTimeGoesBack>(&[
        Property::TimeGoingBackMintsNothing,
        Property::NeverPanics,
    ]);
    check_is_caught::<PeeksBeginWindows>(&[Property::CostZeroIsAPeek]);
    check_is_caught::<KeepsTheOldWindow>(&[Property::ChangingALimitIsSafe]);
    check_is_caught::<ForgivesTheOther>(&[Property::AnotherLimitForgivesNothing]);
    check_is_caught::<RefundsMore>(&[Property::RefundsAndForcedChargesAreExact]);
    check_is_caught::<RefundsMoreBehind>(&[Property::RefundsAndForcedChargesAreExact]);
    check_is_caught::<WritesNothingInPlace>(&[Property::ShortcutsAgreeWithTheStep]);
    check_is_caught::<FastStepByTheEpoch>(&[Property::ShortcutsAgreeWithTheStep]);
    check_is_caught::<SettlesWhatIsPast>(&[Property::AReservationIsSettledOnce]);
    check_is_caught::<SettlesByItsOwnNumbers>(&[Property::SettlementsCreateNothing]);
    check_is_caught::<ExtendsWhatIsPast>(&[Property::SettlementsCreateNothing]);
    check_is_caught::<SettlesTheWhole>(&[Property::AReservationIsSettledOnce]);
    check_is_caught::<HasOneMore>(&[Property::WhatIsLeftIsWhatFits]);
    check_is_caught::<NeverExpires>(&[Property::EntriesAndMetadataAreAccountedFor]);
    check_is_caught::<RenewsAndGivesBack>(&[Property::AReservationIsSettledOnce]);
    check_is_caught::<CountsMetadata>(&[Property::EntriesAndMetadataAreAccountedFor]);
}

/// Its case need not fail again.
#[test]
fn hidden_state_is_caught_by_a_step_depends_on_nothing_else() {
    let outcome = try_same_algorithm::<Remembers>(Property::AStepDependsOnNothingElse, CASES);
    let failure = outcome.expect_err("it remembers");
    assert_eq!(failure.law, Property::AStepDependsOnNothingElse.law());
}
