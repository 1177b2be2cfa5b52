//! What a layer adds to an HTTP request: ours in memory beside `tower_governor`, in turns in one run.
//!
//! A request goes through each layer to a service that answers at once. Each round also measures the request without a layer
//! and subtracts its time, which leaves the time of the layer alone. Both layers identify the caller by axum's `ConnectInfo`,
//! and the requests come from a thousand addresses in a fixed order.

use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, Ready, ready};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use clap::Args;
use http::{Request, Response, StatusCode};
use ratelimit_core::{Gcra, Limits, Policy, Rate, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, Fields, RateLimitLayer};
use serde::Serialize;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_layer::Layer;
use tower_service::Service;

use crate::measure::{Samples, median, thread_time};
use crate::report::Report;
use crate::table::rounded;

/// How long to measure, and where to write what was measured.
#[derive(Args)]
pub(crate) struct Options {
    /// Fewer rounds, and less steady.
    #[arg(long)]
    quick: bool,
    /// Also write one JSON line per measurement to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Answers at once.
#[derive(Clone)]
struct Answers;

impl Service<Request<Body>> for Answers {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}

/// Sends one request of this caller, and tells the status.
pub(crate) type Sender = Box<dyn FnMut(SocketAddr) -> Option<StatusCode>>;

fn through<S>(mut service: S) -> Sender
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + 'static,
{
    Box::new(move |peer| {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(ConnectInfo(peer));
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(Ok(())) = service.poll_ready(&mut context) else { return None };
        match pin!(service.call(request)).poll(&mut context) {
            Poll::Ready(Ok(response)) => Some(response.status()),
            _ => None,
        }
    })
}

/// An outcome that every request of a measurement has, and the limit that makes it so.
struct Outcome {
    name: &'static str,
    burst: u32,
    seconds_per_token: u64,
    status: StatusCode,
}

/// Charges outlast the run, so every measured decision is about a caller that the store knows.
const OUTCOMES: [Outcome; 2] = [
    Outcome { name: "allowed", burst: 10_000_000, seconds_per_token: 1, status: StatusCode::OK },
    Outcome {
        name: "denied",
        burst: 1,
        seconds_per_token: 10_000,
        status: StatusCode::TOO_MANY_REQUESTS,
    },
];

fn ours(outcome: &Outcome, tells: bool, immediate: bool) -> Result<Sender, Box<dyn Error>> {
    let rate = Rate::new(1, Duration::from_secs(outcome.seconds_per_token))?;
    let gcra = Gcra::new(rate, u64::from(outcome.burst))?;
    let limits = Limits::builder().limit("burst", gcra).by(["ip"]).build()?;
    let limiter = RateLimiter::<_, Policy>::new(limits, MemoryStore::new());
    let fields = if tells { Fields::new() } else { Fields::new().without_draft() };
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()).fields(fields);
    Ok(if immediate {
        through(layer.immediate().layer(Answers))
    } else {
        through(layer.layer(Answers))
    })
}

fn governor(outcome: &Outcome, tells: bool) -> Result<Sender, Box<dyn Error>> {
    let mut config = GovernorConfigBuilder::default();
    let mut config = config.key_extractor(PeerIpKeyExtractor);
    config.per_second(outcome.seconds_per_token).burst_size(outcome.burst);
    let wrong = "tower_governor refuses the benchmark's limit";
    Ok(if tells {
        through(GovernorLayer::new(config.use_headers().finish().ok_or(wrong)?).layer(Answers))
    } else {
        through(GovernorLayer::new(config.finish().ok_or(wrong)?).layer(Answers))
    })
}

/// Requests of one kind, whose instructions callgrind counts.
pub(crate) struct Requests {
    send: Sender,
    status: StatusCode,
}

impl Requests {
    /// No layer.
    pub(crate) fn bare() -> Self {
        Self { send: through(Answers), status: StatusCode::OK }
    }

    /// Our layer, which admits or denies.
    pub(crate) fn ours(
        allowed: bool,
        tells: bool,
        immediate: bool,
    ) -> Result<Self, Box<dyn Error>> {
        let outcome = &OUTCOMES[usize::from(!allowed)];
        Ok(Self { send: ours(outcome, tells, immediate)?, status: outcome.status })
    }

    /// `tower_governor`, which admits.
    pub(crate) fn governor(tells: bool) -> Result<Self, Box<dyn Error>> {
        let outcome = &OUTCOMES[0];
        Ok(Self { send: governor(outcome, tells)?, status: outcome.status })
    }

    /// Sends this many by this function, after one that makes the state of the peer.
    pub(crate) fn repeat(
        mut self,
        peer: SocketAddr,
        count: usize,
        by: impl FnOnce(&mut Sender, SocketAddr, StatusCode, usize) -> usize,
    ) -> Result<(), Box<dyn Error>> {
        let _admitted = (self.send)(peer);
        let right = by(&mut self.send, peer, self.status, count);
        if right != count {
            return Err(
                format!("{right} of {count} requests were answered with {}", self.status).into()
            );
        }
        Ok(())
    }
}

/// One measurement, in the words of its JSON line.
#[derive(Serialize)]
struct Line {
    outcome: &'static str,
    fields: bool,
    mode: &'static str,
    ours_ns: f64,
    tower_governor_ns: f64,
    /// Our overhead over that of `tower_governor` in the same round, the median: below 1 we add less.
    overhead: f64,
}

const CALLERS: u16 = 1_000;

/// Measures every outcome, with fields and without.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut report = Report::new(options.json.as_deref())?;
    let rounds = if options.quick { 11 } else { 51 };
    println!(
        "What a layer adds to a request, in nanoseconds of CPU time: medians over {rounds} rounds in which"
    );
    println!(
        "all take turns. Below 1, ours adds less than tower_governor. Only ratios inside one run mean anything."
    );
    println!(
        "\n{:<8} {:<7} {:<10} {:>9} {:>15} {:>9}",
        "outcome", "fields", "mode", "ours ns", "tower_governor", "ours/peer"
    );
    for outcome in &OUTCOMES {
        for tells in [true, false] {
            for line in measure(outcome, tells, rounds)? {
                println!(
                    "{:<8} {:<7} {:<10} {:>9.1} {:>15.1} {:>9.2}",
                    line.outcome,
                    line.fields,
                    line.mode,
                    line.ours_ns,
                    line.tower_governor_ns,
                    line.overhead
                );
                report.line(&line)?;
            }
        }
    }
    Ok(())
}

// The turns of a round.
const BARE: usize = 0;
const IMMEDIATE: usize = 1;
const GOVERNOR: usize = 2;
const AWAITED: usize = 3;

fn measure(outcome: &Outcome, tells: bool, rounds: usize) -> Result<Vec<Line>, Box<dyn Error>> {
    let mut turns = [
        through(Answers),
        ours(outcome, tells, true)?,
        governor(outcome, tells)?,
        ours(outcome, tells, false)?,
    ];
    let callers: Vec<SocketAddr> = (0..CALLERS)
        .map(|nth| {
            let [high, low] = nth.to_be_bytes();
            SocketAddr::new(IpAddr::from([198, 51, high, low]), 4711)
        })
        .collect();
    // The first request of each caller makes its state, and is admitted.
    for send in &mut turns {
        for caller in &callers {
            let _admitted = send(*caller);
        }
    }
    let mut samples = Samples(Vec::new());
    for _ in 0..rounds {
        let mut round = Vec::new();
        for (turn, send) in turns.iter_mut().enumerate() {
            let wanted = if turn == BARE { StatusCode::OK } else { outcome.status };
            let begin = thread_time();
            let mut right = 0_u32;
            for _ in 0..20 {
                for caller in &callers {
                    right += u32::from(send(*caller) == Some(wanted));
                }
            }
            let taken = thread_time().saturating_sub(begin);
            if right != 20 * u32::from(CALLERS) {
                return Err(format!("turn {turn}: {right} requests were {}", outcome.name).into());
            }
            round.push(taken.as_secs_f64() * 1e9 / f64::from(right));
        }
        samples.0.push(round);
    }
    let added = |turn: usize| median(samples.0.iter().map(|round| round[turn] - round[BARE]));
    let modes = [("immediate", IMMEDIATE), ("awaited", AWAITED)];
    let line = |(mode, turn): (&'static str, usize)| {
        let overheads = samples.0.iter();
        let overhead = overheads.map(|r| (r[turn] - r[BARE]) / (r[GOVERNOR] - r[BARE]));
        Line {
            outcome: outcome.name,
            fields: tells,
            mode,
            ours_ns: rounded(added(turn), 10.0),
            tower_governor_ns: rounded(added(GOVERNOR), 10.0),
            overhead: rounded(median(overhead), 1000.0),
        }
    };
    Ok(modes.map(line).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layers_decide_as_each_outcome_says() -> Result<(), Box<dyn Error>> {
        for outcome in &OUTCOMES {
            for tells in [true, false] {
                assert_eq!(measure(outcome, tells, 1)?.len(), 2);
            }
        }
        Ok(())
    }
}
