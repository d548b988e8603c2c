//! Both sides at work: what the search asks for, and what is to be said of a finding.

use std::collections::BTreeMap;

use viaduct_export::{
    bytes::ByteSize,
    onnx::{NodeId, ValueId},
};

use super::{
    BisectError, Options,
    alone::Alone,
    compare::{Difference, Tolerance},
    report::{Contribution, Finding, NodeOutline, label},
    reproduction::{self, Extract, Reproduction},
    search::{Compare, Found},
    side::{OnDevice, Side, Subject, Tensors},
    tensors::carried,
    units::Units,
};
use crate::{
    pipeline::event::{Event, Listener},
    tensor::HostTensor,
};

/// Both sides, as the search sees them.
pub struct Runs<'r> {
    pub a: OnDevice<'r>,
    pub b: &'r mut dyn Side,
    pub units: &'r Units,
    pub tolerance: Tolerance,
    /// Of each unit, as far as it was compared.
    pub differences: Vec<Option<Difference>>,
    pub probes: usize,
    pub listener: &'r mut dyn Listener,
}

impl Compare for Runs<'_> {
    type Error = BisectError;

    fn agree(&mut self, units: &[usize]) -> Result<Vec<bool>, BisectError> {
        let (graph, seen) = (&self.a.subject.model.graph, &self.units.seen);
        let names: Vec<&str> = units.iter().map(|unit| graph[seen[*unit].value].name.as_str()).collect();
        let others: Vec<&str> = units.iter().map(|unit| seen[*unit].other.as_str()).collect();
        let a = self.a.values(&names)?;
        let b = self.b.values(&others)?;
        let mut agree = Vec::with_capacity(units.len());
        for ((unit, a), b) in units.iter().zip(&a).zip(&b) {
            let tolerance = self.tolerance.of(self.units.seen[*unit].coarse);
            let difference = Difference::between(a, b, tolerance);
            agree.push(difference.agrees());
            // How a value parted is to be told, also where it agrees when less is shown.
            let known = &mut self.differences[*unit];
            if !(difference.agrees() && known.as_ref().is_some_and(|known| !known.agrees())) {
                *known = Some(difference);
            }
        }
        self.tell(units, &agree);
        Ok(agree)
    }
}

impl Runs<'_> {
    fn name(&self, unit: usize) -> &str {
        &self.a.subject.model.graph[self.units.seen[unit].value].name
    }

    /// Values that agree without anything in them that could differ.
    pub fn nothing_in(&self) -> Vec<String> {
        let nothing = |difference: &Difference| difference.agrees() && difference.elements == 0;
        let known = self.differences.iter().enumerate();
        let units = known.filter(|(_, difference)| difference.as_ref().is_some_and(nothing));
        units.map(|(unit, _)| self.name(unit).to_owned()).collect()
    }

    /// One line for each probe.
    fn tell(&mut self, units: &[usize], agree: &[bool]) {
        self.probes += 1;
        let bytes = units.iter().map(|unit| self.units.units[*unit].bytes).fold(0, u64::saturating_add);
        let (first, last) = (units.iter().min().unwrap_or(&0), units.iter().max().unwrap_or(&0));
        let parted = agree.iter().filter(|agrees| !**agrees).count();
        let outcome = match units.iter().zip(agree).filter(|(_, agrees)| !**agrees).map(|(u, _)| *u).min() {
            None => "agree".to_owned(),
            Some(unit) => {
                let words = self.differences[unit].as_ref().map(Difference::in_words).unwrap_or_default();
                format!("{parted} part, the first is {} ({words})", self.name(unit))
            }
        };
        self.listener.on_event(Event::note(format!(
            "probe {}: {} values, {}, numbers {}..{} of {}: {outcome}",
            self.probes,
            units.len(),
            ByteSize(bytes),
            first + 1,
            last + 1,
            self.units.units.len()
        )));
    }

    /// The nodes of a finding, in order; the last makes the value.
    fn between(&self, found: Found) -> Vec<NodeId> {
        self.units.between(&self.a.subject.model.graph, self.units.seen[found.unit].value)
    }

    /// Looks at the nodes of a finding by themselves. If they agree given the other side's values, so that what differs has
    /// come from before, the first node that differs by itself is the finding; there may be none.
    pub fn explain(
        &mut self,
        found: Found,
        options: &Options,
        against_expected: bool,
    ) -> Result<Finding, BisectError> {
        if reproduction::is_small_enough(&self.a.subject.model, &self.between(found)) {
            return Ok(self.finding(found));
        }
        let mut shown = self.extract(found)?;
        let mut finding = self.finding(found);
        if shown.difference.agrees() && found.confirmed {
            let alone = self.alone(found.unit, options.limits.probe_bytes)?;
            let culprit =
                alone.iter().filter(|(_, difference)| !difference.agrees()).map(|(unit, _)| *unit).min();
            match culprit {
                Some(unit) => {
                    let earlier = self.earlier(found, unit)?;
                    shown = self.extract(earlier)?;
                    finding = self.finding(earlier);
                }
                None => finding.adds_up = Some(self.contributions(alone)),
            }
        }
        let folder = (options.folder)(&finding.node.name);
        // What was found is told of in any case.
        let written = shown.extract.write(&folder, options.replace, &shown.inputs, &shown.expected);
        let unwritten = written.err().map(|error| error.to_string());
        let command = reproduction::command(&folder, against_expected, &options.flags);
        let (shows, difference) = (!shown.difference.agrees(), shown.difference);
        finding.reproduction = Some(Reproduction { folder, command, shows, difference, unwritten });
        Ok(finding)
    }

    /// A finding at a value before another's, which is compared now: the search leaves out what would take many probes.
    fn earlier(&mut self, found: Found, unit: usize) -> Result<Found, BisectError> {
        if self.differences[unit].is_none() {
            self.agree(&[unit])?;
        }
        let unseen_before = self.differences[..unit].iter().filter(|difference| difference.is_none()).count();
        Ok(Found { unit, unseen_before, ..found })
    }

    fn finding(&self, found: Found) -> Finding {
        let Subject { model, shapes, .. } = self.a.subject;
        let graph = &model.graph;
        let difference = |id: ValueId| self.differences[self.units.unit(id)?].clone();
        let between = self.between(found);
        let made_by = between[between.len() - 1];
        let sources = &self.units.units[found.unit].sources;
        let agrees = |unit: &&usize| self.differences[**unit].as_ref().is_some_and(Difference::agrees);
        Finding {
            value: self.name(found.unit).to_owned(),
            other: self.units.seen[found.unit].other.clone(),
            difference: self.differences[found.unit].clone().expect("what was found was compared"),
            node: NodeOutline::of(graph, shapes, made_by, &difference),
            between: between.iter().map(|id| label(graph, *id)).collect(),
            agreeing: sources
                .iter()
                .filter(|unit| agrees(unit))
                .map(|unit| self.name(*unit).to_owned())
                .collect(),
            confirmed: found.confirmed,
            unseen_before: found.unseen_before,
            adds_up: None,
            reproduction: None,
        }
    }

    /// Runs the nodes of a finding by themselves, on what the other side gives them.
    fn extract(&mut self, found: Found) -> Result<Shown, BisectError> {
        let (subject, nodes) = (self.a.subject, self.between(found));
        let graph = &subject.model.graph;
        let made = graph[nodes[nodes.len() - 1]].outputs.iter().flatten().copied();
        let outputs: Vec<ValueId> = made.filter(|id| self.units.unit(*id).is_some()).collect();
        let mut extract = Extract::of(subject, &nodes, &outputs);
        let (inputs, expected) = self.theirs(&extract.inputs, &outputs)?;
        extract.state(&inputs, &expected);
        let names: Vec<&str> = outputs.iter().map(|id| graph[*id].name.as_str()).collect();
        let own = extract.subject.run(self.a.runtime, &inputs, &names)?;
        let place = outputs.iter().position(|id| self.units.unit(*id) == Some(found.unit)).unwrap_or(0);
        let tolerance = self.tolerance.of(self.units.seen[found.unit].coarse);
        let difference = Difference::between(&own[place], &expected[place], tolerance);
        Ok(Shown { extract, inputs, expected, difference })
    }

    /// How far each value up to this one is off if its node gets the other side's values.
    fn alone(&mut self, last: usize, probe_bytes: u64) -> Result<Vec<(usize, Difference)>, BisectError> {
        let all = &self.units.units;
        // What is given lies beside what is made.
        let bytes = |unit: &usize| {
            let sources = all[*unit].sources.iter().map(|source| all[*source].bytes);
            sources.fold(all[*unit].bytes, u64::saturating_add)
        };
        let mut differences = Vec::new();
        let mut rest: Vec<usize> = (0..=last).collect();
        while !rest.is_empty() {
            let mut total = 0u64;
            let count = rest.iter().take_while(|unit| {
                total = total.saturating_add(bytes(unit));
                total <= probe_bytes
            });
            let later = rest.split_off(count.count().max(1));
            let batch = std::mem::replace(&mut rest, later);
            differences.extend(self.batch_alone(&batch)?);
        }
        let parted = differences.iter().filter(|(_, difference)| !difference.agrees()).count();
        self.listener.on_event(Event::note(format!(
            "each of {} values from the other side's values: {parted} part",
            differences.len()
        )));
        Ok(differences)
    }

    fn batch_alone(&mut self, units: &[usize]) -> Result<Vec<(usize, Difference)>, BisectError> {
        let mut alone = Alone::of(self.a.subject, self.units, units);
        let values: Vec<ValueId> = alone.outputs.iter().map(|(value, _)| *value).collect();
        let (inputs, expected) = self.theirs(&alone.inputs, &values)?;
        let graph = &self.a.subject.model.graph;
        let given = alone.inputs.iter().filter_map(|id| Some((*id, inputs.get(&graph[*id].name)?)));
        alone.subject.state(&given.collect::<Vec<_>>());
        let names: Vec<&str> = alone.outputs.iter().map(|(_, name)| name.as_str()).collect();
        let own = alone.subject.run(self.a.runtime, &inputs, &names)?;
        let compared = values.iter().zip(own.iter().zip(&expected)).filter_map(|(value, (own, expected))| {
            let unit = self.units.unit(*value)?;
            let tolerance = self.tolerance.of(self.units.seen[unit].coarse);
            Some((unit, Difference::between(own, expected, tolerance)))
        });
        Ok(compared.collect())
    }

    /// The nodes that differ most by themselves.
    fn contributions(&self, mut alone: Vec<(usize, Difference)>) -> Vec<Contribution> {
        const MOST: usize = 5;
        alone.sort_by(|(_, a), (_, b)| b.relative_l2.total_cmp(&a.relative_l2));
        let graph = &self.a.subject.model.graph;
        let contribution = |(unit, difference): (usize, Difference)| {
            let made_by = *self.units.between(graph, self.units.seen[unit].value).last()?;
            Some(Contribution { node: label(graph, made_by), value: self.name(unit).to_owned(), difference })
        };
        let worst = alone.into_iter().filter(|(_, difference)| difference.relative_l2 > 0.0);
        worst.take(MOST).filter_map(contribution).collect()
    }

    /// What the other side has for values that are taken and for values that are made, in this side's types.
    fn theirs(
        &mut self,
        taken: &[ValueId],
        made: &[ValueId],
    ) -> Result<(Tensors, Vec<HostTensor>), BisectError> {
        let Subject { model, shapes, .. } = self.a.subject;
        let other = |id: &ValueId| Some((*id, self.units.seen[self.units.unit(*id)?].other.as_str()));
        let asked: BTreeMap<ValueId, &str> = taken.iter().chain(made).filter_map(other).collect();
        let (ids, names): (Vec<ValueId>, Vec<&str>) = asked.into_iter().unzip();
        let in_own_type = |(id, tensor): (ValueId, HostTensor)| {
            let dtype = shapes.fact(id).dtype.and_then(carried);
            (id, tensor.as_type(dtype.unwrap_or_else(|| tensor.values.dtype())))
        };
        let tensors = self.b.values(&names)?;
        let theirs: BTreeMap<ValueId, HostTensor> = ids.into_iter().zip(tensors).map(in_own_type).collect();
        let mut inputs = Tensors::new();
        for id in taken {
            let name = &model.graph[*id].name;
            if let Some(tensor) = theirs.get(id).or_else(|| self.a.inputs.get(name)) {
                inputs.insert(name.clone(), tensor.clone());
            }
        }
        Ok((inputs, made.iter().filter_map(|id| theirs.get(id).cloned()).collect()))
    }
}

/// Nodes by themselves, and what came out.
struct Shown {
    extract: Extract,
    inputs: Tensors,
    expected: Vec<HostTensor>,
    difference: Difference,
}
