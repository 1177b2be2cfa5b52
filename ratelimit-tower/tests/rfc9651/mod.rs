//! A second parser of structured lists, written after the algorithms of RFC 9651, section 4.2, and independent of the crate that
//! writes the fields. It is strict: an error is a reason to fail a test.
#![allow(unreachable_pub, dead_code, clippy::panic, reason = "for several tests")]

/// A bare item of the types that the `RateLimit` fields use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bare {
    Integer(i64),
    String(String),
    /// The base64 text between the colons.
    Bytes(String),
    Boolean(bool),
}

/// An item of a list with its parameters, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub bare: Bare,
    pub parameters: Vec<(String, Bare)>,
}

impl Item {
    /// The text of an item that is a string.
    pub fn name(&self) -> &str {
        let Bare::String(name) = &self.bare else { panic!("{:?} is no string", self.bare) };
        name
    }

    /// The parameter of this key.
    pub fn parameter(&self, key: &str) -> Option<&Bare> {
        self.parameters.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// The parameter of this key, an integer.
    pub fn integer(&self, key: &str) -> Option<i64> {
        match self.parameter(key)? {
            Bare::Integer(value) => Some(*value),
            other => panic!("{key}: {other:?} is no integer"),
        }
    }
}

/// Section 4.2.1.
pub fn parse_list(text: &str) -> Result<Vec<Item>, String> {
    let mut input = Input(text.trim_matches(' '));
    let mut items = Vec::new();
    while !input.0.is_empty() {
        items.push(input.item()?);
        input.ows();
        if input.0.is_empty() {
            break;
        }
        input.expect(',')?;
        input.ows();
        if input.0.is_empty() {
            return Err("a comma at the end".into());
        }
    }
    Ok(items)
}

struct Input<'a>(&'a str);

impl Input<'_> {
    fn ows(&mut self) {
        self.0 = self.0.trim_start_matches([' ', '\t']);
    }

    fn next(&mut self) -> Result<char, String> {
        let next = self.0.chars().next().ok_or("the text ends early")?;
        self.0 = &self.0[next.len_utf8()..];
        Ok(next)
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        let rest = self.0;
        let next = self.next()?;
        if next == wanted { Ok(()) } else { Err(format!("{wanted:?} expected at {rest:?}")) }
    }

    fn take(&mut self, wanted: impl Fn(char) -> bool) -> String {
        let end = self.0.find(|c| !wanted(c)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken.to_owned()
    }

    fn item(&mut self) -> Result<Item, String> {
        let bare = self.bare()?;
        let mut parameters: Vec<(String, Bare)> = Vec::new();
        while self.0.starts_with(';') {
            self.next()?;
            self.0 = self.0.trim_start_matches(' ');
            let key = self.key()?;
            let value = if self.0.starts_with('=') {
                self.next()?;
                self.bare()?
            } else {
                Bare::Boolean(true)
            };
            if parameters.iter().any(|(known, _)| *known == key) {
                return Err(format!("{key} twice"));
            }
            parameters.push((key, value));
        }
        Ok(Item { bare, parameters })
    }

    fn key(&mut self) -> Result<String, String> {
        if !self.0.starts_with(|c: char| c.is_ascii_lowercase() || c == '*') {
            return Err(format!("no key at {:?}", self.0));
        }
        Ok(self.take(|c| {
            c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-' | '.' | '*')
        }))
    }

    fn bare(&mut self) -> Result<Bare, String> {
        match self.0.chars().next() {
            Some('"') => self.string(),
            Some(':') => {
                self.next()?;
                let text = self.take(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '='));
                self.expect(':')?;
                Ok(Bare::Bytes(text))
            }
            Some(c) if c == '-' || c.is_ascii_digit() => self.integer(),
            _ => Err(format!("no item at {:?}", self.0)),
        }
    }

    fn integer(&mut self) -> Result<Bare, String> {
        let negative = self.0.starts_with('-');
        if negative {
            self.next()?;
        }
        let digits = self.take(|c| c.is_ascii_digit());
        if digits.is_empty() || digits.len() > 15 || self.0.starts_with('.') {
            return Err(format!("{digits:?} is no integer of 1 to 15 digits"));
        }
        let value: i64 = digits.parse().map_err(|_| "no integer")?;
        Ok(Bare::Integer(if negative { -value } else { value }))
    }

    fn string(&mut self) -> Result<Bare, String> {
        self.expect('"')?;
        let mut text = String::new();
        loop {
            match self.next()? {
                '"' => return Ok(Bare::String(text)),
                '\\' => match self.next()? {
                    c @ ('"' | '\\') => text.push(c),
                    c => return Err(format!("{c:?} is escaped")),
                },
                c @ ' '..='~' => text.push(c),
                c => return Err(format!("{c:?} in a string")),
            }
        }
    }
}
