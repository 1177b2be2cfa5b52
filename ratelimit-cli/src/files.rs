//! Files that are written only once there is something to write, and never over what is to be read.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Opens a file to be written, and leaves what it holds until it is [emptied](empty).
pub(crate) fn open(path: &Path) -> Result<File, Failure> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(path);
    file.map_err(|error| Failure::writing(path, &error))
}

/// Empties a file; a pipe or a terminal holds nothing.
pub(crate) fn empty(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// Which file a path leads to, by whatever name.
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
    /// How many links lead on before somebody made a circle of them.
    const LINKS: usize = 40;

    /// `None` for what nobody can overwrite, such as a terminal.
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

    /// The place of a file that does not exist yet.
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
