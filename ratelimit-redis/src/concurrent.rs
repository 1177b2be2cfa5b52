//! [`all`] and [`first`]: futures that run concurrently.

use std::future::Future;
use std::time::Duration;

use futures_util::future::{BoxFuture, JoinAll, join_all};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::time::timeout;

use crate::error::{RedisError, Result};

/// Runs these futures concurrently, and returns their outputs in order. Each is boxed: `join_all`
/// is large, and would be compiled once for each kind of future, algorithm and connection.
pub(crate) fn all<'f, F>(futures: impl IntoIterator<Item = F>) -> JoinAll<BoxFuture<'f, F::Output>>
where
    F: Future + Send + 'f,
{
    join_all(futures.into_iter().map(FutureExt::boxed))
}

/// The first success of several servers that are asked the same. Each is asked when the one before
/// has failed or has not answered within `head_start`, so a hanging server costs no more than that.
/// Each has its own deadline.
///
/// # Errors
/// If none succeeds, one of their errors: a server's reply rather than a failed connection.
pub(crate) async fn first<T>(
    mut asked: impl Iterator<Item = impl Future<Output = Result<T>>>,
    head_start: Duration,
) -> Result<T> {
    let mut running = FuturesUnordered::new();
    let mut last: Option<RedisError> = None;
    loop {
        let more = asked.next().map(|next| running.push(next)).is_some();
        let answer =
            if more { timeout(head_start, running.next()).await } else { Ok(running.next().await) };
        match answer {
            Ok(Some(Ok(answer))) => return Ok(answer),
            Ok(Some(Err(error))) if last.as_ref().is_none_or(|last| tells_more(&error, last)) => {
                last = Some(error);
            }
            // No server is left.
            Ok(None) if !more => {
                let no_server = || RedisError::Config("there is no server to ask".into());
                return Err(last.unwrap_or_else(no_server).of_a_lookup());
            }
            _ => {}
        }
    }
}

fn tells_more(error: &RedisError, than: &RedisError) -> bool {
    let rank = |error: &RedisError| match error {
        RedisError::Config(_) => 2,
        RedisError::Server { .. } => 1,
        _ => 0,
    };
    rank(error) > rank(than)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn of_several_errors_the_one_that_tells_most_is_returned() {
        let away = || {
            Err::<(), _>(RedisError::Unreachable { address: "h:1".into(), reason: "away".into() })
        };
        let answers = [away(), Err(RedisError::Config("no".into())), away()];
        let asked = answers.into_iter().map(std::future::ready);
        let error = first(asked, Duration::from_millis(50)).await.expect_err("none");
        assert!(matches!(error, RedisError::Config(_)), "{error}");
    }
}
