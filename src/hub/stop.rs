use std::sync::atomic::{AtomicBool, Ordering};

/// Whether work is to end: because the user wishes it, or because some of it has failed.
pub(super) struct Stop<'a> {
    user: &'a AtomicBool,
    failed: AtomicBool,
}

impl<'a> Stop<'a> {
    pub(super) fn by(user: &'a AtomicBool) -> Stop<'a> {
        Stop { user, failed: AtomicBool::new(false) }
    }

    pub(super) fn is_asked(&self) -> bool {
        self.user.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn ask(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }
}
