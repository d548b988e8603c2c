//! Sizes in bytes as people write and read them.

use std::{fmt, str::FromStr};

/// Bytes. Written as a number with or without a unit: `512MiB`, `12GiB`, `5GB`, `1.5 GiB`, `1000000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

impl FromStr for ByteSize {
    type Err = String;
    fn from_str(text: &str) -> Result<ByteSize, String> {
        let wrong =
            || format!("{text:?} is not a size; write bytes or a unit, for example 12GiB, 512MiB or 5GB");
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim().to_lowercase();
        let factor = UNITS.iter().find(|known| known.0 == unit).ok_or_else(wrong)?.1;
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(factor),
            Err(_) => {
                let bytes = number.parse::<f64>().map_err(|_| wrong())? * factor as f64;
                (bytes < u64::MAX as f64).then_some(bytes as u64)
            }
        };
        bytes.map(ByteSize).ok_or_else(wrong)
    }
}

/// In the largest binary unit of which there is at least one.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_unit = |shift: u32| self.0 as f64 / (1u64 << shift) as f64;
        let text = match self.0 {
            0..0x400 => format!("{} B", self.0),
            0x400..0x10_0000 => format!("{:.1} KiB", in_unit(10)),
            0x10_0000..0x4000_0000 => format!("{:.1} MiB", in_unit(20)),
            _ => format!("{:.2} GiB", in_unit(30)),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("512MiB", 512 << 20),
            ("12GiB", 12 << 30),
            ("5GB", 5_000_000_000),
            ("1.5 gib", 3 << 29),
            ("123", 123),
            ("7b", 7),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in
            ["", "GiB", "12 apples", "-1GiB", "1.2.3MiB", "99999999999TiB", "1e400", "18446744073709551616"]
        {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_told() {
        let told = [0, 1023, 1536, 512 << 20, (3 << 30) + (1 << 29)].map(|bytes| ByteSize(bytes).to_string());
        assert_eq!(told, ["0 B", "1023 B", "1.5 KiB", "512.0 MiB", "3.50 GiB"]);
    }
}
