//! A few steps through this crate's attention and through plain attention, side by side.

use std::io::Write;
use std::time::Instant;

use anyhow::Result;

use crate::cli;
use crate::model::Attention;
use crate::out_of_memory::is_out_of_memory;
use crate::trainer::{Step, Trainer};

/// Takes `steps` steps from the same start with either attention and prints the losses.
pub fn compare(
    steps: usize,
    trainer: impl Fn(Attention) -> Result<Trainer>,
    out: &mut impl Write,
) -> Result<()> {
    let flash = Probe::run(Attention::Flash, steps, &trainer)?;
    let plain = match Probe::run(Attention::Plain, steps, &trainer) {
        Err(error) if is_out_of_memory(&error) => {
            writeln!(out, "step   loss, flash")?;
            for step in &flash.steps {
                writeln!(out, "{:4} {:13.6}", step.step, step.loss)?;
            }
            writeln!(out, "flash  {:.3} s a step", flash.seconds_per_step)?;
            return Ok(writeln!(out, "plain  out of memory\n")?);
        }
        plain => plain?,
    };
    writeln!(out, "step   loss, flash   loss, plain   difference")?;
    for (flash, plain) in flash.steps.iter().zip(&plain.steps) {
        let difference = (flash.loss - plain.loss).abs();
        let (step, flash, plain) = (flash.step, flash.loss, plain.loss);
        writeln!(out, "{step:4} {flash:13.6} {plain:13.6} {difference:12.1e}")?;
    }
    for Probe {
        attention,
        seconds_per_step,
        ..
    } in [&flash, &plain]
    {
        writeln!(out, "{attention}  {seconds_per_step:.3} s a step")?;
    }
    Ok(writeln!(out)?)
}

/// What a few steps of one attention gave and took.
struct Probe {
    attention: Attention,
    steps: Vec<Step>,
    seconds_per_step: f64,
}

impl Probe {
    fn run(
        attention: Attention,
        steps: usize,
        trainer: &impl Fn(Attention) -> Result<Trainer>,
    ) -> Result<Self> {
        let mut trainer = trainer(attention)?;
        let bar = cli::progress_bar(format!("compare {attention}"), steps as u64);
        let start = Instant::now();
        let steps = bar
            .wrap_iter(0..steps)
            .map(|_| trainer.step())
            .collect::<Result<Vec<_>>>()?;
        let seconds = start.elapsed().as_secs_f64();
        bar.finish_and_clear();
        Ok(Self {
            attention,
            seconds_per_step: seconds / steps.len() as f64,
            steps,
        })
    }
}
