//! What `examples/data` ships: a small trained model and the texts that it was trained on.

use std::path::{Path, PathBuf};

/// The folder of the shipped model, in the layout of a Hugging Face checkpoint.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data")
}

/// The shipped texts.
pub fn texts() -> [PathBuf; 2] {
    ["asyoulik.txt", "alice29.txt"].map(|name| folder().join(name))
}
