//! [`SettledBody`]: a response body that settles a reservation.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::open::OpenReservation;
use super::{Charge, grpc_status};

pin_project! {
    /// A body that settles the reservation of its request when it ends, fails, or is dropped
    /// because the client is gone.
    ///
    /// It passes everything else on to the body of the inner service.
    #[derive(Debug)]
    pub struct SettledBody<B> {
        #[pin]
        pub(super) body: B,
        pub(super) reservation: Option<Arc<OpenReservation>>,
        pub(super) counts_bytes: bool,
        // What a status in the trailers changes.
        pub(super) by_trailers: Option<Charge>,
    }
}

impl<B> SettledBody<B> {
    /// The body of the inner service. The reservation is settled now, at what it has cost so far.
    #[must_use]
    pub fn into_inner(self) -> B {
        self.body
    }
}

/// A body that settles nothing, for the answers of the layer.
impl<B> From<B> for SettledBody<B> {
    fn from(body: B) -> Self {
        Self { body, reservation: None, counts_bytes: false, by_trailers: None }
    }
}

impl<B: Body> Body for SettledBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let mut this = self.project();
        let frame = ready!(this.body.as_mut().poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let (Some(reservation), Some(data)) = (&this.reservation, frame.data_ref())
                    && *this.counts_bytes
                {
                    reservation.by_response.add(data.remaining() as u64);
                }
                if let (Some(reservation), Some(charge)) = (&this.reservation, &this.by_trailers)
                    && let Some(status) = frame.trailers_ref().and_then(grpc_status::of_fields)
                    && let (Some(cost), false) = charge.cost_for(status, false)
                {
                    reservation.by_response.set(cost);
                }
                // A server that knows that this was the last frame asks for no other, and may hold
                // the body until it is sent.
                if this.body.is_end_stream() {
                    drop(this.reservation.take());
                }
            }
            // Dropping it settles it. A body that failed does not go on.
            Some(Err(_)) | None => drop(this.reservation.take()),
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
