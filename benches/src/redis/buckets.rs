//! Ways to keep a bucketed window on Redis: packed into one field, as one counter per bucket, or as
//! a hash of counters, replayed as the decisions of [`cpu`](super::cpu) are.

use ratelimit_redis::RedisStore;

use crate::measure::Fallible;

use super::cpu::ReplayedDecision;
use super::lab::Lab;
use super::recorder::{RecordedCommand, command};
use super::replay::recorded_caller;
use super::situation::Situation;

/// The number of buckets, and the days of each: no bucket ends during a run.
const BUCKETS: [(u32, u32, [&str; 4]); 2] = [
    (15, 1_000, ["15, packed", "15, a script", "15, MULTI", "15, hash, MULTI"]),
    (300, 60, ["300, packed", "300, a script", "300, MULTI", "300, hash, MULTI"]),
];

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

/// Measures every way.
pub(super) async fn run(lab: &mut Lab) -> Fallible {
    let store = RedisStore::connect(&lab.recorded_url()).await?;
    let script = lab.load(COUNTERS_SCRIPT)?;
    for (count, days, [packed, scripted, counted, hashed]) in BUCKETS {
        let trial = |decision, keys| ReplayedDecision {
            part: "buckets",
            mode: "",
            decision,
            admits: true,
            requests: 1,
            keys,
        };
        lab.flush()?;
        let situation = Situation::buckets(count, days)?.in_store(store.clone());
        let decision = lab.record(&situation, true).await?;
        trial(packed, 1).measure(lab, &decision)?;

        let caller = recorded_caller();
        let name = |n: u32| format!("c:{{{}}}:{n}", caller.as_str());
        let counters: Vec<_> = (0..count).map(name).collect();
        let counters: Vec<_> = counters.iter().map(String::as_str).collect();
        let hash = format!("h:{}", caller.as_str());
        let fields: Vec<_> = (0..count).map(|n| (1_795_218_392 + n).to_string()).collect();
        let set = counters.iter().map(|name| command(&["SET", name, "1234", "PX", "15000000"]));
        let set: Vec<_> = set.collect();
        let hset = fields.iter().map(|field| command(&["HSET", &hash, field, "1234"]));
        let hset: Vec<_> = hset.collect();
        let with = |words: &[&str], more: &[&str]| command(&[words, more].concat());
        let in_multi = |commands: [RecordedCommand; 3]| {
            let [first, second, third] = commands;
            vec![command(&["MULTI"]), first, second, third, command(&["EXEC"])]
        };
        let keys = counters.len().to_string();
        let mut call = with(&["EVALSHA", &script, &keys], &counters);
        call.extend(command(&["1", "15000000"]));
        let counting = in_multi([
            command(&["INCRBY", counters[0], "1"]),
            command(&["PEXPIRE", counters[0], "15000000"]),
            with(&["MGET"], &counters),
        ]);
        let hashing = in_multi([
            command(&["HINCRBY", &hash, &fields[0], "1"]),
            command(&["PEXPIRE", &hash, "15000000"]),
            command(&["HGETALL", &hash]),
        ]);
        for (decision, keys, prepare, commands) in [
            (scripted, counters.len(), &set, vec![call]),
            (counted, counters.len(), &set, counting),
            (hashed, 1, &hset, hashing),
        ] {
            lab.flush()?;
            let recorded = lab.replay_commands(prepare, commands)?;
            trial(decision, keys).measure(lab, &recorded)?;
        }
    }
    Ok(())
}
