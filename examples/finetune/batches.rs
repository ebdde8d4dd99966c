//! Sequences to train on and sequences to measure with.

use candle_core::{Device, Result, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::options::Options;

/// At most this many sequences make a measurement.
const HELD_OUT_SEQUENCES: usize = 8;

/// Tokens of all texts, split once; each step's sequences follow from the seed and the step alone, so
/// that a resumed run sees what an uninterrupted one would.
#[derive(Clone)]
pub struct Batches {
    train: Vec<u32>,
    held_out: Vec<u32>,
    batch: usize,
    accumulate: usize,
    seqlen: usize,
    seed: u64,
    device: Device,
}

impl Batches {
    /// Splits each text and joins the parts.
    pub fn new(texts: &[Vec<u32>], options: &Options, device: &Device) -> anyhow::Result<Self> {
        let seqlen = options.seqlen;
        let mut batches = Self {
            train: vec![],
            held_out: vec![],
            batch: options.batch,
            accumulate: options.accumulate,
            seqlen,
            seed: options.seed,
            device: device.clone(),
        };
        for text in texts {
            let split = text.len() - (text.len() as f64 * options.held_out).round() as usize;
            batches.train.extend(&text[..split]);
            batches.held_out.extend(&text[split..]);
        }
        for (part, tokens) in [
            ("training", &batches.train),
            ("held-out", &batches.held_out),
        ] {
            anyhow::ensure!(
                tokens.len() > seqlen,
                "the {part} part of the text has {} tokens, one sequence needs {}; lower --seqlen, change --held-out or give more text",
                tokens.len(),
                seqlen.saturating_add(1)
            );
        }
        let tokens = batches.train.len();
        anyhow::ensure!(
            options.batch.saturating_mul(seqlen) <= tokens,
            "--batch {} times --seqlen {seqlen} is more than the {tokens} tokens of the training part; lower one of them or give more text",
            options.batch
        );
        Ok(batches)
    }

    /// Inputs and targets of one micro-batch of a step, both `(batch, seqlen)`.
    pub fn train(&self, step: usize, micro_batch: usize) -> Result<(Tensor, Tensor)> {
        let index = step * self.accumulate + micro_batch;
        let mut rng = StdRng::seed_from_u64(self.seed.rotate_left(32) ^ index as u64);
        let last = self.train.len() - self.seqlen - 1;
        let starts: Vec<usize> = (0..self.batch)
            .map(|_| rng.random_range(0..=last))
            .collect();
        self.sequences(&self.train, &starts)
    }

    /// Inputs and targets for measuring, the same every time, spread over the held-out text.
    pub fn held_out(&self) -> impl Iterator<Item = Result<(Tensor, Tensor)>> {
        let last = self.held_out.len() - self.seqlen - 1;
        let count = (last / self.seqlen + 1).min(HELD_OUT_SEQUENCES);
        (0..count).map(move |i| {
            let start = if count > 1 { last * i / (count - 1) } else { 0 };
            self.sequences(&self.held_out, &[start])
        })
    }

    /// A few tokens to let a model continue, which it was not trained on.
    pub fn held_out_prompt(&self) -> &[u32] {
        &self.held_out[..self.seqlen.min(32)]
    }

    /// Tokens in the training part.
    pub fn train_tokens(&self) -> usize {
        self.train.len()
    }

    /// A checksum of all tokens and of where they are split.
    pub fn checksum(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        for part in [&self.train, &self.held_out] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            for token in part {
                hasher.update(&token.to_le_bytes());
            }
        }
        hasher.finalize()
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    fn sequences(&self, tokens: &[u32], starts: &[usize]) -> Result<(Tensor, Tensor)> {
        let shape = (starts.len(), self.seqlen);
        let shifted = |by: usize| {
            let tokens: Vec<u32> = starts
                .iter()
                .flat_map(|start| &tokens[start + by..start + by + self.seqlen])
                .copied()
                .collect();
            Tensor::from_vec(tokens, shape, &self.device)
        };
        Ok((shifted(0)?, shifted(1)?))
    }
}
