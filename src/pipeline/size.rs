//! Picture sizes that a model can draw: the same for those who draw and those who plan.

pub use viaduct_export::picture::{Size, SizeError, TypedSize};
