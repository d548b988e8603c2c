//! What a graph is run on: given tensors, and noise of a sane size where none is given.

use viaduct_export::{
    onnx::{DType, Dim, Graph, ValueId, ValueType},
    shapes::Sizes,
};

use super::{
    side::Tensors,
    tensors::{TensorFiles, TensorsError, carried},
};
use crate::{split_mix::SplitMix64, tensor::HostTensor};

/// Inputs of several graphs, and which of them are noise.
pub struct Inputs {
    pub tensors: Tensors,
    pub invented: Vec<String>,
}

/// What is wrong with an input of a graph.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error(transparent)]
    Tensors(#[from] TensorsError),
    #[error("input {input}: its element type is none that can be given")]
    Type { input: String },
    #[error("input {input}: its shape is not known; give it with --inputs")]
    Shape { input: String },
    #[error(
        "input {input}: {symbol} has no size; bind it with --dim {symbol}=N, or give the input with --inputs"
    )]
    Unbound { input: String, symbol: String },
    #[error("input {input}: the graph takes [{wanted}], the given tensor has {given:?}")]
    GivenShape {
        input: String,
        /// Sizes, names of sizes that are open, or `?`.
        wanted: String,
        given: Vec<usize>,
    },
}

/// Sizes of symbols that follow from the shapes of given tensors; sizes in `sizes` stay.
pub fn bind_by_tensors(graph: &Graph, files: &TensorFiles, sizes: &mut Sizes) -> Result<(), TensorsError> {
    for id in &graph.inputs {
        if let Some(shape) = files.shape(&graph[*id].name)? {
            bind(graph, *id, &shape.into_iter().map(Some).collect::<Vec<_>>(), sizes);
        }
    }
    Ok(())
}

/// Sizes of symbols that follow from those of another graph, which has inputs of the same names; sizes in `sizes` stay.
pub fn bind_by_graph(graph: &Graph, other: &Graph, sizes_there: &Sizes, sizes: &mut Sizes) {
    for id in &graph.inputs {
        let there = other.find(&graph[*id].name).filter(|there| other.inputs.contains(there));
        if let Some(dims) = there.and_then(|there| dims(other, there)) {
            let known: Vec<Option<usize>> = dims.iter().map(|dim| size(dim, sizes_there)).collect();
            bind(graph, *id, &known, sizes);
        }
    }
}

/// Binds the symbols of one input's shape, as far as it is known and has as many axes.
fn bind(graph: &Graph, id: ValueId, shape: &[Option<usize>], sizes: &mut Sizes) {
    let dims = dims(graph, id).filter(|dims| dims.len() == shape.len()).unwrap_or_default();
    for (dim, size) in dims.iter().zip(shape) {
        if let (Dim::Symbol(name), Some(size)) = (dim, size) {
            sizes.entry(name.clone()).or_insert(*size);
        }
    }
}

fn size(dim: &Dim, sizes: &Sizes) -> Option<usize> {
    match dim {
        Dim::Fixed(size) => Some(*size),
        Dim::Symbol(name) => sizes.get(name).copied(),
        Dim::Unknown => None,
    }
}

/// Everything that the graph's inputs need: by name from `known`, else noise from the seed. Tensors get the types that the
/// graph takes.
pub fn inputs(
    graph: &Graph,
    sizes: &Sizes,
    known: &dyn Fn(&str) -> Result<Option<HostTensor>, TensorsError>,
    seed: u64,
) -> Result<Inputs, InputError> {
    let mut inputs = Inputs { tensors: Tensors::new(), invented: Vec::new() };
    for id in graph.inputs.iter().copied() {
        let name = &graph[id].name;
        let dtype = host_type(graph, id)?;
        let tensor = match known(name)? {
            Some(tensor) => fitted(graph, id, sizes, tensor.as_type(dtype))?,
            None => {
                inputs.invented.push(name.clone());
                invented(graph, id, &shape(graph, id, sizes)?, dtype, seed)
            }
        };
        inputs.tensors.insert(name.clone(), tensor);
    }
    Ok(inputs)
}

/// The type in which the host holds an input.
fn host_type(graph: &Graph, id: ValueId) -> Result<DType, InputError> {
    let dtype = match &graph[id].ty {
        Some(ValueType::Tensor { dtype, .. }) => carried(*dtype),
        _ => None,
    };
    dtype.ok_or_else(|| InputError::Type { input: graph[id].name.clone() })
}

fn dims(graph: &Graph, id: ValueId) -> Option<&[Dim]> {
    match &graph[id].ty {
        Some(ValueType::Tensor { shape, .. }) => shape.as_deref(),
        _ => None,
    }
}

fn shape(graph: &Graph, id: ValueId, sizes: &Sizes) -> Result<Vec<usize>, InputError> {
    let input = || graph[id].name.clone();
    let dims = dims(graph, id).ok_or_else(|| InputError::Shape { input: input() })?;
    let known = |dim: &Dim| {
        size(dim, sizes).ok_or_else(|| match dim {
            Dim::Symbol(symbol) => InputError::Unbound { input: input(), symbol: symbol.clone() },
            _ => InputError::Shape { input: input() },
        })
    };
    let shape = dims.iter().map(known).collect::<Result<Vec<_>, _>>()?;
    // Noise is made as f32 first.
    match DType::F32.byte_len(&shape) {
        Some(_) => Ok(shape),
        None => Err(InputError::Shape { input: input() }),
    }
}

/// A given tensor whose shape is one that the graph takes. A rotary table that has every angle twice, as reference files
/// have it, loses the repetition where the graph takes each once.
fn fitted(graph: &Graph, id: ValueId, sizes: &Sizes, tensor: HostTensor) -> Result<HostTensor, InputError> {
    let Some(dims) = dims(graph, id) else { return Ok(tensor) };
    let wanted: Vec<Option<usize>> = dims.iter().map(|dim| size(dim, sizes)).collect();
    let fits = |shape: &[usize]| {
        let alike = |(wanted, size): (&Option<usize>, &usize)| wanted.is_none_or(|wanted| wanted == *size);
        shape.len() == wanted.len() && wanted.iter().zip(shape).all(alike)
    };
    if fits(&tensor.shape) {
        return Ok(tensor);
    }
    let mut once = tensor.shape.clone();
    if let Some(last) = once.last_mut().filter(|last| **last % 2 == 0) {
        *last /= 2;
        let values = tensor.to_f32();
        if fits(&once) && values.as_chunks::<2>().0.iter().all(|[a, b]| a == b) {
            let once = HostTensor::f32(&once, values.into_iter().step_by(2).collect());
            return Ok(once.as_type(tensor.values.dtype()));
        }
    }
    let wanted = wanted.iter().zip(dims).map(|(size, dim)| size.map_or(dim.to_string(), |n| n.to_string()));
    let wanted = wanted.collect::<Vec<_>>().join(", ");
    Err(InputError::GivenShape { input: graph[id].name.clone(), wanted, given: tensor.shape })
}

/// Noise about 1, but what a name promises: angles' cosines and sines in tables, zeros in a mask that is added, ones in a
/// mask of integers, times between 0 and 1. Integers are 0 and 1, or below the rows of the table that they pick from.
fn invented(graph: &Graph, id: ValueId, shape: &[usize], dtype: DType, seed: u64) -> HostTensor {
    let name = graph[id].name.to_lowercase();
    let count: usize = shape.iter().product();
    let mut random = Random::new(seed, &name);
    let is = |part: &str| name.contains(part);
    let rows = rows_of_table(graph, id).unwrap_or(2);
    let value: Box<dyn FnMut(usize) -> f32> = match dtype.is_float() {
        true if is("mask") => Box::new(|_| 0.0),
        true if is("cos") => Box::new(|i| angle(i).cos()),
        true if is("sin") => Box::new(|i| angle(i).sin()),
        true if is("time") || is("sigma") => Box::new(move |_| random.unit()),
        true => Box::new(move |_| random.normal()),
        false if is("mask") => Box::new(|_| 1.0),
        false => Box::new(move |_| (random.unit() * rows as f32).floor()),
    };
    HostTensor::f32(shape, (0..count).map(value).collect()).as_type(dtype)
}

/// The same angle for the same place in tables of cosines and of sines.
fn angle(index: usize) -> f32 {
    (index % 8191) as f32 * 0.61
}

/// Rows of the constant that the input picks from.
fn rows_of_table(graph: &Graph, id: ValueId) -> Option<usize> {
    let gathers = graph.nodes().filter(|(_, node)| node.is("Gather") && node.input(1) == Some(id));
    let tables = gathers.filter_map(|(_, node)| {
        let shape = &graph[node.input(0)?].constant.as_ref()?.shape;
        let axis = node.int("axis").unwrap_or(0);
        let axis = if axis < 0 { axis.checked_add(shape.len() as i64)? } else { axis };
        shape.get(usize::try_from(axis).ok()?).copied()
    });
    tables.min()
}

struct Random(SplitMix64);

impl Random {
    /// Other numbers for every input.
    fn new(seed: u64, name: &str) -> Random {
        let seeded =
            name.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Random(SplitMix64(seeded))
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f32 {
        (self.0.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Of mean 0 and deviation 1, at most 6: twelve uniform numbers added up.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

#[cfg(test)]
mod tests {
    use viaduct_export::onnx::{Builder, Model, Tensor};

    use super::*;

    fn model() -> Model {
        let mut graph = Builder::new("g");
        let seq = Dim::Symbol("seq".to_owned());
        let ids = graph.input("ids", DType::I64, &[Dim::Fixed(1), seq.clone()]);
        let table = graph.constant("table", Tensor::from_f32(&[5, 2], &[0.0; 10]));
        let y = graph.op("Gather", &[table, ids], &[]);
        graph.input("rope_cos", DType::F32, &[seq.clone(), Dim::Fixed(3)]);
        graph.input("mask", DType::F16, &[seq.clone(), seq]);
        graph.input("x", DType::F32, &[Dim::Fixed(2), Dim::Fixed(500)]);
        graph.output(y, "y", &[Dim::Unknown, Dim::Unknown, Dim::Unknown]);
        graph.finish()
    }

    fn nothing(_: &str) -> Result<Option<HostTensor>, TensorsError> {
        Ok(None)
    }

    #[test]
    fn noise_is_what_names_promise() {
        let model = model();
        let sizes = Sizes::from([("seq".to_owned(), 100)]);
        let made = inputs(&model.graph, &sizes, &nothing, 3).unwrap();
        let all = |name: &str| made.tensors[name].to_f32();
        assert!(all("ids").iter().all(|id| (0.0..5.0).contains(id)) && all("ids").contains(&4.0));
        assert!(all("rope_cos").iter().all(|x| x.abs() <= 1.0));
        assert!(all("mask").iter().all(|x| *x == 0.0));
        let x = all("x");
        let deviation = (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
        assert!((deviation - 1.0).abs() < 0.1, "{deviation}");
        assert_eq!(made.tensors, inputs(&model.graph, &sizes, &nothing, 3).unwrap().tensors);
        assert_ne!(made.tensors, inputs(&model.graph, &sizes, &nothing, 4).unwrap().tensors);
    }

    #[test]
    fn what_is_given_must_fit() {
        let model = model();
        let sizes = Sizes::from([("seq".to_owned(), 2)]);
        let given = |shape: &'static [usize]| {
            let values = (0..shape.iter().product()).map(|i| (i / 2) as f32).collect();
            let tensor = HostTensor::f32(shape, values);
            let known = move |name: &str| Ok((name == "rope_cos").then(|| tensor.clone()));
            inputs(&model.graph, &sizes, &known, 0).map(|inputs| inputs.tensors["rope_cos"].to_f32())
        };
        assert_eq!(given(&[2, 6]).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(given(&[2, 3]).unwrap().len(), 6);
        assert!(matches!(given(&[3, 3]), Err(InputError::GivenShape { .. })));
        let mut sizes = Sizes::new();
        let id = model.graph.find("rope_cos").unwrap();
        let error = fitted(&model.graph, id, &sizes, HostTensor::f32(&[3], vec![0.0; 3])).unwrap_err();
        assert!(error.to_string().contains("takes [seq, 3], the given tensor has [3]"), "{error}");
        bind_by_graph(&model.graph, &model.graph, &Sizes::from([("seq".to_owned(), 2)]), &mut sizes);
        assert_eq!(sizes["seq"], 2);
        let unbound = inputs(&model.graph, &Sizes::new(), &nothing, 0);
        assert!(matches!(unbound, Err(InputError::Unbound { .. })));
    }
}
