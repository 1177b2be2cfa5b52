//! The stores on real servers, all in one program, so that the shared parts compile once.

#![cfg(unix)]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod across_slots;
mod agreement;
mod calls;
mod cas;
mod dropped;
mod ends;
mod examples;
mod foreign;
mod given_clients;
mod heal;
mod health;
mod late_charges;
mod merged_drops;
mod merged_faults;
mod own;
mod own_numbers;
mod permissions;
mod records;
mod refusals;
mod repeats;
mod requests;
mod runtimes;
mod scripts;
mod stored_forms;
mod up_to;
