//! A few steps through this crate's attention and through plain attention, side by side.

use std::io::Write;
use std::time::Instant;

use anyhow::Result;

use crate::cli;
use crate::model::Attention;
use crate::out_of_memory::is_out_of_memory;
use crate::trainer::{LOWER_RATE, NotFinite, Step, Trainer};

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
            flash.write_time(out)?;
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
    flash.write_time(out)?;
    plain.write_time(out)?;
    Ok(writeln!(out)?)
}

/// What a few steps of one attention gave and took.
struct Probe {
    attention: Attention,
    steps: Vec<Step>,
    seconds_per_step: Option<f64>,
}

impl Probe {
    fn run(
        attention: Attention,
        steps: usize,
        trainer: &impl Fn(Attention) -> Result<Trainer>,
    ) -> Result<Self> {
        let mut trainer = trainer(attention)?;
        let bar = cli::progress_bar(format!("compare {attention}"), steps as u64);
        let mut ends = vec![];
        let steps = bar
            .wrap_iter(0..steps)
            .map(|_| {
                let step = trainer.step().map_err(|error| {
                    NotFinite::advise(error, || format!("cannot compare, {LOWER_RATE}"))
                })?;
                ends.push(Instant::now());
                Ok(step)
            })
            .collect::<Result<Vec<_>>>()?;
        bar.finish_and_clear();
        Ok(Self {
            attention,
            seconds_per_step: seconds_after_the_first(&ends),
            steps,
        })
    }

    fn write_time(&self, out: &mut impl Write) -> Result<()> {
        let attention = self.attention;
        Ok(match self.seconds_per_step {
            Some(seconds) => writeln!(
                out,
                "{attention}  {seconds:.3} s a step, without the first, which warms up"
            ),
            None => writeln!(
                out,
                "{attention}  no time: the only step is the first, which warms up"
            ),
        }?)
    }
}

/// The mean time of the steps with these ends. The first, in which kernels are loaded and memory is first asked for,
/// would count against whichever attention runs first.
pub fn seconds_after_the_first(ends: &[Instant]) -> Option<f64> {
    let [first, .., last] = ends else {
        return None;
    };
    Some((*last - *first).as_secs_f64() / (ends.len() - 1) as f64)
}
