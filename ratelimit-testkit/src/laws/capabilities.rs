//! Law 10 for the capabilities that a harness claims.

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Now, Op};
use ratelimit_core::{AnyAlgorithm, ErrorKind, Limit, ReservationId, Timestamp};

use crate::capability::Capability;
use crate::law::{LawResult, ensure};
use crate::laws::{Said, Subject};
use crate::seeds::{Scope, rate};
use crate::trace::made::limit;
use crate::trace::{Ask, TraceRequest};

const AT: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_457);
const ID: ReservationId = ReservationId::new(10);

/// Law 10: the store supports, on limits of this scope, everything that its harness does not list
/// as lacking. It refuses the rest as unsupported, where a refusal can be observed.
pub(crate) async fn it_can_do_what_it_claims(
    subject: &Subject<'_, AnyAlgorithm>,
    scope: Scope,
) -> LawResult {
    let rate = rate(3, 3_600_000_000);
    let instances = scope.at_rate(rate, 3).into_iter().chain(scope.by_calendar());
    for (n, instance) in instances.enumerate() {
        let limits = ["l", "m"].map(|name| limit(&format!("{name}{n}"), instance.clone()));
        let claims = Claims { subject, limits: &limits, text: &instance.text };
        if let Some(lacking) = subject.able.lacks(Capability::needed_by(&instance)) {
            claims
                .check_refused(lacking, &TraceRequest { asks: vec![ask(0, "a")], ..acquire(None) })
                .await?;
            continue;
        }
        claims.made_good().await?;
    }
    Ok(())
}

fn ask(limit: usize, key: &str) -> Ask {
    Ask { limit, key: key.to_owned(), cost: 1 }
}

fn acquire(id: Option<ReservationId>) -> TraceRequest {
    TraceRequest { at: AT, op: Op::Acquire, asks: vec![ask(0, "a")], id }
}

struct Claims<'a> {
    subject: &'a Subject<'a, AnyAlgorithm>,
    limits: &'a [Limit<AnyAlgorithm>],
    text: &'a str,
}

impl Claims<'_> {
    async fn made_good(&self) -> LawResult {
        let limit = &self.limits[0];
        self.check_decided(&acquire(None)).await?;
        if self.subject.able.can(Capability::States) {
            let state = self.subject.store.state(limit, "a").await;
            ensure(state.is_some(), || {
                format!(
                    "1 of \"a\" was charged to {}, and `Harness::state` tells no state: is it one that lacks {:?}?",
                    self.text,
                    Capability::States
                )
            })?;
            self.keeps_metadata(state)?;
        }
        for op in [Op::Refund, Op::Force, Op::Reset] {
            let needed = Capability::for_op(op);
            self.check_capability(needed, &TraceRequest { op, ..acquire(None) }).await?;
        }
        let both = TraceRequest { asks: vec![ask(0, "b"), ask(1, "b")], ..acquire(None) };
        self.check_capability(Some(Capability::Batches), &both).await?;
        if self.subject.able.can(Capability::Batches) {
            let keys = TraceRequest { asks: vec![ask(0, "c"), ask(0, "d")], ..acquire(None) };
            self.check_capability(Some(Capability::SeveralKeys), &keys).await?;
        }
        if self.subject.able.can(Capability::PastTimes) {
            let past = Timestamp::saturating_from_us(AT.as_us() - 1);
            self.check_decided(&TraceRequest { at: past, ..acquire(None) }).await?;
        }
        self.reservations().await
    }

    /// Reserves, renews and settles, if the limit's charges can be reserved.
    async fn reservations(&self) -> LawResult {
        if self.limits[0].reservation_us().is_none() {
            return Ok(());
        }
        let mut reserved = TraceRequest { asks: vec![ask(0, "reserved")], ..acquire(Some(ID)) };
        self.check_capability(Some(Capability::Reservations), &reserved).await?;
        if self.subject.able.can(Capability::Reservations) {
            for op in [Op::Renew, Op::Settle] {
                reserved.op = op;
                self.check_decided(&reserved).await?;
            }
        }
        Ok(())
    }

    /// Checks that the store keeps the caller's metadata, if the limit keeps any.
    fn keeps_metadata(&self, state: Option<AnyState>) -> LawResult {
        let Some(AnyState::WindowLog(log)) = state else { return Ok(()) };
        let kept = log.entries.last().map(|entry| entry.metadata.to_vec()).unwrap_or_default();
        let given = self.subject.metadata(&acquire(None));
        ensure(kept == given, || {
            format!(
                "with a request to {} came the metadata {given:?}, and kept were {kept:?}: is it a store that lacks {:?}?",
                self.text,
                Capability::Metadata
            )
        })
    }

    /// Checks that the store supports what it claims and refuses what it lacks.
    async fn check_capability(
        &self,
        needed: Option<Capability>,
        request: &TraceRequest,
    ) -> LawResult {
        match needed.filter(|needed| !self.subject.able.can(*needed)) {
            None => self.check_decided(request).await,
            Some(lacking) => self.check_refused(lacking, request).await,
        }
    }

    async fn answer(&self, request: &TraceRequest) -> Result<Said, String> {
        self.subject.answer(self.limits, request, Now::At(request.at)).await
    }

    async fn check_decided(&self, request: &TraceRequest) -> LawResult {
        let said = self.answer(request).await?;
        let needed = Capability::for_op(request.op)
            .map_or(String::new(), |needed| format!(", or lack {needed:?} in its harness"));
        ensure(said.is_ok(), || {
            format!(
                "the harness says that the store can do {request:?} under {}, and it says {said:?}. It has to be able \
                 to{needed}",
                self.text
            )
        })
    }

    async fn check_refused(&self, lacking: Capability, request: &TraceRequest) -> LawResult {
        let said = self.answer(request).await?;
        let refused = matches!(said, Err((ErrorKind::Unsupported | ErrorKind::CrossSlot, _)));
        ensure(refused, || {
            format!(
                "the harness says that the store lacks {lacking:?}, and {request:?} under {} got {said:?}. It has to be \
                 refused as unsupported; if it is decided rightly, the store lacks it no more",
                self.text
            )
        })
    }
}
