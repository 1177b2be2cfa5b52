//! The source of the bytes: a file or standard input, plain or gzipped.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use flate2::bufread::GzDecoder;
use indicatif::ProgressBar;

use crate::failure::Failure;
use crate::interrupt::Interrupt;

/// Whether a path stands for standard input or output.
pub(crate) fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The names of inputs, as people read them.
pub(crate) fn names_of(paths: &[PathBuf]) -> String {
    let names = paths.iter().map(|path| path.display().to_string());
    names.collect::<Vec<_>>().join(", ")
}

const CHUNK_BYTES: usize = 128 * 1024;
/// The most chunks in the queue: enough to keep both threads busy, and little memory.
const CHUNKS: usize = 8;
/// How often a reader that waits for input checks the interrupt.
const LOOK_UP: Duration = Duration::from_millis(50);

/// The decompressed bytes of an input.
///
/// A separate thread reads and decompresses them: waiting for a slow pipe then never delays an
/// interrupt, and decompression uses a second processor.
pub(crate) struct InputSource {
    chunks: Receiver<io::Result<Vec<u8>>>,
    chunk: Cursor<Vec<u8>>,
    interrupt: Interrupt,
}

impl InputSource {
    /// Opens the input of this name; `-` is standard input. Returns its length, too, if it has one.
    /// The bar shows what has been read, before decompression, as the length is.
    pub(crate) fn open(
        path: &Path,
        interrupt: Interrupt,
        bar: &ProgressBar,
    ) -> Result<(Self, Option<u64>), Failure> {
        let refuse = |error: io::Error| {
            Failure::input(format!(
                "{}: the input cannot be read: {error}; name an access log or a trace, or `-`",
                path.display()
            ))
        };
        let (mut length, mut input): (_, Box<dyn Read + Send>) = (None, Box::new(io::stdin()));
        if !is_dash(path) {
            let file = File::open(path).map_err(refuse)?;
            let metadata = file.metadata().map_err(refuse)?;
            if metadata.is_dir() {
                return Err(refuse(io::ErrorKind::IsADirectory.into()));
            }
            length = metadata.is_file().then_some(metadata.len());
            input = Box::new(file);
        }
        let (input, (sender, chunks)) = (bar.wrap_read(input), sync_channel(CHUNKS));
        let read = move || {
            if let Err(error) = send_chunks(input, &sender) {
                let _ = sender.send(Err(explain(error)));
            }
        };
        let thread = thread::Builder::new().name("input".to_owned()).spawn(read);
        thread.map_err(|error| Failure::input(format!("no thread for reading: {error}")))?;
        Ok((Self { chunks, chunk: Cursor::default(), interrupt }, length))
    }
}

impl Read for InputSource {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let taken = self.chunk.read(buffer)?;
            if taken > 0 || buffer.is_empty() {
                return Ok(taken);
            }
            match self.chunks.recv_timeout(LOOK_UP) {
                Ok(chunk) => self.chunk = Cursor::new(chunk?),
                Err(RecvTimeoutError::Disconnected) => return Ok(0),
                // The caller checks the interrupt before it trusts the end of the input.
                Err(RecvTimeoutError::Timeout) if self.interrupt.is_raised() => return Ok(0),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

fn send_chunks(
    input: impl Read + 'static,
    sender: &SyncSender<io::Result<Vec<u8>>>,
) -> io::Result<()> {
    let mut input = plain(input)?;
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let length = match input.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        chunk.truncate(length);
        if sender.send(Ok(chunk)).is_err() {
            return Ok(()); // the reader has gone
        }
    }
}

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
fn plain(mut input: impl Read + 'static) -> io::Result<Box<dyn Read>> {
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
            let read = member.read(buffer)?;
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
