//! `ratelimit completions` and `ratelimit man`: what shells and `man` read about this tool.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::failure::Failure;

pub(super) fn completions(shell: Shell) -> Result<u8, Failure> {
    let mut command = Cli::command();
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    super::print(&script)?;
    Ok(0)
}

pub(super) fn man(folder: &Path) -> Result<u8, Failure> {
    let written =
        fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.map_err(|error| Failure::writing(folder, &error))?;
    Ok(0)
}
