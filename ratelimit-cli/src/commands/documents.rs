//! `ratelimit schema`, `ratelimit completions` and `ratelimit man`: what editors, shells and `man`
//! read.

use std::fs;
use std::io;
use std::path::Path;

use clap::builder::Resettable;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};
use ratelimit_replay::failure::Failure;

use crate::args::Cli;

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
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let written = fs::create_dir_all(folder).and_then(|()| man_pages(&command, folder));
    written.map(|()| 0).map_err(|error| Failure::writing(folder, &error))
}

/// The pages of a command and of those within it.
fn man_pages(command: &Command, folder: &Path) -> io::Result<()> {
    command.get_subcommands().try_for_each(|within| man_pages(within, folder))?;
    man_page(command.clone(), folder)
}

fn man_page(mut command: Command, folder: &Path) -> io::Result<()> {
    let usage = command.render_usage().to_string();
    let help = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string);
    let command = command.override_usage(usage.trim_start_matches("Usage: ").to_owned());
    let command = command.after_help(Resettable::Reset).after_long_help(Resettable::Reset);
    let man = Man::new(command);
    let mut page = Vec::new();
    man.render(&mut page)?;
    if let Some(help) = help {
        // As it is: `man` would fill its lines and hyphenate its JSON.
        let mut section = Roff::new();
        section.control("SH", ["EXAMPLES AND FORMATS"]).control("nf", []).text([roman(help)]);
        section.control("fi", []).to_writer(&mut page)?;
    }
    fs::write(folder.join(man.get_filename()), page)
}
