//! Controls: faults that are planted in a run to see that the bars notice them.

use serde::{Deserialize, Serialize};
use viaduct_export::gates::{Control, Measure};

use super::{
    Oracle, VerifyError,
    alteration::{AlterationError, Impossible, altered},
    compare::forced,
    judge::Judge,
    replay::{Progress, Recording, Replayer},
    row::{Outcome, Row, figures},
    subject::{Drawn, Subject},
};
use crate::{
    pipeline::{event::Listener, image::to_unit, probe::Probe, text_to_image::PipelineError},
    runtime::Executor,
    tensor::HostTensor,
};

/// The exit code of an error that says nothing of device or memory.
const FAILED: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The fault is noticed, as it should be.
    Red,
    /// The fault is not noticed: the bar has no teeth.
    Green,
    /// It could not be planted in this request.
    NotRun,
}

/// A control and what came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Planted {
    pub name: String,
    pub alters: String,
    /// The row that it must miss.
    pub misses: String,
    pub measure: Measure,
    pub verdict: Verdict,
    /// None where the run refused what came of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bar: Option<f64>,
    pub detail: String,
}

impl Planted {
    /// Value and bar as one reads them, where the fault led to numbers.
    pub fn figures(&self) -> Option<[String; 2]> {
        Some(figures(self.measure, self.value?, self.bar?))
    }
}

/// Numbers of a planted fault, or the refusal to go on with them.
enum Found {
    Row(Row),
    Refused(String),
}

/// What controls are planted in.
pub struct Controls<'a> {
    pub subject: &'a Subject<'a>,
    pub judge: &'a Judge<'a>,
    /// Of a run without a fault.
    pub recording: &'a Recording,
}

impl Controls<'_> {
    /// Plants a control. Stages before the altered boundary are answered from the recording and from the reference, and nothing
    /// runs after what is judged.
    pub fn plant(
        &self,
        name: &str,
        control: &Control,
        executor: &mut dyn Executor,
        listener: &mut dyn Listener,
    ) -> Result<Planted, VerifyError> {
        let control = control.at(self.subject.request.steps);
        let found = match control.except.iter().any(|profile| profile == self.subject.profile()) {
            true => Err(Impossible::Excepted.into()),
            false => self.run(&control, executor, listener),
        };
        let planted = |verdict, row: Option<Row>, detail| Planted {
            name: name.to_owned(),
            alters: control.alters.clone(),
            misses: control.misses.clone(),
            measure: control.measure,
            verdict,
            value: row.as_ref().map(|row| row.value),
            bar: row.as_ref().map(|row| row.bar),
            detail,
        };
        Ok(match found {
            Ok(Found::Row(row)) if row.outcome == Outcome::Missed => {
                planted(Verdict::Red, Some(row), String::new())
            }
            Ok(Found::Row(row)) => planted(Verdict::Green, Some(row), String::new()),
            Ok(Found::Refused(problem)) => planted(Verdict::Red, None, problem),
            Err(AlterationError::Impossible(why)) => planted(Verdict::NotRun, None, why.to_string()),
            Err(AlterationError::Reference(error)) => return Err(error),
        })
    }

    fn run(
        &self,
        control: &Control,
        executor: &mut dyn Executor,
        listener: &mut dyn Listener,
    ) -> Result<Found, AlterationError> {
        let misses = control.misses.as_str();
        let judged = misses.split(" (").next().unwrap_or(misses);
        if !self.subject.oracle.names.contains(judged) {
            return Err(Impossible::NoReference(judged.to_owned()).into());
        }
        let progress = Progress::default();
        let (oracle, judge) = (self.subject.oracle, self.judge);
        let mut fault =
            Fault { oracle, judge, control, judged, progress: &progress, rows: Vec::new(), failed: None };
        let mut replayer = Replayer { executor, recording: self.recording, progress: &progress };
        let drawn = self.subject.draw(&mut replayer, &mut fault, listener);
        let Fault { mut rows, failed, .. } = fault;
        if let Some(error) = failed {
            return Err(error);
        }
        if !progress.ended.get() {
            let image = match drawn {
                Ok(Drawn { image, .. }) => to_unit(&image),
                Err(_) if progress.within_stage.get() => return Err(Impossible::WithinStage.into()),
                Err(error) => return ended_by(error, progress.altered.get()),
            };
            rows.extend(judge.decoded(&image));
            rows.extend(judge.drawn(&image));
        }
        if !progress.altered.get() {
            return Err(Impossible::NoBoundary(control.alters.clone()).into());
        }
        let row = rows.into_iter().find(|row| row.name == misses && row.measure == control.measure);
        Ok(Found::Row(row.ok_or_else(|| Impossible::NoRow(misses.to_owned(), control.measure.name()))?))
    }
}

/// What the end of a run says: that it refused to go on with its numbers, or that the control cannot be planted. The end of the
/// device or of the memory says nothing of the control, and is an error.
fn ended_by(error: VerifyError, is_altered: bool) -> Result<Found, AlterationError> {
    match error {
        VerifyError::Pipeline(problem @ (PipelineError::Image(_) | PipelineError::Embedding(_)))
            if is_altered =>
        {
            Ok(Found::Refused(problem.to_string()))
        }
        VerifyError::Pipeline(PipelineError::Runtime(error)) if error.exit_code() != FAILED => {
            Err(VerifyError::from(PipelineError::Runtime(error)).into())
        }
        VerifyError::Pipeline(error) => Err(Impossible::Failed(error.to_string()).into()),
        error => Err(error.into()),
    }
}

/// The probe: the reference's tensors up to the altered boundary, the run's own behind it.
struct Fault<'a> {
    oracle: &'a Oracle,
    judge: &'a Judge<'a>,
    control: &'a Control,
    /// The boundary whose rows are wanted.
    judged: &'a str,
    progress: &'a Progress,
    rows: Vec<Row>,
    failed: Option<AlterationError>,
}

impl Fault<'_> {
    fn fail(&mut self, failure: AlterationError) {
        self.failed.get_or_insert(failure);
        self.progress.ended.set(true);
    }

    /// What the run is to go on with.
    fn pass(&mut self, name: &str, tensor: &HostTensor) -> Result<Option<HostTensor>, AlterationError> {
        let is_altered = self.progress.altered.get();
        let of_interest = if is_altered { name == self.judged } else { self.oracle.names.contains(name) };
        let reference = match of_interest {
            true => self.oracle.tensor(name)?,
            false => None,
        };
        if is_altered {
            if let Some(reference) = reference {
                self.rows.extend(self.judge.rows(name, tensor, &reference));
                self.progress.ended.set(true);
            }
            return Ok(None);
        }
        let tensor = forced(tensor.clone(), reference);
        if name != self.control.alters {
            return Ok(Some(tensor));
        }
        let altered = altered(&self.control.how, &tensor, self.oracle, self.judge.padding())?;
        self.progress.altered.set(true);
        Ok(Some(altered))
    }
}

impl Probe for Fault<'_> {
    fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        if self.progress.ended.get() {
            return tensor;
        }
        match self.pass(name, &tensor) {
            Ok(altered) => altered.unwrap_or(tensor),
            Err(failure) => {
                self.fail(failure);
                tensor
            }
        }
    }

    fn shown(&mut self, name: &str, tensor: HostTensor) {
        if name == self.control.alters && !self.progress.ended.get() && !self.progress.altered.get() {
            return self.fail(Impossible::OnlyShown.into());
        }
        self.boundary(name, tensor);
    }
}
