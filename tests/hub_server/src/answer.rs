//! An answer before it is written: status, headers, which bytes, and in which broken way.

use std::{io, time::Duration};

use crate::{Content, Fault, Request};

/// An answer before it is written.
pub(crate) struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub content: Content,
    /// First byte of the content that is sent, and one past the last.
    pub part: (u64, u64),
    pub delivery: Delivery,
}

/// How an answer is written.
#[derive(Default)]
pub(crate) struct Delivery {
    pub framing: Framing,
    /// After how many bytes of the body the connection ends, and how.
    pub end: Option<(u64, Ending)>,
    /// Which byte of the body has a turned bit.
    pub flip: Option<u64>,
    /// A pause after each so many bytes.
    pub pace: Option<(usize, Duration)>,
    /// Instead of an answer.
    pub instead: Option<Instead>,
}

#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) enum Framing {
    #[default]
    Length,
    Connection,
    Chunks,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Ending {
    InOrder,
    Reset,
}

pub(crate) enum Instead {
    Reset,
    Silence(Duration),
    NotHttp,
}

impl Answer {
    pub fn new(status: u16, headers: Vec<(&'static str, String)>, content: Content) -> Self {
        let part = (0, content.size());
        Self { status, headers, content, part, delivery: Delivery::default() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    /// How many bytes the body has when all goes well.
    pub fn length(&self) -> u64 {
        self.part.1 - self.part.0
    }

    /// Makes a file's answer the range that was asked for, as RFC 9110 has it (single ranges; others are ignored). Whoever
    /// would take the body compressed gets all of it, as from hosts that compress: they know no ranges of that.
    pub fn apply_range(&mut self, request: &Request) {
        let is_file = self.status == 200 && self.header("Accept-Ranges").is_some();
        let same = request.header("if-range").is_none_or(|known| Some(known) == self.header("ETag"));
        let compressed = request.header("accept-encoding").is_some_and(|codings| codings.contains("gzip"));
        let Some(range) = request.header("range").filter(|_| is_file && same && !compressed) else { return };
        let size = self.content.size();
        let Some((first, last)) = range.strip_prefix("bytes=").and_then(|range| range.split_once('-')) else {
            return;
        };
        let part = match (first.parse::<u64>(), last.parse::<u64>()) {
            (Ok(first), Ok(last)) => (first, last.saturating_add(1).min(size)),
            (Ok(first), Err(_)) if last.is_empty() => (first, size),
            (Err(_), Ok(length)) if first.is_empty() => (size.saturating_sub(length), size),
            _ => return,
        };
        if part.0 >= part.1 {
            return self.refuse_range();
        }
        self.status = 206;
        self.headers.push(("Content-Range", format!("bytes {}-{}/{size}", part.0, part.1 - 1)));
        self.part = part;
    }

    fn refuse_range(&mut self) {
        let size = self.content.size();
        *self = Self::new(416, vec![("Content-Range", format!("bytes */{size}"))], "".into());
    }

    /// What a fault does to the answer before the range is looked at.
    pub fn break_content(&mut self, fault: &Fault) -> io::Result<()> {
        let is_file = self.status == 200 && self.header("Accept-Ranges").is_some();
        if *fault == Fault::Changed && is_file {
            self.content = self.content.inverted()?;
            let etag = format!("\"{}\"", self.content.sha256()?);
            self.set_header("ETag", Some(etag));
        }
        Ok(())
    }

    /// What a fault does to the answer as it would be.
    pub fn break_delivery(&mut self, fault: &Fault) {
        let at = |share: f64| ((self.length() as f64 * share) as u64).min(self.length());
        match fault {
            Fault::Cut(share) => self.delivery.end = Some((at(*share), Ending::InOrder)),
            Fault::Reset(share) => self.delivery.end = Some((at(*share), Ending::Reset)),
            Fault::ResetBeforeAnswer => self.delivery.instead = Some(Instead::Reset),
            Fault::Hang(time) => self.delivery.instead = Some(Instead::Silence(*time)),
            Fault::NotHttp => self.delivery.instead = Some(Instead::NotHttp),
            Fault::Drip(bytes, pause) => self.delivery.pace = Some(((*bytes).max(1), *pause)),
            Fault::Flip(share) => self.delivery.flip = Some(at(*share).min(self.length().saturating_sub(1))),
            Fault::NotSatisfiable => self.refuse_range(),
            Fault::NoLength => self.delivery.framing = Framing::Connection,
            Fault::Chunked => self.delivery.framing = Framing::Chunks,
            Fault::Header(name, value) => self.set_header(name, value.clone()),
            Fault::Status(status) => *self = Self::new(*status, Vec::new(), "".into()),
            Fault::TooManyRequests(after) => {
                *self = Self::new(429, vec![("Retry-After", after.clone())], "{}".into());
            }
            Fault::IgnoreRange | Fault::RangeFrom(_) | Fault::Changed => {}
        }
    }

    fn set_header(&mut self, name: &'static str, value: Option<String>) {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self.headers.extend(value.map(|value| (name, value)));
    }
}
