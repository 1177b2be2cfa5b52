//! The measurements, as tables for people and as JSON lines for programs.

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};

use crate::measure::Fallible;

/// How long to measure, and where to write what was measured.
#[derive(Args, Default)]
pub(crate) struct Effort {
    /// Fewer rounds, and less steady.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Also write JSON lines to this file: the command and the kind of machine, then each
    /// measurement.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How long to measure, and what.
#[derive(Args)]
pub(crate) struct Options<P: ValueEnum + Clone + Send + Sync + 'static> {
    #[command(flatten)]
    pub(crate) effort: Effort,
    /// The parts to run; all by default.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<P>,
}

impl<P: ValueEnum + Clone + Send + Sync + PartialEq> Options<P> {
    /// Whether a part is asked for.
    pub(crate) fn has(&self, part: &P) -> bool {
        self.only.is_empty() || self.only.contains(part)
    }
}

/// A cell of a table, by whose name a JSON line has it, too.
pub(crate) type NamedCell = (&'static str, Cell);

#[derive(Clone, Copy)]
pub(crate) enum Cell {
    Text(&'static str),
    Count(u64),
    /// A number, rounded to so many digits.
    Rounded(f64, usize),
    /// The least and the greatest of several numbers, likewise.
    Range([f64; 2], usize),
}

/// A number with so many digits after the point.
pub(crate) fn digits(count: u8, number: f64) -> Cell {
    Cell::Rounded(rounded(count, number), count.into())
}

/// The ends of a range with so many digits after the point.
pub(crate) fn range(count: u8, ends: [f64; 2]) -> Cell {
    Cell::Range(ends.map(|end| rounded(count, end)), count.into())
}

fn rounded(digits: u8, number: f64) -> f64 {
    let parts = 10_f64.powi(digits.into());
    (number * parts).round() / parts
}

impl From<&'static str> for Cell {
    fn from(text: &'static str) -> Self {
        Self::Text(text)
    }
}

impl From<u64> for Cell {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl From<usize> for Cell {
    fn from(count: usize) -> Self {
        Self::Count(count as u64)
    }
}

impl Cell {
    /// This text in the column of the cell.
    fn column(self, name: &str, text: &str) -> String {
        match self {
            Self::Text(_) => format!("{text:<22} "),
            _ => format!("{text:>width$} ", width = name.len().max(8)),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Text(text) => text.to_owned(),
            Self::Count(count) => count.to_string(),
            Self::Rounded(number, digits) => format!("{number:.digits$}"),
            Self::Range([least, greatest], digits) => {
                format!("{least:.digits$}–{greatest:.digits$}")
            }
        }
    }
}

impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Text(text) => text.serialize(serializer),
            Self::Count(count) => count.serialize(serializer),
            Self::Rounded(number, _) => number.serialize(serializer),
            Self::Range(ends, _) => ends.serialize(serializer),
        }
    }
}

/// By which command, and on what kind of machine.
fn circumstances() -> serde_json::Value {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let processors = std::thread::available_parallelism().map_or(0, NonZeroUsize::get);
    let arguments: Vec<_> = env::args().skip(1).collect();
    serde_json::json!({
        "command": format!("cargo run --profile bench -p benches -- {}", arguments.join(" ")),
        "machine": format!(
            "{processors} processors, {}, {} {}",
            model.unwrap_or("of an unknown model"),
            env::consts::ARCH,
            env::consts::OS
        ),
    })
}

/// Prints tables, and writes the JSON lines if they are wanted.
pub(crate) struct BenchReport {
    file: Option<File>,
    heading: Vec<&'static str>,
}

impl BenchReport {
    pub(crate) fn new(effort: &Effort) -> Result<Self, String> {
        let create = |path: &PathBuf| {
            let file = File::create(path).and_then(|mut file| {
                writeln!(file, "{}", circumstances())?;
                Ok(file)
            });
            file.map_err(|error| {
                format!("cannot write {}: {error}; choose another file for --json", path.display())
            })
        };
        Ok(Self { file: effort.json.as_ref().map(create).transpose()?, heading: Vec::new() })
    }

    /// Writes a line of JSON that is in no table.
    pub(crate) fn line(&mut self, line: &serde_json::Value) -> Fallible {
        if let Some(file) = &mut self.file {
            writeln!(file, "{line}")?;
        }
        Ok(())
    }

    /// Prints a row, after the names of its columns if they are others than those before.
    pub(crate) fn row(&mut self, cells: &[NamedCell]) -> Fallible {
        let names: Vec<_> = cells.iter().map(|(name, _)| *name).collect();
        let line = |text: fn(&NamedCell) -> String| {
            let columns = cells.iter().map(|named| named.1.column(named.0, &text(named)));
            println!("{}", columns.collect::<String>().trim_end());
        };
        if names != self.heading {
            println!();
            line(|(name, _)| (*name).to_owned());
            self.heading = names;
        }
        line(|(_, cell)| cell.text());
        if let Some(file) = &mut self.file {
            // The fields keep their order.
            serde_json::Serializer::new(&mut *file).collect_map(cells.iter().copied())?;
            writeln!(file)?;
        }
        Ok(())
    }
}
