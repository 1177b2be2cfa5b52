//! The smallest limited route: ten requests per second and address, after a burst of twenty.
//!
//! `cargo run -p ratelimit-tower --example limited_route --features axum`, then `curl -i http://127.0.0.1:3000/`

use std::net::SocketAddr;

use axum::{Router, routing::get};
use ratelimit_core::{ConfigError, Gcra, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, RateLimitLayer};

fn app() -> Result<Router, ConfigError> {
    let limits =
        Limits::builder().limit("burst", Gcra::per_second(10).burst(20)).by(["ip"]).build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
    Ok(Router::new().route("/", get(|| async { "hello\n" })).layer(layer))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::ConnectInfo;
    use http::Request;
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn the_route_is_limited() -> Result<(), Box<dyn std::error::Error>> {
        let peer: SocketAddr = "192.0.2.7:4711".parse()?;
        let request = Request::get("/").extension(ConnectInfo(peer)).body(Body::empty())?;
        let response = app()?.oneshot(request).await?;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["ratelimit-policy"], r#""burst";q=20;w=2"#);
        Ok(())
    }
}
