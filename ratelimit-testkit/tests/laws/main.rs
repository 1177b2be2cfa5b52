//! The laws, held against sound stores and wrong ones. One program, because what the tests have in common is compiled once.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

#[macro_use]
mod common;

mod algorithms;
mod capabilities;
mod increment_first;
mod linearizability;
mod oracle;
mod regression;
mod wrong_algorithm_stores;
mod wrong_algorithms;
mod wrong_stores;
