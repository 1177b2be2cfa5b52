//! The examples, whose tests run here: as programs of their own, each would compile anew what
//! they share.

#![allow(dead_code, unreachable_pub, reason = "of examples, which are programs")]

#[path = "../../examples/gateway.rs"]
pub(crate) mod gateway;
#[path = "../../examples/http_guide.rs"]
pub(crate) mod http_guide;
#[path = "../../examples/limited_route.rs"]
pub(crate) mod limited_route;
#[path = "../../examples/polite_client.rs"]
pub(crate) mod polite_client;
#[path = "../../examples/service.rs"]
pub(crate) mod service;
