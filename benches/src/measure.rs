//! Times decisions: by thread CPU time for one thread, by wall time for several. Limiters take
//! turns, and medians over rounds summarise them.

use std::error::Error;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::keys::CallerKey;

/// The result of what fails with its reason, which the program prints.
pub(crate) type Fallible<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// The result of one limiter in one round.
#[derive(Clone, Copy)]
pub(crate) struct MeasuredRound {
    /// Nanoseconds per decision.
    pub(crate) ns: f64,
    /// The number of decisions that allowed.
    pub(crate) allowed: usize,
    /// The number of decisions.
    pub(crate) decisions: u32,
}

/// Decides the keys of each thread, `passes` times; `pass` returns how many of the given keys are
/// allowed. One thread is measured by its own CPU time, which a neighbour on a shared machine does
/// not lengthen. Several threads are measured by wall time, from the first begin to the last end,
/// over all decisions.
pub(crate) fn round(
    threads: &[Vec<CallerKey>],
    passes: u32,
    pass: impl Fn(&[CallerKey]) -> usize + Sync,
) -> MeasuredRound {
    let count = threads.iter().map(Vec::len).sum::<usize>();
    let decisions = u32::try_from(count).unwrap_or(u32::MAX).saturating_mul(passes);
    let all = |keys: &[CallerKey]| (0..passes).map(|_| pass(keys)).sum();
    let (taken, allowed) = match threads {
        [keys] => {
            let begin = thread_time();
            let allowed = all(keys);
            (thread_time().saturating_sub(begin), allowed)
        }
        _ => together(threads, all),
    };
    MeasuredRound { ns: taken.as_secs_f64() * 1e9 / f64::from(decisions), allowed, decisions }
}

fn together(
    threads: &[Vec<CallerKey>],
    all: impl Fn(&[CallerKey]) -> usize + Sync,
) -> (Duration, usize) {
    let barrier = Barrier::new(threads.len());
    let timed = |keys: &[CallerKey]| {
        barrier.wait();
        let begin = Instant::now();
        let allowed = all(keys);
        (begin, Instant::now(), allowed)
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = threads.iter().map(|keys| scope.spawn(|| timed(keys))).collect();
        let joined = handles.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.map(|result| result.unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    });
    let begin = results.iter().map(|(begin, ..)| *begin).min();
    let end = results.iter().map(|(_, end, _)| *end).max();
    let taken = begin.zip(end).map_or(Duration::ZERO, |(begin, end)| end - begin);
    (taken, results.iter().map(|(.., allowed)| allowed).sum())
}

/// The CPU time of this thread so far.
#[cfg(unix)]
pub(crate) fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Wall time, where the system does not report the CPU time of a thread.
#[cfg(not(unix))]
pub(crate) fn thread_time() -> Duration {
    static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed()
}

/// Every turn of every round, as round and way: in each round all ways take a turn, forwards and
/// backwards by turns. Round 0 warms up caches and connections, and [`Samples`] leave it out.
pub(crate) fn turns(rounds: usize, ways: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..=rounds).flat_map(move |round| {
        (0..ways).map(move |way| (round, if round % 2 == 0 { way } else { ways - 1 - way }))
    })
}

/// What was measured, by way and then by round.
pub(crate) struct Samples<T>(Vec<Vec<T>>);

impl<T> Samples<T> {
    pub(crate) fn new(ways: usize) -> Self {
        Self((0..ways).map(|_| Vec::new()).collect())
    }

    /// Keeps what a way made of its turn.
    pub(crate) fn add(&mut self, (round, way): (usize, usize), sample: T) {
        if round > 0 {
            self.0[way].push(sample);
        }
    }

    /// The median of a way.
    pub(crate) fn median(&self, way: usize, of: impl Fn(&T) -> f64) -> f64 {
        median(self.0[way].iter().map(of))
    }

    /// The least and the greatest of a way.
    pub(crate) fn range(&self, way: usize, of: impl Fn(&T) -> f64) -> [f64; 2] {
        let (least, greatest) = (f64::INFINITY, f64::NEG_INFINITY);
        let values = self.0[way].iter().map(of);
        values.fold([least, greatest], |[least, greatest], n| [least.min(n), greatest.max(n)])
    }

    /// One way's number over another's of the same round, as a median over rounds.
    pub(crate) fn ratio(&self, over: usize, under: usize, of: impl Fn(&T) -> f64) -> f64 {
        median(self.0[over].iter().zip(&self.0[under]).map(|(over, under)| of(over) / of(under)))
    }
}

/// The median; of an even number of values, the upper of the two in the middle.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_compares_turns_of_the_same_round() {
        // The second takes twice as long as the first in each round, however slow the machine is in
        // it.
        let mut samples = Samples::new(2);
        for (round, way) in turns(3, 2) {
            samples.add((round, way), [100.0, 1.0, 30.0, 2.0][round] * [1.0, 2.0][way]);
        }
        let ratio = |over, under| samples.ratio(over, under, |sample| *sample).to_string();
        assert_eq!((ratio(1, 0), ratio(0, 1)), ("2".to_owned(), "0.5".to_owned()));
        assert_eq!(samples.median(1, |sample| *sample).to_string(), "4");
        assert_eq!(samples.range(0, |sample| *sample).map(|end| end.to_string()), ["1", "30"]);
        assert!(median([]).is_nan());
    }
}
