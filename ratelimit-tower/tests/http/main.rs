//! The layer in front of services: who is limited, by what, what clients receive, and what a
//! request costs.
#![cfg(all(feature = "axum", feature = "grpc", feature = "reload", feature = "tokio"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod examples;
mod grpc;
mod harness;
mod layer;
mod neighbours;
mod numbers;
mod readiness;
mod reloading;
#[cfg(unix)]
mod replicas;
mod reservations;
mod shown;
mod unheard;
