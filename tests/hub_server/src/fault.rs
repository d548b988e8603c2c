//! What can go wrong with an answer.

use std::{fmt, time::Duration};

use crate::Request;

/// What goes wrong with an answer. Shares are of the body of that answer, from 0 to 1; an answer without a body has
/// nothing that a fault of bodies could hit.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The connection ends in good order after this share of the body.
    Cut(f64),
    /// The connection is reset after this share of the body.
    Reset(f64),
    /// The connection is reset before anything is answered.
    ResetBeforeAnswer,
    /// No answer for that long; then the connection ends.
    Hang(Duration),
    /// A pause after each so many bytes of the body.
    Drip(usize, Duration),
    /// One bit is turned at this share of the body.
    Flip(f64),
    /// The range that was asked for is ignored: the whole file comes.
    IgnoreRange,
    /// Another range comes than was asked for: from this offset on; the answer says so.
    RangeFrom(u64),
    /// The range is refused (416), although it is inside the file.
    NotSatisfiable,
    /// The body ends with the connection; no length is given.
    NoLength,
    /// The body comes in chunks; no length is given.
    Chunked,
    /// The file has other bytes, and the ETag of those.
    Changed,
    /// This header has another value, or is missing. A Content-Length that is set so lies; the connection ends then.
    Header(&'static str, Option<String>),
    /// An error with this status and no more words.
    Status(u16),
    /// Too many requests (429), with this value of `Retry-After`.
    TooManyRequests(String),
    /// The answer is not HTTP.
    NotHttp,
}

/// Faults that hit together, which requests they hit, and how often still.
pub(crate) struct Rule {
    pub faults: Vec<Fault>,
    pub times: usize,
    pub matches: Box<dyn Fn(&Request) -> bool + Send>,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {} times", self.faults, self.times)
    }
}
