//! Checkpoints as they are published: safetensors files, sharded or single, and the JSON files beside them.
//!
//! Everything is mapped, nothing is read before it is asked for, and what a file says about itself is checked when it
//! is opened: a truncated shard or a stale index is an error before the first weight is used. A file that is still on its way
//! is opened by its beginning, and waited for when its first weight is read.

mod arrivals;
mod calibration;
mod config;
mod described;
mod error;
mod index;
mod repacked;
mod safetensors;
mod source;

pub use arrivals::{Arrivals, Beginning};
pub use calibration::{Calibration, CalibrationError, header};
pub use config::{MAX_JSON, read_json};
pub use error::WeightsError;
pub use index::ignored_files;
pub use source::{Checkpoint, Found};
