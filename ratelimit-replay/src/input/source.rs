//! The bytes of an input, which may be compressed or in UTF-16.

use std::io::{self, Cursor, Read};
use std::path::PathBuf;

use encoding_rs_io::DecodeReaderBytesBuilder;

use super::compressed::{Compression, MAGIC_BYTES};

/// An input: what people call it, and its bytes.
pub struct NamedInput {
    /// Its name, such as the path of a file.
    pub name: PathBuf,
    /// Its bytes, which [`decompressed`] has prepared.
    pub bytes: Box<dyn Read + Send>,
}

/// The names of inputs, as people read them.
pub fn names_of(paths: &[PathBuf]) -> String {
    let names = paths.iter().map(|path| path.display().to_string());
    names.collect::<Vec<_>>().join(", ")
}

/// What is not read: how it begins, what it is, and what makes text of it.
const OTHERS: [(&[u8], &str, &str); 1] = [(b"PK\x03\x04", "a zip archive", "`unzip -p`")];

/// The text of an input, which may be compressed by gzip, zstd, xz or bzip2, and may be in UTF-16
/// if a byte order mark says so.
///
/// # Errors
///
/// The input cannot be read, or is an archive. What is read later may be damaged.
pub fn decompressed(mut input: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    let mut magic = Vec::with_capacity(MAGIC_BYTES);
    input.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut magic)?;
    for (start, what, remedy) in OTHERS {
        if magic.starts_with(start) {
            let refused =
                format!("it is {what}, which is not read; pipe it through {remedy}, and name `-`");
            return Err(io::Error::new(io::ErrorKind::Unsupported, refused));
        }
    }
    let compression = Compression::of(&magic);
    let whole = Cursor::new(magic).chain(input);
    let plain = match compression {
        Some(compression) => compression.decompress(whole),
        None => Box::new(whole),
    };
    Ok(Box::new(DecodeReaderBytesBuilder::new().utf8_passthru(true).build(plain)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: Vec<u8>) -> Vec<u8> {
        let mut text = Vec::new();
        let mut input = decompressed(Cursor::new(bytes)).expect("no archive");
        input.read_to_end(&mut text).expect("reads");
        text
    }

    #[test]
    fn utf_16_is_read_in_both_orders_and_all_else_as_it_is() {
        let text = "#Fields: cs-uri\r\n/ä/😀\r\n".repeat(4_000);
        for order in [u16::to_le_bytes, u16::to_be_bytes] {
            let units = [0xfeff].into_iter().chain(text.encode_utf16());
            let bytes: Vec<_> = units.flat_map(order).collect();
            assert_eq!(read(bytes.clone()), text.as_bytes());
            let mut gzipped = flate2::read::GzEncoder::new(&*bytes, flate2::Compression::fast());
            let mut compressed = Vec::new();
            gzipped.read_to_end(&mut compressed).expect("compresses");
            assert_eq!(read(compressed), text.as_bytes());
        }
        for bytes in [&b""[..], b"a", b"\xef\xbb\xbfa", b"a\xff\xfe\0", b"\x80\x81\x82\x83\x84"] {
            assert_eq!(read(bytes.to_vec()), bytes);
        }
    }

    #[test]
    fn an_archive_is_refused_with_what_reads_it() {
        let refused = decompressed(&b"PK\x03\x04 and so on"[..]).err().expect("no text");
        assert!(refused.to_string().contains("pipe it through `unzip -p`"), "{refused}");
    }
}
