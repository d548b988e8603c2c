//! Which files make up a checkpoint: a single file, the shards of an index, or what a directory holds.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

use super::{Arrivals, WeightsError, read_json};

const WEIGHTS: &str = ".safetensors";
const INDEX: &str = ".safetensors.index.json";

/// The usual stems, in the order in which a directory is searched for them.
const STEMS: [&str; 2] = ["model", "diffusion_pytorch_model"];

/// Where the weights are.
pub enum Layout {
    Single(PathBuf),
    Sharded(Index),
}

/// A shard index: which tensor is in which file.
pub struct Index {
    pub path: PathBuf,
    /// Tensor names by shard name; shard names are checked and relative to the directory of the index.
    pub shards: BTreeMap<String, Vec<String>>,
}

/// Decides what `path` is: a weight file, an index, or a component directory with either.
pub fn locate(path: &Path, arrivals: Option<&Arc<dyn Arrivals>>) -> Result<Layout, WeightsError> {
    let metadata = fs::metadata(path).map_err(|source| WeightsError::Io { path: path.to_owned(), source })?;
    if metadata.is_dir() {
        return locate_in(path, &file_names(path, arrivals)?);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.ends_with(INDEX) {
        Ok(Layout::Sharded(read_index(path)?))
    } else if name.ends_with(WEIGHTS) {
        Ok(Layout::Single(path.to_owned()))
    } else {
        Err(WeightsError::UnknownKind { path: path.to_owned() })
    }
}

fn locate_in(dir: &Path, names: &[String]) -> Result<Layout, WeightsError> {
    let ending = |suffix: &str| names.iter().filter(|n| n.ends_with(suffix)).cloned().collect::<Vec<_>>();
    if let Some(name) = pick(dir, &ending(INDEX), INDEX)? {
        return Ok(Layout::Sharded(read_index(&dir.join(name))?));
    }
    match pick(dir, &ending(WEIGHTS), WEIGHTS)? {
        Some(name) => Ok(Layout::Single(dir.join(name))),
        None => Err(WeightsError::NoWeights { path: dir.to_owned() }),
    }
}

/// Weight files in a component's directory that are no part of its weights, such as a second copy or shards that the
/// index does not list. <https://github.com/Blaizzy/mlx-vlm/issues/1464>
pub fn ignored_files(dir: &Path, arrivals: Option<&Arc<dyn Arrivals>>) -> Result<Vec<PathBuf>, WeightsError> {
    let names = file_names(dir, arrivals)?;
    let layout = locate_in(dir, &names)?;
    let is_part = |name: &String| match &layout {
        Layout::Single(file) => *file == dir.join(name),
        Layout::Sharded(index) => index.shards.contains_key(name),
    };
    let ignored = names.iter().filter(|name| name.ends_with(WEIGHTS) && !is_part(name));
    Ok(ignored.map(|name| dir.join(name)).collect())
}

/// The only candidate, or the only one with a usual stem; `None` without candidates.
fn pick<'a>(dir: &Path, names: &'a [String], suffix: &str) -> Result<Option<&'a String>, WeightsError> {
    if let [] | [_] = names {
        return Ok(names.first());
    }
    let is_usual = |name: &&String| name.strip_suffix(suffix).is_some_and(|stem| STEMS.contains(&stem));
    match names.iter().filter(is_usual).collect::<Vec<_>>()[..] {
        [name] => Ok(Some(name)),
        _ => Err(WeightsError::Ambiguous { path: dir.to_owned(), files: names.to_vec() }),
    }
}

/// Names of the directory's files and of the weight files that it will have, sorted; hidden ones are left out.
fn file_names(dir: &Path, arrivals: Option<&Arc<dyn Arrivals>>) -> Result<Vec<String>, WeightsError> {
    let io = |source| WeightsError::Io { path: dir.to_owned(), source };
    let mut names = arrivals.map_or_else(Vec::new, |arrivals| arrivals.names_in(dir));
    names.retain(|name| name.ends_with(WEIGHTS));
    for entry in fs::read_dir(dir).map_err(io)? {
        names.extend(entry.map_err(io)?.file_name().into_string());
    }
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names.dedup();
    Ok(names)
}

fn read_index(path: &Path) -> Result<Index, WeightsError> {
    #[derive(Deserialize)]
    struct File {
        weight_map: WeightMap,
    }

    let WeightMap(map) = read_json::<File>(path)?.weight_map;
    let mut shards = BTreeMap::<String, Vec<String>>::new();
    for (tensor, shard) in map {
        if !is_inside(&shard) {
            return Err(WeightsError::UnsafeShard { path: path.to_owned(), tensor, shard });
        }
        shards.entry(shard).or_default().push(tensor);
    }
    if shards.is_empty() {
        return Err(WeightsError::BadIndex { path: path.to_owned(), reason: "`weight_map` is empty".into() });
    }
    Ok(Index { path: path.to_owned(), shards })
}

/// Whether a shard name stays below its directory. Judged by its spelling alone, so that the links of a download cache
/// are followed.
fn is_inside(shard: &str) -> bool {
    let plain = |c| matches!(c, Component::Normal(_));
    !shard.is_empty() && !shard.contains(['\0', '\\', ':']) && Path::new(shard).components().all(plain)
}

/// `weight_map`: tensor name to file name; refuses a tensor that is listed twice.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        struct MapVisitor;

        impl<'de> Visitor<'de> for MapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<WeightMap, A::Error> {
                let mut map = BTreeMap::new();
                while let Some((tensor, file)) = access.next_entry::<String, String>()? {
                    if map.contains_key(&tensor) {
                        return Err(A::Error::custom(format!("tensor `{tensor}` is listed twice")));
                    }
                    map.insert(tensor, file);
                }
                Ok(WeightMap(map))
            }
        }

        deserializer.deserialize_map(MapVisitor)
    }
}
