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

mod args;
mod bench;
#[path = "../common/cli.rs"]
#[expect(dead_code, reason = "rows come too slowly for a bar")]
mod cli;
#[path = "../common/gpu_memory.rs"]
mod gpu_memory;
mod largest_batch;
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

use anyhow::Result;
use candle_core::Device;
use clap::Parser;

use args::Args;
use bench::Row;
use longest::longest;
use model::Attention;
use report::Report;
use shapes::{Case, Shape};

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
                report.row(&search(shape, attention, unit, args, &device)?)?;
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

/// The row of the longest context that trains; that of the shortest, without figures, where none does.
fn search(
    shape: Shape,
    attention: Attention,
    unit: usize,
    args: &Args,
    device: &Device,
) -> Result<Row> {
    let case = |seqlen| Case {
        shape,
        attention,
        seqlen,
    };
    let most = args.seqlen.iter().copied().max().unwrap_or(unit);
    let mut best = None;
    let found = longest(unit, most, |seqlen| {
        let row = bench::run(case(seqlen), args, device)?;
        let fits = row.figures.is_some();
        if fits {
            best = Some(row);
        }
        Ok(fits)
    })?;
    Ok(Row {
        case: case(found.seqlen.unwrap_or(unit)),
        figures: best.and_then(|row| row.figures),
        at_least: found.ended_at_most,
    })
}
