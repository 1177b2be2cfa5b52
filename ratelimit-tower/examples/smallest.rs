//! The smallest limited route: ten requests per second and address, after a burst of twenty.
//!
//! `cargo run -p ratelimit-tower --example smallest --features axum`, then `curl -i http://127.0.0.1:3000/`

use std::net::SocketAddr;

use axum::{Router, routing::get};
use ratelimit_core::{Gcra, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, RateLimitLayer};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder().limit("burst", Gcra::per_second(10).burst(20)).by(["ip"]).build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());

    let app: Router = Router::new().route("/", get(|| async { "hello\n" })).layer(layer);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
