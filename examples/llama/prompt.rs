//! Which text the model continues.

use std::fs;

use anyhow::{Context, Result, anyhow, ensure};

use crate::args::Args;
use crate::checkpoint::Checkpoint;
use crate::data;

/// Tokens of the shipped text that make the default prompt.
const DEFAULT_PREFILL: usize = 1792;

pub struct Prompt {
    pub tokens: Vec<u32>,
    /// Where the text comes from.
    pub source: String,
    text: String,
}

impl Prompt {
    /// Reads, tokenises and cuts the text that the arguments name, and checks that it fits the model.
    pub fn new(args: &Args, checkpoint: &Checkpoint) -> Result<Self> {
        let [shipped, _] = data::texts();
        let (file, prefill) = match (&args.prompt, &args.prompt_file) {
            (Some(_), _) => (None, args.prefill),
            (None, Some(file)) => (Some(file), args.prefill),
            (None, None) => (Some(&shipped), args.prefill.or(Some(DEFAULT_PREFILL))),
        };
        let (source, text) = match (file, &args.prompt) {
            (Some(file), _) => {
                let name = file.display().to_string();
                let text =
                    fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
                (name, text)
            }
            (None, text) => ("--prompt".to_string(), text.clone().unwrap_or_default()),
        };

        let tokenizer = &checkpoint.tokenizer;
        let encoding = tokenizer
            .encode(text, true)
            .map_err(|error| anyhow!("cannot tokenise {source}: {error}"))?;
        let mut tokens = encoding.get_ids().to_vec();
        ensure!(
            !tokens.is_empty(),
            "{source} is empty, the model needs at least one token"
        );
        if let Some(prefill) = prefill {
            ensure!(
                prefill <= tokens.len(),
                "--prefill {prefill} asks for more tokens than {source} has ({})",
                tokens.len()
            );
            tokens.truncate(prefill);
        }

        let positions = checkpoint.config.max_position_embeddings;
        ensure!(
            tokens.len().saturating_add(args.sample_len) <= positions,
            "{} tokens of {source} and {} to generate are more than the model's {positions} positions; lower --prefill or --sample-len",
            tokens.len(),
            args.sample_len
        );
        let text = tokenizer
            .decode(&tokens, true)
            .map_err(|error| anyhow!("cannot decode the prompt: {error}"))?;
        Ok(Self {
            tokens,
            source,
            text,
        })
    }

    /// The last lines, to print before the continuation.
    pub fn end(&self) -> &str {
        let newlines = self.text.rmatch_indices('\n').map(|(at, _)| at + 1);
        &self.text[newlines.take(4).last().unwrap_or(0)..]
    }
}
