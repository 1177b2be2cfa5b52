//! The scripts of a store: the same ones in every process, whatever its limits are.
//!
//! A server keeps every text that it has seen. So one text decides all that is decided by a few
//! numbers (`decide.lua`), one all else (`driver.lua`), and both know all built-in algorithms.
//! Programs of users make two texts more for each set of them that a request has: their Lua may
//! fail, and then it fails for themselves only.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use smallvec::SmallVec;

use crate::program::{BUILT_IN, Program, Twin, TwinCheck};
use crate::script::{LETTERS, Premises, Script};

/// Returns states, and writes nothing.
pub(crate) static READ: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("lua/read.lua"), &[], Premises::None));

/// Puts a record in the place of another.
pub(crate) static RECORD: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("lua/record.lua"), &[], Premises::None));

static OF_BUILT_IN: LazyLock<Arc<Texts>> = LazyLock::new(|| Arc::new(Texts::new(Vec::new())));

/// The scripts of a store.
#[derive(Debug, Default)]
pub(crate) struct Scripts(Mutex<OfUsers>);

#[derive(Debug, Default)]
struct OfUsers {
    /// No two programs have the same name: scripts and stored states distinguish programs by it.
    programs: Vec<&'static Program>,
    /// By the names of the users' programs in them.
    texts: HashMap<Vec<&'static str>, Arc<Texts>>,
}

/// The scripts for limits of some programs.
#[derive(Debug)]
pub(crate) struct Texts {
    /// Decides limits whose states are a few numbers.
    decide: Script,
    /// Decides all others, and does everything else.
    driver: Script,
    /// The same of requests that assume something about records.
    decide_by_records: LazyScript,
    driver_by_records: LazyScript,
    /// The programs of `decide`, in the order of their letters.
    lettered: Vec<&'static Program>,
    /// The programs of `driver`, in the order of their numbers.
    numbered: Vec<&'static Program>,
}

/// A script that is made when it is needed.
type LazyScript = LazyLock<Script, Box<dyn FnOnce() -> Script + Send>>;

impl Texts {
    fn new(users: Vec<&'static Program>) -> Self {
        let all: Vec<_> = BUILT_IN.into_iter().chain(users).collect();
        let of_numbers = all.iter().copied().filter(|program| program.is_of_numbers());
        let lettered: Vec<_> = of_numbers.take(LETTERS.len()).collect();
        let [decide, driver] = [include_str!("lua/decide.lua"), include_str!("lua/driver.lua")];
        let later = |template, programs: &[&'static Program]| {
            let programs = programs.to_vec();
            let make = move || Script::new(template, &programs, Premises::First);
            LazyLock::new(Box::new(make) as Box<dyn FnOnce() -> Script + Send>)
        };
        Self {
            decide: Script::new(decide, &lettered, Premises::None),
            driver: Script::new(driver, &all, Premises::None),
            decide_by_records: later(decide, &lettered),
            driver_by_records: later(driver, &all),
            lettered,
            numbered: all,
        }
    }

    /// The script that decides, with or without premises.
    pub(crate) fn decide(&self, by_records: bool) -> &Script {
        if by_records { &self.decide_by_records } else { &self.decide }
    }

    /// The driver, with or without premises.
    pub(crate) fn driver(&self, by_records: bool) -> &Script {
        if by_records { &self.driver_by_records } else { &self.driver }
    }

    /// The letters of these checks' programs: capital ones for those that charge denied requests
    /// too. `None` if `decide` does not know them all.
    pub(crate) fn shape(&self, checks: &[TwinCheck<'_>]) -> Option<Shape> {
        let letter_of = |Twin { program, attempts, .. }: &Twin| {
            let place = self.lettered.iter().position(|known| known.name == program.name)?;
            let letter = LETTERS.get(place)?;
            Some(if *attempts { letter.to_ascii_uppercase() } else { *letter })
        };
        checks.iter().map(|check| letter_of(&check.twin)).collect()
    }

    /// What `driver` reads of these checks first: their programs, keys and reservations' keys.
    /// `None` if a number does not fit.
    pub(crate) fn layout(&self, checks: &[TwinCheck<'_>]) -> Option<Vec<u8>> {
        let mut layout = Vec::with_capacity(6 * checks.len());
        for TwinCheck { twin, key, reservation, exempt, .. } in checks {
            let place = self.numbered.iter().position(|known| known.name == twin.program.name)?;
            let kind = 4 * place + 2 * usize::from(*exempt) + usize::from(twin.attempts);
            for number in [kind, *key, *reservation] {
                layout.extend(u16::try_from(number).ok()?.to_be_bytes());
            }
        }
        Some(layout)
    }
}

/// The algorithms of a request's checks, as `decide.lua` reads them.
pub(crate) type Shape = SmallVec<[u8; 16]>;

impl Scripts {
    /// The scripts that know these programs.
    ///
    /// # Errors
    /// A program whose name belongs to another one, or that cannot stand in a script.
    pub(crate) fn of(
        &self,
        programs: impl Iterator<Item = &'static Program> + Clone,
    ) -> Result<Arc<Texts>, &'static Program> {
        if programs.clone().all(Program::is_built_in) {
            return Ok(Arc::clone(&OF_BUILT_IN));
        }
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut users = Vec::new();
        for program in programs {
            known.register(program)?;
            if !BUILT_IN.iter().any(|built_in| built_in.name == program.name) {
                users.push(program);
            }
        }
        users.sort_unstable_by_key(|program| program.name);
        users.dedup_by_key(|program| program.name);
        if users.is_empty() {
            return Ok(Arc::clone(&OF_BUILT_IN));
        }
        let names = users.iter().map(|program| program.name).collect();
        let texts = known.texts.entry(names).or_insert_with(|| Arc::new(Texts::new(users)));
        Ok(Arc::clone(texts))
    }
}

impl OfUsers {
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
