//! The peak of this process's resident memory, mapped file pages included (`VmHWM`).

use std::fs;

use super::memory::MemorySource;

/// Forgets the peak so far; what is resident now is the new one. Where the system refuses, the old one stays.
pub(super) fn restart() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Bytes, where the system tells.
pub(super) fn bytes() -> Option<u64> {
    Some(MemorySource::at("/").process(std::process::id())?.peak)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn touched_memory_counts_until_the_peak_is_forgotten() {
        super::restart();
        let before = super::bytes().unwrap();
        let touched = std::hint::black_box(vec![1u8; 64 << 20]);
        let with = super::bytes().unwrap();
        assert!(with >= before + (48 << 20), "{before} {with}");
        drop(touched);
        super::restart();
        assert!(super::bytes().unwrap() < with - (32 << 20));
    }
}
