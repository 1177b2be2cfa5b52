//! The bytes of an input, which may be compressed or in UTF-16.

use std::io::{self, Cursor, Read};
use std::mem;
use std::path::PathBuf;

use encoding_rs_io::DecodeReaderBytesBuilder;

use super::compressed::{Compression, MAGIC_BYTES};

/// An input: what people call it, and its bytes.
pub struct NamedInput {
    /// Its name, such as the path of a file.
    pub name: PathBuf,
    /// Its bytes, which may be compressed by gzip, zstd, xz or bzip2, and may be in UTF-16 if a
    /// byte order mark says so. None is read before the first request is asked for.
    pub bytes: Box<dyn Read + Send>,
}

/// The names of inputs, as people read them.
pub fn names_of(paths: &[PathBuf]) -> String {
    let names = paths.iter().map(|path| path.display().to_string());
    names.collect::<Vec<_>>().join(", ")
}

/// What is not read: how it begins, what it is, and what makes text of it.
const OTHERS: [(&[u8], &str, &str); 3] = [
    (b"PK\x03\x04", "a zip archive", "unzip -p FILE"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "lz4 -dc FILE"),
    (b"\x02\x21\x4c\x18", "compressed by lz4", "lz4 -dc FILE"),
];

fn refused(what: &str, program: &str) -> io::Error {
    let remedy = format!("unpack it in front, with `{program} | ratelimit …`, and name `-`");
    io::Error::new(io::ErrorKind::Unsupported, format!("it is {what}, which is not read; {remedy}"))
}

/// The text of an input.
pub(crate) enum Text {
    /// Of which nothing is read yet.
    Raw(Box<dyn Read + Send>),
    Plain(Box<dyn Read + Send>),
}

impl Text {
    /// The text of these bytes.
    pub(crate) const fn new(bytes: Box<dyn Read + Send>) -> Self {
        Self::Raw(bytes)
    }
}

impl Read for Text {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self {
                Self::Plain(text) => return text.read(buffer),
                Self::Raw(bytes) => {
                    let bytes = mem::replace(bytes, Box::new(io::empty()));
                    *self = Self::Plain(decompressed(bytes)?);
                }
            }
        }
    }
}

/// The text of bytes that are no archive.
fn decompressed(mut input: Box<dyn Read + Send>) -> io::Result<Box<dyn Read + Send>> {
    let mut magic = Vec::with_capacity(MAGIC_BYTES);
    input.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut magic)?;
    if let Some((_, what, program)) = OTHERS.iter().find(|(start, ..)| magic.starts_with(start)) {
        return Err(refused(what, program));
    }
    let compression = Compression::of(&magic);
    let whole = Cursor::new(magic).chain(input);
    let plain = match compression {
        Some(compression) => compression.decompress(whole),
        None => Box::new(whole),
    };
    let plain = NoArchive { head: Vec::new(), outer: compression, plain };
    Ok(Box::new(DecodeReaderBytesBuilder::new().utf8_passthru(true).build(plain)))
}

/// Where a tar archive says that it is one, and how.
const TAR_MAGIC: (usize, &[u8]) = (257, b"ustar");
const TAR_HEAD: usize = TAR_MAGIC.0 + TAR_MAGIC.1.len();

/// Bytes that are no tar archive, and not compressed once more. The first block of an archive has
/// no line break, so no line has been read of it when it is known.
struct NoArchive {
    /// The first bytes.
    head: Vec<u8>,
    /// How they were compressed.
    outer: Option<Compression>,
    plain: Box<dyn Read + Send>,
}

impl Read for NoArchive {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.plain.read(buffer)?;
        if self.head.len() < TAR_HEAD {
            let lacking = TAR_HEAD - self.head.len();
            self.head.extend(&buffer[..read.min(lacking)]);
            let is_told = self.head.len() >= MAGIC_BYTES;
            if let (true, Some(outer), Some(inner)) =
                (is_told, self.outer, Compression::of(&self.head))
            {
                let programs = format!("{} -dc FILE | {} -dc", outer.name(), inner.name());
                return Err(refused("compressed twice", &programs));
            }
            if self.head.len() == TAR_HEAD && self.head.ends_with(TAR_MAGIC.1) {
                return Err(refused("a tar archive", "tar xOf FILE"));
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    fn text(bytes: Vec<u8>) -> Text {
        Text::new(Box::new(Cursor::new(bytes)))
    }

    fn read(bytes: Vec<u8>) -> Vec<u8> {
        let mut all = Vec::new();
        text(bytes).read_to_end(&mut all).expect("reads");
        all
    }

    fn gzipped(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::read::GzEncoder::new(bytes, flate2::Compression::fast());
        let mut compressed = Vec::new();
        encoder.read_to_end(&mut compressed).expect("compresses");
        compressed
    }

    #[test]
    fn utf_16_is_read_in_both_orders_and_all_else_as_it_is() {
        let text = "#Fields: cs-uri\r\n/ä/😀\r\n".repeat(4_000);
        for order in [u16::to_le_bytes, u16::to_be_bytes] {
            let units = [0xfeff].into_iter().chain(text.encode_utf16());
            let bytes: Vec<_> = units.flat_map(order).collect();
            assert_eq!(read(bytes.clone()), text.as_bytes());
            assert_eq!(read(gzipped(&bytes)), text.as_bytes());
        }
        for bytes in [&b""[..], b"a", b"\xef\xbb\xbfa", b"a\xff\xfe\0", b"\x80\x81\x82\x83\x84"] {
            assert_eq!(read(bytes.to_vec()), bytes);
        }
    }

    #[test]
    fn an_archive_is_refused_with_what_unpacks_it() {
        let mut tar = b"access.log\0".to_vec();
        tar.resize(257, 0);
        tar.extend(b"ustar\x0000");
        tar.resize(1_024, b'x');
        for (bytes, program) in [
            (b"PK\x03\x04 and so on".to_vec(), "`unzip -p FILE | ratelimit"),
            (b"\x04\x22\x4d\x18 and so on".to_vec(), "`lz4 -dc FILE | ratelimit"),
            (b"\x02\x21\x4c\x18 and so on".to_vec(), "`lz4 -dc FILE | ratelimit"),
            (gzipped(&gzipped(b"a line\n")), "`gzip -dc FILE | gzip -dc | ratelimit"),
            (gzipped(&tar), "`tar xOf FILE | ratelimit"),
            (tar, "`tar xOf FILE | ratelimit"),
        ] {
            let error = text(bytes).read_to_end(&mut Vec::new()).expect_err(program).to_string();
            assert!(error.contains(program), "{error}");
        }
    }

    #[test]
    fn zeros_may_stand_behind_the_last_member_and_nothing_else() {
        for (rest, is_right) in [(&b""[..], true), (&[0; 700], true), (b"hello", false)] {
            let (bytes, mut plain) = ([&gzipped(b"a line\n"), rest].concat(), Vec::new());
            assert_eq!(text(bytes).read_to_end(&mut plain).is_ok(), is_right, "{rest:?}");
            assert_eq!(plain, b"a line\n");
        }
    }
}
