//! A drawing as SVG text.

use std::fmt::Write;

use super::{ADVANCE, Anchor, Colour, Drawing, Shape};

pub fn to_svg(drawing: &Drawing) -> String {
    let (width, height) = (drawing.width, drawing.height);
    // A monospaced character is about three fifths of the size wide.
    let size = ADVANCE / 0.6;
    let mut svg = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" \
         height=\"{height}\" viewBox=\"0 0 {width} {height}\" font-family=\"monospace\" font-size=\"{size}\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    drawing.shapes.iter().for_each(|shape| element(&mut svg, shape));
    svg.push_str("</svg>\n");
    svg
}

/// Writing to a string does not fail, so that results are let go.
fn element(svg: &mut String, shape: &Shape) {
    match shape {
        Shape::Steps { steps, end, base, colour } => {
            let Some([start, _]) = steps.first() else { return };
            let _ = write!(svg, "<path fill=\"{}\" d=\"M{start:.1} {base:.1}", hex(*colour));
            for [x, y] in steps {
                let _ = write!(svg, "H{x:.1}V{y:.1}");
            }
            let _ = writeln!(svg, "H{end:.1}V{base:.1}Z\"/>");
        }
        Shape::Line { from: [x1, y1], to: [x2, y2], dashed, colour } => {
            let dashes = if *dashed { " stroke-dasharray=\"8 4\"" } else { "" };
            let _ = writeln!(
                svg,
                "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{}\"{dashes}/>",
                hex(*colour)
            );
        }
        Shape::Text { at: [x, y], text, anchor, colour } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{}\">{}</text>",
                hex(*colour),
                escaped(text)
            );
        }
    }
}

fn hex([r, g, b]: Colour) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// Text as XML allows it: names come from files and may hold anything.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out() {
        let text = "a<b>&\u{1}\u{ffff}".to_owned();
        let shape = Shape::Text { at: [1.0, 2.0], text, anchor: Anchor::End, colour: [0, 128, 255] };
        let svg = to_svg(&Drawing { width: 10, height: 10, shapes: vec![shape] });
        assert!(svg.contains("fill=\"#0080ff\">a&lt;b&gt;&amp;\u{fffd}\u{fffd}</text>"), "{svg}");
    }
}
