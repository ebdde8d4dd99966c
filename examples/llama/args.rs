//! The command line.

use std::path::PathBuf;

use candle_core::DType;
use clap::{Parser, ValueEnum};

use crate::cli::DeviceName;
use crate::model::Attention;
use crate::numbers::{at_least_one, at_least_zero};

/// Runs a Llama with this crate's attention and with plain attention on the same weights: speed and
/// memory of a long prompt, the difference of the logits, then the continuation.
#[derive(Debug, Parser)]
pub struct Args {
    /// A GGUF file, a Hugging Face folder, or hf:ORG/NAME [default: the small model in examples/data]
    #[arg(long, value_name = "PATH|hf:ORG/NAME")]
    pub model: Option<String>,

    /// The text to continue [default: the beginning of the text in examples/data]
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file")]
    pub prompt: Option<String>,

    /// A file with the text to continue
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    /// Take only the first N tokens of the text [default: all of a prompt, 1792 of the text in examples/data]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub prefill: Option<usize>,

    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = at_least_zero, allow_negative_numbers = true)]
    pub sample_len: usize,

    /// Feed the prompt to the model N tokens at a time [default: all at once]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub chunk: Option<usize>,

    /// Which attention to run
    #[arg(long, value_enum, default_value_t = Choice::Both)]
    pub attention: Choice,

    /// f32, f16 or bf16 [default: f32 on the CPU, bf16 on CUDA]
    #[arg(long, value_parser = parse_dtype)]
    pub dtype: Option<DType>,

    /// cpu or cuda[:N]
    #[arg(long, default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,

    /// 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.6, value_parser = not_negative, allow_negative_numbers = true)]
    pub temperature: f64,

    /// Choose among the likeliest tokens that together have probability P
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = probability, allow_negative_numbers = true)]
    pub top_p: f64,

    /// Seed of the choice of tokens
    #[arg(long, default_value_t = 2, allow_negative_numbers = true)]
    pub seed: u64,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    Flash,
    Plain,
    /// Flash, then plain
    Both,
}

impl Choice {
    pub fn attentions(self) -> &'static [Attention] {
        match self {
            Self::Flash => &[Attention::Flash],
            Self::Plain => &[Attention::Plain],
            Self::Both => &[Attention::Flash, Attention::Plain],
        }
    }
}

impl Args {
    pub fn dtype(&self) -> DType {
        self.dtype.unwrap_or(match self.device {
            DeviceName::Cpu => DType::F32,
            DeviceName::Cuda(_) => DType::BF16,
        })
    }
}

fn parse_dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        _ => Err(format!("got {name:?}, expected f32, f16 or bf16")),
    }
}

fn not_negative(value: &str) -> Result<f64, String> {
    match value.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0. => Ok(number),
        _ => Err("expected a number of at least 0".to_string()),
    }
}

fn probability(value: &str) -> Result<f64, String> {
    match value.parse::<f64>() {
        Ok(number) if number > 0. && number <= 1. => Ok(number),
        _ => Err("expected a number above 0 and at most 1".to_string()),
    }
}
