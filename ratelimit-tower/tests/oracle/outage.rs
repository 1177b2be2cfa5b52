//! The model of an outage: while the store is unreachable, a fallback decides by the choice of each
//! limit.

use ratelimit_core::algorithm::Share as _;
use ratelimit_core::{Algorithm as _, AnyAlgorithm, Decision, OnOutage};

use crate::model::{Applies, Keeper, Key, Model, Said};
use crate::setup::{LimitSpec, Outages};

/// For how long a breaker is open.
const PAUSE_US: u64 = 1_000_000;

/// Calls that failed in a row, and when an open breaker admits a probe.
#[derive(Default)]
pub(crate) struct Breaker {
    failures: u32,
    probes_us: Option<u64>,
}

/// What was admitted without the store: how much is to be charged to each key.
#[derive(Default)]
pub(crate) struct Pending<'a>(Vec<(&'a LimitSpec, Vec<String>, u64)>);

impl<'a> Model<'a> {
    /// What a limit is to its keeper: a node has its share.
    pub(crate) fn algorithm(&self, keeper: Keeper, limit: &LimitSpec) -> AnyAlgorithm {
        let algorithm = limit.kind.algorithm();
        match (keeper, self.setup.fallback) {
            (Keeper::Node, Some(outages)) => {
                // One that is smaller than the number of nodes admits at least one.
                let nodes = outages.nodes.min(algorithm.capacity());
                algorithm.share(nodes.try_into().expect("a node")).expect("at least one")
            }
            _ => algorithm,
        }
    }

    /// A call to the store. Returns whether it decides, or else after which time a probe may.
    pub(crate) fn calls(&mut self, away: bool) -> Result<(), u64> {
        let Some(Outages { failures, .. }) = self.setup.fallback else { return Ok(()) };
        let breaker = &mut self.breaker;
        if let Some(probes_us) = breaker.probes_us.filter(|us| *us > self.now_us) {
            return Err(probes_us - self.now_us);
        }
        if !away {
            *breaker = Breaker::default();
            self.answered = true;
            return Ok(());
        }
        breaker.failures += 1;
        if breaker.failures >= failures {
            breaker.probes_us = Some(self.now_us + PAUSE_US);
        }
        Err(PAUSE_US)
    }

    /// Asks these limits through a fallback. A store that `is_away` is asked once per request.
    pub(crate) fn ask_fallback(
        &mut self,
        limits: Vec<Applies<'a>>,
        away: bool,
        is_away: &mut bool,
        asked: &mut Vec<(String, Vec<String>, u64)>,
    ) -> Vec<Said<'a>> {
        let called = if *is_away { Err(PAUSE_US) } else { self.calls(away) };
        let Err(wait_us) = called else {
            let said = self.ask_all(Keeper::Store, limits, false);
            asked.extend(said.iter().map(Said::request));
            return said;
        };
        *is_away = true;
        let closes = limits.iter().any(|(limit, ..)| limit.on_outage == OnOutage::Closed);
        let is_local = |one: &&Applies<'_>| one.0.on_outage == OnOutage::Local;
        let local = limits.iter().filter(is_local).cloned().collect();
        let local = self.ask_all(Keeper::Node, local, closes);
        let allowed = !closes && local.iter().all(|said| said.decision.allowed);
        let mut local = local.into_iter();
        let said: Vec<_> = limits
            .into_iter()
            .map(|one| match one.0.on_outage {
                OnOutage::Local => local.next().expect("it was asked"),
                choice => {
                    let (limit, cost) = (one.0.kind.algorithm().capacity(), one.2);
                    let open = choice == OnOutage::Open;
                    let used = if allowed { cost } else { 0 };
                    let wait_us = if open { 0 } else { wait_us };
                    Said::new(
                        one,
                        Decision {
                            allowed: open,
                            cost,
                            limit,
                            remaining: if open { limit.saturating_sub(used) } else { 0 },
                            retry_after_us: Some(wait_us),
                            replenish_after_us: wait_us,
                            reset_after_us: wait_us,
                        },
                    )
                }
            })
            .collect();
        for said in &said {
            let count = self.without_store.entry((said.limit.name, said.limit.on_outage as u8));
            let outcome = match (said.decision.allowed, allowed) {
                (true, true) => 0,
                (false, _) => 1,
                (true, false) => 2,
            };
            count.or_default()[outcome] += 1;
        }
        if allowed {
            self.note(&said);
        }
        said
    }

    /// What was admitted by this node's shares is charged to the store when it is back. What was
    /// reserved is not.
    fn note(&mut self, said: &[Said<'a>]) {
        let charges = self.setup.fallback.is_some_and(|outages| outages.charges);
        let reserves = matches!(self.setup.mode, crate::setup::Mode::Reserving(_));
        if !charges || reserves {
            return;
        }
        let local = said.iter().filter(|said| said.limit.on_outage == OnOutage::Local);
        for said in local {
            let (limit, cost) = (said.limit, said.decision.cost);
            let same = |one: &&mut (&LimitSpec, Vec<String>, u64)| {
                one.0.name == limit.name && one.1 == said.whose
            };
            match self.pending.0.iter_mut().find(same) {
                Some(one) => one.2 += cost,
                None => self.pending.0.push((limit, said.whose.clone(), cost)),
            }
        }
    }

    /// The store has answered: it is charged what was admitted without it, as far as that still
    /// counts.
    pub(crate) fn recover(&mut self) -> Vec<(String, Vec<String>, u64)> {
        if !std::mem::take(&mut self.answered) {
            return Vec::new();
        }
        let (now, mut charged) = (self.now(), Vec::new());
        for (limit, whose, cost) in std::mem::take(&mut self.pending.0) {
            let share = self.algorithm(Keeper::Node, limit);
            let own: Key = (Keeper::Node, limit.name, whose.clone());
            let left = share.step(self.states.get(&own), now, 0).decision.remaining;
            let cost = cost.min(share.capacity() - left);
            let key = (Keeper::Store, limit.name, whose.clone());
            let (algorithm, state) = (limit.kind.algorithm(), self.states.get(&key));
            if let (1.., Some(step)) = (cost, algorithm.force(state, now, cost)) {
                let after = step.write.after(state).cloned();
                self.set(key, after);
                charged.push((limit.name.to_owned(), whose, cost));
            }
        }
        charged
    }
}
