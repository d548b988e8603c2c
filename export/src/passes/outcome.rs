//! What a pass did.

use std::borrow::Cow;

/// What became of the places that a pass looks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Places that were rewritten.
    pub applied: usize,
    /// Places that look like the pattern and were left alone.
    pub refused: Vec<Refusal>,
}

/// A place that was left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The node, or the value, by name.
    pub place: String,
    /// One of few texts, so that places can be counted by reason.
    pub why: Cow<'static, str>,
}

impl Outcome {
    pub fn applied(applied: usize) -> Outcome {
        Outcome { applied, refused: Vec::new() }
    }

    pub fn refuse(&mut self, place: impl Into<String>, why: impl Into<Cow<'static, str>>) {
        self.refused.push(Refusal { place: place.into(), why: why.into() });
    }

    /// Places that look like the pattern.
    pub fn matched(&self) -> usize {
        self.applied + self.refused.len()
    }
}
