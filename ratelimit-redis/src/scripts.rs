//! [`Scripts`]: the scripts of a store, made once each.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::flat::{self, Role, Shape};
use crate::program::{BUILT_IN, Program};
use crate::script::Script;

/// The scripts made so far, one per set of algorithms that a batch has mixed. Their number is bounded,
/// because a server keeps every text that it has seen.
#[derive(Debug)]
pub(crate) struct Scripts(Mutex<Known>);

#[derive(Debug)]
struct Known {
    /// No two have the same name: scripts and stored states distinguish programs by it.
    programs: Vec<&'static Program>,
    /// The driver's scripts, by the names of the algorithms in them.
    drivers: BTreeMap<Vec<&'static str>, Arc<Script>>,
    /// Flat scripts, by their form and their checks.
    flat: BTreeMap<(Form, Kind), Arc<Script>>,
    /// Scripts of flights, and the kinds of requests that each decides.
    merged: Vec<(Vec<Kind>, Arc<Script>)>,
}

/// The most flat scripts of a store. A server keeps every text that it has seen, and untrusted clients
/// may decide which checks of a batch cost nothing or share an identifier.
const MOST_FLAT: usize = 256;

/// What a flat script decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Form {
    /// One request, at the server's time.
    Now,
    /// One request, at a given time.
    At,
}

/// A check of a flat script: the algorithm, how it takes part, and the index of its key.
type Participant = (&'static str, Role, usize);

/// A script of flights, and the numbers in it of the kinds that were asked for.
type Numbered = (Arc<Script>, Vec<usize>);

/// The checks of a request.
type Kind = Vec<Participant>;

/// A script of one store, or one that all stores share.
pub(crate) enum Found {
    Shared(&'static Script),
    Own(Arc<Script>),
}

impl std::ops::Deref for Found {
    type Target = Script;

    fn deref(&self) -> &Script {
        match self {
            Self::Shared(script) => script,
            Self::Own(script) => script,
        }
    }
}

impl Default for Scripts {
    fn default() -> Self {
        let programs = BUILT_IN.to_vec();
        Self(Mutex::new(Known {
            programs,
            drivers: BTreeMap::new(),
            flat: BTreeMap::new(),
            merged: Vec::new(),
        }))
    }
}

impl Scripts {
    /// The driver's script for these algorithms.
    ///
    /// # Errors
    /// A program whose name belongs to another one.
    pub(crate) fn driver(
        &self,
        mut programs: Vec<&'static Program>,
    ) -> Result<Arc<Script>, &'static Program> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for program in &programs {
            known.register(program)?;
        }
        programs.sort_unstable_by_key(|program| program.name);
        programs.dedup_by_key(|program| program.name);
        let names: Vec<_> = programs.iter().map(|program| program.name).collect();
        let script = known.drivers.entry(names).or_insert_with(|| Arc::new(driver(&programs)));
        Ok(Arc::clone(script))
    }

    /// The flat script that acquires checks of these shapes; `None` if the store already has too many
    /// others.
    ///
    /// # Errors
    /// A program whose name belongs to another one.
    pub(crate) fn acquiring(
        &self,
        shapes: &[Shape],
        given_time: bool,
    ) -> Result<Option<Found>, &'static Program> {
        if let [Shape { program, role: Role::Charge, .. }] = shapes
            && !given_time
            && program.is_built_in()
        {
            let script = program.acquires_one.get_or_init(|| flat::acquire(shapes, given_time));
            return Ok(Some(Found::Shared(script)));
        }
        let form = if given_time { Form::At } else { Form::Now };
        let script = self.flat(form, shapes, || flat::acquire(shapes, given_time))?;
        Ok(script.map(Found::Own))
    }

    /// A script that acquires any number of groups of these kinds, and the number that each has in it; `None` if the store
    /// already has too many others.
    ///
    /// # Errors
    /// A program whose name belongs to another one.
    pub(crate) fn merging(
        &self,
        kinds: &[Vec<Shape>],
    ) -> Result<Option<Numbered>, &'static Program> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for shape in kinds.iter().flatten() {
            known.register(shape.program)?;
        }
        let asked: Vec<Kind> = kinds.iter().map(|shapes| kind(shapes)).collect();
        let numbers = |all: &[Kind]| -> Option<Vec<usize>> {
            let number = |kind| all.iter().position(|known| known == kind);
            asked.iter().map(|kind| number(kind).map(|place| place + 1)).collect()
        };
        // The newest knows most.
        for (all, script) in known.merged.iter().rev() {
            if let Some(numbers) = numbers(all) {
                return Ok(Some((Arc::clone(script), numbers)));
            }
        }
        if known.flat.len() + known.merged.len() >= MOST_FLAT {
            return Ok(None);
        }
        // It also decides what the newest does, so that the number of texts grows with that of kinds, and not of their sets.
        let mut all = known.merged.last().map(|(all, _)| all.clone()).unwrap_or_default();
        let of_user = |kind: &Kind| known.shapes(kind).iter().any(|s| !s.program.is_built_in());
        if asked.iter().chain(&all).any(of_user) || all.len() + asked.len() > flat::MOST_KINDS {
            all.clear();
        }
        for kind in &asked {
            if !all.contains(kind) {
                all.push(kind.clone());
            }
        }
        let shapes: Vec<Vec<Shape>> = all.iter().map(|kind| known.shapes(kind)).collect();
        let script = Arc::new(flat::merged(shapes.iter().map(Vec::as_slice)));
        let found = numbers(&all).map(|numbers| (Arc::clone(&script), numbers));
        known.merged.push((all, script));
        Ok(found)
    }

    fn flat(
        &self,
        form: Form,
        shapes: &[Shape],
        make: impl FnOnce() -> Script,
    ) -> Result<Option<Arc<Script>>, &'static Program> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for shape in shapes {
            known.register(shape.program)?;
        }
        let shape = (form, kind(shapes));
        let count = known.flat.len() + known.merged.len();
        if count >= MOST_FLAT && !known.flat.contains_key(&shape) {
            return Ok(None);
        }
        let script = known.flat.entry(shape).or_insert_with(|| Arc::new(make()));
        Ok(Some(Arc::clone(script)))
    }

    /// The script that returns states and writes nothing.
    ///
    /// # Errors
    /// A program whose name belongs to another one.
    pub(crate) fn reading(&self, shapes: &[Shape]) -> Result<Found, &'static Program> {
        static READING: OnceLock<Script> = OnceLock::new();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for shape in shapes {
            known.register(shape.program)?;
        }
        Ok(Found::Shared(READING.get_or_init(|| Script::from_text(flat::READ))))
    }
}

fn kind(shapes: &[Shape]) -> Kind {
    shapes.iter().map(|shape| (shape.program.name, shape.role, shape.key)).collect()
}

impl Known {
    /// The shapes of a kind, whose programs are registered.
    fn shapes(&self, kind: &[Participant]) -> Vec<Shape> {
        let shape = |(name, role, key): &Participant| {
            let program = self.programs.iter().find(|program| program.name == *name)?;
            Some(Shape { program, role: *role, key: *key })
        };
        kind.iter().filter_map(shape).collect()
    }

    /// Checks that no other program has this name, and that the name is allowed in scripts.
    fn register(&mut self, program: &'static Program) -> Result<(), &'static Program> {
        if !program.has_plain_name() {
            return Err(program);
        }
        match self.programs.iter().find(|known| known.name == program.name) {
            Some(known) if known.is(program) => Ok(()),
            Some(_) => Err(program),
            None => {
                self.programs.push(program);
                Ok(())
            }
        }
    }
}

/// The driver's script for these programs.
fn driver(programs: &[&'static Program]) -> Script {
    let mut text = String::from(include_str!("lua/prelude.lua"));
    for program in programs {
        // Writing to a string cannot fail.
        let _ = write!(text, "\nalgorithms['{}'] = {}\n", program.name, program.chunk());
    }
    for part in [
        include_str!("lua/checks.lua"),
        include_str!("lua/cross_slot.lua"),
        include_str!("lua/driver.lua"),
    ] {
        text.push_str(part);
    }
    Script::from_text(&text)
}
