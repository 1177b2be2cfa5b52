//! Decompresses what begins as gzip, zstd, xz or bzip2 does: all members of a file, within a bound
//! of memory.

use std::io::{self, BufRead, BufReader, Read};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::GzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

const BUFFER_BYTES: usize = 128 * 1024;
/// How much is decoded in one step.
const STEP_BYTES: usize = 4 * 1024;

/// The most memory for what a member may refer back to. `zstd` refuses more as well, unless an
/// option allows it, and `xz -9` needs half of it.
const WINDOW_BYTES: u64 = 128 << 20;

/// How many bytes of an input tell how it is compressed.
pub(super) const MAGIC_BYTES: usize = 4;

/// How an input is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    Gzip,
    Zstd,
    Xz,
    Bzip2,
}

impl Compression {
    /// How an input is compressed that begins so.
    pub(super) fn of(magic: &[u8]) -> Option<Self> {
        match magic {
            [0x1f, 0x8b, ..] => Some(Self::Gzip),
            // A frame, and one to skip.
            [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => Some(Self::Zstd),
            [0xfd, b'7', b'z', b'X'] => Some(Self::Xz),
            [b'B', b'Z', b'h', b'1'..=b'9'] => Some(Self::Bzip2),
            _ => None,
        }
    }

    /// Its name, which is also that of its program.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
        }
    }

    /// The decompressed bytes.
    pub(super) fn decompress(self, input: impl Read + Send + 'static) -> Box<dyn Read + Send> {
        let input = BufReader::with_capacity(BUFFER_BYTES, input);
        let inner: Box<dyn Read + Send> = match self {
            Self::Gzip => Box::new(Members(Some(GzDecoder::new(input)))),
            Self::Zstd => Box::new(Frames::new(input)),
            Self::Xz => {
                let most_kib = u32::try_from(WINDOW_BYTES / 1024).unwrap_or(u32::MAX);
                Box::new(Steps(XzReader::new_mem_limit(input, true, most_kib)))
            }
            Self::Bzip2 => Box::new(MultiBzDecoder::new(input)),
        };
        Box::new(Explained { inner, compression: self })
    }
}

/// Explains errors of decompression.
struct Explained {
    inner: Box<dyn Read + Send>,
    compression: Compression,
}

impl Read for Explained {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        use io::ErrorKind::{
            InvalidData, InvalidInput, Other, OutOfMemory, UnexpectedEof, Unsupported,
        };
        let name = self.compression.name();
        self.inner.read(buffer).map_err(|error| match error.kind() {
            // Of the file, and not of its data.
            _ if error.raw_os_error().is_some() => error,
            InvalidData | InvalidInput | Other | UnexpectedEof => {
                let what = format!(
                    "its {name} data is damaged or cut off; check it with `{name} -t`, and copy it again"
                );
                io::Error::new(error.kind(), what)
            }
            OutOfMemory | Unsupported => {
                let what = format!(
                    "its {name} data needs a dictionary, a filter or more memory than is used here; decompress it by another \
                     program, and name `-`"
                );
                io::Error::new(error.kind(), what)
            }
            _ => error,
        })
    }
}

/// A decoder that is read in steps: one that fails loses what it has decoded in the same step.
struct Steps<R>(R);

impl<R: Read> Read for Steps<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let end = buffer.len().min(STEP_BYTES);
        self.0.read(&mut buffer[..end])
    }
}

/// The members of a gzip file, one after the other. Behind the last may stand zeros, as on tapes
/// and of tools that fill blocks. Anything else there may be a damaged member.
struct Members<R: BufRead>(Option<GzDecoder<R>>);

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.0 {
            let read = member.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let Some(mut rest) = self.0.take().map(GzDecoder::into_inner) else { break };
            let is_over = loop {
                let bytes = rest.fill_buf()?;
                let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
                let (is_empty, is_padding) = (bytes.is_empty(), zeros == bytes.len());
                let is_member = matches!(bytes[zeros..], [0x1f] | [0x1f, 0x8b, ..]);
                rest.consume(zeros);
                if !is_empty && is_padding {
                    continue;
                }
                if !is_empty && !is_member {
                    return Err(damaged("what stands behind a member is none"));
                }
                break !is_member;
            };
            self.0 = (!is_over).then(|| GzDecoder::new(rest));
        }
        Ok(0)
    }
}

/// The frames of a zstd file, one after the other, without those that are to be skipped.
struct Frames<R: BufRead> {
    source: R,
    decoder: FrameDecoder,
    is_within: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_BYTES);
        Self { source, decoder, is_within: false }
    }

    /// Begins with the next frame, if there is one.
    fn begin(&mut self) -> io::Result<()> {
        while !self.is_within && !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => self.is_within = true,
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut self.source.by_ref().take(length), &mut io::sink());
                    if skipped? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(
                    error @ (FrameDecoderError::WindowSizeTooBig { .. }
                    | FrameDecoderError::DictNotProvided { .. }),
                ) => return Err(io::Error::new(io::ErrorKind::Unsupported, error)),
                Err(error) => return Err(damaged(error)),
            }
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.begin()?;
            if !self.is_within || buffer.is_empty() {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let step = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, step).map_err(damaged)?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 {
                return Ok(read);
            }
            let sum = self.decoder.get_checksum_from_data();
            if sum.is_some() && sum != self.decoder.get_calculated_checksum() {
                return Err(damaged("its checksum differs"));
            }
            self.is_within = false;
        }
    }
}

fn damaged(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 5,000 lines, as the programs of these names compress them.
    const SAMPLES: [(Compression, &str); 5] = [
        (Compression::Zstd, "28b52ffd64b8877d00003861206c696e650a0100ae08e9c508bad89b9a"),
        (
            Compression::Xz,
            "fd377a585a000004e6d6b4460200210116000000742fe5a3e088b7004c5d0030880986d41f4577adf3886b919603a7c6e7df\
             575c8e44cc5c8ec163a0addd8d4c4aecba0c3ea97c3749a91d965971a85224b4af329fdcf22e688f39d6fbc93396662b23ca\
             6d3bb85a44000000645f313eee6dec5e000168b89102000090483d01b1c467fb020000000004595a",
        ),
        // With another checksum, and a dictionary of 64 MiB.
        (
            Compression::Xz,
            "fd377a585a00000ae1fb0ca1020021011c00000010cf58cce088b7004c5d0030880986d41f4577adf3886b919603a7c6e7df\
             575c8e44cc5c8ec163a0addd8d4c4aecba0c3ea97c3749a91d965971a85224b4af329fdcf22e688f39d6fbc93396662b23ca\
             6d3bb85a44000000b26ae2889fa3055cb179ae36aa83155587931cb942ae98423766fce5b93b315d00018001b8910200853f\
             a4f6b6e9df1c02000000000a595a",
        ),
        (
            Compression::Bzip2,
            "425a6839314159265359624f7a05001d4bd1000010400022252000508600295034e08547042a3621518215182151e10a8c10\
             a8f8bb9229c28483127bd028",
        ),
        (
            Compression::Gzip,
            "1f8b0800000000000003edc5a10d0030080030cf15bc86985842f85ff206a235adec3f2f4a9224499224499224499224499224499224499224499224499224499224499224499224499224499224499224499224499224dd6f017c9b800db8880000",
        ),
    ];

    /// Which need more memory than there is: a frame with a window of 2 GiB, and a block with a
    /// dictionary of 256 MiB.
    const LARGE: [&str; 2] = [
        "28b52ffd04a87d00003861206c696e650a0100ae08e9c508bad89b9a",
        "fd377a585a000004e6d6b44602002101200000000988a576e088b7004c5d0030880986d41f4577adf3886b919603a7c6e7df\
         575c8e44cc5c8ec163a0addd8d4c4aecba0c3ea97c3749a91d965971a85224b4af329fdcf22e688f39d6fbc93396662b23ca\
         6d3bb85a44000000645f313eee6dec5e000168b89102000090483d01b1c467fb020000000004595a",
    ];

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |place: usize| u8::from_str_radix(&hex[place..place + 2], 16).expect("a byte");
        (0..hex.len()).step_by(2).map(digit).collect()
    }

    fn read(compressed: &[u8]) -> io::Result<String> {
        let compression = Compression::of(&compressed[..MAGIC_BYTES]).expect("compressed");
        let mut text = String::new();
        let input = io::Cursor::new(compressed.to_vec());
        compression.decompress(input).read_to_string(&mut text).map(|_| text)
    }

    #[test]
    fn every_member_of_a_compressed_file_is_read() {
        let whole = "a line\n".repeat(5_000);
        for (compression, hex) in SAMPLES {
            let one = bytes(hex);
            assert_eq!(Compression::of(&one[..MAGIC_BYTES]), Some(compression));
            assert_eq!(read(&one).expect(hex), whole, "{compression:?}");
            let two = [&one[..], &one].concat();
            assert_eq!(read(&two).expect(hex), whole.repeat(2), "{compression:?}");
        }
        // Of zstd some are to be skipped, also the first.
        let frame = bytes(SAMPLES[0].1);
        let skipped = [&[0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3][..], &frame].concat();
        assert_eq!(read(&skipped).expect("skips"), whole);
        assert_eq!(read(&skipped.repeat(2)).expect("skips"), whole.repeat(2));
        assert!(read(&skipped[..10]).is_err());
        // Behind a stream of xz may stand zeros.
        let padded = [bytes(SAMPLES[1].1), vec![0; 8]].concat();
        assert_eq!(read(&padded).expect("padding"), whole);
    }

    #[test]
    fn what_is_cut_off_or_damaged_is_an_error_wherever_it_is() {
        for (compression, hex) in SAMPLES {
            let whole = bytes(hex);
            let name = compression.name();
            let says = format!("its {name} data is damaged or cut off; check it with `{name} -t`");
            for end in MAGIC_BYTES..whole.len() {
                let error = read(&whole[..end]).expect_err("cut off").to_string();
                assert!(error.starts_with(&says), "{end}: {error}");
            }
            let second = [&whole[..], &whole[..whole.len() / 2]].concat();
            let error = read(&second).expect_err("cut off").to_string();
            assert!(error.starts_with(&says), "{error}");
            // A checksum tells also what is no error of the form.
            let text = read(&whole).expect("right");
            for place in MAGIC_BYTES..whole.len() {
                let mut damaged = whole.clone();
                damaged[place] ^= 4;
                // It says so in words of its own.
                match read(&damaged) {
                    Ok(read) => assert!(read == text, "{hex} {place}"),
                    Err(error) => {
                        let error = error.to_string();
                        let is_own = error.starts_with(&says) || error.contains("and name `-`");
                        assert!(is_own, "{hex} {place}: {error}");
                    }
                }
            }
            // What follows is none of its members.
            let more = read(&[&whole[..], b"hello"].concat());
            assert!(more.is_err(), "{compression:?}");
        }
    }

    #[test]
    fn what_stands_before_the_end_of_a_cut_off_file_is_read() {
        // A block of the others is read as a whole.
        let in_steps = [Compression::Xz, Compression::Gzip];
        for (compression, hex) in SAMPLES.into_iter().filter(|(one, _)| in_steps.contains(one)) {
            let mut cut = bytes(hex);
            cut.truncate(cut.len() - 8);
            let mut plain = compression.decompress(io::Cursor::new(cut));
            let (mut buffer, mut read) = (vec![0; BUFFER_BYTES], 0);
            let error = loop {
                match plain.read(&mut buffer) {
                    Ok(more) => read += more,
                    Err(error) => break error,
                }
            };
            assert!(read >= 35_000 - STEP_BYTES, "{compression:?}: {read}, {error}");
        }
    }

    #[test]
    fn no_file_takes_more_memory_than_the_bound() {
        for hex in LARGE {
            let error = read(&bytes(hex)).expect_err(hex).to_string();
            assert!(error.contains("decompress it by another program, and name `-`"), "{error}");
        }
    }
}
