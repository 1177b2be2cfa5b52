//! `ratelimit schema`, `ratelimit completions` and `ratelimit man`: what editors, shells and `man` read.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::failure::Failure;

/// The schema of policy documents. `ratelimit-core` reads them; `tests/schema.rs` compares both.
const SCHEMA: &[u8] = include_bytes!("../../ratelimit.schema.json");

pub(super) fn schema() -> Result<u8, Failure> {
    super::print(SCHEMA)
}

pub(super) fn completions(shell: Shell) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ratelimit", &mut script);
    super::print(script)
}

pub(super) fn man(folder: &Path) -> Result<u8, Failure> {
    let written =
        fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.map_err(|error| Failure::writing(folder, &error))?;
    Ok(0)
}
