//! `hf:ORG/NAME`: fetches a folder through the hf-hub crate, which keeps it in its cache.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use hf_hub::api::sync::{ApiBuilder, ApiRepo};

use super::folder::{INDEX, files_of_index};

/// Fetches what [`folder::load`](super::folder::load) reads and returns the folder.
pub fn fetch(name: &str) -> Result<PathBuf> {
    ensure!(
        name.split('/').filter(|part| !part.is_empty()).count() == 2,
        "hf:{name} is not of the form hf:ORG/NAME"
    );
    let repo = ApiBuilder::from_env()
        .build()
        .context("cannot set up the hub's client")?
        .model(name.to_string());

    let config = get(&repo, name, "config.json")?;
    get(&repo, name, "tokenizer.json")?;
    // Only models in several files have an index.
    match repo.get(INDEX) {
        Ok(index) => {
            let text = fs::read_to_string(&index).with_context(|| index.display().to_string())?;
            for file in files_of_index(&text).with_context(|| index.display().to_string())? {
                get(&repo, name, &file)?;
            }
        }
        Err(_) => {
            get(&repo, name, "model.safetensors")?;
        }
    }
    Ok(config.parent().unwrap_or(Path::new(".")).to_path_buf())
}

fn get(repo: &ApiRepo, name: &str, file: &str) -> Result<PathBuf> {
    repo.get(file).with_context(|| {
        format!(
            "cannot fetch {file} of hf:{name}; check the name and the network, set HF_TOKEN for a gated model, or give a local folder"
        )
    })
}
