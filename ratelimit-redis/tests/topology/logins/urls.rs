//! A misplaced password never shows.

use std::time::Duration;

use ratelimit_redis::{Client, RedisUrl};

use super::{ESCAPED, Leaks, Told, USER, told_by};

/// No server listens there.
const NOWHERE: &str = "127.0.0.1:1";

/// `K` is each kind of URL, `X` a password without characters that have a meaning in a URL or an escaped one, and `N`
/// either of them or a number.
const MISPLACED: [&str; 51] = [
    // In place of the host.
    "K://X",
    "K://X:6379",
    "redis://X/0",
    "redis://USER@X",
    "redis://USER@X:6379",
    "redis://USER:@X",
    "redis://:@X:6379",
    "redis://@X",
    "redis://[X]",
    "redis://:X",
    "rediss://X",
    "valkey://X",
    "redis-sentinel://X,HERE/mymaster",
    "redis-cluster://X,HERE",
    "redis-cluster://HERE,X:7000",
    "redis-cluster://USER:@HERE,X",
    // In place of the port.
    "redis://USER:N",
    "redis://USER:N/0",
    "redis-cluster://HERE,USER:N",
    "redis://HERE:X",
    // In place of the user, or without a user.
    "K://X@HERE",
    "K://X:@HERE",
    // In place of the database or the service.
    "K://HERE/X",
    "redis://HERE/N",
    "redis-cluster://HERE/N",
    "redis://HERE/0/X",
    "redis-sentinel://HERE/X/0",
    "redis-sentinel://HERE/mymaster/N",
    // In its own place, but unescaped or over-escaped.
    "redis://USER:x/WORD@HERE",
    "redis://USER:x?WORD@HERE",
    "redis://USER:x#WORD@HERE",
    "redis://USER:x@WORD@HERE",
    "redis://USER:WORD%40HERE",
    "redis://USER%3AWORD%40HERE",
    "redis%3A%2F%2FUSER:WORD@HERE",
    "redis://USER:WORD%FF@HERE",
    "redis://USER:pa5 WORD@HERE",
    "redis://USER:WORD@",
    "redis://USER:WORD@HERE,",
    "redis://USER:WORD@HERE:x",
    "redis-cluster://USER:WORD@HERE,USER:WORD@HERE",
    "redis-sentinel://USER:WORD@HERE,USER:WORD@HERE/mymaster",
    "redis-cluster://USER:WORD@HERE/3",
    "redis-sentinel://USER:x/WORD@HERE/mymaster",
    // In the query: by itself, or as an option's value.
    "redis://HERE?X",
    "redis://HERE?X=1",
    "redis://HERE?WORD=%FF",
    // In place of the scheme, or without a scheme.
    "X://HERE",
    "USER:X@HERE",
    "X",
    "USER:PW@HERE/0",
];

/// Options, of which each may be taken for the place of the password.
const OPTIONS: [&str; 11] = [
    "redis://HERE?password",
    "redis://HERE?user=USER&password",
    "redis://HERE?mode",
    "redis://HERE?protocol",
    "redis://HERE?db",
    "rediss://HERE?tls-ca",
    "rediss://HERE?tls-cert=WORD&tls-key",
    "rediss://HERE?tls-key",
    "redis-sentinel://HERE?service",
    "redis-sentinel://HERE?sentinel-user",
    "redis-sentinel://HERE?sentinel-password",
];

fn misplaced() -> impl Iterator<Item = String> {
    let each = |url: String, what: &str, with: &[&str]| -> Vec<String> {
        let count = if url.contains(what) { with.len() } else { 1 };
        with[..count].iter().map(|with| url.replace(what, with)).collect()
    };
    let options = OPTIONS.map(|option| format!("{option}=N"));
    let all = MISPLACED.into_iter().map(str::to_owned).chain(options);
    all.flat_map(move |url| each(url, "K", &["redis", "redis-sentinel", "redis-cluster"]))
        .flat_map(move |url| each(url, "X", &["WORD", "PW"]))
        .flat_map(move |url| each(url, "N", &["WORD", "PW", "31337"]))
        .map(|url| url.replace("WORD", "pa55w0rd").replace("PW", ESCAPED))
        .map(|url| url.replace("USER", USER).replace("HERE", NOWHERE))
}

#[test]
fn a_parsed_url_never_shows_a_misplaced_password() {
    let mut leaks = Leaks::default();
    for url in misplaced() {
        let mut told = Told::default();
        match RedisUrl::parse(&url) {
            Ok(read) => {
                told.debug(&read);
                told.0.push(read.to_string());
            }
            Err(error) => told.error(&error),
        }
        told.keeps_secret(&url, &mut leaks);
    }
    leaks.none();
}

async fn a_failed_connection_never_shows_a_misplaced_password(client: Client) {
    let mut leaks = Leaks::default();
    for url in misplaced() {
        told_by(&url, client, Duration::from_secs(2)).await.keeps_secret(&url, &mut leaks);
    }
    leaks.none();
}

async fn an_unambiguous_address_is_shown(client: Client) {
    let mut leaks = Leaks::default();
    for (url, place) in [
        ("redis://127.0.0.1:1", "127.0.0.1:1"),
        ("redis://[::1]:1", "[::1]:1"),
        ("redis://localhost:1", "localhost:1"),
        ("redis://no-such-host.invalid:1", "no-such-host.invalid:1"),
        ("redis://us3r:w0rd@no-such-host:1", "no-such-host:1"),
        // The server whose look-up fails first.
        ("redis-cluster://us3r:w0rd@no-such-host:1,no-such-host:2", "no-such-host:"),
        ("redis://no-such-host:1", "cannot reach Redis at ***: "),
        ("redis://no-such-host", "that stands before the host, user:password@host"),
        ("redis-sentinel://us3r:w0rd@127.0.0.1:1/cache/3", "127.0.0.1:1"),
    ] {
        let told = told_by(url, client, Duration::from_secs(5)).await;
        told.keeps_secret(url, &mut leaks);
        assert!(told.0.iter().any(|said| said.contains(place)), "{url}: {:?}", told.0);
    }
    leaks.none();
}

with_each_client! {
    a_failed_connection_never_shows_a_misplaced_password,
    an_unambiguous_address_is_shown,
}
