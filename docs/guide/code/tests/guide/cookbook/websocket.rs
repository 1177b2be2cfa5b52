use std::time::Duration;

use futures_util::{Stream, StreamExt};
use ratelimit_core::{AnyAlgorithm, Store};
use ratelimit_tower::{WaitError, Waiter};

/// Handles messages until the socket ends. After an error, close it with 1008.
async fn serve<M, E, S: Store<AnyAlgorithm>>(
    mut socket: impl Stream<Item = Result<M, E>> + Unpin,
    waiter: &Waiter<S>,
    user: &str,
    handle: impl AsyncFn(M),
) -> Result<(), WaitError<S::Error>> {
    while let Some(Ok(message)) = socket.next().await {
        // Nothing is read meanwhile, so TCP slows the client down.
        waiter.until_allowed(user, Duration::from_secs(10)).await?;
        handle(message).await;
    }
    Ok(())
}

mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use futures_util::stream;
    use ratelimit_core::{Gcra, Limits, RateLimiter, TokioClock};
    use ratelimit_memory::MemoryStore;
    use tokio::time::Instant;

    use super::*;
    use crate::Error;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_sends_too_fast_is_slowed_down() -> Result<(), Error> {
        let limits = Limits::builder().limit("messages", Gcra::per_second(2).burst(5)).build()?;
        let store = MemoryStore::builder().clock(TokioClock::default()).build();
        let waiter = Waiter::new(RateLimiter::<_, AnyAlgorithm>::new(limits, store));
        let (begin, handled) = (Instant::now(), Cell::new(0));
        let messages = stream::iter((0..25).map(Ok::<_, Infallible>));
        serve(messages, &waiter, "alice", async |_| handled.set(handled.get() + 1)).await?;
        assert_eq!((handled.get(), begin.elapsed().as_secs()), (25, 10)); // 5, and 2 per second
        Ok(())
    }
}
