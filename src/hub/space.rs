use std::{ffi::CString, os::unix::ffi::OsStrExt, path::Path};

/// Bytes that this user may still write where a folder is or would be; `None` if the system does not tell.
pub(super) fn free(folder: &Path) -> Option<u64> {
    let there = folder.ancestors().find(|folder| folder.is_dir())?;
    let path = CString::new(there.as_os_str().as_bytes()).ok()?;
    // SAFETY: all zeros are a valid value of the C structure, which the call fills; the path ends with a zero.
    let found = unsafe {
        let mut found: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(path.as_ptr(), &mut found) == 0).then_some(found)?
    };
    found.f_bavail.checked_mul(found.f_frsize)
}
