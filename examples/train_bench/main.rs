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
//! beginning with `--micro-tokens`. A row says "out of memory" where not even one sequence fits.
//! Operations are counted as [`shapes::operations`] states.

mod bench;
#[path = "../common/cli.rs"]
#[expect(dead_code, reason = "rows come too slowly for a bar")]
mod cli;
#[path = "../common/gpu_memory.rs"]
mod gpu_memory;
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

use anyhow::Result;
use clap::Parser;

use cli::DeviceName;
use model::Attention;
use numbers::at_least_one;
use report::Report;
use shapes::{Case, Shape};

/// Times training steps of models in published shapes.
#[derive(Debug, Parser)]
pub struct Args {
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "gpt3-1.3b,gpt3-2.7b,llama-3.2-1b"
    )]
    model: Vec<Shape>,

    /// Contexts
    #[arg(long, value_delimiter = ',', default_value = "2048,4096,8192,16384,32768", value_parser = at_least_one)]
    seqlen: Vec<usize>,

    #[arg(long, value_enum, value_delimiter = ',', default_value = "flash,plain")]
    attention: Vec<Attention>,

    /// Tokens of a step
    #[arg(long, default_value_t = 32768, value_parser = at_least_one)]
    tokens: usize,

    /// Tokens of a micro-batch, or one sequence where that is longer; halved until it fits
    #[arg(long, default_value_t = 16384, value_parser = at_least_one)]
    micro_tokens: usize,

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

    /// cpu or cuda[:N]
    #[arg(long, default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// One JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    cli::main(|| run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let report = Report::new(args);
    if !args.profile {
        report.header()?;
    }
    for &shape in &args.model {
        for &attention in &args.attention {
            for &seqlen in &args.seqlen {
                let case = Case {
                    shape,
                    attention,
                    seqlen,
                };
                if args.profile {
                    report.profile(&profile::run(case, args, &device)?)?;
                } else {
                    report.row(&bench::run(case, args, &device)?)?;
                }
            }
        }
    }
    Ok(())
}
