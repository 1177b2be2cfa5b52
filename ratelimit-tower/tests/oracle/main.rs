//! The oracle: a plain model of the layer, and generated layers and requests that both answer. Status, fields, problem, waits, and
//! what the store is asked to charge are compared by the names of the limits.
#![cfg(all(feature = "axum", feature = "grpc", feature = "tokio"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod model;
mod setup;
mod system;

use std::collections::HashMap;
use std::time::Duration;

use http_body_util::BodyExt;
use proptest::prelude::*;
use ratelimit_core::{Clock, Policy, RateLimiter, Timestamp};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{WaitError, Waiter};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tower::ServiceExt;

use model::{Answer, Model, Waited};
use setup::{Ask, LimitSpec, Mode, Presence, Setup};
use system::System;

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

/// Sends the request, and compares what comes back.
async fn compare(
    setup: &Setup,
    system: &System,
    keys: &mut Keys,
    ask: &Ask,
    due: &Answer,
) -> Result<(), TestCaseError> {
    let response = system.service.clone().oneshot(system.request(ask)).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let rejected = due.problem.is_some();
    let status = if rejected && setup.grpc { 200 } else { due.status };
    prop_assert_eq!(parts.status.as_u16(), status);

    let field =
        |name: &str| parts.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
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
            _ => Code::InvalidArgument,
        };
        let said = Status::from_header_map(&parts.headers).unwrap();
        prop_assert_eq!(said.code(), code);
        let wait = said.get_details_retry_info().and_then(|info| info.retry_delay);
        prop_assert_eq!(wait, due.retry_after_us.map(Duration::from_micros));
    } else if let Some(kind) = due.problem {
        let problem: Value = serde_json::from_slice(&body).unwrap();
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

    prop_assert_eq!(system.take_seen(), due.seen.clone());

    let asked = system.take_asked();
    let expected: Vec<_> = due.asked.iter().map(|(limit, _, cost)| (&**limit, *cost)).collect();
    let names: Vec<_> = asked.iter().map(|(limit, _, cost)| (&**limit, *cost)).collect();
    prop_assert_eq!(names, expected);
    for ((limit, key, _), (_, whose, _)) in asked.iter().zip(&due.asked) {
        prop_assert!(keys.belongs(limit, key, whose), "{} {} {:?}", limit, key, whose);
    }
    Ok(())
}

/// The time of a store, which passes with that of the runtime.
struct Passing(Instant);

impl Clock for Passing {
    fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.0.elapsed()
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
    fn a_layer_answers_and_charges_as_the_model_does((setup, asks) in setup::play()) {
        runtime().block_on(async {
            let (system, mut keys) = (System::new(&setup), Keys::default());
            let mut model = Model::new(&setup);
            for (nth, ask) in asks.iter().enumerate() {
                let due = model.answer(ask);
                system.pass(ask);
                let compared = compare(&setup, &system, &mut keys, ask, &due).await;
                compared.map_err(|error| TestCaseError::fail(format!("request {nth}: {error}")))?;
            }
            Ok::<(), TestCaseError>(())
        })?;
    }

    #[test]
    fn a_waiter_admits_when_the_model_does((mut setup, asks) in setup::play()) {
        setup.header = None;
        // A limit of all callers applies to each.
        setup.limits[0].by = &["ip"];
        setup.limits.iter_mut().for_each(|limit| (limit.required, limit.shadow) = (false, false));
        runtime().block_on(async {
            let store = MemoryStore::builder().clock(Passing(Instant::now())).build();
            let limits = system::limits(setup.limits.iter().filter(|limit| !limit.by.is_empty()));
            let waiter = Waiter::<_, Policy>::new(RateLimiter::new(limits, store));
            setup.limits.retain(|limit| !limit.by.is_empty());
            let mut model = Model::new(&setup);
            for ask in &asks {
                tokio::time::advance(Duration::from_millis(ask.after_ms)).await;
                let (due, start) = (model.wait(ask), Instant::now());
                let patience = Duration::from_millis(ask.patience_ms);
                let admitted = waiter.until_n_allowed(&caller(ask)[..], ask.cost, patience).await;
                let passed_us = u64::try_from(start.elapsed().as_micros()).unwrap();
                let waited = match admitted {
                    // Timers are rounded up to milliseconds.
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

    #[test]
    fn a_layer_answers_as_the_limits_choose_while_the_store_is_away((mut setup, asks) in setup::play()) {
        setup.header = None;
        setup.user = Presence::Optional;
        setup.limits.iter_mut().for_each(|limit| (limit.required, limit.shadow) = (false, false));
        setup.limits.push(LimitSpec { name: "all", by: &[], ..setup.limits[0].clone() });
        (setup.mode, setup.grpc) = (Mode::Awaited, false);
        runtime().block_on(async {
            let system = System::new(&setup);
            let service = system.with_fallback(&setup);
            let mut model = Model::new(&setup);
            for ask in &asks {
                let (status, denied) = model.in_outage(ask);
                let status = if status == 200 { ask.handler.status } else { status };
                let due = (status, denied);
                system.pass(&Ask { away: true, ..ask.clone() });
                tokio::time::advance(Duration::from_millis(ask.after_ms)).await;
                let response = service.clone().oneshot(system.request(ask)).await.unwrap();
                let status = response.status().as_u16();
                let body = response.into_body().collect().await.unwrap().to_bytes();
                let problem: Value = serde_json::from_slice(&body).unwrap_or_default();
                let denied = problem["violated-policies"].as_array().cloned().unwrap_or_default();
                let denied: Vec<_> = denied.iter().map(|name| name.as_str().unwrap().to_owned()).collect();
                prop_assert_eq!((status, denied), due);
            }
            Ok(())
        })?;
    }
}
