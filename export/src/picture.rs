//! Picture sizes that a model can draw.

use std::{fmt, str::FromStr};

/// Larger sides are refused before anything is computed.
const MAX_SIDE: usize = 16384;
/// So are larger areas: 8192 x 8192.
const MAX_PIXELS: usize = 1 << 26;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error(
        "{name} {value} is not a multiple of {multiple}, which this model draws in; try {}", either(*below, *above)
    )]
    NotAMultiple { name: &'static str, value: usize, multiple: usize, below: usize, above: usize },
    #[error("{name} {value} is out of range; legal are multiples of {multiple} up to {MAX_SIDE}")]
    OutOfRange { name: &'static str, value: usize, multiple: usize },
    #[error("{width}x{height}: the model's graphs were exported for {} alone", in_words(sizes))]
    NotDrawn { width: usize, height: usize, sizes: Vec<[usize; 2]> },
    #[error("{width}x{height} is more than {MAX_PIXELS} pixels; choose a smaller size")]
    TooManyPixels { width: usize, height: usize },
    #[error("'{0}' is not a size; write WIDTHxHEIGHT, for example 512x512")]
    Syntax(String),
}

/// `96 or 112`
fn either(below: usize, above: usize) -> String {
    if below == above { below.to_string() } else { format!("{below} or {above}") }
}

/// `256x256, 512x128, ...`
fn in_words(sizes: &[[usize; 2]]) -> String {
    const MOST: usize = 6;
    let shown = sizes.iter().take(MOST).map(|[width, height]| format!("{width}x{height}"));
    let more = (sizes.len() > MOST).then(|| "...".to_owned());
    shown.chain(more).collect::<Vec<_>>().join(", ")
}

/// Width and height in pixels, legal for the model that it was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    width: usize,
    height: usize,
    /// Pixels per latent token, per side.
    token: usize,
}

impl Size {
    /// Sides are multiples of a latent token's.
    pub fn new(width: usize, height: usize, multiple: usize) -> Result<Size, SizeError> {
        for (name, value) in [("width", width), ("height", height)] {
            if value == 0 || value > MAX_SIDE {
                return Err(SizeError::OutOfRange { name, value, multiple });
            }
            if !value.is_multiple_of(multiple) {
                let below = (value / multiple).max(1) * multiple;
                let above = value.next_multiple_of(multiple);
                return Err(SizeError::NotAMultiple { name, value, multiple, below, above });
            }
        }
        if width.saturating_mul(height) > MAX_PIXELS {
            return Err(SizeError::TooManyPixels { width, height });
        }
        Ok(Size { width, height, token: multiple })
    }

    /// The largest size up to that asked for whose sides are multiples of `multiple`, which is one of `token`, the pixels
    /// per latent token.
    pub fn floored(width: usize, height: usize, multiple: usize, token: usize) -> Result<Size, SizeError> {
        let floor = |side: usize| if side < multiple { side } else { side / multiple * multiple };
        Ok(Size { token, ..Size::new(floor(width), floor(height), multiple)? })
    }

    pub fn width(self) -> usize {
        self.width
    }

    pub fn height(self) -> usize {
        self.height
    }

    /// Latent tokens per column and per row: height, width.
    pub fn grid(self) -> [usize; 2] {
        [self.height / self.token, self.width / self.token]
    }

    /// Latent tokens.
    pub fn tokens(self) -> usize {
        let [rows, columns] = self.grid();
        rows * columns
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

/// `WIDTHxHEIGHT` as typed, not yet checked against a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypedSize(pub usize, pub usize);

impl FromStr for TypedSize {
    type Err = SizeError;
    fn from_str(text: &str) -> Result<TypedSize, SizeError> {
        let parts = text.split_once(['x', 'X']).and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
        parts.map(|(w, h)| TypedSize(w, h)).ok_or_else(|| SizeError::Syntax(text.to_owned()))
    }
}
