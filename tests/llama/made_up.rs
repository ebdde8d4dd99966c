//! What the tests of the two loaders share: a tokenizer for the tiny model, and ways to break a file.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow};
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::Config;
use tokenizers::Tokenizer;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::checkpoint::Checkpoint;
use crate::model::{Attention, Llama};
use crate::tiny;

/// The letters a to z and more make a vocabulary as large as the tiny model's, `he` and `the` included.
pub fn vocab() -> Vec<String> {
    let letters = ('a'..='z')
        .chain('A'..='Z')
        .chain('0'..='7')
        .map(String::from);
    letters
        .chain(["he".to_string(), "the".to_string()])
        .chain(["Ġ", "."].map(String::from))
        .collect()
}

pub fn merges() -> Vec<(String, String)> {
    vec![("h".into(), "e".into()), ("t".into(), "he".into())]
}

pub fn tokenizer() -> Result<Tokenizer> {
    let ids: Vocab = vocab().into_iter().zip(0..).collect();
    let bpe = BPE::builder()
        .vocab_and_merges(ids, merges())
        .build()
        .map_err(|error| anyhow!("{error}"))?;
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer
        .with_pre_tokenizer(Some(byte_level))
        .with_decoder(Some(byte_level));
    Ok(tokenizer)
}

pub fn open(path: &Path) -> Result<Checkpoint> {
    Checkpoint::open(&path.display().to_string(), DType::F32, &Device::Cpu)
}

pub fn logits(weights: HashMap<String, Tensor>, config: &Config) -> Result<Tensor> {
    let model = Llama::new(weights, config, Attention::Flash)?;
    let tokens = Tensor::new(tiny::tokens(config, 30), &Device::Cpu)?.unsqueeze(0)?;
    Ok(model.logits(&model.hidden(&tokens, None)?)?)
}

/// Leaves the first two thirds of a file.
pub fn truncate(file: &Path) -> Result<()> {
    let bytes = fs::read(file)?;
    Ok(fs::write(file, &bytes[..bytes.len() * 2 / 3])?)
}

/// Fails unless the error of opening says what is expected.
pub fn assert_refused(path: &Path, expected: &str) {
    match open(path) {
        Ok(_) => panic!("opened, expected {expected:?}"),
        Err(error) => {
            let message = format!("{error:#}");
            assert!(
                message.contains(expected),
                "{message:?} does not say {expected:?}"
            );
        }
    }
}
