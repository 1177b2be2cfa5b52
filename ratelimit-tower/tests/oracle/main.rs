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
use serde_json::Value;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tower::ServiceExt;

use model::{Answer, Model};
use setup::{Ask, Setup};
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

    let asked = system.take_asked();
    let expected: Vec<_> = due.asked.iter().map(|(limit, _, cost)| (&**limit, *cost)).collect();
    let names: Vec<_> = asked.iter().map(|(limit, _, cost)| (&**limit, *cost)).collect();
    prop_assert_eq!(names, expected);
    for ((limit, key, _), (_, whose, _)) in asked.iter().zip(&due.asked) {
        prop_assert!(keys.belongs(limit, key, whose), "{} {} {:?}", limit, key, whose);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_layer_answers_and_charges_as_the_model_does((setup, asks) in setup::play()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
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
}
