//! The measurements, one JSON line each.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

/// The destination of the JSON lines, if any.
pub(crate) struct Report(Option<File>);

impl Report {
    pub(crate) fn new(path: Option<&Path>) -> Result<Self, String> {
        let create = |path: &Path| {
            File::create(path).map_err(|error| {
                format!("cannot write {}: {error}; choose another file for --json", path.display())
            })
        };
        Ok(Self(path.map(create).transpose()?))
    }

    pub(crate) fn line(&mut self, line: &impl Serialize) -> Result<(), Box<dyn Error>> {
        if let Some(file) = &mut self.0 {
            writeln!(file, "{}", serde_json::to_string(line)?)?;
        }
        Ok(())
    }
}
