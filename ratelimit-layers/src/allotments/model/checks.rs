//! The cases that are checked, and the wrong variants that must not pass.

use stateright::{Checker, HasDiscoveries, Model};

use super::{Flaw, Nodes};

const NEVER_ABOVE: &str = "no window admits more than its limit";
const COMES_BACK: &str = "unused budget is back once nothing is under way";

/// Two nodes and two windows of three.
fn two_nodes() -> Nodes {
    Nodes {
        limit: 3,
        window: 2,
        are_slow: vec![false; 2],
        requests: vec![3, 2],
        ticks: 3,
        losses: 0,
        crashes: 0,
        early: 0,
        flaw: Flaw::None,
    }
}

/// One node, to which more requests come. It is enough for most faults.
fn one_node(flaw: Flaw) -> Nodes {
    Nodes { are_slow: vec![false], requests: vec![6], losses: 1, early: 1, flaw, ..two_nodes() }
}

fn holds(model: Nodes) {
    let described = format!("{model:?}");
    let checker = model.checker().spawn_bfs().join();
    eprintln!("{} states: {described}", checker.unique_state_count());
    checker.assert_properties();
}

fn is_caught(model: Nodes, by: &'static str) {
    let caught = HasDiscoveries::AllOf([by].into());
    let checker = model.checker().finish_when(caught).spawn_bfs().join();
    let states = checker.unique_state_count();
    eprintln!("{states} states until it was caught");
    assert!(checker.discovery(by).is_some(), "{by}: {states} states");
}

#[test]
fn nodes_never_exceed_a_window_and_what_they_do_not_use_comes_back() {
    holds(Nodes { early: 1, ..two_nodes() });
}

#[test]
fn nodes_never_exceed_a_window_although_an_answer_is_lost() {
    holds(Nodes { losses: 1, requests: vec![3, 1], ..two_nodes() });
}

#[test]
fn nodes_never_exceed_a_window_although_one_crashes() {
    holds(Nodes { crashes: 1, requests: vec![3, 1], ..two_nodes() });
}

#[test]
fn nodes_never_exceed_a_window_although_a_clock_is_slow() {
    holds(Nodes {
        are_slow: vec![true, false],
        window: 4,
        ticks: 7,
        requests: vec![3, 1],
        ..two_nodes()
    });
}

#[test]
fn three_nodes_never_exceed_a_window() {
    holds(Nodes {
        are_slow: vec![false; 3],
        requests: vec![3, 1, 1],
        ticks: 2,
        limit: 4,
        ..two_nodes()
    });
}

#[test]
fn the_model_catches_a_draw_that_counts_twice_after_a_lost_reply() {
    is_caught(one_node(Flaw::CountsARetryTwice), NEVER_ABOVE);
}

#[test]
fn the_model_catches_a_draw_that_counts_although_its_request_was_lost() {
    is_caught(one_node(Flaw::TrustsALostDraw), NEVER_ABOVE);
}

#[test]
fn the_model_catches_an_allotment_that_outlives_its_window() {
    let lossless = Nodes { losses: 0, early: 0, ..one_node(Flaw::OutlivesItsWindow) };
    is_caught(lossless, NEVER_ABOVE);
}

#[test]
fn the_model_catches_what_is_given_back_twice() {
    let lossless = Nodes { losses: 0, ..one_node(Flaw::GivesBackTwice) };
    is_caught(lossless.clone(), COMES_BACK);
    is_caught(lossless, NEVER_ABOVE);
}

#[test]
fn the_model_catches_what_is_spent_after_it_was_given_back() {
    is_caught(Nodes { losses: 0, ..one_node(Flaw::SpendsWhatItGaveBack) }, NEVER_ABOVE);
}

#[test]
fn the_model_catches_a_size_that_the_store_has_not_charged() {
    is_caught(one_node(Flaw::DrawsLessThanItCounts), NEVER_ABOVE);
}

#[test]
fn the_model_catches_trust_in_a_slow_clock() {
    let slow = one_node(Flaw::TrustsASlowClock);
    is_caught(Nodes { are_slow: vec![true], window: 4, ticks: 7, losses: 0, ..slow }, NEVER_ABOVE);
}
