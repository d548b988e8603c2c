//! `viaduct bisect` on small models with planted faults: the exact node is named, within a budget, and the one-node model
//! that it writes shows the fault.

mod support;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
};

use assert_cmd::Command;
use serde_json::Value;
use support::{Bundle, Checkpoint, fixture, oracle, scratch, viaduct, webgpu::webgpu};
use tempfile::TempDir;
use viaduct::{atomic_file::Existing, npy, runtime::DeviceKind, tensor::HostTensor};
use viaduct_export::onnx::{
    Attribute, Builder, DType, Dim, Model, Node, NodeId, Tensor, ValueId, WriteOptions, read_model,
    write_model,
};

/// A graph and a copy of it with a fault.
struct Planted {
    folder: TempDir,
    good: PathBuf,
    /// The node that is at fault.
    node: String,
}

impl Planted {
    fn in_stage(bundle: &Bundle, stage: &str, plant: impl FnOnce(&mut Model) -> NodeId) -> Planted {
        Planted::in_graph(bundle.path().join(format!("{stage}.onnx")), plant)
    }

    fn in_graph(good: PathBuf, plant: impl FnOnce(&mut Model) -> NodeId) -> Planted {
        let mut model = read_model(&good).unwrap();
        let node = plant(&mut model);
        let (folder, node) = (scratch(), model.graph.place(node));
        write_model(&model, &folder.path().join("bad.onnx"), &WriteOptions::default()).unwrap();
        Planted { folder, good, node }
    }

    /// Bisects bad against good, and runs the command that is said to show it.
    fn find(&self, arguments: &[&str]) -> Value {
        let reproduction = self.folder.path().join("reproduction");
        let mut command = viaduct();
        command.arg("bisect").arg(self.folder.path().join("bad.onnx")).arg(&self.good);
        command.args(["--ep", "cpu", "--json", "--out"]).arg(&reproduction).args(arguments);
        let report = verdict(command, 3);
        let found = &report["found"];
        assert_eq!(found["node"]["name"], *self.node, "{found:#}");
        assert_eq!(found["confirmed"], true, "{found:#}");
        assert_eq!(found["reproduction"]["shows"], true, "{found:#}");
        let shown = shown(&report);
        assert_eq!(shown["found"]["node"]["name"], *self.node, "{shown:#}");
        assert!(shown["found"]["reproduction"].is_null(), "{shown:#}");
        report
    }
}

fn verdict(mut command: Command, code: i32) -> Value {
    let output = command.assert().code(code).get_output().clone();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The verdict of the printed command, run as it stands.
fn shown(report: &Value) -> Value {
    let command = report["found"]["reproduction"]["command"].as_str().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_viaduct"));
    let path = format!("{}:{}", program.parent().unwrap().display(), env::var("PATH").unwrap());
    let mut shell = process::Command::new("sh");
    shell.arg("-c").arg(format!("{command} --json")).env("PATH", path);
    shell.envs(viaduct().get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = shell.output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn nodes(model: &Model, op_type: &str) -> Vec<NodeId> {
    model.graph.nodes().filter(|(_, node)| node.op_type == op_type).map(|(id, _)| id).collect()
}

/// The product with the weight of that name.
fn product(model: &Model, weight: &str) -> (NodeId, ValueId) {
    let weight = model.graph.find(weight).unwrap();
    (model.graph.uses(weight)[0], weight)
}

fn change(model: &mut Model, weight: ValueId, change: impl Fn(usize, usize, &[f32]) -> f32) {
    let tensor = model.graph[weight].constant.clone().unwrap();
    let (columns, values) = (tensor.shape[1], tensor.to_f32().unwrap().unwrap());
    let changed: Vec<f32> = (0..values.len()).map(|i| change(i / columns, i % columns, &values)).collect();
    model.graph[weight].constant = Some(match tensor.dtype {
        DType::F16 => Tensor::from_f16(&tensor.shape, &changed),
        _ => Tensor::from_f32(&tensor.shape, &changed),
    });
}

const TRANSFORMER: [&str; 4] = ["--dim", "image_seq=64", "--dim", "joint_seq=128"];

/// With a budget that holds the graph and a part of its values.
fn within(budget: &str) -> Vec<&str> {
    [&TRANSFORMER[..], &["--budget", budget]].concat()
}

#[test]
fn a_wrong_constant_in_one_attention_scale() {
    let bundle = Checkpoint::klein_emoji().export("f32", &[]);
    let planted = Planted::in_stage(&bundle, "text_encoder", |model| {
        let is_scale = |id: &NodeId| {
            let factor = model.graph[*id].input(1).and_then(|id| model.graph[id].constant.as_ref());
            factor.is_some_and(|tensor| tensor.elements() == 1)
        };
        let scale = nodes(model, "Mul").into_iter().filter(is_scale).nth(3).unwrap();
        let wrong = model.graph.add_constant("wrong", Tensor::from_f32(&[], &[0.25]));
        model.graph[scale].inputs[1] = Some(wrong);
        scale
    });
    let report = planted.find(&["--budget", "44MiB"]);
    assert!(report["probes"].as_u64() >= Some(3), "{report:#}");
    assert_eq!(report["found"]["between"].as_array().unwrap().len(), 1);
    assert!(report["found"]["adds_up"].is_null());
    assert!(report["found"]["difference"]["cosine"].as_f64() > Some(0.999), "{report:#}");
}

#[test]
fn an_f16_overflow_in_one_block() {
    let bundle = Checkpoint::klein_emoji().export("f16", &[]);
    let planted = Planted::in_stage(&bundle, "transformer", |model| {
        let (node, weight) = product(model, "transformer_blocks.1.ff.linear_out.weight");
        change(model, weight, |row, column, values| values[row * 256 + column] * 3e4);
        node
    });
    let report = planted.find(&within("96MiB"));
    let infinite = &report["found"]["difference"]["infinite"];
    assert!(infinite[0].as_u64() > Some(0) && infinite[1] == 0, "{report:#}");
}

#[test]
fn a_permuted_head() {
    let bundle = Checkpoint::klein_emoji().export("f32", &[]);
    let planted = Planted::in_stage(&bundle, "transformer", |model| {
        let (node, weight) = product(model, "transformer_blocks.0.attn.to_v.weight");
        // Heads 0 and 1 of 64 columns each change places.
        let place = |column: usize| if column < 128 { (column + 64) % 128 } else { column };
        change(model, weight, |row, column, values| values[row * 256 + place(column)]);
        node
    });
    planted.find(&within("80MiB"));
}

#[test]
fn a_wrong_rope_axis() {
    let bundle = Checkpoint::klein_emoji().export("f32", &[]);
    let inputs = scratch();
    let tables = [("rope_cos", f32::cos as fn(f32) -> f32), ("rope_sin", f32::sin)].map(|(name, of)| {
        let angles = (0..128 * 32).map(|i| (i / 32) as f32 * 0.1 / (1.0 + (i % 32) as f32));
        let table = HostTensor::f32(&[128, 32], angles.map(of).collect());
        npy::write(&inputs.path().join(format!("{name}.npy")), Existing::Keep, &table).unwrap();
        table.to_f32()
    });
    let planted = Planted::in_stage(&bundle, "transformer", |model| {
        let rotation = nodes(model, "RotaryEmbedding")[5];
        for (input, table) in [(2, &tables[0]), (3, &tables[1])] {
            // Rows and columns of the picture, 8 angles each, change places.
            let place =
                |column: usize| if (8..24).contains(&column) { (column - 8 + 8) % 16 + 8 } else { column };
            let wrong = (0..128 * 32).map(|i| table[i / 32 * 32 + place(i % 32)]).collect::<Vec<_>>();
            let wrong =
                model.graph.add_constant(&format!("wrong{input}"), Tensor::from_f32(&[128, 32], &wrong));
            model.graph[rotation].inputs[input] = Some(wrong);
        }
        rotation
    });
    let folder = inputs.path().to_str().unwrap();
    planted.find(&[&within("80MiB")[..], &["--inputs", folder]].concat());
}

/// One row of many: what all rows together show of it is small.
#[test]
fn a_zeroed_pad_row() {
    let bundle = Checkpoint::klein_emoji().export("f32", &[]);
    let planted = Planted::in_stage(&bundle, "text_encoder", |model| {
        let residual = nodes(model, "Add")[8];
        let sum = model.graph[residual].output(0).unwrap();
        let whole = model.graph.value("whole");
        let rows: Vec<f32> = (0..64).map(|row| if row == 61 { 0.0 } else { 1.0 }).collect();
        let keep = model.graph.add_constant("keep", Tensor::from_f32(&[1, 64, 1], &rows));
        let zero = Node {
            op_type: "Mul".to_owned(),
            name: "zero".to_owned(),
            inputs: vec![Some(whole), Some(keep)],
            outputs: vec![Some(sum)],
            ..Node::default()
        };
        let mut before = model.graph[residual].clone();
        before.outputs = vec![Some(whole)];
        model.graph.replace_node(residual, vec![before, zero]);
        model.graph.producer(sum).unwrap()
    });
    let report = planted.find(&["--budget", "44MiB"]);
    assert_eq!(report["found"]["difference"]["row"], 61, "{report:#}");
    assert_eq!(report["found"]["between"].as_array().unwrap().len(), 2, "{report:#}");
}

/// A graph that torch exported, with integers and shapes computed inside.
#[test]
fn a_fault_in_a_graph_of_others() {
    let folder = fixture("foreign/transformer");
    let planted = Planted::in_graph(folder.join("dynamo.onnx"), |model| {
        let softmax = nodes(model, "Softmax")[1];
        model.graph[softmax].attributes = vec![("axis".to_owned(), Attribute::Int(-2))];
        softmax
    });
    let report = planted.find(&["--inputs", folder.to_str().unwrap()]);
    assert_eq!(report["found"]["unseen_before"], 0);
    assert_eq!(report["invented_inputs"], serde_json::json!([]));
}

#[test]
fn what_agrees_ends_with_0() {
    let folder = fixture("foreign/transformer");
    let run = |arguments: &[&str]| {
        let mut command = viaduct();
        command.arg("bisect").arg(folder.join("dynamo.onnx")).args(["--ep", "cpu", "--json"]);
        command.arg("--inputs").arg(&folder).args(arguments);
        verdict(command, 0)
    };
    let own = folder.join("dynamo.onnx");
    let report = run(&[own.to_str().unwrap()]);
    assert!(report["found"].is_null() && report["values"].as_u64() > Some(300), "{report:#}");
    assert_eq!(report["values"], report["compared"]);
    // `pred.npy` is the reference's result.
    let report = run(&["--oracle", folder.to_str().unwrap()]);
    assert_eq!(report["values"], 1);
    // What a rewrite leaves of its names.
    let rewritten = scratch();
    let lean = rewritten.path().join("lean.onnx");
    viaduct().arg("rewrite").arg(&own).arg("-o").arg(&lean).args(["--passes", "webgpu"]).assert().success();
    let report = run(&[lean.to_str().unwrap(), "--tolerance", "1e-3"]);
    assert!(report["values"].as_u64() > Some(80), "{report:#}");
}

/// The reference's inputs are fed stage by stage, and a block that is wrong is named by its label.
#[test]
fn a_bundle_against_reference_tensors() {
    let checkpoint = Checkpoint::of_fixture("flux2-a");
    let run = |bundle: &Bundle, stage: &str, code: i32| {
        let mut command = viaduct();
        command.arg("bisect").arg(bundle.path()).args(["--stage", stage, "--ep", "cpu", "--json"]);
        command.arg("--oracle").arg(oracle("flux2-a")).arg("--out").arg(bundle.path().with_file_name(stage));
        verdict(command, code)
    };
    let good = checkpoint.export("f32", &[]);
    for (stage, values) in [("text_encoder", 1), ("transformer", 8), ("vae_pre", 2)] {
        let report = run(&good, stage, 0);
        assert!(report["compared"].as_u64() >= Some(values), "{stage}: {report:#}");
        assert_eq!(report["invented_inputs"], serde_json::json!([]), "{stage}");
    }
    let bad = checkpoint.export_with_fault("f32", "rope_half_split");
    let report = run(&bad, "transformer", 3);
    let found = &report["found"];
    let between: Vec<&str> =
        found["between"].as_array().unwrap().iter().map(|node| node.as_str().unwrap()).collect();
    assert!(found["value"].as_str().unwrap().starts_with("dit_double0_"), "{found:#}");
    assert!(between.iter().any(|node| node.starts_with("RotaryEmbedding")), "{between:?}");
    assert_eq!(found["reproduction"]["shows"], true, "{found:#}");
    assert_eq!(shown(&report)["found"]["value"], found["value"]);
}

/// Weights that are stored otherwise: the first layer that is quantised is where runs part, if nearness is asked for.
#[test]
fn a_bundle_against_another_profile() {
    let checkpoint = Checkpoint::klein_emoji();
    let [q8, f16] = ["q8", "f16"].map(|profile| checkpoint.export(profile, &[]));
    let run = |tolerance: &str, code: i32| {
        let mut command = viaduct();
        command.arg("bisect").args([q8.path(), f16.path()]).args(["--stage", "transformer", "--ep", "cpu"]);
        command.args(["--tolerance", tolerance, "--json"]);
        command.arg("--out").arg(q8.path().with_file_name(format!("found-{tolerance}")));
        verdict(command, code)
    };
    let report = run("2e-3", 3);
    assert_eq!(report["found"]["node"]["op_type"], "MatMulNBits", "{report:#}");
    assert!(report["found"]["other"].as_str().unwrap().starts_with("MatMul_"), "{report:#}");
    assert_eq!(shown(&report)["found"]["node"]["op_type"], "MatMulNBits");
    // No layer is that far off by itself, and all of them together are.
    let report = run("1.5e-2", 3);
    let found = &report["found"];
    assert_eq!(found["reproduction"]["shows"], false, "{found:#}");
    let made = found["adds_up"].as_array().unwrap().iter().map(|made| made["node"].as_str().unwrap());
    assert!(
        made.clone().count() > 0 && made.clone().all(|node| node.starts_with("MatMulNBits")),
        "{found:#}"
    );
    let report = run("0.5", 0);
    assert!(report["values"].as_u64() > Some(300), "{report:#}");
}

/// Values behind a node that only one side has, each a bit off, so that the node is looked at with each of them.
#[test]
fn differences_add_up_behind_a_node_that_is_not_paired() {
    let graph = |shared: &str, factor: f32| {
        let mut graph = Builder::new("shared");
        let shape = [2, 16].map(Dim::Fixed);
        let x = graph.input("x", DType::F32, &shape);
        let between = graph.op(shared, &[x], &[]);
        let factor = graph.scalar(DType::F32, factor);
        let mut sum = between;
        for step in 0..6 {
            let scaled = graph.mul(between, factor);
            graph.label(scaled, &format!("scaled{step}_value"));
            let product = graph.mul(sum, scaled);
            sum = graph.op("Abs", &[product], &[]);
            graph.label(sum, &format!("sum{step}_value"));
        }
        graph.output(sum, "y", &shape);
        graph.finish()
    };
    let folder = scratch();
    let [a, b] = [("a", "Abs", 1.0 + 4e-5), ("b", "Relu", 1.0)].map(|(name, shared, factor)| {
        let path = folder.path().join(format!("{name}.onnx"));
        write_model(&graph(shared, factor), &path, &WriteOptions::default()).unwrap();
        path
    });
    let ones = HostTensor::f32(&[2, 16], vec![1.0; 32]);
    npy::write(&folder.path().join("x.npy"), Existing::Keep, &ones).unwrap();
    let mut command = viaduct();
    command.arg("bisect").args([&a, &b]).args(["--ep", "cpu", "--json", "--inputs"]).arg(folder.path());
    command.arg("--out").arg(folder.path().join("found"));
    let found = &verdict(command, 3)["found"];
    assert!(!found["adds_up"].as_array().unwrap().is_empty(), "{found:#}");
}

/// A fault beside the main path, too small to be seen on it until a difference of nearly equal values makes it large. What lies
/// before is too much to be compared as a whole, so that the value at fault is looked at only when it is found.
#[test]
fn a_fault_that_no_probe_looked_at_is_found() {
    const WIDTH: usize = 1 << 20;
    let graph = |factor: f32| {
        let mut graph = Builder::new("side");
        let shape = [1, WIDTH].map(Dim::Fixed);
        let x = graph.input("x", DType::F32, &shape);
        let factor = graph.scalar(DType::F32, factor);
        let side = graph.mul(x, factor);
        graph.label(side, "side");
        let share = graph.scalar(DType::F32, 1.0 / 256.0);
        let small = graph.mul(side, share);
        graph.label(small, "small");
        let mut main = graph.add(x, small);
        for step in 0..40 {
            main = graph.op("Abs", &[main], &[]);
            graph.label(main, &format!("main{step}"));
        }
        let near = graph.scalar(DType::F32, -0.9939);
        let difference = graph.add(main, near);
        graph.output(difference, "y", &shape);
        graph.finish()
    };
    let folder = scratch();
    let [a, b] = [("a", 1.0 + 2e-3), ("b", 1.0)].map(|(name, factor)| {
        let path = folder.path().join(format!("{name}.onnx"));
        write_model(&graph(factor), &path, &WriteOptions::default()).unwrap();
        path
    });
    let ones = HostTensor::f32(&[1, WIDTH], vec![1.0; WIDTH]);
    npy::write(&folder.path().join("x.npy"), Existing::Keep, &ones).unwrap();
    let mut command = viaduct();
    command.arg("bisect").args([&a, &b]).args(["--ep", "cpu", "--json", "--budget", "100MiB", "--inputs"]);
    command.arg(folder.path()).arg("--out").arg(folder.path().join("found"));
    let report = verdict(command, 3);
    assert_eq!(report["found"]["value"], "side", "{report:#}");
    assert!(report["compared"].as_u64() < report["values"].as_u64(), "{report:#}");
}

#[test]
fn a_prompt_gives_the_inputs_of_a_stage() {
    let bundle = Checkpoint::klein_emoji().export("f32", &[]);
    for stage in ["text_encoder", "transformer", "vae_attention"] {
        let mut command = viaduct();
        command.arg("bisect").args([bundle.path(), bundle.path()]).args(["--stage", stage, "--ep", "cpu"]);
        command.args(["--prompt", "red apple", "--json"]);
        let report = verdict(command, 0);
        assert_eq!(report["invented_inputs"], serde_json::json!([]), "{stage}");
        assert_eq!(report["values"], report["compared"], "{stage}");
    }
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let folder = fixture("foreign/transformer");
    let model = folder.join("dynamo.onnx");
    let refused = |arguments: &[&str], code: i32, says: &str| {
        let assert = viaduct().arg("bisect").arg(&model).args(arguments).assert().code(code);
        let error = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        assert!(error.contains(says), "{arguments:?}: {error}");
    };
    let own = model.to_str().unwrap();
    refused(&["--ep", "cpu"], 2, "both sides would be the same graph on the cpu provider");
    refused(&["--ep", "cpu", "--against", "auto"], 2, "name a provider, cpu or webgpu");
    refused(&["--ep", "cpu", own, "--size", "64x64"], 2, "--size is for bundles");
    refused(&["--ep", "cpu", own, "--prompt", "red apple"], 2, "--prompt is for bundles");
    refused(&["--ep", "cpu", own], 2, "--dim image_seq=N");
    refused(&["--ep", "cpu", own, "--dim", "rows=3"], 2, "rows");
    refused(&["--ep", "cpu", own, "--dim", "image_seq=24", "--budget", "1MiB"], 4, "more than the budget");
    refused(&["--ep", "cpu", own, "--stage", "transformer"], 2, "--stage is for bundles");
    refused(&["--ep", "cpu", own, "--tolerance", "-1"], 2, "--tolerance");
    refused(&["--ep", "cpu", own, "--inputs", "/nowhere"], 1, "/nowhere");
    refused(&["--ep", "cpu", "--oracle", own], 1, "dynamo.onnx");
    refused(&["--ep", "cpu", own, "--out", own, "--dim", "image_seq=4"], 2, "exists");
    let garbage = scratch();
    let file = garbage.path().join("file");
    fs::write(&file, "no folder").unwrap();
    refused(&["--ep", "cpu", own, "--force", "--out", file.to_str().unwrap()], 2, "is no folder");
    let inside = file.join("found");
    refused(&["--ep", "cpu", own, "--out", inside.to_str().unwrap()], 1, "cannot write");
    let path = garbage.path().join("garbage.onnx");
    fs::write(&path, [0x3a; 100]).unwrap();
    refused(&["--ep", "cpu", path.to_str().unwrap()], 1, "garbage.onnx");
    refused(&["--ep", "cpu", garbage.path().to_str().unwrap()], 1, "no bundle");
}

/// `y = a function of x`, whose size goes by this name.
fn sized(folder: &Path, file: &str, size: &str, op_type: &str) -> PathBuf {
    let mut graph = Builder::new("sized");
    let shape = [Dim::Symbol(size.to_owned()), Dim::Fixed(8)];
    let x = graph.input("x", DType::F32, &shape);
    let y = graph.op("Tanh", &[x], &[]);
    let y = graph.op(op_type, &[y], &[]);
    let path = folder.join(file);
    graph.output(y, "y", &shape);
    write_model(&graph.finish(), &path, &WriteOptions::default()).unwrap();
    path
}

/// A size that one graph has by name counts for the other, whose name for it is another.
#[test]
fn sizes_of_two_graphs_have_names_of_their_own() {
    let folder = scratch();
    let [a, b] = ["rows", "length"].map(|size| sized(folder.path(), &format!("{size}.onnx"), size, "Abs"));
    let run = |arguments: &[&str]| {
        let mut command = viaduct();
        command.arg("bisect").args([&a, &b]).args(["--ep", "cpu", "--json"]).args(arguments);
        command
    };
    for dim in ["rows=4", "length=4"] {
        assert_eq!(verdict(run(&["--dim", dim]), 0)["compared"], 2, "{dim}");
    }
    let neither = verdict(run(&["--dim", "width=4"]), 2);
    assert!(neither["error"].as_str().unwrap().contains("length, rows"), "{neither}");
    let open = verdict(run(&[]), 2);
    assert!(open["error"].as_str().unwrap().contains("graph A (rows): input x: rows has no size"), "{open}");
    let x = HostTensor::f32(&[8], vec![1.0; 8]);
    npy::write(&folder.path().join("x.npy"), Existing::Keep, &x).unwrap();
    let rank = verdict(run(&["--inputs", folder.path().to_str().unwrap()]), 2);
    assert!(rank["error"].as_str().unwrap().contains("takes [rows, 8], the given tensor has [8]"), "{rank}");
    fs::rename(folder.path().join("x.npy"), folder.path().join("z.npy")).unwrap();
    let unused = verdict(run(&["--dim", "rows=4", "--inputs", folder.path().to_str().unwrap()]), 2);
    assert!(unused["error"].as_str().unwrap().contains("the inputs are x"), "{unused}");
}

/// No file system takes the name of the folder that the reproduction is collected in.
#[test]
fn a_verdict_outlives_its_reproduction() {
    let folder = scratch();
    let [a, b] = ["Abs", "Neg"].map(|op| sized(folder.path(), &format!("{op}.onnx"), "rows", op));
    let mut command = viaduct();
    command.arg("bisect").args([&a, &b]).args(["--ep", "cpu", "--json", "--dim", "rows=4", "--out"]);
    command.arg(folder.path().join("x".repeat(250)));
    let output = command.assert().code(3).get_output().clone();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["found"]["value"], "y", "{report:#}");
    let problem = report["found"]["reproduction"]["unwritten"].as_str().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains(problem), "{problem}");
}

/// What agrees without a number on either side is told of.
#[test]
fn nothing_that_agrees_with_nothing_is_said() {
    let folder = scratch();
    let graph = sized(folder.path(), "graph.onnx", "rows", "Abs");
    for x in [HostTensor::f32(&[4, 8], vec![f32::NAN; 32]), HostTensor::f32(&[0, 8], Vec::new())] {
        npy::write(&folder.path().join("x.npy"), Existing::Replace, &x).unwrap();
        let mut command = viaduct();
        command.arg("bisect").args([&graph, &graph]).args(["--ep", "cpu", "--json", "--inputs"]);
        command.arg(folder.path());
        let output = command.assert().code(0).get_output().clone();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["nothing_in"].as_array().unwrap().len(), 2, "{report:#}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("show nothing"), "{:?}", x.shape);
    }
}

/// Inputs and values of types that the host does not hold, in the search and in the reproduction.
#[test]
fn truth_values_and_small_integers() {
    let graph = |negation: &str| {
        let mut graph = Builder::new("types");
        let shape = [2, 16].map(Dim::Fixed);
        let cond = graph.input("cond", DType::Bool, &shape);
        let count = graph.input("count", DType::I32, &[Dim::Fixed(1)]);
        let x = graph.input("x", DType::F32, &shape);
        let negated = graph.op(negation, &[cond], &[]);
        let [kept, count] = [negated, count].map(|value| graph.cast(value, DType::F32));
        let y = graph.mul(x, kept);
        let y = graph.add(y, count);
        let wide = graph.cast(y, DType::F64);
        let y = graph.cast(wide, DType::F32);
        graph.output(negated, "negated", &shape);
        graph.output(y, "y", &shape);
        graph.finish()
    };
    let folder = scratch();
    let good = folder.path().join("good.onnx");
    write_model(&graph("Not"), &good, &WriteOptions::default()).unwrap();
    let planted = Planted::in_graph(good, |model| {
        *model = graph("Identity");
        nodes(model, "Identity")[0]
    });
    let report = planted.find(&[]);
    assert_eq!(report["found"]["difference"]["differing"], 32, "{report:#}");
    assert_eq!(report["values"], 7, "{report:#}");
}

/// Attention over few rows, with nodes around it.
fn attention(rows: usize) -> Model {
    let mut graph = Builder::new("attention");
    let shape = [1, rows, 8].map(Dim::Fixed);
    let [x, k, v] = ["x", "k", "v"].map(|name| graph.input(name, DType::F32, &shape));
    let q = graph.op("Tanh", &[x], &[]);
    let heads = [("num_heads", Attribute::Int(1))];
    let y = graph.contrib("MultiHeadAttention", &[q, k, v], &heads);
    graph.label(y, "attended");
    let y = graph.add(y, x);
    graph.output(y, "y", &shape);
    graph.finish()
}

/// Software adapters compute the fused operator wrongly over more than some 32 rows; nothing tells bisect that. As the
/// graph is lowered for them, they do not.
#[test]
fn webgpu_fused_attention_of_a_software_adapter_is_found() {
    let Some(gpu) = webgpu() else { return };
    let software = gpu.runtime.device().kind == DeviceKind::Software;
    let folder = scratch();
    let path = folder.path().join("attention.onnx");
    write_model(&attention(40), &path, &WriteOptions::default()).unwrap();
    let run = |as_is: bool, code: i32| {
        let mut command = viaduct();
        command.arg("bisect").arg(&path).args(["--ep", "webgpu", "--json", "--out"]);
        command.arg(folder.path().join("found")).args(as_is.then_some("--as-is"));
        verdict(command, code)
    };
    assert!(run(false, 0)["found"].is_null());
    let report = run(true, if software { 3 } else { 0 });
    if software {
        let found = &report["found"];
        assert_eq!(found["node"]["op_type"], "MultiHeadAttention", "{found:#}");
        assert_eq!(found["value"], "attended");
        assert_eq!(found["reproduction"]["shows"], true, "{found:#}");
        assert_eq!(shown(&report)["found"]["node"]["op_type"], "MultiHeadAttention");
        assert!(fs::exists(folder.path().join("found/node.onnx")).unwrap());
    }
}

/// Everything that torch exports runs on both providers and agrees; what the device has no kernel for goes to the CPU.
#[test]
fn webgpu_a_graph_of_others_agrees_with_the_cpu() {
    let Some(_gpu) = webgpu() else { return };
    let folder = fixture("foreign/text_encoder");
    let mut command = viaduct();
    command.arg("bisect").arg(folder.join("dynamo.onnx")).args(["--ep", "webgpu", "--json"]);
    command.arg("--inputs").arg(&folder);
    let report = verdict(command, 0);
    assert!(report["compared"].as_u64() > Some(150), "{report:#}");
}
