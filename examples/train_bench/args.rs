//! The command line.

use anyhow::{Result, bail, ensure};
use candle_core::Device;
use clap::Parser;

use crate::cli::DeviceName;
use crate::model::Attention;
use crate::numbers::at_least_one;
use crate::shapes::{OPERATIONS, Shape};

/// Times training steps of models in published shapes.
#[derive(Debug, Parser)]
#[command(after_help = OPERATIONS)]
pub struct Args {
    /// [default: gpt3-1.3b,gpt3-2.7b,llama-3.2-1b on cuda, tiny on cpu]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub model: Vec<Shape>,

    /// Contexts [default: 2048,4096,8192,16384,32768 on cuda, 512,2048 on cpu]
    #[arg(long, value_delimiter = ',', value_parser = at_least_one, allow_negative_numbers = true)]
    pub seqlen: Vec<usize>,

    #[arg(long, value_enum, value_delimiter = ',', default_value = "flash,plain")]
    pub attention: Vec<Attention>,

    /// Tokens of a step, rounded down to whole micro-batches [default: 32768 on cuda, 4096 on cpu]
    #[arg(long, value_parser = at_least_one, allow_negative_numbers = true)]
    tokens: Option<usize>,

    /// Tokens of a micro-batch, or one sequence where that is longer; halved until it fits [default: --tokens]
    #[arg(long, value_parser = at_least_one, allow_negative_numbers = true)]
    micro_tokens: Option<usize>,

    /// Keep each block's input alone for the backward and compute its inside again
    #[arg(long)]
    pub recompute: bool,

    /// Steps that are timed, after one that is not
    #[arg(long, default_value_t = 4, value_parser = at_least_one, allow_negative_numbers = true)]
    pub steps: usize,

    /// TFLOP/s that the share is of [default: 989 on cuda, that of H100 and H200 for dense bf16; none on cpu]
    #[arg(long, allow_negative_numbers = true)]
    pub peak: Option<f64>,

    /// Time the parts of a step instead
    #[arg(long)]
    pub profile: bool,

    /// Search for the longest context of which one sequence trains, one step each, in multiples of N tokens; --seqlen
    /// is then where the search ends [default: 1048576 on cuda, 4096 on cpu]
    #[arg(
        long,
        value_name = "N",
        value_parser = at_least_one,
        allow_negative_numbers = true,
        conflicts_with_all = ["profile", "steps", "tokens", "micro_tokens"]
    )]
    pub longest: Option<usize>,

    /// cpu or cuda[:N]
    #[arg(long, default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,

    /// One JSON object a line instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Of `--seqlen`, `--tokens` and `--micro-tokens`: their products with a model's sizes then fit 64 bits.
const MOST_TOKENS: usize = 1 << 30;

impl Args {
    /// Fills in what depends on the device and checks what the types admit.
    pub fn completed(mut self, device: &Device) -> Result<Self> {
        let is_cpu = device.is_cpu();
        if self.model.is_empty() {
            self.model = match is_cpu {
                true => vec![Shape::Tiny],
                false => vec![Shape::Gpt3Xl, Shape::Gpt3Large, Shape::Llama32],
            };
        }
        if self.seqlen.is_empty() && self.longest.is_some() {
            self.seqlen = vec![if is_cpu { 4096 } else { 1 << 20 }];
        }
        if self.seqlen.is_empty() {
            self.seqlen = match is_cpu {
                true => vec![512, 2048],
                false => vec![2048, 4096, 8192, 16384, 32768],
            };
        }
        if let Some(unit) = self.longest {
            check_search(unit, &self.seqlen)?;
            // One step of one sequence.
            self.tokens = Some(1);
            self.steps = 1;
        }
        self.tokens = self.tokens.or(Some(if is_cpu { 4096 } else { 32768 }));
        let sizes = self
            .seqlen
            .iter()
            .chain(&self.tokens)
            .chain(&self.micro_tokens);
        for &size in sizes {
            ensure!(
                size <= MOST_TOKENS,
                "--seqlen, --tokens and --micro-tokens must be at most {MOST_TOKENS}, got {size}"
            );
        }
        self.peak = self.peak.or((!is_cpu).then_some(989.));
        if let Some(peak) = self.peak {
            ensure!(
                peak.is_finite() && peak > 0.,
                "--peak must be a number above 0, got {peak}"
            );
        }
        Ok(self)
    }

    pub fn tokens(&self) -> usize {
        self.tokens.unwrap_or(MOST_TOKENS)
    }

    /// Sequences of the first micro-batch to try.
    pub fn batch(&self, seqlen: usize) -> usize {
        let tokens = self.micro_tokens.unwrap_or(MOST_TOKENS).min(self.tokens());
        (tokens / seqlen).max(1)
    }
}

/// A search in steps of `unit` has one end, which it can reach.
fn check_search(unit: usize, seqlen: &[usize]) -> Result<()> {
    let [most] = seqlen else {
        let numbers = seqlen.len();
        bail!("--longest takes one --seqlen, where its search ends, got {numbers} of them");
    };
    ensure!(
        unit <= *most,
        "--longest {unit} is more than --seqlen {most}, where its search ends; lower --longest or raise --seqlen"
    );
    Ok(())
}
