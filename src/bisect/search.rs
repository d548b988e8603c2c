//! The search for the first value at which two runs part, over numbers alone.
//!
//! Values are numbered in the order in which they are computed. What is alive behind a value, a *cut*, decides everything
//! that comes after it, so that an error which stays is found by bisection over cuts, with as many cuts at once as one
//! probe holds. An error that heals escapes that; so what lies before the finding is compared, too, where it is little,
//! and all is compared where no cut parts.

/// A value that can be looked at on both sides.
#[derive(Clone, Debug, Default)]
pub struct Unit {
    /// The values that it is computed from, all of them before it.
    pub sources: Vec<usize>,
    pub bytes: u64,
    /// Whether it is a result of the graph.
    pub is_output: bool,
}

/// Runs both sides for some values.
pub trait Compare {
    type Error;

    /// Whether each of these values agrees.
    fn agree(&mut self, units: &[usize]) -> Result<Vec<bool>, Self::Error>;
}

/// How much may be looked at.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the values of one probe. A value that is larger is looked at alone.
    pub probe_bytes: u64,
    /// Whether every value before the finding is compared, however many probes that takes.
    pub exhaustive: bool,
}

/// Probes that are spent on what lies before a finding without being asked to.
const THOROUGH_PROBES: usize = 8;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub found: Option<Found>,
    /// Values that were compared.
    pub compared: usize,
}

/// A value that differs although everything it is computed from agrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub unit: usize,
    /// Whether it differed again when it was looked at with its sources alone.
    pub confirmed: bool,
    /// Values before it that were not compared: an error among them would have healed.
    pub unseen_before: usize,
}

/// Finds the first value that differs although its sources agree.
pub fn search<C: Compare>(units: &[Unit], limits: Limits, comparer: &mut C) -> Result<Outcome, C::Error> {
    let mut search =
        Search { units, limits, comparer, ends: ends(units), known: vec![None; units.len()], fresh: vec![] };
    let mut candidate = match search.narrow()? {
        Some(unit) => Some(unit),
        None => search.scan(units.len())?,
    };
    let mut found = None;
    while let Some(unit) = candidate {
        if search.is_little(unit)
            && let Some(earlier) = search.scan(unit)?
        {
            candidate = Some(earlier);
            continue;
        }
        let (earlier, confirmed) = search.confirm(unit)?;
        candidate = earlier;
        if earlier.is_none() {
            let unseen_before = search.known[..unit].iter().filter(|known| known.is_none()).count();
            found = Some(Found { unit, confirmed, unseen_before });
        }
    }
    Ok(Outcome { found, compared: search.known.iter().flatten().count() })
}

/// Behind which position each value is not needed any more.
fn ends(units: &[Unit]) -> Vec<usize> {
    let mut ends: Vec<Option<usize>> = vec![None; units.len()];
    for (index, unit) in units.iter().enumerate() {
        for source in &unit.sources {
            ends[*source] = Some(index);
        }
    }
    let outputs = units.iter().map(|unit| unit.is_output);
    // What nothing uses that can be seen is looked at like a result.
    ends.into_iter().zip(outputs).map(|(end, output)| end.filter(|_| !output).unwrap_or(usize::MAX)).collect()
}

struct Search<'a, C> {
    units: &'a [Unit],
    limits: Limits,
    comparer: &'a mut C,
    ends: Vec<usize>,
    known: Vec<Option<bool>>,
    /// Scratch of [`Search::unknown_bytes`].
    fresh: Vec<bool>,
}

impl<C: Compare> Search<'_, C> {
    /// Bisects over cuts: the value behind which the cuts part, while those before agree.
    fn narrow(&mut self) -> Result<Option<usize>, C::Error> {
        let (mut first, mut parted) = (0, None);
        loop {
            let end = parted.unwrap_or(self.units.len());
            if first >= end {
                return Ok(parted);
            }
            let positions = self.positions(first, end, parted.is_none());
            let cuts: Vec<usize> = positions.iter().flat_map(|position| self.cut(*position)).collect();
            self.compare(cuts)?;
            let parts = |position: &usize| self.cut(*position).any(|unit| self.known[unit] == Some(false));
            match positions.iter().position(parts) {
                Some(0) => parted = Some(positions[0]),
                Some(index) => (first, parted) = (positions[index - 1] + 1, Some(positions[index])),
                // The results agree.
                None if parted.is_none() => return Ok(None),
                None => first = positions.last().map_or(end, |last| last + 1),
            }
        }
    }

    /// Positions in `first..end` that are evenly spread, as many as one probe holds the cuts of; with the last of them if
    /// asked for.
    fn positions(&mut self, first: usize, end: usize, with_last: bool) -> Vec<usize> {
        let length = end - first;
        let spread = |count: usize| -> Vec<usize> {
            let place = |i: usize| match with_last {
                true => first + i * length / count - 1,
                false => first + i * length / (count + 1),
            };
            (1..=count).map(place).collect()
        };
        let mut count = length;
        loop {
            let positions = spread(count);
            if count == 1 || self.unknown_bytes(&positions) <= self.limits.probe_bytes {
                return positions;
            }
            count = count.div_ceil(2);
        }
    }

    /// Bytes of what is to be looked at for the cuts at these positions.
    fn unknown_bytes(&mut self, positions: &[usize]) -> u64 {
        let mut fresh = std::mem::take(&mut self.fresh);
        fresh.clear();
        fresh.resize(self.units.len(), true);
        let mut bytes = 0u64;
        for position in positions {
            for unit in self.cut(*position).filter(|unit| self.known[*unit].is_none()) {
                if std::mem::replace(&mut fresh[unit], false) {
                    bytes = bytes.saturating_add(self.units[unit].bytes);
                }
            }
            if bytes > self.limits.probe_bytes {
                break;
            }
        }
        self.fresh = fresh;
        bytes
    }

    /// What is alive behind a position.
    fn cut(&self, position: usize) -> impl Iterator<Item = usize> {
        (0..=position).filter(move |unit| self.ends[*unit] > position)
    }

    /// Compares everything before `end` in order, until something parts: the first value that does.
    fn scan(&mut self, end: usize) -> Result<Option<usize>, C::Error> {
        for probe in self.probes((0..end).collect()) {
            if self.look(&probe)?.contains(&false) {
                break;
            }
        }
        Ok(self.known[..end].iter().position(|known| *known == Some(false)))
    }

    /// Whether what was not compared before a value is worth its probes.
    fn is_little(&self, unit: usize) -> bool {
        self.limits.exhaustive || self.probes((0..unit).collect()).len() <= THOROUGH_PROBES
    }

    /// Looks at a value and its sources once more, together where one probe holds them. If one of these parts, that is where
    /// to go on; else whether the value still does.
    fn confirm(&mut self, unit: usize) -> Result<(Option<usize>, bool), C::Error> {
        let mut together = self.units[unit].sources.clone();
        together.push(unit);
        for batch in self.batches(together) {
            self.look(&batch)?;
        }
        let parts = |unit: &usize| self.known[*unit] == Some(false);
        let (earlier, confirmed) = (self.units[unit].sources.iter().copied().find(parts), parts(&unit));
        // Exposing values may change what a provider computes; what it did when the value parted counts.
        self.known[unit] = Some(false);
        Ok((earlier, confirmed))
    }

    fn compare(&mut self, units: Vec<usize>) -> Result<(), C::Error> {
        self.probes(units).iter().try_for_each(|probe| self.look(probe).map(drop))
    }

    fn look(&mut self, units: &[usize]) -> Result<Vec<bool>, C::Error> {
        let agree = self.comparer.agree(units)?;
        for (unit, agrees) in units.iter().zip(&agree) {
            self.known[*unit] = Some(*agrees);
        }
        Ok(agree)
    }

    /// What is not known of these, each once, in probes that hold it.
    fn probes(&self, mut units: Vec<usize>) -> Vec<Vec<usize>> {
        units.retain(|unit| self.known[*unit].is_none());
        units.sort_unstable();
        units.dedup();
        self.batches(units)
    }

    /// These in probes that hold them, in their order.
    fn batches(&self, units: Vec<usize>) -> Vec<Vec<usize>> {
        let (mut probes, mut bytes): (Vec<Vec<usize>>, u64) = (Vec::new(), 0);
        for unit in units {
            bytes = bytes.saturating_add(self.units[unit].bytes);
            match probes.last_mut() {
                Some(probe) if bytes <= self.limits.probe_bytes => probe.push(unit),
                _ => {
                    bytes = self.units[unit].bytes;
                    probes.push(vec![unit]);
                }
            }
        }
        probes
    }
}

#[cfg(test)]
mod tests;
