//! The bytes of an input, plain or gzipped.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::PathBuf;

use flate2::bufread::GzDecoder;

/// An input: what people call it, and its bytes, plain or gzipped.
pub struct NamedInput {
    /// Its name, such as the path of a file.
    pub name: PathBuf,
    /// Its bytes, which [`decompressed`] has prepared.
    pub bytes: Box<dyn Read>,
}

/// The names of inputs, as people read them.
pub fn names_of(paths: &[PathBuf]) -> String {
    let names = paths.iter().map(|path| path.display().to_string());
    names.collect::<Vec<_>>().join(", ")
}

const CHUNK_BYTES: usize = 128 * 1024;

/// What is not read: how it begins, what it is, and what makes text of it.
const OTHERS: [(&[u8], &str, &str); 6] = [
    (&[0x28, 0xb5, 0x2f, 0xfd], "compressed by zstd", "`zstd -dc`"),
    (&[0xfd, b'7', b'z', b'X'], "compressed by xz", "`xz -dc`"),
    (b"BZh", "compressed by bzip2", "`bzip2 -dc`"),
    (b"PK\x03\x04", "a zip archive", "`unzip -p`"),
    (&[0xff, 0xfe], "in UTF-16", "`iconv -f UTF-16 -t UTF-8`"),
    (&[0xfe, 0xff], "in UTF-16", "`iconv -f UTF-16 -t UTF-8`"),
];

/// The decompressed input, if it begins as gzip does; otherwise the input itself.
///
/// # Errors
///
/// The input cannot be read, or begins as another compression or as UTF-16 does.
pub fn decompressed(mut input: impl Read + 'static) -> io::Result<Box<dyn Read>> {
    let mut magic = Vec::with_capacity(4);
    input.by_ref().take(4).read_to_end(&mut magic)?;
    let gzipped = magic.starts_with(&[0x1f, 0x8b]);
    for (start, what, remedy) in OTHERS {
        if magic.starts_with(start) {
            let refused =
                format!("it is {what}, which is not read; pipe it through {remedy}, and name `-`");
            return Err(io::Error::new(io::ErrorKind::Unsupported, refused));
        }
    }
    let whole = Cursor::new(magic).chain(input);
    if gzipped {
        let buffered = BufReader::with_capacity(CHUNK_BYTES, whole);
        return Ok(Box::new(Members { member: Some(GzDecoder::new(buffered)) }));
    }
    Ok(Box::new(whole))
}

/// The members of a gzip file, one after the other. Behind the last may stand zeros, as on tapes
/// and of tools that fill blocks.
struct Members<R: BufRead> {
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(buffer).map_err(explain)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let Some(mut rest) = self.member.take().map(GzDecoder::into_inner) else { break };
            let is_over = loop {
                let bytes = rest.fill_buf()?;
                let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
                let (is_empty, is_padding) = (bytes.is_empty(), zeros == bytes.len());
                rest.consume(zeros);
                if is_empty || !is_padding {
                    break is_empty;
                }
            };
            self.member = (!is_over).then(|| GzDecoder::new(rest));
        }
        Ok(0)
    }
}

/// An error of reading, of which the decoder's say that the data are damaged.
fn explain(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof => {
            io::Error::new(error.kind(), format!("its gzip data is damaged or cut off ({error})"))
        }
        _ => error,
    }
}
