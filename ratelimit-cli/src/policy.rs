//! Reads the policy.

use std::fs;
use std::io;
use std::path::Path;

use ratelimit_core::{Limits, Policy};

use crate::failure::Failure;

/// Reads the limits from the document at this path; `-` is standard input.
pub(crate) fn read(path: &Path) -> Result<Limits<Policy>, Failure> {
    let stdin = path.as_os_str() == "-";
    let name = if stdin { Path::new("standard input") } else { path }.display();
    let text = if stdin { io::read_to_string(io::stdin()) } else { fs::read_to_string(path) };
    let text = text.map_err(|error| {
        Failure::input(format!("{name}: the policy cannot be read: {error}; name a TOML file"))
    })?;
    toml::from_str(&text)
        .map_err(|error| Failure::input(format!("{name}: {}", error.to_string().trim_end())))
}
