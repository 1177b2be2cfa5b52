//! The limits of a policy, decided from the history of each key: nothing is kept but what was charged, and all of it is
//! counted anew for each request. Slow, plain, and without a line of the crates.

/// What was charged, when, and when the request was over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    pub(crate) at: u64,
    pub(crate) cost: u64,
    pub(crate) ends: Option<u64>,
    /// Whether it did not fit, and was charged as far as there was room.
    pub(crate) fills: bool,
}

/// A limit.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) name: String,
    /// None for a bare key.
    pub(crate) identifiers: Vec<&'static str>,
    pub(crate) algorithm: &'static str,
    pub(crate) count: u64,
    pub(crate) period: (&'static str, u64),
    /// Of a bucket.
    pub(crate) burst: u64,
    pub(crate) attempts: bool,
    pub(crate) shadow: bool,
}

/// What a limit answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    pub(crate) retry_after: Option<u64>,
    pub(crate) reset_after: u64,
}

impl Limit {
    pub(crate) fn is_bucket(&self) -> bool {
        ["gcra", "token-bucket"].contains(&self.algorithm)
    }

    pub(crate) fn capacity(&self) -> u64 {
        if self.is_bucket() { self.burst } else { self.count }
    }

    pub(crate) fn with_capacity(&self, capacity: u64) -> Self {
        let (count, burst) =
            if self.is_bucket() { (self.count, capacity) } else { (capacity, self.burst) };
        Self { count, burst, ..self.clone() }
    }

    /// What a policy document has of it.
    pub(crate) fn toml(&self) -> String {
        let Self { name, identifiers, algorithm, count, period: (period, _), burst, .. } = self;
        let rate = match *algorithm {
            "bucketed-window" => {
                format!("bucket = \"{}\"\nrates = [\"{count}/{period}\"]", self.bucket().0)
            }
            _ => format!("rate = \"{count}/{period}\""),
        };
        let mut text =
            format!("[[limit]]\nname = \"{name}\"\n{rate}\nalgorithm = \"{algorithm}\"\n");
        if !identifiers.is_empty() {
            text += &format!("key = {identifiers:?}\n");
        }
        if self.is_bucket() {
            text += &format!("burst = {burst}\n");
        }
        text += if self.attempts { "count = \"attempts\"\n" } else { "" };
        text + if self.shadow { "shadow = true\n\n" } else { "\n" }
    }

    /// The bucket of a bucketed window.
    fn bucket(&self) -> (&'static str, u64) {
        match self.period.0 {
            "10s" => ("2s", 2_000_000),
            _ => self.period,
        }
    }

    /// The time that counts: a clock that goes back stands still.
    fn now(&self, history: &[Charge], at: u64) -> u64 {
        let period = self.period.1;
        let last = history.last().map_or(0, |last| last.at);
        match self.algorithm {
            "fixed-window" | "sliding-counter" => at.max(last / period * period),
            "bucketed-window" => at.max(last / self.bucket().1 * self.bucket().1),
            "first-request-window" | "window-log" => {
                at.max(self.first_window(history, last).map_or(0, |(start, _)| start))
            }
            _ => at.max(last),
        }
    }

    /// The window that a caller's first request began, if it lasts, and what was charged in it.
    fn first_window(&self, history: &[Charge], now: u64) -> Option<(u64, u64)> {
        let mut window: Option<(u64, u64)> = None;
        for charge in history {
            let open = window.filter(|(start, _)| charge.at < start + self.period.1);
            let (start, used) = open.unwrap_or((charge.at, 0));
            window = Some((start, if charge.fills { self.count } else { used + charge.cost }));
        }
        window.filter(|(start, _)| now < start + self.period.1)
    }

    /// The entries of a log that count, each with when it ends.
    fn entries(&self, history: &[Charge], now: u64) -> Vec<(u64, u64)> {
        let mut entries: Vec<(u64, u64)> = Vec::new();
        for charge in history {
            entries.retain(|(ends, _)| *ends > charge.at);
            if self.algorithm == "concurrency" && charge.ends.is_some_and(|ends| ends <= now) {
                continue;
            }
            entries.push((charge.at + self.period.1, charge.cost.min(self.count)));
            if charge.fills {
                let mut excess =
                    entries.iter().map(|(_, cost)| cost).sum::<u64>().saturating_sub(self.count);
                for (_, cost) in &mut entries {
                    let dropped = excess.min(*cost);
                    (excess, *cost) = (excess - dropped, *cost - dropped);
                }
            }
        }
        entries.retain(|(ends, cost)| *ends > now && *cost > 0);
        entries
    }

    /// What is left of a bucket, in parts of which each unit of cost has as many as the period has microseconds.
    fn tokens(&self, history: &[Charge], now: u64) -> u64 {
        let full = self.burst * self.period.1;
        let (mut tokens, mut since) = (full, 0);
        for charge in history {
            tokens = full.min(tokens + (charge.at - since) * self.count);
            tokens = if charge.fills { 0 } else { tokens - charge.cost * self.period.1 };
            since = charge.at;
        }
        full.min(tokens + (now - since) * self.count)
    }

    /// What counts of the window that begins at `start`.
    fn in_window(&self, history: &[Charge], start: u64) -> u64 {
        let mut used = 0;
        for charge in
            history.iter().filter(|charge| charge.at / self.period.1 * self.period.1 == start)
        {
            used = if charge.fills { self.count } else { used + charge.cost };
        }
        used
    }

    /// What counts of all that was charged, at a time that does not go back.
    fn used(&self, history: &[Charge], now: u64) -> u64 {
        let (period, start) = (self.period.1, now / self.period.1 * self.period.1);
        match self.algorithm {
            "fixed-window" => self.in_window(history, start),
            "first-request-window" | "window-log" => {
                self.first_window(history, now).map_or(0, |(_, used)| used)
            }
            "sliding-log" | "concurrency" => {
                self.entries(history, now).iter().map(|(_, cost)| cost).sum()
            }
            "sliding-counter" => {
                let previous =
                    if start < period { 0 } else { self.in_window(history, start - period) };
                previous * (start + period - now) / period + self.in_window(history, start)
            }
            "bucketed-window" => {
                let bucket = self.bucket().1;
                let counts =
                    |charge: &&Charge| charge.at / bucket * bucket + period > now / bucket * bucket;
                history.iter().filter(counts).map(|charge| charge.cost).sum()
            }
            other => panic!("{other} counts nothing"),
        }
    }

    /// What is left in whole units.
    fn left(&self, history: &[Charge], now: u64) -> u64 {
        if self.is_bucket() {
            return self.tokens(history, now) / self.period.1;
        }
        self.count.saturating_sub(self.used(history, now))
    }

    /// The moments from `now` on at which more may fit, in order.
    fn changes(&self, history: &[Charge], now: u64) -> Vec<u64> {
        let (period, start) = (self.period.1, now / self.period.1 * self.period.1);
        match self.algorithm {
            "fixed-window" => vec![start + period],
            "first-request-window" | "window-log" => self
                .first_window(history, now)
                .into_iter()
                .map(|(start, _)| start + period)
                .collect(),
            "sliding-log" | "concurrency" => {
                self.entries(history, now).iter().map(|(ends, _)| *ends).collect()
            }
            "bucketed-window" => {
                let bucket = self.bucket().1;
                let mut ends: Vec<_> =
                    history.iter().map(|charge| charge.at / bucket * bucket + period).collect();
                ends.retain(|ends| *ends > now);
                ends
            }
            other => panic!("{other} changes at every moment"),
        }
    }

    /// The first moment after `now` at which so much is left, if nothing else is charged.
    fn when(&self, history: &[Charge], now: u64, cost: u64) -> Option<u64> {
        if cost > self.capacity() {
            return None;
        }
        let fits = |at: u64| self.left(history, at) >= cost;
        if ["gcra", "token-bucket", "sliding-counter"].contains(&self.algorithm) {
            // It fits the better the later it is.
            let (mut no, mut yes) = (now, now + (self.capacity() + 2) * 2 * self.period.1);
            while yes - no > 1 {
                let middle = no.midpoint(yes);
                if fits(middle) { yes = middle } else { no = middle }
            }
            return Some(yes);
        }
        self.changes(history, now).into_iter().find(|at| fits(*at))
    }

    /// What the limit answers once these were charged, of a request at this time and cost. `is_over`: whether it is
    /// admitted, so that it will not come again.
    fn answer(
        &self,
        history: &[Charge],
        at: u64,
        cost: u64,
        [allowed, is_over]: [bool; 2],
    ) -> Answer {
        let now = self.now(history, at);
        let fits = is_over || self.left(history, now) >= cost;
        let retry_after =
            if fits { Some(0) } else { self.when(history, now, cost).map(|fits| fits - at) };
        let (limit, remaining) = (self.capacity(), self.left(history, now));
        let is_full = self.left(history, now) == limit;
        let full = self.when(history, now, limit).filter(|_| !is_full);
        let reset_after = full.map_or(0, |full| full - at);
        Answer { allowed, limit, remaining, retry_after, reset_after }
    }

    /// Decides a request alone: whether it fits.
    pub(crate) fn fits(&self, history: &[Charge], at: u64, cost: u64) -> bool {
        self.left(history, self.now(history, at)) >= cost
    }

    /// Answers a request, and charges it: if no limit of the request denies it, and by attempts in any case.
    pub(crate) fn decide(
        &self,
        history: &mut Vec<Charge>,
        (at, cost, ends): (u64, u64, Option<u64>),
        denied: bool,
    ) -> Answer {
        let fits = self.fits(history, at, cost);
        let charges = cost > 0 && (self.attempts || fits && !denied);
        if charges {
            // The request itself is not over when it is answered.
            history.push(Charge { at: self.now(history, at), cost, ends: None, fills: !fits });
        }
        let answer = self.answer(history, at, cost, [fits, fits && !denied]);
        if let Some(last) = history.last_mut().filter(|_| charges) {
            last.ends = ends;
        }
        answer
    }
}
