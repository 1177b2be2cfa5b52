//! A log in Combined format: a day of a shop, whose callers and pages are of a Zipf distribution.

use std::io::Write;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, Zipf};

use crate::measure::Fallible;

const PAGES: f64 = 5_000.0;
const WORDS: [&str; 10] =
    ["shoes", "hats", "trail", "felt", "news", "orders", "items", "help", "account", "search"];

/// Writes so many lines of so many addresses, the same in every run.
pub(crate) fn write(mut out: impl Write, lines: u64, addresses: u32) -> Fallible {
    let mut random = SmallRng::seed_from_u64(42);
    let (callers, pages) = (Zipf::new(f64::from(addresses), 1.0)?, Zipf::new(PAGES, 1.0)?);
    let mut next = 0;
    for line in 0..lines {
        // Each address comes at least once.
        next += u32::from(line % 15 == 0);
        let caller = match line % 15 {
            0 => next % addresses + 1,
            _ => rank(callers.sample(&mut random)),
        };
        let [a, b, c, d] = caller.wrapping_mul(2_654_435_761).to_be_bytes();
        let user = if caller % 20 == 7 { format!("user{caller}") } else { "-".to_owned() };
        let second = line * 86_400 / lines;
        let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
        let page = rank(pages.sample(&mut random));
        let [section, kind] = [page % 10, page / 10 % 10].map(|word| WORDS[word as usize]);
        let query = match random.random_range(0..4) {
            0 => format!("?page={}&sort=price", random.random_range(0..50)),
            _ => String::new(),
        };
        let status = [200, 200, 200, 301, 404][random.random_range(0..5)];
        let bytes = random.random_range(200..40_000);
        let agent = agent(caller);
        writeln!(
            out,
            "{a}.{b}.{c}.{d} - {user} [01/Mar/2026:{hour:02}:{minute:02}:{second:02} +0000] \"GET \
             /{section}/{kind}/{page}{query} HTTP/1.1\" {status} {bytes} \"https://shop.example/{kind}\" \"{agent}\""
        )?;
    }
    Ok(out.flush()?)
}

/// The user agent of a caller.
fn agent(caller: u32) -> String {
    let version = 100 + caller % 40;
    match caller % 5 {
        0 => format!(
            "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/{version}.0.0.0 \
             Safari/537.36"
        ),
        1 => format!(
            "Mozilla/5.0 (X11; Linux x86_64; rv:{version}.0) Gecko/20100101 Firefox/{version}.0"
        ),
        2 => "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/26.2 \
              Safari/605.1.15"
            .to_owned(),
        3 => "Mozilla/5.0 (compatible; ExampleBot/2.1; +https://bot.example/about.html)".to_owned(),
        _ => "python-requests/2.32.5".to_owned(),
    }
}

/// A draw, which is a whole number.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const fn rank(draw: f64) -> u32 {
    draw as u32
}
