//! Trains a Llama through this crate's attention, forward and backward.
//!
//! Without arguments it takes a few steps from the small model in `examples/data`, first through either
//! attention side by side, so that their losses can be compared, and writes nothing. With `--out` it
//! saves a checkpoint that `--example llama` loads and that `--resume` continues.

mod args;
mod batches;
#[path = "../common/checkpoint/mod.rs"]
mod checkpoint;
#[path = "../common/cli.rs"]
mod cli;
mod compare;
#[path = "../common/data.rs"]
mod data;
#[path = "../common/generate.rs"]
mod generate;
#[path = "../common/gpu_memory.rs"]
#[expect(dead_code, reason = "a run keeps the memory that it has")]
mod gpu_memory;
mod losses;
#[path = "../common/model/mod.rs"]
mod model;
#[path = "../common/numbers.rs"]
mod numbers;
mod options;
#[path = "../common/out_of_memory.rs"]
mod out_of_memory;
mod output;
mod plot;
mod run;
mod run_dir;
mod scratch;
mod trainer;
#[path = "../common/training/mod.rs"]
mod training;
mod weights;

use std::fs;
use std::io::{Write, stdout};
use std::path::{self, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device};
use candle_transformers::generation::LogitsProcessor;
use clap::Parser;
use tokenizers::Tokenizer;

use args::Args;
use batches::Batches;
use checkpoint::Checkpoint;
use generate::Generation;
use gpu_memory::GpuMemory;
use losses::Row;
use model::KvCache;
use options::Options;
use output::Output;
use run_dir::RunDir;
use trainer::Trainer;

fn main() -> ExitCode {
    cli::main(|| run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let gpu_memory = GpuMemory::of(&device)?;
    let mut out = Output(stdout().lock());
    if let Some(file) = &args.plot {
        plot::check(file, args.out.as_deref())?;
    }

    // 1. What to train, on what, and where to.
    let (resumed, mut options) = match &args.resume {
        Some(path) => {
            let (dir, options) = RunDir::open(path)?;
            (Some(dir), options)
        }
        None => (None, with_absolute_paths(args.options.clone())?),
    };
    options.check()?;
    let chosen = options.compute_dtype(args.dtype, &device)?;
    let began_in = options.dtype.replace(chosen);
    let dtype = chosen.dtype();
    let texts = match &options.text[..] {
        [] => data::texts().to_vec(),
        texts => texts.to_vec(),
    };
    let checkpoint = start(&options, resumed.as_ref(), &texts)?;
    let Checkpoint {
        config,
        weights,
        tokenizer,
    } = &checkpoint;
    let batches = Batches::new(&tokenise(tokenizer, &texts)?, &options, &device)?;
    let created = match &args.out {
        Some(path) => Some(RunDir::create(path, &options, config, tokenizer)?),
        None => None,
    };
    let dir = resumed.as_ref().or(created.as_ref());
    let trainer =
        |attention| Trainer::new(&options, config, weights, batches.clone(), attention, dtype);

    // 2. A few steps with either attention.
    let is_demo =
        device.is_cpu() && options.model.is_none() && !options.scratch && args.out.is_none();
    let compared = args.compare.unwrap_or(if is_demo { 5 } else { 0 });
    if resumed.is_none() && compared > 0 {
        compare::compare(compared, trainer, &mut out)?;
    }

    // 3. The run.
    if let Some(memory) = &gpu_memory {
        memory.start_peak()?;
    }
    let mut trainer = trainer(options.attention)?;
    let mut rows = match &resumed {
        Some(dir) => dir.restore(&mut trainer, &device)?,
        None => vec![],
    };
    if let Some(began_in) = began_in.filter(|&began_in| began_in != chosen) {
        writeln!(
            out,
            "--dtype {}: the run began in {}",
            dtype.as_str(),
            began_in.dtype().as_str()
        )?;
    }
    describe(
        &options,
        &trainer,
        &checkpoint,
        batches.train_tokens(),
        dtype,
        &mut out,
    )?;
    let bar = cli::progress_bar("train".to_string(), options.steps as u64);
    bar.set_position(trainer.steps_taken() as u64);
    let trained = run::run(
        &mut trainer,
        &options,
        dir,
        &mut rows,
        args.save_every,
        |row| {
            bar.set_message(format!(
                "loss {:.3}, {:.0} tokens/s",
                row.step.loss, row.tokens_per_second
            ));
            bar.inc(1);
        },
    );
    bar.finish_and_clear();
    if let (Err(_), Some(file)) = (&trained, args.plot.as_ref().filter(|_| !rows.is_empty())) {
        // What led to the error, which is reported whether this succeeds or not.
        match plot::draw(file, &rows) {
            Ok(()) => writeln!(out, "drew {}", file.display())?,
            Err(error) => writeln!(out, "{error:#}")?,
        }
    }
    trained?;
    if let Some(memory) = &gpu_memory {
        let gib = memory.peak_bytes()? as f64 / (1u64 << 30) as f64;
        writeln!(out, "peak GPU memory {gib:.2} GiB")?;
    }
    if let Some(Row {
        step,
        held_out_loss: Some(held_out),
        ..
    }) = rows.last()
    {
        writeln!(
            out,
            "step {}: training loss {:.4}, held-out loss {held_out:.4}; {:.0} tokens/s in the middle of all steps",
            step.step,
            step.loss,
            median_speed(&rows)
        )?;
    }
    sample(&checkpoint, &trainer, &batches, &options, dtype, &mut out)?;

    // 4. What is left of it.
    if let Some(file) = &args.plot {
        plot::draw(file, &rows)?;
        writeln!(out, "drew {}", file.display())?;
    }
    match dir {
        Some(dir) => writeln!(
            out,
            "saved to {0}; run it with: cargo run --release --example llama -- --model {0}",
            dir.path().display()
        )?,
        None => writeln!(out, "nothing saved, which --out DIR would do")?,
    }
    Ok(())
}

/// Tokens a second of the step in the middle by speed; `rows` are not empty.
fn median_speed(rows: &[Row]) -> f64 {
    let mut speeds: Vec<f64> = rows.iter().map(|row| row.tokens_per_second).collect();
    speeds.sort_by(f64::total_cmp);
    speeds[speeds.len() / 2]
}

/// The same options for any working directory.
fn with_absolute_paths(mut options: Options) -> Result<Options> {
    for text in &mut options.text {
        *text = path::absolute(&text)?;
    }
    if let Some(model) = options
        .model
        .as_mut()
        .filter(|model| !model.starts_with("hf:"))
    {
        *model = path::absolute(&model)?.display().to_string();
    }
    Ok(options)
}

/// The configuration, tokenizer and weights that the run starts from. A resumed run that trains all
/// weights has them in its own folder; one with adapters needs the model that they adapt. On the CPU: what
/// trains makes its own copies where it computes.
fn start(options: &Options, resumed: Option<&RunDir>, texts: &[PathBuf]) -> Result<Checkpoint> {
    let own = resumed.filter(|_| options.lora.is_none());
    let source = match (own, &options.model) {
        (Some(dir), _) => dir.path().display().to_string(),
        (None, Some(model)) => model.clone(),
        (None, None) if options.scratch => return scratch::checkpoint(options, texts),
        (None, None) => data::folder().display().to_string(),
    };
    let loading = cli::progress_bar(format!("loading {source}"), 1);
    let checkpoint = match own {
        Some(dir) => dir.model(),
        None => Checkpoint::open(&source, DType::F32, &Device::Cpu),
    };
    loading.finish_and_clear();
    checkpoint
}

/// The tokens of each text.
fn tokenise(tokenizer: &Tokenizer, texts: &[PathBuf]) -> Result<Vec<Vec<u32>>> {
    texts
        .iter()
        .map(|path| {
            let name = path.display();
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
            let encoding = tokenizer
                .encode(text, true)
                .map_err(|error| anyhow!("cannot tokenise {name}: {error}"))?;
            Ok(encoding.get_ids().to_vec())
        })
        .collect()
}

/// Says what is trained, and how well it does before.
fn describe(
    options: &Options,
    trainer: &Trainer,
    checkpoint: &Checkpoint,
    tokens: usize,
    dtype: DType,
    out: &mut impl Write,
) -> Result<()> {
    let millions = |weights: usize| weights as f64 / 1e6;
    let trained = millions(
        trainer
            .weights()
            .parameters()
            .vars()
            .values()
            .map(|var| var.elem_count())
            .sum(),
    );
    let all = millions(
        checkpoint
            .weights
            .values()
            .map(|weight| weight.elem_count())
            .sum(),
    );
    match options.lora {
        None => write!(out, "training all {all:.2} M weights")?,
        Some(rank) => write!(
            out,
            "training {trained:.3} M weights of adapters of rank {rank} beside {all:.2} M frozen ones, merged when saved"
        )?,
    }
    writeln!(
        out,
        "; {tokens} tokens of text, {} x {} x {} a step in {}, {} attention",
        options.accumulate,
        options.batch,
        options.seqlen,
        dtype.as_str(),
        options.attention
    )?;
    let held_out = trainer.held_out_loss()?;
    Ok(writeln!(
        out,
        "step {}: held-out loss {held_out:.4}",
        trainer.steps_taken()
    )?)
}

/// Prints how the trained model continues the held-out text.
fn sample(
    checkpoint: &Checkpoint,
    trainer: &Trainer,
    batches: &Batches,
    options: &Options,
    dtype: DType,
    out: &mut impl Write,
) -> Result<()> {
    const MAX_TOKENS: usize = 60;
    let prompt = batches.held_out_prompt();
    let device = batches.device();
    let config = &checkpoint.config;
    let model = trainer.weights().untracked(config, options.attention)?;
    let capacity = prompt.len() + MAX_TOKENS;
    let mut cache = KvCache::new(config, 1, capacity, dtype, device)?;
    let logits = generate::feed(&model, &mut cache, prompt, None, device, |_| ())?;
    let generation = Generation {
        model: &model,
        tokenizer: &checkpoint.tokenizer,
        sampler: LogitsProcessor::new(options.seed, Some(0.6), Some(0.95)),
        stops: checkpoint.stop_tokens(),
        max_tokens: MAX_TOKENS.min(config.max_position_embeddings - prompt.len()),
    };
    writeln!(out, "--- a sample ---")?;
    generation.run(&mut cache, logits, |text| Ok(write!(out, "{text}")?))?;
    Ok(writeln!(out, "\n----------------")?)
}
