//! [`ByLimit`]: a value per limit, made when it is first needed.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

/// Values by the limit's name. There are as many as limits were ever asked for, and they change by shared reference, as
/// counters do.
#[derive(Debug)]
pub(crate) struct ByLimit<T>(RwLock<HashMap<Box<str>, T>>);

impl<T> Default for ByLimit<T> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<T> ByLimit<T> {
    /// Uses the value of this limit. A new one is made without the lock.
    pub(crate) fn with<R>(
        &self,
        limit: &str,
        make: impl FnOnce() -> T,
        using: impl FnOnce(&T) -> R,
    ) -> R {
        {
            let by_limit = self.0.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = by_limit.get(limit) {
                return using(value);
            }
        }
        let value = make();
        let mut by_limit = self.0.write().unwrap_or_else(PoisonError::into_inner);
        using(by_limit.entry(limit.into()).or_insert(value))
    }

    /// What becomes of each limit's value, in no order.
    pub(crate) fn map<R>(&self, mut each: impl FnMut(&str, &T) -> R) -> Vec<R> {
        let by_limit = self.0.read().unwrap_or_else(PoisonError::into_inner);
        by_limit.iter().map(|(limit, value)| each(limit, value)).collect()
    }
}
