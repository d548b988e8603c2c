//! A verification in one line: how many bars held, and what came of the controls.

use std::fmt;

use super::{Outcome, Planted, Verdict};

/// How many there are of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub bars: usize,
    pub missed: usize,
    /// Controls whose fault was noticed.
    pub red: usize,
    /// Controls whose fault was not noticed.
    pub green: usize,
    /// Controls that could not be planted.
    pub not_run: usize,
}

impl Tally {
    pub fn of(outcomes: impl Iterator<Item = Outcome>, controls: &[Planted]) -> Tally {
        let mut tally = Tally::default();
        for outcome in outcomes {
            tally.bars += 1;
            tally.missed += usize::from(outcome == Outcome::Missed);
        }
        for control in controls {
            match control.verdict {
                Verdict::Red => tally.red += 1,
                Verdict::Green => tally.green += 1,
                Verdict::NotRun => tally.not_run += 1,
            }
        }
        tally
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { bars, missed, red, green, not_run } = *self;
        match (missed, green) {
            (0, 0) => write!(f, "passed: {bars} of {bars} bars held")?,
            (0, _) => write!(f, "NO TEETH: {bars} of {bars} bars held")?,
            (missed, _) => write!(f, "MISSED: {missed} of {bars} bars")?,
        }
        let controls = [(red, "red"), (green, "GREEN"), (not_run, "not run")];
        let mut said = controls.into_iter().filter(|(count, _)| *count > 0);
        if let Some((count, verdict)) = said.next() {
            write!(f, ", {count} controls {verdict}")?;
        }
        said.try_for_each(|(count, verdict)| write!(f, ", {count} {verdict}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_what_is_wrong() {
        let said = |bars, missed, [red, green, not_run]: [usize; 3]| {
            Tally { bars, missed, red, green, not_run }.to_string()
        };
        assert_eq!(said(25, 0, [0; 3]), "passed: 25 of 25 bars held");
        assert_eq!(said(25, 0, [8, 0, 1]), "passed: 25 of 25 bars held, 8 controls red, 1 not run");
        assert_eq!(said(25, 0, [0, 0, 2]), "passed: 25 of 25 bars held, 2 controls not run");
        assert_eq!(said(25, 0, [8, 1, 0]), "NO TEETH: 25 of 25 bars held, 8 controls red, 1 GREEN");
        assert_eq!(said(25, 2, [8, 1, 0]), "MISSED: 2 of 25 bars, 8 controls red, 1 GREEN");
    }
}
