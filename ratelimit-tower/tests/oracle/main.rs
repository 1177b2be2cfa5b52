//! The oracle: a plain model of the layer, and generated layers and requests that both answer.
//! Status, fields, problem, waits, and what the store is asked to charge are compared by the names
//! of the limits.
#![cfg(all(feature = "axum", feature = "grpc", feature = "tokio"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod model;
mod outage;
mod setup;
mod system;
mod underway;

use std::collections::HashMap;
use std::time::Duration;

use axum::body::Bytes;
use proptest::prelude::*;
use ratelimit_core::{AnyAlgorithm, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{WaitError, Waiter};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use model::{Answer, Model, Waited};
use setup::{Ask, Go, Setup, Step};
use system::{Head, Passing, System, Underway};
use underway::Settled;

/// The fields that are compared: those that are expected, and that no other of these is there.
const FIELDS: [&str; 9] = [
    "ratelimit-policy",
    "ratelimit",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "anthropic-ratelimit-requests-limit",
    "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-tokens-remaining",
];

const PROBLEMS: &str = "https://iana.org/assignments/http-problem-types#";

/// Each key of the store belongs to one caller, under each limit.
#[derive(Default)]
struct Keys {
    owners: HashMap<(String, String), Vec<String>>,
    keys: HashMap<(String, Vec<String>), String>,
}

impl Keys {
    fn belongs(&mut self, limit: &str, key: &str, whose: &[String]) -> bool {
        let (limit, key, whose) = (limit.to_owned(), key.to_owned(), whose.to_vec());
        let owner =
            self.owners.entry((limit.clone(), key.clone())).or_insert_with(|| whose.clone());
        *owner == whose && *self.keys.entry((limit, whose)).or_insert_with(|| key.clone()) == key
    }
}

/// Compares the answer to a request, and the body of a rejection.
fn compare_answer(
    setup: &Setup,
    head: &Head,
    body: impl FnOnce() -> Bytes,
    due: &Answer,
) -> Result<(), TestCaseError> {
    let rejected = due.problem.is_some();
    let status = if rejected && setup.grpc { 200 } else { due.status };
    prop_assert_eq!(head.status().as_u16(), status);

    let field =
        |name: &str| head.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let told: Vec<_> = FIELDS.iter().filter_map(|name| Some((*name, field(name)?))).collect();
    let mut expected = due.fields.clone();
    expected.sort_by_key(|(name, _)| FIELDS.iter().position(|field| field == name));
    prop_assert_eq!(told, expected);
    let wait_s = due.retry_after_us.map(|us| us.div_ceil(1_000_000).max(1).to_string());
    prop_assert_eq!(field("retry-after"), wait_s);
    let challenge = (due.status == 401).then(|| "Bearer".to_owned());
    prop_assert_eq!(field("www-authenticate"), challenge);

    if rejected && setup.grpc {
        let code = match due.status {
            429 => Code::ResourceExhausted,
            503 => Code::Unavailable,
            401 => Code::Unauthenticated,
            402 => Code::PermissionDenied,
            500 => Code::Internal,
            _ => Code::InvalidArgument,
        };
        let said = Status::from_header_map(head.headers()).unwrap();
        prop_assert_eq!(said.code(), code);
        let wait = said.get_details_retry_info().and_then(|info| info.retry_delay);
        let told_us = due.retry_after_us.filter(|_| due.status == 429);
        prop_assert_eq!(wait, told_us.map(Duration::from_micros));
    } else if let Some(kind) = due.problem {
        prop_assert_eq!(field("content-type"), Some("application/problem+json".to_owned()));
        let problem: Value = serde_json::from_slice(&body()).unwrap();
        let kind = match kind {
            "blank" => "about:blank".to_owned(),
            kind => format!("{PROBLEMS}{kind}"),
        };
        prop_assert_eq!(problem["type"].as_str(), Some(&*kind));
        prop_assert_eq!(problem["status"].as_u64(), Some(u64::from(due.status)));
        let violated =
            problem.get("violated-policies").cloned().unwrap_or_else(|| Value::from([""; 0]));
        prop_assert_eq!(violated, Value::from(due.violated.clone()));
    }
    Ok(())
}

/// A layer and its model, to which the same happens.
struct Both<'a> {
    setup: &'a Setup,
    model: Model<'a>,
    system: System,
    keys: Keys,
    /// With what is due to them.
    underway: Vec<(Underway, Answer)>,
}

impl Both<'_> {
    async fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Ask(ask) => {
                self.passes(ask.after_ms).await?;
                self.system.away(ask.away);
                let asked = self.ask(ask);
                self.system.away(false);
                asked
            }
            Step::Go(_, _) if self.underway.is_empty() => Ok(()),
            Step::Go(nth, go) => self.go(nth.index(self.underway.len()), *go),
        }
    }

    /// The time until the next request passes, and begins with what the store is charged that it
    /// has missed.
    async fn passes(&mut self, ms: u64) -> Result<(), TestCaseError> {
        let mut due = self.model.recover();
        self.model.passes(ms);
        self.system.passes(ms).await;
        let mut forced = self.system.take_forced();
        // In which order is not said.
        due.sort_by_key(|(limit, whose, cost)| (limit.clone(), *cost, whose.clone()));
        forced.sort_by_key(|(limit, key, cost)| (limit.clone(), *cost, key.clone()));
        let charges = |(limit, _, cost): &(String, _, u64)| (limit.clone(), *cost);
        let sums: Vec<_> = due.iter().map(charges).collect();
        prop_assert_eq!(
            forced.iter().map(|one| (one.0.clone(), one.2)).collect::<Vec<_>>(),
            sums.clone()
        );
        // Of two alike, the order of the keys tells nothing.
        let is_alone = |nth: &usize| sums.iter().filter(|sum| **sum == sums[*nth]).count() == 1;
        for nth in (0..due.len()).filter(is_alone) {
            let ((limit, key, _), (_, whose, _)) = (&forced[nth], &due[nth]);
            prop_assert!(self.keys.belongs(limit, key, whose), "{} {} {:?}", limit, key, whose);
        }
        Ok(())
    }

    fn ask(&mut self, ask: &Ask) -> Result<(), TestCaseError> {
        let due = self.model.answer(ask);
        let (mut underway, head) = self.system.ask(ask);
        prop_assert_eq!(self.system.take_handler_view(), due.shown_to_handler.clone());
        let asked = self.system.take_asked();
        self.compare_charges(&asked, &due.asked)?;
        if due.problem.is_some() {
            let head = head.ok_or_else(|| TestCaseError::fail("it is not rejected"))?;
            return compare_answer(self.setup, &head, || underway.collect_body(), &due);
        }
        let nth = self.underway.len();
        self.underway.push((underway, due));
        if !ask.handler.waits {
            let (settled, stays) = self.model.go(nth, Go::On);
            self.compare_head(nth, head)?;
            self.compare_gone(nth, &settled, stays)?;
        }
        // Behind a fallback, each request ends before the next one begins.
        if self.setup.fallback.is_some() && self.underway.len() > nth {
            self.go(nth, Go::Through)?;
        }
        Ok(())
    }

    fn go(&mut self, nth: usize, go: Go) -> Result<(), TestCaseError> {
        let (settled, stays) = self.model.go(nth, go);
        match go {
            Go::Off => self.underway[nth].0.leaves(),
            Go::On => {
                let head = self.underway[nth].0.goes_on();
                self.compare_head(nth, head)?;
            }
            Go::Through => {
                while !self.underway[nth].0.is_over() {
                    let head = self.underway[nth].0.goes_on();
                    self.compare_head(nth, head)?;
                }
            }
        }
        self.compare_gone(nth, &settled, stays)
    }

    fn compare_head(&self, nth: usize, head: Option<Head>) -> Result<(), TestCaseError> {
        let due = &self.underway[nth].1;
        head.map_or(Ok(()), |head| compare_answer(self.setup, &head, Bytes::new, due))
    }

    /// Compares what is settled because a request has gone on.
    fn compare_gone(
        &mut self,
        nth: usize,
        due: &[Settled],
        stays: bool,
    ) -> Result<(), TestCaseError> {
        if !stays {
            drop(self.underway.remove(nth));
        }
        let (settled, forgiven): (Vec<_>, Vec<_>) = self.system.take_settled().into_iter().unzip();
        let charges: Vec<_> = due
            .iter()
            .map(|(limit, whose, cost, _)| (limit.clone(), whose.clone(), *cost))
            .collect();
        self.compare_charges(&settled, &charges)?;
        prop_assert_eq!(forgiven, due.iter().map(|one| one.3).collect::<Vec<_>>());
        Ok(())
    }

    fn compare_charges(
        &mut self,
        made: &[(String, String, u64)],
        due: &[(String, Vec<String>, u64)],
    ) -> Result<(), TestCaseError> {
        let expected: Vec<_> = due.iter().map(|(limit, _, cost)| (&**limit, *cost)).collect();
        let names: Vec<_> = made.iter().map(|(limit, _, cost)| (&**limit, *cost)).collect();
        prop_assert_eq!(names, expected);
        for ((limit, key, _), (_, whose, _)) in made.iter().zip(due) {
            prop_assert!(self.keys.belongs(limit, key, whose), "{} {} {:?}", limit, key, whose);
        }
        Ok(())
    }

    /// Compares what is counted of each limit.
    async fn compare_left(&mut self) -> Result<(), TestCaseError> {
        self.passes(0).await?;
        for (limit, whose, left, owed) in self.model.remaining_and_owed() {
            let Some(key) = self.keys.keys.get(&(limit.name.to_owned(), whose)) else { continue };
            prop_assert_eq!(
                self.system.remaining_and_owed(limit, key),
                (left, owed),
                "{}",
                limit.name
            );
        }
        let due = self.model.without_store.iter();
        let due: Vec<_> =
            due.map(|((name, choice), of)| ((*name).to_owned(), *choice, *of)).collect();
        prop_assert_eq!(self.system.without_store(), due);
        Ok(())
    }
}

/// The identifiers of a request.
fn caller(ask: &Ask) -> Vec<(&'static str, String)> {
    let ip = [("ip", ask.peer.identity())];
    ip.into_iter().chain(ask.user.map(|user| ("user", user.to_owned()))).collect()
}

/// A runtime whose time passes as soon as all wait.
fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_000) })]

    #[test]
    fn a_layer_answers_and_charges_as_the_model_does((setup, steps) in setup::play()) {
        runtime().block_on(async {
            let (model, system) = (Model::new(&setup), System::new(&setup));
            let (keys, underway) = (Keys::default(), Vec::new());
            let mut both = Both { setup: &setup, model, system, keys, underway };
            for (nth, step) in steps.iter().enumerate() {
                let compared = both.step(step).await;
                compared.map_err(|error| TestCaseError::fail(format!("step {nth}: {error}")))?;
            }
            both.compare_left().await
        })?;
    }

    #[test]
    fn a_waiter_admits_when_the_model_does((mut setup, asks) in setup::waits()) {
        (setup.header, setup.fallback) = (None, None);
        // A limit of all callers applies to each.
        (setup.limits[0].by, setup.limits[0].when_user) = (&["ip"], None);
        setup.limits.retain(|limit| !limit.by.is_empty());
        setup.limits.iter_mut().for_each(|limit| (limit.required, limit.shadow) = (false, false));
        runtime().block_on(async {
            let store = MemoryStore::builder().clock(Passing::new()).build();
            let waiter = Waiter::<_, AnyAlgorithm>::new(RateLimiter::new(
                system::limits(setup.limits.iter()),
                store,
            ));
            let mut model = Model::new(&setup);
            for ask in &asks {
                tokio::time::advance(Duration::from_millis(ask.after_ms)).await;
                let (due, start) = (model.wait(ask), Instant::now());
                let patience = Duration::from_millis(ask.patience_ms);
                let admitted = waiter.until_n_allowed(&caller(ask)[..], ask.cost, patience).await;
                let passed_us = u64::try_from(start.elapsed().as_micros()).unwrap();
                let waited = match admitted {
                    Ok(_) => Waited::Admitted { after_us: passed_us },
                    Err(WaitError::TooLong { .. }) => Waited::TooLong,
                    Err(WaitError::Never { .. }) => Waited::Never,
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                };
                prop_assert_eq!(waited, due);
            }
            Ok(())
        })?;
    }
}
