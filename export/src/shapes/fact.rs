//! What is known about one value before anything runs.

use crate::onnx::DType;

/// The most elements whose contents are followed.
pub const MAX_ELEMENTS: usize = 1024;

/// The contents of a small tensor, row-major; an element that is not known is `None`.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Integers and booleans (0 and 1).
    Ints(Vec<Option<i64>>),
    Floats(Vec<Option<f64>>),
}

/// What is known about one value. The default is: nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fact {
    pub dtype: Option<DType>,
    /// `None`: not even the rank is known. A size that is not known is `None`.
    pub shape: Option<Vec<Option<usize>>>,
    /// Contents, where they are known and few. A fact that has them has a full shape.
    pub elements: Option<Elements>,
}

impl Fact {
    pub fn of(dtype: Option<DType>, shape: &[usize]) -> Fact {
        Fact { dtype, shape: Some(shape.iter().copied().map(Some).collect()), elements: None }
    }

    /// The shape if every size is known.
    pub fn full_shape(&self) -> Option<Vec<usize>> {
        self.shape.as_ref()?.iter().copied().collect()
    }

    pub fn rank(&self) -> Option<usize> {
        self.shape.as_ref().map(Vec::len)
    }

    /// Bytes of the tensor; `None` while type or shape is not known.
    pub fn bytes(&self) -> Option<u64> {
        self.dtype?.byte_len(&self.full_shape()?).map(|bytes| bytes as u64)
    }
}
