//! The way of a request from the client to Redis and back: what each step adds. The fields are
//! those of a request that the layer has decided, on a given clock.

use std::convert::Infallible;
use std::error::Error;
use std::future::ready;
use std::net::SocketAddr;

use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, Request, Response};
use ratelimit_core::{AnyAlgorithm, FixedWindow, Gcra, Limits, ManualClock, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, ProxyHeader, RateLimitLayer, header};
use tower::{Layer as _, ServiceExt as _, service_fn};

use crate::Drawing;
use crate::svg::{MARGIN, Svg, path, px, width};

const CLIENT: &str = "203.0.113.7";
const PROXY: &str = "10.0.0.2:4711";

/// The fields that the layer adds to the answer of an admitted request.
fn fields() -> Result<HeaderMap, Box<dyn Error>> {
    let limits = Limits::<AnyAlgorithm>::builder()
        .limit("burst", Gcra::per_second(10).burst(20))
        .by(["ip"])
        .limit("daily", FixedWindow::per_day(5_000))
        .by(["key"])
        .build()?;
    let store = MemoryStore::builder().clock(ManualClock::default()).build();
    let peer = |peer: &SocketAddr| Some(*peer);
    let address = ClientAddress::behind(["10.0.0.0/8"], ProxyHeader::XForwardedFor)?;
    let layer = RateLimitLayer::new(RateLimiter::new(limits, store))
        .by("ip", address.from_extension(peer))
        .by("key", header(HeaderName::from_static("x-api-key")))
        .immediate()
        .checked()?;
    let mut request = Request::get("/search")
        .header("x-api-key", "alice")
        .header("x-forwarded-for", CLIENT)
        .body(())?;
    request.extensions_mut().insert(PROXY.parse::<SocketAddr>()?);
    let handler = service_fn(|_| ready(Ok::<_, Infallible>(Response::new(Vec::new()))));
    let answer =
        layer.layer(handler).oneshot(request).now_or_never().ok_or("the layer waits")??;
    if answer.status() != 200 {
        return Err(format!("{}", answer.status()).into());
    }
    Ok(answer.headers().clone())
}

/// A line of a step: a class and words.
type Line = (&'static str, String);

/// A step of the way.
struct Step {
    name: &'static str,
    note: &'static str,
    /// What it adds to the request on the way down, and to the answer on the way up.
    down: Vec<Line>,
    up: Vec<Line>,
}

fn code(text: &str) -> Line {
    ("code", text.to_owned())
}

fn words(text: &str) -> Line {
    ("quiet", text.to_owned())
}

fn steps() -> Result<[Step; 6], Box<dyn Error>> {
    let fields = fields()?;
    let field = |name: &str| -> Result<Vec<Line>, Box<dyn Error>> {
        let value = fields.get(name).ok_or_else(|| format!("no field {name}"))?.to_str()?;
        let parts = value.split(", ").map(|part| code(&format!("  {part}")));
        Ok([code(&format!("{name}:"))].into_iter().chain(parts).collect())
    };
    Ok([
        Step {
            name: "Client",
            note: "",
            down: vec![code("GET /search"), code("x-api-key: alice")],
            up: vec![words("sees how much is left")],
        },
        Step {
            name: "Proxy",
            note: "yours, at 10.0.0.2",
            down: vec![code(&format!("x-forwarded-for: {CLIENT}"))],
            up: Vec::new(),
        },
        Step {
            name: "RateLimitLayer",
            note: "names who is limited",
            down: vec![
                code(&format!("ip  = {CLIENT}")),
                code("key = alice"),
                words("limits: burst by ip, daily by key"),
            ],
            up: [
                words("admitted: your handler answers"),
                words("denied: 429, and retry-after"),
                words("either way, with these fields:"),
            ]
            .into_iter()
            .chain(field("ratelimit-policy")?)
            .chain(field("ratelimit")?)
            .collect(),
        },
        Step {
            name: "Layers of the store",
            note: "optional",
            down: vec![
                words("Metrics, Traced: count and trace"),
                words("Fallback: asks, for a limited time"),
            ],
            up: vec![
                words("DenialCache: denies without a call"),
                words("Fallback: decides in an outage"),
            ],
        },
        Step {
            name: "RedisStore",
            note: "merges calls",
            down: vec![
                words("one call for both limits, shared"),
                words("with requests that wait, too"),
            ],
            up: vec![words("one decision, field by field")],
        },
        Step {
            name: "Redis",
            note: "decides by its own clock",
            down: vec![words("both limits are charged, or none")],
            up: vec![words("what is left, and how long to wait")],
        },
    ])
}

const LINE: f64 = 16.0;
/// The width of a box of the wide drawing, and its height; the space between two steps.
const BOX: (f64, f64) = (196.0, 44.0);
const SPACE: f64 = 20.0;

/// The drawing, for a wide page and for a narrow one.
pub(crate) fn drawings() -> Result<[Drawing; 2], Box<dyn Error>> {
    let steps = steps()?;
    let said =
        |lines: &[Line]| lines.iter().map(|(_, words)| words.trim()).collect::<Vec<_>>().join("; ");
    let described = steps.iter().map(|Step { name, down, up, .. }| {
        let parts = [("request", down), ("answer", up)];
        let parts = parts.into_iter().filter(|(_, lines)| !lines.is_empty());
        let parts = parts.map(|(what, lines)| format!("to the {what}, {}", said(lines)));
        format!("{name}: {}.", parts.collect::<Vec<_>>().join("; "))
    });
    let described = described.collect::<Vec<_>>().join(" ");
    Drawing::both("request", |is_wide| {
        let height = |step: &Step| {
            let [down, up] = [&step.down, &step.up]
                .map(|lines| f64::from(u32::try_from(lines.len()).unwrap_or_default()) * LINE);
            if is_wide { down.max(up).max(BOX.1) } else { 30.0 + down + up }
        };
        let top = if is_wide { 72.0 } else { 96.0 };
        let all = steps.iter().map(|step| height(step) + SPACE).sum::<f64>();
        let title = ["A request’s way to Redis and back,", "and what each step adds"];
        let mut svg = Svg::new(is_wide, top + all, &title, &described);
        let mut y = top;
        for (step, is_last) in steps.iter().zip([false, false, false, false, false, true]) {
            let height = height(step);
            if is_wide {
                wide(&mut svg, y, height, step, is_last);
            } else {
                narrow(&mut svg, y, height, step, is_last);
            }
            y += height + SPACE;
        }
        if is_wide {
            let [left, right] = sides();
            svg.text("quiet end", (left, 52.0), "to the request ↓");
            svg.text("quiet", (right, 52.0), "↑ to the answer");
        } else {
            svg.text("quiet", (MARGIN, 68.0), "↓ to the request");
            svg.text("quiet", (MARGIN + 120.0, 68.0), "↑ to the answer");
        }
        Ok(svg.finish())
    })
}

/// Where the lines beside a box end, and where they begin.
const fn sides() -> [f64; 2] {
    let middle = width(true) / 2.0;
    [middle - BOX.0 / 2.0 - 14.0, middle + BOX.0 / 2.0 + 14.0]
}

/// An arrow down or up at this place, over the space between two steps.
fn arrow(svg: &mut Svg, x: f64, y: f64, is_down: bool) {
    let (begin, end, head) =
        if is_down { (y + 2.0, y + SPACE - 2.0, -5.0) } else { (y + SPACE - 2.0, y + 2.0, 5.0) };
    let class = if is_down { "yes-line" } else { "other-line" };
    let head = path([(x - 4.0, end + head), (x, end), (x + 4.0, end + head)]);
    svg.path(class, &format!("M{} {}V{}{head}", px(x), px(begin), px(end)));
}

fn wide(svg: &mut Svg, y: f64, height: f64, step: &Step, is_last: bool) {
    let middle = width(true) / 2.0;
    svg.rect("area", (middle - BOX.0 / 2.0, y), (BOX.0, height));
    let center = y + height / 2.0;
    let shift = if step.note.is_empty() { 4.0 } else { -4.0 };
    svg.text("strong middle", (middle, center + shift), step.name);
    if !step.note.is_empty() {
        svg.text("quiet middle", (middle, center + 13.0), step.note);
    }
    let [left, right] = sides();
    for (lines, x, anchor) in [(&step.down, left, " end"), (&step.up, right, "")] {
        let count = f64::from(u32::try_from(lines.len()).unwrap_or_default());
        let mut at = center - (count - 1.0) * LINE / 2.0 + 4.0;
        for (class, words) in lines {
            let words = if anchor.is_empty() { words } else { words.trim() };
            svg.text(&format!("{class}{anchor}"), (x, at), words);
            at += LINE;
        }
    }
    if !is_last {
        arrow(svg, middle - 30.0, y + height, true);
        arrow(svg, middle + 30.0, y + height, false);
    }
}

fn narrow(svg: &mut Svg, y: f64, height: f64, step: &Step, is_last: bool) {
    svg.rect("area", (MARGIN, y), (width(false) - 2.0 * MARGIN, 24.0));
    svg.text("strong", (MARGIN + 8.0, y + 16.5), step.name);
    svg.text("quiet end", (width(false) - MARGIN - 8.0, y + 16.5), step.note);
    let mut at = y + 42.0;
    for (lines, sign) in [(&step.down, "↓"), (&step.up, "↑")] {
        for ((class, words), nth) in lines.iter().zip(0..) {
            if nth == 0 {
                svg.text("strong", (MARGIN + 8.0, at), sign);
            }
            svg.text(class, (MARGIN + 28.0, at), words);
            at += LINE;
        }
    }
    if !is_last {
        arrow(svg, width(false) / 2.0 - 30.0, y + height, true);
        arrow(svg, width(false) / 2.0 + 30.0, y + height, false);
    }
}
