//! Procedural FLUX.2 Klein checkpoints: weights computed from a seed, so that no weight has to be stored.
//!
//! A spec (`tests/fixtures/<name>/checkpoint.json`, see [`spec`]) holds the model configs and a seed;
//! [`write_checkpoint`] writes the checkpoint folder that it describes, in diffusers layout. The Python module
//! `tools/oracle/procedural.py` writes the same one for the reference implementation, and every weight of the two
//! is equal bit for bit: [`generator`] states the arithmetic. A change on one side has to be made on the other.
//!
//! This package must not know what the tests do with a checkpoint.

mod checkpoint;
mod error;
pub mod generator;
mod shapes;
pub mod spec;
mod tokenizer;

pub use checkpoint::write_checkpoint;
pub use error::Error;
