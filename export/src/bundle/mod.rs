//! Bundles: a folder with `bundle.json`, one graph per stage, weight files, and the tokenizer.

mod manifest;
mod read;
mod write;

pub use manifest::{FORMAT, FileEntry, MANIFEST, Manifest, Origin, Port, PortDim, Stage};
pub use read::{Bundle, BundleError};
pub use write::{ExportError, ExportEvent, ExportRequest, ExportSummary, export};
