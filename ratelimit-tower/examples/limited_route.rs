//! The smallest limited route: ten requests per second and address, after a burst of twenty.
//!
//! `cargo run -p ratelimit-tower --example limited_route --features axum`, then `curl -i
//! http://127.0.0.1:3000/`

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
    // The layer needs the client's address.
    axum::serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http::Request;
    use hyper::client::conn::http1::handshake;
    use hyper_util::rt::TokioIo;
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn the_route_is_limited_as_it_is_served() -> Result<(), Box<dyn std::error::Error>> {
        // As `main` serves it, at a free port.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let stream = TcpStream::connect(listener.local_addr()?);
        let service = app()?.into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async { axum::serve(listener, service).await });
        let stream = stream.await?;
        let (mut client, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let request = Request::get("/").header("host", "localhost").body(Body::empty())?;
        let response = client.send_request(request).await?;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["ratelimit-policy"], r#""burst";q=20;w=2"#);
        Ok(())
    }
}
