//! What stands before the `@` of a URL and the values of its options never show, whatever else is wrong with it.

use super::{ESCAPED, Leaks, USER, told_by};
use crate::common::prelude::*;

/// No server listens there.
const NOWHERE: &str = "127.0.0.1:1";

/// `K` is each kind of URL, `PW` the escaped password, `WORD` one without characters that have a meaning in a URL.
const URLS: [&str; 33] = [
    "K://USER:PW@HERE",
    "K://:PW@HERE",
    "K://WORD@HERE",
    "K://WORD:@HERE",
    "redis-cluster://USER:PW@HERE,no-such-host:1",
    // Unescaped or over-escaped.
    "redis://USER:x/WORD@HERE",
    "redis://USER:x?WORD@HERE",
    "redis://USER:x#WORD@HERE",
    "redis://USER:x@WORD@HERE",
    "redis://USER:WORD%40HERE",
    "redis://USER%3AWORD%40HERE",
    "redis%3A%2F%2FUSER:WORD@HERE",
    "redis://USER:WORD%FF@HERE",
    "redis://USER:pa5 WORD@HERE",
    "redis-sentinel://USER:x/WORD@HERE/mymaster",
    // With something else that is wrong.
    "redis://USER:WORD",
    "redis://USER:WORD@",
    "redis://USER:WORD@HERE,",
    "redis://USER:WORD@HERE:x",
    "redis://USER:WORD@HERE?mode=x",
    "redis-cluster://USER:WORD@HERE/3",
    "redis-cluster://USER:WORD@HERE,USER:WORD@HERE",
    "redis-sentinel://USER:WORD@HERE,USER:WORD@HERE/mymaster",
    "USER:WORD@HERE",
    "USER:PW@HERE/0",
    // In an option.
    "redis://HERE?password=WORD",
    "redis://HERE?user=USER&password=PW",
    "redis://HERE?mode=WORD",
    "redis://HERE?protocol=WORD",
    "redis://HERE?client=WORD",
    "redis-sentinel://HERE?sentinel-user=WORD",
    "redis-sentinel://HERE?sentinel-password=PW",
    "redis-sentinel://HERE?sentinel-user=USER&sentinel-password=PW",
];

fn urls() -> impl Iterator<Item = String> {
    URLS.iter().flat_map(|url| {
        let kinds: &[_] = &["redis", "redis-sentinel", "redis-cluster"];
        let kinds = &kinds[..if url.starts_with('K') { 3 } else { 1 }];
        kinds.iter().map(move |kind| {
            let url = url.replace("K:", &format!("{kind}:")).replace("WORD", "pa55w0rd");
            url.replace("PW", ESCAPED).replace("USER", USER).replace("HERE", NOWHERE)
        })
    })
}

async fn a_failed_connection_names_its_host_and_shows_no_login(client: Client) {
    let mut leaks = Leaks::default();
    for url in urls() {
        told_by(&url, client, Duration::from_secs(2)).await.keeps_secret(&url, &mut leaks);
    }
    for place in ["127.0.0.1:1", "[::1]:1", "no-such-host:1"] {
        let url = format!("redis://us3r:w0rd@{place}/3");
        let told = told_by(&url, client, Duration::from_secs(5)).await;
        told.keeps_secret(&url, &mut leaks);
        assert!(told.0.iter().any(|said| said.contains(place)), "{url}: {:?}", told.0);
    }
    leaks.none();
}

with_each_client! {
    a_failed_connection_names_its_host_and_shows_no_login,
}
