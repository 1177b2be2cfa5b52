//! The bundled log equals what its generator writes.
#![allow(missing_docs, clippy::expect_used)]

mod common;

#[path = "../examples/make_access_log.rs"]
#[allow(dead_code, unreachable_pub)]
mod make_access_log;

#[test]
fn the_committed_log_is_what_its_generator_makes() {
    let committed =
        std::fs::read_to_string(common::workspace("examples/access.log")).expect("reads");
    // `assert_eq!` would print both logs.
    assert!(
        committed == make_access_log::committed(),
        "examples/access.log differs; make it anew with `cargo run -p ratelimit-cli --example \
         make_access_log > examples/access.log`"
    );
}
