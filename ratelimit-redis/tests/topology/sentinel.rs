//! Sentinels that hang, are down, know no such service, or have logins of their own.

use crate::common::prelude::*;

const DEADLINE: Duration = Duration::from_millis(500);

async fn a_sentinel_that_hangs_or_is_down_does_no_harm(client: Client) {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let [first, second, _] = sentinels.ports()[..] else { panic!("three sentinels") };
    let (hangs, away) = (proxy_of(first), proxy_of(first));
    hangs.hang(true);
    away.refuse(true);
    let places = [hangs.port(), away.port(), second].map(|port| format!("127.0.0.1:{port}"));
    let begin = Instant::now();
    let store = store(&format!("redis-sentinel://{}", places.join(",")), client).await;
    assert_eq!(remaining_after_acquire(&store, &seldom(), "a").await, 2);
    assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
    for url in [hangs.url(), away.url()] {
        let url = url.replace("redis://", "redis-sentinel://");
        let begin = Instant::now();
        fails(store_within(DEADLINE, &url, client).await, ErrorKind::Unavailable, "");
        assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
    }
    let unknown = sentinels.url().replace("/mymaster", "/cache");
    let error = store_within(PATIENCE, &unknown, client).await;
    let said = fails(error, ErrorKind::Config, "watches no service \"cache\"");
    assert!(said.contains("SENTINEL MASTERS"), "{said}");
    let server = server();
    let url = format!("redis-sentinel://127.0.0.1:{}", server.port());
    fails(store_within(PATIENCE, &url, client).await, ErrorKind::Config, "is no sentinel");
}

async fn servers_and_sentinels_have_logins_of_their_own(client: Client) {
    let binary = &RedisServer::binaries()[0];
    let sentinels = RedisSentinels::start_with(binary, &["--requirepass", "s3cret"]);
    let sentinels = sentinels.expect("sentinels");
    let url = sentinels.url().replace("//", "//:s3cret@");
    assert_eq!(remaining_after_acquire(&store(&url, client).await, &seldom(), "a").await, 2);
    fails(store_within(PATIENCE, &sentinels.url(), client).await, ErrorKind::Config, "");
    for sentinel in sentinels.sentinels() {
        tell(sentinel, &["ACL", "SETUSER", "asks", "on", ">wh3re", "+@all"]);
    }
    let locked = format!("{url}?sentinel-user=asks&sentinel-password=wh3re");
    assert_eq!(remaining_after_acquire(&store(&locked, client).await, &seldom(), "a").await, 1);
    let error = store_within(PATIENCE, &locked.replace("wh3re", "n0where"), client).await;
    let said = fails(error, ErrorKind::Config, "sentinel-password=");
    assert!(!said.contains("n0where"), "{said}");
}

with_each_client! {
    a_sentinel_that_hangs_or_is_down_does_no_harm,
    servers_and_sentinels_have_logins_of_their_own,
}
