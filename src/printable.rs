//! Texts with names from files in them, as they may stand on a terminal.

/// A text in one line. What would end the line, steer a terminal, or turn the direction of writing, is escaped.
pub fn one_line(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match steers(c) {
            true => safe.extend(c.escape_default()),
            false => safe.push(c),
        }
    }
    safe
}

/// Not the joiners U+200C and U+200D, which words and emoji are made with.
fn steers(c: char) -> bool {
    let marks = matches!(c, '\u{200b}' | '\u{200e}' | '\u{200f}');
    c.is_control() || marks || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A text of several lines, each as [`one_line`] has it.
pub fn lines(text: &str) -> String {
    text.split('\n').map(one_line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_steer_terminals() {
        assert_eq!(one_line("a\nb\u{1b}[31m\u{202e}é"), r"a\nb\u{1b}[31m\u{202e}é");
        assert_eq!(lines("a\r\nb\tc\n"), "a\\r\nb\\tc\n");
    }
}
