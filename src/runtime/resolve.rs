//! Model files behind symbolic links.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use viaduct_export::onnx::{Bytes, MappedFile, Model, model_bytes};

use super::{
    Runtime, RuntimeError, Stage, StageModel,
    stage::{CpuNodes, Freedom, Optimisation},
};

impl Runtime {
    /// [`Runtime::open`] for a model whose weights stay in the files that it was read from.
    pub fn open_model(
        &mut self,
        name: &str,
        model: Model,
        pending_dispatches: u32,
    ) -> Result<Stage<'_>, RuntimeError> {
        self.open_model_with(name, model, pending_dispatches, CpuNodes::Refused)
    }

    /// [`Runtime::open_model`] for looking into a graph that may be anyone's: nodes may be left to the CPU, and ONNX Runtime
    /// changes no more of the graph than it is allowed to.
    pub fn open_for_inspection(
        &mut self,
        name: &str,
        model: Model,
        pending_dispatches: u32,
        optimisation: Optimisation,
    ) -> Result<Stage<'_>, RuntimeError> {
        self.check_f16(name, &model.graph)?;
        let freedom = Freedom { cpu_nodes: CpuNodes::Allowed, optimisation };
        self.open_model_with(name, model, pending_dispatches, freedom)
    }

    /// [`Runtime::open_model`] with the freedom that is given. The session does not borrow the runtime.
    pub(super) fn open_model_with(
        &mut self,
        name: &str,
        mut model: Model,
        pending_dispatches: u32,
        freedom: impl Into<Freedom>,
    ) -> Result<Stage<'static>, RuntimeError> {
        let failed = |reason: String| RuntimeError::Open { stage: name.to_owned(), reason };
        resolve_links(&mut model).map_err(|e| failed(e.to_string()))?;
        let unwritable = |e| RuntimeError::Write { stage: name.to_owned(), source: Box::new(e) };
        let bytes = model_bytes(&model).map_err(unwritable)?;
        let folder = model.folder.take().unwrap_or_else(|| PathBuf::from("."));
        // Maps of the weights; ONNX Runtime makes its own.
        drop(model);
        self.open_with(StageModel { name, bytes, folder: &folder, pending_dispatches }, freedom)
    }
}

/// Makes the model refer to its weights by the files that links lead to, and the model's folder the deepest one that
/// holds them all. ONNX Runtime refuses a file that a link leads to from outside the folder it is told of, which is
/// how a Hub cache looks: https://github.com/microsoft/onnxruntime/issues/27353
fn resolve_links(model: &mut Model) -> io::Result<()> {
    let mut files: HashMap<PathBuf, Arc<MappedFile>> = HashMap::new();
    let mut moved = Vec::new();
    for (id, value) in model.graph.values() {
        if let Some(Bytes::Mapped { file, range }) = value.constant.as_ref().map(|t| &t.bytes) {
            if !files.contains_key(&file.path) {
                files.insert(file.path.clone(), Arc::new(MappedFile::open(&file.path.canonicalize()?)?));
            }
            moved.push((id, Bytes::Mapped { file: Arc::clone(&files[&file.path]), range: range.clone() }));
        }
    }
    let mut folders = files.values().filter_map(|f| f.path.parent());
    let Some(first) = folders.next() else { return Ok(()) };
    model.folder = Some(folders.fold(first.to_owned(), |common, folder| shared(&common, folder)));
    for (id, bytes) in moved {
        if let Some(tensor) = &mut model.graph[id].constant {
            tensor.bytes = bytes;
        }
    }
    Ok(())
}

/// The deepest folder that holds both.
fn shared(a: &Path, b: &Path) -> PathBuf {
    a.components().zip(b.components()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}
