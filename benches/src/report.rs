//! What was measured, as one JSON line per measurement.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

/// Where the JSON lines go, if they are asked for.
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
