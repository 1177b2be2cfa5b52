//! [`Scripts`]: the scripts of a store, made once each.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use crate::flat::{self, Shape};
use crate::program::{BUILT_IN, Program};
use crate::script::Script;

/// The scripts made so far. Their number is bounded, because a server keeps every text that it has seen.
#[derive(Debug, Default)]
pub(crate) struct Scripts(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Those of users. No two programs have the same name: scripts and stored states distinguish programs by it.
    programs: Vec<&'static Program>,
    /// The driver's scripts, by the names of the algorithms in them: at the server's time, and at a given one.
    drivers: [BTreeMap<Vec<&'static str>, Arc<Script>>; 2],
    /// At the server's time, and at a given one.
    deciding: [Deciding; 2],
    /// The kinds of the newest script.
    newest: [Vec<Vec<Shape>>; 2],
    /// How many scripts there are that decide.
    texts: usize,
}

/// The most texts of a store that decide. Untrusted clients may choose which checks of a batch cost nothing or share an
/// identifier.
const MOST_TEXTS: usize = 256;

/// The newest script that decides a kind of requests, and the kind's number in it.
type Deciding = HashMap<Vec<Shape>, (Arc<Script>, usize)>;

/// A script, and the numbers in it of the kinds that were asked for.
type Numbered = (Arc<Script>, Vec<usize>);

impl Scripts {
    /// The driver's script for these algorithms.
    ///
    /// # Errors
    /// A program whose name belongs to another one.
    pub(crate) fn driver(
        &self,
        mut programs: Vec<&'static Program>,
        given_time: bool,
    ) -> Result<Arc<Script>, &'static Program> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for program in &programs {
            known.register(program)?;
        }
        programs.sort_unstable_by_key(|program| program.name);
        programs.dedup_by_key(|program| program.name);
        let names: Vec<_> = programs.iter().map(|program| program.name).collect();
        let drivers = &mut known.drivers[usize::from(given_time)];
        let script =
            drivers.entry(names).or_insert_with(|| Arc::new(driver(&programs, given_time)));
        Ok(Arc::clone(script))
    }

    /// A script that decides any number of requests of these kinds, and the number that each has in it; `None` if the store
    /// already has too many others.
    ///
    /// # Errors
    /// A program whose name belongs to another one.
    pub(crate) fn deciding(
        &self,
        kinds: &[&[Shape]],
        given_time: bool,
    ) -> Result<Option<Numbered>, &'static Program> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for shape in kinds.iter().copied().flatten() {
            known.register(shape.program)?;
        }
        let form = usize::from(given_time);
        let found = known.found(kinds, form);
        if found.is_some() || known.texts >= MOST_TEXTS {
            return Ok(found);
        }
        // It also decides what the newest does, so that the number of texts grows with that of kinds, and not of their sets.
        // Programs of users share no text: their Lua may fail.
        let of_user = kinds.iter().copied().flatten().any(|shape| !shape.program.is_built_in());
        let newest = &known.newest[form];
        let is_new = of_user || newest.len() + kinds.len() > flat::MOST_KINDS;
        let mut all = if is_new { Vec::new() } else { newest.clone() };
        for shapes in kinds {
            if !all.iter().any(|known| known == shapes) {
                all.push(shapes.to_vec());
            }
        }
        let script = Arc::new(flat::deciding(&all, given_time));
        known.texts += 1;
        for (number, shapes) in (1..).zip(&all) {
            known.deciding[form].insert(shapes.clone(), (Arc::clone(&script), number));
        }
        if !of_user {
            known.newest[form] = all;
        }
        Ok(known.found(kinds, form))
    }

    /// Checks that the names of these programs belong to no others.
    ///
    /// # Errors
    /// A program whose name does.
    pub(crate) fn register(
        &self,
        mut programs: impl Iterator<Item = &'static Program>,
    ) -> Result<(), &'static Program> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        programs.try_for_each(|program| known.register(program))
    }
}

impl Known {
    /// The script that decides all of these kinds, if one does, with their numbers.
    fn found(&self, kinds: &[&[Shape]], form: usize) -> Option<Numbered> {
        let (script, _) = self.deciding[form].get(*kinds.first()?)?;
        let number = |kind: &&[Shape]| {
            let (its, number) = self.deciding[form].get(*kind)?;
            Arc::ptr_eq(its, script).then_some(*number)
        };
        let numbers = kinds.iter().map(number).collect::<Option<_>>()?;
        Some((Arc::clone(script), numbers))
    }

    /// Checks that no other program has this name, and that the name is allowed in scripts.
    fn register(&mut self, program: &'static Program) -> Result<(), &'static Program> {
        if !program.has_plain_name() {
            return Err(program);
        }
        match BUILT_IN.iter().chain(&self.programs).find(|known| known.name == program.name) {
            Some(known) if *known == program => Ok(()),
            Some(_) => Err(program),
            None => {
                self.programs.push(program);
                Ok(())
            }
        }
    }
}

/// The driver's script for these programs.
fn driver(programs: &[&'static Program], given_time: bool) -> Script {
    let mut text = flat::begin(given_time);
    // Writing to a string cannot fail.
    let _ =
        writeln!(text, "local function sweep(key, fields, life_ms, ttl_ms)\n{}end", flat::SWEEP);
    text.push_str(include_str!("lua/prelude.lua"));
    for program in programs {
        let _ = write!(text, "\nalgorithms['{}'] = {}\n", program.name, program.chunk());
    }
    text.push_str(include_str!("lua/driver.lua"));
    Script::from_text(&text)
}
