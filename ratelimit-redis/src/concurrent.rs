//! [`all`]: futures that run concurrently.

use std::future::Future;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, JoinAll, join_all};

/// Runs these futures concurrently, and returns their outputs in order. Each is boxed: `join_all`
/// is large, and would be compiled once for each kind of future, algorithm and connection.
pub(crate) fn all<'f, F>(futures: impl IntoIterator<Item = F>) -> JoinAll<BoxFuture<'f, F::Output>>
where
    F: Future + Send + 'f,
{
    join_all(futures.into_iter().map(FutureExt::boxed))
}
