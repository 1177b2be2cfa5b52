//! The table of similar identifiers, by group.

use super::{Group, Place};

/// Groups of similar keys, each with the respect in which they are alike.
const KEYS: &[(&str, &[&str])] = &[
    (
        "the case of letters",
        &["Alice", "alice", "ALICE", "aLICE", "É", "é", "Σ", "σ", "ς", "Я", "я"],
    ),
    (
        "accents",
        &["e", "é", "è", "ë", "ê", "ē", "n", "ñ", "o", "ö", "ø", "l", "ł", "c", "ç", "d", "đ"],
    ),
    (
        "the normalisation of Unicode (NFC, NFD)",
        &[
            "caf\u{e9}",
            "cafe\u{301}",
            "\u{c5}",
            "A\u{30a}",
            "\u{212b}",
            "\u{3a9}",
            "\u{2126}",
            "\u{ac00}",
            "\u{1100}\u{1161}",
            "q\u{307}\u{323}",
            "q\u{323}\u{307}",
            "\u{1e9b}\u{323}",
            "\u{17f}\u{323}\u{307}",
        ],
    ),
    (
        "the compatibility normalisation of Unicode (NFKC, NFKD)",
        &[
            "fi",
            "\u{fb01}",
            "2",
            "\u{b2}",
            "\u{2461}",
            "kg",
            "\u{338f}",
            "...",
            "\u{2026}",
            "\u{30ab}",
            "\u{ff76}",
            "a",
            "\u{aa}",
            "\u{ff41}",
            "1/4",
            "\u{bc}",
            "1\u{2044}4",
            "x\u{a0}y",
            "x y",
            "x\u{2003}y",
        ],
    ),
    (
        "the case of letters that are special to some language",
        &[
            "I", "ı", "İ", "i", "i\u{307}", "ß", "ẞ", "ss", "SS", "ǆ", "ǅ", "Ǆ", "K", "k",
            "\u{212a}", "ſ", "s",
        ],
    ),
    (
        "full-width digits, and digits of other scripts",
        &[
            "17",
            "\u{ff11}\u{ff17}",
            "\u{661}\u{667}",
            "\u{6f1}\u{6f7}",
            "\u{967}\u{96d}",
            "\u{1d7cf}\u{1d7d5}",
            "1\u{ff17}",
        ],
    ),
    (
        "letters that look alike",
        &[
            "paypal",
            "p\u{430}ypal",
            "\u{440}aypal",
            "paypa1",
            "paypaI",
            "pay\u{440}al",
            "0",
            "O",
            "o",
            "\u{43e}",
            "l",
            "1",
            "I",
            "|",
        ],
    ),
    (
        "the zeros at the end of an address",
        &[
            "1.2.3.4",
            "1.2.3.40",
            "1.2.3.400",
            "10.0.0.1",
            "10.0.0.10",
            "10.0.0.100",
            "::1",
            "::10",
            "::100",
            "fe80::",
            "fe80::0",
            "0.0.0.0",
            "0.0.0",
            "0.0",
        ],
    ),
    (
        "the zeros that numbers begin with",
        &["1.2.3.5", "1.2.3.05", "01.2.3.5", "001.002.003.005", "a.7", "a.07"],
    ),
    (
        "the spelling of an address",
        &[
            "::1",
            "0::1",
            "0:0:0:0:0:0:0:1",
            "::0001",
            "::01",
            "[::1]",
            "::1%lo",
            "0:0::1",
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "2001:db8::1",
            "2001:DB8::1",
            "2001:db8:0::1",
            "2001:0db8::1",
            "2001:db8:0:0:0:0:0:1",
            "2001:db8::1/64",
            "2001:db8::1/128",
            "2001:db8::2",
            "2001:db8::",
            "1.2.3.4",
            "1.2.3.4/32",
            "1.2.3.4:80",
            "1.2.3.4:8080",
            "1.2.3.4.",
            "1.2.3.0",
        ],
    ),
    (
        "an address of IPv4 within one of IPv6",
        &["9.8.7.6", "::ffff:9.8.7.6", "::9.8.7.6", "::ffff:908:706", "64:ff9b::9.8.7.6"],
    ),
    (
        "the spelling of a number",
        &[
            "7",
            "07",
            "+7",
            "7.0",
            "7.",
            "7e0",
            "0x7",
            "7L",
            "-7",
            "0",
            "-0",
            "00",
            "nan",
            "NaN",
            "inf",
            "Infinity",
            "9007199254740992",
            "9007199254740993",
            "1e3",
            "1000",
            "1_000",
            "1,000",
            "18446744073709551616",
            "18446744073709551615",
            "4294967296",
            "4294967303",
        ],
    ),
    (
        "nothing in many words",
        &[
            "",
            "nil",
            "null",
            "NULL",
            "None",
            "undefined",
            "false",
            "true",
            "()",
            "{}",
            "[]",
            "-",
            "0",
        ],
    ),
    ("what follows a line break", &["m", "m\na", "m\nb", "m\ra", "m\u{2028}a", "m\u{85}a"]),
    (
        "white space at the ends",
        &[
            "w",
            " w",
            "w ",
            "\tw",
            "w\t",
            "w\n",
            "w\r\n",
            "\nw",
            "w\u{a0}",
            "w\u{3000}",
            "\u{2003}w",
            "w  ",
            " ",
            "  ",
        ],
    ),
    ("spaces within", &["w w", "w  w", "ww", "w\tw", "w\nw", "w\u{a0}w", "w\u{2009}w"]),
    ("what follows a NUL", &["n", "n\0", "n\0a", "n\0b", "\0n", "\0", "\0\0"]),
    (
        "characters of no width",
        &[
            "zz",
            "z\u{200b}z",
            "z\u{200c}z",
            "z\u{200d}z",
            "z\u{200e}z",
            "z\u{2060}z",
            "z\u{feff}z",
            "\u{feff}zz",
            "z\u{ad}z",
            "z\u{34f}z",
            "z\u{fe0f}z",
            "\u{202e}zz",
            "z\u{e0041}z",
        ],
    ),
    (
        "what another encoding lacks",
        &["\u{e9}", "\u{fc}", "\u{df}", "?", "\u{fffd}", "ü?", "日", "本", "??", "é?"],
    ),
    (
        "characters of four bytes, and what follows them",
        &["g", "g🦀", "g🐙", "g🦀h", "g🐙h", "g🦀🐙", "g?", "g👍", "g👍🏽"],
    ),
    (
        "some of the bits or bytes of a character",
        &[
            "\u{161}",
            "a",
            "\u{e1}",
            "\u{3161}",
            "\u{10061}",
            "\u{101}",
            "\u{1}",
            "\u{201}",
            "\u{c3}\u{a9}",
            "\u{e9}",
            "C)",
            "\u{65}\u{301}",
        ],
    ),
    (
        "percent-encoding",
        &[
            "p/q", "p%2Fq", "p%2fq", "p%252Fq", "%70/q", "%61", "a", "%", "%25", "%2", "%zz",
            "%00", "\0", "%C3%A9", "\u{e9}", "%c3%a9", "p q", "p%20q",
        ],
    ),
    ("a plus for a space", &["r s", "r+s", "r%2Bs", "r%20s"]),
    (
        "escapes",
        &[
            "t\nu", "t\\nu", "t\\\\nu", "tnu", "\\u0061", "\\x61", "\\141", "a", "\\", "\\\\",
            "\\0", "\0", "&amp;", "&", "&#97;", "''", "'", "\\'", "\\\"", "\"", "t\\tu", "t\tu",
            "\\u{61}", "\\N",
        ],
    ),
    ("quotes", &["v", "\"v\"", "'v'", "`v`", "\"v", "v\"", "«v»", "[v]", "{v}", "(v)", "<v>"]),
    (
        "patterns",
        &[
            "*", "?", "**", "?*", "[a-z]", "[^a]", "a*", "a?", "*a", "h*o", "hello", "h?llo",
            "h[ae]llo", "hallo", "\\*", "%", "_", "h_llo", "h%", ".*", "^a$", "a|b", ".", "h.llo",
            "{a,b}",
        ],
    ),
    (
        "paths",
        &[
            "d/e", "d//e", "/d/e", "d/e/", "d/./e", "d/../e", "./d/e", "d\\e", "e", "..", ".", "/",
            "//",
        ],
    ),
    (
        "names of hosts and mailboxes",
        &[
            "x.org",
            "x.org.",
            "www.x.org",
            "X.org",
            "a@x.org",
            "a+b@x.org",
            "a.b@x.org",
            "ab@x.org",
            "münchen.de",
            "xn--mnchen-3ya.de",
        ],
    ),
    (
        "the spelling of an id",
        &[
            "6f9619ff-8b86-d011-b42d-00cf4fc964ff",
            "6F9619FF-8B86-D011-B42D-00CF4FC964FF",
            "6f9619ff8b86d011b42d00cf4fc964ff",
            "{6f9619ff-8b86-d011-b42d-00cf4fc964ff}",
            "urn:uuid:6f9619ff-8b86-d011-b42d-00cf4fc964ff",
        ],
    ),
    ("hash tags", &["{i}a", "{i}b", "{i}", "i", "{i}{j}", "{}i", "{}j", "{i", "i}", "{{i}}"]),
    (
        "the order of characters, or their sum",
        &["ab", "ba", "abc", "acb", "bca", "aad", "bbb", "a,b", "b,a", "abab", "aabb"],
    ),
    ("repeated characters", &["kk", "kkk", "kkkk", "kkkkk"]),
    ("a hash of 32 bits (31 times)", &["Aa", "BB", "AaAa", "BBBB", "AaBB", "BBAa"]),
    ("a hash of 32 bits (CRC-32)", &["plumless", "buckeroo", "codding", "gnu"]),
    (
        "a hash of 32 bits (FNV-1a)",
        &["costarring", "liquid", "declinate", "macallums", "altarage", "zinke"],
    ),
    (
        "a hash of 32 bits (djb2)",
        &["hetairas", "mentioner", "heliotropes", "neurospora", "depravement", "serafins"],
    ),
];

/// Groups of limit names and keys that are alike only together.
const PLACES: &[(&str, &[(&str, &str)])] = &[
    (
        "the name of the limit and the key, joined",
        &[
            ("j", "k.l"),
            ("j.k", "l"),
            ("j", "k-l"),
            ("j-k", "l"),
            ("j", "k_l"),
            ("j_k", "l"),
            ("j", "kl"),
            ("jk", "l"),
            ("j", "1l"),
            ("j1", "l"),
            ("l", "j"),
            ("k", "j"),
        ],
    ),
    (
        "the name of the limit, but for its case and signs",
        &[
            ("per.ip", "x"),
            ("Per.ip", "x"),
            ("PER.IP", "x"),
            ("per-ip", "x"),
            ("per_ip", "x"),
            ("perip", "x"),
            ("per.ip.", "x"),
            ("per.i", "x"),
        ],
    ),
];

/// Lengths to which systems truncate keys.
const LENGTHS: [usize; 17] =
    [1, 8, 16, 20, 32, 40, 63, 64, 100, 127, 128, 191, 255, 256, 1_000, 1_024, 4_096];

fn key(key: impl Into<String>) -> Place {
    Place { limit: "l".to_owned(), key: key.into() }
}

/// All groups.
pub(crate) fn groups() -> Vec<Group> {
    let mut groups: Vec<Group> = KEYS
        .iter()
        .map(|(alike, keys)| Group {
            alike: (*alike).to_owned(),
            places: keys.iter().copied().map(key).collect(),
        })
        .collect();
    groups.extend(PLACES.iter().map(|(alike, places)| {
        Group {
            alike: (*alike).to_owned(),
            places: places
                .iter()
                .map(|(limit, key)| Place { limit: (*limit).to_owned(), key: (*key).to_owned() })
                .collect(),
        }
    }));
    // The colon comes first, so that a failure names the most common separator.
    let between = |sign: char| key(format!("u{sign}v"));
    groups.push(Group {
        alike: "the sign between two parts: ':' and '_'".to_owned(),
        places: [':', '_'].map(between).to_vec(),
    });
    let signs = (0_u8..128).map(char::from).filter(|sign| !sign.is_alphanumeric());
    groups.push(Group {
        alike: "the sign between two parts".to_owned(),
        places: signs.map(between).chain([key("uv")]).collect(),
    });
    let bytes =
        |length: usize, begin: &str, end: &str| key([begin, &*"x".repeat(length), end].concat());
    // 65,535 is the longest key that a two-byte length can hold.
    for length in LENGTHS.into_iter().chain([65_535]) {
        groups.push(Group {
            alike: format!("the first {length} bytes"),
            places: ["", "a", "b"].map(|end| bytes(length, "", end)).to_vec(),
        });
    }
    for length in LENGTHS {
        groups.push(Group {
            alike: format!("the last {length} bytes"),
            places: ["a", "b"].map(|begin| bytes(length, begin, "")).to_vec(),
        });
        let half = "x".repeat(length);
        groups.push(Group {
            alike: format!("{length} bytes at both ends, and the length"),
            places: ["c", "d"].map(|sign| key(format!("{half}{sign}{half}"))).to_vec(),
        });
    }
    // Truncation within a character.
    for length in [63, 64, 254, 255] {
        let same = "y".repeat(length);
        groups.push(Group {
            alike: format!("the first {length} bytes and a part of a character"),
            places: ["", "é", "è", "日", "本", "🦀", "🐙"]
                .map(|end| key(format!("{same}{end}")))
                .to_vec(),
        });
    }
    groups
}
