//! The training loop: steps, measurements, saves.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::losses::Row;
use crate::options::Options;
use crate::run_dir::RunDir;
use crate::trainer::{LOWER_RATE, NotFinite, Trainer};

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
    // A trainer that has taken steps comes from a save.
    let mut saved = Some(trainer.steps_taken()).filter(|&step| step > 0);
    while trainer.steps_taken() < options.steps {
        let stopped = |error| stopped(error, dir.zip(saved));
        let start = Instant::now();
        let step = trainer.step().map_err(stopped)?;
        let tokens_per_second = tokens_per_second(options, start.elapsed());

        let measure = step.step == options.steps || step.step.is_multiple_of(every.max(1));
        let held_out_loss = measure.then(|| trainer.held_out_loss()).transpose()?;
        if let Some(loss) = held_out_loss.filter(|loss| !loss.is_finite()) {
            // Before it takes the place of a good one.
            let step = step.step;
            return Err(stopped(NotFinite::HeldOut { step, loss }.into()));
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

/// Over all sequences of all micro-batches of a step that took `time`.
pub fn tokens_per_second(options: &Options, time: Duration) -> f64 {
    options.tokens() as f64 / time.as_secs_f64()
}

/// An error of a step, after what is left of the run and how to go on. A saved run keeps its options, so those that
/// broke it are changed in a new one.
fn stopped(error: anyhow::Error, saved: Option<(&RunDir, usize)>) -> anyhow::Error {
    let (stopped, advice) = match saved {
        Some((dir, step)) => {
            let dir = dir.path().display();
            (
                format!("training stopped, {dir} holds step {step}"),
                format!(
                    "start again from it with --model {dir} --out NEWDIR and a lower --lr or --clip"
                ),
            )
        }
        None => (
            "training stopped before anything was saved".to_string(),
            LOWER_RATE.to_string(),
        ),
    };
    NotFinite::advise(error, || advice).context(stopped)
}
