//! One row: whole steps of one model, attention and context.

use std::time::Instant;

use anyhow::Result;
use candle_core::Device;

use crate::Args;
use crate::gpu_memory::GpuMemory;
use crate::largest_batch::largest_batch;
use crate::model::Attention;
use crate::shapes::{Case, Rates};
use crate::step::{Step, random_tokens};

/// What was timed, and what came out.
pub struct Row {
    pub case: Case,
    /// Nothing: out of memory.
    pub figures: Option<Figures>,
    /// A search ended here while all fitted: a longer context may fit too.
    pub at_least: bool,
}

pub struct Figures {
    /// Sequences of a micro-batch.
    pub batch: usize,
    pub micro_batches: usize,
    pub seconds_per_step: f64,
    pub rates: Rates,
    /// Where the device keeps books.
    pub peak_bytes: Option<u64>,
    pub loss: f32,
}

/// Times the largest micro-batch that fits.
pub fn run(case: Case, args: &Args, device: &Device) -> Result<Row> {
    let memory = GpuMemory::of(device)?;
    let figures = with_largest_batch(case, args, memory.as_ref(), |batch| {
        time(case, batch, args, device, memory.as_ref())
    })?;
    Ok(Row {
        case,
        figures,
        at_least: false,
    })
}

/// Runs with the largest micro-batch that fits; nothing if not even one sequence does.
pub fn with_largest_batch<T>(
    case: Case,
    args: &Args,
    memory: Option<&GpuMemory>,
    run: impl Fn(usize) -> Result<T>,
) -> Result<Option<T>> {
    largest_batch(args.batch(case.seqlen), |batch| {
        let result = match fits(case, batch, args, memory)? {
            true => run(batch).map(Some),
            false => Ok(None),
        };
        if let Some(memory) = memory {
            memory.give_back()?;
        }
        result
    })
}

/// Whether trying is of use. Plain attention's scores alone can be more than the memory, and with 2^32 of them
/// candle's kernels, which count in 32 bits, would never end.
///
/// The least that it keeps for the backward is, in each block that is not computed again, the scores in F32 before
/// and after the scale, with the mask, without their maximum, and their exponentials.
fn fits(case: Case, batch: usize, args: &Args, memory: Option<&GpuMemory>) -> Result<bool> {
    let (Attention::Plain, Some(memory)) = (case.attention, memory) else {
        return Ok(true);
    };
    let config = case.shape.config(case.seqlen);
    let scores = (config.num_attention_heads * batch * case.seqlen * case.seqlen) as u64;
    let blocks = match args.recompute {
        true => 1,
        false => config.num_hidden_layers as u64,
    };
    Ok(scores < 1 << 32 && blocks * 5 * 4 * scores < memory.total_bytes()?)
}

fn time(
    case: Case,
    batch: usize,
    args: &Args,
    device: &Device,
    memory: Option<&GpuMemory>,
) -> Result<Figures> {
    let Case {
        shape,
        attention,
        seqlen,
    } = case;
    let config = shape.config(seqlen);
    let micro_batches = (args.tokens() / (batch * seqlen)).max(1);
    if let Some(memory) = memory {
        memory.start_peak()?;
    }
    let mut step = Step::new(&config, attention, args.recompute, device)?;
    let tokens = random_tokens(&config, batch, seqlen, device)?;
    let inputs = vec![tokens; micro_batches];
    // A search asks what fits, and its steps are long: no warm-up.
    if args.longest.is_none() {
        step.take(&inputs)?;
    }
    device.synchronize()?;
    let start = Instant::now();
    let mut loss = 0.;
    for _ in 0..args.steps {
        loss = step.take(&inputs)?;
    }
    device.synchronize()?;
    let seconds_per_step = start.elapsed().as_secs_f64() / args.steps as f64;
    let sizes = [micro_batches, batch, seqlen];
    Ok(Figures {
        batch,
        micro_batches,
        seconds_per_step,
        rates: Rates::of(&config, step.matrix_weights(), sizes, seconds_per_step),
        peak_bytes: memory.map(GpuMemory::peak_bytes).transpose()?,
        loss,
    })
}
