//! A drawing as PNG: pixels without smoothing, which suits level and upright edges.

use png::{BitDepth, ColorType, Encoder, EncodingError};

use super::{ADVANCE, CAPITAL, Colour, Drawing, Shape, font};

/// Pixels per dot of the font.
const DOT: i64 = CAPITAL as i64 / font::HEIGHT as i64;
/// Pixels of a dash, and of a dash with the gap after it.
const DASH: i64 = 8;
const DASH_PERIOD: i64 = 12;

pub fn to_png(drawing: &Drawing) -> Result<Vec<u8>, EncodingError> {
    let mut canvas = Canvas::new(drawing.width, drawing.height);
    drawing.shapes.iter().for_each(|shape| canvas.draw(shape));
    let mut bytes = Vec::new();
    // A side that does not fit makes a picture of none, which the encoder refuses.
    let [width, height] = [drawing.width, drawing.height].map(|side| u32::try_from(side).unwrap_or_default());
    let mut encoder = Encoder::new(&mut bytes, width, height);
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    encoder.write_header()?.write_image_data(&canvas.pixels)?;
    Ok(bytes)
}

struct Canvas {
    width: i64,
    height: i64,
    /// Row-major, three bytes a pixel.
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(width: usize, height: usize) -> Canvas {
        Canvas { width: width as i64, height: height as i64, pixels: vec![255; width * height * 3] }
    }

    /// Fills the pixels from the first to before the second corner, as far as they are on the canvas.
    fn fill(&mut self, [left, top]: [i64; 2], [right, bottom]: [i64; 2], colour: Colour) {
        let (left, right) = (left.clamp(0, self.width), right.clamp(0, self.width));
        for y in top.clamp(0, self.height)..bottom.clamp(0, self.height) {
            for x in left..right {
                let place = ((y * self.width + x) * 3) as usize;
                self.pixels[place..place + 3].copy_from_slice(&colour);
            }
        }
    }

    fn draw(&mut self, shape: &Shape) {
        match shape {
            Shape::Steps { steps, end, base, colour } => {
                for (i, [x, y]) in steps.iter().enumerate() {
                    let next = steps.get(i + 1).map_or(*end, |step| step[0]);
                    self.fill([pixel(*x), pixel(*y)], [pixel(next), pixel(*base)], *colour);
                }
            }
            Shape::Line { from, to, dashed, colour } => self.line(*from, *to, *dashed, *colour),
            Shape::Text { at: [x, y], text, anchor, colour } => {
                let left = anchor.left(*x, text.chars().count());
                for (i, character) in text.chars().enumerate() {
                    self.character(character, pixel(left + i as f64 * ADVANCE), pixel(y - CAPITAL), *colour);
                }
            }
        }
    }

    fn line(&mut self, from: [f64; 2], to: [f64; 2], dashed: bool, colour: Colour) {
        let ([x1, y1], [x2, y2]) = (from.map(pixel), to.map(pixel));
        let level = y1 == y2;
        let (start, end) = if level { (x1, x2) } else { (y1, y2) };
        let (length, period) = if dashed { (DASH, DASH_PERIOD) } else { (end - start + 1, end - start + 1) };
        for dash in (start..=end).step_by(period.max(1) as usize) {
            let stop = (dash + length).min(end + 1);
            match level {
                true => self.fill([dash, y1], [stop, y1 + 1], colour),
                false => self.fill([x1, dash], [x1 + 1, stop], colour),
            }
        }
    }

    fn character(&mut self, character: char, left: i64, top: i64, colour: Colour) {
        for (y, x) in (0..font::HEIGHT).flat_map(|y| (0..font::WIDTH).map(move |x| (y, x))) {
            if font::dot(character, x, y) {
                let corner = [left + x as i64 * DOT, top + y as i64 * DOT];
                self.fill(corner, corner.map(|side| side + DOT), colour);
            }
        }
    }
}

fn pixel(place: f64) -> i64 {
    place.round() as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::Anchor;

    #[test]
    fn shapes_are_where_they_belong() {
        let colour = [10, 20, 30];
        let shapes = vec![
            Shape::Steps { steps: vec![[2.0, 6.0], [4.0, 8.0]], end: 6.0, base: 10.0, colour },
            Shape::Line { from: [0.0, 1.0], to: [9.0, 1.0], dashed: false, colour },
            Shape::Text { at: [-50.0, 500.0], text: "off".to_owned(), anchor: Anchor::Middle, colour },
        ];
        let bytes = to_png(&Drawing { width: 10, height: 12, shapes }).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let set = pixels.chunks(3).filter(|pixel| **pixel == colour).count();
        assert_eq!(set, 2 * 4 + 2 * 2 + 10);
        assert_eq!(pixels[(6 * 10 + 2) * 3..][..3], colour);
    }
}
