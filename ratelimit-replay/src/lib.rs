//! What the tool [`ratelimit`](https://crates.io/crates/ratelimit-cli) does without a system: it
//! turns a log and a policy into decisions, counts and a page. It opens no file, asks no clock and
//! starts no thread, so that it also runs in a browser. It is published for the tool, and its
//! interface follows the tool's needs.
//!
//! | module | for |
//! |---|---|
//! | [`input`] | turning bytes into requests |
//! | [`arguments`] | the options that say how an input is read |
//! | [`policy`], [`lint`], [`records`] | reading documents, and what is wrong with them |
//! | [`replay`] | deciding the requests, one after another |
//! | [`watcher`] | looking on, and ending it |
//! | [`decision_line`] | the bytes of a decision |
//! | [`tally`], [`nearness`], [`compare`] | the counts of a replay |
//! | [`suggest`] | finding limits that deny few callers |
//! | [`summary`], [`report`], [`table`], [`text`] | presenting them |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]
#![allow(clippy::missing_errors_doc, clippy::must_use_candidate)]

mod address;
pub mod arguments;
mod by_hash;
pub mod caller;
pub mod compare;
pub mod decision_line;
pub mod failure;
mod frequent;
pub mod input;
mod leases;
pub mod lint;
pub mod named;
pub mod nearness;
mod observed;
pub mod policy;
pub mod records;
pub mod replay;
pub mod report;
pub mod suggest;
pub mod summary;
pub mod table;
pub mod tally;
pub mod text;
mod timeline;
pub mod watcher;
