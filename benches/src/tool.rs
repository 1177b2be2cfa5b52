//! What the tool takes to replay a large log: CPU time, time and memory, without and with a report,
//! and to suggest limits.
//!
//! The tool is built first. CPU time and memory are read from `/proc`, twenty times a second: on
//! other systems they are 0.

mod log;

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::measure::Fallible;
use crate::report::{BenchReport, Effort, NamedCell, digits};

/// A policy of one limit, which denies some of the requests.
const BUCKET: &str = "[[limit]]\nname = \"burst\"\nkey = [\"ip\"]\nalgorithm = \"gcra\"\nrate = \"1/s\"\nburst = 10\n";
/// The policy that the guide begins with.
const EXAMPLE: &str = include_str!("../../examples/policy.toml");
/// How long the files of a process are left alone.
const LOOK_UP: Duration = Duration::from_millis(50);
/// The parts of a second in which Linux counts CPU time.
const TICKS: f64 = 100.0;

/// What a run of the tool took.
#[derive(Default)]
struct Taken {
    seconds: f64,
    cpu_s: f64,
    peak_kib: u64,
}

/// Measures each command once.
pub(crate) fn run(effort: &Effort) -> Fallible {
    let mut report = BenchReport::new(effort)?;
    let (lines, addresses) = if effort.quick { (300_000, 20_000) } else { (3_000_000, 200_000) };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--profile", "bench", "-p", "ratelimit-cli"])
        .status()?;
    if !built.success() {
        return Err("the tool cannot be built".into());
    }
    let tool = std::env::current_exe()?.with_file_name("ratelimit");
    let folder = tempfile::tempdir()?;
    measure(&mut report, (&tool, folder.path()), (lines, addresses))
}

fn measure(
    report: &mut BenchReport,
    (tool, folder): (&Path, &Path),
    (lines, addresses): (u64, u32),
) -> Fallible {
    log::write(BufWriter::new(File::create(folder.join("log"))?), lines, addresses)?;
    fs::write(folder.join("bucket.toml"), BUCKET)?;
    fs::write(folder.join("example.toml"), EXAMPLE)?;
    println!(
        "{lines} lines of {addresses} addresses: CPU seconds, seconds and MB; over: CPU time over that of the replay."
    );
    for policy in ["bucket", "example"] {
        let mut replay = None;
        for (command, words) in [
            ("replay", &["replay"][..]),
            ("replay --report", &["replay", "--report", "report.html"]),
            ("suggest", &["suggest", "--target", "1%"]),
        ] {
            let mut tool = Command::new(tool);
            tool.current_dir(folder).args(words).args([
                "log",
                "--policy",
                &format!("{policy}.toml"),
            ]);
            let taken = take(tool.stdout(Stdio::null()).spawn()?)?;
            let over = taken.cpu_s / *replay.get_or_insert(taken.cpu_s);
            let row: [NamedCell; 6] = [
                ("policy", policy.into()),
                ("command", command.into()),
                ("cpu_s", digits(1, taken.cpu_s)),
                ("seconds", digits(1, taken.seconds)),
                ("mb", (taken.peak_kib / 1_000).into()),
                ("over", digits(2, over)),
            ];
            report.row(&row)?;
        }
    }
    Ok(())
}

/// Waits for a process.
fn take(mut child: Child) -> Fallible<Taken> {
    let (begin, mut taken) = (Instant::now(), Taken::default());
    let status = loop {
        look(child.id(), &mut taken);
        match child.try_wait()? {
            Some(status) => break status,
            None => thread::sleep(LOOK_UP),
        }
    };
    taken.seconds = begin.elapsed().as_secs_f64();
    if status.success() { Ok(taken) } else { Err(format!("the tool failed: {status}").into()) }
}

/// Reads what a process has taken so far, if it is still there.
fn look(process: u32, taken: &mut Taken) {
    let read =
        |name: &str| fs::read_to_string(format!("/proc/{process}/{name}")).unwrap_or_default();
    let stat = read("stat");
    // Behind the name, which may contain blanks, the fields begin with the third.
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3).and_then(|ticks| ticks.parse::<f64>().ok());
    if let (Some(user), Some(system)) = (ticks(14), ticks(15)) {
        taken.cpu_s = (user + system) / TICKS;
    }
    let peak = read("status")
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
    taken.peak_kib = peak.unwrap_or(0).max(taken.peak_kib);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_taken_memory() -> Fallible {
        let taken = take(Command::new("sleep").arg("0.1").spawn()?)?;
        assert!(taken.peak_kib > 0 || cfg!(not(target_os = "linux")));
        Ok(())
    }
}
