//! What a GPU without room says.

use anyhow::Error;

/// Whether an error says so: one of the driver, or of cuBLAS, whose workspace is memory too.
pub fn is_out_of_memory(error: &Error) -> bool {
    let text = format!("{error:#}");
    ["out of memory", "CUBLAS_STATUS_ALLOC_FAILED"]
        .iter()
        .any(|status| text.contains(status))
}
