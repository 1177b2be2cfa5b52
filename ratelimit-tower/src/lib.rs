//! Rate limits in front of an HTTP service: a [tower] layer for axum, tonic and hyper, over any
//! [`Store`](ratelimit_core::Store).
//!
//! | type | for |
//! |---|---|
//! | [`RateLimitLayer`] | limiting the requests of a service |
//! | [`ClientAddress`], [`header`], [`extension`], [`Identify`] | identifying the caller |
//! | [`Choice`] | choosing the limits of each request |
//! | [`Decisions`] | what the limits decided, for handlers |
//! | [`Fields`], [`ModelFields`], [`BusyWait`], [`Answer`], [`ProblemJson`] | header fields and rejections |
//! | [`Grpc`] (feature `grpc`) | rejections for clients of tonic |
//! | [`Reserving`], [`Charge`], [`Meter`], [`Hold`], [`CostEstimates`], [`Settlements`] | costs that are known after the response |
//! | [`Waiter`], [`WaitLayer`] | waiting instead of refusing; clients of other services |
//! | [`Advice`] | reading another service's header fields, as a client |
//!
//! # Example
//!
//! A limited route of axum:
//!
//! ```no_run
//! use std::net::SocketAddr;
//!
//! use axum::{Router, routing::get};
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//! use ratelimit_tower::{ClientAddress, RateLimitLayer};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let limits = Limits::builder().limit("burst", Gcra::per_second(10).burst(20)).by(["ip"]).build()?;
//! let limiter = RateLimiter::new(limits, MemoryStore::new());
//! let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
//!
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! `RedisStore::connect(url).await?` in place of `MemoryStore::new()` shares the limits with all
//! other replicas.
//!
//! # Callers, choices, fields and answers
//!
//! ```
//! use std::sync::Arc;
//! use http::{Response, header::HeaderName};
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//! use ratelimit_tower::{
//!     BusyWait, Choice, ClientAddress, Fields, ProxyHeader, RateLimitLayer, Rejection, XRateLimit, header, optional,
//! };
//!
//! let limits = Limits::builder()
//!     .limit("address", Gcra::per_second(10).burst(20)).by(["ip"])
//!     .limit("key", Gcra::per_minute(600)).by(["key"])
//!     .build()?;
//! let limiter = Arc::new(RateLimiter::new(limits, MemoryStore::new()));
//! let choose = move |request: &http::request::Parts| match request.uri.path() {
//!     "/health" => Choice::Exempt,
//!     _ => Choice::Limited(limiter.clone()),
//! };
//! let layer = RateLimitLayer::choosing(choose)
//!     .by("ip", ClientAddress::behind(["10.0.0.0/8"], ProxyHeader::XForwardedFor)?)
//!     .by("key", optional(header(HeaderName::from_static("x-api-key"))))
//!     .fields(Fields::new().x_ratelimit(XRateLimit::UnixTime).busy_wait(BusyWait::Estimated))
//!     .answer(|rejection: &Rejection| {
//!         let mut response = Response::new("come back later");
//!         *response.status_mut() = rejection.status;
//!         response
//!     })
//!     .checked()?;
//! # drop(layer);
//! # Ok::<(), ratelimit_core::ConfigError>(())
//! ```
//!
//! # Costs known later, and waiting
#![cfg_attr(feature = "tokio", doc = "```no_run")]
#![cfg_attr(not(feature = "tokio"), doc = "```ignore")]
//! use std::time::Duration;
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//! use ratelimit_tower::{Advice, Charge, ClientAddress, RateLimitLayer, Waiter};
//!
//! # async fn example(response: http::Response<String>) -> Result<(), Box<dyn std::error::Error>> {
//! // 64 KiB are reserved when a request arrives, and the bytes of its response charged.
//! let limits = Limits::builder().limit("bandwidth", Gcra::per_second(1_000_000)).by(["ip"]).build()?;
//! let layer = RateLimitLayer::new(RateLimiter::new(limits, MemoryStore::new()))
//!     .by("ip", ClientAddress::peer())
//!     .cost(64 * 1024)
//!     .reserve(Charge::body_bytes());
//! # drop(layer);
//!
//! // A client that waits for its turn, and for what the other service asks.
//! let limits = Limits::builder().limit("calls", Gcra::per_second(10)).build()?;
//! let waiter = Waiter::new(RateLimiter::new(limits, MemoryStore::new()));
//! waiter.until_allowed("api.example.com", Duration::from_secs(30)).await?;
//! if let Some(wait) = Advice::from_headers(response.headers()).wait() {
//!     waiter.hold_back("api.example.com", wait);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! For clients of tonic, `.answer(Grpc)` rejects with a gRPC status and a `RetryInfo`: see
//! [`Grpc`].
//!
//! # Contract
//!
//! - No mistake makes a request unlimited: see [`RateLimitLayer`].
//! - `Retry-After` is rounded up, so a client that honours it is admitted. A [`BusyWait`] is an
//!   estimate.
//! - The layer calls the inner service that it polled ready.
//! - If you drop a request's future before the store has decided, the request may be charged. A
//!   reservation is given back.
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `axum` | no | the peer's address from `ConnectInfo`, path parameters, the matched route |
//! | `grpc` | no | `Grpc`: denials as gRPC statuses |
//! | `partition-key` | no | the partition key of the `RateLimit` fields |
//! | `reload` | no | replacing limits while they are in use |
//! | `tokio` | yes | costs that are settled with the response, and waiting |
//!
//! [tower]: https://docs.rs/tower
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

use std::future::Future;
use std::pin::Pin;

mod address;
mod caller;
mod checked;
mod config;
mod decisions;
mod fields;
mod gate;
#[cfg(feature = "grpc")]
mod grpc;
mod identify;
mod layer;
mod log;
mod mode;
mod rejection;
#[cfg(feature = "tokio")]
mod reservation;
mod service;
#[cfg(feature = "tokio")]
mod wait;

pub use address::{ClientAddress, PeerAddress, ProxyHeader};
pub use checked::Checked;
pub use config::{Choice, OnStoreError};
pub use decisions::Decisions;
pub use fields::advice::{Advice, AdvisedLimit, AdvisedPolicy};
pub use fields::{BusyWait, Fields, ModelFields, Unit, XRateLimit};
#[cfg(feature = "grpc")]
pub use grpc::Grpc;
#[cfg(feature = "axum")]
pub use identify::axum::{matched_route, path_param};
pub use identify::{
    Identification, Identified, Identifier, Identify, IdentifyError, extension, from_async_fn,
    from_fn, header, method, optional, unauthorized,
};
pub use layer::RateLimitLayer;
pub use mode::{Awaited, Grant, Immediate, LayerMode};
pub use rejection::{Answer, ProblemJson, Reason, Rejection};
#[cfg(feature = "tokio")]
pub use reservation::{
    Charge, CostEstimates, Held, Hold, Meter, Reserving, SettledBody, Settlements,
};
pub use service::{RateLimitService, ResponseFuture};
#[cfg(feature = "tokio")]
pub use wait::{WaitError, WaitLayer, WaitService, WaitServiceError, Waiter};

/// A future that is moved into another.
type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Takes the service that is ready, and leaves a clone in its place, which has to become ready
/// first.
fn take_ready<S: Clone>(service: &mut S) -> S {
    let clone = service.clone();
    std::mem::replace(service, clone)
}
