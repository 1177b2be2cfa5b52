//! Every client and protocol reads what another one has stored, on one server and on a cluster: the requests of one caller go by
//! each of them in turn. So a fleet can change any of these without losing its limits.

#![cfg(all(feature = "redis", feature = "fred"))]

use ratelimit_testkit::PureStore;

use crate::common::prelude::*;

/// Limits of 7 in ten seconds: of every algorithm, and those that a transaction can decide.
fn limits() -> [Vec<Limit<Policy>>; 2] {
    let text = |name: &str| match name {
        "bucketed-window" => format!("{name} bucket 2s rates 7/10s, 14/30s"),
        _ => format!("{name} 7/10s"),
    };
    let admissions = Policy::NAMES.iter().map(|name| limit(name, &text(name)));
    let attempts = NATIVE.map(|name| {
        let policy = format!("{} count attempts", text(name));
        limit(&format!("{name}-attempts"), &policy)
    });
    [admissions.collect(), attempts.into()]
}

/// Sends requests of every kind by each store in turn, at given times.
async fn agree(stores: &[Arc<dyn DynStore<Policy>>], limits: &[Limit<Policy>]) {
    let pure = PureStore::new();
    for n in 0..40_u64 {
        let at_us = 1_795_218_392_123_456 + n * 777_777 - n % 3 * 400_000;
        for (limit, place) in limits.iter().zip(usize::try_from(n).expect("few")..) {
            let key = format!("k{}", n % 3);
            let check = Check { limit, key: &key, cost: n % 4 };
            let batch = Batch::one(&check).now(at(at_us)).metadata(b"kept");
            let is_charge = limit.algorithm().charges_denials();
            let reserves = limit.algorithm().reservation_us().is_some() && check.cost > 0;
            let batch = match n % 7 {
                3 if !is_charge => batch.op(Op::Refund),
                5 if !is_charge => batch.op(Op::Force),
                6 if !is_charge && reserves => batch.id(ReservationId::new(u128::from(n))),
                _ => batch,
            };
            let told = stores[place % stores.len()].apply(&batch).await;
            assert_eq!(told.expect("decides"), pure.decide(&batch).expect("decides"), "{batch:?}");
        }
    }
}

#[tokio::test]
async fn whatever_client_has_stored_a_state_any_other_goes_on_from_it() {
    let servers = RedisServer::binaries().into_iter().map(|binary| {
        let server = RedisServer::start_with(&binary, &[]).expect("a server");
        (server, RedisCluster::start_with(&binary, 0, &[]).expect("a cluster"))
    });
    let servers: Vec<_> = servers.collect();
    for url in servers.iter().flat_map(|(server, cluster)| [server.url(), cluster.url()]) {
        let mut modes = [const { Vec::new() }; 3];
        for client in ["redis", "redis&protocol=resp3", "fred", "fred&protocol=resp3"] {
            let url = format!("{url}?client={client}");
            let store = RedisStore::builder().deadline(PATIENCE).connect(&url).await;
            let stores = in_every_mode(&store.expect("it is up"));
            modes.iter_mut().zip(stores).for_each(|(mode, (_, store))| mode.push(store));
        }
        let [admissions, attempts] = limits();
        for (mode, limits) in modes.iter().zip([&admissions, &admissions, &attempts]) {
            agree(mode, limits).await;
        }
    }
}
