//! A cluster says truly in which slot a key lies, and forgets all scripts. That it starts, loses
//! nodes and recovers them, and that slots move at every pace with their keys, the tests of
//! `ratelimit-redis` rely on in `topology`.

use ratelimit_servers::{RedisCluster, RedisServer, RespValue};

use super::refused;

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
