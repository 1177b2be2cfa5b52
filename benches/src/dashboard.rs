//! The panels of the Grafana dashboard of `ratelimit-layers` over a short story: a service whose
//! `Metrics` a Prometheus scrapes serves normal requests, denies a burst, and outlives a Redis that
//! hangs. `prometheus` and `promtool` must be on `PATH`.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::routing::get;
use metrics_exporter_prometheus::PrometheusBuilder;
use ratelimit_core::{Gcra, Limits, OnOutage, RateLimiter};
use ratelimit_layers::{Allotments, DenialCache, Fallback, Metrics, OnRecovery};
use ratelimit_redis::RedisStore;
use ratelimit_servers::RedisServer;
use ratelimit_tower::{RateLimitLayer, from_fn, header};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::measure::Fallible;
use crate::outage::{DEADLINE, HttpConnection, USER, runtime, serve, service};
use crate::report::{BenchReport, Effort};

const DASHBOARD: &str = include_str!("../../ratelimit-layers/dashboard.json");
/// Prometheus scrapes, and the panels are evaluated, once per second. Grafana's `$__rate_interval`
/// is four times that.
const RATE_INTERVAL: &str = "4s";
/// What happens one after the other, and for how many seconds. What comes before is left out.
const STORY: [(&str, u32); 5] =
    [("normal", 25), ("burst", 20), ("normal", 15), ("Redis hangs", 30), ("normal", 30)];
const BEFORE_S: u32 = 15;
/// Users who send ten requests per second each, and how many connections the burst has.
const USERS: u32 = 20;
const BURST: u32 = 20;
/// Upper ends of the buckets of latencies, as `docs/metrics.md` of the layers recommends.
const BUCKETS: [f64; 13] =
    [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];

/// A Prometheus that ends with this value.
struct Prometheus {
    process: Child,
    url: String,
    _folder: TempDir,
}

impl Prometheus {
    fn start(scraped: &str) -> Fallible<Self> {
        let folder = TempDir::new()?;
        let config = folder.path().join("prometheus.yml");
        fs::write(
            &config,
            format!(
                "{{global: {{scrape_interval: 1s, scrape_timeout: 900ms}}, scrape_configs: [{{job_name: \
                 service, static_configs: [{{targets: ['{scraped}']}}]}}]}}"
            ),
        )?;
        // Free a moment ago: Prometheus says nothing of a port that it has chosen.
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let process = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error")
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| format!("prometheus: {error}; put it and promtool on PATH"))?;
        Ok(Self { process, url: format!("http://{address}"), _folder: folder })
    }

    /// The series of an expression at each second: their labels and values.
    fn query_range(&self, expression: &str, [from, to]: [u64; 2]) -> Fallible<Vec<Value>> {
        let told = Command::new("promtool")
            .args(["query", "range", "--format=json", "--step=1s"])
            .args([format!("--start={from}"), format!("--end={to}")])
            .args([&self.url, expression])
            .output()?;
        if !told.status.success() {
            return Err(format!("{expression}: {}", String::from_utf8_lossy(&told.stderr)).into());
        }
        Ok(serde_json::from_slice(&told.stdout)?)
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends ten requests per second of this user while the flag says so.
async fn client(
    user: String,
    mut connection: HttpConnection,
    first: Duration,
    on: Arc<AtomicBool>,
) -> Fallible {
    sleep(first).await; // not all users at once
    let mut ticks = interval(Duration::from_millis(100));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while on.load(Ordering::Relaxed) {
        ticks.tick().await;
        connection.ask(&user).await?;
    }
    Ok(())
}

/// Tells the story, and when it began, in seconds since the Unix epoch.
async fn tell(redis: &RedisServer, limited: std::net::SocketAddr) -> Fallible<u64> {
    let mut clients = JoinSet::new();
    let mut spawn = async |user: &dyn Fn(u32) -> String, count: u32, on: &Arc<AtomicBool>| {
        for nth in 0..count {
            let connection = HttpConnection::open(limited).await?;
            let first = Duration::from_millis(100) * nth / count;
            clients.spawn(client(user(nth), connection, first, Arc::clone(on)));
        }
        Fallible::Ok(())
    };
    let over = Arc::new(AtomicBool::new(true));
    spawn(&|nth| format!("user {nth}"), USERS, &over).await?;
    sleep(Duration::from_secs(BEFORE_S.into())).await;
    let begin = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    for (what, seconds) in STORY {
        let bursts = Arc::new(AtomicBool::new(what == "burst"));
        match what {
            "burst" => spawn(&|_| "eve".to_owned(), BURST, &bursts).await?,
            "Redis hangs" => tokio::task::block_in_place(|| redis.pause())?,
            _ => {}
        }
        sleep(Duration::from_secs(seconds.into())).await;
        bursts.store(false, Ordering::Relaxed);
        if what == "Redis hangs" {
            tokio::task::block_in_place(|| redis.resume())?;
        }
    }
    over.store(false, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    Ok(begin)
}

/// The name of a series, as Grafana makes it of the legend's format and the labels.
fn legend(format: &str, labels: &Value) -> String {
    let mut name = String::new();
    let mut rest = format;
    while let Some((before, (label, after))) =
        rest.split_once("{{").and_then(|(before, rest)| Some((before, rest.split_once("}}")?)))
    {
        name += before;
        name += labels[label].as_str().unwrap_or_default();
        rest = after;
    }
    name + rest
}

/// The values of a series at each second, `null` where there is none, with three digits.
fn values(series: &Value, [from, to]: [u64; 2]) -> Vec<Option<f64>> {
    let mut values = vec![None; usize::try_from(to - from).unwrap_or_default() + 1];
    for sample in series["values"].as_array().into_iter().flatten() {
        let value = sample[1].as_str().and_then(|text| text.parse::<f64>().ok());
        let at = sample[0].as_f64().and_then(|at| Duration::try_from_secs_f64(at).ok());
        let after = at.and_then(|at| at.as_secs().checked_sub(from)?.try_into().ok());
        let place = after.and_then(|after: usize| values.get_mut(after));
        if let (Some(place), Some(value)) = (place, value.filter(|value| value.is_finite())) {
            *place = format!("{value:.2e}").parse().ok();
        }
    }
    values
}

pub(crate) fn run(effort: &Effort) -> Fallible {
    let mut report = BenchReport::new(effort)?;
    let exporter = PrometheusBuilder::new().set_buckets(&BUCKETS)?.install_recorder()?;
    let redis = RedisServer::start()?;
    let (begin, prometheus) = runtime()?.block_on(async {
        let limits = Limits::builder()
            .limit("user", Gcra::per_second(20).burst(40))
            .by(["user"])
            .on_outage(OnOutage::Local)
            .warn_at_percent(80)
            .limit("all", Gcra::per_second(1_000).burst(1_000))
            .by(["everyone"])
            .on_outage(OnOutage::Open)
            .limit("stricter", Gcra::per_second(8).burst(8))
            .by(["user"])
            .on_outage(OnOutage::Open)
            .shadow()
            .build()?;
        let store = RedisStore::builder().deadline(DEADLINE * 4 / 5).connect(&redis.url()).await?;
        let store =
            Allotments::builder().lifetime(Duration::from_secs(1)).build(DenialCache::new(store));
        let fallback = Fallback::builder().deadline(DEADLINE).nodes(2.try_into()?);
        let store = fallback.on_recovery(OnRecovery::Charge).build(store, &limits)?;
        let layer = RateLimitLayer::new(RateLimiter::new(limits, Metrics::new(store)));
        let layer =
            layer.by("user", header(USER)).by("everyone", from_fn(|_| Ok(Some("all".into()))));
        let layer = layer.checked()?;
        let metrics = get(move || async move { exporter.render() });
        let limited = serve(service().layer(layer).route("/metrics", metrics)).await?;
        let prometheus = Prometheus::start(&limited.to_string())?;
        Fallible::Ok((tell(&redis, limited).await?, prometheus))
    })?;
    let ends = [begin, begin + u64::from(STORY.iter().map(|(_, seconds)| seconds).sum::<u32>())];
    let mut from_s = 0;
    for (what, seconds) in STORY {
        report.line(&json!({"what": what, "from_s": from_s, "to_s": from_s + seconds}))?;
        from_s += seconds;
    }
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let [Some(expression), Some(format)] =
                ["expr", "legendFormat"].map(|name| target[name].as_str())
            else {
                return Err(format!("{target}").into());
            };
            let filled = expression.replace("$__rate_interval", RATE_INTERVAL);
            let filled = filled.replace("$store", ".*").replace("$limit", ".*");
            let series = prometheus.query_range(&filled, ends)?;
            let series = series
                .iter()
                .map(|series| (legend(format, &series["metric"]), json!(values(series, ends))));
            let series: Map<String, Value> = series.collect();
            report.line(&json!({"expr": expression, "series": series}))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_has_its_name_from_its_labels_and_a_place_for_each_second() {
        let labels = json!({"limit": "user", "choice": "local"});
        assert_eq!(legend("{{limit}} by {{choice}}", &labels), "user by local");
        assert_eq!(legend("{{limit}}{{none}}", &labels), "user");
        let series = json!({"values": [[11, "0.123456"], [13, "NaN"], [14, "2000"]]});
        assert_eq!(values(&series, [10, 13]), [None, Some(0.123), None, None]);
    }
}
