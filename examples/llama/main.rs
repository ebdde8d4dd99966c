//! A Llama with this crate's attention, against plain attention on the same weights.
//!
//! Without arguments it loads the small model of `examples/data`, feeds it a long prompt with either
//! attention, prints the time and memory that each took and the largest difference of the logits,
//! and then continues the text.

mod args;
#[path = "../common/checkpoint/mod.rs"]
mod checkpoint;
#[path = "../common/cli.rs"]
mod cli;
#[path = "../common/data.rs"]
mod data;
#[path = "../common/generate.rs"]
mod generate;
mod memory;
#[path = "../common/model/mod.rs"]
#[expect(dead_code, reason = "nothing is trained here")]
mod model;
#[path = "../common/numbers.rs"]
mod numbers;
mod prompt;
mod report;

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_transformers::generation::LogitsProcessor;
use clap::Parser;

use args::Args;
use checkpoint::Checkpoint;
use generate::Generation;
use model::{Attention, KvCache, Llama};
use prompt::Prompt;
use report::{Decode, Logits, Prefill, Report};

fn main() -> ExitCode {
    cli::main(|| run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let source = match &args.model {
        Some(source) => source.clone(),
        None => data::folder().display().to_string(),
    };
    let loading = cli::progress_bar(format!("loading {source}"), 1);
    let checkpoint = Checkpoint::open(&source, args.dtype(), &device)?;
    loading.finish_and_clear();
    let prompt = Prompt::new(args, &checkpoint)?;

    let mut report = Report::new(args, &source, &checkpoint, &prompt);
    let mut out = stdout().lock();
    if !args.json {
        report.write_header(&mut out)?;
    }

    // 1. The prompt, with each attention.
    let mut warm = None;
    let mut last_logits = Vec::new();
    for &attention in args.attention.attentions() {
        let model = Llama::new(checkpoint.weights.clone(), &checkpoint.config, attention)?;
        let (prefill, logits, cache) =
            prefill(args, &checkpoint, &model, attention, &prompt, &device)?;
        if !args.json {
            prefill.write(&mut out)?;
        }
        report.prefills.push(prefill);
        last_logits.push(logits.clone());
        warm.get_or_insert((attention, model, cache, logits));
    }
    if let [flash, plain] = &last_logits[..] {
        let largest = |logits: &Tensor| logits.abs()?.max_all()?.to_scalar();
        report.logits = Some(Logits {
            largest: largest(plain)?,
            largest_difference: largest(&(flash - plain)?)?,
        });
        if !args.json {
            report.write_comparison(&mut out)?;
        }
    }

    // 2. The continuation, on the cache of the first of them.
    if let Some((attention, model, mut cache, logits)) = warm {
        if !args.json && args.sample_len > 0 {
            writeln!(out, "\n--- the prompt ends with ---\n{}", prompt.end())?;
            writeln!(out, "--- and goes on with ---")?;
        }
        let generation = Generation {
            model: &model,
            tokenizer: &checkpoint.tokenizer,
            sampler: LogitsProcessor::new(args.seed, Some(args.temperature), Some(args.top_p)),
            stops: checkpoint.stop_tokens(),
            max_tokens: args.sample_len,
        };
        let mut text = String::new();
        let start = Instant::now();
        let ids = generation.run(&mut cache, logits, |piece| {
            text.push_str(piece);
            if !args.json {
                write!(out, "{piece}")?;
                out.flush()?;
            }
            Ok(())
        })?;
        let seconds = start.elapsed().as_secs_f64();
        report.decode = Some(Decode {
            attention,
            ids,
            text,
            seconds,
        });
    }
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        report.write_decode(&mut out)?;
    }
    Ok(())
}

/// Feeds the prompt to an empty cache; returns the figures, the logits behind it and the cache.
fn prefill(
    args: &Args,
    checkpoint: &Checkpoint,
    model: &Llama,
    attention: Attention,
    prompt: &Prompt,
    device: &Device,
) -> Result<(Prefill, Tensor, KvCache)> {
    let tokens = &prompt.tokens;
    let new_cache = |capacity| KvCache::new(&checkpoint.config, 1, capacity, args.dtype(), device);

    // Starts threads and touches the weights, so that neither attention pays for the other.
    let few = &tokens[..tokens.len().min(32)];
    generate::feed(model, &mut new_cache(few.len())?, few, None, device, |_| ())?;
    device.synchronize()?;

    let memory_before = memory::start_peak();
    let bar = cli::progress_bar(format!("prefill {attention}"), tokens.len() as u64);
    let start = Instant::now();
    let mut cache = new_cache(tokens.len() + args.sample_len)?;
    let logits = generate::feed(model, &mut cache, tokens, args.chunk, device, |tokens| {
        bar.inc(tokens as u64);
    })?;
    device.synchronize()?;
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();

    let figures = Prefill {
        attention,
        tokens: tokens.len(),
        seconds,
        memory_before,
        memory_peak: memory_before.and_then(|_| memory::peak_bytes()),
    };
    Ok((figures, logits, cache))
}
