//! A second reader of structured lists: the grammar of RFC 9651, section 3, as far as the `RateLimit` fields use it, and independent of
//! the code that writes and reads them. It is strict: an error is a reason to fail a test.
#![allow(unreachable_pub, dead_code, clippy::unwrap_used, reason = "for several tests")]

use std::sync::LazyLock;

use regex::Regex;

const STRING: &str = r#""(?:[ !#-\[\]-~]|\\["\\])*""#;
const KEY: &str = "[a-z*][a-z0-9_.*-]*";

/// A list of items; one item; one parameter.
static GRAMMAR: LazyLock<[Regex; 3]> = LazyLock::new(|| {
    let value = format!("-?[0-9]{{1,15}}|{STRING}|:[A-Za-z0-9+/]*=*:");
    let item = format!("{STRING}(?:; *{KEY}=(?:{value}))*");
    [
        format!("^{item}(?:[ \t]*,[ \t]*{item})*$"),
        format!("(?<name>{STRING})(?<parameters>(?:; *{KEY}=(?:{value}))*)"),
        format!("; *({KEY})=({value})"),
    ]
    .map(|grammar| Regex::new(&grammar).unwrap())
});

/// An item that is a string, with its parameters as they are written.
#[derive(Debug)]
pub struct Item {
    pub name: String,
    parameters: Vec<(String, String)>,
}

impl Item {
    fn parameter(&self, key: &str) -> Option<&str> {
        self.parameters.iter().find(|(known, _)| known == key).map(|(_, value)| &**value)
    }

    pub fn integer(&self, key: &str) -> Option<i64> {
        Some(self.parameter(key)?.parse().unwrap())
    }

    pub fn string(&self, key: &str) -> Option<String> {
        self.parameter(key).map(unquoted)
    }
}

fn unquoted(string: &str) -> String {
    let inner = string.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap();
    inner.replace("\\\"", "\"").replace("\\\\", "\\")
}

pub fn parse_list(text: &str) -> Result<Vec<Item>, String> {
    let [list, item, parameter] = &*GRAMMAR;
    if !list.is_match(text) {
        return Err(format!("no list of strings: {text}"));
    }
    let read = item.captures_iter(text).map(|item| {
        let parameters = parameter.captures_iter(&item["parameters"]);
        let parameters: Vec<_> = parameters.map(|p| (p[1].to_owned(), p[2].to_owned())).collect();
        for (nth, (key, _)) in parameters.iter().enumerate() {
            assert!(parameters[..nth].iter().all(|(other, _)| other != key), "{key} twice");
        }
        Item { name: unquoted(&item["name"]), parameters }
    });
    Ok(read.collect())
}
