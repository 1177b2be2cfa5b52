//! Masters that die, hang, are replaced or lose their replication, and slots that move: of a
//! cluster, or of a master that Sentinels name.

use std::sync::OnceLock;

use tokio::sync::{Mutex, MutexGuard};

use super::{AWAY, Place, Row, Traffic, on};
use crate::common::prelude::*;

/// Masters with replicas, for one test at a time. Each finds them healthy and leaves them healthy.
#[derive(Clone, Copy)]
enum Servers {
    Cluster(&'static RedisCluster),
    Sentinels(&'static RedisSentinels),
}

impl Servers {
    async fn alone(is_cluster: bool) -> (Self, MutexGuard<'static, ()>) {
        static CLUSTER: OnceLock<RedisCluster> = OnceLock::new();
        static SENTINELS: OnceLock<RedisSentinels> = OnceLock::new();
        static ALONE: [Mutex<()>; 2] = [const { Mutex::const_new(()) }; 2];
        let alone = ALONE[usize::from(is_cluster)].lock().await;
        let servers = if is_cluster {
            let start = || RedisCluster::start_with_replicas().expect("a cluster");
            Self::Cluster(CLUSTER.get_or_init(start))
        } else {
            Self::Sentinels(SENTINELS.get_or_init(|| RedisSentinels::start().expect("sentinels")))
        };
        servers.become_well();
        (servers, alone)
    }

    /// What a failed test has left behind does not last.
    fn become_well(self) {
        match self {
            Self::Cluster(cluster) => super::become_well(cluster),
            Self::Sentinels(sentinels) => {
                for server in sentinels.servers().iter().chain(sentinels.sentinels()) {
                    if server.pid().is_some() {
                        server.resume().expect("it runs");
                    }
                }
                sentinels.restart_dead().expect("well");
                sentinels.wait_until_healthy(PATIENCE).expect("well");
            }
        }
    }

    fn url(self) -> String {
        match self {
            Self::Cluster(cluster) => cluster.url(),
            Self::Sentinels(sentinels) => sentinels.url(),
        }
    }

    /// The master of an identifier.
    fn master(self, identifier: &str) -> (usize, &'static RedisServer) {
        let (servers, master) = self.named_master(identifier);
        let master = master.expect("a master");
        (master, &servers[master])
    }

    /// All servers, and the place of the master of an identifier if there is one.
    fn named_master(self, identifier: &str) -> (&'static [RedisServer], Result<usize, String>) {
        match self {
            Self::Cluster(cluster) => {
                let slot = cluster.slot_of(&format!("{{{identifier}}}"));
                (cluster.nodes(), cluster.master_of(slot))
            }
            Self::Sentinels(sentinels) => (sentinels.servers(), sentinels.master()),
        }
    }

    /// The replica of the master of an identifier.
    fn replica(self, identifier: &str) -> &'static RedisServer {
        let (master, _) = self.master(identifier);
        match self {
            Self::Cluster(cluster) => {
                let is_its = |node: &usize| cluster.master_of_replica(*node) == Ok(Some(master));
                &cluster.nodes()[(0..cluster.nodes().len()).find(is_its).expect("a replica")]
            }
            Self::Sentinels(sentinels) => &sentinels.servers()[1 - master],
        }
    }

    /// Kills the master of an identifier, and returns when its replica has taken over.
    fn kill_master(self, identifier: &str) {
        match self {
            Self::Cluster(cluster) => {
                cluster.nodes()[self.master(identifier).0].stop();
                cluster.wait_until_healthy(PATIENCE).expect("a failover");
            }
            Self::Sentinels(sentinels) => {
                sentinels.kill_master().expect("another master");
            }
        }
    }

    /// Makes the replica take over while the master lives.
    fn fail_over(self, identifier: &str) {
        match self {
            Self::Cluster(_) => {
                let replica = self.replica(identifier);
                tell(replica, &["CLUSTER", "FAILOVER"]);
                self.replaced(identifier, replica);
            }
            Self::Sentinels(sentinels) => {
                sentinels.fail_over().expect("another master");
            }
        }
    }

    /// Waits until this server is the master of an identifier.
    fn replaced(self, identifier: &str, by: &RedisServer) {
        let begin = Instant::now();
        let is_replaced = || {
            let (servers, master) = self.named_master(identifier);
            master.is_ok_and(|master| servers[master].port() == by.port())
        };
        while !is_replaced() {
            assert!(begin.elapsed() < PATIENCE, "not replaced");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Measures a row on masters with replicas: of a cluster, and of Sentinels. The fault may take its
/// time.
async fn on_masters(client: Client, rows: [Row; 2], fault: impl AsyncFn(Servers, &Traffic)) {
    for (row, is_cluster) in rows.into_iter().zip([true, false]) {
        let (servers, _alone) = Servers::alone(is_cluster).await;
        let kind = if is_cluster { "cluster" } else { "Sentinels" };
        row.measure(client, [kind, &servers.url()], async |traffic| {
            fault(servers, traffic).await;
            aside(move || servers.become_well()).await;
        })
        .await;
    }
}

async fn a_killed_master_admits_at_most_its_limit_once_more(client: Client) {
    let row = Row::is_away("failover by kill -9", "").loses(1);
    on_masters(client, [row; 2], async |servers, _| {
        aside(move || servers.kill_master("hot")).await;
    })
    .await;
}

async fn a_master_that_hangs_is_replaced(client: Client) {
    // Once with the failover, and once if callers find the old one again before it knows.
    let row = Row::is_away("failover by SIGSTOP", "").loses(2);
    on_masters(client, [row; 2], async |servers, _| {
        aside(move || {
            let replica = servers.replica("hot");
            servers.master("hot").1.pause().expect("it runs");
            servers.replaced("hot", replica);
        })
        .await;
    })
    .await;
}

async fn a_planned_failover_is_waited_for(client: Client) {
    let name = "planned failover";
    let in_cluster = match client {
        Client::Redis => Row::unnoticed(name),
        // fred ends a connection over a CLUSTERDOWN, with all that waits on it. A lost read charged
        // nothing.
        _ => Row::refuses(name, AWAY, ""),
    };
    // Sentinels close connections, and the master answers until it is demoted.
    let rows = [in_cluster, Row::is_away(name, "").loses(1)];
    on_masters(client, rows, async |servers, _| {
        aside(move || servers.fail_over("hot")).await;
    })
    .await;
}

async fn a_master_without_its_replica_admits_at_most_twice_the_limit(client: Client) {
    let row = Row::is_away("replication cut", "").loses(1);
    on_masters(client, [row; 2], async |servers, traffic| {
        let replica = aside(move || servers.replica("hot")).await;
        aside(move || {
            // A master without passwords refuses any.
            tell(replica, &["CONFIG", "SET", "masterauth", "refused"]);
            let _ = replica.command(&["CLIENT", "KILL", "TYPE", "master"]);
        })
        .await;
        until(async || {
            let info = tell(replica, &["INFO", "replication"]).to_string();
            info.contains("master_link_status:down").then_some(()).ok_or("it is in touch")
        })
        .await;
        traffic.answers(300).await;
        aside(move || {
            servers.kill_master("hot");
            tell(replica, &["CONFIG", "SET", "masterauth", ""]);
        })
        .await;
    })
    .await;
}

/// Measures a row on three masters.
async fn on_a_cluster(
    client: Client,
    row: Row,
    fault: impl AsyncFn(&'static RedisCluster, &Traffic),
) {
    let place = Place::cluster(client).await;
    let cluster = place.cluster.expect("it is one");
    on(&place, client, row, async |_, traffic| fault(cluster, traffic).await).await;
}

async fn slots_move_and_no_caller_sees_it(client: Client) {
    on_a_cluster(client, Row::unnoticed("resharding"), async |cluster, _| {
        for key in ["hot", "all", "key-1", "of cas", "of multi"] {
            aside(move || {
                let slot = cluster.slot_of(&format!("{{{key}}}"));
                let owner = cluster.master_of(slot).expect("an owner");
                cluster.migrate(slot, (owner + 1) % 3).expect("moved");
                cluster.flush_scripts().expect("flushed");
                cluster.migrate(slot, owner).expect("back");
            })
            .await;
        }
    })
    .await;
}

async fn a_cluster_without_a_majority_is_unavailable(client: Client) {
    let row = Row::is_away("majority down", "CLUSTERDOWN");
    on_a_cluster(client, row, async |cluster, traffic| {
        let hung = &cluster.nodes()[1..];
        for node in hung {
            node.pause().expect("it runs");
        }
        until(async || {
            let info = tell(&cluster.nodes()[0], &["CLUSTER", "INFO"]).to_string();
            info.contains("cluster_state:fail").then_some(()).ok_or("it serves")
        })
        .await;
        traffic.errors(20).await;
        for node in hung {
            node.resume().expect("it runs");
        }
        aside(move || cluster.wait_until_healthy(PATIENCE).expect("well")).await;
    })
    .await;
}

with_each_client! {
    a_killed_master_admits_at_most_its_limit_once_more,
    a_master_that_hangs_is_replaced,
    a_planned_failover_is_waited_for,
    a_master_without_its_replica_admits_at_most_twice_the_limit,
    slots_move_and_no_caller_sees_it,
    a_cluster_without_a_majority_is_unavailable,
}
