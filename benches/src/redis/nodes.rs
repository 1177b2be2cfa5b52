//! How decisions grow over the nodes of a cluster, with 256 tasks for each: one key per node, and
//! many keys, of which all lie on the first one, two or three nodes of a cluster of three. One
//! thread asks, and the machine has to run all nodes, so decisions per second end where its
//! processors do. The servers' time per decision does not depend on that: if it stays the same from
//! node to node, nodes share nothing.

use std::sync::Arc;

use ratelimit_redis::RedisStore;
use ratelimit_servers::RedisCluster;

use crate::keys::CallerKey;
use crate::measure::Fallible;

use super::lab::Lab;
use super::plain::{FRED, Fred, GCRA_SCRIPT, PlainScript, REDIS_RS, RedisRs, WIDE, key};
use super::throughput::{OurStore, Workload, charge};

/// The tasks that ask, for each node on which keys lie.
const TASKS_PER_NODE: usize = 256;
/// Many keys of a cluster, on all of its nodes together.
const MANY: usize = 9_000;
const SLOTS: usize = 16_384;

/// Measures by each client, on one node and then on more.
pub(super) async fn run(lab: &mut Lab) -> Fallible {
    let cluster = RedisCluster::start()?;
    let mut sha = String::new();
    for node in cluster.nodes() {
        sha = node.command(&["SCRIPT", "LOAD", GCRA_SCRIPT])?.ok()?.to_string();
    }
    let script = PlainScript { sha, numbers: WIDE, limits: 1 };
    let ours = async |client: &str| {
        let store = RedisStore::connect(&format!("{}?client={client}", cluster.url())).await?;
        OurStore::new(WIDE, store).map(Arc::new)
    };
    let (by_redis, by_fred) = (ours("redis").await?, ours("fred").await?);
    let ports = cluster.client_ports();
    let urls = ports.iter().map(|port| format!("redis://127.0.0.1:{port}")).collect();
    let loop_by_redis = Arc::new(RedisRs::connect_to_cluster(urls, &script).await?);
    let others: Vec<_> = ports[1..].iter().map(|port| format!("node=127.0.0.1:{port}")).collect();
    let url = format!("redis-cluster://127.0.0.1:{}?{}", ports[0], others.join("&"));
    let loop_by_fred = Arc::new(Fred::connect(&url, &script).await?);
    for many in [false, true] {
        for nodes in 1..=cluster.nodes().len() {
            let callers = |key: &dyn Fn(&CallerKey) -> String| callers(&cluster, nodes, many, key);
            let mine = callers(&|caller| format!("{{{}}}", caller.as_str()));
            let of_redis = callers(&|caller| key(REDIS_RS, caller.as_str()));
            let of_fred = callers(&|caller| key(FRED, caller.as_str()));
            charge(&by_redis, &mine).await?;
            charge(&loop_by_redis, &of_redis).await?;
            charge(&loop_by_fred, &of_fred).await?;
            let load = |client, peer, theirs| Workload {
                part: "nodes",
                client,
                peer,
                servers: cluster.nodes(),
                nodes,
                tasks: nodes * TASKS_PER_NODE,
                keys: mine.len(),
                callers: [&mine, theirs],
            };
            let (quick, report) = (lab.quick, &mut lab.report);
            load("redis", "redis-rs loop", &of_redis)
                .measure(quick, report, &by_redis, &loop_by_redis)
                .await?;
            load("fred", "fred loop", &of_fred)
                .measure(quick, report, &by_fred, &loop_by_fred)
                .await?;
        }
    }
    Ok(())
}

/// Callers whose keys lie on the first nodes: one per node, or many.
fn callers(
    cluster: &RedisCluster,
    nodes: usize,
    many: bool,
    key: &dyn Fn(&CallerKey) -> String,
) -> Arc<Vec<CallerKey>> {
    let per_node = if many { MANY / nodes } else { 1 };
    let mut left = vec![per_node; nodes];
    let is_wanted = |caller: &CallerKey| {
        // The nodes share the slots evenly.
        let (slot, all) = (usize::from(cluster.slot_of(&key(caller))), cluster.nodes().len());
        let node = (1..all).filter(|node| slot >= node * SLOTS / all).count();
        let Some(left) = left.get_mut(node).filter(|left| **left > 0) else { return false };
        *left -= 1;
        true
    };
    Arc::new((0..).map(CallerKey::new).filter(is_wanted).take(per_node * nodes).collect())
}
