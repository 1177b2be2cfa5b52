//! Rate limits in front of an HTTP service.
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

use std::future::Future;
use std::pin::Pin;

mod address;
#[cfg(feature = "tokio")]
mod body;
mod caller;
mod config;
mod fields;
#[cfg(feature = "grpc")]
mod grpc;
mod identify;
mod layer;
mod rejection;
#[cfg(feature = "tokio")]
mod reservation;
mod service;
#[cfg(feature = "tokio")]
mod wait;

pub use address::{ClientAddress, PeerAddress, ProxyHeader};
#[cfg(feature = "tokio")]
pub use body::SettledBody;
pub use config::{Choice, OnStoreError};
pub use fields::advice::{Advice, AdvisedLimit, AdvisedPolicy};
pub use fields::{Draft, Fields, Unit, XRateLimit};
#[cfg(feature = "grpc")]
pub use grpc::Grpc;
#[cfg(feature = "axum")]
pub use identify::axum::{PathParam, matched_route, path_param};
pub use identify::{
    Extension, Found, FromAsyncFn, FromFn, Header, Identified, Identifier, Identify, IdentifyError,
    Optional, extension, from_async_fn, from_fn, header, method, optional,
};
pub use layer::{Awaited, Immediate, RateLimitLayer};
pub use rejection::{Answer, ProblemJson, Reason, Rejection};
#[cfg(feature = "tokio")]
pub use reservation::{Charge, Meter, ReservationFuture, ReservationLayer, ReservationService};
pub use service::{Mode, RateLimitService, ResponseFuture};
#[cfg(feature = "tokio")]
pub use wait::{WaitError, WaitLayer, WaitService, WaitServiceError, Waiter};

/// A future that is moved into another.
type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
