//! What the playground's page computes, by the crates that a service and the tool use. `page/` has
//! the page, and `scripts/playground` builds both.
//!
//! The functions take and give text and JSON: the page has no types to share. `wasm-bindgen` writes
//! what lies between, so that no crate here needs `unsafe`.

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

use wasm_bindgen::prelude::wasm_bindgen;

mod algorithms;
mod log;

pub use log::Files;

/// Draws requests under several algorithms. Takes the settings as JSON and returns an SVG.
///
/// # Errors
///
/// The settings make no limit.
#[wasm_bindgen]
pub fn draw(settings: &str) -> Result<String, String> {
    let settings: algorithms::Settings =
        serde_json::from_str(settings).map_err(|error| error.to_string())?;
    settings.draw().map_err(|error| error.to_string())
}

/// The time at this distance from the left of a drawing, in milliseconds; nothing outside of its
/// time axis.
#[must_use]
#[wasm_bindgen]
pub fn time_ms(is_wide: bool, x: f64) -> Option<f64> {
    guide::Scene::time_ms(is_wide, x)
}

/// The mistakes of a policy, as `ratelimit lint --json` prints them.
#[must_use]
#[wasm_bindgen]
pub fn lint(policy: &str) -> String {
    use ratelimit_replay::lint;
    lint::lines(&lint::lint(policy, &lint::Demands::default()))
}

/// The mistake in options that say how a log is read, as the tool tells it.
#[must_use]
#[wasm_bindgen]
pub fn options_problem(options: &str) -> Option<String> {
    ratelimit_replay::arguments::parse(options).err()
}

/// What these options are for.
#[must_use]
#[wasm_bindgen]
pub fn options_help() -> String {
    ratelimit_replay::arguments::help()
}

/// Replays logs. Takes the request as JSON. Returns the page of the report, the lines that were
/// skipped, and the error that ended the replay, as JSON.
///
/// # Errors
///
/// The policy or the logs cannot be read. The message names the place and the remedy.
#[wasm_bindgen]
pub fn replay(request: &str, files: &Files) -> Result<String, String> {
    let request: log::Request = serde_json::from_str(request).map_err(|error| error.to_string())?;
    request.replay(files).map(|told| told.to_string()).map_err(|failure| failure.to_string())
}
