//! Text for people and programs: results on standard output, everything else on standard error.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::Context;

use crate::printable;

/// Whether a result was printed, so that an error that comes with it is not printed as a second one.
static PRINTED: AtomicBool = AtomicBool::new(false);

/// Whether a result is on standard output.
pub fn has_printed() -> bool {
    PRINTED.load(Ordering::Relaxed)
}

/// Prints a result and flushes it. A reader that has gone away has read enough; any other trouble is an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    PRINTED.store(true, Ordering::Relaxed);
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// Says something on standard error, in one line whatever a library's message looks like, and without the control
/// characters that a file's names may hold. Nobody is told if that fails.
pub fn complain(message: &str) {
    let parts = message.split(['\n', '\r']).map(str::trim).filter(|part| !part.is_empty());
    let line = printable::one_line(&parts.collect::<Vec<_>>().join(" "));
    let _ = writeln!(io::stderr(), "{line}");
}

/// An error and its causes. Many messages tell their cause themselves; it is not told again.
pub fn in_words(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |told, cause| match told.as_str() {
        "" => cause,
        _ if told.contains(&cause) => told,
        _ => format!("{told}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::in_words;

    #[test]
    fn causes_are_told_once() {
        let error = anyhow!("the end").context("f.png: the end").context("-o");
        assert_eq!(in_words(&error), "-o: f.png: the end");
    }
}
