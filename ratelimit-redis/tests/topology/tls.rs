//! Encrypted connections.

use std::path::Path;
use std::time::Duration;

use ratelimit_core::{ErrorKind, StoreError};
use ratelimit_redis::{Client, RedisError};
use ratelimit_testkit::{RedisServer, TlsServer};

use super::{PATIENCE, acquire, seldom, store, store_within, three_and_no_more};

fn with_ca(url: &str, ca: &Path) -> String {
    format!("{url}?tls-ca={}", ca.display())
}

/// The error for a client that is refused.
async fn refused(url: &str, client: Client) -> RedisError {
    let error = store_within(PATIENCE, url, client).await.expect_err(url);
    assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
    error
}

async fn only_the_given_authority_is_trusted(client: Client) {
    let server = RedisServer::start_tls().expect("a server with TLS");
    let by_name = format!("rediss://localhost:{}", server.port());
    for (n, url) in [server.url(), by_name].iter().enumerate() {
        for protocol in ["resp2", "resp3"] {
            let url = format!("{}&protocol={protocol}", with_ca(url, server.ca_path()));
            three_and_no_more(&store(&url, client).await, &seldom(), &format!("{n}{protocol}"))
                .await;
        }
    }
    let another = RedisServer::start_tls().expect("another");
    let error = refused(&with_ca(&server.url(), another.ca_path()), client).await;
    assert!(error.to_string().contains("tls-ca="), "{error}");
}

async fn a_client_certificate_is_sent_on_request(client: Client) {
    let binary = &RedisServer::binaries()[0];
    let server = RedisServer::start_tls_with(binary, &["--tls-auth-clients", "yes"]);
    let server: TlsServer = server.expect("a server with TLS");
    let url = with_ca(&server.url(), server.ca_path());
    let (certificate, key) = (server.client_cert_path(), server.client_key_path());
    let shown = format!("{url}&tls-cert={}&tls-key={}", certificate.display(), key.display());
    three_and_no_more(&store(&shown, client).await, &seldom(), "a").await;
    let error = refused(&url, client).await;
    assert!(error.to_string().contains("tls-cert="), "{error}");
    let other = RedisServer::start_tls().expect("another");
    let (certificate, key) = (other.client_cert_path(), other.client_key_path());
    let strange = format!("{url}&tls-cert={}&tls-key={}", certificate.display(), key.display());
    refused(&strange, client).await;
}

async fn a_connection_is_restored_when_the_server_returns(client: Client) {
    let mut server = RedisServer::start_tls().expect("a server with TLS");
    let store = store(&with_ca(&server.url(), server.ca_path()), client).await;
    three_and_no_more(&store, &seldom(), "a").await;
    server.restart().expect("again");
    let _ = super::until(|| async { acquire(&store, &seldom(), "a").await }).await;
}

async fn a_tls_mismatch_is_reported(client: Client) {
    let clear = RedisServer::start().expect("redis-server");
    let secret = RedisServer::start_tls().expect("a server with TLS");
    let url = clear.url().replace("redis://", "rediss://");
    // It takes the greeting for the start of a command, and waits for the rest.
    let url = with_ca(&url, secret.ca_path());
    let brief = Duration::from_millis(300);
    let error = store_within(brief, &url, client).await.expect_err("only in the clear");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("does it speak TLS"), "{error}");
    let url = secret.url().replace("rediss://", "redis://");
    for protocol in ["resp2", "resp3"] {
        let url = format!("{url}?protocol={protocol}");
        let error = store_within(PATIENCE, &url, client).await.expect_err("only in secret");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("use rediss://"), "{error}");
    }
}

async fn a_certificate_that_expires_in_use_is_an_outage(client: Client) {
    let server = RedisServer::start_tls().expect("a server with TLS");
    let url = with_ca(&server.url(), server.ca_path());
    let used = store(&url, client).await;
    assert!(acquire(&used, &seldom(), "a").await.expect("decided").allowed());
    server.expire().expect("another certificate");
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]).expect("it is up");
    let error = super::until(|| async {
        let error = acquire(&used, &seldom(), "a").await.expect_err("it has expired");
        assert_ne!(error.kind(), ErrorKind::Config, "{error}");
        if error.to_string().contains("it has expired") { Ok(error) } else { Err(error) }
    });
    assert_eq!(error.await.kind(), ErrorKind::Unavailable);
    // At the first connection it is a matter of the configuration, and not of the authority.
    let error = refused(&url, client).await.to_string();
    assert!(error.contains("it has expired") && !error.contains("tls-ca"), "{error}");
}

async fn a_cluster_node_without_its_own_address_is_reached_over_tls(client: Client) {
    let binary = &RedisServer::binaries()[0];
    let args = ["--cluster-enabled", "yes", "--tls-cluster", "yes"];
    let node = RedisServer::start_tls_with(binary, &args);
    let node = node.expect("a server with TLS");
    let given = node.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).expect("it is up");
    given.ok().expect("all slots");
    let url = node.url().replace("rediss://", "rediss-cluster://");
    let store = store(&with_ca(&url, node.ca_path()), client).await;
    let _ = super::until(|| async { acquire(&store, &seldom(), "first").await }).await;
    for key in ["a", "b", "c"] {
        three_and_no_more(&store, &seldom(), key).await;
    }
}

async fn unreadable_certificate_files_are_named(client: Client) {
    let server = RedisServer::start_tls().expect("a server with TLS");
    let key = server.client_key_path();
    for (url, says) in [
        (with_ca(&server.url(), Path::new("/no/such.pem")), "cannot read /no/such.pem"),
        (with_ca(&server.url(), key), "BEGIN CERTIFICATE"),
        (
            format!(
                "{}?tls-cert={}&tls-key=/no/such.pem",
                server.url(),
                server.ca_path().display()
            ),
            "cannot read /no/such.pem",
        ),
    ] {
        let error = refused(&url, client).await.to_string();
        assert!(error.contains(says), "{error}");
    }
}

with_each_client! {
    only_the_given_authority_is_trusted,
    a_client_certificate_is_sent_on_request,
    a_connection_is_restored_when_the_server_returns,
    a_tls_mismatch_is_reported,
    a_certificate_that_expires_in_use_is_an_outage,
    a_cluster_node_without_its_own_address_is_reached_over_tls,
    unreadable_certificate_files_are_named,
}
