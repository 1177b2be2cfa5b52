//! What the laws of the testkit do not say of the algorithms: limits and numbers that they do not
//! have, and what algorithms offer beside the step.

#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod calendars;
mod changed_limits;
mod fast_step;
mod recovery;
mod share;
mod stack;
