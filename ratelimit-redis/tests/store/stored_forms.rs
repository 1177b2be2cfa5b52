//! What a release has stored, each later one reads. `stored-0.1.txt` has the bytes that every
//! algorithm stores in every mode, and what is decided on them. A form that changes shows there;
//! the old one stays, as a block without `wrote`, and is read.
//!
//! | a line begins with | |
//! |---|---|
//! | a mode and a colon | a block, of these limits, separated by semicolons, and the key `alice` |
//! | `#` | why a block is there |
//! | `wrote` | a request that stores the state: operation, cost, when, and an id or metadata |
//! | `stored` | a command that stores the same bytes |
//! | `then` | a request on that state, and its decision by each limit |

use std::fmt::Write as _;
use std::sync::LazyLock;

use ratelimit_servers::RespClient;
use ratelimit_testkit::Instance;

use crate::common::prelude::*;

static FORMS: LazyLock<String> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/store/stored-0.1.txt");
    std::fs::read_to_string(path).expect(path)
});
/// In January 2027. All times in the file are microseconds after it.
const BEGIN_US: u64 = 1_800_000_000_000_000;

/// The lines of one state.
struct Block<'f> {
    comments: Vec<&'f str>,
    mode: &'f str,
    /// The limits in words.
    words: String,
    limits: Vec<Limit<AnyAlgorithm>>,
    lines: Vec<(&'f str, &'f str)>,
}

/// Whether a state is what its requests write now, or what the file has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Written,
    Stored,
}

fn blocks() -> impl Iterator<Item = Block<'static>> {
    FORMS.split("\n\n").map(|block| {
        let (comments, lines): (Vec<_>, Vec<_>) =
            block.lines().partition(|line| line.starts_with('#'));
        let mut lines = lines.into_iter();
        let (mode, limits) = lines.next().and_then(|line| line.split_once(": ")).expect(block);
        let read = |words: &str| words.parse::<Instance<AnyAlgorithm>>().expect(words);
        let limits: Vec<_> = limits.split("; ").map(read).collect();
        let words: Vec<_> = limits.iter().map(ToString::to_string).collect();
        let named = ["first", "second"].iter().zip(limits);
        Block {
            comments,
            mode,
            words: words.join("; "),
            limits: named.map(|(name, limit)| limit.named(name)).collect(),
            lines: lines.map(|line| line.split_once(' ').expect(line)).collect(),
        }
    })
}

/// Bytes as one word.
fn escaped(bytes: &[u8]) -> String {
    let plain = |byte: u8| byte.is_ascii_graphic() && byte != b'\\';
    bytes.iter().fold(String::new(), |mut word, &byte| {
        let _ = if plain(byte) {
            write!(word, "{}", char::from(byte))
        } else {
            write!(word, "\\x{byte:02x}")
        };
        word
    })
}

fn unescaped(word: &str) -> Vec<u8> {
    let mut parts = word.split("\\x");
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (code, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(code, 16).expect(word));
        bytes.extend(rest.bytes());
    }
    bytes
}

/// The commands that store what the server has now. The id of an entry of MULTI is drawn, and
/// stands here as `id`.
fn stored(server: &RedisServer, client: &mut RespClient, mode: &str) -> Vec<String> {
    let commands = keys(server).into_iter().map(|key| {
        let kind = tell(server, &["TYPE", &key]);
        let (read, write): (&[&str], _) = match kind.as_text().expect("a type") {
            "string" => (&["GET", &key], "SET"),
            "hash" => (&["HGETALL", &key], "HSET"),
            "list" => (&["LRANGE", &key, "0", "-1"], "RPUSH"),
            _ => (&["ZRANGE", &key, "0", "-1", "WITHSCORES"], "ZADD"),
        };
        let read = client.command(read).expect("it is up");
        let parts =
            if read.as_array().is_empty() { std::slice::from_ref(&read) } else { read.as_array() };
        let mut words: Vec<_> = parts
            .iter()
            .map(|part| {
                let RespValue::Text(bytes) = part else { panic!("{key}: {part}") };
                let word = escaped(bytes);
                let mut parts: Vec<_> = word.split("\\x20").collect();
                if mode == Multi::NAME && parts.len() == 5 {
                    parts[2] = "id";
                }
                parts.join("\\x20")
            })
            .collect();
        if write == "ZADD" {
            // A score stands before its member.
            words.chunks_mut(2).for_each(|pair| pair.swap(0, 1));
        }
        format!("{write} {} {}", escaped(key.as_bytes()), words.join(" "))
    });
    commands.collect()
}

/// The decision on a request of these words, a part for each limit.
async fn decided(
    store: &impl Store<AnyAlgorithm>,
    limits: &[Limit<AnyAlgorithm>],
    request: &str,
) -> String {
    let mut words = request.split(' ');
    let op = words.next().and_then(|name| Op::ALL.iter().find(|op| op.to_string() == name));
    let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).expect(request);
    let (cost, after_us) = (number(), number());
    let checks: Vec<_> = limits.iter().map(|limit| Check { limit, key: "alice", cost }).collect();
    let batch = Batch::new(&checks).expect("distinct").op(*op.expect(request));
    let mut batch = batch.now(at(BEGIN_US + after_us));
    for option in words {
        batch = match option.split_once('=').expect(request) {
            ("id", id) => batch.id(ReservationId::new(id.parse().expect(request))),
            (_, metadata) => batch.metadata(metadata.as_bytes()),
        };
    }
    let verdict = store.apply(&batch).await.unwrap_or_else(|error| panic!("{request}: {error}"));
    let told = verdict.decisions().iter().map(|one| {
        let allowed = if one.allowed { "allowed" } else { "denied" };
        let retry = one.retry_after_us.map_or("never".to_owned(), |us| us.to_string());
        format!(
            "{allowed} {}/{} retry {retry} replenish {} reset {}",
            one.remaining, one.limit, one.replenish_after_us, one.reset_after_us
        )
    });
    told.collect::<Vec<_>>().join("; ")
}

/// The file, as it is due now.
async fn forms(origin: Origin) -> String {
    let server = server();
    let lua = plain(&server).await;
    let (modes, mut client) = (in_every_mode(&lua), server.client().expect("it is up"));
    let mut forms = String::new();
    for Block { comments, mode, words, limits, lines } in blocks() {
        let (_, store) = modes.iter().find(|(name, _)| *name == mode).expect(mode);
        tell(&server, &["FLUSHALL"]);
        let all =
            |kind: &'static str| lines.iter().filter(move |line| line.0 == kind).map(|line| line.1);
        let wrote: Vec<_> = all("wrote").collect();
        if origin == Origin::Written && !wrote.is_empty() {
            for request in &wrote {
                decided(store, &limits, request).await;
            }
        } else {
            for command in all("stored") {
                let words: Vec<_> = command.split(' ').map(unescaped).collect();
                client.command(&words).expect("it is up").ok().expect(command);
            }
        }
        let stored = stored(&server, &mut client, mode);
        let head = format!("{mode}: {words}");
        let wrote = wrote.iter().map(|request| format!("wrote {request}"));
        let stored = stored.iter().map(|command| format!("stored {command}"));
        let comments = comments.iter().map(ToString::to_string);
        for line in comments.chain([head]).chain(wrote).chain(stored) {
            let _ = writeln!(forms, "{line}");
        }
        for line in all("then") {
            let request = line.split(" = ").next().unwrap_or_default();
            let decided = decided(store, &limits, request).await;
            let _ = writeln!(forms, "then {request} = {decided}");
        }
        forms.push('\n');
    }
    forms
}

/// The first lines in which the file and what is due differ.
fn difference(due: &str) -> String {
    let mut block = "";
    let differing = FORMS.lines().zip(due.lines()).find(|(old, new)| {
        block = if old.contains(": ") { old } else { block };
        old != new
    });
    let (old, new) = differing.unwrap_or(("as many lines", "other lines"));
    format!("{block}\n  the file: {old}\n  now:      {new}")
}

#[tokio::test]
async fn what_a_release_has_stored_is_read_and_decided_as_then() {
    let now = forms(Origin::Stored).await;
    assert!(now.trim_end() == FORMS.trim_end(), "{}", difference(&now));
}

#[tokio::test]
async fn what_is_stored_now_is_what_the_release_stores() {
    let now = forms(Origin::Written).await;
    if now.trim_end() == FORMS.trim_end() {
        return;
    }
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/stored-0.1.txt");
    std::fs::write(path, now.trim_end().to_owned() + "\n").expect("a file");
    panic!(
        "another form is stored than in ratelimit-redis/tests/store/stored-0.1.txt:\n{}\n\
         {path} has what is stored now. If the old form was released, keep its block without `wrote`, and add the new one.",
        difference(&now)
    );
}

#[test]
fn the_file_has_every_algorithm_in_every_mode_that_serves_it() {
    let (every, native): (&[&str], &[&str]) = (AnyAlgorithm::NAMES, &NATIVE);
    for (mode, names) in [(Lua::NAME, every), (Cas::NAME, every), (Multi::NAME, native)] {
        for name in names {
            let has = |block: &Block<'_>| {
                let is_it = |limit: &Limit<AnyAlgorithm>| limit.algorithm().name() == *name;
                block.mode == mode && block.limits.iter().any(is_it)
            };
            assert!(blocks().any(|block| has(&block)), "no state of {name} in the mode {mode}");
        }
    }
}
