//! One file per command.

use std::future::Future;
use std::io::{self, Write};

use crate::args::Command;
use crate::failure::Failure;

mod bench;
mod check;
mod documents;
mod heal;
mod inspect;
mod lint;
mod replay;
mod reset;
mod suggest;
mod top;

/// Runs a command and returns its exit code.
pub(crate) fn run(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Replay(args) => replay::run(args),
        Command::Check(args) => check::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Reset(args) => reset::run(args),
        Command::Lint(args) => lint::run(args),
        Command::Suggest(args) => suggest::run(args),
        Command::Top(args) => top::run(args),
        Command::Heal(args) => heal::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Schema => documents::schema(),
        Command::Completions { shell } => documents::completions(*shell),
        Command::Man { folder } => documents::man(folder),
    }
}

/// Runs a future that asks a store. A single thread is enough: only the benchmark asks concurrently, and it
/// states that it uses one thread.
fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Store(format!("no runtime: {error}")))?
        .block_on(future)
}

/// Writes to standard output, which may be closed.
fn print(text: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map_err(|error| Failure::stdout(&error))
}
