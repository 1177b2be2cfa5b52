//! Reading the policy.

use std::fs;
use std::path::Path;

use ratelimit_core::{Limits, Policy};

use crate::failure::Failure;

/// The limits in the document at this path.
pub(crate) fn read(path: &Path) -> Result<Limits<Policy>, Failure> {
    let name = path.display();
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::input(format!("{name}: the policy cannot be read: {error}; name a TOML file"))
    })?;
    toml::from_str(&text)
        .map_err(|error| Failure::input(format!("{name}: {}", error.to_string().trim_end())))
}
