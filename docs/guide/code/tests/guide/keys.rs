//! The snippets of the chapters on keys and on the first five minutes.

use std::net::{IpAddr, Ipv6Addr};

use ratelimit_core::RateLimiter;
use ratelimit_memory::MemoryStore;

use crate::{Error, policies};

/// The network of a client: an IPv6 client has all addresses of its /64.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        IpAddr::V4(v4) => IpAddr::V4(v4),
    }
}

#[test]
fn a_limit_is_kept_per_identifier() -> Result<(), Error> {
    let limiter = RateLimiter::new(policies::limits_of_chapter("keys.md"), MemoryStore::new());
    let address: IpAddr = "2001:db8::7".parse()?;

    let ip = network(address).to_string();
    let verdict = limiter.check_now(&[("ip", ip.as_str()), ("user", "alice")])?;
    assert!(verdict.allowed());

    let neighbour = network("2001:db8::8".parse()?).to_string();
    let told = limiter.request(&[("ip", neighbour.as_str())]).cost(0).peek_now()?;
    assert_eq!(told.remaining(), 19, "both are one network");
    assert_eq!(network("::ffff:192.0.2.7".parse()?), "192.0.2.7".parse::<IpAddr>()?);
    Ok(())
}
