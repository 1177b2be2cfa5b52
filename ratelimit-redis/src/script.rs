//! [`Script`]: a text that the server runs, and the hash by which it is called.

/// A text without comments, and its SHA-1 in hexadecimal, which `EVALSHA` takes.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) sha: String,
}

impl Script {
    /// The script of this text, stripped of comments.
    pub(crate) fn from_text(text: &str) -> Self {
        let text = without_comments(text);
        let sha = sha1_smol::Sha1::from(&text).digest().to_string();
        Self { text, sha }
    }
}

/// The text without comments, blank lines and indentation, so the server stores less.
fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| match line.find("-- ") {
        Some(comment) => line[..comment].trim(),
        None => line.trim(),
    });
    let mut kept = String::with_capacity(text.len());
    for line in lines.filter(|line| !line.is_empty() && *line != "--") {
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}
