//! What is wrong with a service is on standard error where no subscriber hears it.

use std::process::Command;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::Request;
use ratelimit_core::{Gcra, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, RateLimitLayer};
use tower::ServiceExt;

/// Set in the process whose standard error is read.
const CHILD: &str = "RATELIMIT_UNHEARD_CHILD";
const NAME: &str =
    "unheard::a_service_that_is_not_wired_says_the_remedy_once_where_nothing_listens";

#[test]
fn a_service_that_is_not_wired_says_the_remedy_once_where_nothing_listens() {
    if let Ok(listens) = std::env::var(CHILD) {
        return unwired(listens == "yes");
    }
    for (listens, times) in [("no", 1), ("yes", 0)] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", NAME, "--nocapture"]).env(CHILD, listens);
        let output = child.output().unwrap();
        assert!(output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        let remedy = "into_make_service_with_connect_info::<SocketAddr>()";
        assert_eq!(said.matches(remedy).count(), times, "{said}");
    }
}

/// Two layers without the peer's address, as axum's own first example serves.
fn unwired(listens: bool) {
    if listens {
        tracing::subscriber::set_global_default(tracing_subscriber::registry()).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for _ in 0..2 {
        let limits = Limits::builder().limit("burst", Gcra::per_second(10)).by(["ip"]);
        let limiter = RateLimiter::new(limits.build().unwrap(), MemoryStore::new());
        let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
        let app: Router = Router::new().route("/", get(|| async { "" })).layer(layer);
        for _ in 0..3 {
            let request = Request::get("/").body(Body::empty()).unwrap();
            let answer = runtime.block_on(app.clone().oneshot(request)).unwrap();
            assert_eq!(answer.status(), 500);
        }
    }
}
