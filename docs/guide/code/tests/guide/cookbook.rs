//! The recipes of the cookbook: each file begins with what the chapter shows, and then tests its
//! claim.

mod canary;
mod client;
mod graphql;
mod job_queue;
mod login;
mod per_plan;
mod priorities;
mod shadow;
mod tenants;
mod webhooks;
mod websocket;
mod worker;

use ratelimit_core::{AnyAlgorithm, Limits};

use crate::{blocks, chapter};

/// The policy of a recipe, as its page has it.
fn policy(page: &str, heading: &str) -> Limits<AnyAlgorithm> {
    let text = chapter(page);
    let (_, recipe) = text.split_once(&format!("\n## {heading}\n")).expect("a recipe");
    let document = blocks(recipe, "toml").into_iter().next().expect("a policy");
    toml::from_str(&document).unwrap_or_else(|error| panic!("{page}, {heading}: {error}"))
}
