//! A limiter whose store becomes unreachable and comes back. Each limit says what it does then.
//!
//! ```console
//! $ cargo run -p ratelimit-layers --example outage
//! ```

use std::error::Error;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratelimit_core::store::Batch;
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Gcra, Limit, Limits, OnOutage, RateLimiter, Refusal, Source, Store,
    StoreError, Verdict,
};
use ratelimit_layers::Fallback;
use ratelimit_memory::{MemoryError, MemoryStore};

/// A store that is unreachable while a flag says so, in place of one on Redis.
struct Remote {
    store: MemoryStore<AnyAlgorithm>,
    is_away: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
enum RemoteError {
    #[error("the store is away")]
    Away,
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<Refusal> for RemoteError {
    fn from(refusal: Refusal) -> Self {
        Self::Memory(refusal.into())
    }
}

impl StoreError for RemoteError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Away => ErrorKind::Unavailable,
            Self::Memory(error) => error.kind(),
        }
    }
}

impl Store<AnyAlgorithm> for Remote {
    type Error = RemoteError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, RemoteError> {
        if self.is_away.load(Ordering::Relaxed) {
            return Err(RemoteError::Away);
        }
        Ok(self.store.apply(batch).await?)
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    let is_away = Arc::new(AtomicBool::new(false));
    let redis = Remote { store: MemoryStore::new(), is_away: Arc::clone(&is_away) };

    let burst =
        Limit::<AnyAlgorithm>::new("burst", Gcra::per_minute(60).burst(60).build()?.into())?;
    let limits = Limits::new([burst.on_outage(OnOutage::Local)])?;
    let nodes = NonZeroU64::new(3).ok_or("at least one node")?;
    let store = Fallback::builder()
        .nodes(nodes)
        .deadline(Duration::from_millis(50))
        .probe_after(Duration::from_millis(10))
        .build(redis, &limits)?;
    let limiter = RateLimiter::new(limits, store);

    let verdict = limiter.check("alice").await?;
    assert_eq!((verdict.source(), verdict.limit()), (Source::Store, 60));

    is_away.store(true, Ordering::Relaxed);
    let verdict = limiter.check("alice").await?;
    assert_eq!((verdict.source(), verdict.limit()), (Source::Fallback, 20));
    for count in limiter.store().outage_counts() {
        println!("{}: {} allowed without the store", count.limit, count.allowed);
    }

    is_away.store(false, Ordering::Relaxed);
    let verdict = limiter.check("alice").await?;
    assert_eq!(verdict.source(), Source::Store);
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    run().await
}

#[tokio::test]
async fn it_runs() -> Result<(), Box<dyn Error>> {
    run().await
}
