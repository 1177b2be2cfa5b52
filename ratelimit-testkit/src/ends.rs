//! [`Ends`]: limits at the ends of what their numbers can be.

use ratelimit_core::AnyAlgorithm;

use crate::algorithm::AlgorithmHarness;
use crate::trace::made::Instance;

/// Limits of one state each, at the ends of what their numbers can be.
#[doc(hidden)]
#[derive(Debug)]
pub struct Ends;

impl AlgorithmHarness for Ends {
    type Algorithm = AnyAlgorithm;

    fn limits() -> Vec<Instance<AnyAlgorithm>> {
        let limits = [
            "gcra 1/us burst 4503599627370494",
            "token-bucket 1/4503599627370494us burst 1",
            "gcra 0/s",
            "gcra 1/us burst 1 debt 4503599627370493",
            "fixed-window 4503599627370495/s",
            "fixed-window 1/s debt 4503599626",
            "fixed-window 0/s",
            "first-request-window 4503599627370495/s",
            "first-request-window 1/s",
            "sliding-log 4503599627370495/s",
            "sliding-log 0/s",
            "sliding-counter 4503599627370495/s",
            "sliding-counter 1/s",
            "bucketed-window bucket 1s rates 4503599627370495/4s",
            "bucketed-window bucket 1s rates 1/4s",
            "window-log 10000/s",
            "window-log 0/s",
            "concurrency 10000/4503599627370495us",
            "concurrency 1/4503599627370495us",
            "lockout 4503599627370495/s block 1us",
            "lockout 1/s block 4503599627370495us",
        ];
        limits.map(|words| words.parse().expect(words)).into()
    }
}
