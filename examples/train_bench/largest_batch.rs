//! The largest batch that a device has room for.

use anyhow::Result;

use crate::out_of_memory::is_out_of_memory;

/// Runs with `batch` sequences, then with half of them each time that memory runs out, by an error that says so or
/// by no result; nothing if not even one sequence fits.
pub fn largest_batch<T>(
    mut batch: usize,
    mut run: impl FnMut(usize) -> Result<Option<T>>,
) -> Result<Option<T>> {
    loop {
        let result = match run(batch) {
            Err(error) if is_out_of_memory(&error) => None,
            result => result?,
        };
        if result.is_some() || batch <= 1 {
            return Ok(result);
        }
        batch /= 2;
    }
}
