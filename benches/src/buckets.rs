//! How a bucketed window may be kept on Redis: packed into one value, as a hash, or as a counter for
//! each bucket. One decision each, in turns, on a server of its own.

use std::error::Error;
use std::time::{Duration, Instant};

use ratelimit_core::{Batch, BucketedWindow, Check, Limit, Now, Store, Tick};
use ratelimit_redis::{Connection, RedisConnection, RedisStore, Reply, Word};
use ratelimit_testkit::RedisServer;

use crate::measure::median;

/// The example of the algorithm: 15 buckets of a second, three windows over them.
const BUCKETS: u64 = 15;
const BUCKET_US: u64 = 1_000_000;
/// The newest bucket.
const NOW_US: u64 = 1_795_218_392_000_000;
const DEADLINE: Duration = Duration::from_secs(5);

/// The pattern as one script: count, and sum up all counters.
const COUNTERS_SCRIPT: &str = "
redis.call('INCRBY', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local one, ten, fifteen = 0, 0, 0
for age, count in ipairs(redis.call('MGET', unpack(KEYS))) do
  count = tonumber(count or 0)
  if age <= 1 then one = one + count end
  if age <= 10 then ten = ten + count end
  fifteen = fifteen + count
end
return { one, ten, fifteen }";

/// What was measured of one way in one round.
#[derive(Clone, Copy)]
struct Round {
    /// From question to answer.
    wall_us: f64,
    /// What of that the server's processor had to do.
    server_us: f64,
}

const WAYS: [&str; 4] =
    ["packed, a script", "counters, a script", "counters, MULTI", "hash, MULTI"];

/// Measures all ways in turns, and prints them.
pub(crate) fn run(quick: bool) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(quick))
}

async fn measure(quick: bool) -> Result<(), Box<dyn Error>> {
    let (rounds, calls) = if quick { (5, 500) } else { (21, 2_000) };
    let server = RedisServer::start()?;
    let trial = Trial::new(&server).await?;
    trial.fill().await?;
    let mut measured: [Vec<Round>; 4] = Default::default();
    for _ in 0..rounds {
        for (way, rounds) in measured.iter_mut().enumerate() {
            rounds.push(trial.round(way, calls).await?);
        }
    }
    let bytes = trial.bytes().await?;
    println!("{:22}{:>12}{:>14}{:>9}{:>16}", "", "wall", "server's CPU", "ratio", "an identifier");
    let packed_us = median(measured[0].iter().map(|round| round.server_us));
    for ((name, rounds), bytes) in WAYS.iter().zip(&measured).zip(bytes) {
        let wall_us = median(rounds.iter().map(|round| round.wall_us));
        let server_us = median(rounds.iter().map(|round| round.server_us));
        let ratio = server_us / packed_us;
        println!("{name:22}{wall_us:>9.1} µs{server_us:>11.1} µs{ratio:>9.2}{bytes:>10} bytes");
    }
    Ok(())
}

struct Trial {
    connection: std::sync::Arc<RedisConnection>,
    store: RedisStore<ratelimit_redis::Lua, std::sync::Arc<RedisConnection>>,
    limit: Limit<BucketedWindow>,
    counters: Vec<String>,
    sha: String,
}

impl Trial {
    async fn new(server: &RedisServer) -> Result<Self, Box<dyn Error>> {
        let connection = RedisConnection::open(&server.url(), DEADLINE).await?;
        let connection = std::sync::Arc::new(connection);
        let store = RedisStore::builder().over(std::sync::Arc::clone(&connection))?;
        let rates = ["1000000000/1s", "5000000000/10s", "7000000000/15s"];
        let rates = rates.iter().map(|rate| rate.parse()).collect::<Result<Vec<_>, _>>()?;
        let limit = Limit::new("steps", BucketedWindow::new(BUCKET_US, &rates)?)?;
        let start = |age: u64| NOW_US - age * BUCKET_US;
        let counters = (0..BUCKETS).map(|age| format!("c:1:steps.{}:{{alice}}", start(age)));
        let loaded = ["SCRIPT", "LOAD", COUNTERS_SCRIPT].map(Word::Text);
        let Reply::Text(sha) = connection.send(&loaded).await? else {
            return Err("no hash of the script".into());
        };
        Ok(Self {
            counters: counters.collect(),
            sha: String::from_utf8(sha)?,
            connection,
            store,
            limit,
        })
    }

    /// Something in every bucket, in all ways.
    async fn fill(&self) -> Result<(), Box<dyn Error>> {
        for age in (0..BUCKETS).rev() {
            let start_us = NOW_US - age * BUCKET_US;
            self.packed(start_us).await?;
            let counter = &self.counters[usize::try_from(age)?];
            self.connection
                .send(&["SET", counter, "1234", "PX", "15000000"].map(Word::Text))
                .await?;
            let field = start_us.to_string();
            self.connection
                .send(&["HSET", "h:1:steps:{alice}", &field, "1234"].map(Word::Text))
                .await?;
        }
        Ok(())
    }

    async fn packed(&self, at_us: u64) -> Result<(), Box<dyn Error>> {
        let check = Check { limit: &self.limit, key: "alice", cost: 1234 };
        let now = Now::At(Tick::from_us(at_us).ok_or("too late")?);
        self.store.apply(&Batch::one(&check).now(now)).await?;
        Ok(())
    }

    async fn counters_script(&self) -> Result<(), Box<dyn Error>> {
        let mut words = vec![Word::Text("EVALSHA"), Word::Text(&self.sha), Word::Number(BUCKETS)];
        words.extend(self.counters.iter().map(|counter| Word::Text(counter)));
        words.extend([Word::Text("1"), Word::Text("15000000")]);
        self.connection.send(&words).await?;
        Ok(())
    }

    async fn counters_multi(&self) -> Result<(), Box<dyn Error>> {
        let current = Word::Text(&self.counters[0]);
        let mut mget = vec![Word::Text("MGET")];
        mget.extend(self.counters.iter().map(|counter| Word::Text(counter)));
        let commands = [
            vec![Word::Text("INCRBY"), current, Word::Text("1")],
            vec![Word::Text("PEXPIRE"), current, Word::Text("15000000")],
            mget,
        ];
        self.connection.transaction(&commands).await?;
        Ok(())
    }

    async fn hash_multi(&self) -> Result<(), Box<dyn Error>> {
        let (key, field) = (Word::Text("h:1:steps:{alice}"), NOW_US.to_string());
        let commands = [
            vec![Word::Text("HINCRBY"), key, Word::Text(&field), Word::Text("1")],
            vec![Word::Text("PEXPIRE"), key, Word::Text("15000000")],
            vec![Word::Text("HGETALL"), key],
        ];
        self.connection.transaction(&commands).await?;
        Ok(())
    }

    async fn round(&self, way: usize, calls: u32) -> Result<Round, Box<dyn Error>> {
        let (server, begin) = (self.server_us().await?, Instant::now());
        for _ in 0..calls {
            match way {
                0 => self.packed(NOW_US).await?,
                1 => self.counters_script().await?,
                2 => self.counters_multi().await?,
                _ => self.hash_multi().await?,
            }
        }
        let wall_us = begin.elapsed().as_secs_f64() * 1e6 / f64::from(calls);
        let server_us = (self.server_us().await? - server) / f64::from(calls);
        Ok(Round { wall_us, server_us })
    }

    /// The CPU time that the server has had so far.
    async fn server_us(&self) -> Result<f64, Box<dyn Error>> {
        let reply = self.connection.send(&["INFO", "cpu"].map(Word::Text)).await?;
        let Reply::Text(text) = reply else { return Err("no INFO".into()) };
        let text = String::from_utf8(text)?;
        let mut total_s = 0.0;
        for line in text.lines() {
            if let Some(("used_cpu_sys" | "used_cpu_user", seconds)) = line.trim().split_once(':') {
                total_s += seconds.parse::<f64>()?;
            }
        }
        Ok(total_s * 1e6)
    }

    /// The memory of an identifier, in each way.
    async fn bytes(&self) -> Result<[i64; 4], Box<dyn Error>> {
        let packed = self.usage(&self.store.key(&self.limit, "alice")).await?;
        let mut counters = 0;
        for counter in &self.counters {
            counters += self.usage(counter).await?;
        }
        Ok([packed, counters, counters, self.usage("h:1:steps:{alice}").await?])
    }

    async fn usage(&self, key: &str) -> Result<i64, Box<dyn Error>> {
        match self.connection.send(&["MEMORY", "USAGE", key].map(Word::Text)).await? {
            Reply::Integer(bytes) => Ok(bytes),
            other => Err(format!("{key}: {other:?}").into()),
        }
    }
}
