//! The examples, whose tests run here: as programs of their own, each would compile anew what
//! they share.

#![allow(dead_code, unreachable_pub, reason = "of examples, which are programs")]

#[path = "../../examples/given_clock.rs"]
pub(crate) mod given_clock;
#[path = "../../examples/job_queue.rs"]
pub(crate) mod job_queue;
#[path = "../../examples/login.rs"]
pub(crate) mod login;
#[path = "../../examples/policy_document.rs"]
pub(crate) mod policy_document;
#[path = "../../examples/reservations.rs"]
pub(crate) mod reservations;
#[path = "../../examples/several_limits.rs"]
pub(crate) mod several_limits;
#[path = "../../examples/smallest.rs"]
pub(crate) mod smallest;
