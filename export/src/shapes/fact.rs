//! What is known about one value before anything runs.

use half::{bf16, f16};

use crate::onnx::{DType, Tensor};

/// The most elements whose contents are followed.
pub const MAX_ELEMENTS: usize = 1024;

/// Sizes along a tensor's axes; a size that is not known is `None`.
pub type Dims = Vec<Option<usize>>;

/// The contents of a small tensor, row-major; an element that is not known is `None`.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Integers and booleans (0 and 1). Every element fits its tensor's type.
    Ints(Vec<Option<i64>>),
    /// Every element is one that its tensor's type can represent.
    Floats(Vec<Option<f64>>),
}

/// What is known about one value. The default is: nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fact {
    pub dtype: Option<DType>,
    /// `None`: not even the rank is known.
    pub shape: Option<Dims>,
    /// Contents, where they are known and few. A fact that has them has a full shape.
    pub elements: Option<Elements>,
    /// The tensors of a sequence, where their number is known. A value that has them is no tensor: it has no shape.
    pub items: Option<Vec<Fact>>,
}

impl Fact {
    pub fn of(dtype: Option<DType>, shape: &[usize]) -> Fact {
        Fact::partial(dtype, Some(shape.iter().copied().map(Some).collect()))
    }

    /// A tensor some of whose sizes may not be known.
    pub fn partial(dtype: Option<DType>, shape: Option<Dims>) -> Fact {
        Fact { dtype, shape, ..Fact::default() }
    }

    /// A tensor and its contents, if they are known, few, and as many as the shape says.
    pub fn with_elements(dtype: Option<DType>, shape: &[usize], elements: Option<Elements>) -> Fact {
        let fits =
            |elements: &Elements| elements.len() <= MAX_ELEMENTS && Some(elements.len()) == count(shape);
        Fact { elements: elements.filter(fits), ..Fact::of(dtype, shape) }
    }

    /// A constant, with its contents if they are few and at hand. Computed tensors are not computed for it.
    pub fn of_tensor(tensor: &Tensor) -> Fact {
        Fact::with_elements(Some(tensor.dtype), &tensor.shape, Elements::of(tensor))
    }

    /// The shape if every size is known.
    pub fn full_shape(&self) -> Option<Vec<usize>> {
        self.shape.as_ref()?.iter().copied().collect()
    }

    pub fn rank(&self) -> Option<usize> {
        self.shape.as_ref().map(Vec::len)
    }

    /// Bytes of the tensor, or of all tensors of the sequence; `None` while a type or size is not known.
    pub fn bytes(&self) -> Option<u64> {
        if let Some(items) = &self.items {
            return items.iter().try_fold(0u64, |sum, item| sum.checked_add(item.bytes()?));
        }
        self.dtype?.byte_len(&self.full_shape()?).map(|bytes| bytes as u64)
    }

    /// Bytes to plan with: where type and sizes are known and yet their product is beyond any number, the largest one.
    pub fn footprint(&self) -> Option<u64> {
        let known = self.items.is_none() && self.full_shape().is_some();
        let sized = self.dtype.is_some_and(|dtype| dtype.byte_len(&[1]).is_some());
        self.bytes().or((known && sized).then_some(u64::MAX))
    }

    /// The contents, none of whose elements may be known.
    pub(super) fn contents(&self) -> Option<Elements> {
        self.elements.clone().or_else(|| Elements::unknown(self.dtype?, &self.full_shape()?))
    }

    /// All elements, if each is a known integer.
    pub fn ints(&self) -> Option<Vec<i64>> {
        self.partial_ints()?.iter().copied().collect()
    }

    /// The elements of a tensor of integers, as far as they are known.
    pub fn partial_ints(&self) -> Option<&[Option<i64>]> {
        match self.elements.as_ref()? {
            Elements::Ints(values) => Some(values),
            Elements::Floats(_) => None,
        }
    }

    /// All elements, if each is a known float.
    pub fn floats(&self) -> Option<Vec<f64>> {
        match self.elements.as_ref()? {
            Elements::Floats(values) => values.iter().copied().collect(),
            Elements::Ints(_) => None,
        }
    }

    /// Fills what is not known here from what is known about the same value otherwise. `Err` says where they differ.
    pub fn fill(&mut self, other: &Fact) -> Result<(), String> {
        match (self.dtype, other.dtype) {
            (Some(own), Some(other)) if own != other => {
                return Err(format!("its type is {own:?}, the graph records {other:?}"));
            }
            (own, other) => self.dtype = own.or(other),
        }
        let (Some(own), Some(other)) = (&mut self.shape, &other.shape) else {
            if self.shape.is_none() && self.items.is_none() {
                self.shape.clone_from(&other.shape);
            }
            return Ok(());
        };
        let differ = |(own, other): (&Option<usize>, &Option<usize>)| {
            own.zip(*other).is_some_and(|(own, other)| own != other)
        };
        if own.len() != other.len() || own.iter().zip(other).any(differ) {
            let text = |dims: &[Option<usize>]| {
                let dims = dims.iter().map(|dim| dim.map_or("?".into(), |dim| dim.to_string()));
                dims.collect::<Vec<_>>().join(", ")
            };
            return Err(format!("its shape is [{}], the graph records [{}]", text(own), text(other)));
        }
        own.iter_mut().zip(other).for_each(|(own, other)| *own = own.or(*other));
        Ok(())
    }
}

impl Elements {
    pub fn len(&self) -> usize {
        match self {
            Elements::Ints(values) => values.len(),
            Elements::Floats(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether an element is known and the same in both.
    pub fn share(&self, other: &Elements, index: usize) -> bool {
        fn same<T: PartialEq>(a: &[Option<T>], b: &[Option<T>], index: usize) -> bool {
            matches!((a.get(index), b.get(index)), (Some(Some(a)), Some(Some(b))) if a == b)
        }
        match (self, other) {
            (Elements::Ints(a), Elements::Ints(b)) => same(a, b, index),
            (Elements::Floats(a), Elements::Floats(b)) => same(a, b, index),
            _ => false,
        }
    }

    /// The contents of a constant, if they are few, numbers, and in memory or in a mapped file.
    pub fn of(tensor: &Tensor) -> Option<Elements> {
        let count = count(&tensor.shape).filter(|count| *count <= MAX_ELEMENTS)?;
        let bytes = tensor.bytes.in_memory()?;
        let size = tensor.dtype.size()?;
        if bytes.len() != count * size {
            return None;
        }
        let element = |bytes: &[u8]| {
            let mut wide = [0; 8];
            wide[..size].copy_from_slice(bytes);
            u64::from_le_bytes(wide)
        };
        let raw = bytes.chunks_exact(size).map(element);
        Some(if tensor.dtype.is_float() {
            Elements::Floats(raw.map(|bits| Some(float(tensor.dtype, bits))).collect())
        } else {
            Elements::Ints(raw.map(|bits| int(tensor.dtype, bits)).collect())
        })
    }

    /// The elements at the given places, in their order; none where a place is not known or lies outside.
    pub(super) fn pick(&self, places: &[Option<usize>]) -> Elements {
        fn pick<T: Copy>(values: &[Option<T>], places: &[Option<usize>]) -> Vec<Option<T>> {
            places.iter().map(|place| values.get((*place)?).copied()?).collect()
        }
        match self {
            Elements::Ints(values) => Elements::Ints(pick(values, places)),
            Elements::Floats(values) => Elements::Floats(pick(values, places)),
        }
    }

    /// Contents of which nothing is known yet, for a tensor of numbers that is small enough to follow them.
    pub(super) fn unknown(dtype: DType, shape: &[usize]) -> Option<Elements> {
        let count = count(shape).filter(|count| *count <= MAX_ELEMENTS)?;
        if dtype.is_float() {
            return Some(Elements::Floats(vec![None; count]));
        }
        dtype.size().map(|_| Elements::Ints(vec![None; count]))
    }
}

/// Elements of a shape; `None` if there are too many to count.
pub(super) fn count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |count, dim| count.checked_mul(*dim))
}

/// The value if an integer type (or bool) holds it.
pub(super) fn fit(dtype: DType, value: i64) -> Option<i64> {
    let holds = match dtype {
        DType::Bool => value == 0 || value == 1,
        DType::U8 => u8::try_from(value).is_ok(),
        DType::I8 => i8::try_from(value).is_ok(),
        DType::U16 => u16::try_from(value).is_ok(),
        DType::I16 => i16::try_from(value).is_ok(),
        DType::U32 => u32::try_from(value).is_ok(),
        DType::I32 => i32::try_from(value).is_ok(),
        DType::U64 => value >= 0,
        DType::I64 => true,
        _ => false,
    };
    holds.then_some(value)
}

/// The value as a float type rounds it.
pub(super) fn round(dtype: DType, value: f64) -> Option<f64> {
    match dtype {
        DType::F64 => Some(value),
        DType::F32 => Some(f64::from(value as f32)),
        DType::F16 => Some(f16::from_f64(value).to_f64()),
        DType::BF16 => Some(bf16::from_f64(value).to_f64()),
        _ => None,
    }
}

fn int(dtype: DType, bits: u64) -> Option<i64> {
    match dtype {
        DType::I8 => Some(i64::from(bits as i8)),
        DType::I16 => Some(i64::from(bits as i16)),
        DType::I32 => Some(i64::from(bits as i32)),
        DType::I64 => Some(bits as i64),
        _ => i64::try_from(bits).ok(),
    }
}

fn float(dtype: DType, bits: u64) -> f64 {
    match dtype {
        DType::F16 => f16::from_bits(bits as u16).to_f64(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
        DType::F32 => f64::from(f32::from_bits(bits as u32)),
        _ => f64::from_bits(bits),
    }
}
