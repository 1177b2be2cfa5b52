//! The examples, whose tests run here: as programs of their own, each would compile anew what
//! they share.

#![allow(dead_code, unreachable_pub, reason = "of examples, which are programs")]

#[path = "../../examples/on_redis.rs"]
pub(crate) mod on_redis;
#[path = "../../examples/own_twin.rs"]
pub(crate) mod own_twin;
#[path = "../../examples/service_in_tests.rs"]
pub(crate) mod service_in_tests;
#[path = "../../examples/weekend_budget.rs"]
pub(crate) mod weekend_budget;
