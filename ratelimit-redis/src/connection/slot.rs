//! The slots of a cluster, as the Redis Cluster specification defines them: which slot a key lies
//! in, and which server owns a slot, as `CLUSTER SLOTS` answers.

use crc::{CRC_16_XMODEM, Crc};

use super::reply::Reply;

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16_384;

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The slot of a key: that of its hash tag, if it has one.
pub(crate) fn of(key: &str) -> u16 {
    CRC.checksum(tag(key).as_bytes()) % SLOTS
}

/// The text between the first `{` and the next `}`, unless it is empty; otherwise the whole key.
fn tag(key: &str) -> &str {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    tag.map(|(tag, _)| tag).filter(|tag| !tag.is_empty()).unwrap_or(key)
}

/// A range of slots, both ends included, and its master.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// The ranges in a reply. `asked` is the host of the node that sent it.
pub(crate) fn ranges(reply: &Reply, asked: &str) -> Option<Vec<Range>> {
    let Reply::Array(entries) = reply else { return None };
    let mut ranges = Vec::with_capacity(entries.len());
    for entry in entries {
        let Reply::Array(parts) = entry else { return None };
        let [Reply::Integer(first), Reply::Integer(last), Reply::Array(master), ..] = &parts[..]
        else {
            return None;
        };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let [host, Reply::Integer(port), ..] = &master[..] else { return None };
        if first > last || last >= SLOTS {
            return None;
        }
        let host = match host {
            // The host that was asked.
            Reply::Nil => asked,
            host => match host.as_text()? {
                // A node that should be addressed by name and has none.
                "?" => address_in(master).unwrap_or(asked),
                "" => asked,
                host => host,
            },
        };
        ranges.push(Range { first, last, host: host.to_owned(), port: u16::try_from(*port).ok()? });
    }
    Some(ranges)
}

/// A node's address, from the details that newer servers send after its id.
fn address_in(master: &[Reply]) -> Option<&str> {
    let Some(Reply::Array(pairs)) = master.get(3) else { return None };
    pairs.chunks_exact(2).find(|pair| pair[0].as_text() == Some("ip"))?[1].as_text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_tag_determines_the_slot() {
        // As CLUSTER KEYSLOT answers.
        for (key, slot) in [
            ("foo", 12_182),
            ("123456789", 12_739),
            ("", 0),
            ("{foo}", 12_182),
            ("rl:1::{foo}", 12_182),
            ("rl:{foo}:evil{zzz}", 12_182),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
            ("foo{bar", 15_278),
        ] {
            assert_eq!(of(key), slot, "{key}");
        }
    }

    fn text(text: &str) -> Reply {
        Reply::Text(text.into())
    }

    /// The table of one range.
    fn table(first: i64, last: i64, host: Reply, port: i64, more: Vec<Reply>) -> Reply {
        let node = [vec![host, Reply::Integer(port), text("id")], more].concat();
        let entry = vec![Reply::Integer(first), Reply::Integer(last), Reply::Array(node)];
        Reply::Array(vec![Reply::Array(entry)])
    }

    #[test]
    fn hosts_are_parsed_in_every_form_a_server_sends() {
        let details =
            |details: &[&str]| vec![Reply::Array(details.iter().map(|it| text(it)).collect())];
        for (said, more, host) in [
            (text("127.0.0.1"), vec![], "127.0.0.1"),
            (text("::1"), details(&[]), "::1"),
            (text("one.example"), vec![], "one.example"),
            (text(""), vec![], "asked"),
            (Reply::Nil, vec![], "asked"),
            (text("?"), details(&["ip", "10.0.0.7"]), "10.0.0.7"),
            (text("?"), details(&[]), "asked"),
        ] {
            let reply = table(0, 16_383, said, 1, more);
            let due = Range { first: 0, last: 16_383, host: host.into(), port: 1 };
            assert_eq!(ranges(&reply, "asked"), Some(vec![due]));
        }
    }

    #[test]
    fn a_reply_that_is_no_slot_table_is_refused() {
        assert_eq!(ranges(&Reply::Array(vec![]), "asked"), Some(vec![]));
        for reply in [
            Reply::Nil,
            Reply::Array(vec![Reply::Nil]),
            table(0, 16_384, text("h"), 1, vec![]),
            table(-1, 5, text("h"), 1, vec![]),
            table(6, 5, text("h"), 1, vec![]),
            table(0, 5, text("h"), 65_536, vec![]),
            table(0, 5, Reply::Integer(1), 1, vec![]),
        ] {
            assert_eq!(ranges(&reply, "asked"), None, "{reply:?}");
        }
    }
}
