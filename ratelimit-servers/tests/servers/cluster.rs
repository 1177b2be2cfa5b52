//! Clusters start, migrate slots at every pace, lose nodes and recover them.

use std::time::Duration;

use ratelimit_servers::{RedisCluster, RedisServer, RespClient, RespValue};

use super::{DEADLINE, ok, refused};

/// How often each of several slots moves while the others move.
const ROUNDS: usize = 30;

/// The slot of a key, and its owner.
fn place(cluster: &RedisCluster, key: &str) -> (u16, usize) {
    let slot = cluster.slot_of(key);
    (slot, cluster.master_of(slot).expect("an owner"))
}

/// A master other than this one.
fn other(master: usize) -> usize {
    (master + 1) % 3
}

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
fn the_keys_of_a_migrating_slot_move_one_by_one_or_at_its_end() {
    let cluster = RedisCluster::shared().expect("a cluster");
    let (moved, stays) = ("{half-way}:moved", "{half-way}:stays");
    let (slot, from) = place(cluster, moved);
    let to = other(from);
    let (old, new) = (&cluster.nodes()[from], &cluster.nodes()[to]);
    for key in [moved, stays] {
        assert_eq!(old.command(&["SET", key, "1"]), Ok(ok()));
    }
    assert!(cluster.move_key(moved).is_err(), "nothing has begun");
    cluster.begin_migration(slot, to).expect("begun");
    assert_eq!(old.command(&["GET", moved]), Ok(RespValue::text("1")), "it is still there");
    assert_eq!(cluster.move_key(moved), Ok(true));
    assert_eq!(cluster.move_key(moved), Ok(false), "it has gone");
    assert_eq!(old.command(&["GET", stays]), Ok(RespValue::text("1")));
    assert!(refused(old.command(&["GET", moved])).starts_with("ASK "));
    assert!(refused(new.command(&["GET", moved])).starts_with("MOVED "));
    cluster.finish_migration(slot, to).expect("finished");
    let both = new.command(&["MGET", moved, stays]).expect("a reply");
    assert_eq!(both.as_array(), [RespValue::text("1"), RespValue::text("1")]);
    cluster.migrate(slot, from).expect("back");
}

#[test]
fn concurrent_migrations_behind_a_password_do_not_disturb_each_other() {
    let binary = &RedisServer::binaries()[0];
    let args = ["--requirepass", "secret"];
    let cluster = RedisCluster::start_with(binary, 1, &args).expect("a cluster");
    let mut stranger = RespClient::connect(cluster.nodes()[0].port()).expect("it listens");
    assert!(refused(stranger.command(&["GET", "a"])).starts_with("NOAUTH"));
    let there_and_on = &|key: &str| {
        let (slot, mut from) = place(&cluster, key);
        let keys: Vec<String> = (0..250).map(|n| format!("{key}:{n}")).collect();
        for key in &keys {
            assert_eq!(cluster.nodes()[from].command(&["SET", key, "kept"]), Ok(ok()));
        }
        let all: Vec<&str> = ["MGET"].into_iter().chain(keys.iter().map(String::as_str)).collect();
        for step in 1..=ROUNDS {
            let to = other(from);
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

#[test]
fn a_restarted_node_keeps_its_identity() {
    let cluster = RedisCluster::start().expect("a cluster");
    let (node, port) = (&cluster.nodes()[0], cluster.nodes()[0].port());
    cluster.kill(0);
    assert!(node.pid().is_none() && node.command(&["PING"]).is_err());
    let soon = Duration::from_millis(100);
    assert!(cluster.wait_until_healthy(soon).is_err(), "no node has its slots");
    cluster.restart(0).expect("again");
    cluster.wait_until_healthy(DEADLINE).expect("healthy again");
    assert_eq!((cluster.master_of(0), node.port()), (Ok(0), port));
    assert_eq!(node.command(&["CLUSTER", "MYID"]), Ok(RespValue::text(cluster.id(0))));
    cluster.migrate(0, 1).expect("moved");
}

#[test]
fn a_replica_takes_over_from_a_master_that_is_dead_or_hangs() {
    let cluster = RedisCluster::start_with_replicas().expect("a cluster");
    assert_eq!(cluster.nodes().len(), 6);
    let (slot, master) = place(&cluster, "a");
    let replica = master + 3;
    assert_eq!(cluster.master_of_replica(replica), Ok(Some(master)));
    let kept = |node: usize| {
        assert_eq!(cluster.master_of(slot), Ok(node));
        assert_eq!(cluster.nodes()[node].command(&["GET", "a"]), Ok(RespValue::text("kept")));
    };
    let mut client = cluster.nodes()[master].client().expect("it listens");
    assert_eq!(client.command(&["SET", "a", "kept"]), Ok(ok()));
    assert_eq!(client.command(&["WAIT", "1", "5000"]), Ok(RespValue::Integer(1)));
    cluster.kill(master);
    cluster.promote(replica).expect("it takes over at once");
    kept(replica);
    cluster.restart(master).expect("again");
    cluster.wait_until_healthy(DEADLINE).expect("healthy");
    assert_eq!(cluster.master_of_replica(master), Ok(Some(replica)), "it has learnt");
    cluster.kill(replica);
    cluster.wait_until_healthy(DEADLINE).expect("elected");
    kept(master);
    cluster.restart(replica).expect("again");
    cluster.wait_until_healthy(DEADLINE).expect("healthy");
    cluster.nodes()[master].pause().expect("paused");
    cluster.wait_until_healthy(DEADLINE).expect("elected");
    kept(replica);
    cluster.nodes()[master].resume().expect("it goes on");
    cluster.wait_until_healthy(DEADLINE).expect("it has learnt");
    assert_eq!(cluster.master_of_replica(master), Ok(Some(replica)));
}

#[test]
fn behind_proxies_no_answer_names_a_nodes_own_port() {
    let mut cluster = RedisCluster::start_behind_proxies().expect("a cluster");
    let fourth = cluster.add_empty_master().expect("a fourth master");
    assert_eq!(cluster.proxies().len(), 4);
    cluster.migrate(0, fourth).expect("moved");
    assert_eq!((fourth, cluster.master_of(0)), (3, Ok(3)));
    for node in cluster.nodes() {
        let reply = node.command(&["CLUSTER", "NODES"]).expect("a reply").to_string();
        for (node, proxy) in cluster.nodes().iter().zip(cluster.proxies()) {
            assert!(!reply.contains(&format!(":{}@", node.port())), "{reply}");
            assert!(reply.contains(&format!(":{}@", proxy.port())), "{reply}");
        }
    }
    cluster.migrate(0, 0).expect("back");
    cluster.wait_until_healthy(DEADLINE).expect("healthy");
    assert_eq!(cluster.master_of_replica(fourth), Ok(None), "it stays a master without slots");
    let (_, owner) = place(&cluster, "a");
    let through =
        |node: usize| RespClient::connect(cluster.proxies()[node].port()).expect("it listens");
    let moved = refused(through(other(owner)).command(&["GET", "a"]));
    assert!(moved.ends_with(&format!(":{}", cluster.proxies()[owner].port())), "{moved}");
    cluster.proxies()[owner].swallow_matching("INCR", 1);
    assert!(through(owner).command(&["INCR", "a"]).is_err());
    assert_eq!(cluster.nodes()[owner].command(&["GET", "a"]), Ok(RespValue::text("1")));
}
