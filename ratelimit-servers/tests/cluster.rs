//! Clusters start, migrate slots at every pace, lose nodes and recover them.
#![cfg(unix)]
#![allow(clippy::expect_used, reason = "tests")]

use std::time::Duration;

use ratelimit_servers::{RedisCluster, RedisServer, RespClient, RespValue};

const DEADLINE: Duration = Duration::from_secs(30);

/// How often each of several slots moves while the others move.
const ROUNDS: usize = 30;

fn ok() -> RespValue {
    RespValue::text("OK")
}

fn connect(server: &RedisServer) -> RespClient {
    RespClient::connect(server.port()).expect("it listens")
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
fn a_slot_migrates_there_and_back_with_its_keys() {
    let cluster = RedisCluster::shared().expect("a cluster");
    let slot = cluster.slot_of("{there-and-back}");
    let from = cluster.master_of(slot).expect("an owner");
    let to = other(from);
    let at = |node: usize| &cluster.nodes()[node];
    let keys: Vec<String> = (0..250).map(|n| format!("{{there-and-back}}:{n}")).collect();
    for key in &keys {
        assert_eq!(at(from).command(&["SET", key, "kept", "PX", "60000"]), Ok(ok()));
    }
    for (from, to) in [(from, to), (to, from)] {
        cluster.migrate(slot, to).expect("moved");
        assert_eq!(cluster.master_of(slot), Ok(to));
        for key in &keys {
            assert_eq!(at(to).command(&["GET", key]), Ok(RespValue::text("kept")));
        }
        let moved = at(from).command(&["GET", &keys[0]]).expect("a reply");
        assert_eq!(moved.redirected_to(), Some(at(to).port()), "{moved}");
    }
    cluster.migrate(slot, from).expect("nothing to do");
    assert!(cluster.begin_migration(slot, from).is_err(), "it is there");
}

#[test]
fn a_migrating_slot_answers_ask_and_tryagain() {
    let cluster = RedisCluster::shared().expect("a cluster");
    let (moved, stays, absent) = ("{half-way}:moved", "{half-way}:stays", "{half-way}:absent");
    let slot = cluster.slot_of(moved);
    let from = cluster.master_of(slot).expect("an owner");
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
    for key in [moved, absent] {
        let asked = old.command(&["GET", key]).expect("a reply");
        assert!(asked.as_error().is_some_and(|message| message.starts_with("ASK ")), "{asked}");
        assert_eq!(asked.redirected_to(), Some(new.port()));
    }
    let mut asking = connect(new);
    let unasked = asking.command(&["GET", moved]).expect("a reply");
    assert!(unasked.as_error().is_some_and(|message| message.starts_with("MOVED ")), "{unasked}");
    assert_eq!(asking.command(&["ASKING"]), Ok(ok()));
    assert_eq!(asking.command(&["GET", moved]), Ok(RespValue::text("1")));
    assert_eq!(asking.command(&["ASKING"]), Ok(ok()));
    let both = asking.command(&["MGET", moved, stays]).expect("a reply");
    assert!(both.as_error().is_some_and(|message| message.starts_with("TRYAGAIN")), "{both}");
    cluster.finish_migration(slot, to).expect("finished");
    let both = new.command(&["MGET", moved, stays]).expect("a reply");
    assert_eq!(both.as_array(), [RespValue::text("1"), RespValue::text("1")]);
    cluster.migrate(slot, from).expect("back");
}

#[test]
fn concurrent_migrations_do_not_disturb_each_other() {
    let cluster = RedisCluster::start_with_replicas().expect("a cluster");
    let there_and_on = &|key: &str| {
        let slot = cluster.slot_of(key);
        let first = cluster.master_of(slot).expect("an owner");
        assert_eq!(cluster.nodes()[first].command(&["SET", key, "kept"]), Ok(ok()));
        for step in 1..=ROUNDS {
            let to = (first + step) % 3;
            assert_eq!(cluster.migrate(slot, to), Ok(()), "{key}, step {step}");
            let kept = cluster.nodes()[to].command(&["GET", key]);
            assert_eq!(kept, Ok(RespValue::text("kept")), "{key}, step {step}");
        }
    };
    std::thread::scope(|scope| {
        for key in ["{a}", "{b}", "{c}", "{d}", "{e}", "{f}"] {
            scope.spawn(move || there_and_on(key));
        }
    });
    cluster.wait_until_healthy(DEADLINE).expect("healthy");
}

#[test]
fn a_migration_can_be_abandoned() {
    let cluster = RedisCluster::shared().expect("a cluster");
    let key = "{abandoned}";
    let slot = cluster.slot_of(key);
    let from = cluster.master_of(slot).expect("an owner");
    cluster.begin_migration(slot, other(from)).expect("begun");
    cluster.abandon_migration(slot).expect("taken back");
    assert_eq!(cluster.nodes()[from].command(&["GET", key]), Ok(RespValue::Nil));
}

#[test]
fn flush_scripts_reaches_every_node() {
    let cluster = RedisCluster::start().expect("a cluster");
    let load = |node: &RedisServer| node.command(&["SCRIPT", "LOAD", "return 7"]);
    let loaded: Vec<_> = cluster.nodes().iter().map(load).collect();
    let sha = loaded[0].as_ref().expect("a reply").to_string();
    let run = |node: &RedisServer| node.command(&["EVALSHA", &sha, "0"]).expect("a reply");
    assert!(cluster.nodes().iter().all(|node| run(node) == RespValue::Integer(7)));
    cluster.flush_scripts().expect("flushed");
    for node in cluster.nodes() {
        assert!(run(node).as_error().is_some_and(|message| message.starts_with("NOSCRIPT")));
    }
}

#[test]
fn a_restarted_node_keeps_its_identity() {
    let cluster = RedisCluster::start().expect("a cluster");
    let owner = cluster.master_of(0).expect("an owner");
    let port = cluster.nodes()[owner].port();
    cluster.kill(owner);
    assert!(cluster.nodes()[owner].pid().is_none());
    assert!(cluster.nodes()[owner].command(&["PING"]).is_err());
    let soon = Duration::from_millis(100);
    assert!(cluster.wait_until_healthy(soon).is_err(), "no node has its slots");
    cluster.restart(owner).expect("again");
    cluster.wait_until_healthy(DEADLINE).expect("healthy again");
    assert_eq!(cluster.master_of(0), Ok(owner));
    let node = &cluster.nodes()[owner];
    assert_eq!(node.port(), port);
    assert_eq!(node.command(&["CLUSTER", "MYID"]), Ok(RespValue::text(cluster.id(owner))));
    let slot = cluster.slot_of("{x}");
    cluster.migrate(slot, other(cluster.master_of(slot).expect("an owner"))).expect("moved");
}

#[test]
fn a_replica_takes_over_by_election_or_on_command() {
    let cluster = RedisCluster::start_with_replicas().expect("a cluster");
    assert_eq!(cluster.nodes().len(), 6);
    let key = "{a}";
    let slot = cluster.slot_of(key);
    let master = cluster.master_of(slot).expect("an owner");
    let replica = master + 3;
    assert_eq!(cluster.master_of_replica(replica), Ok(Some(master)));
    let mut client = connect(&cluster.nodes()[master]);
    assert_eq!(client.command(&["SET", key, "kept"]), Ok(ok()));
    assert_eq!(client.command(&["WAIT", "1", "5000"]), Ok(RespValue::Integer(1)));
    cluster.kill(master);
    cluster.promote(replica).expect("it takes over at once");
    assert_eq!(cluster.master_of(slot), Ok(replica));
    assert_eq!(cluster.nodes()[replica].command(&["GET", key]), Ok(RespValue::text("kept")));
    cluster.restart(master).expect("again");
    cluster.wait_until_healthy(DEADLINE).expect("healthy");
    assert_eq!(cluster.master_of_replica(master), Ok(Some(replica)), "it has learnt");
    cluster.kill(replica);
    cluster.wait_until_healthy(DEADLINE).expect("elected");
    assert_eq!(cluster.master_of(slot), Ok(master), "the only one that could");
    assert_eq!(cluster.nodes()[master].command(&["GET", key]), Ok(RespValue::text("kept")));
}

#[test]
fn a_master_that_hangs_is_replaced_and_follows_when_it_goes_on() {
    let cluster = RedisCluster::start_with_replicas().expect("a cluster");
    cluster.nodes()[0].pause().expect("paused");
    cluster.wait_until_healthy(DEADLINE).expect("elected");
    assert_eq!(cluster.master_of(0), Ok(3));
    cluster.nodes()[0].resume().expect("it goes on");
    cluster.wait_until_healthy(DEADLINE).expect("it has learnt");
    assert_eq!(cluster.master_of_replica(0), Ok(Some(3)));
}

#[test]
fn an_empty_master_answers_before_it_owns_a_slot() {
    let mut cluster = RedisCluster::start().expect("a cluster");
    let empty = cluster.add_empty_master().expect("a fourth");
    assert_eq!(empty, 3);
    let slot = cluster.slot_of("{new}");
    let from = cluster.master_of(slot).expect("an owner");
    cluster.begin_migration(slot, empty).expect("begun");
    let asked = cluster.nodes()[from].command(&["GET", "{new}"]).expect("a reply");
    assert_eq!(asked.redirected_to(), Some(cluster.nodes()[empty].port()), "{asked}");
    cluster.finish_migration(slot, empty).expect("finished");
    assert_eq!(cluster.master_of(slot), Ok(empty));
    cluster.migrate(slot, from).expect("back");
    cluster.wait_until_healthy(DEADLINE).expect("healthy");
    assert_eq!(cluster.master_of_replica(empty), Ok(None), "it stays a master");
}

#[test]
fn a_cluster_with_a_password_comes_up_and_moves_slots() {
    let binary = &RedisServer::binaries()[0];
    let args = ["--requirepass", "secret"];
    let cluster = RedisCluster::start_with(binary, 1, &args).expect("a cluster");
    let mut stranger = connect(&cluster.nodes()[0]);
    let refused = stranger.command(&["GET", "a"]).expect("a reply");
    assert!(refused.as_error().is_some_and(|message| message.starts_with("NOAUTH")), "{refused}");
    let slot = cluster.slot_of("a");
    let (from, to) = (cluster.master_of(slot).expect("an owner"), 0);
    assert_ne!(from, to);
    assert_eq!(cluster.nodes()[from].command(&["SET", "a", "1"]), Ok(ok()));
    cluster.migrate(slot, to).expect("moved");
    assert_eq!(cluster.nodes()[to].command(&["GET", "a"]), Ok(RespValue::text("1")));
}

#[test]
fn behind_proxies_no_answer_names_a_nodes_own_port() {
    let binary = &RedisServer::binaries()[0];
    let mut cluster = RedisCluster::start_behind_proxies_with(binary, 1, &[]).expect("a cluster");
    assert_eq!(cluster.proxies().len(), 6);
    let fourth = cluster.add_empty_master().expect("a fourth master");
    assert_eq!(cluster.proxies().len(), 7);
    cluster.migrate(0, fourth).expect("moved");
    for node in cluster.nodes() {
        let reply = node.command(&["CLUSTER", "NODES"]).expect("a reply").to_string();
        for (node, proxy) in cluster.nodes().iter().zip(cluster.proxies()) {
            assert!(!reply.contains(&format!(":{}@", node.port())), "{reply}");
            assert!(reply.contains(&format!(":{}@", proxy.port())), "{reply}");
        }
    }
    let slot = cluster.slot_of("a");
    let owner = cluster.master_of(slot).expect("an owner");
    let proxy = &cluster.proxies()[owner];
    let mut through = RespClient::connect(cluster.proxies()[other(owner)].port()).expect("open");
    let moved = through.command(&["GET", "a"]).expect("a reply");
    assert_eq!(moved.redirected_to(), Some(proxy.port()), "{moved}");
    let mut through = RespClient::connect(proxy.port()).expect("open");
    proxy.swallow_matching("INCR", 1);
    assert!(through.command(&["INCR", "a"]).is_err());
    assert_eq!(cluster.nodes()[owner].command(&["GET", "a"]), Ok(RespValue::text("1")));
}
