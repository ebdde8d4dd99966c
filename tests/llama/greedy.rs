//! Text to tokens, and the likeliest tokens behind them.

use anyhow::{Result, anyhow};
use candle_core::{DType, Device};
use candle_transformers::generation::LogitsProcessor;

use crate::checkpoint::Checkpoint;
use crate::generate::{Generation, feed};
use crate::model::{Attention, KvCache, Llama};

pub fn encode(checkpoint: &Checkpoint, text: &str) -> Result<Vec<u32>> {
    let encoding = checkpoint
        .tokenizer
        .encode(text, true)
        .map_err(|error| anyhow!("{error}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// The type and device of a model.
pub fn place(checkpoint: &Checkpoint) -> (DType, Device) {
    let embed = &checkpoint.weights["model.embed_tokens.weight"];
    (embed.dtype(), embed.device().clone())
}

/// Fails unless the prompt, fed three tokens at a time, goes on with just these tokens.
pub fn assert_continues(checkpoint: &Checkpoint, prompt: &str, expected: &[u32]) -> Result<()> {
    let (dtype, device) = place(checkpoint);
    let config = &checkpoint.config;
    let model = Llama::new(checkpoint.weights.clone(), config, Attention::Flash)?;
    let tokens = encode(checkpoint, prompt)?;
    let capacity = tokens.len() + expected.len();
    let mut cache = KvCache::new(config, 1, capacity, dtype, &device)?;
    let logits = feed(&model, &mut cache, &tokens, Some(3), &device, |_| ())?;
    let generation = Generation {
        model: &model,
        tokenizer: &checkpoint.tokenizer,
        sampler: LogitsProcessor::new(0, None, None),
        stops: checkpoint.stop_tokens(),
        max_tokens: expected.len(),
    };
    let ids = generation.run(&mut cache, logits, |_| Ok(()))?;
    assert_eq!(
        ids,
        expected,
        "{prompt} in {dtype:?} on {:?}",
        device.location()
    );
    Ok(())
}
