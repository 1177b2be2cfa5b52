//! [`Outputs`]: the files of a replay, which are emptied only when there is something to write, and overwrite no input.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::args::ReplayArgs;
use crate::failure::Failure;
use crate::replay::Decisions;

/// The size of the output buffer.
const BUFFER_BYTES: usize = 64 * 1024;

/// The opened outputs. They are opened after the input and the store, so that a mistyped input or store leaves
/// the outputs of an earlier replay alone. They are opened before the replay, so that an unwritable output does
/// not fail after an hour.
pub(crate) struct Outputs {
    pub(crate) decisions: Option<Decisions>,
    pub(crate) report: Option<File>,
}

impl Outputs {
    pub(crate) fn open(args: &ReplayArgs) -> Result<Self, Failure> {
        let to_file = args.decisions.as_deref().filter(|path| !is_dash(path));
        // Opening keeps the contents.
        let report = args.report.as_deref().map(open).transpose()?;
        let decisions = to_file.map(open).transpose()?;
        let read = args.log.inputs.iter().chain([&args.log.policy]).chain(&args.compare);
        let read = read.map(|path| if is_dash(path) { Path::new("/dev/stdin") } else { path });
        let mut taken: Vec<_> = read.filter_map(identity).collect();
        let report_path = args.report.as_deref();
        for (option, path) in [("--decisions", to_file), ("--report", report_path)] {
            let Some((path, id)) = path.and_then(|path| Some((path, identity(path)?))) else {
                continue;
            };
            if taken.contains(&id) {
                return Err(Failure::input(format!(
                    "{option} {} would overwrite what is to be read or written; name another file",
                    path.display()
                )));
            }
            taken.push(id);
        }
        let decisions = match (decisions, args.decisions.as_deref()) {
            (Some(file), Some(path)) => {
                empty(&file).map_err(|error| Failure::writing(path, &error))?;
                Some(Decisions::new(path, Box::new(file)))
            }
            (None, Some(_)) => {
                Some(Decisions::new(Path::new("standard output"), Box::new(io::stdout())))
            }
            (_, None) => None,
        };
        Ok(Self { decisions, report })
    }
}

impl Decisions {
    fn new(name: &Path, out: Box<dyn Write>) -> Self {
        Self { name: name.to_owned(), out: BufWriter::with_capacity(BUFFER_BYTES, out) }
    }
}

/// Whether a path stands for standard input or output.
pub(crate) fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn open(path: &Path) -> Result<File, Failure> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    file.map_err(|error| Failure::writing(path, &error))
}

/// Empties a file. Pipes and terminals have no contents to remove.
pub(crate) fn empty(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// What identifies a file by whatever name; `None` for what cannot be overwritten, such as a terminal.
fn identity(path: &Path) -> Option<impl PartialEq + use<>> {
    let file = fs::metadata(path).ok().filter(Metadata::is_file)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        Some((file.dev(), file.ino()))
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        fs::canonicalize(path).ok()
    }
}
