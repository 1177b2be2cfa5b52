//! [`Hold`]: reservations that outlive the response.

use std::sync::{Arc, Weak};

use ratelimit_core::{LimitCosts, Verdict};

use super::open::{BoxError, OpenReservation};
use crate::decisions::Decisions;

/// Keeps what a request has reserved for longer than its response takes: an extension of each
/// request that a layer that [reserves](super::Reserving) admits.
///
/// A connection that is upgraded, such as a WebSocket, lives on after the response 101, and no
/// layer sees it end. So its handler keeps the reservations, of all layers, until then:
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
#[derive(Clone, Debug, Default)]
pub struct Hold(
    /// One for each layer.
    pub(super) Vec<Weak<OpenReservation>>,
);

impl Hold {
    /// Grows what the request has reserved to this total, if what is added fits: a stream that is
    /// longer than its estimate asks before it goes on, and stops after a denial. Returns the last
    /// verdict; `None` if nothing is reserved any more, because the client has gone or the response
    /// has ended.
    ///
    /// Layers inside each other are asked one after the other, up to the first that denies, each
    /// for those of its limits that the total names. A limit of
    /// [`Concurrency`](ratelimit_core::Concurrency) keeps its places, and is not extended.
    ///
    /// # Errors
    /// The error of the store; a name that no limit of these layers has.
    pub async fn extend(&self, total: impl Into<LimitCosts>) -> Result<Option<Verdict>, BoxError> {
        let (total, mut last) = (total.into(), None);
        let open: Vec<_> = self.0.iter().filter_map(Weak::upgrade).collect();
        let mut unknown: Vec<_> = total.parts().0.map(|(name, _)| name).collect();
        for reservation in &open {
            let settles = reservation.settles.lock().await;
            unknown.retain(|name| !settles.knows(name));
        }
        if let ([name, ..], false) = (&unknown[..], open.is_empty()) {
            return Err(
                format!("the total has a cost of {name:?}, and no limit has this name").into()
            );
        }
        for reservation in &open {
            let mut settles = reservation.settles.lock().await;
            let own = total.clone().only(|name| settles.knows(name));
            if own.uniform().is_some() && total.uniform().is_none() {
                continue;
            }
            let verdict = settles.extend(own).await?;
            let goes_on = verdict.allowed();
            last = Some(verdict);
            if !goes_on {
                break;
            }
        }
        Ok(last)
    }

    /// Calls this with what the limits of each layer decided when the request was settled, such as
    /// for a mail to a customer whose budget this request has nearly used up: a settlement above
    /// the estimate may cross the threshold at which a limit
    /// [warns](ratelimit_core::Limit::warn_at_percent), after the handler has seen its
    /// [`Decisions`]. The first call of this method counts.
    ///
    /// It is called once per layer, after the response has ended: on a store in memory before the
    /// end of the body is reported, on any other in the background. It is not called where nothing
    /// is reserved, or the settlement fails.
    ///
    /// ```
    /// use axum::Extension;
    /// use ratelimit_tower::{Hold, Meter};
    ///
    /// async fn complete(Extension(hold): Extension<Hold>, Extension(meter): Extension<Meter>) {
    ///     hold.on_settled(|decisions| {
    ///         for limit in decisions.warned() {
    ///             println!("{limit} is nearly used up");
    ///         }
    ///     });
    ///     meter.add(1_234); // tokens that were made
    /// }
    /// ```
    pub fn on_settled(&self, told: impl Fn(&Decisions) + Send + Sync + 'static) {
        let told = Arc::new(told);
        for reservation in self.0.iter().filter_map(Weak::upgrade) {
            let told = told.clone();
            let _is_set = reservation.told.set(Box::new(move |decisions| told(decisions)));
        }
    }

    /// Keeps the reservations until the returned value is dropped.
    ///
    /// Call it before the handler returns: after the end of the body there is nothing left to keep.
    pub fn keep(&self) -> Held {
        Held { _reservations: self.0.iter().filter_map(Weak::upgrade).collect() }
    }
}

/// Reservations that are kept until this value is dropped: see [`Hold`].
#[must_use = "the reservations are settled when it is dropped"]
#[derive(Debug)]
pub struct Held {
    _reservations: Vec<Arc<OpenReservation>>,
}
