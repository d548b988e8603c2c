//! The search on made-up graphs, whose values are numbers: `bad` computes some of them wrongly.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// A node adds its sources and its own number, unless it multiplies with nothing.
#[derive(Clone, Debug)]
struct Node {
    sources: Vec<usize>,
    /// Gives the same whatever its sources are.
    masks: bool,
}

#[derive(Clone, Debug)]
struct Case {
    nodes: Vec<Node>,
    faults: BTreeSet<usize>,
    bytes: Vec<u64>,
    probe_bytes: u64,
}

impl Case {
    fn values(&self, faulty: bool) -> Vec<u64> {
        let mut values: Vec<u64> = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let sum = node.sources.iter().fold(index as u64, |sum, source| {
                (sum ^ values[*source]).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
            });
            let value = if node.masks { index as u64 } else { sum };
            values.push(if faulty && self.faults.contains(&index) { !value } else { value });
        }
        values
    }

    fn units(&self) -> Vec<Unit> {
        let last = self.nodes.len() - 1;
        let unit = |(index, node): (usize, &Node)| Unit {
            sources: node.sources.clone(),
            bytes: self.bytes[index],
            is_output: index == last,
        };
        self.nodes.iter().enumerate().map(unit).collect()
    }

    /// Values that are wrong though their sources are right: those of faults, as far as nothing before them is wrong.
    fn origins(&self) -> Vec<usize> {
        let (good, bad) = (self.values(false), self.values(true));
        let wrong = |index: usize| good[index] != bad[index];
        let origin = |index: &usize| wrong(*index) && !self.nodes[*index].sources.iter().any(|s| wrong(*s));
        (0..self.nodes.len()).filter(origin).collect()
    }

    fn search(&self, exhaustive: bool) -> (Outcome, Runs) {
        let (good, bad) = (self.values(false), self.values(true));
        let agree: Vec<bool> = good.iter().zip(&bad).map(|(a, b)| a == b).collect();
        let mut runs = Runs { agree, probes: Vec::new() };
        let limits = Limits { probe_bytes: self.probe_bytes, exhaustive };
        let outcome = search(&self.units(), limits, &mut runs).unwrap();
        (outcome, runs)
    }
}

struct Runs {
    agree: Vec<bool>,
    probes: Vec<Vec<usize>>,
}

impl Compare for Runs {
    type Error = std::convert::Infallible;

    fn agree(&mut self, units: &[usize]) -> Result<Vec<bool>, Self::Error> {
        self.probes.push(units.to_vec());
        Ok(units.iter().map(|unit| self.agree[*unit]).collect())
    }
}

fn cases(faults: std::ops::Range<usize>, masks: bool) -> impl Strategy<Value = Case> {
    let size = 2..60usize;
    size.prop_flat_map(move |size| {
        let node = (prop::collection::vec(0..1000usize, 0..4), prop::bool::weighted(0.15));
        let nodes = prop::collection::vec(node, size);
        let faults = prop::collection::btree_set(0..size, faults.clone());
        let bytes = prop::collection::vec(0..20u64, size);
        (nodes, faults, bytes, 1..200u64).prop_map(move |(nodes, faults, bytes, probe_bytes)| {
            let source = |index: usize, wish: usize| (index > 0).then(|| index - 1 - wish % index.min(6));
            let nodes = nodes.into_iter().enumerate().map(|(index, (wishes, mask))| Node {
                sources: wishes.into_iter().filter_map(|wish| source(index, wish)).collect(),
                masks: mask && masks,
            });
            Case { nodes: nodes.collect(), faults, bytes, probe_bytes }
        })
    })
}

proptest! {
    /// One fault that stays or heals, or is masked later on: it is found, by its number.
    #[test]
    fn one_fault_is_found(case in cases(1..2, true)) {
        let (outcome, runs) = case.search(false);
        let found = outcome.found.unwrap();
        prop_assert_eq!(found.unit, case.origins()[0]);
        prop_assert!(found.confirmed);
        for probe in &runs.probes {
            let bytes: u64 = probe.iter().map(|unit| case.bytes[*unit]).sum();
            prop_assert!(probe.len() == 1 || bytes <= case.probe_bytes);
        }
    }

    /// Of several faults one is found whose sources are right, and the first of them if everything is looked at.
    #[test]
    fn of_several_faults_the_first_is_found(case in cases(1..5, true)) {
        let origins = case.origins();
        let (outcome, _) = case.search(true);
        prop_assert_eq!(outcome.found.map(|found| (found.unit, found.unseen_before)), Some((origins[0], 0)));
        let (outcome, _) = case.search(false);
        let found = outcome.found.unwrap();
        prop_assert!(origins.contains(&found.unit));
        prop_assert!(found.unseen_before > 0 || found.unit == origins[0]);
    }

    #[test]
    fn where_nothing_is_wrong_everything_is_compared_once(case in cases(0..1, true)) {
        let (outcome, runs) = case.search(false);
        prop_assert_eq!(outcome, Outcome { found: None, compared: case.nodes.len() });
        let mut all: Vec<usize> = runs.probes.concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..case.nodes.len()).collect::<Vec<_>>());
    }
}

/// A chain of so many nodes with one fault.
fn chain(length: usize, fault: usize, probe: u64) -> Case {
    let node = |index: usize| Node { sources: index.checked_sub(1).into_iter().collect(), masks: false };
    let nodes = (0..length).map(node).collect();
    Case { nodes, faults: [fault].into(), bytes: vec![1; length], probe_bytes: probe }
}

#[test]
fn an_error_that_stays_takes_few_probes() {
    for fault in [0, 1, 777, 4000, 4998, 4999] {
        let (outcome, runs) = chain(5000, fault, 16).search(false);
        assert_eq!(outcome.found.map(|found| found.unit), Some(fault));
        // Thrice a sixteenth, what lies before where that is little, and the confirmation.
        assert!(runs.probes.len() <= 16, "{fault}: {} probes", runs.probes.len());
    }
}

#[test]
fn what_would_have_healed_is_told_or_looked_for() {
    let mut case = chain(1000, 900, 2);
    case.faults.insert(3);
    case.nodes[10].masks = true;
    let (outcome, _) = case.search(false);
    let found = outcome.found.unwrap();
    assert!(found.unit == 900 && found.unseen_before > 0, "{found:?}");
    assert_eq!(case.search(true).0.found.map(|found| found.unit), Some(3));
}

/// A provider that computes otherwise when more is looked at: the search goes back to the source that parts then.
#[test]
fn a_source_that_parts_only_when_it_is_looked_at_again_is_the_finding() {
    struct Moody(usize);
    impl Compare for Moody {
        type Error = std::convert::Infallible;
        fn agree(&mut self, units: &[usize]) -> Result<Vec<bool>, Self::Error> {
            self.0 += 1;
            Ok(units.iter().map(|unit| *unit < if self.0 == 1 { 5 } else { 4 }).collect())
        }
    }
    let limits = Limits { probe_bytes: 1000, exhaustive: false };
    let outcome = search(&chain(8, 0, 0).units(), limits, &mut Moody(0)).unwrap();
    assert_eq!(outcome.found.map(|found| (found.unit, found.confirmed)), Some((4, true)));
}
