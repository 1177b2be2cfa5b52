//! Compares ways to keep a bucketed window on Redis: packed into one value, as a hash, or as one counter per bucket.
//! They take turns, one decision each, on a server of their own.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ratelimit_core::{Batch, BucketedWindow, Check, Gcra, Limit, Now, Store, Timestamp};
use ratelimit_redis::{Argument, Connection, Deadline, Lua, RedisConnection, RedisStore, Reply};
use ratelimit_testkit::RedisServer;

use crate::measure::median;

/// Buckets of a second, with three windows over them: those of the algorithm's example, and more.
const BUCKETS: [u64; 2] = [15, 300];
const BUCKET_US: u64 = 1_000_000;
/// The newest bucket.
const NOW_US: u64 = 1_795_218_392_000_000;
const DEADLINE: Duration = Duration::from_secs(5);

/// Counters in one script: count, then sum up all of them.
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

/// The result of one way in one round.
#[derive(Clone, Copy)]
struct Round {
    /// The latency.
    wall_us: f64,
    /// The CPU time of the server.
    server_us: f64,
}

const WAYS: [&str; 5] = [
    "packed, our script",
    "(gcra, our script)",
    "counters, a script",
    "counters, MULTI",
    "hash, MULTI",
];

/// Measures all ways in turns, and prints them.
pub(crate) fn run(quick: bool) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(quick))
}

async fn measure(quick: bool) -> Result<(), Box<dyn Error>> {
    let (rounds, calls) = if quick { (5, 500) } else { (21, 2_000) };
    let server = RedisServer::start()?;
    for buckets in BUCKETS {
        let trial = Trial::new(&server, buckets).await?;
        trial.fill().await?;
        println!("{buckets} buckets");
        trial.measure(rounds, calls).await?;
    }
    Ok(())
}

struct Trial {
    buckets: u64,
    key: String,
    connection: Arc<RedisConnection>,
    store: RedisStore<Lua, Arc<RedisConnection>>,
    limit: Limit<BucketedWindow>,
    gcra: Limit<Gcra>,
    counters: Vec<String>,
    hash: String,
    sha: String,
}

impl Trial {
    /// Measures all ways in turns, and prints them.
    async fn measure(&self, rounds: u32, calls: u32) -> Result<(), Box<dyn Error>> {
        let mut measured: [Vec<Round>; 5] = Default::default();
        for _ in 0..rounds {
            for (way, rounds) in measured.iter_mut().enumerate() {
                rounds.push(self.round(way, calls).await?);
            }
        }
        let bytes = self.bytes().await?;
        println!(
            "{:22}{:>12}{:>14}{:>9}{:>16}",
            "", "wall", "server's CPU", "ratio", "an identifier"
        );
        let packed_us = median(measured[0].iter().map(|round| round.server_us));
        for ((name, rounds), bytes) in WAYS.iter().zip(&measured).zip(bytes) {
            let wall_us = median(rounds.iter().map(|round| round.wall_us));
            let server_us = median(rounds.iter().map(|round| round.server_us));
            let ratio = server_us / packed_us;
            println!("{name:22}{wall_us:>9.1} µs{server_us:>11.1} µs{ratio:>9.2}{bytes:>10} bytes");
        }
        Ok(())
    }

    async fn new(server: &RedisServer, buckets: u64) -> Result<Self, Box<dyn Error>> {
        let connection = RedisConnection::open(&server.url(), DEADLINE).await?;
        let connection = Arc::new(connection);
        let store = RedisStore::builder().over(Arc::clone(&connection))?;
        let longest = format!("7000000000/{buckets}s");
        let rates = ["1000000000/1s", "5000000000/10s", &longest];
        let rates = rates.iter().map(|rate| rate.parse()).collect::<Result<Vec<_>, _>>()?;
        let limit =
            Limit::new(&format!("steps-{buckets}"), BucketedWindow::new(BUCKET_US, &rates)?)?;
        let gcra = Limit::new("burst", Gcra::new("1000000/s".parse()?, 1_000_000_000)?)?;
        let start = |age: u64| NOW_US - age * BUCKET_US;
        let counters =
            (0..buckets).map(|age| format!("c:1:steps-{buckets}.{}:{{alice}}", start(age)));
        let loaded = ["SCRIPT", "LOAD", COUNTERS_SCRIPT].map(Argument::Text);
        let Reply::Text(sha) = connection.send("", &loaded, Deadline::within(DEADLINE)).await?
        else {
            return Err("no hash of the script".into());
        };
        Ok(Self {
            buckets,
            key: format!("alice-{buckets}"),
            hash: format!("h:1:steps-{buckets}:{{alice}}"),
            counters: counters.collect(),
            sha: String::from_utf8(sha)?,
            connection,
            store,
            limit,
            gcra,
        })
    }

    /// Charges every bucket, in each way.
    async fn fill(&self) -> Result<(), Box<dyn Error>> {
        for age in (0..self.buckets).rev() {
            let start_us = NOW_US - age * BUCKET_US;
            self.packed(start_us).await?;
            let counter = &self.counters[usize::try_from(age)?];
            self.connection
                .send(
                    "",
                    &["SET", counter, "1234", "PX", "15000000"].map(Argument::Text),
                    Deadline::within(DEADLINE),
                )
                .await?;
            let field = start_us.to_string();
            self.connection
                .send(
                    "",
                    &["HSET", &self.hash, &field, "1234"].map(Argument::Text),
                    Deadline::within(DEADLINE),
                )
                .await?;
        }
        Ok(())
    }

    async fn packed(&self, at_us: u64) -> Result<(), Box<dyn Error>> {
        let check = Check { limit: &self.limit, key: &self.key, cost: 1234 };
        let now = Now::At(Timestamp::from_us(at_us).ok_or("too late")?);
        let _ = self.store.apply(&Batch::one(&check).now(now)).await?;
        Ok(())
    }

    /// The smallest state, for comparison.
    async fn gcra(&self) -> Result<(), Box<dyn Error>> {
        let check = Check { limit: &self.gcra, key: "bob", cost: 1 };
        let now = Now::At(Timestamp::from_us(NOW_US).ok_or("too late")?);
        let _ = self.store.apply(&Batch::one(&check).now(now)).await?;
        Ok(())
    }

    async fn counters_script(&self) -> Result<(), Box<dyn Error>> {
        let mut words = vec![
            Argument::Text("EVALSHA"),
            Argument::Text(&self.sha),
            Argument::Number(self.buckets),
        ];
        words.extend(self.counters.iter().map(|counter| Argument::Text(counter)));
        words.extend([Argument::Text("1"), Argument::Text("15000000")]);
        self.connection.send("", &words, Deadline::within(DEADLINE)).await?;
        Ok(())
    }

    async fn counters_multi(&self) -> Result<(), Box<dyn Error>> {
        let current = Argument::Text(&self.counters[0]);
        let mut mget = vec![Argument::Text("MGET")];
        mget.extend(self.counters.iter().map(|counter| Argument::Text(counter)));
        let commands = [
            vec![Argument::Text("INCRBY"), current, Argument::Text("1")],
            vec![Argument::Text("PEXPIRE"), current, Argument::Text("15000000")],
            mget,
        ];
        self.connection.transaction("", &commands, Deadline::within(DEADLINE)).await?;
        Ok(())
    }

    async fn hash_multi(&self) -> Result<(), Box<dyn Error>> {
        let (key, field) = (Argument::Text(&self.hash), NOW_US.to_string());
        let commands = [
            vec![Argument::Text("HINCRBY"), key, Argument::Text(&field), Argument::Text("1")],
            vec![Argument::Text("PEXPIRE"), key, Argument::Text("15000000")],
            vec![Argument::Text("HGETALL"), key],
        ];
        self.connection.transaction("", &commands, Deadline::within(DEADLINE)).await?;
        Ok(())
    }

    async fn round(&self, way: usize, calls: u32) -> Result<Round, Box<dyn Error>> {
        let (server, begin) = (self.server_us().await?, Instant::now());
        for _ in 0..calls {
            match way {
                0 => self.packed(NOW_US).await?,
                1 => self.gcra().await?,
                2 => self.counters_script().await?,
                3 => self.counters_multi().await?,
                _ => self.hash_multi().await?,
            }
        }
        let wall_us = begin.elapsed().as_secs_f64() * 1e6 / f64::from(calls);
        let server_us = (self.server_us().await? - server) / f64::from(calls);
        Ok(Round { wall_us, server_us })
    }

    /// The CPU time of the server so far.
    async fn server_us(&self) -> Result<f64, Box<dyn Error>> {
        let reply = self
            .connection
            .send("", &["INFO", "cpu"].map(Argument::Text), Deadline::within(DEADLINE))
            .await?;
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
    async fn bytes(&self) -> Result<[i64; 5], Box<dyn Error>> {
        let packed = self.usage(&self.store.key(&self.limit, &self.key)).await?;
        let mut counters = 0;
        for counter in &self.counters {
            counters += self.usage(counter).await?;
        }
        let gcra = self.usage(&self.store.key(&self.gcra, "bob")).await?;
        Ok([packed, gcra, counters, counters, self.usage(&self.hash).await?])
    }

    async fn usage(&self, key: &str) -> Result<i64, Box<dyn Error>> {
        match self
            .connection
            .send("", &["MEMORY", "USAGE", key].map(Argument::Text), Deadline::within(DEADLINE))
            .await?
        {
            Reply::Integer(bytes) => Ok(bytes),
            other => Err(format!("{key}: {other:?}").into()),
        }
    }
}
