//! A healthy cluster whose slots move, one that lacks a slot, and one that grows.

use ratelimit_redis::Tag;

use crate::common::prelude::*;

/// How long a call may take while servers are down.
const DEADLINE: Duration = Duration::from_secs(2);

fn cluster() -> &'static RedisCluster {
    RedisCluster::shared().expect("a cluster")
}

/// An identifier's slot, the node that owns it, and another node.
fn places(identifier: &str) -> (u16, usize, usize) {
    let slot = cluster().slot_of(&format!("{{{identifier}}}"));
    let owner = cluster().master_of(slot).expect("an owner");
    (slot, owner, (owner + 1) % 3)
}

async fn one_live_seed_is_enough_to_find_the_cluster(client: Client) {
    let [first, ..] = cluster().client_ports()[..] else { panic!("nodes") };
    let (away, hangs) = (proxy_of(first), proxy_of(first));
    away.refuse(true);
    hangs.hang(true);
    let begin = Instant::now();
    for (n, seeds) in [
        format!("127.0.0.1:{first}"),
        format!("127.0.0.1:{},127.0.0.1:{first}", away.port()),
        format!("127.0.0.1:{},127.0.0.1:{first}", hangs.port()),
        format!("localhost:{first}"),
    ]
    .into_iter()
    .enumerate()
    {
        let store = store(&format!("redis-cluster://{seeds}"), client).await;
        for key in ["x", "y", "z", "v", "w"] {
            assert_eq!(
                remaining_after_acquire(&store, &seldom(), &format!("seeds-{n}-{key}")).await,
                2
            );
        }
    }
    let silent = format!("redis-cluster://127.0.0.1:{},127.0.0.1:{}", away.port(), hangs.port());
    let error = store_within(Duration::from_millis(300), &silent, client).await;
    fails(error, ErrorKind::Unavailable, "");
    assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
}

async fn during_a_migration_each_key_is_decided_where_it_lies(client: Client) {
    // A master without slots, which no slot table names.
    let (cluster, fourth) = aside(|| {
        let mut cluster = RedisCluster::start().expect("a cluster");
        let fourth = cluster.add_empty_master().expect("a fourth");
        (Arc::new(cluster), fourth)
    })
    .await;
    let moving = |act: fn(&RedisCluster, u16, usize) -> Result<(), String>, to| {
        let (cluster, slot) = (Arc::clone(&cluster), cluster.slot_of("{a}"));
        async move { aside(move || act(&cluster, slot, to)).await.expect("moved") }
    };
    let owner = cluster.master_of(cluster.slot_of("{a}")).expect("an owner");
    let store = store(&cluster.url(), client).await;
    // Another limit's key in the same slot, so one key is there and the other is not.
    assert_eq!(remaining_after_acquire(&store, &seldom(), "a").await, 2);
    moving(RedisCluster::begin_migration, fourth).await;
    // The server that gets the request does not know the script.
    cluster.flush_scripts().expect("flushed");
    assert_eq!(remaining_after_acquire(&store, &seldom(), "a").await, 1);
    let new = store.key(&logged(), "a");
    for due in [2, 1] {
        assert_eq!(remaining_after_acquire(&store, &logged(), "a").await, due, "by ASK");
    }
    let mut there = cluster.nodes()[fourth].client().expect("it is up");
    there.command(&["ASKING"]).expect("asking").ok().expect("asking");
    assert_eq!(there.command(&["EXISTS", &new]), Ok(RespValue::Integer(1)));
    // Each step of a transaction goes through ASK too.
    three_and_no_more(&store.in_mode::<Multi>(), &attempts(), "a").await;
    moving(RedisCluster::finish_migration, fourth).await;
    assert_eq!(remaining_after_acquire(&store, &seldom(), "a").await, 0);
    assert_eq!(remaining_after_acquire(&store, &logged(), "a").await, 0);
    moving(RedisCluster::migrate, owner).await;
    assert!(!acquire(&store, &logged(), "a").await.expect("decided").allowed());
}

async fn keys_split_by_a_migration_are_waited_for_and_charged_once(client: Client) {
    let store = store(&cluster().url(), client).await;
    let key = &*format!("torn-apart-for-{client}");
    let (slot, owner, other) = places(key);
    let (seldom, logged) = (seldom(), logged());
    let both = [(&seldom, key, 1), (&logged, key, 1)];
    let acquire = async || apply(&store, &both, Op::Acquire, None).await.expect("decided");
    assert_eq!(acquire().await.remaining(), 2);
    let moved = store.key(&logged, key);
    aside(move || cluster().begin_migration(slot, other)).await.expect("begun");
    assert!(aside(move || cluster().move_key(&moved)).await.expect("moved"));
    until(async || {
        // On a busy machine the time may be too short to connect, or to hear an answer.
        let brief = store_within(Duration::from_millis(60), &cluster().url(), client).await;
        let said = match brief {
            Ok(brief) => apply(&brief, &both, Op::Acquire, None).await,
            Err(error) => Err(error),
        };
        let error = said.expect_err("its keys lie on two servers");
        if !error.to_string().contains("TRYAGAIN") {
            return Err(error);
        }
        fails(Err::<(), _>(error), ErrorKind::Unavailable, "TRYAGAIN");
        Ok(())
    })
    .await;
    let (verdict, finished) = tokio::join!(
        acquire(),
        aside(move || {
            std::thread::sleep(Duration::from_millis(30));
            cluster().finish_migration(slot, other)
        }),
    );
    finished.expect("moved");
    assert_eq!(verdict.remaining(), 1);
    assert_eq!(acquire().await.remaining(), 0);
    assert!(!acquire().await.allowed());
    aside(move || cluster().migrate(slot, owner)).await.expect("back");
}

/// Requests that share calls while their slot is on its way, some of their keys on either server
/// and some on none. They are decided while it is half way, because no call waits for another's
/// keys.
async fn gathered_requests_of_a_slot_on_its_way_are_each_decided_once(client: Client) {
    let builder = RedisStore::builder().prefix(client.name()).deadline(PATIENCE);
    let url = with_client(&cluster().url(), client);
    let store = builder.tag(Tag::UpTo('/')).connect(&url).await.expect("the cluster is up");
    let tenant = format!("gathered-for-{client}");
    let (slot, owner, other) = places(&tenant);
    let key = |n: usize| format!("{tenant}/{n}");
    for n in 0..16 {
        assert_eq!(remaining_after_acquire(&store, &seldom(), &key(n)).await, 2);
    }
    aside(move || cluster().begin_migration(slot, other)).await.expect("begun");
    for n in 0..8 {
        let moved = store.key(&seldom(), &key(n));
        assert!(aside(move || cluster().move_key(&moved)).await.expect("moved"));
    }
    // Eight keys there, eight here, and eight that do not exist.
    let half_way = concurrently(&store, (0..24).map(key).collect()).await;
    for (n, left) in half_way.into_iter().enumerate() {
        let due = [1, 0, 2, 1, 0];
        assert_eq!(left, if n < 16 { &due[..2] } else { &due[2..] }, "{n}");
    }
    aside(move || cluster().finish_migration(slot, other)).await.expect("moved");
    aside(move || cluster().migrate(slot, owner)).await.expect("back");
    let none = concurrently(&store, (0..24).map(key).collect()).await;
    assert!(none.iter().all(Vec::is_empty), "{none:?}");
}

/// What remained after each admitted one of five concurrent requests per key, in descending order.
async fn concurrently(store: &RedisStore, keys: Vec<String>) -> Vec<Vec<u64>> {
    let mut tasks = JoinSet::new();
    for n in 0..keys.len() * 5 {
        let (store, place) = (store.clone(), n % keys.len());
        let key = keys[place].clone();
        tasks.spawn(async move {
            (place, acquire(&store, &seldom(), &key).await.expect("decided, not waited for"))
        });
    }
    let mut left = vec![Vec::new(); keys.len()];
    for (place, verdict) in tasks.join_all().await {
        if verdict.allowed() {
            left[place].push(verdict.remaining());
        }
    }
    for left in &mut left {
        left.sort_unstable_by(|one, other| other.cmp(one));
    }
    left
}

async fn what_a_cluster_cannot_do_is_refused_with_the_remedy(client: Client) {
    let alone = server();
    let url = format!("redis-cluster://127.0.0.1:{}", alone.port());
    let error = store_within(PATIENCE, &url, client).await;
    fails(error, ErrorKind::Config, "use redis://127.0.0.1");
    let [first, ..] = cluster().client_ports()[..] else { panic!("nodes") };
    let one = store(&format!("redis://127.0.0.1:{first}"), client).await;
    let elsewhere = (0..100).map(|n| format!("one-{n}")).find(|key| places(key).1 != 0);
    let moved = acquire(&one, &seldom(), &elsewhere.expect("one")).await;
    fails(moved, ErrorKind::Config, "redis-cluster://");
    let url = with_client(&cluster().url(), client);
    let connection = RedisConnection::open(&url, PATIENCE).await.expect("the cluster is up");
    let words = ["MGET", "a", "b"].map(Argument::Text);
    let error = connection.send("a", &words, Deadline::within(PATIENCE)).await;
    fails(error, ErrorKind::CrossSlot, "");
}

with_each_client! {
    one_live_seed_is_enough_to_find_the_cluster,
    during_a_migration_each_key_is_decided_where_it_lies,
    keys_split_by_a_migration_are_waited_for_and_charged_once,
    gathered_requests_of_a_slot_on_its_way_are_each_decided_once,
    what_a_cluster_cannot_do_is_refused_with_the_remedy,
    a_hundred_redirected_callers_share_one_look_up,
    a_slot_that_has_no_owner_for_a_moment_is_waited_for_and_then_refused,
}

/// How often the nodes were asked for the slot table.
fn looks(cluster: &RedisCluster) -> u64 {
    cluster.nodes().iter().map(|node| node.calls("cluster|slots").expect("it is up")).sum()
}

/// How often the nodes have answered with this error.
fn errors(cluster: &RedisCluster, code: &str) -> u64 {
    cluster.nodes().iter().map(|node| node.errors(code).expect("it is up")).sum()
}

async fn a_hundred_redirected_callers_share_one_look_up(client: Client) {
    let cluster = Arc::new(aside(RedisCluster::start).await.expect("a cluster"));
    let store = store(&cluster.url(), client).await;
    let slot = cluster.slot_of("{a}");
    let other = (cluster.master_of(slot).expect("an owner") + 1) % 3;
    assert_eq!(remaining_after_acquire(&store, &seldom(), "a").await, 2);
    let moving = Arc::clone(&cluster);
    aside(move || moving.migrate(slot, other)).await.expect("moved");
    let (before, begin) = (looks(&cluster), Instant::now());
    let mut tasks = JoinSet::new();
    for _ in 0..100 {
        let store = store.clone();
        tasks.spawn(async move { acquire(&store, &seldom(), "a").await.expect("decided") });
    }
    let admitted = tasks.join_all().await.into_iter().filter(Verdict::allowed).count();
    assert_eq!(admitted, 2);
    // The next look-up comes after 50 ms at the earliest, and a busy machine may take longer for
    // all of this.
    let most = 1 + begin.elapsed().as_millis() / 50;
    let made = looks(&cluster) - before;
    assert!(u128::from(made) <= most, "{made} looks, and at most {most} are due");
    until(async || {
        remaining_after_acquire(&store, &seldom(), "a").await;
        (looks(&cluster) > before).then_some(()).ok_or("no look-up begins")
    })
    .await;
    // The owner that was learnt is not looked up again.
    let (looked, moved) = (looks(&cluster), errors(&cluster, "MOVED"));
    for _ in 0..100 {
        remaining_after_acquire(&store, &seldom(), "a").await;
    }
    assert_eq!((looks(&cluster), errors(&cluster, "MOVED")), (looked, moved));
}

async fn a_slot_that_has_no_owner_for_a_moment_is_waited_for_and_then_refused(client: Client) {
    let cluster = aside(|| {
        let args = ["--cluster-require-full-coverage", "no"];
        RedisCluster::start_with(&RedisServer::binaries()[0], 0, &args)
    });
    let cluster = cluster.await.expect("a cluster");
    let slot = cluster.slot_of("{a}");
    let owner = cluster.master_of(slot).expect("an owner");
    let all = |command: &str, nodes: &[RedisServer]| {
        for node in nodes {
            tell(node, &["CLUSTER", command, &slot.to_string()]);
        }
    };
    let known = store(&cluster.url(), client).await;
    assert_eq!(remaining_after_acquire(&known, &seldom(), "a").await, 2);
    all("DELSLOTS", cluster.nodes());
    // To one of them the owner is known, to the other it is not.
    let fresh = store(&cluster.url(), client).await;
    let unowned = format!("no server keeps slot {slot}");
    let brief = until(async || {
        // A message that its owner sent before may tell another node again who keeps the slot.
        for node in cluster.nodes() {
            // Refused by a node that knows no owner.
            let _ = node.command(&["CLUSTER", "DELSLOTS", &slot.to_string()]).expect("it is up");
        }
        let brief = store_within(DEADLINE, &cluster.url(), client).await.expect("it is up");
        let said = fails(acquire(&brief, &seldom(), "a").await, ErrorKind::Unavailable, "");
        if said.contains(&unowned) { Ok(brief) } else { Err(said) }
    })
    .await;
    let refused = async || acquire(&brief, &seldom(), "a").await;
    for (store, due) in [(&known, 1), (&fresh, 0)] {
        let asked = || errors(&cluster, "CLUSTERDOWN") + looks(&cluster);
        let before = asked();
        let asking = {
            let store = store.clone();
            tokio::spawn(async move { remaining_after_acquire(&store, &seldom(), "a").await })
        };
        until(async || (asked() > before).then_some(()).ok_or("no server was asked")).await;
        assert!(!asking.is_finished(), "it waits");
        all("ADDSLOTS", &cluster.nodes()[owner..=owner]);
        assert_eq!(asking.await.expect("no panic"), due);
        all("DELSLOTS", &cluster.nodes()[owner..=owner]);
    }
    // Once it has lasted as long as the deadline, a request is refused at once: after one question
    // to each.
    fails(refused().await, ErrorKind::Unavailable, "");
    let looked = looks(&cluster);
    for _ in 0..20 {
        fails(refused().await, ErrorKind::Unavailable, "");
    }
    let looked = looks(&cluster) - looked;
    assert!(looked <= 30, "a request that waits looks again every 50 ms: {looked}");
    all("ADDSLOTS", &cluster.nodes()[owner..=owner]);
    let _ = until(async || acquire(&brief, &seldom(), "a").await).await;
}
