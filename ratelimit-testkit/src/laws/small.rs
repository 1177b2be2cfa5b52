//! Law 10 on small cases, enumerated exhaustively.

use ratelimit_core::store::{Now, Op};
use ratelimit_core::{Algorithm, AnyAlgorithm, Limit, Timestamp};

use crate::capability::{Able, Capability};
use crate::law::{LawResult, ensure};
use crate::laws::Subject;
use crate::laws::agreement::agrees_on;
use crate::pure::PureStore;
use crate::seeds::Scope;
use crate::trace::made::limit;
use crate::trace::{Ask, Trace, TraceRequest};

/// Law 10, enumerated instead of sampled. Every trace of this many requests, at every time of a few
/// microseconds in any order, at every cost from 0 to one above the capacity, on every limit up to
/// 3, gets the answers of the pure step.
pub(crate) async fn every_small_trace_agrees(
    subject: &Subject<'_, AnyAlgorithm>,
    scope: Scope,
    full: u32,
) -> LawResult {
    let mut number = 0;
    for instance in scope.tiny(subject.able) {
        let (texts, limits) = (vec![instance.text.clone()], [limit("tiny", instance)]);
        // Shorter traces use every operation, longer ones only charges.
        let alphabets =
            [(everything(subject.able, &limits[0]), full - 1), (charges(&limits[0]), full)];
        for (alphabet, length) in alphabets {
            let mut walk = TraceWalk {
                subject,
                limits: &limits,
                texts: &texts,
                alphabet,
                number,
                path: Vec::new(),
            };
            walk.on(length).await?;
            number = walk.number;
        }
    }
    Ok(())
}

/// The times of small traces: on both sides of the boundaries of windows of 2 and 3 µs.
const AT_US: [u64; 4] = [6, 7, 8, 11];

type Letter = (u64, Op, u64);

fn everything(able: Able, limit: &Limit<AnyAlgorithm>) -> Vec<Letter> {
    let capacity = limit.algorithm().capacity();
    let acquires = (0..=capacity + 1).map(|cost| (Op::Acquire, cost));
    let others = [(Op::Refund, 1), (Op::Force, 2), (Op::Reset, 0)];
    let ops: Vec<_> =
        acquires.chain(others.into_iter().filter(|(op, _)| able.can_do(*op))).collect();
    let at = AT_US.iter().skip(1);
    at.flat_map(|at| ops.iter().map(move |(op, cost)| (*at, *op, *cost))).collect()
}

fn charges(limit: &Limit<AnyAlgorithm>) -> Vec<Letter> {
    let capacity = limit.algorithm().capacity();
    let costs = 1..=capacity.min(2);
    AT_US.iter().flat_map(|at| costs.clone().map(move |cost| (*at, Op::Acquire, cost))).collect()
}

/// A walk over all traces of one length. The store and the pure step take each whole trace on a key
/// of its own.
struct TraceWalk<'a> {
    subject: &'a Subject<'a, AnyAlgorithm>,
    limits: &'a [Limit<AnyAlgorithm>],
    texts: &'a [String],
    alphabet: Vec<Letter>,
    number: u64,
    path: Vec<Letter>,
}

impl TraceWalk<'_> {
    async fn on(&mut self, length: u32) -> LawResult {
        if length == 0 {
            return self.take().await.map_err(|message| self.with_path(&message));
        }
        let last_us = self.path.last().map_or(0, |(at_us, ..)| *at_us);
        for letter in self.alphabet.clone() {
            if letter.0 >= last_us || self.subject.able.can(Capability::PastTimes) {
                self.path.push(letter);
                Box::pin(self.on(length - 1)).await?;
                self.path.pop();
            }
        }
        Ok(())
    }

    async fn take(&mut self) -> LawResult {
        self.number += 1;
        let (pure, key) = (PureStore::new(), self.number.to_string());
        for (position, letter) in self.path.iter().enumerate() {
            let request = request(*letter, &key);
            if position + 1 == self.path.len() {
                return agrees_on(self.subject, &pure, self.limits, &request, Now::At(request.at))
                    .await;
            }
            // Every beginning is a trace of its own.
            let got = self.subject.answer(self.limits, &request, Now::At(request.at)).await?;
            let due = self.subject.expected_answer(&pure, self.limits, &request);
            ensure(got == due, || format!("{request:?} got {got:?}; the pure step says {due:?}"))?;
        }
        Ok(())
    }

    fn with_path(&self, message: &str) -> String {
        let requests = self.path.iter().map(|letter| request(*letter, "a")).collect();
        let (limits, texts) = (self.limits.to_vec(), self.texts.to_vec());
        let trace = Trace { limits, texts, requests };
        format!("{message}\non the trace\n{trace}")
    }
}

fn request((at_us, op, cost): Letter, key: &str) -> TraceRequest {
    let ask = Ask { limit: 0, key: key.to_owned(), cost };
    TraceRequest::one(Timestamp::saturating_from_us(at_us), op, ask)
}
