//! Small text files of the kernel that are read again and again.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

/// More than any of the files has; what is beyond is not looked at.
const LONGEST: usize = 16 << 10;

/// Where files are read into. Made once: reading allocates nothing, so that it works when memory is short.
pub(crate) struct Buffer(Box<[u8; LONGEST]>);

impl Buffer {
    pub(crate) fn new() -> Buffer {
        Buffer(Box::new([0; LONGEST]))
    }
}

/// A file of /proc, /sys or a control group that stays open: the kernel writes its text anew for every reading from the
/// start. One of a process stays with that process; it does not pass to a later one of the same number.
pub(crate) struct KernelFile(File);

impl KernelFile {
    pub(crate) fn open(path: &Path) -> Option<KernelFile> {
        File::open(path).ok().map(KernelFile)
    }

    pub(crate) fn read<'a>(&self, buffer: &'a mut Buffer) -> Option<&'a [u8]> {
        let text = &mut buffer.0[..];
        let mut end = 0;
        while end < text.len() {
            match self.0.read_at(&mut text[end..], end as u64) {
                Ok(0) => break,
                Ok(n) => end += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => (),
                Err(_) => return None,
            }
        }
        Some(&text[..end])
    }
}

/// The number that a line gives to a name: `MemTotal:  16 kB` and `inactive_file 16`; kB and the like are bytes after.
pub(crate) fn field(text: &[u8], name: &str) -> Option<u64> {
    text.split(|b| *b == b'\n').find_map(|line| {
        let rest = line.strip_prefix(name.as_bytes())?;
        let rest = rest.strip_prefix(b":").unwrap_or(rest);
        // Another name may begin with this one.
        if rest.first()?.is_ascii_whitespace() { bytes(rest) } else { None }
    })
}

/// A number of bytes with an optional binary unit: the kernel's `kB` is 1024 bytes.
pub(crate) fn bytes(text: &[u8]) -> Option<u64> {
    let mut words = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let number = number(words.next()?)?;
    let unit = match words.next() {
        None => 1,
        Some(b"kB" | b"KiB") => 1 << 10,
        Some(b"MiB") => 1 << 20,
        Some(b"GiB") => 1 << 30,
        Some(_) => return None,
    };
    number.checked_mul(unit)
}

/// Decimal digits and nothing else, besides space around them.
pub(crate) fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text.trim_ascii()).ok().filter(|text| !text.starts_with('+'))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{bytes, field, number};

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = b"MemTotal:       24684084 kB\nMemFree: 1 kB\ninactive_file 12288\nSwapCached:\nBad: x kB\n\xff\xfe 3";
        for (name, value) in [
            ("MemTotal", Some(24_684_084 << 10)),
            ("MemFree", Some(1024)),
            ("inactive_file", Some(12288)),
            ("Mem", None),
            ("inactive", None),
            ("SwapCached", None),
            ("Bad", None),
            ("absent", None),
        ] {
            assert_eq!(field(text, name), value, "{name}");
        }
    }

    #[test]
    fn numbers_are_plain() {
        assert_eq!(number(b" 18446744073709551615\n"), Some(u64::MAX));
        for garbage in [&b"max\n"[..], b"", b"-1", b"+1", b"18446744073709551616", b"1 2", b"\xff"] {
            assert_eq!(number(garbage), None);
        }
        assert_eq!(bytes(b"2 MiB"), Some(2 << 20));
        assert_eq!(bytes(b"18446744073709551615 kB"), None);
        assert_eq!(bytes(b"2 pages"), None);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(text in proptest::collection::vec(any::<u8>(), 0..200), name in "[a-z:]{0,3}") {
            let _ = (field(&text, &name), bytes(&text), number(&text));
        }
    }
}
