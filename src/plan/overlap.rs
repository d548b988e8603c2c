//! Which sessions are made ahead: while a component of a model computes in its process, another process opens the first
//! stages of the component that comes next, as many as fit the budget beside everything that the first one does.

use serde::Serialize;
use viaduct_export::memory::Predicted;

use super::{Budget, PlannedStage};

/// What is loaded beside each stage while it is in use; of no stage where nothing is loaded ahead.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Overlap(Vec<Beside>);

/// Stages whose sessions wait, or are being made, while a stage is in use.
#[derive(Clone, Debug, Serialize)]
pub struct Beside {
    pub stage: String,
    /// Later stages of its component, which its own process has opened ahead.
    pub own: Vec<String>,
    /// First stages of the next component, which that one's process opens.
    pub next: Vec<String>,
}

impl Overlap {
    /// Decides for stages in the order in which they run, each with the name of its component. A session that waits is
    /// counted with all that its stage will ever take.
    pub(super) fn new(stages: &[(&str, &PlannedStage)], budget: Budget) -> Overlap {
        let components: Vec<_> = stages.chunk_by(|a, b| a.0 == b.0).collect();
        let (mut table, mut ahead) = (Vec::new(), 0);
        for (place, component) in components.iter().enumerate() {
            let own = |index: usize| component.get(index + 1..ahead).unwrap_or_default();
            let next = components.get(place + 1).copied().unwrap_or_default();
            let fits = |count: usize| {
                (0..component.len()).all(|index| {
                    let held = [&component[index..=index], own(index), &next[..count]].concat();
                    budget.holds(sum(held.into_iter().map(|(_, stage)| stage)))
                })
            };
            let count = (1..=next.len()).take_while(|count| fits(*count)).last().unwrap_or(0);
            for (index, (_, stage)) in component.iter().enumerate() {
                let (own, next) = (names(own(index)), names(&next[..count]));
                table.push(Beside { stage: stage.name.clone(), own, next });
            }
            ahead = count;
        }
        match table.iter().any(|beside| !beside.next.is_empty()) {
            true => Overlap(table),
            false => Overlap::default(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Stages that are opened ahead, in the order in which they run.
    pub fn ahead(&self) -> Vec<&str> {
        let mut components: Vec<&[String]> = self.0.iter().map(|beside| &beside.next[..]).collect();
        components.dedup();
        components.into_iter().flatten().map(String::as_str).collect()
    }

    /// What is loaded beside a stage; none if nothing ever is.
    pub fn of(&self, stage: &str) -> Option<&Beside> {
        self.0.iter().find(|beside| beside.stage == stage)
    }
}

impl Beside {
    /// All names.
    pub fn all(&self) -> impl Iterator<Item = &str> {
        self.own.iter().chain(&self.next).map(String::as_str)
    }
}

fn names(stages: &[(&str, &PlannedStage)]) -> Vec<String> {
    stages.iter().map(|(_, stage)| stage.name.clone()).collect()
}

/// Sessions beside each other: what each takes between runs is at most its peak.
pub(super) fn sum<'a>(stages: impl IntoIterator<Item = &'a PlannedStage>) -> Predicted {
    stages.into_iter().fold(Predicted::default(), |sum, stage| Predicted {
        device: sum.device.saturating_add(stage.predicted.device),
        host: sum.host.saturating_add(stage.predicted.host),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Settings;

    const MODEL: [(&str, &str, u64); 6] = [
        ("text", "encoder", 4),
        ("transformer", "modulation", 1),
        ("transformer", "steps", 8),
        ("vae", "pre", 2),
        ("vae", "attention", 3),
        ("vae", "post", 6),
    ];

    /// What is loaded beside each stage within a budget of the device's memory.
    fn beside(device: u64) -> Vec<String> {
        let budget = Budget { unified: false, host: 0, device, total: device };
        let planned = MODEL.map(|(_, name, device)| PlannedStage {
            name: name.to_owned(),
            settings: Settings::default(),
            predicted: Predicted { device, host: 0 },
            largest: None,
            complete: true,
            contradiction: None,
        });
        let stages: Vec<_> =
            MODEL.iter().zip(&planned).map(|((component, ..), stage)| (*component, stage)).collect();
        let Overlap(table) = Overlap::new(&stages, budget);
        for row in &table {
            let held = planned
                .iter()
                .filter(|stage| row.stage == stage.name || row.all().any(|name| name == stage.name));
            assert!(budget.holds(sum(held)), "{row:?}");
        }
        table
            .iter()
            .map(|row| format!("{}: {} | {}", row.stage, row.own.join(" "), row.next.join(" ")))
            .collect()
    }

    #[test]
    fn as_much_is_loaded_ahead_as_fits() {
        assert_eq!(
            beside(100),
            [
                "encoder:  | modulation steps",
                "modulation: steps | pre attention post",
                "steps:  | pre attention post",
                "pre: attention post | ",
                "attention: post | ",
                "post:  | ",
            ]
        );
        // Of the decoder two stages fit beside the steps, and beside what waits during the modulation.
        assert_eq!(
            beside(14)[1..4],
            ["modulation: steps | pre attention", "steps:  | pre attention", "pre: attention | "]
        );
        assert_eq!(beside(10)[..3], ["encoder:  | modulation", "modulation:  | pre", "steps:  | pre"]);
        assert_eq!(beside(8)[..3], ["encoder:  | modulation", "modulation:  | ", "steps:  | "]);
        assert!(beside(4).is_empty());
    }
}
