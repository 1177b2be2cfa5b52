//! `check`, `inspect` and `reset`, as far as they work without a server.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use common::{BUCKET, Scene, TWO};

fn check(policy: &str, arguments: &[&str]) -> common::Ran {
    let first = ["check", "--policy", "policy.toml", "--store", "memory"];
    Scene::new(policy).run(&[&first, arguments].concat())
}

#[test]
fn an_admitted_check_exits_with_0_and_says_so() {
    let ran = check(BUCKET, &["alice", "--cost", "2"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(
        ran.out,
        "alice at cost 2: admitted\n  bucket (for each key) admits, 3 of 5 left, all of it again \
         in 2 s\n"
    );
}

#[test]
fn a_denied_check_exits_with_1_and_a_cost_that_never_fits_says_never() {
    let ran = check(BUCKET, &["alice", "--cost", "6"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("denies, and always will"), "{}", ran.out);
}

#[test]
fn as_json_a_check_is_a_decision_line_without_its_time() {
    let ran = check(BUCKET, &["alice", "--json", "--peek"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(
        ran.out,
        "{\"key\":\"alice\",\"cost\":1,\"allowed\":true,\"limit\":5,\"remaining\":4,\
         \"retry_after_us\":0,\"reset_after_us\":1000000}\n"
    );
    let ran = check(TWO, &["ip=1.2.3.4", "--json"]);
    assert!(ran.out.starts_with("{\"keys\":{\"ip\":\"1.2.3.4\"},\"cost\":1,"), "{}", ran.out);
    assert!(ran.out.contains("\"limits\":[{\"name\":\"per-ip\","), "{}", ran.out);
}

#[test]
fn a_value_keeps_its_equals_signs_and_unknown_names_are_bare_keys() {
    let ran = check(TWO, &["user=a=b", "--json"]);
    assert!(ran.out.contains("{\"user\":\"a=b\"}"), "{ran:?}");
    let ran = check(BUCKET, &["user=a=b", "--json"]);
    assert!(ran.out.contains("\"key\":\"user=a=b\""), "{ran:?}");
}

#[test]
fn a_check_that_no_limit_applies_to_names_what_the_policy_wants() {
    let ran = check(TWO, &["alice"]);
    assert_eq!(ran.code, 2);
    assert!(ran.err.contains("per-ip wants ip; per-user wants user"), "{}", ran.err);
}

#[test]
fn inspect_and_reset_refuse_a_memory_store() {
    let scene = Scene::new(BUCKET);
    for command in ["inspect", "reset"] {
        let ran = scene.run(&[command, "alice", "--policy", "policy.toml", "--store", "memory"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("redis://host:port"), "{}", ran.err);
        let ran = scene.run(&[command, "alice", "--policy", "policy.toml"]);
        assert_eq!(ran.code, 2, "{ran:?}");
    }
}

#[test]
fn no_command_shows_a_password() {
    let scene = Scene::new(BUCKET);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let url = format!("redis://user:secret@{address}");
    for command in ["check", "inspect", "reset"] {
        let ran = scene.run(&[command, "alice", "--policy", "policy.toml", "--store", &url]);
        assert_eq!(ran.code, 3, "{ran:?}");
        assert!(ran.err.contains(&address.to_string()), "{}", ran.err);
        assert!(!ran.err.contains("secret"), "{}", ran.err);
    }
}
