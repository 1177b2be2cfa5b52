//! Requests in a pattern, under algorithms with the same numbers.

use std::error::Error;

use guide::Scene;
use serde::Deserialize;

/// When requests come, in milliseconds.
const BEGIN_MS: u32 = 6_000;
const END_MS: u32 = 24_000;
/// The length of a window, as the drawing marks it.
const WINDOW_MS: u32 = 10_000;
/// Between two requests of a burst.
const APART_MS: u32 = 100;
/// Between two bursts.
const PAUSE_MS: u32 = 6_000;

/// What the sliders and boxes say.
#[derive(Debug, Deserialize)]
pub(crate) struct Settings {
    /// Requests per 10 s.
    rate: u32,
    burst: u32,
    pattern: Pattern,
    /// What random times begin from.
    seed: u64,
    /// The names of the algorithms to draw.
    algorithms: Vec<String>,
    /// The times of the user's own requests, in milliseconds.
    added_ms: Vec<u32>,
    is_wide: bool,
}

/// When requests come.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Pattern {
    /// Half as many again as the rate admits.
    Steady,
    Bursts,
    Random,
    /// Each steady, at the rate.
    TwoCallers,
    /// As many as the rate admits before the end of a window, and again after it.
    WindowEnd,
    /// Only the user's own.
    None,
}

impl Settings {
    pub(crate) fn draw(&self) -> Result<String, Box<dyn Error>> {
        let mut requests = self.requests();
        requests.extend(self.added_ms.iter().map(|at| (*at, Scene::READER)));
        requests.sort_unstable();
        let rows = self.algorithms.iter().filter_map(|name| self.row(name));
        let all = requests.len();
        let same = format!("The same {all} requests under each");
        let title = match (all, self.pattern) {
            (0, _) => ["Click on the drawing", "to add a request"],
            (1, _) => ["The same request under each", "algorithm"],
            (_, Pattern::TwoCallers) => [&same, "algorithm; the second caller below"],
            _ => [&same, "algorithm, and how many it admits"],
        };
        let title = title.map(str::to_owned);
        Scene { title, requests, rows: rows.collect() }.draw(self.is_wide)
    }

    /// When each request comes, and who sends it.
    fn requests(&self) -> Vec<(u32, u8)> {
        let every = |per_window: u32| {
            // By its number: a step rounded down would miss the boundaries by more and more.
            let at = move |n: u32| BEGIN_MS + n * WINDOW_MS / per_window.max(1);
            (0..).map(at).take_while(|at| *at < END_MS)
        };
        let together = |begin: u32| (0..self.rate).map(move |n| begin + n * APART_MS);
        let first = |at: u32| (at, 0);
        match self.pattern {
            Pattern::Steady => every(self.rate * 3 / 2).map(first).collect(),
            Pattern::Bursts => {
                let begins = (BEGIN_MS..END_MS).step_by(PAUSE_MS as usize);
                begins.flat_map(together).map(first).collect()
            }
            Pattern::Random => {
                let mut random = fastrand::Rng::with_seed(self.seed);
                (0..self.rate * 3).map(|_| (random.u32(BEGIN_MS..END_MS), 0)).collect()
            }
            Pattern::TwoCallers => {
                let others = every(self.rate * 2).map(|at| (at, 1));
                every(self.rate).map(first).chain(others).collect()
            }
            Pattern::WindowEnd => {
                let before = |end: u32| together(end - self.rate * APART_MS);
                let ends = [WINDOW_MS, 2 * WINDOW_MS];
                ends.into_iter()
                    .flat_map(|end| before(end).chain(together(end)))
                    .map(first)
                    .collect()
            }
            Pattern::None => Vec::new(),
        }
    }

    /// The limit of an algorithm with these numbers, and what the reader should see.
    fn row(&self, algorithm: &str) -> Option<(String, String)> {
        let Self { rate, burst, .. } = self;
        let (numbers, note) = match algorithm {
            "gcra" => (format!("{rate}/10s burst {burst}"), "a burst, then one by one".to_owned()),
            "fixed-window" => {
                (format!("{rate}/10s"), format!("{rate} before a boundary, {rate} after it"))
            }
            "first-request-window" => {
                (format!("{rate}/10s"), format!("{rate}, then none until the window ends"))
            }
            "sliding-counter" => {
                (format!("{rate}/10s"), "an estimate without a boundary".to_owned())
            }
            "bucketed-window" => {
                (format!("bucket 1s rates {rate}/10s"), "slides by one bucket of 1 s".to_owned())
            }
            "sliding-log" => (format!("{rate}/10s"), format!("never more than {rate} in any 10 s")),
            "concurrency" => {
                (format!("{burst}/10s"), format!("{burst} at a time, each works for 1.5 s"))
            }
            _ => return None,
        };
        Some((format!("{algorithm} {numbers}"), note))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pattern_is_decided_by_each_algorithm() {
        for pattern in ["steady", "bursts", "random", "two-callers", "window-end", "none"] {
            for (rate, burst) in [(1, 1), (10, 3), (30, 30)] {
                let settings: Settings = serde_json::from_value(serde_json::json!({
                    "rate": rate, "burst": burst, "pattern": pattern, "seed": 1, "is_wide": true,
                    "added_ms": [9_950],
                    "algorithms": ["gcra", "fixed-window", "first-request-window", "sliding-counter",
                        "bucketed-window", "sliding-log", "concurrency", "unknown"],
                }))
                .expect("settings");
                let requests = settings.requests();
                let inside = requests.iter().all(|(at, _)| (5_000..25_000).contains(at));
                assert!(inside, "{pattern}: {requests:?}");
                let svg = settings.draw().expect("a drawing");
                assert_eq!(svg.matches("class=\"strong\"").count(), 7, "{pattern} {rate}/{burst}");
                assert!(!svg.contains("NaN"), "{svg}");
            }
        }
    }

    fn settings(pattern: &str, rate: u32, added_ms: &[u32]) -> Settings {
        serde_json::from_value(serde_json::json!({
            "rate": rate, "burst": 1, "pattern": pattern, "seed": 1, "is_wide": false,
            "added_ms": added_ms, "algorithms": ["gcra"],
        }))
        .expect("settings")
    }

    #[test]
    fn steady_requests_meet_the_boundaries_or_keep_off() {
        for rate in 1..=30 {
            for pattern in ["steady", "two-callers"] {
                for (at, _) in settings(pattern, rate, &[]).requests() {
                    let off = (at % WINDOW_MS).min(WINDOW_MS - at % WINDOW_MS);
                    assert!(off == 0 || off >= 20, "{pattern} {rate}: {at}");
                }
            }
        }
    }

    #[test]
    fn the_title_says_how_many_requests_there_are_and_whose_is_what_remains() {
        for (pattern, added, title) in [
            ("none", &[][..], "<title id=\"t\">Click on the drawing to add a request</title>"),
            ("none", &[9_000], ">The same request under each algorithm<"),
            (
                "none",
                &[9_000, 9_100],
                ">The same 2 requests under each algorithm, and how many it admits<",
            ),
            ("two-callers", &[], "algorithm; the second caller below<"),
        ] {
            let svg = settings(pattern, 5, added).draw().expect("a drawing");
            assert!(svg.contains(title), "{svg}");
            let of_first = svg.contains(">what remains to the first<");
            assert_eq!(of_first, pattern == "two-callers", "{svg}");
        }
    }
}
