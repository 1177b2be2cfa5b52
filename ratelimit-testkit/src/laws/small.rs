//! Law 10 on small cases, enumerated exhaustively.

use ratelimit_core::{Batch, Limit, Op, Policy, Timestamp, Verdict};

use crate::capability::{Able, Capability};
use crate::harness::Harness;
use crate::law::Violation;
use crate::laws::agreement::agree;
use crate::laws::{Kept, Subject, checks};
use crate::oracle::NaiveStore;
use crate::pure::PureStore;
use crate::seeds::limit;
use crate::trace::{Ask, Request, Scope, Trace};

/// Law 10, enumerated instead of sampled. Every trace of this many requests, at every time of a few
/// microseconds in any order, at every cost from 0 to one above the capacity, on every limit up to 3, gets the
/// answers of the oracle and the pure step.
///
/// # Errors
/// How the store breaks the law.
pub async fn every_small_trace_agrees_with_the_oracle<H: Harness>(
    subject: &Subject<'_, H>,
    scope: Scope,
) -> Kept {
    let mut number = 0;
    for policy in scope.tiny().into_iter().filter(|tiny| subject.able().can_keep(tiny)) {
        let limits = [limit("tiny", policy)];
        let full = H::SMALL_TRACE_REQUESTS;
        // Shorter traces use every operation, longer ones only charges.
        let alphabets = [(everything::<H>(&limits[0]), full - 1), (charges(&limits[0]), full)];
        for (alphabet, length) in alphabets {
            let mut walk = Walk { subject, limits: &limits, alphabet, number, path: Vec::new() };
            walk.from(&NaiveStore::new(), &PureStore::new(), length).await?;
            number = walk.number;
        }
    }
    Ok(())
}

/// The times of small traces: on both sides of the boundaries of windows of 2 and 3 µs.
const AT_US: [u64; 4] = [6, 7, 8, 11];

type Letter = (u64, Op, u64);

fn everything<H: Harness>(limit: &Limit<Policy>) -> Vec<Letter> {
    let capacity = crate::trace::capacity(limit);
    let acquires = (0..=capacity + 1).map(|cost| (Op::Acquire, cost));
    let others = [(Op::Refund, 1), (Op::Force, 2), (Op::Reset, 0)];
    let able = Able::of::<Policy, H>();
    let ops: Vec<_> =
        acquires.chain(others.into_iter().filter(|(op, _)| able.can_do(*op))).collect();
    let at = AT_US.iter().skip(1);
    at.flat_map(|at| ops.iter().map(move |(op, cost)| (*at, *op, *cost))).collect()
}

fn charges(limit: &Limit<Policy>) -> Vec<Letter> {
    let capacity = crate::trace::capacity(limit);
    let costs = 1..=capacity.min(2);
    AT_US.iter().flat_map(|at| costs.clone().map(move |cost| (*at, Op::Acquire, cost))).collect()
}

/// A walk over all traces of one length. The oracle and the pure step follow it request by request; the store
/// replays each whole trace on a key of its own.
struct Walk<'a, H: Harness> {
    subject: &'a Subject<'a, H>,
    limits: &'a [Limit<Policy>],
    alphabet: Vec<Letter>,
    number: u64,
    path: Vec<(Letter, Verdict)>,
}

impl<H: Harness> Walk<'_, H> {
    async fn from(&mut self, oracle: &NaiveStore, pure: &PureStore, length: u32) -> Kept {
        if length == 0 {
            return self.take_the_store(pure).await;
        }
        let last_us = self.path.last().map_or(0, |((at_us, ..), _)| *at_us);
        for letter in self.alphabet.clone() {
            if letter.0 < last_us && !self.subject.able().can(Capability::PastTimes) {
                continue;
            }
            let (oracle, pure) = (oracle.clone(), pure.clone());
            let due = decided(self.subject, self.limits, letter, |batch| oracle.decide(batch));
            let stepped = decided(self.subject, self.limits, letter, |batch| {
                pure.decide(batch).expect("every built-in has every operation")
            });
            self.path.push((letter, due));
            let (letter, due) = &self.path[self.path.len() - 1];
            agree(self.subject, &request(*letter, ""), &stepped, due, "the oracle")
                .map_err(|violation| self.with_path(violation))?;
            Box::pin(self.from(&oracle, &pure, length - 1)).await?;
            self.path.pop();
        }
        Ok(())
    }

    async fn take_the_store(&mut self, pure: &PureStore) -> Kept {
        self.number += 1;
        let key = self.number.to_string();
        for (letter, due) in &self.path {
            let request = request(*letter, &key);
            let got = self.subject.ask(self.limits, &request).await?;
            agree(self.subject, &request, &got, due, "the oracle")
                .map_err(|violation| self.with_path(violation))?;
        }
        if self.subject.able().can(Capability::States) {
            let got = self.subject.state(&self.limits[0], &key).await;
            let due = pure.state(&self.limits[0], "");
            self.subject
                .ensure(got == due, || format!("the state is {got:?} and should be {due:?}"))
                .map_err(|violation| self.with_path(violation))?;
        }
        Ok(())
    }

    fn with_path(&self, mut violation: Violation) -> Violation {
        let requests = self.path.iter().map(|(letter, _)| request(*letter, "a")).collect();
        let trace = Trace { limits: self.limits.to_vec(), requests };
        violation.message.push_str("\non the trace\n");
        violation.message.push_str(&trace.to_string());
        violation
    }
}

fn request((at_us, op, cost): Letter, key: &str) -> Request {
    let asks = vec![Ask { limit: 0, key: key.to_owned(), cost }];
    Request { at: Timestamp::saturating_from_us(at_us), op, asks, id: None }
}

fn decided<H: Harness>(
    subject: &Subject<'_, H>,
    limits: &[Limit<Policy>],
    letter: Letter,
    decide: impl FnOnce(&Batch<'_, Policy>) -> Verdict,
) -> Verdict {
    let request = request(letter, "");
    let (checks, metadata) = (checks(limits, &request.asks), subject.metadata(&request));
    decide(&request.batch(&checks, &metadata).expect("a single check"))
}
