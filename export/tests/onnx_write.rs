//! The writer: layout, streaming, byte identity, and what it leaves behind when it fails.

mod onnx_support;

use std::{
    fs,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use onnx_support::*;
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use viaduct_export::onnx::{
    Attribute, Bytes, Compute, ComputeError, DType, Graph, Model, Node, Tensor, WriteOptions, model_bytes,
    read_model, read_model_bytes, write_model, write_model_with,
};

/// Parts of given lengths, all bytes `fill`; counts how often it is asked.
struct Parts {
    lens: Vec<usize>,
    fill: u8,
    fails: bool,
    calls: AtomicUsize,
}

impl Parts {
    fn new(fill: u8, lens: &[usize]) -> Arc<Parts> {
        Arc::new(Parts { lens: lens.to_vec(), fill, fails: false, calls: AtomicUsize::new(0) })
    }
}

impl Compute for Parts {
    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.fails {
            return Err("the checkpoint is damaged".into());
        }
        Ok(self.lens.iter().map(|len| vec![self.fill; *len]).collect())
    }
}

fn computed(source: &Arc<Parts>, part: usize, len: usize) -> Tensor {
    let source = Arc::clone(source) as Arc<dyn Compute>;
    Tensor { dtype: DType::U8, shape: vec![len], bytes: Bytes::Computed { source, part, len } }
}

fn bytes(graph: &Graph, name: &str) -> Vec<u8> {
    let tensor = graph[graph.find(name).unwrap()].constant.as_ref().unwrap();
    tensor.bytes.read().unwrap().into_owned()
}

#[test]
fn each_group_is_computed_once_and_lies_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let (a, b) = (Parts::new(1, &[5000, 100]), Parts::new(2, &[5000, 2000]));
    let model = model(|graph| {
        graph.add_constant("a.codes", computed(&a, 0, 5000));
        graph.add_constant("b.codes", computed(&b, 0, 5000));
        graph.add_constant("a.scales", computed(&a, 1, 100));
        graph.add_constant("b.scales", computed(&b, 1, 2000));
        let value = Attribute::Tensor(computed(&a, 1, 100));
        let output = Some(graph.value("constant"));
        graph.add_node(Node {
            op_type: "Constant".into(),
            outputs: vec![output],
            attributes: vec![("value".into(), value)],
            ..Node::default()
        });
    });
    let mut progress = 0;
    let summary =
        write_model_with(&model, &path, &WriteOptions::default(), &mut |bytes| progress += bytes).unwrap();
    assert_eq!((a.calls.load(Ordering::Relaxed), b.calls.load(Ordering::Relaxed)), (1, 1));
    assert_eq!(progress, model.constant_bytes());
    assert_eq!(progress, 5000 + 5000 + 100 + 2000 + 100);

    assert_eq!(files(folder.path()), ["m-00000.data", "m.onnx"]);
    for file in &summary.files {
        let content = fs::read(folder.path().join(&file.name)).unwrap();
        let sha256: String = Sha256::digest(&content).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!((file.bytes, &file.sha256), (content.len() as u64, &sha256));
    }
    let data = fs::read(folder.path().join("m-00000.data")).unwrap();
    let mut runs = data.clone();
    runs.dedup();
    assert_eq!(runs, [1, 0, 2, 0, 2], "a, padding, both parts of b");
    let again = read_model(&path).unwrap().graph;
    assert_eq!(bytes(&again, "a.codes"), [1; 5000]);
    assert_eq!(bytes(&again, "a.scales"), [1; 100]);
    assert_eq!(bytes(&again, "b.scales"), [2; 2000]);
    assert_others_accept(&path);
}

#[test]
fn shards_end_below_their_limit_and_large_tensors_start_on_pages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let lens = [3000, 70_000, 1024, 1023, 250_000, 90_000, 20_000];
    let model = model(|graph| {
        for (i, len) in lens.iter().enumerate() {
            graph.add_constant(&format!("w{i}"), Tensor::inline(DType::U8, &[*len], vec![i as u8 + 1; *len]));
        }
    });
    let options = WriteOptions { shard_bytes: 100_000, ..WriteOptions::default() };
    let summary = write_model(&model, &path, &options).unwrap();
    let sizes: Vec<(&str, u64)> = summary.files.iter().map(|f| (f.name.as_str(), f.bytes)).collect();
    assert_eq!(
        sizes[..3],
        [
            // 3000, padded to 4096, 70000, padded to 74112, 1024
            ("m-00000.data", 74_112 + 1024),
            // Larger than a shard: alone.
            ("m-00001.data", 250_000),
            ("m-00002.data", 90_000),
        ]
    );
    assert_eq!(sizes[3], ("m-00003.data", 20_000));
    assert_eq!(sizes[4].0, "m.onnx");
    let again = read_model(&path).unwrap();
    for (i, len) in lens.iter().enumerate() {
        let tensor = again.graph[again.graph.find(&format!("w{i}")).unwrap()].constant.as_ref().unwrap();
        assert_eq!(*tensor.bytes.read().unwrap(), vec![i as u8 + 1; *len]);
        match &tensor.bytes {
            Bytes::Mapped { range, .. } => assert_eq!(range.start % if *len >= 65536 { 4096 } else { 64 }, 0),
            other => assert!(*len < 1024, "{other:?}"),
        }
    }
    assert_others_accept(&path);
}

#[test]
fn equal_models_give_equal_files_and_a_rewrite_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let build = || {
        model(|graph| {
            let parts = Parts::new(7, &[5000, 3000]);
            for i in 0..50 {
                graph.add_constant(&format!("w{i}"), Tensor::from_f32(&[700], &[i as f32; 700]));
                graph.add_constant(&format!("s{i}"), Tensor::from_i64(&[2], &[i, -i]));
            }
            graph.add_constant("p1", computed(&parts, 1, 3000));
            graph.add_constant("p0", computed(&parts, 0, 5000));
        })
    };
    let mut summaries = Vec::new();
    for name in ["first", "second"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        let path = folder.path().join(name).join("m.onnx");
        summaries.push(write_model(&build(), &path, &WriteOptions::default()).unwrap());
    }
    // In place: the old files stay mapped while the new ones take their names.
    let path = folder.path().join("second/m.onnx");
    let model = read_model(&path).unwrap();
    summaries.push(write_model(&model, &path, &WriteOptions::default()).unwrap());
    assert_eq!(summaries[0], summaries[1]);
    assert_eq!(summaries[0], summaries[2]);
    assert_eq!(files(&folder.path().join("second")), ["m-00000.data", "m.onnx"]);
}

#[test]
fn a_model_in_memory_refers_to_the_files_of_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let large = vec![1.5; 4000];
    let original = model(|graph| {
        graph.add_constant("large", Tensor::from_f32(&[4000], &large));
        graph.add_constant("small", Tensor::from_i64(&[1], &[5]));
    });
    write_model(&original, &path, &WriteOptions::default()).unwrap();
    let mut lowered = read_model(&path).unwrap();
    lowered.graph.add_constant("new", Tensor::from_f32(&[2000], &[2.0; 2000]));
    let message = model_bytes(&lowered).unwrap();
    assert!(message.len() > 8000 && message.len() < 9000, "{}", message.len());
    let again = read_model_bytes(message.into(), Some(folder.path())).unwrap();
    for (name, mapped) in [("large", true), ("small", false), ("new", false)] {
        let tensor = again.graph[again.graph.find(name).unwrap()].constant.as_ref().unwrap();
        assert_eq!(matches!(tensor.bytes, Bytes::Mapped { .. }), mapped, "{name}");
        assert_eq!(bytes(&again.graph, name), bytes(&lowered.graph, name));
    }
    lowered.folder = Some(folder.path().join("elsewhere"));
    let complaint = model_bytes(&lowered).unwrap_err().to_string();
    assert!(complaint.contains("initializer 'large'") && complaint.contains("elsewhere"), "{complaint}");
}

/// Writes a model with three good tensors and the given one, and returns the complaint; nothing may be left.
fn failed(tensor: Tensor) -> String {
    let folder = tempfile::tempdir().unwrap();
    let model = model(|graph| {
        for i in 0..3 {
            graph.add_constant(&format!("w{i}"), Tensor::from_f32(&[5000], &[1.0; 5000]));
        }
        graph.add_constant("bad", tensor);
    });
    let options = WriteOptions { shard_bytes: 30_000, ..WriteOptions::default() };
    let complaint = write_model(&model, &folder.path().join("m.onnx"), &options).unwrap_err().to_string();
    assert_eq!(files(folder.path()), [""; 0]);
    complaint
}

#[test]
fn a_failure_leaves_nothing_behind() {
    let parts =
        |fails| Arc::new(Parts { lens: vec![5000, 4999], fill: 1, fails, calls: AtomicUsize::new(0) });
    let complaint = failed(computed(&parts(true), 0, 5000));
    assert_eq!(complaint, "initializer 'bad' could not be computed: the checkpoint is damaged");
    let complaint = failed(computed(&parts(false), 2, 5000));
    assert_eq!(complaint, "initializer 'bad' is part 2 of a computation that gave 2 parts");
    let complaint = failed(computed(&parts(false), 1, 5000));
    assert!(
        complaint.starts_with("initializer 'bad' has 4999 bytes where U8 [5000] asks for 5000"),
        "{complaint}"
    );
    let complaint = failed(Tensor::inline(DType::F32, &[3], vec![0; 11]));
    assert!(complaint.starts_with("initializer 'bad' has 11 bytes where F32 [3] asks for 12"), "{complaint}");
}

#[test]
fn invalid_graphs_and_paths_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let invalid = model(|graph| node(graph, "Relu", &["nowhere"], &["z"]));
    let complaint = write_model(&invalid, &folder.path().join("m.onnx"), &WriteOptions::default());
    assert!(complaint.unwrap_err().to_string().contains("nothing defines it"));
    assert!(model_bytes(&invalid).is_err());

    let valid = model(|graph| {
        graph.add_constant("w", Tensor::from_f32(&[5000], &[1.0; 5000]));
    });
    fs::write(folder.path().join("file"), "").unwrap();
    fs::create_dir(folder.path().join("directory.onnx")).unwrap();
    for (path, names, words) in [
        ("absent/m.onnx", "absent/m-00000.data", "No such file"),
        ("file/m.onnx", "file/m-00000.data", "Not a directory"),
        ("directory.onnx", "directory.onnx", "directory"),
        ("back\\slash.onnx", "back\\slash.onnx", "backslash"),
        ("..", "..", "cannot name a model"),
    ] {
        let path = folder.path().join(path);
        let complaint = write_model(&valid, &path, &WriteOptions::default()).unwrap_err().to_string();
        let names = folder.path().join(names).display().to_string();
        assert!(complaint.contains(&names) && complaint.contains(words), "{complaint}");
        assert!(!complaint.contains(".part"), "{complaint}");
    }
    assert_eq!(files(folder.path()), ["directory.onnx", "file"], "the data file is taken back");
}

/// A full disk, in effect: the process may not write files beyond 100 KiB.
#[cfg(unix)]
#[test]
fn a_write_that_the_system_refuses_names_the_file() {
    const FOLDER: &str = "VIADUCT_TEST_LIMITED_FOLDER";
    const NAME: &str = "a_write_that_the_system_refuses_names_the_file";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let model = model(|graph| {
            graph.add_constant("w", Tensor::from_f32(&[100_000], &[1.0; 100_000]));
        });
        let error =
            write_model(&model, &Path::new(&folder).join("m.onnx"), &WriteOptions::default()).unwrap_err();
        let complaint = error.to_string();
        assert!(complaint.contains("m-00000.data: File too large"), "{complaint}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let test = std::env::current_exe().unwrap();
    let script = "trap '' XFSZ; ulimit -f 100; exec \"$0\" --exact \"$1\"";
    let mut command = Command::new("bash");
    command.args(["-c", script]).arg(test).arg(NAME).env(FOLDER, folder.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(files(folder.path()), [""; 0]);
}

#[cfg(unix)]
#[test]
fn files_are_as_readable_as_others() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    fs::write(&plain, "").unwrap();
    let path = folder.path().join("m.onnx");
    write_model(&model(|_| ()), &path, &WriteOptions::default()).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path), mode(&plain));
}

fn tensors() -> impl Strategy<Value = Tensor> {
    // All types of ONNX but strings.
    let dtype = prop_oneof![1..=7, 9..=24].prop_map(DType::from_onnx);
    (dtype, prop::collection::vec(0usize..7, 0..4)).prop_flat_map(|(dtype, shape)| {
        let len = dtype.byte_len(&shape).unwrap();
        prop::collection::vec(any::<u8>(), len).prop_map(move |bytes| Tensor::inline(dtype, &shape, bytes))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn tensors_survive(tensors in prop::collection::vec(tensors(), 0..12), inline_below in 0usize..200) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.onnx");
        let model: Model = model(|graph| for (i, tensor) in tensors.iter().enumerate() {
            graph.add_constant(&format!("w{i}"), tensor.clone());
        });
        let options = WriteOptions { inline_below, shard_bytes: 500 };
        write_model(&model, &path, &options).unwrap();
        let again = read_model(&path).unwrap();
        let in_memory = read_model_bytes(model_bytes(&again).unwrap().into(), Some(folder.path())).unwrap();
        for (i, tensor) in tensors.iter().enumerate() {
            for graph in [&again.graph, &in_memory.graph] {
                let read = graph[graph.find(&format!("w{i}")).unwrap()].constant.as_ref().unwrap();
                prop_assert_eq!((read.dtype, &read.shape), (tensor.dtype, &tensor.shape));
                prop_assert_eq!(read.bytes.read().unwrap(), tensor.bytes.read().unwrap());
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = read_model_bytes(bytes.into(), None);
    }
}

/// Files of killed processes are told from those of living ones by a lock.
#[test]
fn abandoned_files_go_with_the_next_write_and_living_ones_stay() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(|graph| {
        graph.add_constant("w", Tensor::from_f32(&[5000], &[1.0; 5000]));
    });
    let path = |name: &str| folder.path().join(name);
    fs::write(path(".others.part"), "theirs").unwrap();
    let mut seen = None;
    write_model_with(&model, &path("m.onnx"), &WriteOptions::default(), &mut |_| {
        let parts = files(folder.path()).into_iter().filter(|name| name.ends_with(".part"));
        let own = parts.filter(|name| !name.starts_with(".others")).collect::<Vec<_>>();
        let [living] = &own[..] else { panic!("{own:?}") };
        let (start, _) = living.rsplit_once('-').unwrap();
        let dead = format!("{start}-killed.part");
        fs::copy(path(living), path(&dead)).unwrap();
        write_model(&model, &path("n.onnx"), &WriteOptions::default()).unwrap();
        assert!(path(living).exists() && !path(&dead).exists());
        seen = Some(living.clone());
    })
    .unwrap();
    assert!(seen.is_some());
    let expected = [".others.part", "m-00000.data", "m.onnx", "n-00000.data", "n.onnx"];
    assert_eq!(files(folder.path()), expected);
}
