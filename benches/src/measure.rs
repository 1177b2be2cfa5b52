//! Times decisions: by thread CPU time for one thread, by wall time for several. Summarises rounds by medians.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::keys::Key;

/// The result of one limiter in one round.
#[derive(Clone, Copy)]
pub(crate) struct Round {
    /// Nanoseconds per decision.
    pub(crate) ns: f64,
    /// The number of decisions that allowed.
    pub(crate) allowed: usize,
    /// The number of decisions.
    pub(crate) decisions: u32,
}

/// Decides the keys of each thread, `passes` times; `pass` returns how many of the given keys are allowed. One thread
/// is measured by its own CPU time, which a neighbour on a shared machine does not lengthen. Several threads are
/// measured by wall time, from the first begin to the last end, over all decisions.
pub(crate) fn round(
    threads: &[Vec<Key>],
    passes: u32,
    pass: impl Fn(&[Key]) -> usize + Sync,
) -> Round {
    let count = threads.iter().map(Vec::len).sum::<usize>();
    let decisions = u32::try_from(count).unwrap_or(u32::MAX).saturating_mul(passes);
    let all = |keys: &[Key]| (0..passes).map(|_| pass(keys)).sum();
    let (taken, allowed) = match threads {
        [keys] => {
            let begin = thread_time();
            let allowed = all(keys);
            (thread_time().saturating_sub(begin), allowed)
        }
        _ => together(threads, all),
    };
    Round { ns: taken.as_secs_f64() * 1e9 / f64::from(decisions), allowed, decisions }
}

fn together(threads: &[Vec<Key>], all: impl Fn(&[Key]) -> usize + Sync) -> (Duration, usize) {
    let barrier = Barrier::new(threads.len());
    let timed = |keys: &[Key]| {
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

/// Nanoseconds per decision, by round and then by limiter.
pub(crate) struct Samples(pub(crate) Vec<Vec<f64>>);

impl Samples {
    /// The median of the limiter at this turn.
    pub(crate) fn ns(&self, turn: usize) -> f64 {
        median(self.0.iter().map(|round| round[turn]))
    }

    /// The peer's time over ours in the same round, as a median over rounds: above 1, ratelimit is faster.
    pub(crate) fn ratio(&self, ours: usize, peer: usize) -> f64 {
        median(self.0.iter().map(|round| round[peer] / round[ours]))
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

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < f64::EPSILON
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert!(near(median([3.0, 1.0, 2.0]), 2.0));
        assert!(median([]).is_nan());
    }

    #[test]
    fn a_ratio_compares_times_of_the_same_round() {
        // The second is twice the first in each round, however slow the machine was in it.
        let samples = Samples(vec![vec![1.0, 2.0], vec![30.0, 60.0], vec![2.0, 4.0]]);
        assert!(near(samples.ratio(0, 1), 2.0) && near(samples.ratio(1, 0), 0.5));
        assert!(near(samples.ns(0), 2.0) && near(samples.ns(1), 4.0));
    }

    #[test]
    fn every_key_of_every_thread_is_checked_in_every_pass() {
        let keys = |range: std::ops::Range<usize>| range.map(Key::new).collect::<Vec<_>>();
        for threads in [vec![keys(0..4)], vec![keys(0..4), keys(4..10)]] {
            let expected: usize = threads.iter().map(Vec::len).sum();
            let round = round(&threads, 3, <[Key]>::len);
            assert_eq!((round.allowed, round.decisions as usize), (3 * expected, 3 * expected));
        }
    }
}
