//! The cases that are checked, and the wrong variants that must not pass.

use stateright::{Checker, HasDiscoveries, Model};

use super::{Flaw, Nodes, WINDOW};

const NEVER_ABOVE: &str = "no window admits more than its limit";
const COMES_BACK: &str = "unused budget is back once nothing is under way";

fn nodes() -> Nodes {
    Nodes {
        limit: 3,
        are_slow: vec![false; 2],
        requests: 3,
        ticks: 2 * WINDOW - 1,
        losses: 1,
        crashes: 0,
        flaw: Flaw::None,
    }
}

fn holds(model: Nodes) {
    let checker = model.checker().spawn_bfs().join();
    eprintln!("{} states", checker.unique_state_count());
    checker.assert_properties();
}

fn is_caught(model: Nodes, by: &'static str) {
    let caught = HasDiscoveries::AllOf([by].into());
    let checker = model.checker().finish_when(caught).spawn_bfs().join();
    assert!(checker.discovery(by).is_some(), "{by}: {} states", checker.unique_state_count());
}

#[test]
fn two_nodes_never_exceed_a_window_although_a_message_is_lost() {
    holds(nodes());
}

#[test]
fn two_nodes_never_exceed_a_window_although_one_crashes() {
    holds(Nodes { losses: 0, crashes: 1, ..nodes() });
}

#[test]
fn two_nodes_never_exceed_a_window_although_a_clock_is_slow() {
    holds(Nodes { are_slow: vec![false, true], losses: 0, ..nodes() });
}

#[test]
fn three_nodes_never_exceed_a_window() {
    holds(Nodes { are_slow: vec![false; 3], requests: 2, losses: 0, ticks: WINDOW, ..nodes() });
}

#[test]
fn the_model_catches_a_draw_that_counts_twice_after_a_lost_reply() {
    is_caught(Nodes { flaw: Flaw::CountsARetryTwice, ..nodes() }, NEVER_ABOVE);
}

#[test]
fn the_model_catches_a_draw_that_counts_although_its_request_was_lost() {
    is_caught(Nodes { flaw: Flaw::TrustsALostDraw, ..nodes() }, NEVER_ABOVE);
}

#[test]
fn the_model_catches_an_allotment_that_outlives_its_window() {
    is_caught(Nodes { flaw: Flaw::OutlivesItsWindow, ..nodes() }, NEVER_ABOVE);
}

#[test]
fn the_model_catches_what_is_given_back_twice() {
    is_caught(Nodes { flaw: Flaw::GivesBackTwice, losses: 0, ..nodes() }, COMES_BACK);
    is_caught(Nodes { flaw: Flaw::GivesBackTwice, losses: 0, ..nodes() }, NEVER_ABOVE);
}

#[test]
fn the_model_catches_what_is_spent_after_it_was_given_back() {
    is_caught(Nodes { flaw: Flaw::SpendsWhatItGaveBack, losses: 0, ..nodes() }, NEVER_ABOVE);
}

#[test]
fn the_model_catches_a_size_that_the_store_has_not_charged() {
    is_caught(Nodes { flaw: Flaw::DrawsLessThanItCounts, losses: 0, ..nodes() }, NEVER_ABOVE);
}

#[test]
fn the_model_catches_trust_in_a_slow_clock() {
    let slow = Nodes { are_slow: vec![false, true], losses: 0, ..nodes() };
    is_caught(Nodes { flaw: Flaw::TrustsASlowClock, ..slow }, NEVER_ABOVE);
}
