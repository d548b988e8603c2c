//! What is alive and what is held, on graphs small enough to count by hand.

use viaduct_export::{
    device::{DeviceProfile, Provider},
    memory::{PENDING_DISPATCHES, StageMemory, analyse},
    onnx::{Attribute, Builder, DType, Dim, Model, Node, Tensor, ValueId},
    shapes::Sizes,
};

/// Bytes of a [16, 16] f32 tensor.
const T: u64 = 1024;

fn device(provider: Provider) -> DeviceProfile {
    DeviceProfile {
        name: "test".to_owned(),
        provider,
        unified_memory: true,
        memory: 1 << 34,
        f16: true,
        subgroup_size: 32,
        max_binding: 128 << 20,
        max_buffer: 1 << 30,
        max_storage_buffers: 10,
        tuning: Default::default(),
    }
}

fn on(provider: Provider, model: &Model, sizes: &[(&str, usize)]) -> StageMemory {
    let sizes: Sizes = sizes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
    analyse(model, &sizes, &device(provider), PENDING_DISPATCHES).0
}

fn live(memory: &StageMemory) -> Vec<u64> {
    memory.timeline.iter().map(|moment| moment.live).collect()
}

/// A graph of [16, 16] f32 tensors; `write` makes the output from the input.
fn square(write: impl FnOnce(&mut Builder, ValueId) -> ValueId) -> Model {
    let dims = [Dim::Fixed(16), Dim::Fixed(16)];
    let mut builder = Builder::new("test");
    let x = builder.input("x", DType::F32, &dims);
    let y = write(&mut builder, x);
    builder.output(y, "y", &dims);
    builder.finish()
}

fn unary(builder: &mut Builder, op: &str, x: ValueId) -> ValueId {
    builder.op(op, &[x], &[])
}

#[test]
fn both_arms_of_a_diamond_are_alive_until_they_meet() {
    let model = square(|b, x| {
        let top = unary(b, "Exp", x);
        let left = unary(b, "Sin", top);
        let right = unary(b, "Cos", top);
        b.add(left, right)
    });
    // x and top; and left; and right, after which top is dead; x, left, right and y.
    assert_eq!(live(&on(Provider::WebGpu, &model, &[])), [2 * T, 3 * T, 4 * T, 4 * T]);
}

#[test]
fn a_chain_on_the_cpu_writes_over_itself_and_on_webgpu_does_not() {
    let model = square(|b, x| {
        let a = unary(b, "Exp", x);
        let c = unary(b, "Neg", a);
        let d = unary(b, "Abs", c);
        unary(b, "Sqrt", d)
    });
    // x must survive, and the output has a buffer of its own.
    assert_eq!(live(&on(Provider::Cpu, &model, &[])), [2 * T, 2 * T, 2 * T, 3 * T]);
    assert_eq!(live(&on(Provider::WebGpu, &model, &[])), [2 * T, 3 * T, 3 * T, 3 * T]);
}

#[test]
fn nothing_is_written_over_that_is_still_needed() {
    let model = square(|b, x| {
        let a = unary(b, "Exp", x);
        let c = unary(b, "Neg", a);
        b.add(a, c)
    });
    assert_eq!(live(&on(Provider::Cpu, &model, &[])), [2 * T, 3 * T, 4 * T]);
}

#[test]
fn a_size_that_the_graph_computes_keeps_the_planner_from_writing_over() {
    let mut b = Builder::new("test");
    let x = b.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(16)]);
    let known = unary(&mut b, "Exp", x);
    let known = unary(&mut b, "Neg", known);
    let inferred = b.reshape(known, &[-1, 8]);
    let negative = unary(&mut b, "Neg", inferred);
    b.output(negative, "y", &[Dim::Unknown, Dim::Fixed(8)]);
    let memory = on(Provider::Cpu, &b.finish(), &[("rows", 16)]);
    // The Neg of a known shape writes over; the view is no tensor of its own.
    assert_eq!(live(&memory), [2 * T, 2 * T, 2 * T, 3 * T]);
}

#[test]
fn views_share_a_buffer_and_outlive_each_other() {
    let model = square(|b, x| {
        let a = unary(b, "Exp", x);
        let flat = b.reshape(a, &[256]);
        let c = unary(b, "Sin", a);
        let back = b.reshape(flat, &[16, 16]);
        b.mul(back, c)
    });
    // a is alive through its view until the product.
    assert_eq!(live(&on(Provider::WebGpu, &model, &[])), [2 * T, 2 * T, 3 * T, 3 * T, 4 * T]);
}

#[test]
fn a_view_that_is_an_output_is_a_copy() {
    let model = square(|b, x| {
        let a = unary(b, "Exp", x);
        b.reshape(a, &[16, 16])
    });
    assert_eq!(live(&on(Provider::WebGpu, &model, &[])), [2 * T, 3 * T]);
}

#[test]
fn outputs_stay_alive_to_the_end() {
    let dims = [Dim::Fixed(16), Dim::Fixed(16)];
    let mut b = Builder::new("test");
    let x = b.input("x", DType::F32, &dims);
    let first = unary(&mut b, "Exp", x);
    let second = unary(&mut b, "Sin", first);
    let third = unary(&mut b, "Cos", second);
    b.output(first, "first", &dims);
    b.output(third, "third", &dims);
    assert_eq!(live(&on(Provider::WebGpu, &b.finish(), &[])), [2 * T, 3 * T, 4 * T]);
}

#[test]
fn a_weight_counts_once_however_often_it_is_read() {
    let model = square(|b, x| {
        let weight = b.constant("w", Tensor::from_f32(&[16, 16], &[1.0; 256]));
        b.constant("idle", Tensor::from_f32(&[16, 16], &[2.0; 256]));
        let y = b.matmul(x, weight);
        b.matmul(y, weight)
    });
    let memory = on(Provider::WebGpu, &model, &[]);
    assert_eq!(memory.weights_uploaded, T, "and one that nothing reads is not uploaded");
    assert_eq!(memory.weights_disk, 2 * T);
    assert_eq!(live(&memory), [2 * T, 3 * T]);
}

#[test]
fn what_is_computed_from_constants_alone_is_a_weight() {
    let model = square(|b, x| {
        let half = b.constant("w", Tensor::from_f16(&[16, 16], &[1.0; 256]));
        let weight = b.cast(half, DType::F32);
        b.matmul(x, weight)
    });
    let memory = on(Provider::WebGpu, &model, &[]);
    assert_eq!((memory.weights_disk, memory.weights_uploaded), (T / 2, T));
    assert_eq!(memory.timeline.len(), 1, "the Cast does not run");
}

#[test]
fn the_gate_of_a_silu_is_no_tensor() {
    let model = square(|b, x| {
        let a = unary(b, "Exp", x);
        let gate = unary(b, "Sigmoid", a);
        b.mul(a, gate)
    });
    assert_eq!(live(&on(Provider::WebGpu, &model, &[])), [2 * T, 2 * T, 3 * T]);
}

#[test]
fn unknown_operators_are_listed_and_in_no_sum() {
    let model = square(|b, x| {
        let a = b.op("Mystery", &[x], &[]);
        let c = b.op("Mystery", &[a], &[]);
        unary(b, "Exp", c)
    });
    let memory = on(Provider::WebGpu, &model, &[]);
    assert_eq!(memory.unknown.get("Mystery"), Some(&2));
    assert_eq!(live(&memory), [T, T, 2 * T]);
    assert!(memory.largest.iter().all(|tensor| tensor.op_type != "Mystery"));
}

#[test]
fn buffers_are_held_until_the_commands_that_use_them_are_submitted() {
    let model = square(|b, x| (0..12).fold(x, |x, _| unary(b, "Exp", x)));
    let memory = on(Provider::WebGpu, &model, &[]);
    let most = memory.timeline.iter().map(|moment| moment.held).max();
    // The input and that of the run before; one buffer per dispatch of a batch, and one that the next batch begins with.
    assert_eq!(most, Some(T * (2 + u64::from(PENDING_DISPATCHES) + 1)));
    assert!(memory.timeline.iter().all(|moment| moment.live <= moment.held));
    let (cpu, _) = analyse(&model, &Sizes::new(), &device(Provider::Cpu), PENDING_DISPATCHES);
    assert!(cpu.timeline.iter().all(|moment| moment.held == moment.live), "the CPU provider keeps nothing");
}

#[test]
fn a_convolution_is_laid_out_anew_before_and_after() {
    let dims = |channels| [Dim::Fixed(1), Dim::Fixed(channels), Dim::Fixed(8), Dim::Fixed(8)];
    let mut b = Builder::new("test");
    let x = b.input("x", DType::F32, &dims(4));
    let weight = b.constant("w", Tensor::from_f32(&[4, 4, 1, 1], &[1.0; 16]));
    let y = b.op("Conv", &[x, weight], &[("kernel_shape", Attribute::Ints(vec![1, 1]))]);
    b.output(y, "y", &dims(4));
    let model = b.finish();
    assert_eq!(live(&on(Provider::WebGpu, &model, &[])), [3 * T]);
    // Blocks of 16 channels on the CPU: 1 + 4 + 4 tensors at once.
    assert_eq!(live(&on(Provider::Cpu, &model, &[])), [9 * T]);
}

/// Two convolutions of 16 channels over a picture of 2x2.
fn convolutions(dtype: DType) -> Model {
    let dims = [1, 16, 2, 2].map(Dim::Fixed);
    let mut b = Builder::new("test");
    let mut x = b.input("x", dtype, &dims);
    for name in ["first", "second"] {
        let weight = match dtype {
            DType::F16 => Tensor::from_f16(&[16, 16, 3, 3], &[1.0; 2304]),
            _ => Tensor::from_f32(&[16, 16, 3, 3], &[1.0; 2304]),
        };
        let weight = b.constant(name, weight);
        x = b.op("Conv", &[x, weight], &[("pads", Attribute::Ints(vec![1; 4]))]);
    }
    b.output(x, "y", &dims);
    b.finish()
}

#[test]
fn weights_of_convolutions_are_laid_out_anew_while_a_cpu_session_is_made() {
    // Bytes of one in f32: the CPU provider computes in it.
    let weight = 9 * T;
    for (dtype, copies) in [(DType::F32, 2 + 3), (DType::F16, 2 + 2 + 3)] {
        let memory = on(Provider::Cpu, &convolutions(dtype), &[]);
        assert_eq!(memory.weights_uploaded, 2 * weight, "{dtype:?}");
        assert_eq!(memory.predicted.device, copies * weight, "{dtype:?}");
        let gpu = on(Provider::WebGpu, &convolutions(dtype), &[]);
        assert!(gpu.predicted.device < 3 * weight, "{dtype:?}: {}", gpu.predicted.device);
    }
}

/// Self-attention over [1, tokens, 64], with `extra` products of that shape with itself that nothing announces.
fn attention(extra: bool) -> Model {
    let dims = [Dim::Fixed(1), Dim::Symbol("tokens".to_owned()), Dim::Fixed(64)];
    let mut b = Builder::new("test");
    let x = b.input("x", DType::F32, &dims);
    let mut y = unary(&mut b, "Exp", x);
    if extra {
        let transposed = b.transpose(x, &[0, 2, 1]);
        let scores = b.matmul(x, transposed);
        y = b.matmul(scores, y);
    }
    b.output(y, "y", &dims);
    b.finish()
}

#[test]
fn a_hidden_square_of_the_sequence_moves_the_prediction() {
    for provider in [Provider::Cpu, Provider::WebGpu] {
        for tokens in [1000, 2000] {
            let total = |extra| on(provider, &attention(extra), &[("tokens", tokens)]).predicted.total();
            let square = (tokens * tokens * 4) as u64;
            let moved = total(true) - total(false);
            assert!(
                moved >= square && moved < square + square / 2,
                "{provider:?}, {tokens}: {moved} of {square}"
            );
        }
    }
    let memory = on(Provider::WebGpu, &attention(true), &[("tokens", 2000)]);
    assert_eq!(memory.largest[0].shape, [1, 2000, 2000]);
    assert_eq!(memory.timeline[memory.peak.unwrap()].op_type, "MatMul");
}

#[test]
fn an_empty_graph_has_no_peak() {
    let memory = on(Provider::WebGpu, &Builder::new("test").finish(), &[]);
    assert_eq!((memory.peak, memory.timeline.len(), memory.weights_uploaded), (None, 0, 0));
}

/// `if (c) { r = max(x · xᵀ) } else { r = max(x) }`, with a weight [16,16] of the first branch's own.
fn branches() -> Model {
    let body = |name: &str, large: bool| {
        let mut b = Builder::new(name);
        let weight = b.constant(&format!("{name}_weight"), Tensor::from_f32(&[16, 16], &[1.0; 256]));
        let mut graph = b.finish().graph;
        let (x, r, weight_of) = (graph.value("outer"), graph.value("r"), weight);
        let mut source = x;
        if large {
            for (op, inputs, output) in [
                ("MatMul", vec![Some(x), Some(weight_of)], "weighted"),
                ("Exp", vec![None], "large"),
                ("Sin", vec![None], "larger"),
            ] {
                let inputs = inputs.into_iter().map(|id| id.or(Some(source))).collect();
                let output = graph.value(output);
                graph.add_node(Node {
                    op_type: op.to_owned(),
                    inputs,
                    outputs: vec![Some(output)],
                    ..Node::default()
                });
                source = output;
            }
        }
        let max = Node {
            op_type: "ReduceMax".to_owned(),
            inputs: vec![Some(source)],
            outputs: vec![Some(r)],
            ..Node::default()
        };
        graph.add_node(max);
        graph.outputs.push(r);
        graph
    };
    let mut b = Builder::new("if");
    let x = b.input("x", DType::F32, &[Dim::Fixed(16), Dim::Fixed(16)]);
    let condition = b.input("condition", DType::Bool, &[]);
    let outer = b.op("Neg", &[x], &[]);
    let branches = [
        ("then_branch", Attribute::Graph(Box::new(body("then", true)))),
        ("else_branch", Attribute::Graph(Box::new(body("else", false)))),
    ];
    let r = b.op("If", &[condition], &branches);
    b.output(r, "y", &[Dim::Fixed(1), Dim::Fixed(1)]);
    let mut model = b.finish();
    model.graph.rename(outer, "outer");
    model
}

#[test]
fn bodies_of_branches_are_counted_with_their_weights() {
    let memory = on(Provider::Cpu, &branches(), &[]);
    assert!(memory.is_complete(), "{:?}", memory.unknown);
    assert_eq!(memory.weights_disk, 2 * T);
    assert_eq!(memory.weights_uploaded, T, "the other branch does not read its own");
    // x and the condition; what the body names; a product, and what is made of it twice, of which two are alive.
    let at_if = memory.timeline.last().unwrap();
    assert_eq!(at_if.op_type, "If");
    assert!((4 * T..4 * T + 64).contains(&at_if.live), "{at_if:?}");
    assert!(memory.largest.iter().any(|tensor| tensor.name == "larger"), "{:?}", memory.largest);
}

#[test]
fn what_is_computed_of_constants_counts_while_the_session_is_made() {
    let side = 4096;
    let mut b = Builder::new("folded");
    let x = b.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(1)]);
    let shape = b.constant("shape", Tensor::from_i64(&[2], &[side, side]));
    let zeros = b.op("ConstantOfShape", &[shape], &[]);
    let sum = b.op("ReduceSum", &[zeros], &[]);
    let y = b.add(x, sum);
    b.output(y, "y", &[Dim::Fixed(1), Dim::Fixed(1)]);
    let memory = on(Provider::Cpu, &b.finish(), &[]);
    let zeros = 4 * (side * side) as u64;
    let beyond = memory.predicted.total().saturating_sub(2 * zeros);
    // Twice, as ONNX Runtime has it when it makes a constant of a result; besides the program itself.
    assert!((1 << 20..100 << 20).contains(&beyond), "{:?}", memory.predicted);
    assert!(live(&memory).iter().all(|bytes| *bytes < 64), "{:?}", live(&memory));
}

/// Bytes of scratch memory of one node on the CPU provider: its live bytes without those of inputs and outputs.
fn scratch(op: &str, inputs: &[&[usize]], attributes: &[(&str, Attribute)]) -> u64 {
    let mut b = Builder::new(op);
    let fixed = |dims: &[usize]| dims.iter().map(|dim| Dim::Fixed(*dim)).collect::<Vec<_>>();
    let given: Vec<ValueId> = inputs
        .iter()
        .enumerate()
        .map(|(i, dims)| b.input(&format!("x{i}"), DType::F32, &fixed(dims)))
        .collect();
    let y = b.op(op, &given, attributes);
    b.output(y, "y", &[]);
    let mut model = b.finish();
    model.opsets = vec![(String::new(), 23)];
    // Inferred.
    let output = model.graph.outputs[0];
    model.graph[output].ty = None;
    let (memory, shapes) = analyse(&model, &Sizes::new(), &device(Provider::Cpu), PENDING_DISPATCHES);
    assert!(memory.is_complete(), "{op}: {:?} {:?}", memory.unknown, shapes.conflicts);
    let values = model.graph.inputs.iter().chain(&model.graph.outputs);
    let bytes: u64 = values.map(|id| shapes.bytes(*id).unwrap()).sum();
    memory.timeline[0].live - bytes
}

#[test]
fn scratch_of_large_kernels_is_counted() {
    let heads: &[usize] = &[1, 8, 2048, 64];
    assert_eq!(scratch("Attention", &[heads, heads, heads], &[]), 8 * 2048 * 2048 * 4);
    let causal = [("is_causal", Attribute::Int(1))];
    assert_eq!(scratch("Attention", &[heads, heads, heads], &causal), 9 * 2048 * 2048 * 4);
    let grouped = [("q_num_heads", Attribute::Int(8)), ("kv_num_heads", Attribute::Int(2))];
    let flat = scratch("Attention", &[&[1, 2048, 512], &[1, 2048, 128], &[1, 2048, 128]], &grouped);
    assert_eq!(flat, 8 * 2048 * 2048 * 4);
    let columns = scratch("ConvTranspose", &[&[2, 16, 128, 128], &[16, 32, 4, 4]], &[]);
    assert_eq!(columns, 32 * 16 * 128 * 128 * 4);
    let equation = |text: &str| [("equation", Attribute::String(text.as_bytes().to_vec()))];
    let outer = scratch("Einsum", &[&[64, 4], &[64, 4], &[64, 64]], &equation("ij, kl, ik -> jl"));
    assert_eq!(
        outer,
        4 * (64 * 4 * 64 * 4 + 64 * 64 + 4 * 4),
        "the first product, and what it is multiplied with"
    );
    let reversed = scratch("Einsum", &[&[16, 32, 64]], &equation("ijk->kji"));
    assert_eq!(reversed, 4 * 16 * 32 * 64);
}

#[test]
fn kernels_with_scratch_of_unknown_size_are_told() {
    let mut b = Builder::new("dft");
    let x = b.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(64), Dim::Fixed(1)]);
    let y = b.op("DFT", &[x], &[]);
    b.output(y, "y", &[Dim::Fixed(1), Dim::Fixed(64), Dim::Fixed(2)]);
    let memory = on(Provider::Cpu, &b.finish(), &[]);
    assert_eq!(memory.unknown_scratch.get("DFT"), Some(&1));
    assert!(!memory.is_complete());
}
