//! [`GivenValue`]: a value of any type, as a document has it.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::error::ConfigError;
use crate::limit::ConditionValues;

/// A value as written.
pub(super) enum GivenValue {
    Text(String),
    Number(u64),
    Truth(bool),
    List(Vec<GivenValue>),
    Table(Vec<(String, GivenValue)>),
    /// `null`: the field counts as absent.
    Nothing,
    /// A value that no field accepts, as text.
    Other(String),
}

impl<'de> Deserialize<'de> for GivenValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Then(Ok).deserialize(deserializer)
    }
}

/// Reads a value of any type, and does this with it while the format knows its position.
pub(super) struct Then<F>(pub(super) F);

impl<'de, T, F: FnOnce(GivenValue) -> Result<T, String>> DeserializeSeed<'de> for Then<F> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<T, F: FnOnce(GivenValue) -> Result<T, String>> Then<F> {
    fn with<E: Error>(self, given: GivenValue) -> Result<T, E> {
        (self.0)(given).map_err(E::custom)
    }
}

impl<'de, T, F: FnOnce(GivenValue) -> Result<T, String>> Visitor<'de> for Then<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        self.with(GivenValue::Text(text.into()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        self.with(GivenValue::Number(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        self.with(u64::try_from(number).map_or_else(|_| other(&number), GivenValue::Number))
    }

    fn visit_i128<E: Error>(self, number: i128) -> Result<T, E> {
        self.with(other(&number))
    }

    fn visit_u128<E: Error>(self, number: u128) -> Result<T, E> {
        self.with(other(&number))
    }

    #[allow(clippy::disallowed_types, reason = "a fraction is read to be refused")]
    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        // As `20.0`: an error that says "burst is 20" would name no mistake.
        self.with(GivenValue::Other(format!("{number:?}")))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<T, E> {
        self.with(GivenValue::Truth(value))
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        self.with(GivenValue::Nothing)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<T, S::Error> {
        let mut list = Vec::new();
        while let Some(item) = seq.next_element()? {
            list.push(item);
        }
        self.with(GivenValue::List(list))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<T, M::Error> {
        let mut table = Vec::new();
        while let Some(entry) = map.next_entry()? {
            table.push(entry);
        }
        self.with(GivenValue::Table(table))
    }
}

fn other(value: &impl ToString) -> GivenValue {
    GivenValue::Other(value.to_string())
}

impl fmt::Display for GivenValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Truth(truth) => write!(f, "{truth}"),
            Self::List(_) => f.write_str("a list"),
            Self::Table(_) => f.write_str("a table"),
            Self::Nothing => f.write_str("null"),
            Self::Other(message) => f.write_str(message),
        }
    }
}

impl GivenValue {
    /// The entries of a table, each once.
    pub(super) fn entries(
        &self,
        field: &str,
        such_as: &str,
    ) -> Result<&[(String, Self)], ConfigError> {
        let wrong = |wrong: &dyn fmt::Display| {
            Err(ConfigError::new(format!(
                "{field} is {wrong}; write one such as {field} = {such_as}"
            )))
        };
        let Self::Table(entries) = self else { return wrong(self) };
        if entries.is_empty() {
            return wrong(&"an empty table");
        }
        for (position, (name, _)) in entries.iter().enumerate() {
            if entries[..position].iter().any(|(earlier, _)| earlier == name) {
                let twice = format!("{field}.{name} is there twice; write it once, as a list");
                return Err(ConfigError::new(twice));
            }
        }
        Ok(entries)
    }

    /// One text, or a list of texts.
    pub(super) fn values(&self, field: &str) -> Result<ConditionValues, ConfigError> {
        let text = |given: &Self| match given {
            Self::Text(text) => Ok(text.clone()),
            wrong => Err(ConfigError::new(format!(
                "{field} is or contains {wrong}; write a text or a list of texts, such as {field} = \"…\""
            ))),
        };
        match self {
            Self::List(items) => Ok(items.iter().map(text).collect::<Result<Vec<_>, _>>()?.into()),
            one => Ok(text(one)?.into()),
        }
    }
}
