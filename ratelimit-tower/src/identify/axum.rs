//! Sources that read axum's routes.

use axum::extract::{FromRequestParts, MatchedPath, RawPathParams};
use futures_util::FutureExt;
use http::request::Parts;

use super::{Identification, Identify, IdentifyError, from_fn};

/// Identifies by the route that axum matched, such as `/users/{id}`. All paths of a route share a
/// limit.
///
/// The layer must be added with `Router::layer` or `Router::route_layer` of the router that has the
/// routes. A request that no route matched, which the fallback answers, has the identifier `*`.
///
/// A layer around `nest_service` does not see the routes of the service, which share `*` then: nest
/// a router by `nest`, or add the layer to the inner router.
#[must_use]
pub fn matched_route() -> impl Identify {
    from_fn(|request| {
        let path = request.extensions.get::<MatchedPath>();
        Ok(Some(path.map_or("*", MatchedPath::as_str).into()))
    })
}

/// Identifies by a parameter of the path: `path_param("tenant")` for `/{tenant}/orders`.
///
/// A request whose route has no such parameter is answered with 500, because the layer is on the
/// wrong routes.
#[must_use]
pub fn path_param(name: &'static str) -> impl Identify {
    move |request: &mut Parts| {
        // The extractor reads an extension of the request and waits for nothing.
        let params = match RawPathParams::from_request_parts(request, &()).now_or_never() {
            Some(Ok(params)) => Some(params),
            Some(Err(refused)) if refused.status().is_client_error() => {
                return Identification::Now(Err(IdentifyError::missing(refused.body_text())));
            }
            _ => None,
        };
        let value = params.iter().flatten().find(|(known, _)| *known == name);
        Identification::Now(value.map(|(_, value)| Some(value.into())).ok_or_else(|| {
            IdentifyError::not_wired(format!(
                "the route has no parameter {name:?}; add the layer with `Router::layer` to routes that have it"
            ))
        }))
    }
}
