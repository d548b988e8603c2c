//! The provider's cache of buffers, simulated.
//!
//! WebGPU (core/providers/webgpu/buffer_manager.cc, webgpu_context.cc): a freed buffer waits until the commands that may
//! use it are submitted, which happens every few dispatches; then, in the mode `simple`, it can be taken again by who wants
//! exactly its size. The CPU provider returns memory at once, with its arena off.

use std::collections::BTreeMap;

/// Dispatches that are recorded before they are submitted, WebGPU's `maxNumPendingDispatches`, as the runtime usually
/// sets it. Fewer take less memory and more time.
pub const PENDING_DISPATCHES: u32 = 4;

/// What becomes of a freed buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// It is memory of the system again.
    Immediate,
    /// It is kept for the next tensor of its size, and free once so many dispatches are recorded.
    Kept { pending_dispatches: u32 },
}

#[derive(Debug)]
pub(super) struct Pool {
    policy: Policy,
    /// Free buffers by size.
    free: BTreeMap<u64, usize>,
    /// Freed since the last submission.
    waiting: Vec<u64>,
    recorded: u32,
    held: u64,
}

impl Pool {
    pub fn new(policy: Policy) -> Pool {
        Pool { policy, free: BTreeMap::new(), waiting: Vec::new(), recorded: 0, held: 0 }
    }

    /// Bytes of all buffers that exist.
    pub fn held(&self) -> u64 {
        self.held
    }

    pub fn take(&mut self, bytes: u64) {
        let size = self.size(bytes);
        match self.free.get_mut(&size).filter(|count| **count > 0) {
            Some(count) => *count -= 1,
            None => self.held = self.held.saturating_add(size),
        }
    }

    pub fn give(&mut self, bytes: u64) {
        let size = self.size(bytes);
        match self.policy {
            Policy::Immediate => self.held = self.held.saturating_sub(size),
            Policy::Kept { .. } => self.waiting.push(size),
        }
    }

    pub fn dispatch(&mut self, count: u32) {
        let Policy::Kept { pending_dispatches } = self.policy else { return };
        for _ in 0..count {
            self.recorded += 1;
            if self.recorded >= pending_dispatches {
                self.submit();
            }
        }
    }

    /// Submits what is recorded; buffers that waited for it are free.
    pub fn submit(&mut self) {
        self.recorded = 0;
        for size in std::mem::take(&mut self.waiting) {
            *self.free.entry(size).or_default() += 1;
        }
    }

    /// Buffers of WebGPU are multiples of 16 bytes.
    fn size(&self, bytes: u64) -> u64 {
        match self.policy {
            Policy::Immediate => bytes,
            Policy::Kept { .. } => bytes.checked_next_multiple_of(16).unwrap_or(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_buffer_is_reused_after_the_next_submission_only() {
        let mut pool = Pool::new(Policy::Kept { pending_dispatches: 3 });
        pool.take(100);
        pool.give(100);
        pool.dispatch(2);
        pool.take(100);
        assert_eq!(pool.held(), 224, "two buffers of 112 bytes: the first still waits");
        pool.dispatch(1);
        pool.take(100);
        assert_eq!(pool.held(), 224, "the first is taken again");
        pool.take(96);
        assert_eq!(pool.held(), 320, "another size is another buffer");
    }

    #[test]
    fn the_cpu_provider_returns_memory_at_once() {
        let mut pool = Pool::new(Policy::Immediate);
        pool.take(100);
        assert_eq!(pool.held(), 100);
        pool.give(100);
        assert_eq!(pool.held(), 0);
    }
}
