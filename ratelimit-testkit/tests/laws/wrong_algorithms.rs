//! Every law of an algorithm catches an algorithm that breaks it, and the sound one passes on the same walks.

use std::sync::atomic::{AtomicU64, Ordering};

use ratelimit_core::algorithm::{Compact, InMemory, Step, Write, step_compact};
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, Decision, Timestamp};
use ratelimit_testkit::AlgorithmProperty as Property;
use ratelimit_testkit::{AlgorithmHarness, Instance, algorithm_regression, try_same_algorithm};

/// Writes the flaws of a window that begins with its first request, and a harness for each.
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
                    [(1, 3), (4, 7_000), (2, 300_000_000), (7, 300_000_000)]
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
                    // A stretch as long as a window touches at most two windows.
                    let since = Timestamp::saturating_from_us((at.as_us() + 1).saturating_sub(window.window_us));
                    let within = admitted.iter().filter(|(earlier, _)| *earlier >= since);
                    let total = within.map(|(_, cost)| cost).sum::<u64>() + cost;
                    (total > 2 * window.limit).then(|| format!("{total} in two windows"))
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
    /// It reports a reset one window after the last request.
    ResetsLate,
    /// It charges denials.
    ChargesDenials,
    /// An expired state still counts.
    OutlivesItself,
    /// A time before the window opens a new window.
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
    /// Every thousandth request is admitted for free.
    Remembers,
    /// An in-place step does not write.
    WritesNothingInPlace,
    /// A fast step counts from the epoch.
    FastStepByTheEpoch,
    /// A settlement returns charges that no longer count.
    SettlesWhatIsPast,
    /// A renewal refunds.
    RenewsAndGivesBack,
    /// Metadata fills the window.
    CountsMetadata,
}

/// A window that begins with its first request, with one of the flaws.
#[derive(Debug)]
#[allow(clippy::struct_field_names, reason = "the length of a window")]
struct Window {
    limit: u64,
    window_us: u64,
    wrong: Wrong,
    asked: AtomicU64,
}

#[derive(Clone, Debug)]
struct Count {
    start: Timestamp,
    window_us: u64,
    used: u64,
    entries: usize,
}

impl Window {
    fn new(wrong: Wrong, limit: u64, window_us: u64) -> Self {
        Self { limit, window_us, wrong, asked: AtomicU64::new(0) }
    }

    fn is(&self, wrong: Wrong) -> bool {
        self.wrong == wrong
    }

    fn window_us(&self, state: &Count) -> u64 {
        if self.is(Wrong::KeepsTheOldWindow) { state.window_us } else { self.window_us }
    }

    /// The window that contains a request.
    fn open<'s>(&self, state: Option<&'s Count>, now: Timestamp) -> Option<&'s Count> {
        let state = state?;
        let since_us = match self.wrong {
            Wrong::PanicsWhenTimeGoesBack => now.as_us() - state.start.as_us(),
            Wrong::MintsWhenTimeGoesBack => now.as_us().wrapping_sub(state.start.as_us()),
            _ => now.saturating_us_since(state.start),
        };
        let late_us = u64::from(self.is(Wrong::OutlivesItself));
        (since_us < self.window_us(state) + late_us).then_some(state)
    }

    fn end_us(&self, state: &Count) -> u64 {
        state.start.as_us() + self.window_us(state)
    }

    fn left(&self, state: Option<&Count>) -> u64 {
        self.limit.saturating_sub(state.map_or(0, |state| state.used))
    }

    fn decision_of(
        &self,
        state: Option<&Count>,
        now: Timestamp,
        cost: u64,
        allowed: bool,
    ) -> Decision {
        let wait_us = state.map_or(0, |state| self.end_us(state).saturating_sub(now.as_us()));
        let wait_us =
            if self.is(Wrong::WaitsInMilliseconds) { wait_us / 1_000 * 1_000 } else { wait_us };
        let never = cost > self.limit;
        let used = state.is_some_and(|state| state.used > 0);
        let late_us = if self.is(Wrong::ResetsLate) && used { 5 } else { 0 };
        Decision {
            allowed,
            cost,
            limit: self.limit,
            remaining: self.left(state),
            retry_after_us: match allowed {
                true => Some(0),
                false if never => None,
                false => Some(wait_us),
            },
            replenish_after_us: if used { wait_us } else { 0 },
            reset_after_us: if used { wait_us + late_us } else { 0 },
        }
    }

    /// The answer on this state, which stays.
    fn keeps(&self, open: Option<&Count>, now: Timestamp, cost: u64, allowed: bool) -> Step<Count> {
        Step { decision: self.decision_of(open, now, cost, allowed), write: Write::Keep }
    }

    /// The state with this many units used, and the answer.
    fn charged(&self, open: Option<&Count>, now: Timestamp, cost: u64, used: u64) -> Step<Count> {
        if used == 0 {
            let write = if open.is_some() { Write::Remove } else { Write::Keep };
            return Step { decision: self.decision_of(None, now, cost, true), write };
        }
        let (start, window_us) =
            open.map_or((now, self.window_us), |open| (open.start, open.window_us));
        let entries = open.map_or(0, |open| open.entries) + 1;
        let state = Count { start, window_us, used, entries };
        let expires = Timestamp::saturating_from_us(self.end_us(&state));
        let decision = self.decision_of(Some(&state), now, cost, true);
        Step { decision, write: Write::Put { state, expires } }
    }
}

impl Algorithm for Window {
    type State = Count;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn step(&self, state: Option<&Count>, now: Timestamp, cost: u64) -> Step<Count> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let open = self.open(state, now);
        let used = open.map_or(0, |open| open.used);
        let left = self.left(open) + u64::from(self.is(Wrong::OneTooMany));
        if self.is(Wrong::Remembers) && asked % 1_000 == 999 {
            return self.keeps(open, now, cost, true);
        }
        if cost == 0 && self.is(Wrong::PeeksBeginWindows) && open.is_none() {
            let state = Count { start: now, window_us: self.window_us, used: 0, entries: 0 };
            let expires = Timestamp::saturating_from_us(self.end_us(&state));
            let decision = self.decision_of(None, now, cost, true);
            return Step { decision, write: Write::Put { state, expires } };
        }
        if cost == 0 {
            return self.keeps(open, now, cost, true);
        }
        if cost <= left {
            return self.charged(open, now, cost, used + cost);
        }
        let denied = self.keeps(open, now, cost, false);
        if self.is(Wrong::ChargesDenials) && open.is_some() {
            return Step { write: self.charged(open, now, cost, self.limit).write, ..denied };
        }
        denied
    }

    fn refund(&self, state: Option<&Count>, now: Timestamp, cost: u64) -> Option<Step<Count>> {
        let open = self.open(state, now);
        let used = open.map_or(0, |open| open.used);
        let back =
            if self.is(Wrong::RefundsMore) && cost > 0 { cost.saturating_add(1) } else { cost };
        if used == 0 || cost == 0 {
            return Some(self.keeps(open, now, cost, true));
        }
        Some(self.charged(open, now, cost, used.saturating_sub(back)))
    }

    fn force(&self, state: Option<&Count>, now: Timestamp, cost: u64) -> Option<Step<Count>> {
        let open = self.open(state, now);
        let used = open.map_or(0, |open| open.used);
        if cost == 0 {
            return Some(self.keeps(open, now, cost, true));
        }
        let most = if self.is(Wrong::ForgivesTheOther) { self.limit } else { self.limit.max(used) };
        Some(self.charged(open, now, cost, used.saturating_add(cost).min(most)))
    }

    fn reservation_us(&self) -> Option<u64> {
        Some(Reservation::LIFE_US)
    }

    fn charged_at(&self, state: Option<&Count>, now: Timestamp) -> Timestamp {
        self.open(state, now).map_or(now, |open| open.start.max(now))
    }

    fn settle(
        &self,
        state: Option<&Count>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<Count>> {
        let open = self.open(state, now);
        let same = open.is_some_and(|open| open.start <= reservation.timestamp)
            || self.is(Wrong::SettlesWhatIsPast);
        let back = if same { reservation.cost.saturating_sub(cost) } else { 0 };
        let step = match (back, cost.saturating_sub(reservation.cost)) {
            (0, 0) => self.keeps(open, now, cost, true),
            (0, more) => self.force(state, now, more)?,
            (back, _) => self.refund(state, now, back)?,
        };
        Some(step.costing(cost))
    }

    fn renew(
        &self,
        state: Option<&Count>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<Count> {
        match self.wrong {
            Wrong::RenewsAndGivesBack => {
                self.refund(state, now, reservation.cost).expect("there are refunds")
            }
            _ => Step { decision: self.step(state, now, 0).decision, write: Write::Keep },
        }
    }

    fn metadata_bytes(&self) -> Option<usize> {
        Some(8)
    }

    fn annotate(&self, state: &mut Count, _: &[u8]) {
        if self.is(Wrong::CountsMetadata) {
            state.used = self.limit;
        }
    }
}

impl InMemory for Window {
    fn step_in_place(&self, state: &mut Count, now: Timestamp, cost: u64) -> Step<()> {
        let Step { decision, write } = self.step(Some(state), now, cost);
        let forgets = self.is(Wrong::WritesNothingInPlace);
        Step {
            decision,
            write: write.map(|next| {
                if !forgets {
                    *state = next;
                }
            }),
        }
    }

    fn to_compact(state: &Count) -> Option<Compact> {
        Some(Compact { at: state.start, span_us: state.window_us, extra: state.used })
    }

    fn from_compact(compact: Compact) -> Option<Count> {
        let Compact { at, span_us, extra } = compact;
        Some(Count { start: at, window_us: span_us, used: extra, entries: 0 })
    }

    fn has_fast_step(&self) -> bool {
        self.is(Wrong::FastStepByTheEpoch)
    }

    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
        let Step { decision, write } = step_compact(self, Some(state), now, cost)?;
        // Only in the even seconds since the epoch.
        let even = (now.as_us() / 1_000_000).is_multiple_of(2);
        (even && self.is(Wrong::FastStepByTheEpoch)).then_some(Step { decision, write })
    }

    fn entries_in(state: &Count) -> usize {
        state.entries
    }

    fn entries_per_step(&self) -> usize {
        1
    }
}

const CASES: u32 = 256;

/// Checks that each of these properties fails under its own law, and that the reported case fails again.
fn caught<T: AlgorithmHarness>(by: &[Property]) {
    for property in by {
        let Err(failure) = try_same_algorithm::<T>(*property, CASES) else {
            panic!("{property:?} does not catch {}", std::any::type_name::<T>())
        };
        assert_eq!(failure.violation.law, property.law(), "{failure}");
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
    caught::<OneTooMany>(&[Property::NeverAdmitsMoreThanItsBound, Property::WhatIsLeftIsWhatFits]);
    caught::<WaitsInMilliseconds>(&[Property::RetryAfterIsHonest]);
    caught::<ResetsLate>(&[Property::RetryAfterIsHonest]);
    caught::<ChargesDenials>(&[Property::ADenialChargesNothing]);
    caught::<OutlivesItself>(&[Property::ExpiredIsAbsent]);
    caught::<MintsWhenTimeGoesBack>(&[Property::TimeGoingBackMintsNothing]);
    caught::<PanicsWhenTimeGoesBack>(&[Property::TimeGoingBackMintsNothing, Property::NeverPanics]);
    caught::<PeeksBeginWindows>(&[Property::CostZeroIsAPeek]);
    caught::<KeepsTheOldWindow>(&[Property::ChangingALimitIsSafe]);
    caught::<ForgivesTheOther>(&[Property::AnotherLimitForgivesNothing]);
    caught::<RefundsMore>(&[Property::RefundsAndForcedChargesAreExact]);
    caught::<WritesNothingInPlace>(&[Property::ShortcutsAgreeWithTheStep]);
    caught::<FastStepByTheEpoch>(&[Property::ShortcutsAgreeWithTheStep]);
    caught::<SettlesWhatIsPast>(&[Property::AReservationIsSettledOnce]);
    caught::<RenewsAndGivesBack>(&[Property::AReservationIsSettledOnce]);
    caught::<CountsMetadata>(&[Property::EntriesAndMetadataAreAccountedFor]);
}

/// Its case need not fail again.
#[test]
fn hidden_state_is_caught_by_a_step_depends_on_nothing_else() {
    let outcome = try_same_algorithm::<Remembers>(Property::AStepDependsOnNothingElse, CASES);
    let failure = outcome.expect_err("it remembers");
    assert_eq!(failure.violation.law, Property::AStepDependsOnNothingElse.law());
}
