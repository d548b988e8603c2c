//! Child processes that run a model's components, so that a driver that hangs, crashes or takes too much memory takes
//! only a child with it, and everything a component held is given back when its child ends.
//!
//! The parent never loads ONNX Runtime. It writes one [`protocol::Request`] per line to the child's standard input and
//! reads one [`protocol::Reply`] per line from its standard output; tensors pass as mapped files in a folder of theirs.

mod child;
mod exchange;
mod process;
mod protocol;
mod workers;

pub use child::serve;
pub use workers::Workers;
