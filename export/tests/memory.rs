//! What is alive and what is held, on graphs small enough to count by hand.

use viaduct_export::{
    device::{DeviceProfile, Provider},
    memory::{PENDING_DISPATCHES, StageMemory, analyse},
    onnx::{Attribute, Builder, DType, Dim, Model, Tensor, ValueId},
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
        fused_attention: false,
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
