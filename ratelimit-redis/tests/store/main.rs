//! The stores on real servers, all in one program, so that the shared parts compile once.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;
#[allow(dead_code, unreachable_pub, reason = "of an example, which runs by itself")]
#[path = "../../examples/weekend_budget.rs"]
mod weekend_budget;

mod agreement;
mod cas;
mod cross_slot;
mod flat;
mod foreign_states;
mod heal;
mod health;
mod in_part;
mod late_charges;
mod merged_drops;
mod merged_faults;
mod merging;
mod multi;
mod own_algorithm;
mod own_connection;
mod own_twin;
mod read_only;
mod refusals;
mod reservations;
mod same_state;
mod server;
mod split_slots;
mod wrong_twin;
