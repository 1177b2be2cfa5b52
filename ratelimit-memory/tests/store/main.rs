//! The memory store from outside. One program, because what the tests have in common is compiled
//! once.
#![cfg(not(loom))]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs, reason = "tests")]

mod allocations;
mod at_the_cap;
mod callers;
mod clocks;
mod common;
mod end_of_states;
mod examples;
mod expiry;
mod kinds;
mod linearizability;
mod neighbours;
mod numbers;
mod owned_reservations;
mod panics;
mod records;
mod requests;
mod reservations;
mod tables;
mod up_to;
