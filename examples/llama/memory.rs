//! Peak memory of this process, from the kernel's own books.

use std::fs;

/// Starts a new peak at the memory in use now, so that the next [`peak_bytes`] is about what happens
/// from here on. Returns the memory in use, or nothing where the system has no such books.
pub fn start_peak() -> Option<u64> {
    fs::write("/proc/self/clear_refs", "5").ok()?;
    status("VmRSS:")
}

/// The most memory that was resident since the last [`start_peak`].
pub fn peak_bytes() -> Option<u64> {
    status("VmHWM:")
}

/// A line such as `VmHWM:     1234 kB`, in bytes.
fn status(key: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}
