//! Which execution provider runs which node of a session.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char},
    ptr, slice,
};

use ort::{AsPointer, session::Session, sys};

/// The nodes of a session after ONNX Runtime's optimisations.
pub(super) struct Assignment {
    /// Their number by provider.
    pub nodes: BTreeMap<String, usize>,
    /// Those on the CPU provider, as `operator name`.
    pub on_cpu: Vec<String>,
}

/// Reads what a session with `session.record_ep_graph_assignment_info` has recorded.
pub(super) fn read(session: &Session) -> ort::Result<Assignment> {
    let api = ort::api();
    let mut assignment = Assignment { nodes: BTreeMap::new(), on_cpu: Vec::new() };
    // SAFETY: the session is live; arrays, subgraphs, nodes and texts belong to it and are only read before it ends.
    unsafe {
        let (mut subgraphs, mut count) = (ptr::null(), 0);
        check((api.Session_GetEpGraphAssignmentInfo)(session.ptr(), &mut subgraphs, &mut count))?;
        for &subgraph in array(subgraphs, count) {
            let mut name = ptr::null();
            check((api.EpAssignedSubgraph_GetEpName)(subgraph, &mut name))?;
            let provider = text(name);
            let (mut nodes, mut count) = (ptr::null(), 0);
            check((api.EpAssignedSubgraph_GetNodes)(subgraph, &mut nodes, &mut count))?;
            if provider == super::env::CPU {
                for &node in array(nodes, count) {
                    let (mut operator, mut name) = (ptr::null(), ptr::null());
                    check((api.EpAssignedNode_GetOperatorType)(node, &mut operator))?;
                    check((api.EpAssignedNode_GetName)(node, &mut name))?;
                    assignment.on_cpu.push(format!("{} {}", text(operator), text(name)));
                }
            }
            *assignment.nodes.entry(provider).or_default() += count;
        }
    }
    Ok(assignment)
}

/// # Safety
/// `status` must come from an ONNX Runtime call and not have been used yet.
unsafe fn check(status: sys::OrtStatusPtr) -> ort::Result<()> {
    // SAFETY: by the caller's promise.
    unsafe { ort::Error::result_from_status(status) }
}

/// # Safety
/// `first` must point to `count` live elements unless `count` is 0.
unsafe fn array<'a, T>(first: *const T, count: usize) -> &'a [T] {
    // SAFETY: by the caller's promise; an empty array may have a null pointer.
    if count == 0 { &[] } else { unsafe { slice::from_raw_parts(first, count) } }
}

/// # Safety
/// `chars` must point to a live zero-terminated text.
unsafe fn text(chars: *const c_char) -> String {
    // SAFETY: by the caller's promise.
    unsafe { CStr::from_ptr(chars) }.to_string_lossy().into_owned()
}
