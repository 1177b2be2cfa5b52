//! [`Zone`]: what the clocks of a time zone show, by the rules that the crate `jiff` brings along.

/// The zone of a calendar that names none.
pub(super) const UTC: &str = "UTC";

#[cfg(feature = "calendar")]
mod known {
    use alloc::boxed::Box;
    use alloc::format;

    use jiff::Timestamp;
    use jiff::tz::{Offset, TimeZone, TimeZoneDatabase};
    use once_cell::race::OnceBox;

    use crate::calendar::{Calendar, Recent, Rule};
    use crate::error::ConfigError;

    /// A time zone of the database that `jiff` brings along.
    #[derive(Clone, Debug)]
    pub(crate) struct Zone(TimeZone);

    impl Zone {
        pub(crate) fn named(name: &str) -> Result<Self, ConfigError> {
            let zone = TimeZoneDatabase::bundled().get(name);
            zone.ok().filter(|zone| zone.iana_name().is_some()).map(Self).ok_or_else(|| {
                ConfigError::new(format!(
                    "{name:?} is not a time zone; write a name of the IANA database, such as zone = \"Europe/Berlin\""
                ))
            })
        }

        /// The name in the letters of the database.
        pub(crate) fn name(&self) -> &str {
            self.0.iana_name().unwrap_or_default()
        }

        /// The seconds since 1970 that the clocks show at this second since the Unix epoch.
        pub(crate) fn local_s(&self, at_s: i64) -> i64 {
            let at = Timestamp::from_second(at_s).unwrap_or(Timestamp::MAX);
            at_s + i64::from(self.0.to_offset(at).seconds())
        }

        /// When the clocks first show this second: at a skipped one as much later as they are
        /// moved.
        pub(crate) fn moment_s(&self, local_s: i64) -> i64 {
            let shown = Timestamp::from_second(local_s).unwrap_or(Timestamp::MAX);
            let shown = Offset::UTC.to_datetime(shown);
            self.0.to_timestamp(shown).unwrap_or(Timestamp::MAX).as_second()
        }
    }

    impl PartialEq for Zone {
        fn eq(&self, other: &Self) -> bool {
            self.name() == other.name()
        }
    }

    impl Eq for Zone {}

    /// A list of all calendars, to which a new one is added at the end.
    struct Node {
        calendar: Calendar,
        next: OnceBox<Node>,
    }

    static FIRST: OnceBox<Node> = OnceBox::new();

    impl Rule {
        /// The one calendar of this rule.
        pub(in crate::calendar) fn interned(self) -> &'static Calendar {
            let mut place = &FIRST;
            loop {
                let calendar = || Calendar { rule: self.clone(), recent: Recent::default() };
                let node = place
                    .get_or_init(|| Box::new(Node { calendar: calendar(), next: OnceBox::new() }));
                if node.calendar.rule == self {
                    return &node.calendar;
                }
                place = &node.next;
            }
        }
    }
}

#[cfg(feature = "calendar")]
pub(super) use known::Zone;

#[cfg(not(feature = "calendar"))]
mod unknown {
    use crate::calendar::{Calendar, Rule};
    use crate::error::ConfigError;

    /// There is none: a calendar needs the feature.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Zone {}

    impl Zone {
        pub(crate) fn named(_: &str) -> Result<Self, ConfigError> {
            Err(ConfigError::new(
                "windows of a calendar need the feature \"calendar\" of ratelimit-core; enable it, or write a length \
                 such as \"30d\"",
            ))
        }

        pub(crate) const fn name(&self) -> &str {
            match *self {}
        }

        pub(crate) const fn local_s(&self, _: i64) -> i64 {
            match *self {}
        }

        pub(crate) const fn moment_s(&self, _: i64) -> i64 {
            match *self {}
        }
    }

    impl Rule {
        pub(in crate::calendar) const fn interned(self) -> &'static Calendar {
            match self.zone {}
        }
    }
}

#[cfg(not(feature = "calendar"))]
pub(super) use unknown::Zone;
