//! What defines a run: with the same options it takes the same steps, whether interrupted or not.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use candle_core::{DType, Device};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::model::Attention;
use crate::numbers::{at_least_one, at_least_zero};

#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct Options {
    /// Start from a GGUF file, a Hugging Face folder, or hf:ORG/NAME [default: the model in examples/data]
    #[arg(long, value_name = "PATH|hf:ORG/NAME", conflicts_with = "scratch")]
    pub model: Option<String>,

    /// Start from random weights and a tokenizer trained on the text
    #[arg(long)]
    pub scratch: bool,

    #[command(flatten)]
    pub size: Size,

    /// Text to train on, may be given several times [default: the texts in examples/data]
    #[arg(long, value_name = "FILE")]
    pub text: Vec<PathBuf>,

    /// The share at the end of each text that is kept for measuring
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 0.05,
        allow_negative_numbers = true
    )]
    pub held_out: f64,

    /// Train adapters of this rank in place of all weights; saved merged
    #[arg(long, value_name = "RANK", value_parser = at_least_one, allow_negative_numbers = true, conflicts_with = "scratch")]
    pub lora: Option<usize>,

    /// Which projections get adapters
    #[arg(long, value_enum, default_value_t = LoraOn::QV, requires = "lora")]
    pub lora_on: LoraOn,

    /// Which attention to train through
    #[arg(long, value_enum, default_value_t = Attention::Flash)]
    pub attention: Attention,

    /// Tokens of one sequence
    #[arg(long, default_value_t = 256, value_parser = at_least_one, allow_negative_numbers = true)]
    pub seqlen: usize,

    /// Sequences of one micro-batch
    #[arg(long, default_value_t = 2, value_parser = at_least_one, allow_negative_numbers = true)]
    pub batch: usize,

    /// Micro-batches of one step, one after the other; their gradients are summed in f32
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, allow_negative_numbers = true)]
    #[serde(default = "one")]
    pub accumulate: usize,

    /// Keep each block's input alone for the backward and compute its inside again: less memory, more time
    #[arg(long)]
    #[serde(default)]
    pub recompute: bool,

    /// Optimiser steps
    #[arg(long, default_value_t = 30, value_parser = at_least_one, allow_negative_numbers = true)]
    pub steps: usize,

    /// Highest learning rate; a tenth of it is left at the end, along a cosine
    #[arg(long, default_value_t = 3e-4, allow_negative_numbers = true)]
    pub lr: f64,

    /// Steps over which the learning rate rises to its highest
    #[arg(long, value_name = "STEPS", default_value_t = 10, value_parser = at_least_zero, allow_negative_numbers = true)]
    pub warmup: usize,

    /// AdamW's decay of matrices
    #[arg(long, default_value_t = 0.1, allow_negative_numbers = true)]
    pub weight_decay: f64,

    /// Largest norm of the gradient, longer ones are scaled down to it
    #[arg(
        long,
        value_name = "NORM",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub clip: f64,

    /// Type of the saved weights; what --resume needs is kept in f32
    #[arg(long, value_name = "DTYPE", value_enum, default_value_t = SaveDtype::F32)]
    pub save_dtype: SaveDtype,

    /// Seed of random weights and of the choice of sequences
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pub seed: u64,

    /// What the model computes in, as [`Options::compute_dtype`] chose it; absent in runs that were started before it
    /// was saved.
    #[arg(skip)]
    #[serde(default)]
    pub dtype: Option<ComputeDtype>,
}

/// The model that `--scratch` makes; the defaults are those of the one in `examples/data`.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct Size {
    /// Tokens of the vocabulary (--scratch)
    #[arg(long, default_value_t = 3072, value_parser = at_least_one, allow_negative_numbers = true, requires = "scratch")]
    pub vocab: usize,

    /// Blocks (--scratch)
    #[arg(long, default_value_t = 4, value_parser = at_least_one, allow_negative_numbers = true, requires = "scratch")]
    pub layers: usize,

    /// Width of the hidden state (--scratch)
    #[arg(long, default_value_t = 192, value_parser = at_least_one, allow_negative_numbers = true, requires = "scratch")]
    pub hidden: usize,

    /// Width inside the MLP (--scratch)
    #[arg(long, default_value_t = 448, value_parser = at_least_one, allow_negative_numbers = true, requires = "scratch")]
    pub ffn: usize,

    /// Query heads (--scratch)
    #[arg(long, default_value_t = 6, value_parser = at_least_one, allow_negative_numbers = true, requires = "scratch")]
    pub heads: usize,

    /// Key/value heads (--scratch)
    #[arg(long, default_value_t = 2, value_parser = at_least_one, allow_negative_numbers = true, requires = "scratch")]
    pub kv_heads: usize,

    /// Longest text that the model is meant for (--scratch)
    #[arg(long, default_value_t = 2048, value_parser = at_least_one, allow_negative_numbers = true, requires = "scratch")]
    pub positions: usize,
}

/// Which projections `--lora` adapts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum LoraOn {
    /// q_proj and v_proj
    #[value(name = "qv")]
    QV,
    /// All seven projections of each block
    All,
}

/// What the model computes in. F16 is not among them: its gradients underflow unless the loss is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum ComputeDtype {
    F32,
    #[value(name = "bf16")]
    BF16,
}

impl ComputeDtype {
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::BF16 => DType::BF16,
        }
    }
}

/// The type of the weights in `model.safetensors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum SaveDtype {
    F32,
    F16,
    #[value(name = "bf16")]
    BF16,
}

impl SaveDtype {
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }

    /// As `config.json` spells it.
    pub fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
        }
    }
}

impl LoraOn {
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::QV => &["q_proj", "v_proj"],
            Self::All => &[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
        }
    }
}

/// What runs had that were started before there were micro-batches.
fn one() -> usize {
    1
}

/// Of a whole run: the product of what they are counted by then fits 64 bits.
const MOST_TOKENS: usize = 1 << 60;

impl Options {
    /// Tokens of one step.
    pub fn tokens(&self) -> usize {
        self.accumulate * self.batch * self.seqlen
    }

    /// Checks the values that the types admit but no run can have.
    pub fn check(&self) -> Result<()> {
        for (flag, value) in [
            ("seqlen", self.seqlen),
            ("batch", self.batch),
            ("accumulate", self.accumulate),
            ("steps", self.steps),
            ("lora", self.lora.unwrap_or(1)),
        ] {
            ensure!(value > 0, "--{flag} must be at least 1, got 0");
        }
        let sizes = [self.steps, self.accumulate, self.batch, self.seqlen];
        let tokens = sizes.iter().try_fold(1usize, |x, &y| x.checked_mul(y));
        ensure!(
            tokens.is_some_and(|tokens| tokens <= MOST_TOKENS),
            "--steps, --accumulate, --batch and --seqlen must make at most {MOST_TOKENS} tokens, got {} x {} x {} x {}",
            self.steps,
            self.accumulate,
            self.batch,
            self.seqlen
        );
        for (flag, value) in [("lr", self.lr), ("clip", self.clip)] {
            ensure!(
                value.is_finite() && value > 0.,
                "--{flag} must be a number above 0, got {value}"
            );
        }
        ensure!(
            (0. ..1.).contains(&self.weight_decay),
            "--weight-decay must be at least 0 and below 1, got {}",
            self.weight_decay
        );
        ensure!(
            self.held_out > 0. && self.held_out < 1.,
            "--held-out must be between 0 and 1, got {}",
            self.held_out
        );
        Ok(())
    }

    /// What the model computes in on `device`: what is asked for, or else what the run began in, or else what suits the
    /// device.
    pub fn compute_dtype(
        &self,
        asked: Option<ComputeDtype>,
        device: &Device,
    ) -> Result<ComputeDtype> {
        let of_device = match device {
            Device::Cpu => ComputeDtype::F32,
            _ => ComputeDtype::BF16,
        };
        let dtype = asked.or(self.dtype).unwrap_or(of_device);
        ensure!(
            device.is_cpu() || dtype == ComputeDtype::BF16 || self.attention == Attention::Plain,
            "flash attention computes in bf16 on cuda, got f32{}; give --dtype bf16",
            match asked {
                Some(_) => "",
                None => ", which the run began in",
            }
        );
        Ok(dtype)
    }

    /// The learning rate of a step, counted from 0.
    pub fn learning_rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / self.warmup as f64;
        }
        let decay = (self.steps.saturating_sub(self.warmup)).max(1) as f64;
        let progress = ((step - self.warmup) as f64 / decay).min(1.);
        let cosine = (1. + (std::f64::consts::PI * progress).cos()) / 2.;
        self.lr * (0.1 + 0.9 * cosine)
    }
}
