//! What can be trusted on the device: small graphs whose results the host knows.

use serde::Serialize;
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, Builder, DType, Dim, Model, Tensor, ValueId},
};

use super::{
    head_norm,
    micro_run::{compute_dtype, floats, noise},
};
use crate::{
    runtime::{DeviceKind, Runtime, RuntimeError},
    tensor::HostTensor,
};

/// The answer of one test.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SelfTest {
    pub name: String,
    pub passed: bool,
    /// The largest difference to the host's result, relative to its largest value; none if the test was not run.
    pub error: Option<f32>,
    /// What is done about a failure.
    pub otherwise: &'static str,
    #[serde(skip)]
    pub(super) about: About,
}

/// Which form is not used where a test fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum About {
    FusedAttention,
    WrittenHeadNorms,
    /// None: there is no other.
    #[default]
    Device,
}

/// Rows of the fused attention's tests: the operator takes other paths for longer sequences.
const ATTENTION_ROWS: [usize; 3] = [80, 300, 1030];
/// An adapter whose fused attention is wrong is off by more than a tenth.
const ATTENTION_BAR: f32 = 5e-3;
const ATTENTION_HEADS: usize = 2;
const ATTENTION_HEAD: usize = 64;
/// Adapters with smaller subgroups compute it wrongly, and take minutes to compile it.
const SMALLEST_SUBGROUP: u32 = 32;

/// A graph with inputs and the values of its one output.
struct Case {
    name: &'static str,
    model: Model,
    inputs: Vec<(&'static str, HostTensor)>,
    expected: Vec<f32>,
    bar: f32,
    otherwise: &'static str,
}

/// All tests, those of the fused attention operator first.
pub fn all(runtime: &mut Runtime) -> Result<Vec<SelfTest>, RuntimeError> {
    let mut tests = Vec::new();
    for rows in ATTENTION_ROWS {
        tests.push(fused_attention(runtime, rows)?);
    }
    if runtime.device().f16 {
        tests.push(test(runtime, norm_of_large_values())?);
        tests.push(written_norm(runtime)?);
    }
    for case in [nearest_resize(), scalar_chain(), rounded_lengths(), long_graph(), many_workgroups()] {
        tests.push(test(runtime, case)?);
    }
    let dtype = compute_dtype(&runtime.device().profile());
    for form in LARGE_SUMS {
        tests.push(test(runtime, form.case(dtype))?);
    }
    Ok(tests)
}

fn test(runtime: &mut Runtime, case: Case) -> Result<SelfTest, RuntimeError> {
    let (name, bar, otherwise) = (case.name.to_owned(), case.bar, case.otherwise);
    let error = run(runtime, case)?;
    Ok(SelfTest { name, passed: error <= bar, error: Some(error), otherwise, about: About::Device })
}

/// The norm of large values as [`crate::runtime::lower`] writes it out.
fn written_norm(runtime: &mut Runtime) -> Result<SelfTest, RuntimeError> {
    let mut case = norm_of_large_values();
    head_norm::in_form(&mut case.model, runtime.device().profile(), Some(1))?;
    let tested = test(runtime, case)?;
    Ok(SelfTest {
        name: format!("{}, written out", tested.name),
        otherwise: "norms of heads stay operators",
        about: About::WrittenHeadNorms,
        ..tested
    })
}

/// The operator runs only on adapters that may pass.
fn fused_attention(runtime: &mut Runtime, rows: usize) -> Result<SelfTest, RuntimeError> {
    let device = runtime.device();
    let small = device.subgroup_size.is_some_and(|size| size < SMALLEST_SUBGROUP);
    let hopeless = small || device.kind == DeviceKind::Software;
    let about = |tested: SelfTest| SelfTest {
        name: format!("fused attention over {rows} rows"),
        otherwise: "attention is written out",
        about: About::FusedAttention,
        ..tested
    };
    Ok(about(match hopeless {
        true => SelfTest::default(),
        false => test(runtime, attention_case(rows))?,
    }))
}

/// The largest difference to what is expected, relative to its largest value; infinite where a value is not finite.
fn run(runtime: &mut Runtime, case: Case) -> Result<f32, RuntimeError> {
    let mut stage = runtime.open_model(case.name, case.model, PENDING_DISPATCHES)?;
    let inputs: Vec<_> = case.inputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let found = stage.run(&inputs, &["y"])?.swap_remove(0).to_f32();
    let largest = case.expected.iter().fold(f32::MIN_POSITIVE, |most, value| most.max(value.abs()));
    let differences = found.iter().zip(&case.expected).map(|(a, b)| (a - b).abs());
    let worst = differences.fold(0f32, |most, d| if d.is_nan() { f32::INFINITY } else { most.max(d) });
    Ok(if found.len() == case.expected.len() { worst / largest } else { f32::INFINITY })
}

fn attention_case(rows: usize) -> Case {
    let mut graph = Builder::new("fused attention");
    let shape = [1, rows, ATTENTION_HEADS * ATTENTION_HEAD];
    let inputs = [("q", 1), ("k", 2), ("v", 3)].map(|(name, seed)| (name, noise(&shape, seed, DType::F32)));
    let qkv = inputs.each_ref().map(|(name, _)| graph.input(name, DType::F32, &shape.map(Dim::Fixed)));
    let heads = [("num_heads", Attribute::Int(ATTENTION_HEADS as i64))];
    let y = graph.contrib("MultiHeadAttention", &qkv, &heads);
    graph.output(y, "y", &shape.map(Dim::Fixed));
    let [q, k, v] = inputs.each_ref().map(|(_, tensor)| tensor.to_f32());
    Case {
        name: "fused attention",
        model: graph.finish(),
        inputs: inputs.to_vec(),
        expected: attention(&q, &k, &v, rows),
        bar: ATTENTION_BAR,
        otherwise: "",
    }
}

/// The reference: softmax(q k^T / sqrt(d)) v, head by head.
fn attention(q: &[f32], k: &[f32], v: &[f32], rows: usize) -> Vec<f32> {
    let (d, width) = (ATTENTION_HEAD, ATTENTION_HEADS * ATTENTION_HEAD);
    let at = |row: usize, head: usize| row * width + head * d..row * width + (head + 1) * d;
    let mut y = vec![0.0; rows * width];
    for head in 0..ATTENTION_HEADS {
        for row in 0..rows {
            let query = &q[at(row, head)];
            let score = |key| query.iter().zip(&k[at(key, head)]).map(|(a, b)| a * b).sum::<f32>();
            let weights: Vec<f32> = (0..rows).map(|key| (score(key) / (d as f32).sqrt()).exp()).collect();
            let total: f32 = weights.iter().sum();
            for (key, weight) in weights.iter().enumerate() {
                for (y, value) in y[at(row, head)].iter_mut().zip(&v[at(key, head)]) {
                    *y += weight / total * value;
                }
            }
        }
    }
    y
}

/// A graph of one input `x` that `body` makes `y` of.
fn case(
    name: &'static str,
    x: HostTensor,
    expected: Vec<f32>,
    body: impl FnOnce(&mut Builder, ValueId) -> ValueId,
) -> Case {
    let mut graph = Builder::new(name);
    let dims: Vec<Dim> = x.shape.iter().copied().map(Dim::Fixed).collect();
    let input = graph.input("x", x.values.dtype(), &dims);
    let y = body(&mut graph, input);
    graph.output(y, "y", &vec![Dim::Unknown; dims.len()]);
    Case { name, model: graph.finish(), inputs: vec![("x", x)], expected, bar: 1e-3, otherwise: "" }
}

/// Rows of values about 1000, whose squares leave f16's range, and of values about 1 and 0.01.
fn norm_of_large_values() -> Case {
    const EPSILON: f32 = 1e-6;
    const WIDTH: usize = 128;
    const SIZES: [f32; 3] = [1000.0, 1.0, 0.01];
    let row = |size: f32| (0..WIDTH).map(move |i| size * (1.0 + (i % 7) as f32 / 128.0));
    let x: Vec<f32> = SIZES.into_iter().flat_map(row).collect();
    let norms = x.chunks(WIDTH).flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / WIDTH as f32;
        row.iter().map(move |x| x / (mean + EPSILON).sqrt())
    });
    let expected = norms.collect();
    let input = HostTensor::f32(&[SIZES.len(), WIDTH], x);
    let made = case("norm of large values", input, expected, |graph, x| {
        let x = graph.cast(x, DType::F16);
        let x = graph.reshape(x, &[1, SIZES.len() as i64, 1, WIDTH as i64]);
        let weight = graph.small_constant(Tensor::from_f16(&[WIDTH], &[1.0; WIDTH]));
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(EPSILON))];
        let y = graph.op("RMSNormalization", &[x, weight], &attributes);
        let y = graph.reshape(y, &[SIZES.len() as i64, WIDTH as i64]);
        graph.cast(y, DType::F32)
    });
    // f16, and what the epsilon changes.
    Case { bar: 1e-2, otherwise: "use bundles that compute in f32 (`--profile f32`)", ..made }
}

fn nearest_resize() -> Case {
    let x: Vec<f32> = (0..6u8).map(f32::from).collect();
    let expected = [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 3, 3, 4, 4, 5, 5].map(|i| i as f32);
    let input = HostTensor::f32(&[1, 1, 2, 3], x);
    let made = case("nearest resize", input, expected.to_vec(), |graph, x| {
        graph.resize_nearest(x, &[1.0, 1.0, 2.0, 2.0])
    });
    Case { otherwise: "pictures come out wrong here: use `--ep cpu`", ..made }
}

/// The scale of attention as some exporters compute it at run time; flux2-vulkan-bridge saw 0.545 for the root of 128.
fn scalar_chain() -> Case {
    let input = HostTensor::f32(&[1], vec![128.0]);
    let made = case("chain of scalars", input, vec![128f32.sqrt().recip().sqrt()], |graph, x| {
        let root = graph.op("Sqrt", &[x], &[]);
        let one = graph.scalar(DType::F32, 1.0);
        let scale = graph.op("Div", &[one, root], &[]);
        graph.op("Sqrt", &[scale], &[])
    });
    Case { otherwise: "rewrite graphs of others with `viaduct rewrite --passes webgpu`", ..made }
}

/// Hundreds of dispatches, each of which needs the one before.
fn long_graph() -> Case {
    const LENGTH: usize = 600;
    let input = HostTensor::f32(&[64], vec![1.0; 64]);
    let made = case("long graph", input, vec![1.0 + LENGTH as f32; 64], |graph, x| {
        let one = graph.scalar(DType::F32, 1.0);
        (0..LENGTH).fold(x, |x, _| graph.add(x, one))
    });
    Case {
        bar: 0.0,
        otherwise: "results are not to be trusted: update the driver, or use `--ep cpu`",
        ..made
    }
}

/// Lengths in windows, rounded up, as some exporters compute sizes at run time: a quotient that misses a whole number by
/// a bit gives one window too many. <https://github.com/microsoft/onnxruntime/issues/27661>
fn rounded_lengths() -> Case {
    const LENGTHS: u16 = 600;
    const WINDOW: u16 = 15;
    let expected = (1..=LENGTHS).map(|length| f32::from(length.div_ceil(WINDOW))).collect();
    let input = HostTensor::f32(&[usize::from(LENGTHS)], (1..=LENGTHS).map(f32::from).collect());
    let made = case("lengths rounded up", input, expected, |graph, x| {
        let window = graph.scalar(DType::F32, f32::from(WINDOW));
        let windows = graph.op("Div", &[x, window], &[]);
        graph.op("Ceil", &[windows], &[])
    });
    Case { bar: 0.0, otherwise: "bind the sizes of graphs of others with `viaduct rewrite --dim`", ..made }
}

/// One workgroup a row, and more rows than one axis of a dispatch has: <https://github.com/microsoft/onnxruntime/issues/28536>.
fn many_workgroups() -> Case {
    const ROWS: usize = 70_000;
    const WIDTH: usize = 8;
    // One column of each row, and that column differs from row to row.
    let chosen =
        |most: f32| (0..ROWS * WIDTH).map(move |i| if i / WIDTH % WIDTH == i % WIDTH { most } else { 0.0 });
    let input = HostTensor::f32(&[ROWS, WIDTH], chosen(100.0).collect());
    let made = case("more than 65535 workgroups", input, chosen(1.0).collect(), |graph, x| {
        graph.op("Softmax", &[x], &[("axis", Attribute::Int(-1))])
    });
    Case { otherwise: "long sequences and large pictures come out wrong here: use `--ep cpu`", ..made }
}

/// A product whose partial sums leave f16's range although the sum does not. Kernels that add in f16 fail it.
struct LargeSums {
    name: &'static str,
    rows: usize,
    /// Of 8-bit weights; none for weights that are not quantised.
    accuracy_level: Option<i64>,
}

/// The kernels differ: one for a single row, one that rounds activations to 8 bits, one that does not.
/// <https://github.com/microsoft/onnxruntime/pull/29599>
const LARGE_SUMS: [LargeSums; 4] = [
    LargeSums { name: "large sums in linear layers", rows: 256, accuracy_level: Some(4) },
    LargeSums { name: "large sums in linear layers, exact", rows: 256, accuracy_level: Some(0) },
    LargeSums { name: "large sums in linear layers over one row", rows: 1, accuracy_level: Some(4) },
    LargeSums { name: "large sums in products", rows: 256, accuracy_level: None },
];

impl LargeSums {
    const WIDTH: usize = 512;
    const BLOCK: usize = 32;

    fn case(&self, dtype: DType) -> Case {
        // Half of the inputs add 400 each, the other half takes it away again.
        let row = (0..Self::WIDTH).map(|i| if i < Self::WIDTH / 2 { 400.0 } else { -400.0 });
        let x: Vec<f32> = (0..self.rows).flat_map(|_| row.clone()).collect();
        let input = HostTensor::f32(&[1, self.rows, Self::WIDTH], x);
        let made = case(self.name, input, vec![0.0; Self::WIDTH], |graph, x| {
            let x = graph.cast(x, dtype);
            let y = match self.accuracy_level {
                Some(level) => Self::linear(graph, x, level),
                None => {
                    let ones = floats(dtype, &vec![1.0; Self::WIDTH * Self::WIDTH]);
                    let ones = graph.constant("ones", Tensor { shape: vec![Self::WIDTH; 2], ..ones });
                    graph.matmul(x, ones)
                }
            };
            let y = graph.slice(y, 1, 0, 1);
            let y = graph.reshape(y, &[1, 1, -1]);
            graph.cast(y, DType::F32)
        });
        Case {
            bar: 1.0,
            otherwise: "such sums become infinite in f16, and a picture that shows it is refused, not drawn; a \
                        profile with `compute = \"f32\"` in a recipe (docs/bundle.md) has them right",
            ..made
        }
    }

    /// All weights are one: the code 129 is one step above zero, and a step is 1.
    fn linear(graph: &mut Builder, x: ValueId, accuracy_level: i64) -> ValueId {
        let (width, block) = (Self::WIDTH, Self::BLOCK);
        let codes = Tensor::inline(DType::U8, &[width, width / block, block], vec![129; width * width]);
        let scales = floats(graph.dtype(x), &vec![1.0; width * width / block]);
        let operands = [x, graph.constant("codes", codes), graph.constant("scales", scales)];
        let sizes = [("K", width), ("N", width), ("bits", 8), ("block_size", block)];
        let mut attributes: Vec<_> =
            sizes.iter().map(|(name, size)| (*name, Attribute::Int(*size as i64))).collect();
        attributes.push(("accuracy_level", Attribute::Int(accuracy_level)));
        graph.contrib("MatMulNBits", &operands, &attributes)
    }
}
