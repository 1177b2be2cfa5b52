//! [`IdentifiedCaller`]: the identifiers of one request.

use std::borrow::Cow;
use std::sync::Arc;

use http::request::Parts;
use ratelimit_core::Identifiers;
use smallvec::SmallVec;

use crate::BoxFuture;
use crate::identify::{Identification, Identifier, Identify, IdentifyError};

/// A source and the name of its identifier; no name for a bare key.
#[derive(Clone)]
pub(crate) struct IdentifierSource {
    name: Option<Box<str>>,
    identify: Arc<dyn Identify>,
}

/// All sources of a layer.
#[derive(Clone, Default)]
pub(crate) struct Sources(Arc<[IdentifierSource]>);

impl Sources {
    /// These sources and one more. It replaces an earlier one of the same name.
    pub(crate) fn with(&self, name: Option<&str>, identify: impl Identify) -> Self {
        let others = self.0.iter().filter(|source| source.name.as_deref() != name).cloned();
        let source = IdentifierSource { name: name.map(Into::into), identify: Arc::new(identify) };
        Self(others.chain([source]).collect())
    }

    /// The names of the identifiers; `None` for the bare key.
    pub(crate) fn names(&self) -> SmallVec<[Option<&str>; 4]> {
        self.0.iter().map(|source| source.name.as_deref()).collect()
    }

    /// The identifier of this name, of a request with these values.
    pub(crate) fn value<'a>(&self, values: &'a Values, name: Option<&str>) -> Option<Cow<'a, str>> {
        let position = self.0.iter().position(|source| source.name.as_deref() == name)?;
        values.get(position)?.as_ref().map(|value| value.as_str().into())
    }

    /// Asks all sources. Where some have to be waited for, first to last, all values are those of
    /// the future.
    #[inline]
    pub(crate) fn identify(
        &self,
        request: &mut Parts,
        values: &mut Values,
    ) -> Result<Option<Later>, IdentifyError> {
        let mut later = Vec::new();
        for (position, source) in self.0.iter().enumerate() {
            values.push(match source.identify.identify(request) {
                Identification::Now(found) => found?,
                Identification::Later(found) => {
                    later.push((position, found));
                    None
                }
            });
        }
        if later.is_empty() {
            return Ok(None);
        }
        let mut values = std::mem::take(values);
        Ok(Some(Box::pin(async move {
            for (position, found) in later {
                values[position] = found.await?;
            }
            Ok(values)
        })))
    }
}

pub(crate) type Later = BoxFuture<'static, Result<Values, IdentifyError>>;

/// The identifiers of one request, one for each source.
pub(crate) type Values = SmallVec<[Option<Identifier>; 2]>;

/// The identifiers of one request with their names.
#[derive(Clone, Copy)]
pub(crate) struct IdentifiedCaller<'a> {
    pub(crate) sources: &'a Sources,
    pub(crate) values: &'a Values,
}

impl IdentifiedCaller<'_> {
    /// Those of the `wanted` identifiers that the request may lack, and lacks, in words; `None` if
    /// it has all. `None` among the wanted is the bare key.
    pub(crate) fn lacking(self, wanted: &[Option<&str>]) -> Option<String> {
        let lacking =
            self.sources.0.iter().zip(self.values).filter(|(source, value)| {
                value.is_none() && wanted.contains(&source.name.as_deref())
            });
        let words = lacking.map(|(source, _)| match &source.name {
            Some(name) => format!("{name:?}"),
            None => "a key".to_owned(),
        });
        Some(words.collect::<Vec<_>>().join(" and ")).filter(|words| !words.is_empty())
    }
}

impl Identifiers for IdentifiedCaller<'_> {
    fn bare(&self) -> Option<Cow<'_, str>> {
        self.sources.value(self.values, None)
    }

    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        self.sources.value(self.values, Some(name))
    }

    fn names(&self) -> Vec<&str> {
        let known = self.sources.0.iter().zip(self.values).filter(|(_, value)| value.is_some());
        known.filter_map(|(source, _)| source.name.as_deref()).collect()
    }
}
