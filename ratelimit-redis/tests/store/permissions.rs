//! A permission that is missing for a while: no key is left without a time to live, and what was
//! refused charged nothing.

use crate::common::prelude::*;

/// More than any key lives.
const FOREVER_MS: u128 = 1 << 50;

/// A server whose user may do anything, for now.
struct Permitting {
    server: RedisServer,
    store: RedisStore,
}

impl Permitting {
    async fn start() -> Self {
        let server = server();
        let url = login(std::slice::from_ref(&server), &server.url(), "~* +@all");
        let store = RedisStore::builder().deadline(PATIENCE).connect(&url).await;
        Self { store: store.expect("it is up"), server }
    }

    fn set(&self, right: &str) {
        tell(&self.server, &["ACL", "SETUSER", "limiter", right]);
    }

    /// Every key has a time to live.
    #[track_caller]
    fn leaks_nothing(&self, when: &str) {
        assert_eq!(outliving(&self.server, "rl", FOREVER_MS), [""; 0], "{when}");
    }
}

/// The operations of a mode, with an id or without one.
fn operations(mode: &str) -> &'static [(Op, Option<u128>)] {
    let all = &[
        (Op::Acquire, None),
        (Op::Acquire, Some(7)),
        (Op::Force, None),
        (Op::Force, Some(8)),
        (Op::Adopt, None),
    ];
    if mode == Multi::NAME { &all[..1] } else { all }
}

#[tokio::test]
async fn a_permission_that_is_missing_for_a_while_leaves_no_key_for_ever_in_any_mode() {
    for command in ["pexpire", "pttl"] {
        let on = Permitting::start().await;
        for (mode, store) in in_every_mode(&on.store) {
            let limits = if mode == Multi::NAME { native(9) } else { every(9) };
            // A transaction that is late by the store's clock would be in doubt.
            let now = if mode == Multi::NAME { at(now_us()) } else { Now::Store };
            let left = async |limit, key| {
                let verdict = apply_at(&store, &[(limit, key, 1)], Op::Acquire, None, now).await;
                verdict.expect("decided").remaining()
            };
            for limit in &limits {
                let case = format!("{mode} without {command}: {}", limit.name());
                assert_eq!(left(limit, "old").await, 8, "{case}");
                on.set(&format!("-{command}"));
                let mut used = [1, 0];
                for (key, used) in ["old", "new"].into_iter().zip(&mut used) {
                    for (op, id) in operations(mode) {
                        // Adopting leaves as much as it says.
                        let cost = if *op == Op::Adopt { 9 - *used } else { 1 };
                        match apply_at(&store, &[(limit, key, cost)], *op, *id, now).await {
                            Ok(_) => *used += u64::from(*op != Op::Adopt),
                            // Some algorithms have no reservations.
                            Err(error) if error.kind() == ErrorKind::Unsupported => {}
                            Err(error) => {
                                let said = error.to_string();
                                assert_eq!(error.kind(), ErrorKind::Config, "{case}: {said}");
                                assert!(said.contains("ACL SETUSER"), "{case}: {said}");
                            }
                        }
                        on.leaks_nothing(&case);
                    }
                }
                on.set(&format!("+{command}"));
                for (key, used) in ["old", "new"].into_iter().zip(used) {
                    assert_eq!(peek(&store, limit, key).await, 9 - used, "{case}: {key}");
                    assert_eq!(left(limit, key).await, 8 - used, "{case}: {key}");
                }
            }
            on.leaks_nothing(mode);
        }
    }
}

/// What a state says of its key's life is true: the next charge makes up for what was refused.
#[tokio::test]
async fn a_key_lives_as_long_as_its_state_after_a_permission_was_missing() {
    let on = Permitting::start().await;
    let limits: Vec<_> = ["gcra", "first-request-window", "sliding-log"]
        .map(|name| limit(name, &format!("{name} 9/h")))
        .into();
    for limit in &limits {
        for (key, op) in [("flat", Op::Acquire), ("driver", Op::Force)] {
            let case = format!("{} {key}", limit.name());
            let checks = [(limit, key, 1)];
            on.set("-pexpire");
            let refused = apply(&on.store, &checks, op, None).await;
            fails(refused, ErrorKind::Config, "ACL SETUSER");
            on.set("+pexpire");
            let state = apply_admitted(&on.store, &checks, op, None).await;
            let life_ms = number(&on.server, &["PTTL", &on.store.key(limit, key)]);
            let least_ms = state.reset_after().as_millis() - 2_000;
            assert!(
                i128::from(life_ms) >= least_ms.try_into().expect("hours"),
                "{case}: {life_ms}"
            );
        }
    }
}

/// Neither of two keys of a request is written if one of them cannot be given a time to live.
#[tokio::test]
async fn a_request_for_two_keys_is_charged_for_both_or_for_none() {
    let on = Permitting::start().await;
    let (ip, user) = (limit("ip", "gcra 9/h"), limit("user", "fixed-window 9/3650d"));
    // The first key lives for long enough already.
    let _ = apply_admitted(&on.store, &[(&user, "user", 1)], Op::Acquire, None).await;
    on.set("-pexpire");
    for id in [None, Some(7)] {
        let both = [(&user, "user", 1), (&ip, "ip", 1)];
        fails(apply(&on.store, &both, Op::Acquire, id).await, ErrorKind::Config, "ACL SETUSER");
    }
    on.set("+pexpire");
    assert_eq!(peek(&on.store, &user, "user").await, 8);
    assert_eq!(peek(&on.store, &ip, "ip").await, 9);
}
