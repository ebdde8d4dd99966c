//! Times training steps of models in published shapes on random weights: tokens a second, the share of the
//! GPU's peak, memory, and how long a context fits.
//!
//! ```sh
//! cargo run --release --features cuda --example train_bench -- --device cuda
//! cargo run --release --features cuda --example train_bench -- --device cuda --model gpt3-1.3b --seqlen 8192 --profile
//! ```
//!
//! A step is what `--example finetune` does: micro-batches forward and backward, their gradients summed, the
//! norm, AdamW. It sees `--tokens` tokens whatever their context; the largest micro-batch that fits is taken,
//! from `--micro-tokens` down. A row says "out of memory" where not even one sequence fits.
//! Operations are counted as [`shapes::operations`] states.

mod bench;
#[path = "../common/cli.rs"]
#[expect(dead_code, reason = "rows come too slowly for a bar")]
mod cli;
#[path = "../common/gpu_memory.rs"]
mod gpu_memory;
mod longest;
#[path = "../common/model/mod.rs"]
#[expect(dead_code, reason = "training has no cache of keys and values")]
mod model;
#[path = "../common/numbers.rs"]
#[expect(dead_code, reason = "none of the numbers here may be 0")]
mod numbers;
#[path = "../common/out_of_memory.rs"]
mod out_of_memory;
mod profile;
mod report;
mod shapes;
mod step;
#[path = "../common/training/mod.rs"]
#[expect(dead_code, reason = "nothing is saved here")]
mod training;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use candle_core::Device;
use clap::Parser;

use cli::DeviceName;
use model::Attention;
use numbers::at_least_one;
use report::Report;
use shapes::{Case, Shape};

/// Times training steps of models in published shapes.
#[derive(Debug, Parser)]
pub struct Args {
    /// [default: gpt3-1.3b,gpt3-2.7b,llama-3.2-1b on cuda, tiny on cpu]
    #[arg(long, value_enum, value_delimiter = ',')]
    model: Vec<Shape>,

    /// Contexts [default: 2048,4096,8192,16384,32768 on cuda, 512,2048 on cpu]
    #[arg(long, value_delimiter = ',', value_parser = at_least_one)]
    seqlen: Vec<usize>,

    #[arg(long, value_enum, value_delimiter = ',', default_value = "flash,plain")]
    attention: Vec<Attention>,

    /// Tokens of a step, rounded down to whole micro-batches [default: 32768 on cuda, 4096 on cpu]
    #[arg(long, value_parser = at_least_one)]
    tokens: Option<usize>,

    /// Tokens of a micro-batch, or one sequence where that is longer; halved until it fits [default: --tokens]
    #[arg(long, value_parser = at_least_one)]
    micro_tokens: Option<usize>,

    /// Keep each block's input alone for the backward and compute its inside again
    #[arg(long)]
    recompute: bool,

    /// Steps that are timed, after one that is not
    #[arg(long, default_value_t = 4, value_parser = at_least_one)]
    steps: usize,

    /// TFLOP/s of the GPU's matrix units; the default is that of H100 and H200 for dense bf16
    #[arg(long, default_value_t = 989.)]
    peak: f64,

    /// Time the parts of a step instead
    #[arg(long)]
    profile: bool,

    /// Search for the longest context of which one sequence trains, one step each, in multiples of N tokens; up to
    /// --seqlen where given
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "profile")]
    longest: Option<usize>,

    /// cpu or cuda[:N]
    #[arg(long, default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// One JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

/// Of `--seqlen`, `--tokens` and `--micro-tokens`: their products with a model's sizes then fit 64 bits.
const MOST_TOKENS: usize = 1 << 30;

impl Args {
    /// Fills in what depends on the device and checks what the types admit.
    fn completed(mut self, device: &Device) -> Result<Self> {
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
        ensure!(
            self.peak.is_finite() && self.peak > 0.,
            "--peak must be a number above 0, got {}",
            self.peak
        );
        Ok(self)
    }

    fn tokens(&self) -> usize {
        self.tokens.unwrap_or(MOST_TOKENS)
    }

    /// Sequences of the first micro-batch to try.
    fn batch(&self, seqlen: usize) -> usize {
        if self.longest.is_some() {
            return 1;
        }
        let tokens = self.micro_tokens.unwrap_or(MOST_TOKENS).min(self.tokens());
        (tokens / seqlen).max(1)
    }
}

fn main() -> ExitCode {
    cli::main(|| run(Args::parse()))
}

fn run(args: Args) -> Result<()> {
    let device = args.device.open()?;
    let args = &args.completed(&device)?;
    let report = Report::new(args);
    if !args.profile {
        report.header()?;
    }
    for &shape in &args.model {
        for &attention in &args.attention {
            if let Some(unit) = args.longest {
                let case = |seqlen| Case {
                    shape,
                    attention,
                    seqlen,
                };
                let most = args.seqlen.iter().copied().max().unwrap_or(unit);
                let mut last = None;
                longest::longest(unit, most, |seqlen| {
                    let row = bench::run(case(seqlen), args, &device)?;
                    let fits = row.figures.is_some();
                    if fits {
                        last = Some(row);
                    }
                    Ok(fits)
                })?;
                match last {
                    Some(row) => report.row(&row)?,
                    None => report.out_of_memory(case(unit))?,
                }
                continue;
            }
            for &seqlen in &args.seqlen {
                let case = Case {
                    shape,
                    attention,
                    seqlen,
                };
                if args.profile {
                    report.profile(case, profile::run(case, args, &device)?.as_ref())?;
                } else {
                    report.row(&bench::run(case, args, &device)?)?;
                }
            }
        }
    }
    Ok(())
}
