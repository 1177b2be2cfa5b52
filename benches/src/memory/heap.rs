//! The heap that keys take, asked of the program `examples/heap.rs`, which counts it.

use std::error::Error;
use std::process::Command;

use serde::Serialize;

use crate::report::Report;
use crate::table::rounded;

use super::growth::key_count;

/// Heap bytes a key at ten million, in the words of its JSON line.
#[derive(Serialize)]
struct PerKey {
    scenario: &'static str,
    ours: f64,
    peer: &'static str,
    peer_bytes: f64,
}

/// Bytes a key at one size on the way.
struct Size {
    keys: f64,
    held: f64,
    /// The most held up to then.
    most: f64,
}

/// Asks how much each limiter holds on the way to so many keys.
fn ask(limiter: &str, keys: usize) -> Result<Vec<Size>, Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let mut command = Command::new(cargo);
    command.args(["run", "--quiet", "--profile", "bench", "--example", "heap"]);
    command.args(["--manifest-path", manifest, "--", limiter]).arg(keys.to_string());
    let output = command.output().map_err(|error| format!("cannot run cargo: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let mut sizes = Vec::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        let numbers: Vec<f64> = line.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [keys, held, most] = numbers[..] else {
            return Err(format!("the program heap wrote {line:?}, and not three numbers").into());
        };
        sizes.push(Size { keys, held: held / keys, most: most / keys });
    }
    Ok(sizes)
}

/// Tells the bytes a key of ours and of governor, at several sizes of a store with room for all.
pub(super) fn run(quick: bool, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let keys = key_count(quick);
    let (ours, windows, governor) =
        (ask("ours", keys)?, ask("windows", keys)?, ask("governor", keys)?);
    println!("\nheap bytes a key (the most on the way)");
    println!("{:>10}   {:<18} {:<18} governor", "keys", "ours", "ours, windows");
    let shown = |size: &Size| format!("{:.1} ({:.1})", size.held, size.most);
    for ((ours, windows), governor) in ours.iter().zip(&windows).zip(&governor) {
        let (all, windows) = (shown(ours), shown(windows));
        println!("{:>10}   {all:<18} {windows:<18} {}", ours.keys, shown(governor));
    }
    let (Some(ours), Some(windows), Some(governor)) =
        (ours.last(), windows.last(), governor.last())
    else {
        return Err("the program heap told nothing".into());
    };
    for (scenario, ours) in [("bytes-per-key-10m", ours), ("bytes-per-key-10m-windows", windows)] {
        report.line(&PerKey {
            scenario,
            ours: rounded(ours.held, 10.0),
            peer: "governor",
            peer_bytes: rounded(governor.held, 10.0),
        })?;
    }
    Ok(())
}
