//! A Hugging Face folder.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::{Checkpoint, config, first_line};
use crate::model::weight_shapes;

/// Lists the weights' files when there are several.
pub const INDEX: &str = "model.safetensors.index.json";

/// Reads `config.json`, `tokenizer.json`, and `model.safetensors` or the files of [`INDEX`].
pub fn load(folder: &Path, dtype: DType, device: &Device) -> Result<Checkpoint> {
    let path = folder.join("config.json");
    let config = read(&path).and_then(|text| config::parse(&text).with_context(|| show(&path)))?;

    let path = folder.join("tokenizer.json");
    read(&path)?;
    let tokenizer = Tokenizer::from_file(&path)
        .map_err(|error| anyhow!("{}: not a tokenizer: {error}", path.display()))?;

    let mut weights = HashMap::new();
    let wanted: BTreeSet<String> = weight_shapes(&config)
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    for file in weight_files(folder)? {
        let tensors = load_file(&file, &wanted, dtype, device).with_context(|| show(&file))?;
        weights.extend(tensors);
    }
    Ok(Checkpoint {
        config,
        tokenizer,
        weights,
    })
}

/// The names of the weights' files that an index lists.
pub fn files_of_index(text: &str) -> Result<BTreeSet<String>> {
    let json: Value = serde_json::from_str(text).context("not valid JSON")?;
    let map = json["weight_map"]
        .as_object()
        .context("no weight_map; fetch the file again")?;
    Ok(map
        .values()
        .filter_map(|file| file.as_str().map(String::from))
        .collect())
}

fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if !index.exists() {
        let single = folder.join("model.safetensors");
        ensure!(
            single.exists(),
            "{} has neither model.safetensors nor {INDEX}; convert other formats to safetensors first",
            folder.display()
        );
        return Ok(vec![single]);
    }
    let files =
        read(&index).and_then(|text| files_of_index(&text).with_context(|| show(&index)))?;
    files
        .into_iter()
        .map(|name| {
            let file = folder.join(&name);
            ensure!(
                file.exists(),
                "{} does not exist, but {INDEX} lists it; fetch it too",
                file.display()
            );
            Ok(file)
        })
        .collect()
}

/// The wanted tensors of one safetensors file.
fn load_file(
    file: &Path,
    wanted: &BTreeSet<String>,
    dtype: DType,
    device: &Device,
) -> Result<HashMap<String, Tensor>> {
    // SAFETY: the mapping lives to the end of this function; as with any memory map, nobody may write
    // to the file in the meantime.
    let tensors = unsafe { MmapedSafetensors::new(file) }.map_err(|error| {
        anyhow!(
            "truncated or not safetensors; fetch it again ({})",
            first_line(error)
        )
    })?;
    let names = tensors.tensors().into_iter().map(|(name, _)| name);
    names
        .filter(|name| wanted.contains(name))
        .map(|name| {
            let weight = tensors.load(&name, device)?.to_dtype(dtype)?;
            Ok((name, weight))
        })
        .collect()
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn show(path: &Path) -> String {
    path.display().to_string()
}
