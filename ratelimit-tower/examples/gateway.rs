//! A gateway to a language model: each customer has a budget of input, of output and of requests.
//!
//! - A table says who has which plan, until when twice of it, who is suspended and who is exempt.
//!   It changes while the gateway serves, and the next request sees it.
//! - The input is counted when the request arrives, and an estimate of the output is reserved.
//! - A stream that is longer than its estimate grows the reservation before it goes on, and stops
//!   where the budget ends.
//! - When the stream ends, or when the client leaves, the request costs the tokens that were
//!   sent.
//!
//! ```console
//! $ cargo run -p ratelimit-tower --example gateway --features axum
//! $ curl -N -H 'x-api-key: alice' -H 'x-input-tokens: 12' 'http://127.0.0.1:3000/complete?tokens=600'
//! $ curl -X PUT http://127.0.0.1:3001/customers/alice --json '{"plan": "gold", "suspended": true}'
//! ```

#![cfg_attr(test, allow(clippy::expect_used))]

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{Extension, Path, Query, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, put};
use axum::{Json, Router};
use bytes::Bytes;
use http::Request;
use http::request::Parts;
use http_body::Frame;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use ratelimit_core::{
    AnyAlgorithm, Clock, ConfigError, Gcra, LimitCosts, Limits, Numbers, RateLimiter, SystemClock,
};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{
    Charge, Choice, Fields, Hold, IdentifyError, Meter, ModelFields, RateLimitLayer, extension,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// How much output is reserved at first, and each time that a stream goes on.
const STEP: u64 = 256;

type Limiter<C> = Arc<RateLimiter<MemoryStore<AnyAlgorithm, C>>>;
type BoxError = Box<dyn Error + Send + Sync>;

/// Budgets of a minute. What the last stream used beyond its reservation is owed.
fn limiter<C: Clock>(store: MemoryStore<AnyAlgorithm, C>) -> Result<Limiter<C>, ConfigError> {
    let limits = Limits::builder()
        .limit("input-tokens", Gcra::per_minute(40_000).debt(4_000))
        .by(["customer"])
        .accepts_up_to(Gcra::per_minute(4_000_000).debt(4_000))
        .limit("output-tokens", Gcra::per_minute(1_000).debt(100))
        .by(["customer"])
        .accepts_up_to(Gcra::per_minute(100_000).debt(100))
        .limit("requests", Gcra::per_minute(50))
        .by(["customer"])
        .accepts_up_to(Gcra::per_minute(5_000))
        .build()?;
    Ok(Arc::new(RateLimiter::new(limits, store)))
}

/// A row of the table: what the gateway knows of a customer.
#[derive(Clone, Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Row {
    plan: String,
    /// Until when the customer has twice its plan, in seconds since 1970.
    doubled_until: u64,
    suspended: bool,
    exempt: bool,
}

/// The customer of a request, by its row when the request came.
#[derive(Clone)]
struct Customer {
    name: String,
    row: Row,
    numbers: Arc<Numbers>,
}

/// The table of customers, by their keys. It stands for a database, or for a cache of one.
struct Customers<C> {
    rows: RwLock<HashMap<String, Row>>,
    /// The numbers of each plan, and twice of them: built once, and looked up by each request.
    plans: HashMap<&'static str, [Arc<Numbers>; 2]>,
    clock: C,
}

impl<C: Clock> Customers<C> {
    fn new(limits: &Limits<AnyAlgorithm>, clock: C) -> Result<Self, ConfigError> {
        let numbers = |[input, output, requests]: [u64; 3]| {
            let numbers = limits.numbers([
                ("input-tokens", Gcra::per_minute(input).debt(4_000)),
                ("output-tokens", Gcra::per_minute(output).debt(100)),
                ("requests", Gcra::per_minute(requests)),
            ]);
            numbers.map(Arc::new)
        };
        let mut plans = HashMap::new();
        for (plan, of) in [("free", [40_000, 1_000, 50]), ("gold", [800_000, 20_000, 1_000])] {
            plans.insert(plan, [numbers(of)?, numbers(of.map(|number| 2 * number))?]);
        }
        Ok(Self { rows: RwLock::default(), plans, clock })
    }

    /// Writes a row. Every request that comes from now on sees it.
    fn set(&self, key: &str, row: Row) -> Result<(), StatusCode> {
        if !self.plans.contains_key(&*row.plan) {
            return Err(StatusCode::UNPROCESSABLE_ENTITY);
        }
        self.rows.write().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned(), row);
        Ok(())
    }

    fn find(&self, key: &str) -> Option<Customer> {
        let row = self.rows.read().unwrap_or_else(PoisonError::into_inner).get(key)?.clone();
        let [once, twice] = self.plans.get(&*row.plan)?;
        let is_doubled = self.clock.now().as_us() / 1_000_000 < row.doubled_until;
        let numbers = if is_doubled { twice } else { once }.clone();
        Some(Customer { name: key.to_owned(), row, numbers })
    }
}

/// The tokens of the input, which a gateway would count with the model's tokenizer.
fn input_tokens(request: &Parts) -> u64 {
    let given = request.headers.get("x-input-tokens").and_then(|value| value.to_str().ok());
    given.and_then(|count| count.parse().ok()).unwrap_or(1)
}

fn costs(input: u64, output: u64) -> LimitCosts {
    LimitCosts::from(1).with("input-tokens", input).with("output-tokens", output)
}

/// A stream to the client. Dropping it tells the task that fills it.
struct Tokens(mpsc::Receiver<Bytes>);

impl http_body::Body for Tokens {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|token| token.map(|token| Ok(Frame::data(token))))
    }
}

#[derive(serde::Deserialize)]
struct Ask {
    tokens: u64,
}

/// Asks the model, and passes on what it answers.
async fn complete(
    State(model): State<SocketAddr>,
    Extension(meter): Extension<Meter>,
    Extension(hold): Extension<Hold>,
    Query(Ask { tokens }): Query<Ask>,
    request: Request<Body>,
) -> Result<Body, StatusCode> {
    let (parts, _) = request.into_parts();
    let answer = get_body(model, &format!("/?tokens={tokens}")).await;
    let answer = answer.map_err(|_| StatusCode::BAD_GATEWAY)?;
    let (sender, tokens) = mpsc::channel(1);
    meter.add_of("output-tokens", 0); // nothing was sent yet
    tokio::spawn(pass_on(answer, sender, meter, hold, input_tokens(&parts)));
    Ok(Body::new(Tokens(tokens)))
}

/// Sends one token after the other, as long as the budget and the client last.
async fn pass_on(
    mut answer: hyper::body::Incoming,
    client: mpsc::Sender<Bytes>,
    meter: Meter,
    hold: Hold,
    input: u64,
) {
    let (mut sent, mut reserved) = (0, STEP);
    while let Some(Ok(frame)) = answer.frame().await {
        let Ok(token) = frame.into_data() else { continue };
        if sent == reserved {
            match hold.extend(costs(input, reserved + STEP)).await {
                Ok(Some(verdict)) if verdict.allowed() => reserved += STEP,
                // Of an exempt customer nothing is reserved.
                Ok(None) => reserved += STEP,
                // The stream ends where the budget ends, or where the store fails.
                _ => return,
            }
        }
        if client.send(token).await.is_err() {
            return; // the client is gone
        }
        sent += 1;
        meter.add_of("output-tokens", 1);
    }
}

async fn get_body(to: SocketAddr, path: &str) -> Result<hyper::body::Incoming, BoxError> {
    let stream = TokioIo::new(TcpStream::connect(to).await?);
    let (mut client, connection) = hyper::client::conn::http1::handshake(stream).await?;
    tokio::spawn(connection);
    let request = Request::get(path).header("host", to.to_string()).body(Empty::<Bytes>::new())?;
    Ok(client.send_request(request).await?.into_body())
}

/// Knows a customer by its key, or refuses the request.
async fn authenticate<C: Clock>(
    customers: Arc<Customers<C>>,
    mut request: Request<Body>,
    next: Next,
) -> Result<Response, StatusCode> {
    let key = request.headers().get("x-api-key").and_then(|key| key.to_str().ok());
    let customer = key.and_then(|key| customers.find(key)).ok_or(StatusCode::UNAUTHORIZED)?;
    request.extensions_mut().insert(customer);
    Ok(next.run(request).await)
}

fn gateway<C: Clock + 'static>(
    limiter: Limiter<C>,
    customers: Arc<Customers<C>>,
    model: SocketAddr,
) -> Router {
    let suspended =
        || IdentifyError::refused(StatusCode::FORBIDDEN, "the account of this key is suspended");
    let choose = move |request: &Parts| match request.extensions.get::<Customer>() {
        Some(customer) if customer.row.suspended => Choice::Refused(suspended()),
        Some(customer) if customer.row.exempt => Choice::Exempt,
        Some(_) => Choice::Limited(limiter.clone()),
        None => Choice::Refused(IdentifyError::not_wired("authentication did not run")),
    };
    let layer = RateLimitLayer::choosing(choose)
        .by("customer", extension(|customer: &Customer| Some(customer.name.as_str().into())))
        .numbers_of(|request| Some(request.extensions.get::<Customer>()?.numbers.clone()))
        .fields(Fields::new().model_fields(ModelFields::Anthropic))
        .cost_of(|request| costs(input_tokens(request), STEP))
        .reserve(Charge::estimate());
    let authentication =
        from_fn(move |request, next| authenticate(customers.clone(), request, next));
    let complete = get(complete).layer(layer).layer(authentication);
    Router::new().route("/complete", complete).with_state(model)
}

/// Writes the table while the gateway serves, on a port that customers do not reach.
fn office<C: Clock + 'static>(customers: Arc<Customers<C>>) -> Router {
    let set = async move |Path(key): Path<String>, Json(row)| customers.set(&key, row);
    Router::new().route("/customers/{key}", put(set))
}

/// Stands in for a model: a frame for each token.
async fn model(Query(Ask { tokens }): Query<Ask>) -> Body {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        for _ in 0..tokens {
            if sender.send(Bytes::from_static(b"token ")).await.is_err() {
                return;
            }
        }
    });
    Body::new(Tokens(receiver))
}

async fn serve(app: Router, at: &str) -> Result<SocketAddr, BoxError> {
    let listener = TcpListener::bind(at).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let clock = SystemClock::new();
    let limiter = limiter(MemoryStore::builder().clock(clock).build())?;
    let customers = Arc::new(Customers::new(limiter.limits(), clock)?);
    let alice = Row { plan: "free".to_owned(), ..Row::default() };
    customers.set("alice", alice).map_err(|status| status.to_string())?;
    let model = serve(Router::new().route("/", get(model)), "127.0.0.1:0").await?;
    let address = serve(gateway(limiter, customers.clone(), model), "127.0.0.1:3000").await?;
    println!("listening on http://{address}");
    let address = serve(office(customers), "127.0.0.1:3001").await?;
    println!("the table of customers is behind http://{address}");
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;
    use ratelimit_core::ManualClock;
    use tower::ServiceExt;

    use super::*;

    /// A gateway at a given time, with one customer of the plan `free`, and its table.
    async fn started(clock: &ManualClock) -> (Limiter<ManualClock>, Router, Router) {
        let limiter = limiter(MemoryStore::builder().clock(clock.clone()).build()).expect("limits");
        let customers = Customers::new(limiter.limits(), clock.clone()).expect("plans");
        let customers = Arc::new(customers);
        let model = serve(Router::new().route("/", get(model)), "127.0.0.1:0").await;
        let app = gateway(limiter.clone(), customers.clone(), model.expect("a port"));
        let office = office(customers);
        assert_eq!(writes(&office, r#"{"plan": "free"}"#).await, 200);
        (limiter, app, office)
    }

    /// Writes the row of `alice`.
    async fn writes(office: &Router, row: &str) -> u16 {
        let request = Request::put("/customers/alice").header("content-type", "application/json");
        let request = request.body(Body::from(row.to_owned())).expect("a request");
        office.clone().oneshot(request).await.expect("answers").status().as_u16()
    }

    async fn asks(app: &Router, key: &str, tokens: u64) -> Response {
        let request = Request::get(format!("/complete?tokens={tokens}")).header("x-api-key", key);
        let request = request.body(Body::empty()).expect("a request");
        app.clone().oneshot(request).await.expect("answers")
    }

    async fn sent(answer: Response) -> u64 {
        let body = answer.into_body().collect().await.expect("all of it").to_bytes();
        (body.len() / b"token ".len()) as u64
    }

    /// What remains of input, output and requests, once the last request is settled.
    async fn settles_at(limiter: &Limiter<ManualClock>, due: [u64; 3]) {
        let left = || async {
            let caller = [("customer", "alice")];
            let verdict = limiter.request(&caller).cost(0).peek().await.expect("decides");
            limiter.named(&verdict).map(|limit| limit.remaining).collect::<Vec<_>>()
        };
        while left().await != due {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_costs_what_was_sent_and_a_stream_stops_where_the_budget_ends() {
        let (limiter, app, _) = started(&ManualClock::default()).await;

        // Longer than its estimate.
        assert_eq!(sent(asks(&app, "alice", 300).await).await, 300);
        settles_at(&limiter, [39_999, 700, 49]).await;

        // The client goes away after the first token, and pays for the tokens in flight.
        let mut aborted = asks(&app, "alice", 1_000_000).await.into_body();
        aborted.frame().await.expect("a token").expect("is sent");
        drop(aborted);
        let caller = [("customer", "alice")];
        let left = || async {
            let verdict = limiter.request(&caller).cost(0).peek().await.expect("decides");
            verdict.decisions()[1].remaining
        };
        while left().await < 512 {
            tokio::task::yield_now().await;
        }

        // The budget ends in mid-stream.
        let left = left().await;
        assert_eq!(sent(asks(&app, "alice", 5_000).await).await, left - left % STEP);
        settles_at(&limiter, [39_997, left % STEP, 47]).await;
    }

    #[tokio::test]
    async fn the_next_request_sees_what_the_table_says() {
        let clock = ManualClock::default();
        let (_, app, office) = started(&clock).await;
        let output = |headers: &HeaderMap| {
            let told = headers.get("anthropic-ratelimit-output-tokens-limit")?;
            told.to_str().ok()?.parse::<u64>().ok()
        };
        let finds = async |key: &str| {
            let answer = asks(&app, key, 1).await;
            (answer.status().as_u16(), output(answer.headers()))
        };
        assert_eq!(finds("mallory").await, (401, None));
        assert_eq!(finds("alice").await, (200, Some(1_000)));
        for (row, due) in [
            (r#"{"plan": "gold"}"#, (200, Some(20_000))),
            (r#"{"plan": "gold", "doubled_until": 3600}"#, (200, Some(40_000))),
            (r#"{"plan": "gold", "suspended": true}"#, (403, None)),
            (r#"{"plan": "free", "exempt": true}"#, (200, None)),
            (r#"{"plan": "free", "doubled_until": 3600}"#, (200, Some(2_000))),
        ] {
            assert_eq!(writes(&office, row).await, 200);
            assert_eq!(finds("alice").await, due, "{row}");
        }
        // The double ends by itself, and a plan that is not known changes nothing.
        clock.advance(std::time::Duration::from_secs(3_600));
        assert_eq!(writes(&office, r#"{"plan": "platinum"}"#).await, 422);
        assert_eq!(finds("alice").await, (200, Some(1_000)));
        // A stream of an exempt customer goes on beyond its estimate, and every budget.
        assert_eq!(writes(&office, r#"{"plan": "free", "exempt": true}"#).await, 200);
        assert_eq!(sent(asks(&app, "alice", 5_000).await).await, 5_000);
    }
}
