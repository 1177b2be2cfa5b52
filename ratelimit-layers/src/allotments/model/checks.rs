//! The cases that are checked, and the wrong variants that must not pass.

use std::num::NonZero;

use stateright::{Checker, HasDiscoveries, Model};

use super::{Flaw, Nodes};

const NEVER_ABOVE: &str = "no windows use more than their limits and the debt";

/// Two nodes and two windows of three.
fn two_nodes() -> Nodes {
    Nodes {
        limit: 3,
        debt: 0,
        window: 2,
        are_slow: vec![false; 2],
        requests: vec![3, 2],
        ticks: 3,
        losses: 0,
        crashes: 0,
        early: 0,
        forced: 0,
        flaw: Flaw::None,
    }
}

/// One node, to which more requests come. It is enough for most faults.
fn one_node(flaw: Flaw) -> Nodes {
    Nodes { are_slow: vec![false], requests: vec![6], losses: 1, early: 1, flaw, ..two_nodes() }
}

fn holds(model: Nodes) {
    let described = format!("{model:?}");
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let checker = model.checker().threads(processors).spawn_bfs().join();
    eprintln!("{} states: {described}", checker.unique_state_count());
    checker.assert_properties();
}

#[test]
fn nodes_never_exceed_a_window_and_what_they_do_not_use_comes_back() {
    let two = two_nodes;
    holds(Nodes { early: 1, ..two() });
    // Also if an answer is lost, a node crashes, or a clock is slow.
    holds(Nodes { losses: 1, requests: vec![3, 1], ..two() });
    holds(Nodes { crashes: 1, requests: vec![3, 1], ..two() });
    let are_slow = vec![true, false];
    holds(Nodes { are_slow, window: 4, ticks: 7, requests: vec![3, 1], ..two() });
    // Also with a debt that other processes make.
    holds(Nodes { debt: 2, forced: 2, requests: vec![3, 1], ..two() });
    let (are_slow, requests) = (vec![false; 3], vec![3, 1, 1]);
    holds(Nodes { are_slow, requests, ticks: 2, limit: 4, ..two() });
}

#[test]
fn the_model_catches_nodes_that_are_wrong() {
    for flaw in [
        Flaw::TrustsALostDraw,
        Flaw::OutlivesItsWindow,
        Flaw::SpendsWhatItGaveBack,
        Flaw::TrustsASlowClock,
        Flaw::ForgetsDebt,
    ] {
        let wrong = match flaw {
            Flaw::OutlivesItsWindow => Nodes { losses: 0, early: 0, ..one_node(flaw) },
            Flaw::SpendsWhatItGaveBack => Nodes { losses: 0, ..one_node(flaw) },
            Flaw::TrustsASlowClock => {
                Nodes { are_slow: vec![true], window: 4, ticks: 7, losses: 0, ..one_node(flaw) }
            }
            Flaw::ForgetsDebt => Nodes { debt: 2, forced: 2, losses: 0, ..one_node(flaw) },
            _ => one_node(flaw),
        };
        let caught = HasDiscoveries::AllOf([NEVER_ABOVE].into());
        let checker = wrong.checker().finish_when(caught).spawn_bfs().join();
        assert!(checker.discovery(NEVER_ABOVE).is_some(), "{flaw:?}");
    }
}
