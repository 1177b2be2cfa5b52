//! A server restarts, refuses, loses memory, or has another clock; or keys are strange.

use futures_util::future::join_all;

use super::{Place, Row, Traffic, on_both, on_one};
use crate::common::prelude::*;

const REFUSED: &[ErrorKind] = &[ErrorKind::Unavailable];

async fn a_restart_loses_the_states_and_nothing_else(client: Client) {
    on_both(client, Row::is_away("restart", "").loses(1), async |place, traffic| {
        place.nodes()[0].stop();
        traffic.errors(3).await;
        let again = Arc::clone(place);
        aside(move || again.nodes()[0].restart().expect("again")).await;
        place.is_well().await;
    })
    .await;
}

async fn flushed_scripts_are_sent_again(client: Client) {
    on_both(client, Row::unnoticed("SCRIPT FLUSH"), async |place, traffic| {
        for _ in 0..5 {
            place.tell(&["SCRIPT", "FLUSH", "SYNC"]).await;
            traffic.answers(50).await;
        }
    })
    .await;
}

/// What makes a server refuse, and what ends it.
type Words = &'static [&'static str];

async fn a_server_that_refuses_charges_nothing(client: Client) {
    let rows: [(Row, Words, Words); 4] = [
        (
            // No server listens there.
            Row::is_away("READONLY", "is a replica"),
            &["REPLICAOF", "127.0.0.1", "1"],
            &["REPLICAOF", "NO", "ONE"],
        ),
        (
            Row::refuses("NOREPLICAS", REFUSED, "min-replicas-to-write asks for"),
            &["CONFIG", "SET", "min-replicas-to-write", "1"],
            &["CONFIG", "SET", "min-replicas-to-write", "0"],
        ),
        (
            Row::refuses("OOM", REFUSED, "raise maxmemory"),
            &["CONFIG", "SET", "maxmemory", "1"],
            &["CONFIG", "SET", "maxmemory", "0"],
        ),
        (
            Row::refuses("ACL", &[ErrorKind::Config], "ACL SETUSER"),
            &["ACL", "SETUSER", "default", "-@scripting", "-@write"],
            &["ACL", "SETUSER", "default", "+@all"],
        ),
    ];
    for (row, begins, ends) in rows {
        let fault = async |place: &Arc<Place>, traffic: &Traffic| {
            place.tell(begins).await;
            traffic.errors(20).await;
            place.tell(ends).await;
        };
        // A node of a cluster cannot be told to become a replica so.
        if row.name == "READONLY" {
            on_one(client, row, fault).await;
        } else {
            on_both(client, row, fault).await;
        }
    }
}

async fn health_raises_an_alarm_when_limits_may_have_been_evicted(client: Client) {
    const FLOOD: &str = "for n = 1, 500 do redis.call('SET', ARGV[1] .. n, ARGV[2]) end";
    let row = Row { more: None, ..Row::unnoticed("eviction flood") };
    on_one(client, row, async |place, traffic| {
        place
            .each(|node| {
                let info = tell(node, &["INFO", "memory"]).to_string();
                let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
                let used: u64 = used.expect("it says").trim().parse().expect("a number");
                let most = (used + (1 << 20)).to_string();
                tell(
                    node,
                    &["CONFIG", "SET", "maxmemory", &most, "maxmemory-policy", "allkeys-lru"],
                );
                for n in 0..10 {
                    tell(node, &["EVAL", FLOOD, "0", &format!("flood:{n}:"), &"x".repeat(1_000)]);
                }
            })
            .await;
        traffic.answers(50).await;
        let told = findings_in_words(&traffic.asks().store.health().await);
        assert!(told.contains("has removed") && told.contains("noeviction"), "{told}");
    })
    .await;
}

async fn a_servers_clock_that_jumps_ends_windows_and_mints_nothing(client: Client) {
    let (server, clock) = RedisServer::start_with_clock().expect("a server and cc");
    let servers = ["server", &server.url()];
    // A transaction that was read before the jump and charged after it is late: in doubt.
    let ahead = Row { errors: &[ErrorKind::Indeterminate], ..Row::unnoticed("server clock +1 h") };
    for (row, ahead_s) in [
        (ahead.loses(1), 3_600),
        // As seen from the time before.
        (Row::unnoticed("server clock -1 h"), 0),
    ] {
        row.measure(client, servers, async |traffic| {
            clock.set_ahead(ahead_s).expect("its directory is there");
            traffic.answers(300).await;
        })
        .await;
    }
}

async fn a_key_of_another_type_is_an_error_of_its_callers_only(client: Client) {
    let row = Row::refuses("WRONGTYPE", &[ErrorKind::Corrupt], "another type").loses(1);
    on_both(client, row, async |place, traffic| {
        let asks = traffic.asks();
        let key = asks.store.key(&asks.limits.ledger, "hot");
        // Other nodes of a cluster redirect.
        let deleted = key.clone();
        place.each(move |node| drop(node.command(&["SET", &key, "another program's"]))).await;
        traffic.errors(20).await;
        place.each(move |node| drop(node.command(&["DEL", &deleted]))).await;
    })
    .await;
}

async fn a_busy_script_is_waited_for_or_killed(client: Client) {
    on_both(client, Row::refuses("BUSY", REFUSED, "SCRIPT KILL"), async |place, traffic| {
        place.tell(&["CONFIG", "SET", "lua-time-limit", "10"]).await;
        let mut busy = place.nodes()[0].client().expect("it is up");
        busy.send(&["EVAL", "while true do end", "0"]).expect("sent");
        traffic.errors(5).await;
        place.each(|node| drop(node.command(&["SCRIPT", "KILL"]))).await;
    })
    .await;
}

#[cfg(feature = "tls")]
async fn an_expired_certificate_is_an_outage_until_it_is_renewed(client: Client) {
    let server = RedisServer::start_tls().expect("a server with TLS");
    let url = with_option(&server.url(), &format!("tls-ca={}", server.ca_path().display()));
    let row = Row::is_away("expired certificate", "it has expired");
    row.measure(client, ["server", &url], async |traffic| {
        server.expire().expect("another certificate");
        tell(&server, &["CLIENT", "KILL", "TYPE", "normal"]);
        traffic.errors(20).await;
        // At the first connection it is a matter of the configuration, and not of the authority.
        let error = store_within(PATIENCE, &url, client).await;
        let said = fails(error, ErrorKind::Config, "it has expired");
        assert!(!said.contains("tls-ca"), "{said}");
        server.renew().expect("the first certificate");
    })
    .await;
}

/// How many keys: a million in the long run.
fn strange_keys() -> usize {
    if std::env::var_os("RATELIMIT_FAULTS_LONG").is_some() { 1_000_000 } else { 4_000 }
}

/// Another one for each number, with all that keys, patterns and protocols are made of.
fn strange_key(n: usize) -> String {
    let parts =
        ["{", "}", "*", "?", "[a", "\\", "\r\n", "\0", ":", "|", " ", "é", "{}", "%7B", "key"];
    let part = |at: u32| parts[n / parts.len().pow(at) % parts.len()];
    let long = if n.is_multiple_of(50) { "long".repeat(200) } else { String::new() };
    format!("{}{}{n}{}{long}", part(0), part(1), part(2))
}

async fn strange_keys_share_no_state_and_cost_no_other_key_anything(client: Client) {
    on_both(client, Row::unnoticed("strange keys"), async |_, traffic| {
        let store: &RedisStore = &traffic.asks().store;
        let numbers: Vec<_> = (0..strange_keys()).collect();
        for chunk in numbers.chunks(200) {
            let asked = chunk
                .iter()
                .map(async |n| remaining_after_acquire(store, &seldom(), &strange_key(*n)).await);
            assert!(join_all(asked).await.iter().all(|left| *left == 2), "two share a state");
            traffic.asks().decided(chunk.len());
        }
    })
    .await;
}

with_each_client! {
    a_restart_loses_the_states_and_nothing_else,
    flushed_scripts_are_sent_again,
    a_server_that_refuses_charges_nothing,
    health_raises_an_alarm_when_limits_may_have_been_evicted,
    a_servers_clock_that_jumps_ends_windows_and_mints_nothing,
    a_key_of_another_type_is_an_error_of_its_callers_only,
    a_busy_script_is_waited_for_or_killed,
    an_expired_certificate_is_an_outage_until_it_is_renewed,
    strange_keys_share_no_state_and_cost_no_other_key_anything,
}
