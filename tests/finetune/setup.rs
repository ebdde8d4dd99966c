//! A tiny model on the text that the examples ship.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device};
use clap::Parser;

use crate::batches::Batches;
use crate::checkpoint::Checkpoint;
use crate::device::{self, WaitAtEnd};
use crate::model::Attention;
use crate::options::{LoraOn, Options};
use crate::scratch;
use crate::trainer::Trainer;

/// A flag given twice counts the second time.
#[derive(Parser)]
#[command(args_override_self = true)]
struct Args {
    #[command(flatten)]
    options: Options,
}

/// The options of a tiny run, and `more`.
pub fn options(more: &[&str]) -> Options {
    try_options(more).unwrap_or_else(|error| panic!("{error}"))
}

/// The same, or what the command line says to them.
pub fn try_options(more: &[&str]) -> Result<Options, clap::Error> {
    let scratch = "finetune --scratch --vocab 320 --layers 2 --hidden 32 --ffn 64 --heads 4 --kv-heads 2 \
        --positions 64 --seqlen 32 --batch 2 --steps 12 --warmup 3 --lr 3e-3";
    let args = Args::try_parse_from(scratch.split_whitespace().chain(more.iter().copied()))?;
    Ok(args.options)
}

/// The model that the options make, always the same.
pub fn checkpoint(options: &Options) -> Result<Checkpoint> {
    scratch::checkpoint(options, &[text()])
}

/// A trainer at its first step, on the CPU in F32.
pub fn trainer(
    options: &Options,
    checkpoint: &Checkpoint,
    attention: Attention,
) -> Result<Trainer> {
    CPU_F32.trainer(options, checkpoint, attention)
}

/// What the tokens of the text make, on `device`.
pub fn batches(options: &Options, checkpoint: &Checkpoint, device: &Device) -> Result<Batches> {
    let encoding = checkpoint
        .tokenizer
        .encode(fs::read_to_string(text())?, true)
        .map_err(|error| anyhow!("{error}"))?;
    Batches::new(&[encoding.get_ids().to_vec()], options, device)
}

/// What a run computes on and in.
#[derive(Debug, Clone)]
pub struct Place {
    pub device: Device,
    pub dtype: DType,
}

pub const CPU_F32: Place = Place {
    device: Device::Cpu,
    dtype: DType::F32,
};

pub const CPU_BF16: Place = Place {
    device: Device::Cpu,
    dtype: DType::BF16,
};

/// A GPU of its own for each test, in BF16: tests in parallel share no cuBLAS.
pub fn gpu() -> Result<Option<Place>> {
    let dtype = DType::BF16;
    device::gpu()
        .map(|_| Device::new_cuda(0).map(|device| Place { device, dtype }))
        .transpose()
        .map_err(anyhow::Error::from)
}

/// Every place of this machine.
pub fn places() -> Result<Vec<Place>> {
    Ok([CPU_F32, CPU_BF16].into_iter().chain(gpu()?).collect())
}

/// Runs a test body in each place, on all weights and on adapters of all projections, five times as fast.
pub fn for_each_run(
    options: &Options,
    test: impl Fn(&Place, &Options) -> Result<()>,
) -> Result<()> {
    for place in places()? {
        let _wait = WaitAtEnd(&place.device);
        for lora in [None, Some(4)] {
            let options = Options {
                lr: options.lr * lora.map_or(1., |_| 5.),
                lora,
                lora_on: LoraOn::All,
                ..options.clone()
            };
            test(&place, &options).with_context(|| format!("{place:?}, lora {lora:?}"))?;
        }
    }
    Ok(())
}

impl Place {
    /// A trainer at its first step.
    pub fn trainer(
        &self,
        options: &Options,
        checkpoint: &Checkpoint,
        attention: Attention,
    ) -> Result<Trainer> {
        Trainer::new(
            options,
            &checkpoint.config,
            &checkpoint.weights,
            batches(options, checkpoint, &self.device)?,
            attention,
            self.dtype,
        )
    }
}

fn text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/asyoulik.txt")
}
