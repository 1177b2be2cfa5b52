//! [`Codec`]: a state as bytes, for the mode that compares and sets.

use ratelimit_core::{
    Bucket, BucketedWindowState, FirstRequestState, FixedWindowState, GcraState, LogEntry,
    PolicyState, SlidingCounterState, SlidingLogState, Tick, TokenBucketState,
};

/// A state that can be kept as bytes.
///
/// ```
/// use ratelimit_redis::Codec;
///
/// struct Spent(u64);
///
/// impl Codec for Spent {
///     fn encode(&self) -> Vec<u8> {
///         self.0.to_string().into_bytes()
///     }
///     fn decode(bytes: &[u8]) -> Option<Self> {
///         std::str::from_utf8(bytes).ok()?.parse().ok().map(Spent)
///     }
/// }
/// ```
pub trait Codec: Sized {
    /// The state as bytes; never none at all. Equal bytes mean equal states.
    fn encode(&self) -> Vec<u8>;

    /// The state that these bytes are, or `None` if they are none.
    fn decode(bytes: &[u8]) -> Option<Self>;
}

/// Text: the name of the algorithm, then its numbers.
impl Codec for PolicyState {
    fn encode(&self) -> Vec<u8> {
        let (name, numbers) = match self {
            Self::Gcra(GcraState { tat_us, surplus, tick }) => {
                ("gcra", vec![*tat_us, *surplus, tick.as_us()])
            }
            Self::TokenBucket(TokenBucketState { tokens, remainder, tick, since_us }) => {
                ("token-bucket", vec![*tokens, *remainder, tick.as_us(), *since_us])
            }
            Self::FixedWindow(FixedWindowState { start, count }) => {
                ("fixed-window", vec![start.as_us(), *count])
            }
            Self::FirstRequestWindow(FirstRequestState { start, count }) => {
                ("first-request-window", vec![start.as_us(), *count])
            }
            Self::BucketedWindow(BucketedWindowState { buckets }) => {
                let numbers =
                    buckets.iter().flat_map(|bucket| [bucket.start.as_us(), bucket.count]);
                ("bucketed-window", numbers.collect())
            }
            Self::SlidingCounter(SlidingCounterState { start, previous, current }) => {
                ("sliding-counter", vec![start.as_us(), *previous, *current])
            }
            Self::SlidingLog(SlidingLogState { entries }) => {
                let numbers = entries.iter().flat_map(|entry| [entry.tick.as_us(), entry.cost]);
                ("sliding-log", numbers.collect())
            }
        };
        let mut text = String::from(name);
        for number in numbers {
            text.push(' ');
            text.push_str(&number.to_string());
        }
        text.into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        let name = words.next()?;
        let numbers = words.map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
        let tick = |us: &u64| Tick::from_us(*us);
        Some(match (name, &*numbers) {
            ("gcra", [tat_us, surplus, at]) => {
                GcraState { tat_us: *tat_us, surplus: *surplus, tick: tick(at)? }.into()
            }
            ("token-bucket", [tokens, remainder, at, since_us]) => {
                let (tokens, remainder, since_us) = (*tokens, *remainder, *since_us);
                TokenBucketState { tokens, remainder, tick: tick(at)?, since_us }.into()
            }
            ("fixed-window", [start, count]) => {
                FixedWindowState { start: tick(start)?, count: *count }.into()
            }
            ("first-request-window", [start, count]) => {
                FirstRequestState { start: tick(start)?, count: *count }.into()
            }
            ("bucketed-window", pairs @ [_, ..]) => {
                let bucket = |(start, count)| Some(Bucket { start: tick(&start)?, count });
                let buckets = in_pairs(pairs)?.map(bucket).collect::<Option<_>>()?;
                BucketedWindowState { buckets }.into()
            }
            ("sliding-counter", [start, previous, current]) => {
                let (previous, current) = (*previous, *current);
                SlidingCounterState { start: tick(start)?, previous, current }.into()
            }
            ("sliding-log", pairs @ [_, ..]) => {
                let entry = |(at, cost)| Some(LogEntry { tick: tick(&at)?, cost });
                let entries = in_pairs(pairs)?.map(entry).collect::<Option<_>>()?;
                SlidingLogState { entries }.into()
            }
            _ => return None,
        })
    }
}

fn in_pairs(numbers: &[u64]) -> Option<impl Iterator<Item = (u64, u64)>> {
    let pairs = numbers.chunks_exact(2);
    pairs.remainder().is_empty().then(|| pairs.map(|pair| (pair[0], pair[1])))
}
