//! The examples, whose tests run here: as programs of their own, each would compile anew what
//! they share.

#![allow(dead_code, unreachable_pub, reason = "of examples, which are programs")]

#[path = "../../examples/outage.rs"]
pub(crate) mod outage;
