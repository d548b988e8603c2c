//! Exports that begin before the weight files are there: the same bundle as of the whole checkpoint, written as the files come,
//! and nothing where one of them does not come.

use std::{
    collections::BTreeMap,
    error::Error,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread,
};

use safetensors::SafeTensors;
use serde_json::json;
use tempfile::TempDir;
use viaduct_export::{
    bundle::{ExportError, ExportEvent, ExportRequest, export, needed_files},
    weights::{Arrivals, Beginning, Checkpoint},
};

/// A checkpoint's folder in a temporary one.
struct Folder {
    root: PathBuf,
    _folder: TempDir,
}

/// The checkpoints of the tests, one of each family.
const CHECKPOINTS: [&str; 2] = ["bundles/klein-emoji/source", "tests/fixtures/qwen-image/model"];

impl Folder {
    /// A copy with each component in one file.
    fn single(checkpoint: &str) -> Folder {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("checkpoint");
        copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(checkpoint), &root);
        Folder { root, _folder: folder }
    }

    /// A copy with shards of the transformer and of the text encoder, of which no picture needs the third; the fourth is the
    /// table of embeddings.
    fn sharded(checkpoint: &str) -> Folder {
        let folder = Folder::single(checkpoint);
        folder.split("text_encoder", |name| match name {
            _ if name.contains("layers.6.") || name.ends_with("model.norm.weight") => 3,
            _ if name.contains("embed_tokens") => 4,
            _ if name.contains("layers.0.") => 1,
            _ => 2,
        });
        folder.split("transformer", |name| if name.starts_with("transformer_blocks.") { 1 } else { 2 });
        folder
    }

    fn split(&self, component: &str, shard_of: impl Fn(&str) -> usize) {
        let folder = self.root.join(component);
        let whole = weight_files(&folder).remove(0);
        let bytes = fs::read(&whole).unwrap();
        let mut shards = BTreeMap::new();
        let mut weight_map = serde_json::Map::new();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let shard = shard_name(shard_of(&name));
            weight_map.insert(name.clone(), json!(shard));
            shards.entry(shard).or_insert_with(Vec::new).push((name, view));
        }
        fs::remove_file(whole).unwrap();
        for (name, tensors) in shards {
            fs::write(folder.join(name), safetensors::serialize(tensors, None).unwrap()).unwrap();
        }
        let index = json!({ "metadata": {}, "weight_map": weight_map }).to_string();
        fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    }

    fn shard(&self, number: usize) -> PathBuf {
        self.root.join("text_encoder").join(shard_name(number))
    }
}

fn shard_name(number: usize) -> String {
    format!("model-{number:05}.safetensors")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let from = entry.unwrap().path();
        let to = to.join(from.file_name().unwrap());
        match from.is_dir() {
            true => copy(&from, &to),
            false => fs::copy(from, to).map(|_| ()).unwrap(),
        }
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

fn weight_files(folder: &Path) -> Vec<PathBuf> {
    files_below(folder)
        .into_iter()
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect()
}

/// Everything in a folder.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = files_below(folder).into_iter();
    files.map(|path| (path.strip_prefix(folder).unwrap().to_owned(), fs::read(path).unwrap())).collect()
}

type Reply = Sender<io::Result<()>>;

/// The weight files that were taken out of a checkpoint's folder. Another thread puts them back.
struct Held {
    files: BTreeMap<PathBuf, Vec<u8>>,
    expected: Mutex<Vec<PathBuf>>,
    /// Files in the order in which they were first waited for.
    waited: Mutex<Vec<PathBuf>>,
    carrier: Mutex<Sender<(PathBuf, Reply)>>,
}

impl Held {
    /// `carry` gives a file that is waited for, and what it is to hold, its name.
    fn back(folder: &Folder, carry: impl Fn(&Path, &[u8]) -> io::Result<()> + Send + 'static) -> Arc<Held> {
        let files: BTreeMap<PathBuf, Vec<u8>> = weight_files(&folder.root)
            .into_iter()
            .map(|path| {
                let bytes = fs::read(&path).unwrap();
                fs::remove_file(&path).unwrap();
                (path, bytes)
            })
            .collect();
        let (carrier, asked) = channel::<(PathBuf, Reply)>();
        let carried = files.clone();
        thread::spawn(move || {
            for (path, reply) in asked {
                reply.send(carry(&path, &carried[&path])).unwrap();
            }
        });
        let (expected, waited) = (Mutex::default(), Mutex::default());
        Arc::new(Held { files, expected, waited, carrier: Mutex::new(carrier) })
    }

    fn expected(&self) -> Vec<PathBuf> {
        self.expected.lock().unwrap().clone()
    }

    fn waited(&self) -> Vec<PathBuf> {
        self.waited.lock().unwrap().clone()
    }
}

/// Puts a file where it belongs.
fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes)?;
    fs::rename(part, path)
}

impl Arrivals for Held {
    fn names_in(&self, folder: &Path) -> Vec<String> {
        let held = self.files.keys().filter(|path| path.parent() == Some(folder) && !path.exists());
        held.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    fn beginning(&self, file: &Path) -> io::Result<Option<Beginning>> {
        Ok(self.files.get(file).map(|bytes| {
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            Beginning { header: bytes[..8 + header as usize].to_vec(), bytes: bytes.len() as u64 }
        }))
    }

    fn expect(&self, files: &[PathBuf]) {
        self.expected.lock().unwrap().extend_from_slice(files);
    }

    fn wait(&self, file: &Path) -> io::Result<()> {
        let mut waited = self.waited.lock().unwrap();
        if !waited.iter().any(|known| known == file) {
            waited.push(file.to_owned());
        }
        let (reply, answer) = channel();
        self.carrier.lock().unwrap().send((file.to_owned(), reply)).unwrap();
        answer.recv().unwrap()
    }
}

/// Exports to a folder `bundle` beside the checkpoint.
fn exported(
    folder: &Folder,
    arrivals: Option<&Arc<Held>>,
    profile: &str,
    progress: &mut dyn FnMut(ExportEvent),
) -> Result<PathBuf, ExportError> {
    let out = folder.root.with_file_name("bundle");
    let request = ExportRequest {
        source: &folder.root,
        arrivals: arrivals.map(|held| Arc::clone(held) as Arc<dyn Arrivals>),
        out: &out,
        recipe: None,
        profile,
        calibration: None,
        target_bytes: None,
        set: &[],
        force: false,
        fault: None,
    };
    export(&request, progress)?;
    Ok(out)
}

/// What an export fails with that leaves nothing behind but the checkpoint.
fn failed(folder: &Folder, held: &Arc<Held>) -> ExportError {
    let error = exported(folder, Some(held), "q8", &mut |_| ()).unwrap_err();
    let left = fs::read_dir(folder.root.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(left.collect::<Vec<_>>(), [folder.root.as_path()]);
    error
}

#[test]
fn what_arrives_late_makes_the_same_bundle() {
    for checkpoint in CHECKPOINTS {
        for form in [Folder::single, Folder::sharded] {
            for profile in ["f32", "q4"] {
                let folder = form(checkpoint);
                let whole = exported(&form(checkpoint), None, profile, &mut |_| ()).map(|out| contents(&out));
                let held = Held::back(&folder, put);
                let late = exported(&folder, Some(&held), profile, &mut |_| ()).unwrap();
                assert!(contents(&late) == whole.unwrap(), "{checkpoint} {profile}");
            }
        }
    }
}

/// The second shard comes only when a good part of the first is written.
#[test]
fn a_shard_is_written_while_the_next_is_on_its_way() {
    const PART: u64 = 16 << 10;
    for checkpoint in CHECKPOINTS {
        let folder = Folder::sharded(checkpoint);
        let (first, second) = (folder.shard(1), folder.shard(2));
        let [written, before] = [0, u64::MAX].map(|bytes| Arc::new(AtomicU64::new(bytes)));
        let seen = Arc::clone(&written);
        let held = Held::back(&folder, move |path, bytes| {
            let written = seen.load(Ordering::SeqCst);
            if path == first {
                before.store(written, Ordering::SeqCst);
            }
            if path == second && written < before.load(Ordering::SeqCst).saturating_add(PART) {
                return Err(io::Error::other("the first shard is not written"));
            }
            put(path, bytes)
        });
        let mut progress = |event| {
            if let ExportEvent::Bytes(bytes) = event {
                written.fetch_add(bytes, Ordering::SeqCst);
            }
        };
        exported(&folder, Some(&held), "q8", &mut progress).unwrap();
        assert!(held.waited().starts_with(&[folder.shard(1), folder.shard(2)]), "{checkpoint}");
    }
}

/// Files are expected before the first of them is waited for, in the order in which they are needed, and no others.
#[test]
fn what_nobody_needs_is_never_asked_for() {
    for checkpoint in CHECKPOINTS {
        let folder = Folder::sharded(checkpoint);
        let whole = needed_files(&folder.root, None, None, &[]).unwrap();
        let held = Held::back(&folder, put);
        let arrivals = Arc::clone(&held) as Arc<dyn Arrivals>;
        let needed = needed_files(&folder.root, Some(&arrivals), None, &[]).unwrap();
        assert!(held.waited().is_empty() && held.expected().is_empty(), "{checkpoint}");
        let mut expected_at_first = None;
        let mut progress = |event| {
            if let ExportEvent::Total { .. } = event {
                expected_at_first = Some((held.expected(), held.waited()));
            }
        };
        exported(&folder, Some(&held), "q8", &mut progress).unwrap();
        assert_eq!(expected_at_first, Some((needed.clone(), Vec::new())));
        assert_eq!((&held.expected(), &held.waited(), &whole), (&needed, &needed, &needed));
        let unneeded: Vec<&PathBuf> = held.files.keys().filter(|path| !needed.contains(path)).collect();
        assert_eq!(unneeded, [&folder.shard(3)]);
        assert!(!folder.shard(3).exists());
    }
}

/// Of files some are there already: those are not expected.
#[test]
fn what_is_there_is_not_waited_for() {
    let folder = Folder::sharded(CHECKPOINTS[0]);
    let held = Held::back(&folder, put);
    put(&folder.shard(1), &held.files[&folder.shard(1)]).unwrap();
    exported(&folder, Some(&held), "q8", &mut |_| ()).unwrap();
    assert!(!held.expected().contains(&folder.shard(1)) && held.expected().contains(&folder.shard(2)));
    assert_eq!(held.expected(), held.waited());
}

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the line is dead")]
struct LineDead;

/// An error of the implementation's own, wherever it stands in the chain.
fn own_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a LineDead> {
    let mut links = std::iter::successors(Some(error), |error| (*error).source());
    links.find_map(|link| link.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref())
}

/// Whichever it is: weights of stages and the table of embeddings are read at different places.
#[test]
fn a_file_that_does_not_come_ends_the_export() {
    for checkpoint in CHECKPOINTS {
        for number in 0..6 {
            let folder = Folder::sharded(checkpoint);
            let needed = needed_files(&folder.root, None, None, &[]).unwrap();
            assert_eq!(needed.len(), 6);
            let (dead, carried) = (&needed[number], needed[number].clone());
            let held = Held::back(&folder, move |path, bytes| {
                if path == carried { Err(io::Error::other(LineDead)) } else { put(path, bytes) }
            });
            let error = failed(&folder, &held);
            let message = error.to_string();
            assert!(message.contains(dead.to_str().unwrap()), "{message}");
            assert_eq!(own_error(&error), Some(&LineDead), "{message}");
            assert_eq!(held.waited(), needed[..=number]);
        }
    }
}

#[test]
fn a_beginning_that_cannot_be_read_ends_the_export() {
    struct Deaf;

    impl Arrivals for Deaf {
        fn names_in(&self, _: &Path) -> Vec<String> {
            vec!["model.safetensors".to_owned()]
        }
        fn beginning(&self, _: &Path) -> io::Result<Option<Beginning>> {
            Err(io::Error::other(LineDead))
        }
        fn expect(&self, _: &[PathBuf]) {}
        fn wait(&self, _: &Path) -> io::Result<()> {
            Ok(())
        }
    }

    let folder = Folder::single(CHECKPOINTS[0]);
    weight_files(&folder.root).iter().for_each(|path| fs::remove_file(path).unwrap());
    let arrivals = Arc::new(Deaf) as Arc<dyn Arrivals>;
    let error = needed_files(&folder.root, Some(&arrivals), None, &[]).unwrap_err();
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert_eq!(own_error(&error), Some(&LineDead));
}

/// A file that came is the one that was announced, or none.
#[test]
fn another_file_than_announced_is_refused() {
    type Change = fn(&mut Vec<u8>);
    let changes: [(&str, Change); 4] = [
        ("bytes have come", |bytes| bytes.push(0)),
        ("bytes have come", |bytes| bytes.truncate(bytes.len() - 1)),
        ("another header", |bytes| bytes[9] ^= 1),
        ("another header", |bytes| bytes[0] ^= 1),
    ];
    for (complaint, change) in changes {
        let folder = Folder::single(CHECKPOINTS[1]);
        let changed = weight_files(&folder.root.join("vae")).remove(0);
        let carried = changed.clone();
        let held = Held::back(&folder, move |path, bytes| {
            let mut bytes = bytes.to_vec();
            if path == carried {
                change(&mut bytes);
            }
            put(path, &bytes)
        });
        let message = failed(&folder, &held).to_string();
        assert!(message.contains(changed.to_str().unwrap()) && message.contains(complaint), "{message}");
    }
}

#[test]
fn a_file_that_is_said_to_be_there_must_be_there() {
    let folder = Folder::single(CHECKPOINTS[1]);
    let missing = weight_files(&folder.root.join("transformer")).remove(0);
    let absent = missing.clone();
    let held = Held::back(&folder, move |path, bytes| if path == absent { Ok(()) } else { put(path, bytes) });
    let message = failed(&folder, &held).to_string();
    assert!(message.contains(missing.to_str().unwrap()), "{message}");
}

/// Announced files, by path.
struct Announced(BTreeMap<PathBuf, Beginning>);

impl Arrivals for Announced {
    fn names_in(&self, folder: &Path) -> Vec<String> {
        let here = self.0.keys().filter(|path| path.parent() == Some(folder));
        here.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }
    fn beginning(&self, file: &Path) -> io::Result<Option<Beginning>> {
        Ok(self.0.get(file).cloned())
    }
    fn expect(&self, _: &[PathBuf]) {}
    fn wait(&self, _: &Path) -> io::Result<()> {
        Err(io::Error::other("nothing comes"))
    }
}

/// Name, header, and bytes after the header.
type Named<'a> = (&'a str, &'a str, u64);

/// The message of opening a folder in which these files are announced; empty if it can be opened.
fn opened(files: &[Named]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let announced = files.iter().map(|(name, header, bytes)| {
        let header = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        (folder.path().join(name), Beginning { bytes: header.len() as u64 + bytes, header })
    });
    let arrivals = Arc::new(Announced(announced.collect())) as Arc<dyn Arrivals>;
    Checkpoint::open_with(folder.path(), Some(&arrivals)).map_or_else(|e| e.to_string(), |_| String::new())
}

/// What is announced is checked like what is there.
#[test]
fn beginnings_are_checked_like_files() {
    const HEADER: &str = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    assert_eq!(opened(&[("a.safetensors", HEADER, 8)]), "");
    let usual = [("a.safetensors", HEADER, 8), ("model.safetensors", HEADER, 8)];
    assert_eq!(opened(&usual), "");
    let refused: [(&[Named], &str); 7] = [
        (&[], "no *.safetensors"),
        (&[("a.gguf", HEADER, 8)], "no *.safetensors"),
        (&[(".a.safetensors", HEADER, 8)], "no *.safetensors"),
        (&[("a.safetensors", HEADER, 8), ("b.safetensors", HEADER, 8)], "several weight files"),
        (&[("a.safetensors", HEADER, 7)], "truncated"),
        (&[("a.safetensors", HEADER, 9)], "1 bytes after the last tensor"),
        (&[("a.safetensors", "{", 8)], "bad header"),
    ];
    for (files, complaint) in refused {
        let message = opened(files);
        assert!(message.contains(complaint), "{message}");
    }
}

/// The whole header must be known; what is known beyond it does no harm.
#[test]
fn beginnings_reach_to_the_end_of_the_header() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let header = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let whole = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat();
    for known in 0..=whole.len() {
        let beginning = Beginning { header: whole[..known].to_vec(), bytes: whole.len() as u64 };
        let announced = Announced([(path.clone(), beginning)].into());
        let arrivals = Arc::new(announced) as Arc<dyn Arrivals>;
        let checkpoint = Checkpoint::open_with(folder.path(), Some(&arrivals));
        if known < 8 + header.len() {
            let message = checkpoint.unwrap_err().to_string();
            assert!(message.contains("model.safetensors: bad header: only"), "{message}");
            continue;
        }
        let tensor = checkpoint.unwrap().tensor("w", &[2]).unwrap();
        assert_eq!((tensor.bytes.len(), tensor.bytes.reads()), (8, None));
        let message = tensor.bytes.read().unwrap_err().to_string();
        assert!(message.contains("model.safetensors: nothing comes"), "{message}");
    }
}
