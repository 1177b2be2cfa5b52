//! Writes `examples/access.log`: an hour of a small site's traffic, made up and always the same.
//!
//! `cargo run -p ratelimit-cli --example make_access_log > examples/access.log`
//!
//! Many quiet readers; a crawler that does not wait; a client with a stuck key; a wave of stolen
//! passwords tried from many addresses against few users; and people who are logged in. The
//! addresses are those that RFC 5737 and RFC 3849 set aside for examples.

use std::io::{self, Write};

const SEED: u64 = 20_260_301;
/// From 09:00:00 on 2026-03-01, a Sunday.
const HOUR_S: u64 = 3_600;

fn main() -> io::Result<()> {
    io::stdout().write_all(generate(SEED).as_bytes())
}

/// The log that is committed.
#[allow(dead_code)] // only the test that includes this file asks for it
pub(crate) fn read_committed_log() -> String {
    generate(SEED)
}

/// An hour of traffic, in the order of time.
fn generate(seed: u64) -> String {
    let mut traffic = Traffic { random: Random(seed), requests: Vec::new() };
    traffic.quiet_readers();
    traffic.crawler();
    traffic.stuck_key();
    traffic.stolen_passwords();
    traffic.logged_in();
    let mut requests = traffic.requests;
    requests.sort_by_key(|request| request.second); // stable: equal seconds keep their order
    requests.iter().map(Request::line).collect()
}

/// One line of the log.
struct Request {
    second: u64,
    ip: String,
    user: &'static str,
    first_line: String,
    status: u16,
    bytes: u64,
    referrer: &'static str,
    agent: &'static str,
}

const FIREFOX: &str = "Mozilla/5.0 (X11; Linux x86_64; rv:148.0) Gecko/20100101 Firefox/148.0";
const SAFARI: &str = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 \
                      (KHTML, like Gecko) Version/26.2 Safari/605.1.15";
const CRAWLER: &str = "ExampleBot/1.4 (+https://bot.example/about)";
const SCRIPT: &str = "python-requests/2.32.5";
const HOME: &str = "https://shop.example/";

const PAGES: [&str; 8] =
    ["/", "/shoes", "/shoes/trail", "/hats", "/hats/felt", "/about", "/news", "/contact"];
const ASSETS: [&str; 5] =
    ["/style.css", "/app.js", "/logo.svg", "/fonts/text.woff2", "/favicon.ico"];
const USERS: [&str; 12] = [
    "alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy", "mallory",
    "peggy",
];

impl Request {
    fn line(&self) -> String {
        let (minute, second) = (self.second / 60, self.second % 60);
        let time = format!("01/Mar/2026:09:{minute:02}:{second:02} +0000");
        let Self { ip, user, first_line, status, bytes, referrer, agent, .. } = self;
        format!(
            "{ip} - {user} [{time}] \"{first_line}\" {status} {bytes} \"{referrer}\" \"{agent}\"\n"
        )
    }
}

struct Traffic {
    random: Random,
    requests: Vec<Request>,
}

impl Traffic {
    fn get(&mut self, second: u64, ip: &str, user: &'static str, path: &str, agent: &'static str) {
        let status = if self.random.below(40) == 0 { 404 } else { 200 };
        self.requests.push(Request {
            second: second.min(HOUR_S - 1),
            ip: ip.to_owned(),
            user,
            first_line: format!("GET {path} HTTP/1.1"),
            status,
            bytes: 200 + self.random.below(40_000),
            referrer: if self.random.below(3) == 0 { "-" } else { HOME },
            agent,
        });
    }

    /// People who open a page or a few, each with some of its pictures, and read.
    fn quiet_readers(&mut self) {
        for reader in 0..260 {
            let ip = match reader % 4 {
                3 => format!("2001:db8:{:x}:{:x}::1", self.random.below(4_096), reader),
                _ => format!("198.51.100.{}", reader % 250 + 1),
            };
            let agent = if reader % 2 == 0 { FIREFOX } else { SAFARI };
            let mut second = self.random.below(HOUR_S - 300);
            for _ in 0..=self.random.below(3) {
                let page = PAGES[self.random.index(PAGES.len())];
                let query = if self.random.below(6) == 0 { "?from=mail" } else { "" };
                self.get(second, &ip, "-", &format!("{page}{query}"), agent);
                for asset in &ASSETS[..self.random.index(ASSETS.len())] {
                    let later = self.random.below(2);
                    self.get(second + later, &ip, "-", asset, agent);
                }
                second += 10 + self.random.below(80);
            }
        }
    }

    /// A crawler that walks the whole catalogue: at first politely, then faster and faster.
    fn crawler(&mut self) {
        let mut second = 900;
        let mut item = 0;
        for pace in [1, 2, 4, 6, 7, 6, 4, 2] {
            for _ in 0..24 {
                for _ in 0..pace {
                    item += 1;
                    let path = format!("/items/{item}");
                    self.get(second, "192.0.2.80", "-", &path, CRAWLER);
                }
                second += 1;
            }
        }
    }

    /// A visitor leans on the reload key, twice.
    fn stuck_key(&mut self) {
        for start in [1_500, 2_710] {
            for n in 0..45 {
                self.get(start + n / 9, "203.0.113.5", "-", "/hats/felt?sort=price", SAFARI);
            }
        }
    }

    /// Passwords stolen elsewhere, tried on few users from many addresses: in waves, most of them
    /// slow enough for any one address.
    fn stolen_passwords(&mut self) {
        for attempt in 0_u64..700 {
            // Three addresses of forty do most of the work.
            let busy = self.random.below(4) < 3;
            let host = if busy { self.random.below(3) } else { self.random.below(40) };
            let user = USERS[self.random.index(3)];
            let welcome = self.random.below(200) == 0;
            self.requests.push(Request {
                second: 2_000 + attempt / 2 + self.random.below(5),
                ip: format!("203.0.113.{}", 100 + host),
                user: "-",
                first_line: format!("POST /login?user={user} HTTP/1.1"),
                status: if welcome { 302 } else { 401 },
                bytes: 512,
                referrer: "-",
                agent: SCRIPT,
            });
        }
    }

    /// People who are logged in and work steadily; and the program of one of them, which polls.
    fn logged_in(&mut self) {
        for (place, user) in USERS.iter().enumerate() {
            let ip = format!("192.0.2.{}", 10 + place);
            let mut second = self.random.below(600);
            while second < HOUR_S {
                let order = self.random.below(9_000);
                self.get(second, &ip, user, &format!("/account/orders/{order}"), FIREFOX);
                second += 20 + self.random.below(70);
            }
        }
        for n in 0..240_u64 {
            // From a whole network of addresses: only the user is one.
            let ip = format!("2001:db8:b0b:{:x}::1", n % 16);
            let path = format!("/api/orders?page={}", n % 7);
            self.get(3_000 + n / 3, &ip, "bob", &path, "bob-sync/0.3");
        }
    }
}

/// `SplitMix64`: small, and the same on every machine and in every year.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or_default()
    }
}
