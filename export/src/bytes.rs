//! Amounts of memory as people write and read them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A number of bytes that parses (`512MiB`, `5.1 GiB`, `5GB`, `4096`) and prints itself (`5.1 GiB`).
///
/// `KiB` to `TiB` are powers of 1024, `kB` to `TB` powers of 1000, and letters may be of either case. Printing rounds to
/// a tenth of the largest unit that fits. In files it is a plain number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

/// A text that is no amount of memory, or one of 2^64 bytes and more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no amount of memory; write it like 512MiB, 12GiB or 5.5GB, or as a number of bytes")]
pub struct ByteSizeError(pub String);

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
];

/// How many of `UNITS` are used for printing.
const PRINTED: usize = 5;

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<ByteSize, ByteSizeError> {
        parse(text.trim()).map(ByteSize).ok_or_else(|| ByteSizeError(text.to_owned()))
    }
}

/// Exact in integers, rounded down to whole bytes.
fn parse(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim_start());
    let unit = match unit {
        "" => 1,
        _ => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let whole = whole.parse::<u64>().ok()?.checked_mul(unit)?;
    // Twelve digits tell bytes apart in any unit.
    let fraction = fraction.get(..12).unwrap_or(fraction);
    let scale = 10u128.pow(fraction.len() as u32);
    let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit) / scale;
    whole.checked_add(u64::try_from(part).ok()?)
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, unit) = *UNITS[..PRINTED].iter().find(|(_, unit)| self.0 >= *unit).unwrap_or(&("B", 1));
        let tenths = (u128::from(self.0) * 10 + u128::from(unit) / 2) / u128::from(unit);
        match (tenths / 10, tenths % 10) {
            (whole, 0) => f.pad(&format!("{whole} {name}")),
            (whole @ 100.., 5..) => f.pad(&format!("{} {name}", whole + 1)),
            (whole @ 100.., _) => f.pad(&format!("{whole} {name}")),
            (whole, tenth) => f.pad(&format!("{whole}.{tenth} {name}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::ByteSize;

    #[test]
    fn amounts_parse() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17 B", 17),
            ("512MiB", 512 << 20),
            ("12GiB", 12 << 30),
            ("12gib", 12 << 30),
            (" 5.5 GiB ", 11 << 29),
            ("5GB", 5_000_000_000),
            ("1.5kB", 1500),
            ("0.25KiB", 256),
            ("16777215TiB", 16_777_215 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            " ",
            "GiB",
            ".5GiB",
            "5.",
            "5.GiB",
            "-1",
            "+5MiB",
            "1e3",
            "5 G i B",
            "5GiBs",
            "5%",
            "1.2.3MiB",
            "٣MiB",
            "16777216TiB",
            "18446744073709551616",
            "1_000",
            "0x10",
            "NaN",
            "inf",
        ] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn amounts_print_short() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 10, "1 KiB"),
            (1536 << 10, "1.5 MiB"),
            ((480 << 20) + 17, "480 MiB"),
            ((717 << 20) + (600 << 10), "718 MiB"),
            (12 << 30, "12 GiB"),
            (5_476_083_302, "5.1 GiB"),
            (u64::MAX, "16777216 TiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>9}|{:<9}|", ByteSize(5), ByteSize(5)), "      5 B|5 B      |");
    }

    proptest! {
        #[test]
        fn printed_amounts_parse_to_nearly_the_same(bytes in 0..u64::MAX >> 1) {
            let text = ByteSize(bytes).to_string();
            let read: ByteSize = text.parse().unwrap();
            prop_assert!(read.0.abs_diff(bytes) <= bytes / 19, "{text}");
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
