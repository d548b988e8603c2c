use std::path::{Path, PathBuf};

use viaduct::tensor::HostTensor;
use viaduct_export::{
    bytes::ByteSize,
    device::DeviceProfile,
    memory::{PENDING_DISPATCHES, analyse},
    onnx::{Attribute, DType, Dim, Model, Tensor, ValueId, ValueType, read_graph, read_model},
    passes::{Part, Settings, Splitting, apply, sequence, split, split_named},
    shapes::Sizes,
};

use crate::{
    runtime_support::{Feeds, Net, cpu, int, ints, noise, relative_error, run, string, tensor},
    staged::{parts, ports, refused, run_parts},
};

fn cuts(cuts: &[usize]) -> Settings {
    Settings { split: Splitting { cuts: cuts.to_vec(), ..Splitting::default() }, ..Settings::default() }
}

fn prepared(path: &Path, passes: &[&str]) -> Model {
    let mut model = read_model(path).unwrap();
    let passes: Vec<_> = passes.iter().flat_map(|name| sequence(name).unwrap()).collect();
    apply(&mut model, &passes, &Settings::default()).unwrap();
    in_memory(model)
}

/// Sessions of tests look for no files.
fn in_memory(mut model: Model) -> Model {
    let ids: Vec<ValueId> = model.graph.values().map(|(id, _)| id).collect();
    for id in ids {
        if let Some(tensor) = &mut model.graph[id].constant {
            *tensor = Tensor::inline(tensor.dtype, &tensor.shape, tensor.bytes.read().unwrap().into_owned());
        }
    }
    model
}

/// Runs the stages as the pipeline does: attention in chunks of query rows.
fn run_stages(stages: &[Part], latents: &HostTensor, chunk: usize) -> HostTensor {
    let feeds = vec![("latents".to_owned(), latents.clone())];
    let mut values = run_parts(&stages[..1], &feeds);
    let q = values["q"].clone();
    let &[1, height, width, channels] = &q.shape[..] else { panic!("{:?}", q.shape) };
    assert_eq!(values["kt"].shape, [1, channels, height, width]);
    assert_eq!(values["v"].shape, q.shape);
    let rows = height * width;
    let (kt, v) = (values["kt"].clone(), values["v"].clone());
    let (kt, v) = (kt.reshaped(&[1, channels, rows]), v.reshaped(&[1, rows, channels]));
    let mut attended = Vec::new();
    for first in (0..rows).step_by(chunk) {
        let last = rows.min(first + chunk);
        let part = q.to_f32()[first * channels..last * channels].to_vec();
        let part = HostTensor::f32(&[1, last - first, channels], part);
        let feeds: Feeds =
            [("q_chunk", &part), ("kt", &kt), ("v", &v)].map(|(n, t)| (n.to_owned(), t.clone())).into();
        attended.extend(run(&mut cpu(), &stages[1].model, &feeds, &["attn_chunk"]).unwrap()[0].to_f32());
    }
    values.insert("attn".to_owned(), HostTensor::f32(&[1, height, width, channels], attended));
    let feeds: Feeds = values.into_iter().collect();
    run_parts(&stages[2..], &feeds)["image_raw"].clone()
}

fn check(path: &Path, passes: &[&str], levels: &[usize], bar: f32) -> Vec<Part> {
    let original = in_memory(read_model(path).unwrap());
    let id = original.graph.inputs[0];
    let Some(ValueType::Tensor { dtype, shape: Some(shape) }) = &original.graph[id].ty else { panic!() };
    let Dim::Fixed(channels) = shape[1] else { panic!("{shape:?}") };
    let latents = tensor(DType::F32, &[1, channels, 3, 5], &noise(7, channels * 15));
    let fed = tensor(*dtype, &[1, channels, 3, 5], &noise(7, channels * 15));
    let name = original.graph[id].name.clone();
    let output = original.graph[original.graph.outputs[0]].name.clone();
    let whole = run(&mut cpu(), &original, &vec![(name, fed)], &[&output]).unwrap().remove(0);
    let stages = parts(&prepared(path, passes), "split_vae", &cuts(levels));
    let image = run_stages(&stages, &latents, 7);
    assert_eq!(image.shape, whole.shape);
    let error = relative_error(&image.to_f32(), &whole.to_f32());
    assert!(error <= bar, "{}: {error:e}", path.display());
    assert_contract(&stages, levels);
    stages
}

/// Names of the ports, and no size that is read at run time.
fn assert_contract(stages: &[Part], levels: &[usize]) {
    let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names[..2], ["vae_pre", "vae_attention"]);
    assert_eq!(ports(&stages[0]), (vec!["latents"], vec!["q", "kt", "v", "vae_mid_res0"]));
    assert_eq!(ports(&stages[1]), (vec!["q_chunk", "kt", "v"], vec!["attn_chunk"]));
    let ups: Vec<String> = levels.iter().map(|level| format!("vae_up{}_res", level - 1)).collect();
    for (index, stage) in stages[2..].iter().enumerate() {
        assert_eq!(stage.name, format!("vae_post{index}"));
        let inputs = match index {
            0 => vec!["vae_mid_res0", "attn"],
            _ => vec![ups[index - 1].as_str()],
        };
        let output = ups.get(index).map_or("image_raw", String::as_str);
        assert_eq!(ports(stage), (inputs, vec![output]));
    }
    for stage in stages {
        let shapes = stage.model.graph.nodes().filter(|(_, node)| node.is("Shape")).count();
        assert_eq!(shapes, 0, "{}", stage.name);
    }
}

/// A decoder: convolution, attention over the pixels, upsampling with a convolution behind it, convolution. `attend`
/// makes `o` [1, pixels, 8] of `q`, `k` and `v` [1, pixels, 8]; `end` makes `y` of `up` and the others.
struct Decoder {
    attend: fn(&mut Net),
    end: fn(&mut Net),
    stride: i64,
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder { attend: plain, end: last, stride: 1 }
    }
}

fn plain(net: &mut Net) {
    scores(net);
    net.node("Softmax", &["s"], "p", &[]).node("MatMul", &["p", "v"], "o", &[]);
}

fn scores(net: &mut Net) {
    net.node("Transpose", &["k"], "k_t", &[("perm", ints(&[0, 2, 1]))]);
    net.node("MatMul", &["q", "k_t"], "s", &[]);
}

fn last(net: &mut Net) {
    conv(net, "up", "y", 3, 1);
}

fn conv(net: &mut Net, x: &str, y: &str, channels: usize, stride: i64) {
    let weight = format!("{y}_w");
    net.float(&weight, &[channels, 8, 3, 3], &noise(2, channels * 72));
    net.node("Conv", &[x, &weight], y, &[("pads", ints(&[1; 4])), ("strides", ints(&[stride; 2]))]);
}

impl Decoder {
    fn model(&self) -> Model {
        let mut net = Net::new(DType::F32);
        let open = |name: &str| Dim::Symbol(name.to_owned());
        net.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(8), open("h"), open("w")]);
        net.ints("flat", &[1, 8, -1]);
        conv(&mut net, "x", "r", 8, self.stride);
        net.node("Reshape", &["r", "flat"], "rows", &[]);
        net.node("Transpose", &["rows"], "t", &[("perm", ints(&[0, 2, 1]))]);
        for (seed, name) in ["q", "k", "v"].into_iter().enumerate() {
            let weight = format!("{name}_w");
            net.float(&weight, &[8, 8], &noise(seed as u64 + 4, 64)).node(
                "MatMul",
                &["t", &weight],
                name,
                &[],
            );
        }
        (self.attend)(&mut net);
        net.node("Transpose", &["o"], "z", &[("perm", ints(&[0, 2, 1]))]).node("Shape", &["r"], "size", &[]);
        net.node("Reshape", &["z", "size"], "a", &[]).node("Add", &["a", "r"], "sum", &[]);
        net.float("scales", &[4], &[1.0, 1.0, 2.0, 2.0]);
        net.node("Resize", &["sum", "", "scales"], "large", &[("mode", string("nearest"))]);
        conv(&mut net, "large", "up", 8, 1);
        (self.end)(&mut net);
        net.model(&["y"])
    }

    fn refused(&self, settings: &Settings) -> String {
        refused(&self.model(), "split_vae", settings).remove(0).1
    }
}

#[test]
fn attention_in_any_form_becomes_the_same_stages() {
    let fused = |net: &mut Net| {
        net.node("ms.MultiHeadAttention", &["q", "k", "v"], "o", &[("num_heads", int(1))]);
    };
    let scaled = |net: &mut Net| {
        net.float("by", &[], &[2.0]).float("times", &[1], &[0.7]);
        scores(net);
        net.node("Div", &["s", "by"], "s2", &[]).node("Mul", &["times", "s2"], "s3", &[]);
        net.node("Softmax", &["s3"], "p", &[]).node("MatMul", &["p", "v"], "o", &[]);
    };
    for attend in [plain, fused, scaled] {
        let model = Decoder { attend, ..Decoder::default() }.model();
        let x = tensor(DType::F32, &[1, 8, 3, 5], &noise(7, 120));
        let whole = run(&mut cpu(), &model, &vec![("x".to_owned(), x.clone())], &["y"]).unwrap().remove(0);
        for levels in [&[][..], &[1]] {
            let stages = parts(&model, "split_vae", &cuts(levels));
            assert_contract(&stages, levels);
            let image = run_stages(&stages, &x, 4);
            assert!(relative_error(&image.to_f32(), &whole.to_f32()) <= 1e-5);
        }
    }
}

#[test]
fn an_encoder_keeps_the_names_of_its_ends() {
    let model = Decoder { stride: 2, ..Decoder::default() }.model();
    let stages = parts(&model, "split_vae", &cuts(&[]));
    assert_eq!(ports(&stages[0]), (vec!["x"], vec!["q", "kt", "v", "vae_mid_res0"]));
    assert_eq!(ports(&stages[2]), (vec!["vae_mid_res0", "attn"], vec!["y"]));
}

#[test]
fn a_chunk_of_rows_may_be_fixed() {
    let mut settings = cuts(&[]);
    settings.split.chunk_rows = Some(16);
    let stages = parts(&Decoder::default().model(), "split_vae", &settings);
    let graph = &stages[1].model.graph;
    let Some(ValueType::Tensor { shape: Some(shape), .. }) = &graph[graph.inputs[0]].ty else { panic!() };
    assert_eq!(shape[..], [1, 16, 8].map(Dim::Fixed));
}

#[test]
fn what_is_no_autoencoder_is_refused() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2]).node("Tanh", &["x"], "y", &[]);
    let why = |model: &Model| refused(model, "split_vae", &cuts(&[])).remove(0).1;
    assert_eq!(why(&net.model(&["y"])), "it is no autoencoder: it has no Conv");
    let mut old = Decoder::default().model();
    old.opsets[0].1 = 12;
    assert_eq!(why(&old), "the model's opset is below 13");
    let mut body = Net::new(DType::F32);
    body.float("one", &[1], &[1.0]).node("Tanh", &["one"], "b", &[]);
    let body = body.model(&["b"]).graph;
    let branch = || Attribute::Graph(Box::new(body.clone()));
    let mut net = Net::new(DType::F32);
    net.x("x", &[1]).node("Cast", &["x"], "c", &[("to", int(9))]);
    net.node("If", &["c"], "y", &[("then_branch", branch()), ("else_branch", branch())]);
    assert_eq!(why(&net.model(&["y"])), "nodes have bodies");
}

#[test]
fn other_attentions_are_refused() {
    let none = |net: &mut Net| {
        net.node("Add", &["q", "k"], "s", &[]).node("Add", &["s", "v"], "o", &[]);
    };
    let heads = |net: &mut Net| {
        net.node("ms.MultiHeadAttention", &["q", "k", "v"], "o", &[("num_heads", int(2))]);
    };
    let biased = |net: &mut Net| {
        net.float("bias", &[24], &noise(5, 24));
        net.node("ms.MultiHeadAttention", &["q", "k", "v", "bias"], "o", &[("num_heads", int(1))]);
    };
    let masked = |net: &mut Net| {
        scores(net);
        net.node("Tanh", &["s"], "s2", &[]).node("Softmax", &["s2"], "p", &[]);
        net.node("MatMul", &["p", "v"], "o", &[]);
    };
    let over_rows = |net: &mut Net| {
        scores(net);
        net.node("Softmax", &["s"], "p", &[("axis", int(1))]).node("MatMul", &["p", "v"], "o", &[]);
    };
    let twice = |net: &mut Net| {
        scores(net);
        net.node("Softmax", &["s"], "p", &[]).node("MatMul", &["p", "v"], "o1", &[]);
        net.node("MatMul", &["o1", "k_t"], "s1", &[]).node("Softmax", &["s1"], "p1", &[]);
        net.node("MatMul", &["p1", "v"], "o", &[]);
    };
    type Row = (fn(&mut Net), &'static str);
    let rows: [Row; 6] = [
        (none, "it has no attention of one head over pixels"),
        (heads, "the attention has several heads"),
        (biased, "something stands between the scores and their Softmax"),
        (masked, "something stands between the scores and their Softmax"),
        (over_rows, "the rows of the attention are not the pixels of what it is added to"),
        (twice, "it has several attentions"),
    ];
    for (attend, why) in rows {
        assert_eq!(Decoder { attend, ..Decoder::default() }.refused(&cuts(&[])), why);
    }
}

#[test]
fn what_goes_on_beside_is_refused() {
    let input = |net: &mut Net| {
        net.node("GlobalAveragePool", &["x"], "mean", &[]).node("Add", &["up", "mean"], "both", &[]);
        conv(net, "both", "y", 3, 1);
    };
    let beside = |net: &mut Net| {
        net.node("Add", &["up", "large"], "both", &[]);
        conv(net, "both", "y", 3, 1);
    };
    let refused =
        |end: fn(&mut Net), levels: &[usize]| Decoder { end, ..Decoder::default() }.refused(&cuts(levels));
    assert_eq!(refused(input, &[]), "more than the attention and what it is added to goes on behind it");
    assert_eq!(refused(beside, &[1]), "it has no such up block to cut before");
    assert_eq!(refused(last, &[2]), "it has no such up block to cut before");
    let later = |net: &mut Net| {
        net.node("GlobalAveragePool", &["r"], "mean", &[]).node("Add", &["up", "mean"], "both", &[]);
        conv(net, "both", "y", 3, 1);
    };
    assert_eq!(refused(later, &[1]), "more than one value goes on behind an up block");
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign/vae").join(name)
}

#[test]
fn stages_of_a_legacy_export() {
    for passes in [&[][..], &["lean"], &["webgpu"]] {
        check(&fixture("legacy.onnx"), passes, &[], 1e-5);
        check(&fixture("legacy.onnx"), passes, &[1], 1e-5);
    }
}

#[test]
fn stages_of_a_dynamo_export_in_f16() {
    for passes in [&[][..], &["lean"], &["webgpu"]] {
        check(&fixture("dynamo_f16.onnx"), passes, &[1], 2e-2);
    }
}

/// The tiny exports that are not in the repository.
#[test]
#[ignore = "needs models that are not in the repository: set VIADUCT_SHARED"]
fn stages_of_the_shared_exports() {
    let shared = PathBuf::from(std::env::var_os("VIADUCT_SHARED").expect("VIADUCT_SHARED names a folder"));
    for name in ["vae_legacy.onnx", "vae_dynamo.onnx"] {
        for passes in [&[][..], &["lean"], &["webgpu"]] {
            let path = shared.join("oracles/onnx-tiny").join(name);
            check(&path, passes, &[1, 2], 1e-5);
        }
    }
}

#[test]
fn a_budget_cuts_behind_up_blocks() {
    let model = Decoder::default().model();
    let count = |budget: u64| {
        let mut settings = cuts(&[]);
        settings.split.max_bytes = Some(budget);
        settings.split.sizes = [("h".to_owned(), 64), ("w".to_owned(), 64)].into();
        split(&model, split_named("split_vae").unwrap(), &settings).unwrap()
    };
    assert_eq!(count(1 << 30).0.len(), 3);
    let fewest = (10..30).map(|power| count(1 << power)).find(|(parts, _)| !parts.is_empty()).unwrap();
    assert!(fewest.0.len() >= 3);
    assert_eq!(count(1).1.refused[0].why, "no cuts behind up blocks keep it to the budget");
}

/// The decoder of FLUX.2 at full size, of which only the graph is there, for a picture of 1024x1024.
#[test]
#[ignore = "needs a graph that is not in the repository: set VIADUCT_SHARED"]
fn stages_of_the_full_decoder_take_less() {
    let shared = PathBuf::from(std::env::var_os("VIADUCT_SHARED").expect("VIADUCT_SHARED names a folder"));
    let mut model = read_graph(&shared.join("oracles/onnx-full/flux2_vae_decoder.onnx")).unwrap();
    apply(&mut model, &sequence("webgpu").unwrap(), &Settings::default()).unwrap();
    let sizes: Sizes = [("latent_height", 64), ("latent_width", 64), ("mid_height", 128), ("mid_width", 128)]
        .into_iter()
        .chain([("kv_rows", 128 * 128), ("chunk_rows", 1024), ("up0_height", 256), ("up0_width", 256)])
        .chain([("up1_height", 512), ("up1_width", 512), ("up2_height", 1024), ("up2_width", 1024)])
        .map(|(name, size)| (name.to_owned(), size))
        .collect();
    let bc250 = DeviceProfile::preset("bc250").unwrap();
    let taken = |model: &Model| {
        let memory = analyse(model, &sizes, &bc250, PENDING_DISPATCHES).0;
        assert!(memory.is_complete(), "{:?} {:?}", memory.unknown, memory.unknown_scratch);
        memory.predicted.device
    };
    let stages_within = |cuts: &[usize], max_bytes: Option<u64>| -> Vec<u64> {
        let split =
            Splitting { cuts: cuts.to_vec(), max_bytes, sizes: sizes.clone(), ..Splitting::default() };
        let stages = parts(&model, "split_vae", &Settings { split, ..Settings::default() });
        let bytes = stages.iter().map(|stage| {
            let bytes = taken(&stage.model);
            println!("  {}: {}", stage.name, ByteSize(bytes));
            bytes
        });
        bytes.collect()
    };
    let whole = taken(&model);
    println!("whole: {}", ByteSize(whole));
    let cut = stages_within(&[2, 3], None);
    assert_eq!(cut.len(), 5);
    assert!(cut.iter().all(|bytes| bytes * 6 < whole * 5));
    let most = cut[2..].iter().copied().fold(0, u64::max);
    // Uncut, what follows the attention takes what the whole takes at its peak, and what is handed over besides.
    assert_eq!(stages_within(&[], Some(whole + whole / 8)).len(), 3);
    let bound = stages_within(&[], Some(most));
    assert!(bound.len() > 3 && bound.iter().all(|bytes| *bytes <= most), "{bound:?}");
}
