//! One row: whole steps of one model, attention and context.

use std::time::Instant;

use anyhow::{Error, Result};
use candle_core::Device;

use crate::Args;
use crate::gpu_memory::GpuMemory;
use crate::model::Attention;
use crate::shapes::{Shape, operations, plain_attention_bytes};
use crate::step::{Step, random_tokens};

/// What was timed, and what came out.
pub struct Row {
    pub shape: Shape,
    pub attention: Attention,
    pub seqlen: usize,
    /// Nothing: out of memory.
    pub figures: Option<Figures>,
}

pub struct Figures {
    /// Sequences of a micro-batch.
    pub batch: usize,
    pub micro_batches: usize,
    pub seconds_per_step: f64,
    pub tokens_per_second: f64,
    pub tflops: f64,
    /// Where the device keeps books.
    pub peak_bytes: Option<u64>,
    pub loss: f32,
}

/// Times the largest micro-batch that fits.
pub fn run(
    shape: Shape,
    attention: Attention,
    seqlen: usize,
    args: &Args,
    device: &Device,
) -> Result<Row> {
    let memory = GpuMemory::of(device)?;
    let mut batch = (args.micro_tokens.min(args.tokens) / seqlen).max(1);
    let figures = loop {
        let figures = match fits(shape, attention, seqlen, batch, memory.as_ref())? {
            true => time(
                shape,
                attention,
                seqlen,
                batch,
                args,
                device,
                memory.as_ref(),
            ),
            false => Ok(None),
        };
        if let Some(memory) = &memory {
            memory.give_back()?;
        }
        match figures {
            Ok(None) if batch > 1 => batch /= 2,
            Err(error) if is_out_of_memory(&error) && batch > 1 => batch /= 2,
            Err(error) if is_out_of_memory(&error) => break None,
            figures => break figures?,
        }
    };
    Ok(Row {
        shape,
        attention,
        seqlen,
        figures,
    })
}

/// Whether trying is of use. Plain attention's scores alone can be more than the memory, and with 2^32 of them
/// candle's kernels, which count in 32 bits, would never end.
fn fits(
    shape: Shape,
    attention: Attention,
    seqlen: usize,
    batch: usize,
    memory: Option<&GpuMemory>,
) -> Result<bool> {
    Ok(match (attention, memory) {
        (Attention::Plain, Some(memory)) => {
            let config = shape.config(seqlen);
            plain_attention_bytes(&config, seqlen, batch) < memory.total_bytes()?
        }
        _ => true,
    })
}

fn time(
    shape: Shape,
    attention: Attention,
    seqlen: usize,
    batch: usize,
    args: &Args,
    device: &Device,
    memory: Option<&GpuMemory>,
) -> Result<Option<Figures>> {
    let config = shape.config(seqlen);
    let micro_batches = (args.tokens / (batch * seqlen)).max(1);
    if let Some(memory) = memory {
        memory.start_peak()?;
    }
    let mut step = Step::new(&config, attention, args.recompute, device)?;
    let tokens = random_tokens(&config, batch, seqlen, device)?;
    let inputs = vec![tokens; micro_batches];
    step.take(&inputs)?;
    device.synchronize()?;
    let start = Instant::now();
    let mut loss = 0.;
    for _ in 0..args.steps {
        loss = step.take(&inputs)?;
    }
    device.synchronize()?;
    let seconds_per_step = start.elapsed().as_secs_f64() / args.steps as f64;
    let tokens = batch * seqlen * micro_batches;
    let operations = operations(&config, step.matrix_weights(), seqlen, tokens);
    Ok(Some(Figures {
        batch,
        micro_batches,
        seconds_per_step,
        tokens_per_second: tokens as f64 / seconds_per_step,
        tflops: operations / seconds_per_step / 1e12,
        peak_bytes: memory.map(GpuMemory::peak_bytes).transpose()?,
        loss,
    }))
}

/// Of the driver or of cuBLAS, whose workspace is memory too.
fn is_out_of_memory(error: &Error) -> bool {
    let text = format!("{error:#}");
    ["out of memory", "CUBLAS_STATUS_ALLOC_FAILED"]
        .iter()
        .any(|status| text.contains(status))
}
