//! What the benchmarks have measured: the files in `docs/guide/measured`, each with the command and
//! the machine in its first line. `scripts/measure` writes them anew.

use std::error::Error;
use std::path::Path;

use serde_json::Value;

fn read(file: &str) -> Result<String, Box<dyn Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../measured").join(file);
    std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// The measurements of a file of JSON lines.
pub(crate) fn measured(file: &str) -> Result<Vec<Value>, Box<dyn Error>> {
    let text = read(file)?;
    Ok(text.lines().skip(1).map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// The rows of a file whose columns stand in a table of text.
pub(crate) fn table(file: &str) -> Result<Vec<Vec<String>>, Box<dyn Error>> {
    let text = read(file)?;
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    Ok(text.lines().skip(1).map(words).collect())
}

/// A number of a measurement.
pub(crate) fn number(row: &Value, name: &str) -> Result<f64, Box<dyn Error>> {
    row[name].as_f64().ok_or_else(|| format!("no number {name} in {row}").into())
}
