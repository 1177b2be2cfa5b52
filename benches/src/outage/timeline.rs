//! One outage in time: the answers of each tenth of a second, and when the circuit breaker changes.
//!
//! Each user sends twice as often as its limit allows, so that half of the requests are denied
//! while Redis decides. The fallback shares a limit between two nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::StatusCode;
use ratelimit_core::{Gcra, OnOutage};
use ratelimit_layers::BreakerState;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::measure::Fallible;
use crate::report::{BenchReport, digits};

use super::{CHOICES, HttpConnection, LimitedService, PATIENCE, micros, runtime};

/// The requests that are counted together.
const BIN: Duration = Duration::from_millis(100);
/// How often the state of the breaker is read.
const GLANCE: Duration = Duration::from_millis(1);

/// When Redis hangs, and how often users send.
#[derive(Clone, Copy)]
struct Timeline {
    users: u32,
    /// How often each user sends.
    every: Duration,
    /// How long each of these takes: the begin that is left out, until Redis hangs, until it
    /// answers again, and until the end.
    lengths: [Duration; 4],
}

/// An answer: when it came, its status, and how long it took.
struct Answer {
    at: Instant,
    status: StatusCode,
    taken: Duration,
}

/// What has changed, and what it is now.
type Event = (Instant, &'static str, &'static str);

async fn client(
    user: String,
    mut connection: HttpConnection,
    first: Duration,
    every: Duration,
    over: Arc<AtomicBool>,
) -> Fallible<Vec<Answer>> {
    sleep(first).await; // not all users at once
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut answers = Vec::new();
    while !over.load(Ordering::Relaxed) {
        ticks.tick().await;
        let (status, taken) = connection.ask(&user).await?;
        answers.push(Answer { at: Instant::now(), status, taken });
    }
    Ok(answers)
}

const fn name(state: BreakerState) -> &'static str {
    match state {
        BreakerState::Closed => "closed",
        BreakerState::HalfOpen => "half-open",
        _ => "open",
    }
}

/// The answers and events of one outage, from this moment on.
async fn measure(choice: OnOutage, plan: Timeline) -> Fallible<(Instant, Vec<Answer>, Vec<Event>)> {
    let rate = 500 / u32::try_from(plan.every.as_millis())?;
    let limit = Gcra::per_second(rate.into()).burst(10).build()?;
    let service = LimitedService::start(choice, limit).await?;
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for nth in 0..plan.users {
        let connection = HttpConnection::open(service.address).await?;
        let (first, over) = (plan.every * nth / plan.users, Arc::clone(&over));
        clients.spawn(client(format!("user {nth}"), connection, first, plan.every, over));
    }
    let [unseen, up, hung, after] = plan.lengths;
    let mut events = Vec::new();
    let mut state = BreakerState::Closed;
    let mut watch = async |length, events: &mut Vec<Event>, reached: fn(BreakerState) -> bool| {
        let begin = Instant::now();
        while begin.elapsed() < length || !reached(state) {
            if begin.elapsed() > length + PATIENCE {
                return Err(format!("the breaker remains {state}"));
            }
            let before = std::mem::replace(&mut state, service.fallback.breaker());
            if state != before {
                events.push((Instant::now(), "breaker", name(state)));
            }
            sleep(GLANCE).await;
        }
        Ok(())
    };
    watch(unseen, &mut Vec::new(), |_| true).await?;
    let begin = Instant::now();
    watch(up, &mut events, |_| true).await?;
    tokio::task::block_in_place(|| service.redis.pause())?;
    events.push((Instant::now(), "redis", "hangs"));
    watch(hung, &mut events, |state| state != BreakerState::Closed).await?;
    events.push((Instant::now(), "redis", "answers"));
    tokio::task::block_in_place(|| service.redis.resume())?;
    watch(after, &mut events, |state| state == BreakerState::Closed).await?;
    over.store(true, Ordering::Relaxed);
    let mut answers = Vec::new();
    while let Some(ended) = clients.join_next().await {
        answers.extend(ended??);
    }
    Ok((begin, answers, events))
}

/// Measures each choice.
pub(super) fn run(report: &mut BenchReport) -> Fallible {
    let lengths = [1, 2, 3, 3].map(Duration::from_secs);
    let plan = Timeline { users: 20, every: Duration::from_millis(10), lengths };
    println!(
        "One outage per choice, the answers of each {BIN:?}: {} users send one request per {:?} each,\n\
         and may send half of that.",
        plan.users, plan.every
    );
    for choice in CHOICES {
        let (begin, answers, events) = runtime()?.block_on(measure(choice, plan))?;
        for (at, what, state) in events {
            report.row(&[
                ("choice", choice.name().into()),
                ("at_ms", (micros(at - begin) / 1_000).into()),
                ("what", what.into()),
                ("state", state.into()),
            ])?;
        }
        let bins = plan.lengths[1..].iter().sum::<Duration>().as_millis() / BIN.as_millis();
        for bin in 0..u32::try_from(bins)? {
            let (from, to) = (begin + BIN * bin, begin + BIN * (bin + 1));
            let within = answers.iter().filter(|answer| (from..to).contains(&answer.at));
            let mut taken: Vec<_> = within.clone().map(|answer| answer.taken).collect();
            taken.sort_unstable();
            let with = |status| within.clone().filter(|answer| answer.status == status).count();
            let ms = |at: Option<&Duration>| digits(2, at.map_or(0.0, |at| at.as_secs_f64() * 1e3));
            report.row(&[
                ("choice", choice.name().into()),
                ("from_ms", (micros(BIN * bin) / 1_000).into()),
                ("admitted", with(StatusCode::OK).into()),
                ("denied", with(StatusCode::TOO_MANY_REQUESTS).into()),
                ("unavailable", with(StatusCode::SERVICE_UNAVAILABLE).into()),
                ("p99_ms", ms(taken.get(taken.len().saturating_sub(1) * 99 / 100))),
                ("longest_ms", ms(taken.last())),
            ])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_opens_the_breaker_and_its_end_closes_it() -> Fallible {
        let lengths = [0, 20, 20, 20].map(Duration::from_millis);
        let plan = Timeline { users: 8, every: Duration::from_millis(2), lengths };
        let (_, answers, events) = runtime()?.block_on(measure(OnOutage::Closed, plan))?;
        let told: Vec<_> = events.iter().map(|(_, what, state)| (*what, *state)).collect();
        assert_eq!(told.first(), Some(&("redis", "hangs")));
        assert!(told.contains(&("breaker", "open")), "{told:?}");
        assert_eq!(told.last(), Some(&("breaker", "closed")), "{told:?}");
        let unavailable = |answer: &&Answer| answer.status == StatusCode::SERVICE_UNAVAILABLE;
        assert!(answers.iter().any(|answer| unavailable(&answer)));
        Ok(())
    }
}
