//! Requests that share calls while tasks drop others and the network fails.

use crate::common::prelude::*;
use ratelimit_simulation::{FaultyRounds, MOST_REQUESTS};

async fn an_order_explains_all_answers_while_others_are_dropped(client: Client) {
    let (server, proxy) = server_behind_proxy();
    let store = store(&proxy.url(), client).await;
    FaultyRounds::new(store, proxy).are_explained().await;
    // Requests of one key share calls.
    let calls = usize::try_from(server.calls("evalsha").expect("it is up")).expect("a count");
    assert!((1..MOST_REQUESTS).contains(&calls), "{calls} calls");
}

with_each_client!(an_order_explains_all_answers_while_others_are_dropped);
