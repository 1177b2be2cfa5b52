//! An algorithm of a user's own, by calendar months: the laws pass it, and each catches a twin that
//! is wrong on some days only.

use std::sync::LazyLock;

use ratelimit_core::algorithm::{InMemory, MaybeStep, Step, Write};
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, Decision, Timestamp};
use ratelimit_testkit::AlgorithmProperty as Property;
use ratelimit_testkit::{AlgorithmHarness, Instance, algorithm_conformance, try_same_algorithm};

const DAY_US: u64 = 86_400_000_000;

/// What is wrong with a twin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// February always has 28 days.
    NoLeapYears,
    /// 2100 is a leap year.
    NoCenturies,
    AprilHas31Days,
    /// A state counts again in the same month of the next year.
    IgnoresTheYear,
    /// A settlement gives back in this month what was charged in the last one.
    SettlesAcross,
    /// A state expires 30 days after the charge, if that is not the end of its month.
    ExpiresEarly,
    /// A wait ends after 30 days.
    WaitsThirtyDays,
}

/// So much per calendar month, in UTC.
#[derive(Clone, Debug)]
struct PerMonth {
    most: u64,
    wrong: Wrong,
}

/// A month, and what was charged in it.
#[derive(Clone, Debug)]
struct Spent {
    begin_us: u64,
    end_us: u64,
    amount: u64,
}

/// The days from the epoch to the first of this month, of months since the year 0.
///
/// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": years begin in March, so
/// that the leap day is last.
const fn days_until(month: u64) -> u64 {
    let from_march = month - 2;
    let (year, month) = (from_march / 12, from_march % 12);
    let leap_days = year / 4 - year / 100 + year / 400;
    year * 365 + leap_days + (153 * month + 2) / 5 - 719_468
}

/// The month of a day since the epoch, in months since the year 0.
fn month_of(day: u64) -> u64 {
    // No month is longer than 31 days or, on average, than 30.5.
    let least = 1_970 * 12 + day / 31;
    (least..least + 60).find(|month| days_until(month + 1) > day).unwrap_or(least)
}

impl PerMonth {
    /// The beginning and the end of the month of this time.
    fn month(&self, now: Timestamp) -> (u64, u64) {
        let day = now.as_us() / DAY_US;
        let month = month_of(day);
        let (begin, mut end) = (days_until(month), days_until(month + 1));
        match (self.wrong, month % 12) {
            (Wrong::NoLeapYears, 1) if day < begin + 28 => end = begin + 28,
            (Wrong::NoCenturies, 1) if month / 12 == 2_100 => end += 1,
            (Wrong::AprilHas31Days, 3) => end += 1,
            _ => {}
        }
        (begin * DAY_US, end * DAY_US)
    }

    /// What was charged in the month of this time, or in a later one that the state knows.
    fn spending_at(&self, state: Option<&Spent>, now: Timestamp) -> Spent {
        let (begin_us, end_us) = self.month(now);
        let counts = |spent: &&Spent| {
            let again = |spent: &Spent| {
                let of = |us: u64| month_of(us / DAY_US) % 12;
                self.wrong == Wrong::IgnoresTheYear && of(spent.begin_us) == of(now.as_us())
            };
            now.as_us() < spent.end_us || again(spent)
        };
        match state.filter(counts) {
            Some(spent) if now.as_us() < spent.end_us => spent.clone(),
            Some(spent) => Spent { begin_us, end_us, amount: spent.amount },
            None => Spent { begin_us, end_us, amount: 0 },
        }
    }

    /// The decision for a request that leaves this, and the write of it if it is written.
    fn step_to(
        &self,
        spent: Spent,
        now: Timestamp,
        (cost, allowed, writes): (u64, bool, bool),
    ) -> Step<Spent> {
        let remaining = self.most.saturating_sub(spent.amount);
        let until_us = spent.end_us - now.as_us();
        let wait_us = if self.wrong == Wrong::WaitsThirtyDays {
            (spent.begin_us + 30 * DAY_US).saturating_sub(now.as_us()).max(1)
        } else {
            until_us
        };
        let back_us = if spent.amount > 0 { until_us } else { 0 };
        let retry_after_us = if allowed { Some(0) } else { (cost <= self.most).then_some(wait_us) };
        let decision = Decision {
            allowed,
            cost,
            limit: self.most,
            remaining,
            retry_after_us,
            replenish_after_us: back_us,
            reset_after_us: back_us,
        };
        let early = self.wrong == Wrong::ExpiresEarly;
        let kept_us = if early { until_us.min(30 * DAY_US) } else { until_us };
        let expires = Timestamp::saturating_from_us(now.as_us() + kept_us);
        let write = if writes { Write::Put { state: spent, expires } } else { Write::Keep };
        Step { decision, write }
    }
}

impl Algorithm for PerMonth {
    type State = Spent;

    fn capacity(&self) -> u64 {
        self.most
    }

    fn step(&self, state: Option<&Spent>, now: Timestamp, cost: u64) -> Step<Spent> {
        let spent = self.spending_at(state, now);
        let allowed = cost <= self.most.saturating_sub(spent.amount);
        let charged = if allowed { cost } else { 0 };
        let after = Spent { amount: spent.amount + charged, ..spent };
        self.step_to(after, now, (cost, allowed, charged > 0))
    }

    fn reservation_us(&self) -> Option<u64> {
        Some(Reservation::LIFE_US)
    }

    fn charged_at(&self, state: Option<&Spent>, now: Timestamp) -> Timestamp {
        let begin_us = self.spending_at(state, now).begin_us;
        Timestamp::saturating_from_us(begin_us.max(now.as_us()))
    }

    fn settle(
        &self,
        state: Option<&Spent>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        let spent = self.spending_at(state, now);
        let counts = reservation.timestamp.as_us() >= spent.begin_us;
        let back = reservation.cost.saturating_sub(cost);
        let back = if counts || self.wrong == Wrong::SettlesAcross { back } else { 0 };
        let more = cost.saturating_sub(reservation.cost);
        let amount = spent.amount.saturating_sub(back);
        let amount = amount.saturating_add(more).min(self.most.max(amount));
        let writes = amount != spent.amount;
        Some(self.step_to(Spent { amount, ..spent }, now, (cost, true, writes)))
    }
}

impl InMemory for PerMonth {}

/// The first days of all months, counted from the epoch by the rule of the calendar.
static FIRST_DAYS: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let mut days = vec![0];
    for year in 1970_u64..2113 {
        let leap =
            year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        for length in [31, 28 + u64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            days.push(days[days.len() - 1] + length);
        }
    }
    days
});

/// Months are unkind where their lengths differ: in leap years, in others, and in 2100, which is
/// none.
fn unkind_times() -> Vec<Timestamp> {
    let of_year = |year: usize| (year - 1970) * 12..=(year - 1969) * 12;
    let months = of_year(2027).chain(of_year(2028)).chain(of_year(2100));
    let days =
        months.map(|month| FIRST_DAYS[month]).flat_map(|first| [first - 1, first, first + 1]);
    days.map(|day| Timestamp::saturating_from_us(day * DAY_US)).collect()
}

/// Writes a harness of each twin.
macro_rules! twins {
    ($($wrong:ident),+) => { $(
        struct $wrong;

        impl AlgorithmHarness for $wrong {
            type Algorithm = PerMonth;

            const CASES: u32 = 128;

            fn limits() -> Vec<Instance<PerMonth>> {
                let limit = |most: u64| Instance::new(format!("{most} per month"), PerMonth { most, wrong: Wrong::$wrong });
                vec![limit(1), limit(7), limit(1_000)]
            }

            fn unkind_times() -> Vec<Timestamp> {
                unkind_times()
            }

            /// No month of the calendar admits more than the limit.
            fn excess(limit: &PerMonth, admitted: &[(Timestamp, u64)], at: Timestamp, cost: u64) -> Option<String> {
                let month = |at: Timestamp| FIRST_DAYS.partition_point(|day| day * DAY_US <= at.as_us());
                let same = admitted.iter().filter(|(earlier, _)| month(*earlier) == month(at));
                let total = same.map(|(_, cost)| cost).sum::<u64>() + cost;
                (total > limit.most).then(|| format!("{total} in one month"))
            }

            fn recovers_within_us(_: &PerMonth) -> Option<u64> {
                Some(31 * DAY_US)
            }
        }
    )+ };
}

twins!(
    Nothing,
    NoLeapYears,
    NoCenturies,
    AprilHas31Days,
    IgnoresTheYear,
    SettlesAcross,
    ExpiresEarly,
    WaitsThirtyDays
);

algorithm_conformance!(sound, Nothing);

fn check_is_caught<T: AlgorithmHarness>(by: Property) {
    let failure = try_same_algorithm::<T>(by, T::CASES).expect_err(std::any::type_name::<T>());
    assert_eq!(failure.law, by.law(), "{failure}");
}

#[test]
fn a_calendar_that_is_wrong_on_some_days_is_caught_there() {
    check_is_caught::<NoLeapYears>(Property::NeverAdmitsMoreThanItsBound);
    check_is_caught::<NoCenturies>(Property::NeverAdmitsMoreThanItsBound);
    check_is_caught::<AprilHas31Days>(Property::NeverAdmitsMoreThanItsBound);
    check_is_caught::<IgnoresTheYear>(Property::ExpiredIsAbsent);
    check_is_caught::<SettlesAcross>(Property::AReservationIsSettledOnce);
    check_is_caught::<ExpiresEarly>(Property::ExpiredIsAbsent);
    check_is_caught::<WaitsThirtyDays>(Property::RetryAfterIsHonest);
}
