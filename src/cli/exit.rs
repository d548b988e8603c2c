//! Exit codes: what kind of failure an error is.

use viaduct_export::{
    arch::{ArchError, SizesError, flux2::Flux2Error, qwen_image::QwenImageError},
    bundle::ExportError,
    passes::PassError,
    recipe::RecipeError,
};

use crate::{
    atomic_file::FileError,
    bench::BenchError,
    bisect::{BisectError, InputError, Parted},
    calibrate::CalibrationError,
    hub::HubError,
    pipeline::{dump::DumpError, schedule::ScheduleError, size::SizeError, text_to_image::PipelineError},
    plan::{OverBudget, PlanError},
    runtime::{RuntimeError, Stopped},
    verify::{BarsMissed, VerifyError},
};

const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// A request that no run could fulfil, in the user's words; exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// The process's exit code for an error.
pub fn code_of(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code_of_link).unwrap_or(FAILED)
}

/// The code of one link of the error's chain, if it decides the matter.
fn code_of_link(error: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if let Some(e) = error.downcast_ref::<PassError>() {
        return Some(pass_code(e));
    }
    if error.is::<UsageError>() || error.is::<SizeError>() {
        return Some(USAGE);
    }
    if let Some(USAGE) = error.downcast_ref::<FileError>().map(file_code) {
        return Some(USAGE);
    }
    if let Some(
        HubError::Setting { .. }
        | HubError::NoHome
        | HubError::IsBundle { .. }
        | HubError::IsCheckpoint { .. },
    ) = error.downcast_ref::<HubError>()
    {
        return Some(USAGE);
    }
    if let Some(DumpError::NotEmpty { .. }) = error.downcast_ref::<DumpError>() {
        return Some(USAGE);
    }
    if let Some(e) = error.downcast_ref::<SizesError>() {
        return Some(sizes_code(e));
    }
    if let Some(PlanError::Sizes(e)) = error.downcast_ref::<PlanError>() {
        return Some(sizes_code(e));
    }
    if error.is::<BarsMissed>() || error.is::<Parted>() {
        return Some(3);
    }
    if error.is::<OverBudget>() {
        return Some(4);
    }
    if error.is::<Stopped>() {
        return Some(Stopped::EXIT_CODE);
    }
    if let Some(e) = error.downcast_ref::<RuntimeError>() {
        return Some(e.exit_code());
    }
    if let Some(e) = error.downcast_ref::<RecipeError>() {
        return recipe_code(e);
    }
    if let Some(e) = error.downcast_ref::<ExportError>() {
        return export_code(e);
    }
    if let Some(e) = error.downcast_ref::<PipelineError>() {
        return Some(pipeline_code(e));
    }
    if let Some(e) = error.downcast_ref::<BisectError>() {
        return bisect_code(e);
    }
    // A transparent error stands in the chain for the one inside it.
    match error.downcast_ref::<BenchError>() {
        Some(BenchError::Pipeline(e)) => return Some(pipeline_code(e)),
        Some(BenchError::Sizes(e)) => return Some(sizes_code(e)),
        Some(BenchError::Bundle(_)) => return Some(FAILED),
        None => {}
    }
    match error.downcast_ref::<CalibrationError>() {
        Some(CalibrationError::Pipeline(e)) => return Some(pipeline_code(e)),
        Some(CalibrationError::File(e)) => return Some(file_code(e)),
        Some(CalibrationError::Quantised { .. } | CalibrationError::Imported) => return Some(USAGE),
        Some(_) => return Some(FAILED),
        None => {}
    }
    match error.downcast_ref::<VerifyError>()? {
        VerifyError::Mismatch { .. } | VerifyError::Steps { .. } | VerifyError::Size(_) => Some(USAGE),
        VerifyError::Pipeline(e) => Some(pipeline_code(e)),
        _ => None,
    }
}

/// Transparent variants stand in the chain for the error inside them.
fn bisect_code(error: &BisectError) -> Option<u8> {
    match error {
        BisectError::Input { source: InputError::Tensors(_), .. } => Some(FAILED),
        BisectError::Input { .. } | BisectError::NoSharedName | BisectError::NoSharedShape { .. } => {
            Some(USAGE)
        }
        BisectError::Runtime(e) => code_of_link(e),
        BisectError::Pipeline(e) => code_of_link(e),
        BisectError::Size(e) => code_of_link(e),
        BisectError::Oracle(e) => code_of_link(e),
        BisectError::OverBudget(e) => code_of_link(&**e),
        BisectError::File(e) => code_of_link(e),
        _ => Some(FAILED),
    }
}

fn file_code(error: &FileError) -> u8 {
    match error {
        FileError::Exists(_)
        | FileError::NotRegular(_)
        | FileError::NotAFolder(_)
        | FileError::Foreign { .. }
        | FileError::SourceInside(_) => USAGE,
        _ => FAILED,
    }
}

fn sizes_code(error: &SizesError) -> u8 {
    match error {
        SizesError::Picture(_) | SizesError::Steps { .. } => USAGE,
        _ => FAILED,
    }
}

fn export_code(error: &ExportError) -> Option<u8> {
    match error {
        ExportError::Exists { .. } | ExportError::NotReplaceable { .. } | ExportError::NoName { .. } => {
            Some(USAGE)
        }
        ExportError::UnknownPart { .. } | ExportError::PartTwice { .. } | ExportError::NoPart { .. } => {
            Some(USAGE)
        }
        ExportError::TargetTooSmall { .. } | ExportError::NothingToRaise { .. } => Some(USAGE),
        ExportError::TargetWithoutCalibration | ExportError::CalibrationUnused { .. } => Some(USAGE),
        ExportError::SourceInside { .. } | ExportError::Foreign { .. } => Some(USAGE),
        ExportError::NotAFolder { .. } | ExportError::FamilyMismatch { .. } => Some(USAGE),
        ExportError::Recipe(e) => recipe_code(e),
        ExportError::Arch(
            ArchError::Flux2(Flux2Error::Setting { .. })
            | ArchError::QwenImage(QwenImageError::Setting { .. }),
        ) => Some(USAGE),
        ExportError::Arch(
            ArchError::Flux2(Flux2Error::Recipe(e)) | ArchError::QwenImage(QwenImageError::Recipe(e)),
        ) => recipe_code(e),
        _ => Some(FAILED),
    }
}

fn pass_code(error: &PassError) -> u8 {
    match error {
        PassError::UnknownPass(_)
        | PassError::UnknownSequence(_)
        | PassError::UnknownSplit(_)
        | PassError::UnknownValue(_)
        | PassError::UnknownSize { .. } => USAGE,
        _ => FAILED,
    }
}

fn pipeline_code(error: &PipelineError) -> u8 {
    match error {
        PipelineError::Runtime(e) => e.exit_code(),
        PipelineError::Schedule(ScheduleError::Steps(_))
        | PipelineError::Steps { .. }
        | PipelineError::Noise { .. }
        | PipelineError::Negative => USAGE,
        _ => FAILED,
    }
}

fn recipe_code(error: &RecipeError) -> Option<u8> {
    match error {
        RecipeError::Read { .. } | RecipeError::Invalid { .. } => Some(FAILED),
        _ => Some(USAGE),
    }
}
