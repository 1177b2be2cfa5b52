//! The laws, held against sound stores and wrong ones. One program, because what the tests have in common is compiled once.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod admissions;
mod algorithms;
mod budgets;
mod capabilities;
mod documents;
mod failed_once;
mod linearizability;
mod oracle;
mod reservations;
mod wrong;
mod wrong_algorithms;
mod wrong_stores;
