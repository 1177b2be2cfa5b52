//! The scripts: one for each set of algorithms that a batch mixes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use crate::program::{BUILT_IN, Program};

/// A script: the prelude, the algorithms of a batch, and the driver.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) sha: String,
}

/// The scripts made so far: one for every set of algorithms that a batch has mixed, and no more than
/// that, because a server keeps every text it has seen.
#[derive(Debug)]
pub(crate) struct Scripts(Mutex<Known>);

#[derive(Debug)]
struct Known {
    /// Each the only one of its name: scripts and what they store tell programs apart by it.
    programs: Vec<&'static Program>,
    scripts: BTreeMap<Vec<&'static str>, Arc<Script>>,
}

impl Default for Scripts {
    fn default() -> Self {
        let programs = BUILT_IN.to_vec();
        Self(Mutex::new(Known { programs, scripts: BTreeMap::new() }))
    }
}

impl Scripts {
    /// The script for these algorithms.
    ///
    /// # Errors
    /// A program that is called as another one is.
    pub(crate) fn of(
        &self,
        mut programs: Vec<&'static Program>,
    ) -> Result<Arc<Script>, &'static Program> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Known { programs: all, scripts } = &mut *known;
        for program in &programs {
            match all.iter().find(|known| known.name == program.name) {
                // Their places first: whole texts would be compared at every call.
                Some(known) if std::ptr::eq(*known, *program) || known == program => {}
                Some(_) => return Err(program),
                None => all.push(program),
            }
        }
        programs.sort_unstable_by_key(|program| program.name);
        programs.dedup_by_key(|program| program.name);
        let names: Vec<_> = programs.iter().map(|program| program.name).collect();
        let script = scripts.entry(names).or_insert_with(|| Arc::new(Script::new(&programs)));
        Ok(Arc::clone(script))
    }
}

impl Script {
    fn new(programs: &[&'static Program]) -> Self {
        let mut text = String::from(include_str!("lua/prelude.lua"));
        for Program { name, source, .. } in programs {
            // Writing to a string cannot fail.
            let _ = write!(text, "\nalgorithms['{name}'] = (function()\n{source}end)()\n");
        }
        text.push_str(include_str!("lua/driver.lua"));
        Self::from_text(&text)
    }

    /// The script of this text, which is kept without its comments.
    pub(crate) fn from_text(text: &str) -> Self {
        let text = without_comments(text);
        let sha = sha1_smol::Sha1::from(&text).digest().to_string();
        Self { text, sha }
    }
}

/// The text without comments, blank lines and indentation: less for a server to keep.
fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| match line.find("-- ") {
        Some(comment) => line[..comment].trim(),
        None => line.trim(),
    });
    let mut kept = String::with_capacity(text.len());
    for line in lines.filter(|line| !line.is_empty() && *line != "--") {
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}
