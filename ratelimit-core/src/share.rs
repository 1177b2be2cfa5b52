//! [`Share`]: the part of a limit that one of several nodes enforces by itself.

use core::num::NonZeroU64;

use alloc::format;

use crate::algorithms::Algorithm;
use crate::builder::FromRate;
use crate::error::ConfigError;
use crate::rate::Rate;

/// An algorithm that several nodes can enforce without each other, each by its share.
///
/// # Contract
///
/// In a span of any length, `nodes` independent shares of one key together admit at most what the
/// algorithm by itself may admit in a span of that length. Where the numbers cannot be divided
/// exactly, each share is rounded down.
///
/// A [`SlidingCounter`](crate::SlidingCounter) is excepted: each share rounds what counts of its
/// previous window down, so that all of them together may admit up to `nodes` − 1 more. Among 100
/// nodes, 100/s admits 200 in 2 µs at the boundary of two windows, where the limit by itself admits
/// 101.
/// [`SlidingLog`](crate::SlidingLog) and [`Gcra`](crate::Gcra) keep the contract.
///
/// Buckets divide the burst, rounded down, and the rate, exactly: 10/s among 4 nodes is 5/2s.
/// Windows and leases divide their count, rounded down; so does every limit its debt. A
/// [`Stack`](crate::Stack) divides each of its limits. The share of a limit at a rate of 0 is the
/// limit.
pub trait Share: Algorithm + Sized {
    /// The share of one of `nodes` nodes.
    ///
    /// # Errors
    /// The share would admit nothing, or needs numbers too large to stay exact.
    fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError>;
}

/// A capacity, divided and rounded down.
fn part(capacity: u64, nodes: NonZeroU64) -> Result<u64, ConfigError> {
    match capacity / nodes {
        0 if capacity > 0 => Err(ConfigError::new(format!(
            "a limit of {capacity} cannot be shared by {nodes} nodes; choose \"open\" or \"closed\", fewer nodes, or let \
             each node admit at least one (Fallback::builder().at_least_one())"
        ))),
        part => Ok(part),
    }
}

/// The rate of a share, divided exactly: by its count if that is a multiple, otherwise by a longer
/// period.
fn divide_rate(rate: Rate, nodes: NonZeroU64) -> Result<Rate, ConfigError> {
    match rate.count() % nodes {
        0 => Rate::per_us(rate.count() / nodes, rate.period_us()),
        _ => Rate::per_us(rate.count(), rate.period_us().saturating_mul(nodes.get())),
    }
}

/// The rate of a share of a window, whose length stays.
pub(crate) fn window(count: u64, window_us: u64, nodes: NonZeroU64) -> Result<Rate, ConfigError> {
    Rate::per_us(part(count, nodes)?, window_us)
}

impl<A: FromRate> Share for A {
    fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError> {
        let debt = (self.debt() > 0).then(|| self.debt() / nodes);
        match self.to_burst() {
            None => self.with_count(part(self.capacity(), nodes)?, debt),
            Some(burst) => {
                let burst = part(burst, nodes)?;
                Self::from_rate(divide_rate(self.to_rate(), nodes)?, Some(burst), debt)
            }
        }
    }
}
