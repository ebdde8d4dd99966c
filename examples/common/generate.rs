//! A prompt into a KV cache, and a continuation out of it.

use anyhow::{Context, Result, anyhow};
use candle_core::{Device, Tensor};
use candle_transformers::generation::LogitsProcessor;
use tokenizers::Tokenizer;

use crate::model::{KvCache, Llama};

/// Feeds tokens to a model, behind those that the cache already holds.
///
/// # Arguments
///
/// * `chunk`: how many tokens one forward pass takes; absent means all.
/// * `on_chunk`: called after each pass with the number of its tokens.
///
/// # Returns
///
/// The logits behind the last token, `(vocab_size)`.
pub fn feed(
    model: &Llama,
    cache: &mut KvCache,
    tokens: &[u32],
    chunk: Option<usize>,
    device: &Device,
    mut on_chunk: impl FnMut(usize),
) -> Result<Tensor> {
    let mut last = None;
    for part in tokens.chunks(chunk.unwrap_or(tokens.len()).max(1)) {
        let input = Tensor::new(part, device)?.unsqueeze(0)?;
        let hidden = model.hidden(&input, Some(cache))?;
        last = Some(hidden.narrow(1, part.len() - 1, 1)?);
        on_chunk(part.len());
    }
    let last = last.context("a prompt needs at least one token")?;
    Ok(model.logits(&last)?.flatten_all()?)
}

/// Where a continuation starts and ends, and how its tokens are chosen.
pub struct Generation<'a> {
    pub model: &'a Llama,
    pub tokenizer: &'a Tokenizer,
    pub sampler: LogitsProcessor,
    /// Tokens that end the text.
    pub stops: Vec<u32>,
    pub max_tokens: usize,
}

impl Generation<'_> {
    /// Continues the text in the cache, whose last logits are `logits`; hands each piece of text on as it
    /// comes and returns the tokens.
    pub fn run(
        mut self,
        cache: &mut KvCache,
        mut logits: Tensor,
        mut on_text: impl FnMut(&str) -> Result<()>,
    ) -> Result<Vec<u32>> {
        let device = logits.device().clone();
        let mut stream = self.tokenizer.decode_stream(true);
        let mut ids = vec![];
        while ids.len() < self.max_tokens {
            let id = self.sampler.sample(&logits)?;
            if self.stops.contains(&id) {
                break;
            }
            ids.push(id);
            let text = stream
                .step(id)
                .map_err(|error| anyhow!("cannot decode token {id}: {error}"))?;
            if let Some(text) = text {
                on_text(&text)?;
            }
            if ids.len() < self.max_tokens {
                logits = feed(self.model, cache, &[id], None, &device, |_| ())?;
            }
        }
        Ok(ids)
    }
}
