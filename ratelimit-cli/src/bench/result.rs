//! The results of a benchmark: a row per run, as a table for people and as JSON lines for programs.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::{CpuTime, Ran};
use crate::summary::{align, plain_table, push_table};
use crate::text::count;

/// What all runs have in common.
#[derive(Debug, Serialize)]
pub(crate) struct Context {
    pub(crate) store: String,
    /// `None` in memory.
    pub(crate) mode: Option<&'static str>,
    /// The limits in the words of a policy document.
    pub(crate) limits: Vec<String>,
}

/// One run, with the field names of its JSON line.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) tasks: u32,
    pub(crate) keys: u32,
    pub(crate) seconds: f64,
    pub(crate) decisions: u64,
    pub(crate) admitted: u64,
    pub(crate) denied: u64,
    pub(crate) contended: u64,
    pub(crate) unanswered: u64,
    pub(crate) decisions_per_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
    /// The servers' processor time per decision; `null` if a server does not report it.
    pub(crate) server_cpu_us: Option<f64>,
    pub(crate) server_main_thread_us: Option<f64>,
    /// Whether the run completed.
    pub(crate) complete: bool,
}

impl Row {
    pub(crate) fn new(
        tasks: u32,
        keys: u32,
        ran: &Ran,
        cpu: Option<CpuTime>,
        complete: bool,
    ) -> Self {
        let decisions = ran.counts.decisions();
        let at = |quantile| micros(Duration::from_nanos(ran.histogram.value_at_quantile(quantile)));
        let each = |time: Duration| {
            let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).checked_div(decisions)?;
            Some(micros(Duration::from_nanos(ns)))
        };
        Self {
            tasks,
            keys,
            seconds: ran.elapsed.as_secs_f64(),
            decisions,
            admitted: ran.counts.admitted,
            denied: ran.counts.denied,
            contended: ran.counts.contended,
            unanswered: ran.counts.unanswered,
            decisions_per_second: per_second(decisions, ran.elapsed),
            p50_us: at(0.5),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: at(1.0),
            server_cpu_us: cpu.and_then(|cpu| each(cpu.process)),
            server_main_thread_us: cpu.and_then(|cpu| each(cpu.main_thread?)),
            complete,
        }
    }

    /// The run as one line of JSON.
    pub(crate) fn to_json(&self, context: &Context) -> Result<String, serde_json::Error> {
        #[derive(Serialize)]
        struct Line<'l> {
            #[serde(flatten)]
            context: &'l Context,
            #[serde(flatten)]
            row: &'l Row,
        }
        let mut line = serde_json::to_string(&Line { context, row: self })?;
        line.push('\n');
        Ok(line)
    }
}

fn per_second(decisions: u64, elapsed: Duration) -> f64 {
    let us = elapsed.as_micros().max(1);
    let tenths = u128::from(decisions) * 10_000_000 / us;
    f64::from(u32::try_from(tenths).unwrap_or(u32::MAX)) / 10.0
}

/// Microseconds, to a hundredth.
fn micros(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e8).round() / 100.0
}

/// The table, followed by the notes.
pub(crate) fn to_text(context: &Context, rows: &[Row], notes: &[String]) -> String {
    let mut text = String::new();
    let mode = context.mode.map_or(String::new(), |mode| format!(", mode {mode}"));
    // Writing into memory cannot fail.
    let _ = writeln!(text, "{}{mode}: {}\n", context.store, context.limits.join("; "));
    if !rows.is_empty() {
        let mut columns = vec![
            "tasks",
            "keys",
            "decisions",
            "denied",
            "per second",
            "p50 µs",
            "p99 µs",
            "p99.9 µs",
            "max µs",
        ];
        let fails = rows.iter().any(|row| row.contended + row.unanswered > 0);
        if fails {
            columns.extend(["contended", "unanswered"]);
        }
        let has_cpu = rows.iter().any(|row| row.server_cpu_us.is_some());
        if has_cpu {
            columns.extend(["server µs", "main thread µs"]);
        }
        let mut table = plain_table();
        table.set_header(&columns);
        for row in rows {
            let us = |us: f64| format!("{us:.1}");
            let maybe =
                |us: Option<f64>| us.map_or_else(|| "–".to_owned(), |us| format!("{us:.2}"));
            let mut cells = vec![
                count(row.tasks.into()),
                count(row.keys.into()),
                count(row.decisions),
                count(row.denied),
                format!("{:.0}", row.decisions_per_second),
                us(row.p50_us),
                us(row.p99_us),
                us(row.p999_us),
                us(row.max_us),
            ];
            if fails {
                cells.extend([count(row.contended), count(row.unanswered)]);
            }
            if has_cpu {
                cells.extend([maybe(row.server_cpu_us), maybe(row.server_main_thread_us)]);
            }
            table.add_row(cells);
        }
        align(&mut table, &vec![true; columns.len()]);
        push_table(&mut text, &table);
    }
    for note in notes {
        let _ = writeln!(text, "\nnote: {note}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::Counts;
    use super::*;
    use hdrhistogram::Histogram;

    fn ran() -> Ran {
        let mut histogram = Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("bounds");
        for ns in [1_000, 2_000, 3_000, 4_000] {
            histogram.record(ns).expect("within the bounds");
        }
        let counts = Counts { admitted: 3, denied: 1, contended: 0, unanswered: 0 };
        Ran { counts, elapsed: Duration::from_millis(2), histogram, failure: None }
    }

    fn context() -> Context {
        Context {
            store: "redis://h:1".into(),
            mode: Some("lua"),
            limits: vec!["gcra 1/s burst 1".into()],
        }
    }

    #[test]
    fn a_row_reports_counts_per_decision_and_per_second() {
        let cpu = CpuTime { process: Duration::from_micros(40), main_thread: None };
        let row = Row::new(2, 3, &ran(), Some(cpu), true);
        let line = row.to_json(&context()).expect("JSON");
        let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(value["decisions"], 4);
        assert_eq!(value["decisions_per_second"], 2_000.0);
        assert_eq!(value["p50_us"], 2.0);
        assert_eq!(value["server_cpu_us"], 10.0);
        assert!(value["server_main_thread_us"].is_null());
        assert_eq!(value["mode"], "lua");
        assert!(line.ends_with("}\n"), "{line}");
    }

    #[test]
    fn the_table_omits_columns_without_values() {
        let row = Row::new(2, 3, &ran(), None, true);
        let text = to_text(&context(), &[row], &["a note".into()]);
        assert!(text.starts_with("redis://h:1, mode lua: gcra 1/s burst 1\n"), "{text}");
        assert!(!text.contains("server") && !text.contains("contended"), "{text}");
        assert!(text.ends_with("\nnote: a note\n"), "{text}");
        let mut failed = ran();
        failed.counts.contended = 5;
        let row = Row::new(2, 3, &failed, Some(CpuTime::default()), true);
        let text = to_text(&context(), &[row], &[]);
        assert!(text.contains("contended") && text.contains("server µs"), "{text}");
    }
}
