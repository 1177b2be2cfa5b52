//! The fault table: a row per fault, each with every client, under [traffic](traffic) that goes on
//! meanwhile. A row says how much more may be admitted, which errors callers may see and until
//! when, and checks it. `scripts/faults` prints the table, and the guide's chapter on faults shows
//! it.

mod callers;
mod masters;
mod network;
mod servers;
mod traffic;

use std::sync::OnceLock;

use tokio::sync::{Mutex, MutexGuard};

use crate::common::prelude::*;
use traffic::{AWAY, Row, Traffic};

/// Servers behind proxies, for one row at a time: a server of its own, or a cluster that the rows
/// of a client share. Each row finds them healthy and leaves them healthy.
struct Place {
    url: String,
    kind: &'static str,
    one: Option<(RedisServer, FaultProxy)>,
    cluster: Option<&'static RedisCluster>,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Place {
    fn one() -> Arc<Self> {
        let (server, proxy) = server_behind_proxy();
        let (url, one) = (proxy.url(), Some((server, proxy)));
        Arc::new(Self { url, kind: "server", one, cluster: None, _alone: None })
    }

    async fn cluster(client: Client) -> Arc<Self> {
        static CLUSTERS: [OnceLock<RedisCluster>; 2] = [const { OnceLock::new() }; 2];
        static ALONE: [Mutex<()>; 2] = [const { Mutex::const_new(()) }; 2];
        let place = usize::from(client == Client::Fred);
        let alone = ALONE[place].lock().await;
        let start = move || {
            let cluster = CLUSTERS[place]
                .get_or_init(|| RedisCluster::start_behind_proxies().expect("a cluster"));
            become_well(cluster);
            cluster
        };
        let cluster = aside(start).await;
        let (url, kind, alone) = (cluster.url(), "cluster", Some(alone));
        Arc::new(Self { url, kind, one: None, cluster: Some(cluster), _alone: alone })
    }

    fn nodes(&self) -> &[RedisServer] {
        self.one.as_ref().map_or_else(
            || self.cluster.map_or(&[][..], RedisCluster::nodes),
            |(server, _)| std::slice::from_ref(server),
        )
    }

    fn proxies(&self) -> &[FaultProxy] {
        self.one.as_ref().map_or_else(
            || self.cluster.map_or(&[][..], RedisCluster::proxies),
            |(_, proxy)| std::slice::from_ref(proxy),
        )
    }

    /// Does this with each server, beside the traffic.
    async fn each(self: &Arc<Self>, act: impl Fn(&RedisServer) + Send + 'static) {
        let place = Arc::clone(self);
        aside(move || place.nodes().iter().for_each(act)).await;
    }

    async fn tell(self: &Arc<Self>, words: &'static [&'static str]) {
        self.each(|node| drop(tell(node, words))).await;
    }

    /// Waits until the servers serve.
    async fn is_well(&self) {
        let Some(cluster) = self.cluster else { return };
        aside(move || cluster.wait_until_healthy(PATIENCE).expect("well")).await;
    }
}

/// What a failed row has left behind does not last.
fn become_well(cluster: &RedisCluster) {
    for node in cluster.nodes() {
        match node.pid() {
            Some(_) => node.resume().expect("it runs"),
            None => node.restart().expect("again"),
        }
    }
    cluster.proxies().iter().for_each(FaultProxy::heal);
    cluster.wait_until_healthy(PATIENCE).expect("well");
}

/// Measures a row on a server and on a cluster, one after the other.
async fn on_both(client: Client, row: Row, fault: impl AsyncFn(&Arc<Place>, &Traffic)) {
    on_one(client, row, &fault).await;
    on(&Place::cluster(client).await, client, row, &fault).await;
}

/// Measures a row on a server.
async fn on_one(client: Client, row: Row, fault: impl AsyncFn(&Arc<Place>, &Traffic)) {
    on(&Place::one(), client, row, fault).await;
}

async fn on(
    place: &Arc<Place>,
    client: Client,
    row: Row,
    fault: impl AsyncFn(&Arc<Place>, &Traffic),
) {
    let at = [place.kind, &place.url];
    row.measure(client, at, async |traffic| fault(place, traffic).await).await;
}
