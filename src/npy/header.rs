//! The header of a `.npy` file: magic, version, length, and a Python dict literal with three keys.

use super::FormatError;

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Where NumPy lets the data begin.
const ALIGNMENT: usize = 64;
/// The most bytes before the data that we read. NumPy itself refuses header texts of more than 10000 characters.
pub(super) const MAX_BYTES: usize = 1 << 16;

/// What is wrong with the dict literal.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum HeaderError {
    #[error("the header is not UTF-8")]
    Utf8,
    #[error("the header has {found:?} where {expected} should be")]
    Syntax { expected: &'static str, found: String },
    #[error("the header's key {0:?} is unknown or there twice")]
    Key(String),
    #[error("the header's key {0:?} is missing")]
    Missing(&'static str),
    #[error("the dim {0:?} is not a number of elements")]
    Dim(String),
}

#[derive(Debug, PartialEq)]
pub(super) struct Header {
    pub descr: String,
    pub fortran_order: bool,
    pub shape: Vec<usize>,
}

/// The header's text, and the byte where the data begins, which is within the file's `length`.
pub(super) fn split(prefix: &[u8], length: u64) -> Result<(&[u8], usize), FormatError> {
    let rest = prefix.strip_prefix(MAGIC).ok_or(FormatError::Magic)?;
    let [major, minor, rest @ ..] = rest else { return Err(FormatError::Magic) };
    let too_short = |end| FormatError::HeaderLength { end, length };
    let (text_at, text_length) = match (major, minor, rest) {
        (1, 0, [a, b, ..]) => (10, u32::from(u16::from_le_bytes([*a, *b]))),
        (2 | 3, 0, [a, b, c, d, ..]) => (12, u32::from_le_bytes([*a, *b, *c, *d])),
        (1, 0, _) => return Err(too_short(10)),
        (2 | 3, 0, _) => return Err(too_short(12)),
        _ => return Err(FormatError::Version(*major, *minor)),
    };
    let end = text_at as u64 + u64::from(text_length);
    let data_at = usize::try_from(end).map_err(|_| too_short(end))?;
    let text = prefix.get(text_at..data_at).ok_or_else(|| too_short(end))?;
    Ok((text, data_at))
}

/// Magic, version 1, length and text, up to the data. The text of our shapes is far below version 1's 64 KiB.
pub(super) fn to_bytes(descr: &str, shape: &[usize]) -> Vec<u8> {
    let dims = shape.iter().map(|d| d.to_string()).collect::<Vec<_>>().join(", ");
    let dims = if shape.len() == 1 { dims + "," } else { dims };
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({dims}), }}");
    let unpadded = MAGIC.len() + 4 + text.len() + 1;
    text.push_str(&" ".repeat(unpadded.next_multiple_of(ALIGNMENT) - unpadded));
    text.push('\n');
    let length = u16::try_from(text.len()).expect("a tensor has a few dims");
    [&MAGIC[..], &[1, 0], &length.to_le_bytes(), text.as_bytes()].concat()
}

impl Header {
    pub fn parse(text: &[u8]) -> Result<Header, HeaderError> {
        let text = std::str::from_utf8(text).map_err(|_| HeaderError::Utf8)?;
        let mut rest = Cursor(text.trim_end_matches([' ', '\n']));
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        rest.expect("{")?;
        while !rest.take("}") {
            let key = rest.string()?;
            rest.expect(":")?;
            match key {
                "descr" if descr.is_none() => descr = Some(rest.string()?.to_string()),
                "fortran_order" if fortran_order.is_none() => fortran_order = Some(rest.boolean()?),
                "shape" if shape.is_none() => shape = Some(rest.dims()?),
                _ => return Err(HeaderError::Key(key.to_string())),
            }
            if !rest.take(",") {
                rest.expect("}")?;
                break;
            }
        }
        rest.end()?;
        Ok(Header {
            descr: descr.ok_or(HeaderError::Missing("descr"))?,
            fortran_order: fortran_order.ok_or(HeaderError::Missing("fortran_order"))?,
            shape: shape.ok_or(HeaderError::Missing("shape"))?,
        })
    }
}

/// What is left of the header's text.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn take(&mut self, token: &str) -> bool {
        let rest = self.0.trim_start_matches(' ');
        let found = rest.strip_prefix(token);
        self.0 = found.unwrap_or(rest);
        found.is_some()
    }

    fn expect(&mut self, token: &'static str) -> Result<(), HeaderError> {
        if self.take(token) { Ok(()) } else { Err(self.wrong(token)) }
    }

    fn end(&self) -> Result<(), HeaderError> {
        if self.0.is_empty() { Ok(()) } else { Err(self.wrong("the end")) }
    }

    /// A quoted string without escapes.
    fn string(&mut self) -> Result<&'a str, HeaderError> {
        let quote = if self.take("'") {
            '\''
        } else if self.take("\"") {
            '"'
        } else {
            return Err(self.wrong("a string"));
        };
        let (string, rest) = self.0.split_once(quote).ok_or_else(|| self.wrong("a closed string"))?;
        self.0 = rest;
        Ok(string)
    }

    fn boolean(&mut self) -> Result<bool, HeaderError> {
        if self.take("True") {
            Ok(true)
        } else if self.take("False") {
            Ok(false)
        } else {
            Err(self.wrong("True or False"))
        }
    }

    /// A tuple of numbers: `()`, `(3,)`, `(3, 4)`.
    fn dims(&mut self) -> Result<Vec<usize>, HeaderError> {
        self.expect("(")?;
        let (inside, rest) = self.0.split_once(')').ok_or_else(|| self.wrong("a closed tuple"))?;
        self.0 = rest;
        let inside = inside.trim_matches(' ');
        if inside.is_empty() {
            return Ok(Vec::new());
        }
        let Some(items) = inside.strip_suffix(',').or(inside.contains(',').then_some(inside)) else {
            // `(3)` is a number in Python, not a tuple.
            return Err(HeaderError::Dim(inside.to_string()));
        };
        items.split(',').map(|item| dim(item.trim_matches(' '))).collect()
    }

    fn wrong(&self, expected: &'static str) -> HeaderError {
        HeaderError::Syntax { expected, found: self.0.chars().take(20).collect() }
    }
}

fn dim(item: &str) -> Result<usize, HeaderError> {
    let digits = !item.is_empty() && item.bytes().all(|b| b.is_ascii_digit());
    item.parse().ok().filter(|_| digits).ok_or_else(|| HeaderError::Dim(item.to_string()))
}
