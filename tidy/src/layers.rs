//! Rules about the modules of a crate: each uses only those that stand before it.

use crate::{File, words};

/// The modules of a crate, in order. A folder's files stand where its module does, unless the folder, with a slash, has a
/// place of its own.
pub(crate) struct Layers {
    /// The folder of the crate's sources.
    pub(crate) root: &'static str,
    pub(crate) order: &'static [&'static str],
}

impl Layers {
    /// The place of a file or a module, by its path below the root.
    fn place(&self, path: &str) -> Option<usize> {
        let name = path.strip_suffix(".rs").unwrap_or(path);
        let place = |name: &str| self.order.iter().position(|layer| *layer == name);
        match name.split_once('/') {
            Some((folder, _)) => place(&format!("{folder}/")).or_else(|| place(folder)),
            None => place(name),
        }
    }

    /// Uses of a module that stands after the one that uses it.
    pub(crate) fn upward(&self, file: &File) -> Vec<String> {
        let path = &file.path;
        let Some(own) = self.place(path.trim_start_matches(self.root).trim_start_matches('/'))
        else {
            return vec![format!("{path}: give its module a place among the LAYERS of this test")];
        };
        let mut found = Vec::new();
        for (number, line) in file.code() {
            for used in line.split("crate::").skip(1).filter_map(|rest| words(rest).next()) {
                if self.place(used).is_none_or(|used| used > own) {
                    found.push(format!(
                        "{path}:{number}: `{used}` is no layer before its own: turn the arrow round"
                    ));
                }
            }
        }
        found
    }
}
