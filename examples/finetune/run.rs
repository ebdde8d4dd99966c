//! The training loop: steps, measurements, saves.

use std::time::Instant;

use anyhow::{Context, Result, anyhow};

use crate::losses::Row;
use crate::options::Options;
use crate::run_dir::RunDir;
use crate::trainer::Trainer;

/// Takes the steps that are left.
///
/// # Arguments
///
/// * `dir`: where to save; absent means nowhere.
/// * `rows`: the record so far, to which each step adds its row.
/// * `every`: how many steps lie between two measurements, each followed by a save.
/// * `on_step`: called after each step.
///
/// # Errors
///
/// A step that cannot be taken or a loss that is not finite, of a step or of a measurement; the folder then still
/// holds what was saved last.
pub fn run(
    trainer: &mut Trainer,
    options: &Options,
    dir: Option<&RunDir>,
    rows: &mut Vec<Row>,
    every: usize,
    mut on_step: impl FnMut(&Row),
) -> Result<()> {
    let mut saved = rows.last().map(|row| row.step.step);
    while trainer.steps_taken() < options.steps {
        let start = Instant::now();
        let stopped = || match (dir, saved) {
            (Some(dir), Some(step)) => {
                format!(
                    "training stopped, {} holds step {step}",
                    dir.path().display()
                )
            }
            _ => "training stopped before anything was saved".to_string(),
        };
        let step = trainer.step().with_context(stopped)?;
        let tokens_per_second = options.tokens() as f64 / start.elapsed().as_secs_f64();

        let measure = step.step == options.steps || step.step.is_multiple_of(every.max(1));
        let held_out_loss = measure.then(|| trainer.held_out_loss()).transpose()?;
        if let Some(loss) = held_out_loss.filter(|loss| !loss.is_finite()) {
            // Before it takes the place of a good one.
            return Err(anyhow!(
                "step {}: the held-out loss is {loss}; lower --lr or --clip",
                step.step
            ))
            .with_context(stopped);
        }
        rows.push(Row {
            step,
            tokens_per_second,
            held_out_loss,
        });
        if let Some(dir) = dir.filter(|_| measure) {
            dir.save(trainer, rows, options)?;
            saved = Some(step.step);
        }
        on_step(&rows[rows.len() - 1]);
    }
    Ok(())
}
