//! How wrong stores account for attempts.

use ratelimit_core::{Algorithm, LogEntry, Policy, PolicyState, Timestamp, Write};

/// A window that counts beyond its limit.
pub(super) fn overfilled(
    write: Write<PolicyState>,
    before: Option<&PolicyState>,
    cost: u64,
) -> Write<PolicyState> {
    match write.after(before).cloned() {
        Some(PolicyState::FixedWindow(mut window)) => {
            window.count += cost.min(9);
            Write::Put { state: PolicyState::FixedWindow(window), expires: Timestamp::MAX }
        }
        Some(PolicyState::FirstRequestWindow(mut window)) => {
            window.count += cost.min(9);
            Write::Put { state: PolicyState::FirstRequestWindow(window), expires: Timestamp::MAX }
        }
        _ => write,
    }
}

/// A refund to a window that has counted beyond its limit: it subtracts the cost, and the window may still be
/// above its limit.
pub(super) fn still_overfilled(
    write: Write<PolicyState>,
    before: Option<&PolicyState>,
    limit: u64,
    cost: u64,
) -> Write<PolicyState> {
    let state = match before.cloned() {
        Some(PolicyState::FixedWindow(mut window)) if window.count > limit => {
            window.count = window.count.saturating_sub(cost);
            PolicyState::FixedWindow(window)
        }
        Some(PolicyState::FirstRequestWindow(mut window)) if window.count > limit => {
            window.count = window.count.saturating_sub(cost);
            PolicyState::FirstRequestWindow(window)
        }
        _ => return write,
    };
    Write::Put { state, expires: Timestamp::MAX }
}

/// A state that includes a denied attempt.
pub(super) fn attempted(
    policy: &Policy,
    state: Option<&PolicyState>,
    now: Timestamp,
    cost: u64,
) -> Write<PolicyState> {
    if let (Policy::SlidingLog(log), Some(PolicyState::SlidingLog(state))) = (policy, state) {
        let mut state = state.clone();
        let timestamp = state.entries.last().map_or(now, |last| last.timestamp.max(now));
        match state.entries.last_mut() {
            Some(last) if last.timestamp == timestamp => last.cost += cost,
            _ => state.entries.push(LogEntry { timestamp, cost }),
        }
        let expires = timestamp.saturating_add_us(log.window_us());
        return Write::Put { state: PolicyState::SlidingLog(state), expires };
    }
    policy.force(state, now, cost).map_or(Write::Keep, |step| step.write)
}
