//! Output files, which are emptied only when there is something to write, and never overwrite an input.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Opens a file for writing and keeps its contents until it is [emptied](empty).
pub(crate) fn open(path: &Path) -> Result<File, Failure> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(path);
    file.map_err(|error| Failure::writing(path, &error))
}

/// Empties a file. Pipes and terminals have no contents to remove.
pub(crate) fn empty(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// The identity of the file at a path, independent of its name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FileId {
    #[cfg(unix)]
    Node {
        device: u64,
        inode: u64,
    },
    Path(PathBuf),
}

impl FileId {
    /// How many symbolic links are followed before they count as a cycle.
    const LINKS: usize = 40;

    /// `None` for what cannot be overwritten, such as a terminal.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        match fs::metadata(path) {
            Ok(file) if !file.is_file() => None,
            #[cfg(unix)]
            Ok(file) => {
                use std::os::unix::fs::MetadataExt;
                Some(Self::Node { device: file.dev(), inode: file.ino() })
            }
            #[cfg(not(unix))]
            Ok(_) => fs::canonicalize(path).ok().map(Self::Path),
            Err(_) => Self::to_be(path),
        }
    }

    /// The identity of a file that does not exist yet.
    fn to_be(path: &Path) -> Option<Self> {
        let mut path = path.to_owned();
        for _ in 0..Self::LINKS {
            let parent = match path.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent,
                _ => Path::new("."),
            };
            let parent = fs::canonicalize(parent).ok()?;
            let place = parent.join(path.file_name()?);
            match fs::read_link(&place) {
                Ok(target) => path = parent.join(target),
                Err(_) => return Some(Self::Path(place)),
            }
        }
        None
    }
}
