use std::collections::HashMap;
use std::sync::Arc;

use ratelimit_core::{AnyAlgorithm, ConfigError, Gcra, Limits, RateLimiter, Store};
use ratelimit_tower::{RateLimitLayer, extension};

/// What authentication leaves in the extensions of a request.
#[derive(Clone)]
struct Customer {
    name: String,
    plan: String,
}

fn by_plan<S: Store<AnyAlgorithm> + 'static>(store: S) -> Result<RateLimitLayer<S>, ConfigError> {
    let limits = Limits::builder()
        .limit("api", Gcra::per_minute(60).burst(10)) // of customers without a plan
        .by(["customer"])
        .accepts_up_to(Gcra::per_minute(60_000).burst(10_000))
        .build()?;
    let mut plans = HashMap::new(); // built once, and looked up by each request
    for (plan, numbers) in [("pro", "600/m burst 100"), ("max", "6000/m burst 1000")] {
        plans.insert(plan, Arc::new(limits.parse_numbers([("api", numbers)])?));
    }
    Ok(RateLimitLayer::new(RateLimiter::new(limits, store))
        .by("customer", extension(|customer: &Customer| Some(customer.name.as_str().into())))
        .numbers_of(move |request| {
            plans.get(&*request.extensions.get::<Customer>()?.plan).cloned()
        }))
}

mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use http::Request;
    use ratelimit_core::ManualClock;
    use ratelimit_memory::MemoryStore;
    use tower::ServiceExt;

    use super::*;
    use crate::Error;

    #[tokio::test]
    async fn a_customer_is_admitted_what_its_plan_says() -> Result<(), Error> {
        let store = MemoryStore::builder().clock(ManualClock::default()).build();
        let layer = by_plan(store)?.checked()?;
        let app = Router::new().route("/", get(async || ())).layer(layer);
        for (name, plan, due) in [("alice", "free", 10), ("bob", "pro", 100), ("eve", "max", 1_000)]
        {
            let mut admitted = 0;
            for _ in 0..1_001 {
                let mut request = Request::new(Body::empty());
                let customer = Customer { name: name.to_owned(), plan: plan.to_owned() };
                request.extensions_mut().insert(customer);
                let status = app.clone().oneshot(request).await?.status();
                admitted += u32::from(status.is_success());
            }
            assert_eq!(admitted, due, "{plan}");
        }
        Ok(())
    }
}
