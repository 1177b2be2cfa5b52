//! A misplaced password never shows.

use std::time::Duration;

use ratelimit_redis::{Client, RedisUrl};

use super::{ESCAPED, Leaks, Told, USER, logs_no_password, told_by};

/// No server listens there.
const NOWHERE: &str = "127.0.0.1:1";

/// `PW` is the escaped password, and `WORD` one without characters that have a meaning in a URL.
const MISPLACED: [&str; 78] = [
    // In place of the host.
    "redis://WORD",
    "redis://WORD:6379",
    "redis://WORD:6379/0",
    "redis://WORD/0",
    "redis://PW",
    "redis://USER@WORD",
    "redis://USER@WORD:6379",
    "redis://USER:@WORD",
    "redis://:@WORD:6379",
    "redis://@WORD",
    "redis://[WORD]",
    "redis://:WORD",
    "redis://:PW",
    "rediss://WORD",
    "valkey://WORD",
    "redis-sentinel://WORD",
    "redis-sentinel://WORD,HERE/mymaster",
    "redis-sentinel://HERE,WORD:26379",
    "redis-cluster://WORD,HERE",
    "redis-cluster://HERE,WORD:7000",
    "redis-cluster://USER:@HERE,WORD",
    // In place of the port.
    "redis://USER:WORD",
    "redis://USER:PW",
    "redis://USER:31337",
    "redis://USER:31337/0",
    "redis-cluster://HERE,USER:31337",
    "redis://HERE:WORD",
    // In place of the user, or without a user.
    "redis://WORD@HERE",
    "redis://PW@HERE",
    "redis://WORD:@HERE",
    "redis://PW:@HERE",
    "redis-sentinel://WORD@HERE",
    "redis-cluster://WORD:@HERE",
    // In place of the database or the service.
    "redis://HERE/WORD",
    "redis://HERE/PW",
    "redis://HERE/31337",
    "redis://HERE/0/WORD",
    "redis-sentinel://HERE/WORD",
    "redis-sentinel://HERE/WORD/0",
    "redis-sentinel://HERE/mymaster/31337",
    "redis-cluster://HERE/WORD",
    "redis-cluster://HERE/31337",
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
    // In the query.
    "redis://HERE?password=WORD",
    "redis://HERE?password=PW",
    "redis://HERE?user=USER&password=WORD",
    "redis://HERE?WORD",
    "redis://HERE?WORD=1",
    "redis://HERE?WORD=%FF",
    "redis://HERE?mode=WORD",
    "redis://HERE?protocol=WORD",
    "redis://HERE?db=31337",
    "rediss://HERE?tls-ca=WORD",
    "rediss://HERE?tls-cert=WORD&tls-key=WORD",
    "rediss://HERE?tls-key=PW",
    "redis-sentinel://HERE?service=WORD",
    "redis-sentinel://HERE?sentinel-user=WORD",
    "redis-sentinel://HERE?sentinel-password=WORD@x",
    // In place of the scheme, or without a scheme.
    "WORD://HERE",
    "USER:WORD@HERE",
    "WORD",
    "PW",
    "USER:PW@HERE/0",
];

fn misplaced() -> impl Iterator<Item = String> {
    let filled = |url: &str| {
        let url = url.replace("WORD", "pa55w0rd").replace("PW", ESCAPED);
        url.replace("USER", USER).replace("HERE", NOWHERE)
    };
    MISPLACED.iter().map(move |url| filled(url))
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
    logs_no_password(&mut leaks);
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
