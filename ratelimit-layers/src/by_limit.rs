//! [`ByLimit`]: a value per limit, made when it is first needed.

use dashmap::DashMap;

/// Values by the limit's name. There are as many as limits were ever asked for, and they change by shared reference, as
/// counters do.
#[derive(Debug)]
pub(crate) struct ByLimit<T>(DashMap<Box<str>, T>);

impl<T> Default for ByLimit<T> {
    fn default() -> Self {
        Self(DashMap::new())
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
        if let Some(value) = self.0.get(limit) {
            return using(&value);
        }
        let value = make();
        using(&self.0.entry(limit.into()).or_insert(value))
    }

    /// What becomes of each value, in no order.
    pub(crate) fn map<R>(&self, mut each: impl FnMut(&T) -> R) -> Vec<R> {
        self.0.iter().map(|value| each(&value)).collect()
    }
}
