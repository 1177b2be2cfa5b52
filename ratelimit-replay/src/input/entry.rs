//! [`InputEntry`]: the request in one line, and what the parsers of all formats need for it.

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};
use ratelimit_core::store::Op;
use ratelimit_core::{LimitCosts, Timestamp};

use crate::caller::Caller;
use crate::text::{printable, quote};

/// The request in one line of the input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InputEntry {
    /// When it came.
    pub at: Timestamp,
    /// Who asked.
    pub caller: Caller,
    /// What it costs.
    pub costs: LimitCosts,
    /// The numbers of its customer, by the names of limits.
    pub numbers: Vec<(String, String)>,
    /// What was asked for.
    pub op: Op,
    /// How long the request took, if the input tells.
    pub duration_us: Option<u64>,
    /// The user agent, if it is to be shown.
    pub agent: Option<Bytes>,
    /// Its line, if it is to be shown.
    pub line: Option<Bytes>,
}

impl InputEntry {
    /// The user agent, if it is kept.
    pub fn agent_text(&self) -> Option<Cow<'_, str>> {
        self.agent.as_deref().map(String::from_utf8_lossy)
    }
}

/// The most bytes of a line that are kept, and the most characters that are shown.
const LINE_BYTES: usize = 1_600;
const LINE_CHARS: usize = 400;

/// What is kept of a line that may be shown.
pub(super) fn kept_line(line: &[u8]) -> &[u8] {
    &line[..line.len().min(LINE_BYTES)]
}

/// Keeps texts that may be shown: many in one allocation, since most are soon dropped again.
pub(super) struct KeptTexts(BytesMut);

impl KeptTexts {
    const BYTES: usize = 64 * 1024;

    pub(super) fn keep(&mut self, text: &[u8]) -> Bytes {
        self.0.extend_from_slice(text);
        self.0.split().freeze()
    }
}

impl Default for KeptTexts {
    fn default() -> Self {
        Self(BytesMut::with_capacity(Self::BYTES))
    }
}

/// The line as it is shown.
pub(crate) fn line_text(line: &[u8]) -> String {
    printable(&String::from_utf8_lossy(line), LINE_CHARS)
}

/// In place of a limit's name: all limits whose costs are not told.
pub(crate) const OTHERS: &str = "*";

/// Why a line cannot be replayed: the fault, and what would be accepted.
pub type BadLine = String;

/// The number of bad lines that are reported one by one; the rest are only counted.
pub(crate) const NAMED_BAD_LINES: u64 = 20;

/// The error of a line that was too long to keep.
pub(crate) const TOO_LONG: &str = "is longer than 1 MiB";

/// The number of a field, if it was one, and otherwise what stands there.
pub(super) fn whole_number(field: &str, number: Option<u64>, shown: &str) -> Result<u64, BadLine> {
    number.ok_or_else(|| {
        let shown = printable(shown, 40);
        format!("{field} is {shown}, expected a whole number from 0 to {}", u64::MAX)
    })
}

/// The moment `at_us`, if it is in the range of the algorithms.
pub(super) fn timestamp(at_us: u64) -> Result<Timestamp, BadLine> {
    Timestamp::from_us(at_us).ok_or_else(|| {
        let last = Timestamp::MAX.as_us();
        format!("at_us is {at_us}, and {last} (in the year 2112) is the last time there is")
    })
}

/// The operation of this name.
pub(super) fn op(name: &str) -> Result<Op, BadLine> {
    const OPS: [Op; 5] = [Op::Acquire, Op::Peek, Op::Refund, Op::Reset, Op::Force];
    OPS.into_iter().find(|op| op.to_string() == name).ok_or_else(|| {
        format!("op is {}; accepted are acquire, peek, refund, reset, force", quote(name, 40))
    })
}
