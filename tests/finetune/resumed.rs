//! What is said when a run stops or cannot be resumed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::losses::Row;
use crate::options::Options;
use crate::run;
use crate::run_dir::RunDir;
use crate::saved::{resume_in, start_in};
use crate::setup::{self, CPU_F32};
use crate::trainer::NotFinite;

/// The options, with an update so long that the next loss is not a number.
fn broken(options: &Options) -> Options {
    Options {
        lr: 1e15,
        clip: 1e30,
        warmup: 0,
        ..options.clone()
    }
}

/// A run's folder after four steps, saved.
fn saved_run(path: &Path, options: &Options) -> Result<(RunDir, Vec<Row>)> {
    let (mut trainer, dir) = start_in(&CPU_F32, path, options)?;
    let mut rows = vec![];
    let options = Options {
        steps: 4,
        ..options.clone()
    };
    run::run(&mut trainer, &options, Some(&dir), &mut rows, 4, |_| ())?;
    Ok((dir, rows))
}

fn refusal<T>(result: Result<T>) -> Result<String> {
    let error = result.err().context("it should have been refused")?;
    Ok(format!("{error:#}"))
}

#[test]
fn the_advice_after_a_broken_loss_can_be_followed() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("run");
    let options = setup::options(&[]);
    let (dir, rows) = saved_run(&path, &options)?;
    let broken = broken(&options);
    // Whatever rows the caller has: the folder holds the step that the trainer came from.
    for mut rows in [rows, vec![]] {
        let (mut trainer, _) = resume_in(&CPU_F32, &dir, &broken)?;
        let stopped = run::run(&mut trainer, &broken, Some(&dir), &mut rows, 50, |_| ());
        let message = refusal(stopped)?;
        let at = path.display();
        let expected = format!(
            "training stopped, {at} holds step 4: start again from it with --model {at} --out NEWDIR and a lower --lr or --clip: step 6: the loss is NaN"
        );
        assert!(message.starts_with(&expected), "{message}");
    }
    // As it says.
    let model = dir.model()?;
    let out = folder.path().join("new");
    let new = RunDir::create(&out, &options, &model.config, &model.tokenizer)?;
    let mut trainer = CPU_F32.trainer(&options, &model, options.attention)?;
    run::run(&mut trainer, &options, Some(&new), &mut vec![], 50, |_| ())
}

#[test]
fn a_run_that_saved_nothing_is_started_again() -> Result<()> {
    let folder = TempDir::new()?;
    let options = broken(&setup::options(&[]));
    let (mut trainer, dir) = start_in(&CPU_F32, &folder.path().join("run"), &options)?;
    let stopped = run::run(&mut trainer, &options, Some(&dir), &mut vec![], 50, |_| ());
    let expected = "training stopped before anything was saved: start again with a lower --lr or --clip: step 2: ";
    let message = refusal(stopped)?;
    assert!(message.starts_with(expected), "{message}");
    Ok(())
}

#[test]
fn other_errors_get_no_advice_on_rates() {
    let advised = |error| format!("{:#}", NotFinite::advise(error, || "lower it".to_string()));
    assert_eq!(advised(anyhow!("out of memory")), "out of memory");
    let (step, loss) = (3, f32::NAN);
    let error = NotFinite::HeldOut { step, loss }.into();
    assert_eq!(advised(error), "lower it: step 3: the held-out loss is NaN");
}

#[test]
fn a_record_without_rows_of_steps_taken_is_refused() -> Result<()> {
    let folder = TempDir::new()?;
    let options = setup::options(&[]);
    let (dir, _) = saved_run(&folder.path().join("run"), &options)?;
    let file = dir.path().join("losses.csv");
    let whole = fs::read_to_string(&file)?;
    for kept in 0..4 {
        let lines: Vec<&str> = whole.lines().take(kept + 1).collect();
        fs::write(&file, lines.join("\n"))?;
        let message = refusal(resume_in(&CPU_F32, &dir, &options))?;
        assert!(
            message.contains(&format!("cannot resume from {}", file.display()))
                && message.ends_with(&format!("{kept} rows for 4 steps taken")),
            "{message}"
        );
    }
    // Those of a save that was cut short are left out.
    let last = whole.lines().last().context("no rows")?;
    fs::write(&file, whole.clone() + &last.replacen('4', "5", 1))?;
    assert_eq!(resume_in(&CPU_F32, &dir, &options)?.1.len(), 4);
    Ok(())
}

#[test]
fn a_model_that_is_damaged_or_gone_is_named() -> Result<()> {
    let folder = TempDir::new()?;
    let options = setup::options(&[]);
    let (dir, _) = saved_run(&folder.path().join("run"), &options)?;
    let file = dir.path().join("model.safetensors");
    let whole = fs::read(&file)?;
    let said = |what: &str| -> Result<()> {
        let message = refusal(dir.model())?;
        let expected = format!(
            "cannot resume from {}, which {what}; put back a copy of it",
            file.display()
        );
        assert!(
            message.starts_with(&expected) && !message.contains("fetch"),
            "{message}"
        );
        Ok(())
    };
    fs::write(&file, &whole[..whole.len() / 2])?;
    said("is damaged")?;
    fs::remove_file(&file)?;
    said("does not exist")?;
    fs::write(&file, &whole)?;
    dir.model().map(|_| ())
}

#[test]
fn saved_options_that_no_run_can_have_are_refused() -> Result<()> {
    let folder = TempDir::new()?;
    let options = setup::options(&[]);
    let (dir, _) = saved_run(&folder.path().join("run"), &options)?;
    let file = dir.path().join("training.json");
    let saved: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    for (name, value, expected) in [
        ("accumulate", 0, "--accumulate must be at least 1, got 0"),
        (
            "accumulate",
            u64::MAX,
            "tokens, got 12 x 18446744073709551615 x 2 x 32",
        ),
        (
            "batch",
            1 << 60,
            "tokens, got 12 x 1 x 1152921504606846976 x 32",
        ),
    ] {
        let mut json = saved.clone();
        json[name] = json!(value);
        fs::write(&file, json.to_string())?;
        let message = refusal(RunDir::open(dir.path()))?;
        assert!(
            message.contains(&file.display().to_string()) && message.contains(expected),
            "{message}"
        );
    }
    fs::write(&file, saved.to_string())?;
    let (dir, options) = RunDir::open(dir.path())?;
    let mut trainer = CPU_F32.trainer(&options, &dir.model()?, options.attention)?;
    assert_eq!(dir.restore(&mut trainer, &Device::Cpu)?.len(), 4);
    Ok(())
}
