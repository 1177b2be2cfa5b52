//! The linearizability checker explains a sound store's answers and nothing else. Deterministic schedules and
//! fabricated answers, not luck, prove that it catches wrong stores.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Clock, Decision, ErrorKind, Gcra, GcraState, Limit, ManualClock, Op,
    Reservation, States, Store, SyncStore, Timestamp, Verdict, Write, decide,
};
use ratelimit_testkit::{ConcurrentRun, Event, History, Linearized, Refused, Unexplained};

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

fn limits() -> [Limit<Gcra>; 1] {
    let gcra = Gcra::new("10/s".parse().expect("a rate"), 5).expect("a limit");
    [Limit::new("l", gcra).expect("a name")]
}

/// The flaw of a [`Store`] of these tests.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    /// Reads, waits until another request has read as well, and then writes.
    ReadsThenWrites,
    /// Drops every hundredth write.
    LosesOneInAHundred,
    /// Replaces every hundredth written state by the one written before.
    GoesBackOneInAHundred,
    /// Reports one unit too much in every hundredth decision.
    LiesOneInAHundred,
    /// Reads its clock once, and never again.
    StandsStill,
    /// Answers peeks from the previous answer.
    AnswersPeeksFromMemory,
    /// Charges only the first check of a batch.
    ChargesTheFirst,
}

/// A rendezvous of two threads, with a timeout because one of them may be the last.
#[derive(Default)]
struct Meeting {
    waiting: Mutex<bool>,
    met: Condvar,
}

impl Meeting {
    fn wait(&self) {
        let mut waiting = self.waiting.lock().expect("no thread panicked");
        if *waiting {
            *waiting = false;
            self.met.notify_one();
        } else {
            *waiting = true;
            let most = Duration::from_millis(50);
            let alone = self.met.wait_timeout_while(waiting, most, |waiting| *waiting);
            *alone.expect("no thread panicked").0 = false;
        }
    }
}

/// A map under a lock, with a flaw or none.
struct Mapped {
    flaw: Option<Flaw>,
    states: Mutex<HashMap<String, GcraState>>,
    before: Mutex<HashMap<String, GcraState>>,
    answers: Mutex<HashMap<String, Verdict>>,
    meeting: Meeting,
    calls: AtomicUsize,
    clock: ManualClock,
}

impl Mapped {
    fn new(flaw: Option<Flaw>, clock: &ManualClock) -> Self {
        Self {
            flaw,
            states: Mutex::default(),
            before: Mutex::default(),
            answers: Mutex::default(),
            meeting: Meeting::default(),
            calls: AtomicUsize::new(0),
            clock: clock.clone(),
        }
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    fn states(&self) -> MutexGuard<'_, HashMap<String, GcraState>> {
        self.states.lock().expect("no thread panicked")
    }

    fn now(&self) -> Timestamp {
        if self.is(Flaw::StandsStill) { BEGIN } else { self.clock.now() }
    }

    fn write(
        &self,
        states: &mut HashMap<String, GcraState>,
        key: String,
        write: &Write<GcraState>,
    ) {
        let state = match write {
            Write::Keep => return,
            Write::Remove => {
                states.remove(&key);
                return;
            }
            Write::Put { state, .. } => *state,
        };
        let hundredth = (self.calls.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(100);
        let mut before = self.before.lock().expect("no thread panicked");
        let previous = states.get(&key).copied();
        match self.flaw {
            Some(Flaw::LosesOneInAHundred) if hundredth => return,
            Some(Flaw::GoesBackOneInAHundred) if hundredth => {
                if let Some(old) = before.get(&key) {
                    states.insert(key, *old);
                }
                return;
            }
            _ => states.insert(key.clone(), state),
        };
        if let Some(previous) = previous {
            before.insert(key, previous);
        }
    }
}

/// The states read for a batch, and the writes to make.
struct Read {
    states: Vec<Option<GcraState>>,
    writes: Vec<(usize, Write<GcraState>)>,
}

impl States<GcraState> for Read {
    fn get(&self, position: usize) -> Option<&GcraState> {
        self.states[position].as_ref()
    }

    fn put(&mut self, position: usize, write: Write<GcraState>) {
        self.writes.push((position, write));
    }

    fn reservation(&self, _: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {}
}

impl SyncStore<Gcra> for Mapped {
    fn apply_now(&self, batch: &Batch<'_, Gcra>) -> Result<Verdict, Refused> {
        let keys: Vec<_> = batch.checks().iter().map(|check| check.key.to_owned()).collect();
        if self.is(Flaw::AnswersPeeksFromMemory) && batch.operation() == Op::Peek {
            let answers = self.answers.lock().expect("no thread panicked");
            if let Some(answer) = answers.get(&format!("{keys:?}")) {
                return Ok(answer.clone());
            }
        }
        let mut states = self.states();
        let read = keys.iter().map(|key| states.get(key).copied()).collect();
        if self.is(Flaw::ReadsThenWrites) {
            drop(states);
            self.meeting.wait();
            states = self.states();
        }
        let mut read = Read { states: read, writes: Vec::new() };
        let verdict = decide(batch, self.now(), &mut read).map_err(Refused)?;
        for (position, write) in read.writes {
            if position == 0 || !self.is(Flaw::ChargesTheFirst) {
                self.write(&mut states, keys[position].clone(), &write);
            }
        }
        let mut answers = self.answers.lock().expect("no thread panicked");
        if batch.operation() == Op::Peek || !answers.contains_key(&format!("{keys:?}")) {
            answers.insert(format!("{keys:?}"), verdict.clone());
        }
        drop((answers, states));
        if self.is(Flaw::LiesOneInAHundred)
            && self.calls.load(Ordering::Relaxed) % 100 == 50
            && verdict.decisions().len() == 1
        {
            let lie = Decision { remaining: verdict.remaining() + 1, ..*verdict.summary() };
            return Ok(Verdict::one(lie));
        }
        Ok(verdict)
    }
}

impl Store<Gcra> for Mapped {
    type Error = Refused;

    async fn apply(&self, batch: &Batch<'_, Gcra>) -> Result<Verdict, Refused> {
        self.apply_now(batch)
    }
}

fn linearizability(
    flaw: Option<Flaw>,
    scenario: &ConcurrentRun<'_, Gcra>,
) -> Result<Linearized, Unexplained> {
    let clock = ManualClock::new(BEGIN);
    scenario.run(&Mapped::new(flaw, &clock), &clock)
}

#[test]
fn histories_of_a_sound_store_with_two_to_eight_threads_are_explained() {
    let limits = limits();
    for threads in [1, 2, 4, 8] {
        for keys in [1, 3, 20] {
            let scenario = ConcurrentRun {
                threads,
                keys,
                reservations: false,
                rounds: 60,
                ..ConcurrentRun::new(&limits)
            };
            let seen = linearizability(None, &scenario).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(seen.requests, 600 * threads);
            // Where the operating system suspends threads in the midst of a call, nearly all of a history
            // overlaps, and its search may exceed the step limit. That may happen to a single history, but not
            // to many.
            assert!(seen.undecided * 20 <= scenario.rounds, "{seen:?}");
            assert!(seen.admitted > 100);
        }
    }
}

#[test]
fn a_read_then_write_race_is_caught() {
    let limits = limits();
    for threads in [2, 4, 8] {
        let base = ConcurrentRun::new(&limits);
        let scenario =
            ConcurrentRun { threads, keys: 1, reservations: false, rounds: 3, requests: 4, ..base };
        let caught = linearizability(Some(Flaw::ReadsThenWrites), &scenario);
        assert!(caught.is_err(), "{threads} threads: {caught:?}");
    }
}

#[test]
fn false_answers_and_lost_writes_are_caught_with_a_single_thread() {
    let limits = limits();
    let flaws = [
        Flaw::LosesOneInAHundred,
        Flaw::GoesBackOneInAHundred,
        Flaw::LiesOneInAHundred,
        Flaw::StandsStill,
        Flaw::AnswersPeeksFromMemory,
        Flaw::ChargesTheFirst,
    ];
    for flaw in flaws {
        for threads in [1, 4] {
            let scenario = ConcurrentRun {
                threads,
                reservations: false,
                rounds: 200,
                ..ConcurrentRun::new(&limits)
            };
            let caught = linearizability(Some(flaw), &scenario);
            let Err(caught) = caught else { panic!("{flaw:?} of {threads}: {caught:?}") };
            assert!(
                caught.message.contains("\n? ") || caught.message.starts_with("? "),
                "{caught}"
            );
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

fn explained(events: Vec<Event>) -> bool {
    let limits = limits();
    History { limits: &limits, events, times: vec![BEGIN] }.explain().is_ok_and(|decided| decided)
}

/// A request whose answer is unknown, because it was lost or the future was dropped.
fn lost(asked: u64) -> Event {
    Event { answer: Err(ErrorKind::Indeterminate), ..event(Op::Acquire, asked, asked + 1, 4) }
}

#[test]
fn a_request_without_an_answer_takes_effect_once_at_any_later_time_or_never() {
    let charge = |asked, remaining| event(Op::Acquire, asked, asked + 1, remaining);
    assert!(explained(vec![lost(0), charge(2, 4), charge(4, 3)]), "never");
    assert!(explained(vec![lost(0), charge(2, 3), charge(4, 2)]), "at once");
    assert!(
        explained(vec![lost(0), charge(2, 4), charge(4, 2)]),
        "after its caller stopped waiting"
    );
    assert!(!explained(vec![lost(0), charge(2, 3), charge(4, 1)]), "twice");
    assert!(!explained(vec![charge(0, 3), lost(2), charge(4, 2)]), "before it was asked");
    assert!(explained(vec![lost(0), lost(2), charge(4, 2), charge(6, 1)]));
}

#[test]
fn only_concurrent_requests_may_be_reordered() {
    let first = |asked, answered| event(Op::Acquire, asked, answered, 4);
    let second = |asked, answered| event(Op::Acquire, asked, answered, 3);
    assert!(explained(vec![first(0, 1), second(2, 3)]));
    assert!(explained(vec![second(0, 2), first(1, 3)]));
    assert!(!explained(vec![second(0, 1), first(2, 3)]));
    assert!(!explained(vec![first(0, 2), first(1, 3)]));
    // A peek may see the state before the charge until the charge has been answered.
    assert!(explained(vec![first(0, 3), event(Op::Peek, 1, 2, 5)]));
    assert!(explained(vec![first(0, 3), event(Op::Peek, 1, 2, 4)]));
    assert!(!explained(vec![first(0, 1), event(Op::Peek, 2, 3, 5)]));
}
