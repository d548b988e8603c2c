//! What parent and child say to each other: one JSON object per line.

use std::{collections::BTreeMap, ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};

use serde::{Deserialize, Serialize};
use viaduct_export::shapes::Sizes;

use crate::runtime::{Device, RuntimeOptions, Settings};

/// A path as the system has it, which need not be UTF-8.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PathBytes(Vec<u8>);

impl PathBytes {
    pub fn of(path: &Path) -> PathBytes {
        PathBytes(path.as_os_str().as_bytes().to_vec())
    }

    pub fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }
}

/// From the parent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(super) enum Request {
    /// Load the libraries and settle on a device. `exchange` is the folder of all tensors' files.
    Start {
        options: RuntimeOptions,
        exchange: PathBytes,
    },
    /// Open a stage before its turn, and keep it until [`Request::Open`] asks for it. There is no reply: what goes wrong is
    /// told then.
    OpenAhead(Open),
    Open(Open),
    Bind {
        name: String,
        tensor: TensorRef,
    },
    Run {
        inputs: Vec<(String, TensorRef)>,
        outputs: Vec<String>,
    },
    Close,
}

/// The stage that the parent wants opened, and how: see [`crate::runtime::Binding`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Open {
    pub bundle: String,
    pub stage: String,
    pub sizes: Sizes,
    pub exposed: Vec<String>,
    pub settings: Settings,
}

/// From the child: the answer to each request but [`Request::OpenAhead`], in order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub(super) enum Reply {
    Started {
        device: Box<Device>,
    },
    Opened {
        outputs: Vec<String>,
        nodes: BTreeMap<String, usize>,
    },
    Bound,
    Ran {
        tensors: Vec<TensorRef>,
    },
    /// Said before the session is dropped, which a driver may never let happen; [`Reply::Closed`] follows.
    Closing {
        /// Peak memory of the child since the stage was opened, bytes.
        peak: Option<u64>,
    },
    Closed,
    Failed {
        message: String,
        exit_code: u8,
    },
}

/// A tensor in a file of the exchange folder: raw elements, row-major.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TensorRef {
    /// File name, without folders.
    pub file: String,
    /// Number of the element type in `TensorProto.DataType`.
    pub dtype: i32,
    pub shape: Vec<usize>,
}
