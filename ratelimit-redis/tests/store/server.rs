//! A server that hangs, or is another kind of server: what requests learn, with each client.

use std::io::Write as _;
use std::time::Duration;

use ratelimit_core::{ErrorKind, Limits, RateLimiter};
use ratelimit_redis::{Client, Multi, RedisStore};

use crate::common::{
    acquire, fails, left, native, seldom, server, store, store_within, with_client,
};

async fn a_server_that_hangs_is_indeterminate_at_the_deadline(client: Client) {
    let (server, limit) = (server(), seldom());
    let store = store_within(Duration::from_millis(200), &server.url(), client).await;
    let store = store.expect("it is up");
    assert_eq!(left(&store, &limit, "a").await, 2);
    server.pause().expect("it runs");
    fails(acquire(&store, &limit, "a").await, ErrorKind::Indeterminate, "");
    server.resume().expect("it runs");
    // The earlier request was executed after all: this is the third.
    assert_eq!(left(&store, &limit, "a").await, 0);
}

async fn a_server_of_another_kind_is_reported_in_one_line(client: Client) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a caller");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("written");
    });
    let error = RedisStore::connect(&with_client(&url, client)).await.expect_err("no Redis");
    let error = error.to_string();
    assert!(error.contains("does not speak the Redis protocol"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    other.join().expect("no panic");
}

with_each_client! {
    a_server_that_hangs_is_indeterminate_at_the_deadline,
    a_server_of_another_kind_is_reported_in_one_line,
}

#[tokio::test]
async fn a_limit_that_no_transaction_can_decide_is_refused_by_name() {
    let server = server();
    let store = store(&server.url(), Client::default()).await.in_mode::<Multi>();
    let limits = Limits::new([seldom()]).expect("limits");
    let message = "limit \"seldom\": a transaction charges first and looks afterwards, and cannot decide \
                this; use the Lua mode, or count = \"attempts\" with one of fixed-window, \
                first-request-window, window-log, bucketed-window and sliding-log";
    fails(RedisStore::<Multi>::supports(&limits), ErrorKind::Unsupported, message);
    let error = RateLimiter::new(limits, store.clone()).check("a").await.expect_err("gcra");
    assert_eq!(error.to_string(), message);

    let limits = Limits::new(native(3)).expect("limits");
    RedisStore::<Multi>::supports(&limits).expect("all of these");
    let error = RateLimiter::new(limits, store).refund("a", 1).await.expect_err("charged");
    let message = "there is no refund in the mode of transactions; use the Lua mode";
    assert!(error.to_string().contains(message), "{error}");
}
