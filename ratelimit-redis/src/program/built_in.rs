//! The table of built-in algorithms: all that this crate knows of each stands in its row.
//!
//! A row is an implementation of [`BuiltIn`] and, beside it, the form of the state in
//! [`Cas`](crate::Cas) and, if a transaction can decide the algorithm, a [`MultiProgram`]. The list
//! at the end names the rows. Wherever the algorithms are distinguished, it writes the code.

use ratelimit_core::algorithm::{
    AnyState, BucketCount, BucketedWindowState, ConcurrencyState, FirstRequestState,
    FixedWindowState, GcraState, LockoutState, LoggedCost, LoggedRequest, MAX_INTEGER, Refill,
    SlidingCounterState, SlidingLogState, WindowLogState,
};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra,
    Lockout, Record, SlidingCounter, SlidingLog, Timestamp, UnendedRecord, WindowLog,
};

use super::{Keeps, LuaProgram, MAX_PARAMETERS, Program, Stored, Twin};
use crate::codec::{
    Codec, Numbers, RecordText, decode_numbers, encode_numbers, in_fields, number, parts,
};
use crate::native::{MultiProgram, Native, NativeCharge, Storage, last_window, sum};

/// What this crate knows of a built-in algorithm.
trait BuiltIn: Algorithm {
    /// Its twin: a static, since [`Program::is_built_in`] finds it by its address.
    const PROGRAM: &'static Program;

    /// The twin with this limit's numbers, in the order in which the program names them.
    fn twin(&self) -> Twin;

    /// The state of the numbers that the twin stores in a field, or that a script answers.
    fn of_numbers(numbers: &[u64]) -> Option<Self::State>;

    /// The state of what the twin stores. One that keeps it under a key of its own reads that here.
    fn of_stored(&self, stored: &Stored) -> Option<Self::State> {
        Self::of_numbers(stored.numbers(Self::PROGRAM)?)
    }

    /// When the newest charge of a state was made, by which a state from the future is found.
    fn newest(state: &Self::State) -> Option<Timestamp>;

    /// Itself, if a transaction can decide it.
    fn in_transaction(&self) -> Option<&dyn MultiProgram<State = Self::State>> {
        None
    }
}

/// Stores these states as the program's name and these fields, in this order.
macro_rules! stored_as_numbers {
    ($algorithm:ident: $state:ident { $($field:ident),+ }) => {
        in_fields!($state { $($field),+ });

        impl Codec for $state {
            fn encode(&self) -> Vec<u8> {
                encode_numbers($algorithm::PROGRAM.name, self)
            }

            fn decode(bytes: &[u8]) -> Option<Self> {
                decode_numbers($algorithm::PROGRAM.name, bytes)
            }
        }
    };
}

/// A transaction counts per window, of which no more counts than the limit.
macro_rules! counted_in_transactions {
    ($algorithm:ident: $state:ident $(unless $calendar:ident)?) => {
        impl MultiProgram for $algorithm {
            fn native(&self) -> Option<Native> {
                $(
                    // A counter does not know when a window of a calendar ends.
                    if self.$calendar().is_some() {
                        return None;
                    }
                )?
                let window_us = self.window_us();
                Some(Native { storage: Storage::Counters, window_us })
            }

            fn state(&self, entries: &[NativeCharge]) -> Option<$state> {
                let window_us = self.window_us();
                let (start, window) = last_window(entries, window_us)?;
                let count = sum(window).min(self.capacity());
                Some($state { start, count, ends_us: start.as_us() + window_us })
            }

            fn newest(&self, state: &$state) -> Option<NativeCharge> {
                Some(NativeCharge::plain(state.start, state.count))
            }
        }
    };
}

stored_as_numbers!(Gcra: GcraState { tat_us, surplus, timestamp });

impl BuiltIn for Gcra {
    const PROGRAM: &'static Program = {
        static GCRA: Program = Program::of_numbers(
            "gcra",
            <GcraState as Numbers>::NAMES,
            &["tick_units", "tick_us", "most"],
            include_str!("../lua/gcra.lua"),
        );
        &GCRA
    };

    fn twin(&self) -> Twin {
        let Refill { token_units, tick_units, tick_us, .. } = *self.refill();
        let parameters = [tick_units, tick_us, self.refill().most_units()];
        Twin::new(Self::PROGRAM, self.capacity(), parameters).in_units(token_units)
    }

    fn of_numbers(numbers: &[u64]) -> Option<GcraState> {
        Numbers::of(numbers)
    }

    fn newest(state: &GcraState) -> Option<Timestamp> {
        Some(state.timestamp)
    }
}

stored_as_numbers!(FixedWindow: FixedWindowState { start, count, ends_us });
counted_in_transactions!(FixedWindow: FixedWindowState unless calendar);

impl BuiltIn for FixedWindow {
    const PROGRAM: &'static Program = {
        static FIXED_WINDOW: Program = Program::of_numbers(
            "fixed-window",
            <FixedWindowState as Numbers>::NAMES,
            &["window_us", "most"],
            include_str!("../lua/fixed_window.lua"),
        );
        &FIXED_WINDOW
    };

    fn twin(&self) -> Twin {
        let most = self.capacity() + self.debt();
        let twin = |window_us| Twin::new(Self::PROGRAM, self.capacity(), [window_us, most]);
        match self.calendar() {
            None => twin(self.window_us()),
            Some(calendar) => twin(0).by_calendar(calendar),
        }
    }

    fn of_numbers(numbers: &[u64]) -> Option<FixedWindowState> {
        Numbers::of(numbers)
    }

    fn newest(state: &FixedWindowState) -> Option<Timestamp> {
        Some(state.start)
    }

    fn in_transaction(&self) -> Option<&dyn MultiProgram<State = FixedWindowState>> {
        Some(self)
    }
}

stored_as_numbers!(FirstRequestWindow: FirstRequestState { start, count, ends_us });
counted_in_transactions!(FirstRequestWindow: FirstRequestState);

impl BuiltIn for FirstRequestWindow {
    const PROGRAM: &'static Program = {
        static FIRST_REQUEST_WINDOW: Program = Program::of_numbers(
            "first-request-window",
            <FirstRequestState as Numbers>::NAMES,
            &["window_us"],
            include_str!("../lua/first_request_window.lua"),
        );
        &FIRST_REQUEST_WINDOW
    };

    fn twin(&self) -> Twin {
        Twin::new(Self::PROGRAM, self.capacity(), [self.window_us()])
    }

    fn of_numbers(numbers: &[u64]) -> Option<FirstRequestState> {
        Numbers::of(numbers)
    }

    fn newest(state: &FirstRequestState) -> Option<Timestamp> {
        Some(state.start)
    }

    fn in_transaction(&self) -> Option<&dyn MultiProgram<State = FirstRequestState>> {
        Some(self)
    }
}

// The metadata of its entries may be any bytes: `codec/window_log.rs` stores them.
impl BuiltIn for WindowLog {
    const PROGRAM: &'static Program = {
        static WINDOW_LOG: Program = Program::of_entries(
            "window-log",
            &["limit", "window_us"],
            include_str!("../lua/window_log.lua"),
            Keeps::List,
        );
        &WINDOW_LOG
    };

    fn twin(&self) -> Twin {
        Twin::new(Self::PROGRAM, self.capacity(), [self.capacity(), self.window_us()])
    }

    /// A script answers the window's start and its total, and no single entries.
    fn of_numbers(numbers: &[u64]) -> Option<WindowLogState> {
        let [start, total] = *numbers else { return None };
        let start = Timestamp::from_us(start)?;
        let all = LoggedRequest { timestamp: start, cost: total, metadata: [].into() };
        Some(WindowLogState { start, entries: vec![all] })
    }

    fn of_stored(&self, stored: &Stored) -> Option<WindowLogState> {
        let Stored::List(elements) = stored else {
            return Self::of_numbers(stored.numbers(Self::PROGRAM)?);
        };
        let mut newest_start = None;
        let entries = elements.iter().map(|element| {
            let (entry, start) = window_entry(element)?;
            newest_start = Some(start);
            Some(entry)
        });
        let entries = entries.collect::<Option<_>>()?;
        Some(WindowLogState { start: newest_start?, entries })
    }

    fn newest(state: &WindowLogState) -> Option<Timestamp> {
        Some(state.entries.last().map_or(state.start, |entry| entry.timestamp))
    }

    fn in_transaction(&self) -> Option<&dyn MultiProgram<State = WindowLogState>> {
        Some(self)
    }
}

/// Parses an element and the start of its window: `TIMESTAMP COST TOTAL START METADATA`.
fn window_entry(element: &[u8]) -> Option<(LoggedRequest, Timestamp)> {
    let mut parts = element.splitn(5, |byte| *byte == b' ');
    let mut number = || number(parts.next()?);
    let (timestamp, cost, _total, start) = (number()?, number()?, number()?, number()?);
    let metadata = parts.next()?.into();
    Some((
        LoggedRequest { timestamp: Timestamp::from_us(timestamp)?, cost, metadata },
        Timestamp::from_us(start)?,
    ))
}

impl MultiProgram for WindowLog {
    fn native(&self) -> Option<Native> {
        Some(Native { storage: Storage::List, window_us: self.window_us() })
    }

    fn state(&self, entries: &[NativeCharge]) -> Option<WindowLogState> {
        let (start, window) = last_window(entries, self.window_us())?;
        let entries = window.into_iter().map(|entry| entry.charged.clone()).collect();
        Some(WindowLogState { start, entries })
    }

    fn newest(&self, state: &WindowLogState) -> Option<NativeCharge> {
        Some(NativeCharge { since: state.start, charged: state.entries.last()?.clone() })
    }
}

stored_as_numbers!(BucketedWindow: BucketedWindowState { buckets });

impl BuiltIn for BucketedWindow {
    const PROGRAM: &'static Program = {
        static BUCKETED_WINDOW: Program = Program::of_entries(
            "bucketed-window",
            &[
                "bucket_us",
                "limit1",
                "span1_us",
                "limit2",
                "span2_us",
                "limit3",
                "span3_us",
                "limit4",
                "span4_us",
            ],
            include_str!("../lua/bucketed_window.lua"),
            Keeps::Numbers,
        );
        &BUCKETED_WINDOW
    };

    fn twin(&self) -> Twin {
        let mut numbers = [0; MAX_PARAMETERS];
        numbers[0] = self.bucket_us();
        for (place, window) in numbers[1..].chunks_exact_mut(2).zip(self.windows()) {
            place.copy_from_slice(&[window.limit, window.span_us]);
        }
        Twin::new(Self::PROGRAM, self.capacity(), numbers)
    }

    /// The total before all buckets, and per bucket its start and the total including it.
    fn of_numbers(numbers: &[u64]) -> Option<BucketedWindowState> {
        let (before, pairs) = numbers.split_first()?;
        let (mut before, mut buckets) = (*before, Vec::<BucketCount>::of(pairs)?);
        for BucketCount { count, .. } in &mut buckets {
            // Totals wrap around at 2^52.
            let total = *count;
            *count = total.wrapping_sub(before) & MAX_INTEGER;
            before = total;
        }
        Some(BucketedWindowState { buckets })
    }

    fn newest(state: &BucketedWindowState) -> Option<Timestamp> {
        Some(state.buckets.last()?.start)
    }
}

stored_as_numbers!(SlidingCounter: SlidingCounterState { start, previous, current });

impl BuiltIn for SlidingCounter {
    const PROGRAM: &'static Program = {
        static SLIDING_COUNTER: Program = Program::of_numbers(
            "sliding-counter",
            <SlidingCounterState as Numbers>::NAMES,
            &["window_us"],
            include_str!("../lua/sliding_counter.lua"),
        );
        &SLIDING_COUNTER
    };

    fn twin(&self) -> Twin {
        Twin::new(Self::PROGRAM, self.capacity(), [self.window_us()])
    }

    fn of_numbers(numbers: &[u64]) -> Option<SlidingCounterState> {
        Numbers::of(numbers)
    }

    fn newest(state: &SlidingCounterState) -> Option<Timestamp> {
        Some(state.start)
    }
}

stored_as_numbers!(SlidingLog: SlidingLogState { entries });

impl BuiltIn for SlidingLog {
    const PROGRAM: &'static Program = {
        static SLIDING_LOG: Program = Program::of_entries(
            "sliding-log",
            &["limit", "window_us"],
            include_str!("../lua/sliding_log.lua"),
            Keeps::SortedSet,
        );
        &SLIDING_LOG
    };

    fn twin(&self) -> Twin {
        Twin::new(Self::PROGRAM, self.capacity(), [self.capacity(), self.window_us()])
    }

    /// A script answers pairs, and only the entries that the step needs.
    fn of_numbers(numbers: &[u64]) -> Option<SlidingLogState> {
        Numbers::of(numbers)
    }

    fn of_stored(&self, stored: &Stored) -> Option<SlidingLogState> {
        match stored {
            Stored::SortedSet(members) => {
                let entries = live_entries(members, self.window_us())?;
                Some(SlidingLogState { entries })
            }
            _ => Self::of_numbers(stored.numbers(Self::PROGRAM)?),
        }
    }

    fn newest(state: &SlidingLogState) -> Option<Timestamp> {
        Some(state.entries.last()?.timestamp)
    }

    fn in_transaction(&self) -> Option<&dyn MultiProgram<State = SlidingLogState>> {
        Some(self)
    }
}

/// The entries of a sorted set, whose members begin with their cost. Leaves out those that were
/// already past when the newest was made: they are removed later.
fn live_entries(members: &[(String, u64)], window_us: u64) -> Option<Vec<LoggedCost>> {
    let newest = members.last()?.1;
    let entry = |(member, score): &(String, u64)| {
        let (cost, _) = member.split_once(' ')?;
        Some(LoggedCost { timestamp: Timestamp::from_us(*score)?, cost: cost.parse().ok()? })
    };
    let live = |(_, score): &&(String, u64)| score.saturating_add(window_us) > newest;
    members.iter().filter(live).map(entry).collect()
}

impl MultiProgram for SlidingLog {
    fn native(&self) -> Option<Native> {
        Some(Native { storage: Storage::SortedSet, window_us: self.window_us() })
    }

    /// One log entry per moment, for all its requests. Where newer ones leave no room for an older
    /// one, it counts no more.
    fn state(&self, entries: &[NativeCharge]) -> Option<SlidingLogState> {
        let mut room = self.capacity();
        let moments = entries.chunk_by(|a, b| a.since == b.since).rev();
        let kept = moments.map(|moment| {
            let cost = sum(moment).min(room);
            room -= cost;
            LoggedCost { timestamp: moment[0].since, cost }
        });
        let mut entries: Vec<_> = kept.take_while(|kept| kept.cost > 0).collect();
        entries.reverse();
        (!entries.is_empty()).then_some(SlidingLogState { entries })
    }

    fn newest(&self, state: &SlidingLogState) -> Option<NativeCharge> {
        state.entries.last().map(|newest| NativeCharge::plain(newest.timestamp, newest.cost))
    }
}

stored_as_numbers!(Concurrency: ConcurrencyState { entries });

impl BuiltIn for Concurrency {
    const PROGRAM: &'static Program = {
        static CONCURRENCY: Program = Program::of_entries(
            "concurrency",
            &["limit", "lease_us"],
            include_str!("../lua/concurrency.lua"),
            Keeps::SortedSet,
        );
        &CONCURRENCY
    };

    fn twin(&self) -> Twin {
        Twin::new(Self::PROGRAM, self.capacity(), [self.capacity(), self.lease_us()])
    }

    /// A script answers pairs, and only the leases that the step needs.
    fn of_numbers(numbers: &[u64]) -> Option<ConcurrencyState> {
        Numbers::of(numbers)
    }

    fn of_stored(&self, stored: &Stored) -> Option<ConcurrencyState> {
        match stored {
            Stored::SortedSet(members) => {
                let entries = live_entries(members, self.lease_us())?;
                Some(ConcurrencyState { entries })
            }
            _ => Self::of_numbers(stored.numbers(Self::PROGRAM)?),
        }
    }

    fn newest(state: &ConcurrencyState) -> Option<Timestamp> {
        Some(state.entries.last()?.timestamp)
    }
}

stored_as_numbers!(Lockout: LockoutState { start, count, newest, lockouts, until_us, ends_us });

impl BuiltIn for Lockout {
    const PROGRAM: &'static Program = {
        static LOCKOUT: Program = Program::of_numbers(
            "lockout",
            <LockoutState as Numbers>::NAMES,
            &["window_us", "block_us", "factor", "longest_us", "forget_us"],
            include_str!("../lua/lockout.lua"),
        );
        &LOCKOUT
    };

    fn twin(&self) -> Twin {
        let (longest_us, forget_us) = (self.longest_us(), self.forget_us());
        let parameters = [self.window_us(), self.block_us(), self.factor(), longest_us, forget_us];
        Twin::new(Self::PROGRAM, self.capacity(), parameters)
    }

    fn of_numbers(numbers: &[u64]) -> Option<LockoutState> {
        Numbers::of(numbers)
    }

    fn newest(state: &LockoutState) -> Option<Timestamp> {
        Some(state.newest)
    }
}

/// Writes what tells the algorithms apart. The compiler asks for the row of each variant.
macro_rules! built_in {
    ($($algorithm:ident),+ $(,)?) => {
        /// All built-in programs.
        pub(crate) static BUILT_IN: [&Program; [$(stringify!($algorithm)),+].len()] =
            [$( <$algorithm as BuiltIn>::PROGRAM ),+];

        $(
            impl LuaProgram for $algorithm {
                fn twins(&self) -> impl IntoIterator<Item = Twin> {
                    [self.twin()]
                }

                fn decode(&self, stored: &[Option<Stored>]) -> Option<Self::State> {
                    self.of_stored(stored.first()?.as_ref()?)
                }
            }

            impl RecordText for $algorithm {
                fn numbers_to_text(&self) -> Option<String> {
                    Some(AnyAlgorithm::from(self.clone()).to_string())
                }

                fn numbers_from_text(text: &str) -> Option<UnendedRecord<Self>> {
                    let AnyAlgorithm::$algorithm(own) = text.parse().ok()? else { return None };
                    Some(Record::numbers(own))
                }
            }
        )+

        impl LuaProgram for AnyAlgorithm {
            fn twins(&self) -> impl IntoIterator<Item = Twin> {
                [match self { $( Self::$algorithm(algorithm) => algorithm.twin(), )+ }]
            }

            fn decode(&self, stored: &[Option<Stored>]) -> Option<AnyState> {
                match self { $(
                    Self::$algorithm(algorithm) => algorithm.decode(stored).map(Into::into),
                )+ }
            }
        }

        impl Codec for AnyState {
            fn encode(&self) -> Vec<u8> {
                match self { $( Self::$algorithm(state) => state.encode(), )+ }
            }

            fn decode(bytes: &[u8]) -> Option<Self> {
                None$( .or_else(|| Codec::decode(bytes).map(Self::$algorithm)) )+
            }
        }

        impl MultiProgram for AnyAlgorithm {
            fn native(&self) -> Option<Native> {
                match self { $(
                    Self::$algorithm(algorithm) => algorithm.in_transaction()?.native(),
                )+ }
            }

            fn state(&self, entries: &[NativeCharge]) -> Option<AnyState> {
                match self { $(
                    Self::$algorithm(algorithm) => {
                        Some(algorithm.in_transaction()?.state(entries)?.into())
                    }
                )+ }
            }

            fn newest(&self, state: &AnyState) -> Option<NativeCharge> {
                match self { $(
                    Self::$algorithm(algorithm) => {
                        algorithm.in_transaction()?.newest(state.try_into().ok()?)
                    }
                )+ }
            }
        }

        /// When the newest charge was made of a state that a twin stores as these numbers, in
        /// microseconds; `None` for a program of a user.
        pub(crate) fn newest_of(name: &str, numbers: &[u64]) -> Option<u64> {
            $(
                if name == <$algorithm as BuiltIn>::PROGRAM.name {
                    let state = <$algorithm as BuiltIn>::of_numbers(numbers)?;
                    return <$algorithm as BuiltIn>::newest(&state).map(Timestamp::as_us);
                }
            )+
            None
        }

        /// When the newest charge was made of an encoded state, in microseconds; `None` for a state
        /// of a user's algorithm.
        pub(crate) fn newest_us(state: &[u8]) -> Option<u64> {
            if let Some(states) = parts(state) {
                return states.into_iter().flatten().filter_map(|(_, one)| newest_us(one)).max();
            }
            let newest = match AnyState::decode(state)? { $(
                AnyState::$algorithm(state) => <$algorithm as BuiltIn>::newest(&state),
            )+ };
            newest.map(Timestamp::as_us)
        }
    };
}

// `AnyAlgorithm` has a variant for each, in this order.
built_in!(
    Gcra,
    FixedWindow,
    FirstRequestWindow,
    WindowLog,
    BucketedWindow,
    SlidingCounter,
    SlidingLog,
    Concurrency,
    Lockout,
);
