//! Servers say why they do not start. That they start, stop and start again on their port, the
//! tests of `ratelimit-redis` rely on.

use ratelimit_servers::RedisServer;

#[test]
fn what_does_not_start_says_why_and_the_remedy() {
    let message = RedisServer::start_with("no-such-redis-server", &[]).expect_err("no such binary");
    assert!(message.contains("apt-get install redis-server"), "{message}");
    let message = RedisServer::start_with(&RedisServer::binaries()[0], &["--no-such-option", "1"])
        .expect_err("no such option");
    assert!(message.contains("no-such-option"), "in the server's own words: {message}");
}
