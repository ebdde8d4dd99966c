//! A tiny model on the text that the examples ship.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use candle_core::{DType, Device};
use clap::Parser;

use crate::batches::Batches;
use crate::checkpoint::Checkpoint;
use crate::model::Attention;
use crate::options::Options;
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

/// A trainer at its first step.
pub fn trainer(
    options: &Options,
    checkpoint: &Checkpoint,
    attention: Attention,
) -> Result<Trainer> {
    let encoding = checkpoint
        .tokenizer
        .encode(fs::read_to_string(text())?, true)
        .map_err(|error| anyhow!("{error}"))?;
    let batches = Batches::new(&[encoding.get_ids().to_vec()], options, &Device::Cpu)?;
    Trainer::new(
        options,
        &checkpoint.config,
        &checkpoint.weights,
        batches,
        attention,
        DType::F32,
    )
}

fn text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/asyoulik.txt")
}
