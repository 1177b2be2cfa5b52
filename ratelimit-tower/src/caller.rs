//! [`Caller`]: the identifiers of one request.

use std::borrow::Borrow;
use std::sync::Arc;

use http::request::Parts;
use ratelimit_core::{Algorithm, ConfigError, Identifiers, Limit};
use smallvec::SmallVec;

use crate::identify::{Found, Identified, Identifier, Identify, IdentifyError};

/// A source and the name of its identifier; no name for a bare key.
#[derive(Clone)]
pub(crate) struct Source {
    name: Option<Box<str>>,
    identify: Arc<dyn Identify>,
}

/// All sources of a layer.
#[derive(Clone, Default)]
pub(crate) struct Sources(Arc<[Source]>);

impl Sources {
    /// These sources and one more. It takes the place of an earlier one of the same name.
    pub(crate) fn with(&self, name: Option<&str>, identify: impl Identify) -> Self {
        let others = self.0.iter().filter(|source| source.name.as_deref() != name).cloned();
        let source = Source { name: name.map(Into::into), identify: Arc::new(identify) };
        Self(others.chain([source]).collect())
    }

    /// The names of the identifiers; `None` for the bare key.
    pub(crate) fn names(&self) -> Vec<Option<&str>> {
        self.0.iter().map(|source| source.name.as_deref()).collect()
    }

    /// Checks that each identifier of this limit has a source.
    pub(crate) fn check<A: Algorithm>(&self, limit: &Limit<A>) -> Result<(), ConfigError> {
        limit.check_identifiers(&self.names())
    }

    /// Whether each identifier of this limit has a source.
    pub(crate) fn has_all_of<A: Algorithm>(&self, limit: &Limit<A>) -> bool {
        let mut names = limit.identifier_names();
        let has = |name| self.0.iter().any(|source| source.name.as_deref() == name);
        if names.len() == 0 { has(None) } else { names.all(|name| has(Some(name))) }
    }

    /// Asks all sources. The ones that have to be waited for are asked first to last.
    #[inline]
    pub(crate) fn identify(&self, request: &mut Parts) -> CallerFound {
        let mut values = Values::new();
        let mut later = Vec::new();
        for (place, source) in self.0.iter().enumerate() {
            values.push(match source.identify.identify(request) {
                Found::Now(Ok(value)) => value,
                Found::Now(Err(error)) => return CallerFound::Now(Err(error)),
                Found::Later(found) => {
                    later.push((place, found));
                    None
                }
            });
        }
        if later.is_empty() {
            return CallerFound::Now(Ok(values));
        }
        CallerFound::Later(Box::pin(async move {
            for (place, found) in later {
                let found: Identified = found.await;
                values[place] = found?;
            }
            Ok(values)
        }))
    }
}

/// The identifiers of one request, one for each source.
pub(crate) type Values = SmallVec<[Option<Identifier>; 2]>;

pub(crate) enum CallerFound {
    Now(Result<Values, IdentifyError>),
    Later(crate::BoxFuture<Result<Values, IdentifyError>>),
}

/// The identifiers of one request with their names. A reservation, which outlives the request, owns its sources; a decision borrows
/// them.
#[derive(Clone)]
pub(crate) struct Caller<P> {
    pub(crate) sources: P,
    pub(crate) values: Values,
}

impl<P: Borrow<Sources>> Caller<P> {
    fn value(&self, name: Option<&str>) -> Option<&str> {
        let sources = &self.sources.borrow().0;
        let place = sources.iter().position(|source| source.name.as_deref() == name)?;
        self.values.get(place)?.as_ref().map(Identifier::as_str)
    }

    /// Whether the request lacks an identifier that it may lack.
    pub(crate) fn lacks_some(&self) -> bool {
        self.values.iter().any(Option::is_none)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<P: Borrow<Sources>> Identifiers for Caller<P> {
    fn bare(&self) -> Option<&str> {
        self.value(None)
    }

    fn identifier(&self, name: &str) -> Option<&str> {
        self.value(Some(name))
    }

    fn names(&self) -> Vec<&str> {
        let sources = self.sources.borrow().0.iter();
        let known = sources.zip(&self.values).filter(|(_, value)| value.is_some());
        known.filter_map(|(source, _)| source.name.as_deref()).collect()
    }

    fn format_bare(&self) -> Option<String> {
        None
    }

    fn format_identifier(&self, _name: &str) -> Option<String> {
        None
    }
}
