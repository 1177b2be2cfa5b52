//! The files that a replay writes, which are emptied only when there is something to write, and
//! overwrite no input.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use ratelimit_replay::failure::Failure;
use ratelimit_replay::replay::Decisions;

use crate::args::ReplayArgs;
use crate::inputs::{identity, is_dash};

/// The size of the output buffer.
const BUFFER_BYTES: usize = 64 * 1024;

/// Opens the files for the decisions and for the report. They are opened after the input and the
/// store, so that a mistyped input or store leaves the outputs of an earlier replay alone. They are
/// opened before the replay, so that an unwritable output does not fail after an hour.
pub(crate) fn outputs(args: &ReplayArgs) -> Result<(Option<Decisions>, Option<File>), Failure> {
    let read =
        args.log.inputs.iter().chain([&args.log.policy]).chain(&args.compare).chain(&args.records);
    let read = read.map(|path| if is_dash(path) { Path::new("/dev/stdin") } else { path });
    let mut taken: Vec<_> = read.map(identity).collect();
    let mut open = |option: &str, path: &Path| {
        // The file keeps its contents.
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| Failure::writing(path, &error))?;
        let id = identity(path);
        if id.is_some() && taken.contains(&id) {
            return Err(Failure::input(format!(
                "{option} {} would overwrite what is to be read or written; name another file",
                path.display()
            )));
        }
        taken.push(id);
        Ok(file)
    };
    let path = args.decisions.as_deref().filter(|path| !is_dash(path));
    let file = path.map(|path| open("--decisions", path)).transpose()?;
    let report = args.report.as_deref().map(|path| open("--report", path)).transpose()?;
    let path = path.unwrap_or(Path::new("standard output"));
    let out: Box<dyn Write> = match file {
        Some(file) => {
            empty(&file).map_err(|error| Failure::writing(path, &error))?;
            Box::new(file)
        }
        None => Box::new(io::stdout()),
    };
    let out = BufWriter::with_capacity(BUFFER_BYTES, out);
    let decisions = args.decisions.as_ref().map(|_| Decisions { name: path.to_owned(), out });
    Ok((decisions, report))
}

/// Empties a file. Pipes and terminals have no contents to remove.
fn empty(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// Gives a file these contents. If that fails, it is empty, and not a piece of them.
pub(crate) fn fill(mut file: &File, contents: &[u8]) -> io::Result<()> {
    empty(file)?;
    file.write_all(contents).inspect_err(|_| {
        let _ = empty(file);
    })
}
