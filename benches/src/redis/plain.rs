//! The hand-written alternative: a script that decides by GCRA, and the loop that calls it, by
//! either client.

use fred::interfaces::{ClientLike, LuaInterface};
use redis::aio::{ConnectionLike, ConnectionManager};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;

use crate::measure::Fallible;

use super::recorder::{RecordedCommand, command};

/// The generic cell rate algorithm as one script: TIME, GET, SET PX, and three integers answered,
/// which are whether the request is admitted, what remains, and the microseconds until it would
/// fit.
pub(super) const GCRA_SCRIPT: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, capacity, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local arrival = tonumber(redis.call('GET', KEYS[1]) or now)
if arrival < now then arrival = now end
local after = arrival + interval * cost
local excess = after - now - capacity
if excess > 0 then
  return { 0, math.floor((capacity - (arrival - now)) / interval), excess }
end
redis.call('SET', KEYS[1], string.format('%.0f', after), 'PX', math.ceil((after - now) / 1000))
return { 1, math.floor((capacity - (after - now)) / interval), 0 }";

/// The same for several keys at one time: three integers answered for each. It gathers requests as
/// simply as can be.
pub(super) const GATHERING_SCRIPT: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, capacity, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local answers = {}
for n = 1, #KEYS do
  local arrival = tonumber(redis.call('GET', KEYS[n]) or now)
  if arrival < now then arrival = now end
  local after = arrival + interval * cost
  local excess = after - now - capacity
  if excess > 0 then
    answers[n] = { 0, math.floor((capacity - (arrival - now)) / interval), excess }
  else
    redis.call('SET', KEYS[n], string.format('%.0f', after), 'PX', math.ceil((after - now) / 1000))
    answers[n] = { 1, math.floor((capacity - (after - now)) / interval), 0 }
  end
end
return answers";

/// The same for the limits of one request, all or nothing, of the same numbers.
pub(super) const LIMITS_SCRIPT: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, capacity, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local after, most = {}, 0
for n = 1, #KEYS do
  local arrival = tonumber(redis.call('GET', KEYS[n]) or now)
  if arrival < now then arrival = now end
  after[n] = arrival + interval * cost
  if after[n] > most then most = after[n] end
end
local excess, left = most - now - capacity, math.floor((capacity - (most - now)) / interval)
if excess > 0 then return { 0, left + cost, excess } end
for n = 1, #KEYS do
  redis.call('SET', KEYS[n], string.format('%.0f', after[n]), 'PX', math.ceil((after[n] - now) / 1000))
end
return { 1, left, 0 }";

/// The arguments of the script for a limit.
#[derive(Clone, Copy)]
pub(super) struct ScriptNumbers {
    pub(super) interval_us: u64,
    pub(super) burst: u64,
}

/// 100 per second, 200,000,000,000 at once: admits every request of a run, and the earlier charges
/// of all its callers.
pub(super) const WIDE: ScriptNumbers =
    ScriptNumbers { interval_us: 10_000, burst: 200_000_000_000 };
/// 10 per second, 10 at once: denies nearly every request of an attack, and admits one per tenth of
/// a second.
pub(super) const ATTACKED: ScriptNumbers = ScriptNumbers { interval_us: 100_000, burst: 10 };
/// 1 per day, 2 at once.
pub(super) const NARROW: ScriptNumbers = ScriptNumbers { interval_us: 86_400_000_000, burst: 2 };

/// The key of a caller in the loop of this client.
pub(super) fn key(client: &str, caller: &str) -> String {
    format!("{client}:{caller}")
}

/// The keys of a request with so many limits, of which the second is for all callers.
pub(super) fn keys(client: &str, caller: &str, limits: usize) -> impl Iterator<Item = String> {
    (0..limits).map(move |limit| match limit {
        0 => key(client, caller),
        1 => key(client, "all"),
        _ => format!("{client}:{caller}:third"),
    })
}

impl ScriptNumbers {
    fn arguments(self, cost: u64) -> [u64; 3] {
        [self.interval_us, self.interval_us * self.burst, cost]
    }

    /// Calls a script for these keys.
    pub(super) fn command(self, sha: &str, keys: &[&str], cost: u64) -> RecordedCommand {
        let count = keys.len().to_string();
        let [interval, capacity, cost] = self.arguments(cost).map(|n| n.to_string());
        command(&[&["EVALSHA", sha, &count], keys, &[&interval, &capacity, &cost]].concat())
    }
}

/// A limiter that is asked in a loop.
pub(super) trait Decides: Send + Sync + 'static {
    /// Whether so much is admitted for the caller.
    fn charge(&self, caller: &str, cost: u64) -> impl Future<Output = Fallible<bool>> + Send;
}

/// A client that calls a script.
pub(super) trait CallsScript: Send + Sync + 'static {
    /// The prefix of its keys.
    const PREFIX: &'static str;

    /// By how many limits a request is decided.
    fn limits(&self) -> usize;

    /// Whether so much is admitted for all of these keys.
    fn call(&self, keys: Vec<String>, cost: u64) -> impl Future<Output = Fallible<bool>> + Send;
}

/// One call per request.
impl<P: CallsScript> Decides for P {
    async fn charge(&self, caller: &str, cost: u64) -> Fallible<bool> {
        self.call(keys(P::PREFIX, caller, self.limits()).collect(), cost).await
    }
}

/// The prefixes of the keys of the loops.
pub(super) const REDIS_RS: &str = "redis-rs";
pub(super) const FRED: &str = "fred";

/// The script that a loop calls, loaded already.
#[derive(Clone)]
pub(super) struct PlainScript {
    pub(super) sha: String,
    pub(super) numbers: ScriptNumbers,
    /// By how many limits each request is decided: the script is for as many.
    pub(super) limits: usize,
}

/// The loop over a connection of the crate `redis`, with its defaults.
pub(super) struct RedisRs<C = ConnectionManager> {
    connection: C,
    script: PlainScript,
}

impl RedisRs {
    pub(super) async fn connect(url: &str, script: &PlainScript) -> Fallible<Self> {
        let connection = redis::Client::open(url)?.get_connection_manager().await?;
        Ok(Self { connection, script: script.clone() })
    }
}

impl RedisRs<ClusterConnection> {
    pub(super) async fn connect_to_cluster(
        nodes: Vec<String>,
        script: &PlainScript,
    ) -> Fallible<Self> {
        let connection = ClusterClient::new(nodes)?.get_async_connection().await?;
        Ok(Self { connection, script: script.clone() })
    }
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> CallsScript for RedisRs<C> {
    const PREFIX: &'static str = REDIS_RS;

    fn limits(&self) -> usize {
        self.script.limits
    }

    async fn call(&self, keys: Vec<String>, cost: u64) -> Fallible<bool> {
        let PlainScript { sha, numbers, .. } = &self.script;
        let mut call = redis::cmd("EVALSHA");
        call.arg(sha).arg(keys.len()).arg(keys).arg(&numbers.arguments(cost));
        let answer: (i64, i64, i64) = call.query_async(&mut self.connection.clone()).await?;
        Ok(answer.0 == 1)
    }
}

/// The loop over a client of the crate `fred`, with its defaults.
pub(super) struct Fred {
    client: fred::clients::Client,
    script: PlainScript,
}

impl Fred {
    pub(super) async fn connect(url: &str, script: &PlainScript) -> Fallible<Self> {
        let config = fred::types::config::Config::from_url(url)?;
        let client = fred::types::Builder::from_config(config).build()?;
        client.init().await?;
        Ok(Self { client, script: script.clone() })
    }
}

impl CallsScript for Fred {
    const PREFIX: &'static str = FRED;

    fn limits(&self) -> usize {
        self.script.limits
    }

    async fn call(&self, keys: Vec<String>, cost: u64) -> Fallible<bool> {
        let PlainScript { sha, numbers, .. } = &self.script;
        let numbers =
            numbers.arguments(cost).map(|number| i64::try_from(number).unwrap_or(i64::MAX));
        let answer: (i64, i64, i64) =
            self.client.evalsha(sha.as_str(), keys, numbers.to_vec()).await?;
        Ok(answer.0 == 1)
    }
}
