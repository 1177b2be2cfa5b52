//! Laws 5 and 9: what is kept lasts as long as it matters by the store's clock, and no longer.

use std::time::Duration;

use ratelimit_core::store::{Now, Op, Reservation};
use ratelimit_core::{Algorithm, ReservationId, Timestamp};

use crate::capability::Capability;
use crate::harness::StoreClock;
use crate::law::{LawResult, ensure};
use crate::laws::Subject;
use crate::trace::made::{Instance, limit};
use crate::trace::{Ask, Trace, TraceRequest};

/// How much longer than needed a store may keep a state.
const SLACK: Duration = Duration::from_secs(2);

/// For how long a test may stop between a decision and a look.
const STOPS_US: u64 = 20_000_000;

/// The part of the hour of grace for which what was written at a given time must be kept, however
/// slow the test is.
const GRACE: Duration = Duration::from_micros(Now::PADDING_US / 16 * 15);

/// Law 9: everything that is written disappears by itself soon after it stops mattering:
/// reservations too, which are known for as long as they can be settled. What was written at a
/// given time is kept for an hour longer.
pub(crate) async fn nothing_leaks<A: Algorithm>(
    subject: &Subject<'_, A>,
    trace: &Trace<A>,
) -> LawResult {
    // Covers both rounds: the states of the first are still there in the second.
    let mut longest_us = 0;
    for (by_own_clock, padding_us) in [(true, 0), (false, Now::PADDING_US)] {
        let before = if by_own_clock { Vec::new() } else { subject.store.leaks(GRACE).await };
        for request in &trace.requests {
            let mut request = request.clone();
            // The two rounds run on different clocks, so their keys must differ.
            request.asks.iter_mut().for_each(|ask| ask.key.push_str(&padding_us.to_string()));
            let now = if by_own_clock { Now::Store } else { Now::At(request.at) };
            // A refused request has charged nothing.
            let Ok(verdict) = subject.answer(&trace.limits, &request, now).await? else { continue };
            for (ask, decision) in request.asks.iter().zip(verdict.decisions()) {
                let life_us = trace.limits[ask.limit].algorithm().reservation_us();
                let life_us = request.id.map_or(0, |_| life_us.unwrap_or(Reservation::LIFE_US));
                longest_us = longest_us.max(decision.reset_after_us.max(life_us) + padding_us);
            }
        }
        // One that decides by its own clock alone promises no grace.
        let promises = subject.able.can(Capability::PastTimes);
        if promises && !by_own_clock && before.is_empty() {
            keeps_for_the_grace(subject, trace, padding_us).await?;
        }
        let within = Duration::from_micros(longest_us) + SLACK;
        let leaks = subject.store.leaks(within).await;
        ensure(leaks.is_empty(), || {
            format!("after {within:?} nothing can matter, and still there is: {}", leaks.join("; "))
        })?;
    }
    Ok(())
}

/// Fails if a state of a trace at given times is there, and gone before it stops mattering and most
/// of the hour of grace after that has passed. Nothing else is kept so long.
async fn keeps_for_the_grace<A: Algorithm>(
    subject: &Subject<'_, A>,
    trace: &Trace<A>,
    padding_us: u64,
) -> LawResult {
    let (at, mut used) = (trace.latest(), None::<(Ask, u64)>);
    for ask in trace.everybody() {
        let ask = Ask { key: format!("{}{padding_us}", ask.key), ..ask };
        let peek = TraceRequest::one(at, Op::Peek, ask.clone());
        let got = subject.ask(&trace.limits, &peek, Now::At(at)).await?;
        let reset_us = got.summary().reset_after_us;
        if reset_us > used.as_ref().map_or(0, |(_, most_us)| *most_us) {
            used = Some((ask, reset_us));
        }
    }
    let Some((used, matters_us)) = used else { return Ok(()) };
    let within = Duration::from_micros(matters_us) + GRACE;
    if subject.store.leaks(Duration::ZERO).await.is_empty()
        || !subject.store.leaks(within).await.is_empty()
    {
        return Ok(());
    }
    Err(format!(
        "{:?} was charged until {at}, a given time, and matters for {matters_us} µs more; the store keeps nothing for {within:?}: \
         it has to keep the state for an hour after its expiry, so that a slow run loses none",
        used.key
    ))
}

/// Law 5 on a clock that runs: what is charged at the store's own time, or reserved, stays until it
/// stops mattering. (A clock that is set shows it in every trace. A given time keeps states for an
/// hour longer, and cannot show it.)
pub(crate) async fn nothing_vanishes<A: Algorithm>(
    subject: &Subject<'_, A>,
    instance: Instance<A>,
    reserves: bool,
) -> LawResult {
    let real = matches!(subject.store.clock(), StoreClock::Real);
    let limits = [limit("kept", instance)];
    let life_us = limits[0].reservation_us().filter(|_| reserves);
    if !real || (reserves && life_us.is_none()) {
        return Ok(());
    }
    let ask = Ask { limit: 0, key: "kept".to_owned(), cost: limits[0].algorithm().capacity() };
    let id = reserves.then_some(ReservationId::new(5));
    let request = TraceRequest { id, ..TraceRequest::one(Timestamp::ZERO, Op::Acquire, ask) };
    let verdict = subject.ask(&limits, &request, Now::Store).await?;
    let matters_us = verdict.summary().reset_after_us.max(life_us.unwrap_or(0));
    // A short time may pass while the test stops.
    let within = Duration::from_micros(matters_us.saturating_sub(STOPS_US));
    let short = matters_us < 3 * STOPS_US || subject.store.leaks(Duration::ZERO).await.is_empty();
    ensure(short || !subject.store.leaks(within).await.is_empty(), || {
        format!(
            "{request:?}, at the store's own time, matters for {matters_us} µs, and the store keeps nothing for {within:?}: what \
             it keeps vanishes too early"
        )
    })
}
