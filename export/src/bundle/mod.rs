//! Bundles: a folder with `bundle.json`, one graph per stage, weight files, and the tokenizer.

mod allocate;
mod folder;
mod gains;
mod import;
mod legacy;
mod manifest;
mod needed;
mod outline;
mod read;
mod stages;
mod target;
mod verified;
mod write;

pub use gains::{Gain, gains};
pub use import::{ImportRequest, import};
pub use legacy::{CONFIG, LegacyError};
pub use manifest::{FORMAT, FileEntry, MANIFEST, Manifest, Origin, Port, PortDim, Stage};
pub use needed::needed_files;
pub use outline::{Outline, OutlineRequest, OutlineSource};
pub use read::{Bundle, BundleError};
pub use stages::Stages;
pub use target::check_target;
pub use verified::StoreError;
pub use write::{ExportError, ExportEvent, ExportRequest, ExportSummary, Published, export};
