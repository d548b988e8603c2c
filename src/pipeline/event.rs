//! What a run tells the outside while it runs: one stream for terminal, server, log and tests.

use serde::{Deserialize, Serialize};

/// Something that happened. As JSON it is one object with its name under `event`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Stage `index` of `count` begins; `index` counts from 1.
    Stage { name: String, index: usize, count: usize },
    /// Step `index` of `count` is done; `index` counts from 1.
    Step { index: usize, count: usize, seconds: f64 },
    /// The state after `name` is on disk: the same run, started again, goes on from there.
    Kept { name: String, bytes: u64 },
    /// `done` of `total` bytes of `what` are read, written or uploaded; `total` is absent where nobody knows it.
    Bytes { what: String, done: u64, total: Option<u64> },
    /// `done` of `bytes` bytes of a file are here, of all files that are brought `all_done` of `all_bytes`.
    Download { file: String, done: u64, bytes: u64, all_done: u64, all_bytes: u64 },
    /// A stage's peak memory in bytes, as planned and as measured.
    Memory { stage: String, planned: u64, measured: u64 },
    /// The run goes on, but differently from what was asked for.
    Warning { message: String },
    /// The run ends here, with that exit code.
    Error { message: String, code: u8 },
    /// Worth knowing: a default taken, a size changed.
    Note { message: String },
}

impl Event {
    pub fn warning(message: impl Into<String>) -> Event {
        Event::Warning { message: message.into() }
    }

    pub fn note(message: impl Into<String>) -> Event {
        Event::Note { message: message.into() }
    }

    /// The event as one line of JSON, without the line's end.
    pub fn to_json_line(&self) -> String {
        serde_json::to_string(self).expect("an event has string keys and plain values")
    }
}

/// Who wants to hear of events. Every `FnMut(Event)` is one.
pub trait Listener {
    fn on_event(&mut self, event: Event);
}

impl<F: FnMut(Event)> Listener for F {
    fn on_event(&mut self, event: Event) {
        self(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_of_json_and_back() {
        let events = [
            Event::Stage { name: "transformer".into(), index: 2, count: 3 },
            Event::Step { index: 1, count: 4, seconds: 0.25 },
            Event::Kept { name: "latents_step0".into(), bytes: 1 << 20 },
            Event::Bytes { what: "weights".into(), done: 1 << 40, total: None },
            Event::Memory { stage: "vae".into(), planned: 10, measured: 9 },
            Event::warning("two\nlines"),
            Event::note("a \"quoted\" word"),
        ];
        for event in events {
            let line = event.to_json_line();
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
        }
        assert_eq!(Event::warning("w").to_json_line(), r#"{"event":"warning","message":"w"}"#);
    }

    #[test]
    fn a_closure_listens() {
        let mut heard = Vec::new();
        let mut closure = |event| heard.push(event);
        let listener: &mut dyn Listener = &mut closure;
        listener.on_event(Event::note("a"));
        assert_eq!(heard, [Event::note("a")]);
    }
}
