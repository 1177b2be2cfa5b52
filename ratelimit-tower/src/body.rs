//! [`SettledBody`]: a response body that settles a reservation.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::reservation::Settlement;

pin_project! {
    /// A body that settles the reservation of its request when it ends, fails, or is dropped because the client is gone.
    ///
    /// It passes everything else on to the body of the inner service.
    pub struct SettledBody<B> {
        #[pin]
        body: B,
        settlement: Option<Box<dyn Settlement>>,
    }
}

impl<B> SettledBody<B> {
    pub(crate) const fn new(body: B, settlement: Option<Box<dyn Settlement>>) -> Self {
        Self { body, settlement }
    }

    /// The body of the inner service. The reservation is settled now, at what it has cost so far.
    #[must_use]
    pub fn into_inner(self) -> B {
        self.body
    }
}

/// A body that settles nothing, for the answers of the layer.
impl<B> From<B> for SettledBody<B> {
    fn from(body: B) -> Self {
        Self::new(body, None)
    }
}

impl<B: Body> Body for SettledBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.project();
        let frame = ready!(this.body.poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let (Some(settlement), Some(data)) = (this.settlement, frame.data_ref()) {
                    settlement.sent(data.remaining());
                }
            }
            // Dropping it settles it. A body that failed does not go on.
            Some(Err(_)) | None => drop(this.settlement.take()),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B: fmt::Debug> fmt::Debug for SettledBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settles = self.settlement.is_some();
        f.debug_struct("SettledBody").field("body", &self.body).field("settles", &settles).finish()
    }
}
