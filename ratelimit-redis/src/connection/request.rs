//! [`ServerRequest`]: a command or a transaction, so that each way to send them is written once.

use std::future::Future;

use super::follow::TryAgain;
use super::node::Node;
use super::{Argument, Reply};
use crate::error::RedisError;

/// A request to a server.
pub(crate) trait ServerRequest: Sync {
    type Answer: Send;
    /// Whether it concerns keys rather than their owners.
    #[cfg(feature = "fred")]
    const IS_FOR_KEYS: bool = true;
    const TRY_AGAIN: TryAgain = TryAgain::Wait;

    /// Sends it once. `asking` sends ASKING before it.
    fn by(
        &self,
        node: &Node,
        asking: bool,
    ) -> impl Future<Output = Result<Self::Answer, RedisError>> + Send;
}

pub(crate) struct ServerCommand<'a>(pub(crate) &'a [Argument<'a>]);

impl ServerRequest for ServerCommand<'_> {
    type Answer = Reply;

    async fn by(&self, node: &Node, asking: bool) -> Result<Reply, RedisError> {
        node.send(asking, self.0).await
    }
}

/// A command whose keys the caller can send apart.
pub(crate) struct Splittable<'a>(pub(crate) &'a [Argument<'a>]);

impl ServerRequest for Splittable<'_> {
    type Answer = Reply;
    const TRY_AGAIN: TryAgain = TryAgain::Return;

    async fn by(&self, node: &Node, asking: bool) -> Result<Reply, RedisError> {
        node.send(asking, self.0).await
    }
}

/// A command that asks which server is in charge.
pub(crate) struct Question<'a>(pub(crate) &'a [Argument<'a>]);

impl ServerRequest for Question<'_> {
    type Answer = Reply;
    #[cfg(feature = "fred")]
    const IS_FOR_KEYS: bool = false;

    async fn by(&self, node: &Node, asking: bool) -> Result<Reply, RedisError> {
        node.send(asking, self.0).await
    }
}

pub(crate) struct Transaction<'a>(pub(crate) &'a [Vec<Argument<'a>>]);

impl ServerRequest for Transaction<'_> {
    type Answer = Vec<Reply>;

    async fn by(&self, node: &Node, asking: bool) -> Result<Vec<Reply>, RedisError> {
        node.transaction(asking, self.0).await
    }
}
