//! How a command tells that it failed.

use super::{
    code_of,
    printer::{complain, has_printed, in_words, print},
};
use crate::pipeline::event::Event;

/// Who reads of a failure: people, by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Failure {
    /// A program that reads standard output: `--json`.
    pub json: bool,
    /// A program that reads standard error: `--progress json`.
    pub event: bool,
}

impl Failure {
    /// Tells of the error, and returns the process's exit code.
    pub fn tell(self, error: &anyhow::Error) -> u8 {
        let (message, code) = (in_words(error), code_of(error));
        if self.json && !has_printed() {
            // What cannot be written cannot be told of there.
            let _ = print(&format!("{}\n", serde_json::json!({ "error": message, "code": code })));
        }
        match self.event {
            true => complain(&Event::Error { message, code }.to_json_line()),
            false => complain(&format!("error: {message}")),
        }
        code
    }
}
