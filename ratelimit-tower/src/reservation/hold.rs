//! [`Hold`]: reservations that outlive the response.

use std::fmt;
use std::sync::{Arc, Weak};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::Open;

/// Keeps what a request has reserved for longer than its response takes: an extension of each request that a
/// [`ReservationLayer`](super::ReservationLayer) admits.
///
/// A connection that is upgraded, such as a WebSocket, lives on after the response 101, and no layer sees it end. So its
/// handler keeps the reservations, of all layers, until then:
///
/// ```
/// use axum::body::Body;
/// use axum::extract::Extension;
/// use http::{Request, Response, StatusCode};
/// use ratelimit_tower::Hold;
///
/// async fn connect(Extension(hold): Extension<Hold>, request: Request<Body>) -> Response<Body> {
///     let place = hold.keep();
///     tokio::spawn(async move {
///         if let Ok(connection) = hyper::upgrade::on(request).await {
///             // … use the connection
/// #           drop(connection);
///         }
///         drop(place); // the place is free
///     });
///     let mut response = Response::new(Body::empty());
///     *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
///     // … and the fields `Connection` and `Upgrade`
///     response
/// }
/// ```
///
/// With axum's `WebSocketUpgrade`, move the [`Held`] into the closure of `on_upgrade`.
#[derive(Clone, Default)]
pub struct Hold {
    /// One for each layer.
    reservations: Arc<[Weak<dyn Open>]>,
}

impl Hold {
    /// Adds the reservation of a layer.
    pub(super) fn also<O: Open + 'static>(&mut self, reservation: &Arc<O>) {
        let reservation: Weak<O> = Arc::downgrade(reservation);
        let others = self.reservations.iter().cloned();
        self.reservations = others.chain([reservation as Weak<dyn Open>]).collect();
    }

    /// Keeps the reservations until the returned value is dropped. In a tokio runtime, they are renewed meanwhile, so that a
    /// lease may be shorter than the connection lives.
    ///
    /// Call it before the handler returns: after the end of the body there is nothing left to keep.
    pub fn keep(&self) -> Held {
        let reservations: Vec<_> = self.reservations.iter().filter_map(Weak::upgrade).collect();
        let mut renewals = JoinSet::new();
        if let Ok(runtime) = Handle::try_current() {
            for reservation in &reservations {
                renewals.spawn_on(reservation.clone().renewals(), &runtime);
            }
        }
        Held { reservations, _renewals: renewals }
    }
}

/// Reservations that are kept until this value is dropped: see [`Hold`].
#[must_use = "the reservations are settled when it is dropped"]
pub struct Held {
    reservations: Vec<Arc<dyn Open>>,
    /// They end with this value.
    _renewals: JoinSet<()>,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.reservations.len();
        f.debug_struct("Held").field("reservations", &count).finish_non_exhaustive()
    }
}
