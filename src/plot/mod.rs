//! Simple drawings, as SVG and as PNG: filled steps, lines, and text of one width per character.

mod font;
mod png;
mod svg;

pub use self::{png::to_png, svg::to_svg};

/// Red, green, blue.
pub type Colour = [u8; 3];

/// Pixels from one character to the next.
pub const ADVANCE: f64 = 12.0;
/// Pixels of a capital letter's height.
pub const CAPITAL: f64 = 14.0;

/// A drawing. Coordinates are pixels from the upper left corner; later shapes lie over earlier ones.
#[derive(Clone, Debug, Default)]
pub struct Drawing {
    pub width: usize,
    pub height: usize,
    pub shapes: Vec<Shape>,
}

#[derive(Clone, Debug)]
pub enum Shape {
    /// The area between `base` and steps; a step goes from its x to that of the next, the last one to `end`.
    Steps { steps: Vec<[f64; 2]>, end: f64, base: f64, colour: Colour },
    /// A level or upright line, one pixel wide.
    Line { from: [f64; 2], to: [f64; 2], dashed: bool, colour: Colour },
    /// One line of text; `at` is where its letters stand.
    Text { at: [f64; 2], text: String, anchor: Anchor, colour: Colour },
}

/// Which part of a text is at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    /// The text's left edge.
    fn left(self, x: f64, characters: usize) -> f64 {
        let width = characters as f64 * ADVANCE;
        match self {
            Anchor::Start => x,
            Anchor::Middle => x - width / 2.0,
            Anchor::End => x - width,
        }
    }
}
