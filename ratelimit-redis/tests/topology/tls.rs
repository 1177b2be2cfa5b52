//! Encrypted connections.

use std::path::Path;

use ratelimit_servers::TlsServer;

use crate::common::prelude::*;

fn tls(args: &[&str]) -> TlsServer {
    RedisServer::start_tls_with(&RedisServer::binaries()[0], args).expect("a server with TLS")
}

fn with_ca(url: &str, ca: &Path) -> String {
    format!("{url}?tls-ca={}", ca.display())
}

/// The error for a client that is refused.
async fn refused(url: &str, client: Client, says: &str) -> String {
    fails(store_within(PATIENCE, url, client).await, ErrorKind::Config, says)
}

async fn only_the_given_authority_is_trusted(client: Client) {
    let server = tls(&[]);
    let by_name = format!("rediss://localhost:{}", server.port());
    for (n, url) in [server.url(), by_name].iter().enumerate() {
        for protocol in ["resp2", "resp3"] {
            let url = format!("{}&protocol={protocol}", with_ca(url, server.ca_path()));
            let store = store(&url, client).await;
            three_and_no_more(&store, &seldom(), &format!("{n}{protocol}")).await;
        }
    }
    let another = tls(&[]);
    refused(&with_ca(&server.url(), another.ca_path()), client, "tls-ca=").await;
    for (url, says) in [
        (with_ca(&server.url(), Path::new("/no/such.pem")), "cannot read /no/such.pem"),
        (with_ca(&server.url(), server.client_key_path()), "BEGIN CERTIFICATE"),
        (
            with_certificate(&server.url(), server.ca_path(), "/no/such.pem".as_ref()),
            "/no/such.pem",
        ),
    ] {
        refused(&url, client, says).await;
    }
}

fn with_certificate(url: &str, certificate: &Path, key: &Path) -> String {
    with_option(url, &format!("tls-cert={}&tls-key={}", certificate.display(), key.display()))
}

async fn a_client_certificate_is_sent_on_request(client: Client) {
    let (server, other) = (tls(&["--tls-auth-clients", "yes"]), tls(&[]));
    let url = with_ca(&server.url(), server.ca_path());
    let shown = with_certificate(&url, server.client_cert_path(), server.client_key_path());
    three_and_no_more(&store(&shown, client).await, &seldom(), "a").await;
    refused(&url, client, "tls-cert=").await;
    let strange = with_certificate(&url, other.client_cert_path(), other.client_key_path());
    refused(&strange, client, "").await;
}

async fn a_tls_mismatch_is_reported(client: Client) {
    let (clear, secret) = (server(), tls(&[]));
    let url = clear.url().replace("redis://", "rediss://");
    // It takes the greeting for the start of a command, and waits for the rest.
    let url = with_ca(&url, secret.ca_path());
    let error = store_within(Duration::from_millis(300), &url, client).await;
    fails(error, ErrorKind::Unavailable, "does it speak TLS");
    let url = secret.url().replace("rediss://", "redis://");
    for protocol in ["resp2", "resp3"] {
        let error = store_within(PATIENCE, &format!("{url}?protocol={protocol}"), client).await;
        fails(error, ErrorKind::Unavailable, "use rediss://");
    }
}

async fn a_cluster_node_without_its_own_address_is_reached_over_tls(client: Client) {
    let node = tls(&["--cluster-enabled", "yes", "--tls-cluster", "yes"]);
    tell(&node, &["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let url = node.url().replace("rediss://", "rediss-cluster://");
    let store = store(&with_ca(&url, node.ca_path()), client).await;
    let _ = until(async || acquire(&store, &seldom(), "first").await).await;
    for key in ["a", "b", "c"] {
        three_and_no_more(&store, &seldom(), key).await;
    }
}

with_each_client! {
    only_the_given_authority_is_trusted,
    a_client_certificate_is_sent_on_request,
    a_tls_mismatch_is_reported,
    a_cluster_node_without_its_own_address_is_reached_over_tls,
}
