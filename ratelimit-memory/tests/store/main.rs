//! The memory store from outside. One program, because what the tests have in common is compiled once.
#![cfg(not(loom))]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs, reason = "tests")]

mod at_the_cap;
mod check_each;
mod clocks;
mod common;
mod drift;
mod end_of_states;
mod expiry;
mod growth;
mod kinds;
mod limiter;
mod linearizability;
mod new_user;
mod own_algorithm;
mod owned_reservations;
mod panics;
mod past_counterexamples;
mod reservations;
mod snapshots;
mod stress;
