//! A model's configuration, tokenizer and weights from wherever they are.
//!
//! * [`folder`]: a Hugging Face folder (`config.json`, `tokenizer.json`, safetensors in one or more files);
//! * [`gguf`]: one GGUF file that holds all three;
//! * [`hub`]: `hf:ORG/NAME`, which fetches such a folder.
//!
//! Every failure is one line that names the file, what was found there and what to do about it.

pub mod config;
mod folder;
mod gguf;
mod hub;

use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::{Config, LlamaEosToks};
use tokenizers::Tokenizer;

use crate::model::weight_shapes;

/// What a model is made of, checked to fit together.
pub struct Checkpoint {
    pub config: Config,
    pub tokenizer: Tokenizer,
    /// By the names of [`weight_shapes`].
    pub weights: HashMap<String, Tensor>,
}

impl Checkpoint {
    /// Opens a GGUF file, a Hugging Face folder or `hf:ORG/NAME`, and converts the weights to `dtype`.
    pub fn open(source: &str, dtype: DType, device: &Device) -> Result<Self> {
        let path = Path::new(source);
        let checkpoint = if let Some(name) = source.strip_prefix("hf:") {
            folder::load(&hub::fetch(name)?, dtype, device)
        } else if path.is_dir() {
            folder::load(path, dtype, device)
        } else if path.is_file() {
            gguf::load(path, dtype, device)
        } else {
            bail!(
                "model {source} does not exist; give a GGUF file, a folder with config.json, or hf:ORG/NAME"
            )
        }?;
        checkpoint.check().with_context(|| source.to_string())?;
        Ok(checkpoint)
    }

    /// The tokens that end a text.
    pub fn stop_tokens(&self) -> Vec<u32> {
        match &self.config.eos_token_id {
            None => vec![],
            Some(LlamaEosToks::Single(id)) => vec![*id],
            Some(LlamaEosToks::Multiple(ids)) => ids.clone(),
        }
    }

    /// Checks that every weight is there with its shape, and that the tokenizer fits the embedding.
    fn check(&self) -> Result<()> {
        for (name, expected) in weight_shapes(&self.config) {
            let Some(weight) = self.weights.get(&name) else {
                bail!(
                    "weight {name} is missing (expected shape {expected:?}); the configuration and the weights are of different models, or a file is incomplete"
                );
            };
            ensure!(
                weight.dims() == expected,
                "weight {name} has shape {:?}, the configuration asks for {expected:?}; they are of different models",
                weight.dims()
            );
        }

        let vocab_size = self.config.vocab_size;
        let ids = self.tokenizer.get_vocab(true).into_values();
        let tokens = ids.max().map_or(0, |id| id as usize + 1);
        ensure!(
            tokens <= vocab_size,
            "the tokenizer has {tokens} tokens, the model only {vocab_size}; use the tokenizer.json that came with the model"
        );
        // Embeddings are padded to a round number of rows at most.
        ensure!(
            tokens * 10 >= vocab_size * 9,
            "the tokenizer has only {tokens} tokens, the model {vocab_size}; use the tokenizer.json that came with the model"
        );
        Ok(())
    }
}

/// An error's text to put inside of another one, without the backtrace that candle appends to it.
fn first_line(error: impl Display) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_string()
}
