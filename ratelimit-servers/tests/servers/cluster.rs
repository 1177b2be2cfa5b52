//! Clusters start and migrate slots at every pace. That they lose nodes and recover them, and that the keys of a slot move one by
//! one, the tests of `ratelimit-redis` rely on in `topology`.

use ratelimit_servers::{RedisCluster, RedisServer, RespClient, RespValue};

use super::{DEADLINE, ok, refused};

/// How often each of several slots moves while the others move.
const ROUNDS: usize = 30;

#[test]
fn the_shared_cluster_is_started_once_and_has_all_slots() {
    let cluster = RedisCluster::shared().expect("a cluster");
    assert_eq!(cluster.url(), RedisCluster::shared().expect("the same").url());
    let ports: Vec<String> =
        cluster.nodes().iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    assert_eq!(cluster.url(), format!("redis-cluster://{}", ports.join(",")));
    let owners = [0, 5460, 5461, 10_921, 10_922, 16_383].map(|slot| cluster.master_of(slot));
    assert_eq!(owners, [0, 0, 1, 1, 2, 2].map(Ok));
}

#[test]
fn the_first_hash_tag_decides_the_slot() {
    let cluster = RedisCluster::shared().expect("a cluster");
    for key in ["", "a", "123456789", "rl:{abc}:evil{zzz}", "{}a", "{a", "a{b}c", "\u{fc}"] {
        let asked = cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", key]);
        let slot = i64::from(cluster.slot_of(key));
        assert_eq!(asked, Ok(RespValue::Integer(slot)), "{key:?}");
    }
}

#[test]
fn concurrent_migrations_behind_a_password_do_not_disturb_each_other() {
    let binary = &RedisServer::binaries()[0];
    let args = ["--requirepass", "secret"];
    let cluster = RedisCluster::start_with(binary, 1, &args).expect("a cluster");
    let mut stranger = RespClient::connect(cluster.nodes()[0].port()).expect("it listens");
    assert!(refused(stranger.command(&["GET", "a"])).starts_with("NOAUTH"));
    let there_and_on = &|key: &str| {
        let slot = cluster.slot_of(key);
        let mut from = cluster.master_of(slot).expect("an owner");
        let keys: Vec<String> = (0..250).map(|n| format!("{key}:{n}")).collect();
        for key in &keys {
            assert_eq!(cluster.nodes()[from].command(&["SET", key, "kept"]), Ok(ok()));
        }
        let all: Vec<&str> = ["MGET"].into_iter().chain(keys.iter().map(String::as_str)).collect();
        for step in 1..=ROUNDS {
            let to = (from + 1) % 3;
            assert_eq!(cluster.migrate(slot, to), Ok(()), "{key}, step {step}");
            let (old, new) = (&cluster.nodes()[from], &cluster.nodes()[to]);
            let kept = new.command(&all).expect("a reply");
            assert_eq!(kept.as_array(), vec![RespValue::text("kept"); 250], "{key}, step {step}");
            let moved = refused(old.command(&["GET", &keys[0]]));
            assert!(moved.ends_with(&format!(":{}", new.port())), "{moved}");
            from = to;
        }
        cluster.migrate(slot, from).expect("nothing to do");
        assert!(cluster.begin_migration(slot, from).is_err(), "it is there");
    };
    std::thread::scope(|scope| {
        for key in ["{a}", "{b}", "{c}", "{d}", "{e}", "{f}"] {
            scope.spawn(move || there_and_on(key));
        }
    });
    cluster.wait_until_healthy(DEADLINE).expect("healthy");
}

#[test]
fn flush_scripts_reaches_every_node() {
    let cluster = RedisCluster::shared().expect("a cluster");
    let load = |node: &RedisServer| node.command(&["SCRIPT", "LOAD", "return 7"]);
    let shas: Vec<_> = cluster.nodes().iter().map(load).collect();
    let sha = shas[0].as_ref().expect("a reply").to_string();
    cluster.flush_scripts().expect("flushed");
    for node in cluster.nodes() {
        assert!(refused(node.command(&["EVALSHA", &sha, "0"])).starts_with("NOSCRIPT"));
    }
}
