use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, ConfigError, Gcra, Limits, RateLimiter, Store};
use ratelimit_tower::{WaitLayer, Waiter};
use reqwest::{Body, Client, Request};
use tower::{Layer, Service, ServiceExt};

fn polite<S: Store<AnyAlgorithm> + 'static>(
    client: Client,
    store: S,
) -> Result<impl Service<Request, Response = http::Response<Body>> + Clone, ConfigError> {
    // A little less than the service allows, because requests travel at different speeds.
    let limits = Limits::builder().limit("api", Gcra::per_second(45).burst(4)).build()?;
    let waiter = Waiter::new(RateLimiter::new(limits, store)).shared_holds("api-holds")?;
    let by_host = |request: &Request| request.url().host_str().unwrap_or_default().to_owned();
    let layer = WaitLayer::new(waiter, by_host, Duration::from_secs(30)).heed_answers();
    Ok(layer.layer(client.map_response(http::Response::<Body>::from)))
}

mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::get;
    use ratelimit_core::TokioClock;
    use ratelimit_memory::MemoryStore;
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;
    use crate::Error;

    /// Denies each third request for seven seconds.
    async fn service() -> Result<String, Error> {
        static REQUESTS: AtomicU32 = AtomicU32::new(1);
        let answer = async || {
            let nth = REQUESTS.fetch_add(1, Ordering::SeqCst);
            let (denied, ok) = (StatusCode::TOO_MANY_REQUESTS, StatusCode::OK);
            (if nth.is_multiple_of(3) { denied } else { ok }, [("retry-after", "7")])
        };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/", listener.local_addr()?);
        let app = Router::new().route("/", get(answer));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(url)
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_is_heeded() -> Result<(), Error> {
        let url = service().await?;
        let store = MemoryStore::builder().clock(TokioClock::default()).build();
        let client = polite(Client::builder().no_proxy().build()?, store)?;
        let begin = Instant::now();
        for (status, after_s) in [(200, 0), (200, 0), (429, 0), (200, 7)] {
            let request = Request::new(reqwest::Method::GET, url.parse()?);
            let Ok(response) = client.clone().oneshot(request).await else {
                panic!("no answer");
            };
            assert_eq!(response.status().as_u16(), status);
            assert!(begin.elapsed().as_secs() >= after_s);
        }
        Ok(())
    }
}
