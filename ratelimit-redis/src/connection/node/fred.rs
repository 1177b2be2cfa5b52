//! A connection by the crate `fred`.
