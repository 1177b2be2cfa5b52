//! The limits of a policy, decided from the history of each key: nothing is kept but what was
//! charged, and all of it is counted anew for each request. Slow, plain, and without a line of the
//! crates.

mod lockout;

use lockout::BLOCK;

/// What was charged, when, and when the request was over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    pub(crate) at: u64,
    pub(crate) cost: u64,
    pub(crate) how: How,
    pub(crate) over: Option<Over>,
    /// The count of the limit that charged it.
    pub(crate) count: u64,
}

/// How a charge counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Fits,
    /// It did not fit, and was charged as far as there was room.
    Fills,
    GivesBack,
    /// So many parts of a bucket are missing, whatever was charged before.
    Leaves,
}

/// When a request is over, and the line that shows it: the first later one of that time or a later
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over {
    pub(crate) line: usize,
    pub(crate) at: u64,
}

/// A request as one limit sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'r> {
    pub(crate) op: &'r str,
    pub(crate) at: u64,
    pub(crate) cost: u64,
    pub(crate) over: Option<Over>,
}

/// A limit.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) name: String,
    /// None for a bare key.
    pub(crate) identifiers: Vec<&'static str>,
    /// An identifier, its values, and whether they exclude.
    pub(crate) when: Option<(&'static str, [&'static str; 2], bool)>,
    pub(crate) algorithm: &'static str,
    pub(crate) count: u64,
    pub(crate) period: (&'static str, u64),
    /// The further windows of a bucketed window, and its bucket.
    pub(crate) windows: Vec<(u64, (&'static str, u64))>,
    pub(crate) bucket: (&'static str, u64),
    /// Of a bucket.
    pub(crate) burst: u64,
    pub(crate) debt: u64,
    pub(crate) attempts: bool,
    pub(crate) required: bool,
    pub(crate) shadow: bool,
    /// Up to which count, or burst, it accepts those of a request.
    pub(crate) max: Option<u64>,
}

/// What a limit answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    pub(crate) retry_after: Option<u64>,
    pub(crate) reset_after: u64,
    pub(crate) owed: u64,
    pub(crate) forgiven: u64,
}

impl Limit {
    pub(crate) fn is_bucket(&self) -> bool {
        ["gcra", "token-bucket"].contains(&self.algorithm)
    }

    /// Whether each charge counts for itself until it ends.
    fn is_log(&self) -> bool {
        ["sliding-log", "bucketed-window", "concurrency"].contains(&self.algorithm)
    }

    /// Each window: how many, in how many microseconds.
    fn spans(&self) -> Vec<(u64, u64)> {
        let first = [(self.count, self.period)];
        first.iter().chain(&self.windows).map(|(count, period)| (*count, period.1)).collect()
    }

    pub(crate) fn counts(&self) -> Vec<u64> {
        self.spans().iter().map(|(count, _)| *count).collect()
    }

    pub(crate) fn capacity(&self) -> u64 {
        if self.is_bucket() { self.burst } else { self.counts().into_iter().min().expect("one") }
    }

    /// Several windows keep their ratio.
    pub(crate) fn with_capacity(&self, capacity: u64) -> Self {
        let mut limit = self.clone();
        if self.is_bucket() {
            limit.burst = capacity;
            return limit;
        }
        let counts = std::iter::once(&mut limit.count);
        for count in counts.chain(limit.windows.iter_mut().map(|(count, _)| count)) {
            *count = (*count * capacity).div_ceil(self.capacity());
        }
        limit
    }

    /// The limit at the number that a request brings: of a bucket its burst, else its count.
    pub(crate) fn at_number(&self, number: u64) -> Self {
        match (self.is_bucket(), number) {
            (true, 0) => Self { count: 0, burst: 0, ..self.clone() },
            (true, burst) => Self { count: self.count.max(1), burst, ..self.clone() },
            (false, count) => Self { count, ..self.clone() },
        }
    }

    /// The numbers as a trace or a policy has them.
    pub(crate) fn numbers(&self) -> String {
        let Self { count, period: (period, _), burst, .. } = self;
        let rates = self.windows.iter().map(|(count, period)| format!(", {count}/{}", period.0));
        match self.algorithm {
            _ if self.is_bucket() && *count > 0 => format!("{count}/{period} burst {burst}"),
            "bucketed-window" => {
                format!(
                    "bucket {} rates {count}/{period}{}",
                    self.bucket.0,
                    rates.collect::<String>()
                )
            }
            "lockout" => {
                let block = BLOCK.replace(" = ", " ").replace('"', "").replace('\n', " ");
                format!("{count}/{period} {block}")
            }
            _ => format!("{count}/{period}"),
        }
    }

    /// What another limit of these numbers has left of a key, as this one takes it over.
    pub(crate) fn taken_over(&self, other: &Self, history: &[Charge]) -> Vec<Charge> {
        let Some(last) = history.last().filter(|_| self.numbers() != other.numbers()) else {
            return history.to_vec();
        };
        let one = |at, cost, how| vec![Charge { at, cost, how, over: None, count: self.count }];
        match self.algorithm {
            _ if self.is_bucket() => {
                let parts = |units: u64| i128::from(units) * i128::from(self.period.1);
                let missing = parts(other.burst) - other.tokens(history, last.at);
                let missing = missing.min(parts(self.burst));
                one(last.at, u64::try_from(missing).expect("no debt"), How::Leaves)
            }
            "fixed-window" => {
                let used = other.in_window(history, self.window_of(last.at)).min(self.count);
                one(last.at, used, How::Fits)
            }
            "first-request-window" => match other.first_window(history, last.at) {
                Some((start, used)) => one(start, used.min(self.count), How::Fits),
                None => Vec::new(),
            },
            // The others keep each charge.
            _ => history.to_vec(),
        }
    }

    /// Each window as a limit of its own, so large that it denies nothing.
    pub(crate) fn unbounded(&self) -> Vec<Self> {
        let periods = std::iter::once(self.period).chain(self.windows.iter().map(|(_, of)| *of));
        let of =
            |period| Self { period, windows: Vec::new(), ..self.clone() }.with_capacity(1 << 30);
        periods.map(of).collect()
    }

    /// The limit at its max, which no window is larger than.
    fn with_max(&self, max: u64) -> Self {
        let windows = self.windows.iter().map(|(count, period)| (max.max(*count), *period));
        Self { windows: windows.collect(), ..self.at_number(max) }
    }

    /// What a policy document has of it.
    pub(crate) fn toml(&self) -> String {
        let Self { name, identifiers, algorithm, count, period: (period, _), burst, .. } = self;
        let rates =
            self.windows.iter().map(|(count, period)| format!(", \"{count}/{}\"", period.0));
        let rate = match *algorithm {
            "bucketed-window" => format!(
                "bucket = \"{}\"\nrates = [\"{count}/{period}\"{}]",
                self.bucket.0,
                rates.collect::<String>()
            ),
            "lockout" => format!("rate = \"{count}/{period}\"\n{BLOCK}"),
            _ => format!("rate = \"{count}/{period}\""),
        };
        let mut text =
            format!("[[limit]]\nname = \"{name}\"\n{rate}\nalgorithm = \"{algorithm}\"\n");
        if !identifiers.is_empty() {
            text += &format!("key = {identifiers:?}\n");
        }
        match self.when {
            Some((name, values, false)) => text += &format!("when = {{ {name} = {values:?} }}\n"),
            Some((name, values, true)) => {
                text += &format!("when = {{ not = {{ {name} = {values:?} }} }}\n");
            }
            None => {}
        }
        if self.is_bucket() && *count > 0 {
            text += &format!("burst = {burst}\n");
        }
        if let Some(max) = self.max {
            text += &format!("max = \"{}\"\n", self.with_max(max).numbers());
        }
        if self.debt > 0 {
            text += &format!("debt = {}\n", self.debt);
        }
        text += if self.attempts { "count = \"attempts\"\n" } else { "" };
        text += if self.required { "required = true\n" } else { "" };
        text + if self.shadow { "shadow = true\n\n" } else { "\n" }
    }

    fn window_of(&self, at: u64) -> u64 {
        at / self.period.1 * self.period.1
    }

    /// The time that counts: a clock that goes back stands still.
    fn now(&self, history: &[Charge], at: u64) -> u64 {
        let last = history.last().map_or(0, |last| last.at);
        match self.algorithm {
            // What it remembers are times, which stay where they are.
            "lockout" => at,
            "fixed-window" | "sliding-counter" => at.max(self.window_of(last)),
            "bucketed-window" => at.max(last / self.bucket.1 * self.bucket.1),
            "first-request-window" | "window-log" => {
                at.max(self.first_window(history, last).map_or(0, |(start, _)| start))
            }
            _ => at.max(last),
        }
    }

    /// What a window counts after this charge.
    fn count_with(&self, used: u64, charge: &Charge) -> u64 {
        match charge.how {
            How::Fits => used + charge.cost,
            How::Fills => self.count.min(used + charge.cost),
            How::Leaves => unreachable!("of buckets"),
            How::GivesBack => used.saturating_sub(charge.cost),
        }
    }

    /// The window that a caller's first request began, if it lasts, and what was charged in it.
    fn first_window(&self, history: &[Charge], now: u64) -> Option<(u64, u64)> {
        let mut window: Option<(u64, u64)> = None;
        for charge in history {
            let open = window.filter(|(start, _)| charge.at < start + self.period.1);
            let (start, used) = open.unwrap_or((charge.at, 0));
            window = Some((start, self.count_with(used, charge)));
        }
        window.filter(|(start, _)| now < start + self.period.1)
    }

    /// When a charge of a log counts no longer.
    fn ends(&self, charge: &Charge) -> u64 {
        let longest = self.spans().iter().map(|(_, span)| *span).max().expect("one");
        self.ends_in(charge, longest)
    }

    fn ends_in(&self, charge: &Charge, span: u64) -> u64 {
        let is_aligned = self.algorithm == "bucketed-window";
        let bucket = if is_aligned { self.bucket.1 } else { 1 };
        charge.at / bucket * bucket + span
    }

    /// The charges of a log that count, each with what counts of it.
    fn live(&self, history: &[Charge], now: u64) -> Vec<Charge> {
        let mut live: Vec<Charge> = Vec::new();
        for charge in history {
            live.retain(|one| self.ends(one) > charge.at);
            let is_fill = charge.how == How::Fills;
            let cost = if is_fill { charge.cost.min(self.count) } else { charge.cost };
            live.push(Charge { cost, how: How::Fits, ..*charge });
            if is_fill {
                let used: u64 = live.iter().map(|one| one.cost).sum();
                let mut excess = used.saturating_sub(self.count);
                for one in &mut live {
                    let dropped = excess.min(one.cost);
                    (excess, one.cost) = (excess - dropped, one.cost - dropped);
                }
            }
        }
        live.retain(|one| self.ends(one) > now && one.cost > 0);
        live
    }

    /// What is left of a bucket, in parts of which each unit of cost has as many as the period has
    /// microseconds. A debt makes it negative.
    fn tokens(&self, history: &[Charge], now: u64) -> i128 {
        let parts = |units: u64| i128::from(units) * i128::from(self.period.1);
        let (full, mut since) = (parts(self.burst), 0);
        let mut tokens = full;
        let flow = |us: u64| i128::from(us) * i128::from(self.count);
        for charge in history {
            tokens = full.min(tokens + flow(charge.at - since));
            tokens = match charge.how {
                How::Fits => tokens - parts(charge.cost),
                How::Fills => -parts(self.debt),
                How::Leaves => full - i128::from(charge.cost),
                How::GivesBack => full.min(tokens + parts(charge.cost)),
            };
            since = charge.at;
        }
        full.min(tokens + flow(now - since))
    }

    /// What the window that begins at `start` counts: what was charged in it, and what is owed by
    /// those before.
    fn in_window(&self, history: &[Charge], start: u64) -> u64 {
        let carried = |used: u64, from: u64, to: u64| match self.algorithm {
            "fixed-window" => used.saturating_sub((to - from) / self.period.1 * self.count),
            _ if from == to => used,
            _ => 0,
        };
        let (mut window, mut used) = (0, 0);
        for charge in history.iter().filter(|charge| self.window_of(charge.at) <= start) {
            used = carried(used, window, self.window_of(charge.at));
            (window, used) = (self.window_of(charge.at), self.count_with(used, charge));
        }
        carried(used, window, start)
    }

    /// What counts of all that was charged in a window of this length, at a time that does not go
    /// back.
    fn used(&self, history: &[Charge], now: u64, span: u64) -> u64 {
        let (period, start) = (self.period.1, self.window_of(now));
        match self.algorithm {
            "fixed-window" => self.in_window(history, start),
            "first-request-window" | "window-log" => {
                self.first_window(history, now).map_or(0, |(_, used)| used)
            }
            "lockout" => {
                let key = self.locked(history, now);
                if key.until > now { self.count } else { key.used }
            }
            "sliding-counter" => {
                // Of what a larger count has admitted, as much counts as this one has.
                let of = |start| self.in_window(history, start).min(self.count);
                let previous = if start < period { 0 } else { of(start - period) };
                previous * (start + period - now) / period + of(start)
            }
            _ => {
                let live = self.live(history, now);
                let counts = live.iter().filter(|charge| self.ends_in(charge, span) > now);
                counts.map(|charge| charge.cost).sum()
            }
        }
    }

    /// The limit of the window with the least left, and what is left in whole units.
    fn least(&self, history: &[Charge], now: u64) -> (u64, u64) {
        if self.is_bucket() {
            let left = self.tokens(history, now).max(0) / i128::from(self.period.1);
            return (self.burst, u64::try_from(left).expect("at most the burst"));
        }
        let left = |(count, span): (u64, u64)| {
            (count, count.saturating_sub(self.used(history, now, span)))
        };
        self.spans().into_iter().map(left).min_by_key(|(_, left)| *left).expect("one")
    }

    fn remaining(&self, history: &[Charge], now: u64) -> u64 {
        self.least(history, now).1
    }

    fn owed(&self, history: &[Charge], now: u64) -> u64 {
        match self.algorithm {
            _ if self.debt == 0 => 0,
            "fixed-window" => self.used(history, now, self.period.1).saturating_sub(self.count),
            _ => {
                let owed = (-self.tokens(history, now)).max(0);
                u64::try_from(owed).expect("at most the debt").div_ceil(self.period.1)
            }
        }
    }

    fn is_unused(&self, history: &[Charge], now: u64) -> bool {
        if self.is_bucket() {
            return self.tokens(history, now) == i128::from(self.burst * self.period.1);
        }
        if self.algorithm == "lockout" {
            return self.locked(history, now).forgotten(self) <= now;
        }
        self.spans().iter().all(|(_, span)| self.used(history, now, *span) == 0)
    }

    /// The moments from `now` on at which more may fit, in order.
    fn changes(&self, history: &[Charge], now: u64) -> Vec<u64> {
        let (period, start) = (self.period.1, self.window_of(now));
        let mut changes: Vec<_> = match self.algorithm {
            "lockout" => {
                let key = self.locked(history, now);
                let all = [key.start + period, key.until, key.forgotten(self)];
                all.into_iter().filter(|at| *at > now).collect()
            }
            "fixed-window" => {
                // Each window pays as much as it has.
                let windows = self.used(history, now, period) / self.count + 1;
                (1..=windows).map(|nth| start + nth * period).collect()
            }
            "first-request-window" | "window-log" => self
                .first_window(history, now)
                .into_iter()
                .map(|(start, _)| start + period)
                .collect(),
            _ => {
                let (live, spans) = (self.live(history, now), self.spans());
                let ends = |charge| spans.iter().map(move |(_, span)| self.ends_in(charge, *span));
                live.iter().flat_map(ends).filter(|ends| *ends > now).collect()
            }
        };
        changes.sort_unstable();
        changes
    }

    /// The first moment after `now` at which this holds, if nothing else is charged.
    fn when(&self, history: &[Charge], now: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
        if ["gcra", "token-bucket", "sliding-counter"].contains(&self.algorithm) {
            // It holds the sooner the later it is.
            let most = self.capacity() + self.debt + 2;
            let (mut no, mut yes) = (now, now + most * 2 * self.period.1);
            while yes - no > 1 {
                let middle = no.midpoint(yes);
                if holds(middle) { yes = middle } else { no = middle }
            }
            return Some(yes);
        }
        self.changes(history, now).into_iter().find(|at| holds(*at))
    }

    /// What the limit answers once these were charged, of a request at this time and cost.
    /// `is_over`: whether it is admitted, so that it will not come again.
    fn answer(
        &self,
        history: &[Charge],
        (at, cost): (u64, u64),
        [allowed, is_over]: [bool; 2],
        forgiven: u64,
    ) -> Answer {
        let now = self.now(history, at);
        let fits = |at| self.remaining(history, at) >= cost;
        let retry_after = match cost {
            _ if is_over || fits(now) => Some(0),
            cost if cost > self.capacity() => None,
            _ => self.when(history, now, fits).map(|fits| fits - at),
        };
        let (limit, remaining) = self.least(history, now);
        let is_unused = |at| self.is_unused(history, at);
        // What admits nothing has nothing to recover.
        let unused = || self.when(history, now, is_unused);
        let unused = if is_unused(now) || self.capacity() == 0 { None } else { unused() };
        let reset_after = unused.map_or(0, |unused| unused - at);
        let owed = self.owed(history, now);
        Answer { allowed, limit, remaining, retry_after, reset_after, owed, forgiven }
    }

    /// Decides a request alone: whether it fits.
    pub(crate) fn fits(&self, history: &[Charge], at: u64, cost: u64) -> bool {
        self.remaining(history, self.now(history, at)) >= cost
    }

    /// Ends the leases of requests that are over by this line.
    pub(crate) fn end(&self, history: &mut Vec<Charge>, line: usize) {
        let of_line = |charge: &Charge| charge.over.filter(|over| over.line <= line);
        while let Some(over) = history.iter().filter_map(of_line).min_by_key(|over| over.at) {
            let now = self.now(history, over.at);
            history.retain(|charge| charge.over != Some(over) && self.ends(charge) > now);
        }
    }

    /// Charges a request: if no limit of it denies it, and by attempts in any case. Returns whether
    /// it fits, and what is forgiven.
    pub(crate) fn charge(
        &self,
        history: &mut Vec<Charge>,
        Asked { op, at, cost, over }: Asked<'_>,
        denied: bool,
    ) -> (bool, u64) {
        let now = self.now(history, at);
        let fits = match op {
            "reset" | "refund" | "force" => true,
            _ => self.fits(history, at, cost),
        };
        let mut forgiven = 0;
        match op {
            "reset" => history.clear(),
            "refund" => self.give_back(history, now, cost),
            "force" => forgiven = self.force(history, now, cost),
            _ if cost > 0 && (self.attempts || fits && !denied) => {
                let how = if fits { How::Fits } else { How::Fills };
                let is_lease = self.algorithm == "concurrency";
                let over = over.filter(|over| is_lease && over.at - at < self.period.1);
                let newest = if self.algorithm == "lockout" { history.last() } else { None };
                let at = newest.map_or(now, |newest| now.max(newest.at));
                history.push(Charge { at, cost, how, over, count: self.count });
            }
            _ => {}
        }
        (fits, forgiven)
    }

    /// Charges a request, and answers it.
    pub(crate) fn decide(
        &self,
        history: &mut Vec<Charge>,
        asked: Asked<'_>,
        denied: bool,
    ) -> Answer {
        let (fits, forgiven) = self.charge(history, asked, denied);
        let cost = if asked.op == "reset" { 0 } else { asked.cost };
        let answer = self.answer(history, (asked.at, cost), [fits, fits && !denied], forgiven);
        // Only a debt is accounted for, of a limit that is enforced.
        let is_told = self.debt > 0 && !self.shadow;
        if is_told { answer } else { Answer { owed: 0, forgiven: 0, ..answer } }
    }

    /// What is used once these were charged, at most.
    pub(crate) fn used_at(&self, history: &[Charge], at: u64) -> u64 {
        let (limit, left) = self.least(history, self.now(history, at));
        limit - left
    }

    /// Takes a cost off what counts, of a log off the newest.
    fn give_back(&self, history: &mut Vec<Charge>, now: u64, cost: u64) {
        let has_any = match self.algorithm {
            // What the window before admitted stays.
            "sliding-counter" => self.in_window(history, self.window_of(now)) > 0,
            _ => !self.is_unused(history, now),
        };
        if cost == 0 || !has_any {
            return;
        }
        if self.is_log() {
            *history = self.live(history, now);
            let mut back = cost;
            for charge in history.iter_mut().rev() {
                let part = back.min(charge.cost);
                (back, charge.cost) = (back - part, charge.cost - part);
            }
            history.retain(|charge| charge.cost > 0);
        } else {
            let at = self.counted_at(history, now, 0);
            history.push(Charge { at, cost, how: How::GivesBack, over: None, count: self.count });
        }
        if self.is_unused(history, now) {
            history.clear();
        }
    }

    /// Charges a cost as far as there is room, and returns what is left out.
    fn force(&self, history: &mut Vec<Charge>, now: u64, cost: u64) -> u64 {
        let room = self.remaining(history, now) + self.debt - self.owed(history, now);
        let forgiven = cost.saturating_sub(room);
        let (charged, how) = if self.is_bucket() && forgiven > 0 {
            // Parts of a unit, too.
            let parts = self.tokens(history, now) + i128::from(self.debt * self.period.1);
            (u64::from(parts > 0), How::Fills)
        } else {
            (cost.min(room), How::Fits)
        };
        if charged > 0 {
            let at = self.counted_at(history, now, charged);
            history.push(Charge { at, cost: charged, how, over: None, count: self.count });
        }
        forgiven
    }

    /// When a forced charge or a refund counts: in the window of what is still owed, if that has
    /// room.
    fn counted_at(&self, history: &[Charge], now: u64, charge: u64) -> u64 {
        let owing = history.last().filter(|_| self.algorithm == "fixed-window");
        let has_room = |last: &&Charge| {
            let used = self.in_window(history, self.window_of(last.at));
            !self.is_unused(history, now) && used + charge <= self.count + self.debt
        };
        owing.filter(has_room).map_or(now, |last| last.at)
    }
}
