//! The command line.

use std::path::PathBuf;

use clap::{Args as _, Command, Id, Parser};

use crate::cli::DeviceName;
use crate::numbers::{at_least_one, at_least_zero};
use crate::options::{ComputeDtype, Options};

/// Trains a Llama through this crate's attention: from a checkpoint or from random weights, all weights
/// or low-rank adapters.
#[derive(Debug, Parser)]
pub struct Args {
    #[command(flatten)]
    pub options: Options,

    /// Write the model, the losses and what --resume needs into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Continue the run in this folder, with its options
    #[arg(long, value_name = "DIR", conflicts_with_all = fixed_by_a_run())]
    pub resume: Option<PathBuf>,

    /// Measure the held-out loss and save every N steps
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = at_least_one, allow_negative_numbers = true)]
    pub save_every: usize,

    /// Draw the loss curve
    #[arg(long, value_name = "FILE.png")]
    pub plot: Option<PathBuf>,

    /// First take N steps with this and with plain attention, and print both losses and, but for the first step,
    /// which warms up, the time [default: 5 on the model in examples/data on the CPU where nothing is saved, else 0]
    #[arg(long, value_name = "N", value_parser = at_least_zero, allow_negative_numbers = true)]
    pub compare: Option<usize>,

    /// cpu or cuda[:N]
    #[arg(long, default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,

    /// What the model computes in; the optimiser keeps f32 [default: of a resumed run what it began in, else bf16 on
    /// cuda, f32 on cpu]
    #[arg(long, value_enum)]
    pub dtype: Option<ComputeDtype>,
}

/// The arguments that a resumed run takes from its folder or has no use for.
fn fixed_by_a_run() -> Vec<Id> {
    let options = Options::augment_args(Command::new(""));
    let ids = options.get_arguments().map(|arg| arg.get_id().clone());
    ids.chain([Id::from("out"), Id::from("compare")]).collect()
}
