//! The linearizability checker explains a sound store's answers and nothing else. Deterministic
//! schedules and fabricated answers, not luck, prove that it catches wrong stores.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Now, Op};
use ratelimit_core::{
    Algorithm, Clock, Decision, ErrorKind, Gcra, Limit, ManualClock, Record, Refusal, Store,
    SyncStore, Timestamp, Verdict,
};
use ratelimit_testkit::{
    ConcurrentRun, Event, History, Linearized, PureStore, RecordChange, Unexplained,
};

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

fn limits() -> [Limit<Gcra>; 1] {
    let gcra = Gcra::new("10/s".parse().expect("a rate"), 5).expect("a limit");
    [Limit::new("l", gcra).expect("a name")]
}

/// The flaw of a [`Store`] of these tests.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    /// Drops every hundredth write.
    LosesOneInAHundred,
    /// Reports one unit too much in every hundredth decision.
    LiesOneInAHundred,
    /// Reads its clock once, and never again.
    StandsStill,
    /// Answers peeks from the previous answer.
    AnswersPeeksFromMemory,
    /// Charges only the first check of a batch.
    ChargesTheFirst,
}

/// A map under a lock, with a flaw or none.
#[derive(Default)]
struct Mapped {
    flaw: Option<Flaw>,
    store: Mutex<PureStore<Gcra>>,
    answers: Mutex<HashMap<String, Verdict>>,
    calls: AtomicUsize,
    clock: ManualClock,
}

impl SyncStore<Gcra> for Mapped {
    fn apply_now(&self, batch: &Batch<'_, Gcra>) -> Result<Verdict, Refusal> {
        let is = |flaw| self.flaw == Some(flaw);
        let now = if is(Flaw::StandsStill) { BEGIN } else { self.clock.now() };
        let batch = batch.now(Now::At(now));
        let peeks = batch.operation() == Op::Peek;
        let keys: Vec<_> = batch.checks().iter().map(|check| check.key).collect();
        let mut answers = self.answers.lock().expect("no thread panicked");
        if let (true, Some(answer)) =
            (peeks && is(Flaw::AnswersPeeksFromMemory), answers.get(&keys.join(",")))
        {
            return Ok(answer.clone());
        }
        let mut store = self.store.lock().expect("no thread panicked");
        let call = self.calls.fetch_add(usize::from(!peeks), Ordering::Relaxed) + 1;
        let hundredth = !peeks && call.is_multiple_of(100);
        let before = store.clone();
        let verdict = store.decide(&batch)?;
        match self.flaw {
            Some(Flaw::LosesOneInAHundred) if hundredth => *store = before,
            Some(Flaw::ChargesTheFirst) if keys.len() > 1 => {
                *store = before;
                let first = Batch::one(&batch.checks()[0]).op(batch.operation());
                if verdict.allowed() {
                    let _ = store.decide(&first.now(Now::At(now)));
                }
            }
            _ => {}
        }
        answers.insert(keys.join(","), verdict.clone());
        if is(Flaw::LiesOneInAHundred) && call % 100 == 50 && keys.len() == 1 {
            let lie = Decision { remaining: verdict.remaining() + 1, ..*verdict.summary() };
            return Ok(Verdict::one(lie));
        }
        Ok(verdict)
    }
}

impl Store<Gcra> for Mapped {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, Gcra>) -> Result<Verdict, Refusal> {
        self.apply_now(batch)
    }
}

/// A run without reservations.
fn plain(limits: &[Limit<Gcra>]) -> ConcurrentRun<'_, Gcra> {
    ConcurrentRun { reservations: false, ..ConcurrentRun::new(limits) }
}

fn linearizability(
    flaw: Option<Flaw>,
    scenario: &ConcurrentRun<'_, Gcra>,
) -> Result<Linearized, Unexplained> {
    let clock = ManualClock::new(BEGIN);
    scenario.run(&Mapped { flaw, clock: clock.clone(), ..Mapped::default() }, &clock)
}

#[test]
fn histories_of_a_sound_store_with_two_to_eight_threads_are_explained() {
    let limits = limits();
    for threads in [1, 2, 4, 8] {
        for keys in [1, 3, 20] {
            let scenario = ConcurrentRun { threads, keys, rounds: 60, ..plain(&limits) };
            let seen = linearizability(None, &scenario).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(seen.requests, 600 * threads);
            // Where the operating system suspends threads in the midst of a call, nearly all of a
            // history overlaps, and its search may exceed the step limit. That may happen to a
            // single history, but not to many.
            assert!(seen.undecided * 20 <= scenario.rounds, "{seen:?}");
            assert!(seen.admitted > 100);
        }
    }
}

#[test]
fn false_answers_and_lost_writes_are_caught_with_a_single_thread() {
    let limits = limits();
    let flaws = [
        Flaw::LosesOneInAHundred,
        Flaw::LiesOneInAHundred,
        Flaw::StandsStill,
        Flaw::AnswersPeeksFromMemory,
        Flaw::ChargesTheFirst,
    ];
    for flaw in flaws {
        for threads in [1, 4] {
            let caught = linearizability(Some(flaw), &ConcurrentRun { threads, ..plain(&limits) });
            let Err(caught) = caught else { panic!("{flaw:?} of {threads}: {caught:?}") };
            assert!(caught.message.lines().any(|line| line.starts_with("? ")), "{caught}");
        }
    }
}

/// A request of cost 1 for the one key, and its answer.
fn event(op: Op, asked: u64, answered: u64, remaining: u64) -> Event {
    let limits = limits();
    let gcra = limits[0].algorithm();
    let used = 5 - remaining - u64::from(op == Op::Acquire);
    let mut state = None;
    if let Write::Put { state: after, .. } = gcra.step(None, BEGIN, used).write {
        state = Some(after);
    }
    let decision = gcra.step(state.as_ref(), BEGIN, 1).decision;
    let asks = vec![(0, 0, 1)];
    Event { op, asks, id: None, asked, answered, clock: [BEGIN; 2], answer: Ok(vec![decision]) }
}

fn is_linearizable(events: Vec<Event>) -> bool {
    let limits = limits();
    History { limits: &limits, events, times: vec![BEGIN] }.explain().is_ok_and(|decided| decided)
}

/// A request whose answer is unknown, because it was lost or the future was dropped.
fn lost_request(asked: u64) -> Event {
    Event { answer: Err(ErrorKind::Indeterminate), ..event(Op::Acquire, asked, asked + 1, 4) }
}

#[test]
fn a_request_without_an_answer_takes_effect_once_at_any_later_time_or_never() {
    let charge = |asked, remaining| event(Op::Acquire, asked, asked + 1, remaining);
    assert!(is_linearizable(vec![lost_request(0), charge(2, 4), charge(4, 3)]), "never");
    assert!(is_linearizable(vec![lost_request(0), charge(2, 3), charge(4, 2)]), "at once");
    assert!(
        is_linearizable(vec![lost_request(0), charge(2, 4), charge(4, 2)]),
        "after its caller stopped waiting"
    );
    assert!(!is_linearizable(vec![lost_request(0), charge(2, 3), charge(4, 1)]), "twice");
    assert!(
        !is_linearizable(vec![charge(0, 3), lost_request(2), charge(4, 2)]),
        "before it was asked"
    );
    assert!(is_linearizable(vec![lost_request(0), lost_request(2), charge(4, 2), charge(6, 1)]));
}

#[test]
fn only_concurrent_requests_may_be_reordered() {
    let first = |asked, answered| event(Op::Acquire, asked, answered, 4);
    let second = |asked, answered| event(Op::Acquire, asked, answered, 3);
    assert!(is_linearizable(vec![first(0, 1), second(2, 3)]));
    assert!(is_linearizable(vec![second(0, 2), first(1, 3)]));
    assert!(!is_linearizable(vec![second(0, 1), first(2, 3)]));
    // Both have read before either wrote.
    assert!(!is_linearizable(vec![first(0, 2), first(1, 3)]));
    // A peek may see the state before the charge until the charge has been answered.
    assert!(is_linearizable(vec![first(0, 3), event(Op::Peek, 1, 2, 5)]));
    assert!(is_linearizable(vec![first(0, 3), event(Op::Peek, 1, 2, 4)]));
    assert!(!is_linearizable(vec![first(0, 1), event(Op::Peek, 2, 3, 5)]));
}

/// A change of the record, which blocks the caller, or of none.
fn change(asked: u64, answered: u64, blocks: bool) -> RecordChange {
    let (before, after) = if blocks { (None, Some(0)) } else { (Some(0), None) };
    let clock = [BEGIN; 2];
    RecordChange { limit: 0, key: 0, before, after, asked, answered, clock, is_done: true }
}

fn has_order(events: Vec<Event>, changes: &[RecordChange]) -> bool {
    let limits = limits().map(Limit::overridable);
    let history = History { limits: &limits, events, times: vec![BEGIN] };
    let records = [Record::blocked().forever()];
    history.explain_with_records(&records, changes, 1_000).is_ok_and(|decided| decided)
}

#[test]
fn a_request_is_decided_by_a_record_that_stands_where_it_comes_in_the_order() {
    let charge = |asked, answered| event(Op::Acquire, asked, answered, 4);
    assert!(has_order(vec![charge(0, 1)], &[change(2, 3, true)]));
    assert!(!has_order(vec![charge(2, 3)], &[change(0, 1, true)]), "after it was blocked");
    assert!(has_order(vec![charge(0, 3)], &[change(1, 2, true)]), "before it was blocked");
    assert!(has_order(vec![charge(4, 5)], &[change(0, 1, true), change(2, 3, false)]));
    // Of two that saw no record, one was told so.
    assert!(!has_order(Vec::new(), &[change(0, 2, true), change(1, 3, true)]));
    let late = RecordChange { is_done: false, ..change(1, 3, true) };
    assert!(has_order(Vec::new(), &[change(0, 2, true), late.clone()]));
    assert!(!has_order(Vec::new(), &[late]), "nothing was in its place");
}

/// The request read that there is no record, and took the lock of the state after the change. A
/// peek in between has seen the record, and nothing charged.
#[test]
fn a_record_that_was_read_before_the_lock_of_the_state_is_caught() {
    let limits = limits().map(Limit::overridable);
    let raised = Gcra::new("10/s".parse().expect("a rate"), 9).expect("numbers");
    let records = [Record::numbers(raised).forever()];
    for (charged, is_explained) in [(1, true), (0, false)] {
        let charge = limits[0].algorithm().step(None, BEGIN, charged).write;
        let seen = raised.step(charge.after(None), BEGIN, 1).decision;
        let peek = Event { answer: Ok(vec![seen]), ..event(Op::Peek, 3, 4, 5) };
        let events = vec![event(Op::Acquire, 0, 5, 4), peek];
        let history = History { limits: &limits, events, times: vec![BEGIN] };
        let explained = history.explain_with_records(&records, &[change(1, 2, true)], 1_000);
        assert_eq!(explained.is_ok(), is_explained, "{charged}: {explained:?}");
    }
}
