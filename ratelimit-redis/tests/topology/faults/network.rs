//! The network between a store and its servers fails, or a server hangs.

use super::{Row, on_both};
use crate::common::prelude::*;

/// Several times, so that each kind of request meets it.
const TIMES: usize = 5;

async fn a_lost_reply_is_never_a_second_charge(client: Client) {
    on_both(client, Row::is_away("lost reply", ""), async |place, traffic| {
        for what in ["EVALSHA", "EXEC"].iter().cycle().take(2 * TIMES) {
            let proxies = place.proxies();
            for proxy in proxies {
                proxy.swallow_matching(what, 1);
            }
            traffic.errors(1).await;
            proxies.iter().for_each(FaultProxy::heal);
            traffic.answers(50).await;
        }
    })
    .await;
}

async fn a_server_that_hangs_costs_callers_their_deadline(client: Client) {
    on_both(client, Row::is_away("SIGSTOP", ""), async |place, traffic| {
        place.nodes()[0].pause().expect("it runs");
        traffic.errors(3).await;
        place.nodes()[0].resume().expect("it runs");
        place.is_well().await;
    })
    .await;
}

async fn a_half_open_connection_is_replaced(client: Client) {
    on_both(client, Row::is_away("half-open connection", ""), async |place, traffic| {
        place.proxies().iter().for_each(FaultProxy::silence);
        traffic.errors(1).await;
    })
    .await;
}

async fn latency_and_jitter_are_only_waited_for(client: Client) {
    on_both(client, Row::unnoticed("latency and jitter"), async |place, traffic| {
        let by = Duration::from_millis(5)..Duration::from_millis(40);
        for proxy in place.proxies() {
            proxy.delay(by.clone());
        }
        traffic.answers(100).await;
        place.proxies().iter().for_each(FaultProxy::heal);
    })
    .await;
}

async fn a_closed_connection_is_opened_again(client: Client) {
    const KILL: &[&str] = &["CLIENT", "KILL", "TYPE", "normal"];
    on_both(client, Row::is_away("CLIENT KILL", ""), async |place, traffic| {
        for _ in 0..TIMES {
            // The connection that kills is not one of those.
            place.each(|node: &RedisServer| drop(node.command(KILL))).await;
            traffic.answers(100).await;
        }
    })
    .await;
}

with_each_client! {
    a_lost_reply_is_never_a_second_charge,
    a_server_that_hangs_costs_callers_their_deadline,
    a_half_open_connection_is_replaced,
    latency_and_jitter_are_only_waited_for,
    a_closed_connection_is_opened_again,
}
