//! What a run leaves in its folder, and what can be done with it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_transformers::generation::LogitsProcessor;
use tempfile::TempDir;

use crate::checkpoint::Checkpoint;
use crate::generate::{Generation, feed};
use crate::losses::{self, Row};
use crate::model::{Attention, KvCache, Llama};
use crate::options::{ComputeDtype, LoraOn, Options};
use crate::plot;
use crate::run;
use crate::run_dir::RunDir;
use crate::scratch;
use crate::setup::{self, CPU_F32, Place};
use crate::trainer::Trainer;

fn open(path: &Path) -> Result<Checkpoint> {
    Checkpoint::open(&path.display().to_string(), DType::F32, &Device::Cpu)
}

/// A trainer and a folder for it, on the CPU in F32.
fn start(path: &Path, options: &Options) -> Result<(Trainer, RunDir)> {
    start_in(&CPU_F32, path, options)
}

/// A trainer in a place and a folder for it.
pub fn start_in(place: &Place, path: &Path, options: &Options) -> Result<(Trainer, RunDir)> {
    let checkpoint = setup::checkpoint(options)?;
    let dir = RunDir::create(path, options, &checkpoint.config, &checkpoint.tokenizer)?;
    let trainer = place.trainer(options, &checkpoint, Attention::Flash)?;
    Ok((trainer, dir))
}

/// A trainer in a place that goes on from what the folder holds, and the rows up to there.
pub fn resume_in(place: &Place, dir: &RunDir, options: &Options) -> Result<(Trainer, Vec<Row>)> {
    let checkpoint = match options.lora {
        None => open(dir.path())?,
        Some(_) => setup::checkpoint(options)?,
    };
    let mut trainer = place.trainer(options, &checkpoint, options.attention)?;
    let rows = dir.restore(&mut trainer, &place.device)?;
    Ok((trainer, rows))
}

/// Trains to the end; returns the rows, without the speed, and the weights.
fn finish(
    trainer: &mut Trainer,
    options: &Options,
    dir: &RunDir,
    rows: &mut Vec<Row>,
) -> Result<Vec<(String, Vec<f32>)>> {
    run::run(trainer, options, Some(dir), rows, 5, |_| ())?;
    for row in rows.iter_mut() {
        row.tokens_per_second = 0.;
    }
    trainer
        .weights()
        .parameters()
        .vars()
        .iter()
        .map(|(name, var)| {
            let values = var.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
            Ok((name.clone(), values))
        })
        .collect()
}

/// Where a run on the CPU computes that nobody says more of.
fn place_of(options: &Options) -> Result<Place> {
    let device = Device::Cpu;
    let dtype = options.compute_dtype(None, &device)?.dtype();
    Ok(Place { device, dtype })
}

fn assert_resumed_run_is_the_same(options: &Options) -> Result<()> {
    let folder = TempDir::new()?;
    let place = place_of(options)?;
    let (mut trainer, dir) = start_in(&place, &folder.path().join("whole"), options)?;
    let mut rows = vec![];
    let weights = finish(&mut trainer, options, &dir, &mut rows)?;

    // Stopped in step 8, so what was saved is step 5.
    let path = folder.path().join("interrupted");
    let (mut trainer, dir) = start_in(&place, &path, options)?;
    let stopped = Options {
        steps: 5,
        ..options.clone()
    };
    let mut first_rows = vec![];
    for _ in 0..5 {
        let step = trainer.step()?;
        let held_out_loss = (step.step == 5)
            .then(|| trainer.held_out_loss())
            .transpose()?;
        first_rows.push(Row {
            step,
            tokens_per_second: 0.,
            held_out_loss,
        });
    }
    dir.save(&trainer, &first_rows, &stopped)?;
    trainer.step()?;
    drop(trainer);

    let (dir, options) = RunDir::open(&path)?;
    let (mut trainer, mut resumed) = resume_in(&place_of(&options)?, &dir, &options)?;
    assert_eq!(resumed, first_rows);
    assert_eq!(trainer.steps_taken(), 5);
    let resumed_weights = finish(&mut trainer, &options, &dir, &mut resumed)?;
    assert_eq!(resumed, rows);
    assert_eq!(resumed_weights, weights);
    Ok(())
}

#[test]
fn a_resumed_run_takes_the_very_same_steps() -> Result<()> {
    assert_resumed_run_is_the_same(&setup::options(&[]))
}

#[test]
fn a_resumed_run_of_adapters_takes_the_very_same_steps() -> Result<()> {
    let mut options = setup::options(&["--save-dtype", "f16"]);
    options.lora = Some(2);
    assert_resumed_run_is_the_same(&options)
}

#[test]
fn a_resumed_run_in_bf16_takes_the_very_same_steps() -> Result<()> {
    for lora in [None, Some(2)] {
        let mut options = setup::options(&[]);
        (options.lora, options.dtype) = (lora, Some(ComputeDtype::BF16));
        assert_resumed_run_is_the_same(&options)?;
    }
    Ok(())
}

#[test]
fn a_resumed_run_computes_in_what_it_began_in_unless_told() -> Result<()> {
    use ComputeDtype::{BF16, F32};
    let mut options = setup::options(&[]);
    for (began_in, asked, expected) in [
        (None, None, F32),
        (Some(BF16), None, BF16),
        (Some(BF16), Some(F32), F32),
        (Some(F32), Some(BF16), BF16),
    ] {
        options.dtype = began_in;
        assert_eq!(options.compute_dtype(asked, &Device::Cpu)?, expected);
    }
    // A folder of before the type was saved.
    let mut json = serde_json::to_value(&options)?;
    assert_eq!(json["dtype"], "F32");
    json.as_object_mut().map(|fields| fields.remove("dtype"));
    let old: Options = serde_json::from_value(json)?;
    assert_eq!(old.dtype, None);
    Ok(())
}

#[test]
fn the_saved_model_is_the_trained_one() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("run");
    let options = setup::options(&[]);
    let (mut trainer, dir) = start(&path, &options)?;
    finish(&mut trainer, &options, &dir, &mut vec![])?;

    let saved = open(&path)?;
    let encoding = saved
        .tokenizer
        .encode("What said he?", true)
        .map_err(|error| anyhow!("{error}"))?;
    let prompt = encoding.get_ids();
    let expected = trainer
        .weights()
        .untracked(&saved.config, Attention::Flash)?;
    let expected = expected.hidden(&Tensor::new(prompt, &Device::Cpu)?.unsqueeze(0)?, None)?;
    let expected = expected.narrow(1, prompt.len() - 1, 1)?.flatten_all()?;

    let model = Llama::new(saved.weights.clone(), &saved.config, Attention::Flash)?;
    let mut cache = KvCache::new(&saved.config, 1, 40, DType::F32, &Device::Cpu)?;
    let logits = feed(&model, &mut cache, prompt, None, &Device::Cpu, |_| ())?;
    assert_eq!(cache.len(), prompt.len());
    let embed = &saved.weights["model.embed_tokens.weight"];
    let expected = embed.matmul(&expected.unsqueeze(1)?)?.squeeze(1)?;
    assert_close(&logits, &expected, 1e-5)?;

    let generation = Generation {
        model: &model,
        tokenizer: &saved.tokenizer,
        sampler: LogitsProcessor::new(1, Some(1.), None),
        stops: saved.stop_tokens(),
        max_tokens: 10,
    };
    let mut text = String::new();
    let ids = generation.run(&mut cache, logits, |piece| {
        text.push_str(piece);
        Ok(())
    })?;
    let decoded = saved
        .tokenizer
        .decode(&ids, true)
        .map_err(|error| anyhow!("{error}"))?;
    assert!(!ids.is_empty() && decoded.starts_with(&text));
    Ok(())
}

#[test]
fn adapters_leave_the_weights_alone_and_merge_into_them() -> Result<()> {
    for lora_on in [LoraOn::QV, LoraOn::All] {
        let mut options = setup::options(&["--lr", "3e-2"]);
        (options.lora, options.lora_on) = (Some(4), lora_on);
        let checkpoint = setup::checkpoint(&options)?;
        let mut trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
        for _ in 0..6 {
            trainer.step()?;
        }
        let vars = trainer.weights().parameters().vars();
        assert_eq!(vars.len(), 2 * 2 * lora_on.names().len());
        assert!(vars.keys().all(|name| name.contains(".lora_")));

        let config = &checkpoint.config;
        let tokens = Tensor::new(&[[5u32, 270, 31, 300, 8, 8, 291]], &Device::Cpu)?;
        let logits = |model: &Llama| model.logits(&model.hidden(&tokens, None)?);
        let merged = trainer.weights().merged()?;
        let beside = logits(&trainer.weights().untracked(config, Attention::Flash)?)?;
        let within = logits(&Llama::new(merged.clone(), config, Attention::Flash)?)?;
        let before = logits(&Llama::new(
            checkpoint.weights.clone(),
            config,
            Attention::Flash,
        )?)?;
        assert_close(&within, &beside, 1e-5)?;
        assert!(
            assert_close(&within, &before, 1e-3).is_err(),
            "the adapters changed nothing"
        );
        for (name, weight) in &merged {
            let adapted = lora_on
                .names()
                .iter()
                .any(|projection| name.contains(projection));
            let same = assert_close(weight, &checkpoint.weights[name], 0.).is_ok();
            assert_eq!(same, !adapted, "{name}");
        }
    }
    Ok(())
}

#[test]
fn a_folder_is_not_overwritten_and_only_a_run_is_resumed() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("run");
    let missing = RunDir::open(&path).err().map(|error| format!("{error:#}"));
    assert!(missing.is_some_and(|message| message.contains("--resume takes the --out")));
    let options = setup::options(&[]);
    let (mut trainer, dir) = start(&path, &options)?;
    let unsaved = dir
        .restore(&mut trainer, &Device::Cpu)
        .err()
        .map(|error| format!("{error:#}"));
    assert!(unsaved.is_some_and(|message| message.contains("cannot resume from")));
    // Nothing is lost by starting over until something was saved.
    let (trainer, dir) = start(&path, &options)?;
    dir.save(&trainer, &[], &options)?;
    let again = start(&path, &options)
        .err()
        .map(|error| format!("{error:#}"));
    assert!(again.is_some_and(|message| message.contains("holds training.safetensors already")));
    Ok(())
}

#[test]
fn the_folder_of_a_model_is_not_overwritten() -> Result<()> {
    let options = setup::options(&[]);
    for name in [
        "model.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "training.safetensors",
    ] {
        let folder = TempDir::new()?;
        let file = folder.path().join(name);
        fs::write(&file, "somebody's")?;
        let refused = start(folder.path(), &options)
            .err()
            .map(|error| format!("{error:#}"));
        let message = refused.expect(name);
        assert!(
            message.contains(&format!("holds {name} already"))
                && message.contains("choose another --out, or continue a run with --resume")
                && !message.contains('\n'),
            "{message}"
        );
        assert_eq!(fs::read_to_string(file)?, "somebody's");
        assert_eq!(fs::read_dir(folder.path())?.count(), 1, "{name}");
    }
    Ok(())
}

#[test]
fn a_damaged_run_is_named_with_what_to_do() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("run");
    let options = setup::options(&[]);
    let (mut trainer, dir) = start(&path, &options)?;
    let unsaved = RunDir::open(&path).err().map(|error| format!("{error:#}"));
    assert!(unsaved.is_some_and(|message| message.contains("start the run again with --out")));
    dir.save(&trainer, &[], &options)?;
    for name in ["training.safetensors", "losses.csv", "training.json"] {
        let file = path.join(name);
        let whole = fs::read(&file)?;
        fs::write(&file, &whole[..whole.len() / 2])?;
        let refused = RunDir::open(&path)
            .and_then(|(dir, _)| dir.restore(&mut trainer, &Device::Cpu))
            .err()
            .map(|error| format!("{error:#}"));
        let message = refused.expect(name);
        assert!(
            message.contains(&format!("cannot resume from {}", file.display()))
                && message.contains("put back a copy of it, or start a new run"),
            "{message}"
        );
        fs::write(&file, whole)?;
    }
    RunDir::open(&path)?.0.restore(&mut trainer, &Device::Cpu)?;
    Ok(())
}

#[test]
fn a_save_that_was_cut_short_says_what_to_do() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("run");
    let options = setup::options(&[]);
    let (trainer, dir) = start(&path, &options)?;
    dir.save(&trainer, &[], &options)?;
    // The file that a save writes last.
    fs::remove_file(path.join("training.safetensors"))?;
    let refused = RunDir::open(&path).err().map(|error| format!("{error:#}"));
    assert!(refused.is_some_and(|message| message.contains("another --out, or remove the folder")));
    Ok(())
}

/// Whoever has the old file open, or is cut short, has it whole: another takes its place.
#[test]
fn a_save_puts_new_files_in_place_of_old_ones() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("run");
    let options = setup::options(&[]);
    let (mut trainer, dir) = start(&path, &options)?;
    dir.save(&trainer, &[], &options)?;
    let names = ["model.safetensors", "training.safetensors", "losses.csv"];
    let before: Vec<Vec<u8>> = names
        .iter()
        .map(|name| {
            fs::hard_link(path.join(name), folder.path().join(name))?;
            Ok(fs::read(path.join(name))?)
        })
        .collect::<Result<_>>()?;
    let row = Row {
        step: trainer.step()?,
        tokens_per_second: 1.,
        held_out_loss: None,
    };
    dir.save(&trainer, &[row], &options)?;
    for (name, before) in names.iter().zip(&before) {
        assert_eq!(&fs::read(folder.path().join(name))?, before, "{name}");
        assert_ne!(&fs::read(path.join(name))?, before, "{name}");
        assert!(!path.join(format!("{name}.tmp")).exists());
    }
    Ok(())
}

/// The state goes last, so that it never is that of a later step than the model and the record.
#[test]
fn a_save_that_fails_leaves_the_files_after_it_as_they_were() -> Result<()> {
    let names = ["model.safetensors", "losses.csv", "training.safetensors"];
    for (blocked, name) in names.iter().enumerate() {
        let folder = TempDir::new()?;
        let path = folder.path().join("run");
        let options = setup::options(&[]);
        let (mut trainer, dir) = start(&path, &options)?;
        dir.save(&trainer, &[], &options)?;
        let read = || names.map(|name| fs::read(path.join(name)).unwrap_or_default());
        let before = read();
        let row = Row {
            step: trainer.step()?,
            tokens_per_second: 1.,
            held_out_loss: None,
        };
        // In the way of the file that is written first.
        fs::create_dir(path.join(format!("{name}.tmp")))?;
        let refused = dir.save(&trainer, &[row], &options).err();
        let message = refused.map(|error| format!("{error:#}")).expect(name);
        assert!(
            message.contains(&format!("cannot write {}", path.join(name).display())),
            "{message}"
        );
        for (i, (before, after)) in before.iter().zip(&read()).enumerate() {
            assert_eq!(before == after, i >= blocked, "{} after {name}", names[i]);
        }
    }
    Ok(())
}

#[test]
fn the_model_is_saved_in_the_type_that_is_asked_for() -> Result<()> {
    for (flag, dtype, name) in [
        ("f32", DType::F32, "float32"),
        ("f16", DType::F16, "float16"),
        ("bf16", DType::BF16, "bfloat16"),
    ] {
        let folder = TempDir::new()?;
        let path = folder.path().join("run");
        let options = setup::options(&["--save-dtype", flag]);
        let (trainer, dir) = start(&path, &options)?;
        dir.save(&trainer, &[], &options)?;
        let tensors = |name: &str| safetensors::load(path.join(name), &Device::Cpu);
        let model = tensors("model.safetensors")?;
        assert!(!model.is_empty() && model.values().all(|weight| weight.dtype() == dtype));
        // What the run continues from has all bits.
        let norm = &tensors("training.safetensors")?["model.norm.weight"];
        assert_eq!(norm.dtype(), DType::F32);
        let config = fs::read_to_string(path.join("config.json"))?;
        assert!(
            config.contains(&format!("\"torch_dtype\": \"{name}\"")),
            "{config}"
        );
    }
    Ok(())
}

/// What a restored trainer says of a state, on options with `more`.
fn refusal(
    options: &Options,
    state: &HashMap<String, Tensor>,
    change: impl FnOnce(&mut Checkpoint),
) -> Result<String> {
    let mut checkpoint = setup::checkpoint(options)?;
    change(&mut checkpoint);
    let mut trainer = setup::trainer(options, &checkpoint, Attention::Flash)?;
    let refused = trainer.restore(state);
    Ok(refused
        .err()
        .map_or(String::new(), |error| format!("{error:#}")))
}

#[test]
fn a_run_continues_on_its_own_text_and_base_alone() -> Result<()> {
    for lora in [None, Some(2)] {
        let mut options = setup::options(&[]);
        options.lora = lora;
        let checkpoint = setup::checkpoint(&options)?;
        let mut trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
        trainer.step()?;
        let state = trainer.state()?;
        assert_eq!(refusal(&options, &state, |_| ())?, "");

        let change_base = |checkpoint: &mut Checkpoint| {
            let norm = checkpoint.weights.get_mut("model.norm.weight").unwrap();
            *norm = (norm.clone() * 2.).unwrap();
        };
        let other_base = refusal(&options, &state, change_base)?;
        assert_eq!(
            other_base.contains("the model below the adapters"),
            lora.is_some()
        );

        let other_text = Options {
            held_out: 0.1,
            ..options.clone()
        };
        assert!(refusal(&other_text, &state, |_| ())?.contains("the text is not"));
        // As another model's tokenizer makes it.
        let both = refusal(&other_text, &state, change_base)?;
        assert_eq!(
            both.contains("the model below the adapters"),
            lora.is_some()
        );

        for steps in [-1i64, options.steps as i64 + 1] {
            let mut state = state.clone();
            state.insert("steps_taken".to_string(), Tensor::new(steps, &Device::Cpu)?);
            let message = refusal(&options, &state, |_| ())?;
            assert!(
                message.contains(&format!("{steps} steps are said to be taken, of 12")),
                "{message}"
            );
        }
    }
    Ok(())
}

#[test]
fn numbers_that_no_run_can_have_are_refused() -> Result<()> {
    for flag in [
        "--vocab",
        "--layers",
        "--hidden",
        "--ffn",
        "--heads",
        "--kv-heads",
        "--positions",
        "--seqlen",
        "--batch",
        "--steps",
    ] {
        for value in ["0", "-1"] {
            let message = setup::try_options(&[flag, value])
                .err()
                .map(|error| error.to_string());
            assert!(
                message.is_some_and(|text| text.contains("expected a whole number of at least 1")),
                "{flag} {value}"
            );
        }
    }
    for (batch, seqlen) in [
        ("99999999999", "32"),
        ("18446744073709551615", "32"),
        ("2", "18446744073709551615"),
    ] {
        let options = setup::options(&["--batch", batch, "--seqlen", seqlen]);
        let checkpoint = setup::checkpoint(&options)?;
        let refused = setup::trainer(&options, &checkpoint, Attention::Flash)
            .err()
            .map(|error| format!("{error:#}"));
        assert!(refused.is_some_and(|message| message.contains("give more text")));
    }
    Ok(())
}

#[test]
fn a_plot_that_cannot_be_written_is_refused_before_the_run() -> Result<()> {
    let folder = TempDir::new()?;
    let out = folder.path().join("run");
    let inside = out.join("loss.png");
    plot::check(&folder.path().join("loss.png"), None)?;
    plot::check(Path::new("loss.PNG"), None)?;
    plot::check(&inside, Some(&out))?;
    for (file, expected) in [
        (inside, "the folder does not exist"),
        (folder.path().join("loss.txt"), "ends in .png"),
        (folder.path().join("loss"), "ends in .png"),
    ] {
        let refused = plot::check(&file, None)
            .err()
            .map(|error| error.to_string());
        assert!(refused.is_some_and(|message| message.contains(expected)));
    }
    let both = folder.path().join("both.png");
    let refused = plot::check(&both, Some(&both)).err();
    assert!(refused.is_some_and(|error| error.to_string().contains("give the image another name")));
    Ok(())
}

#[test]
fn sizes_that_cannot_be_counted_and_texts_that_cannot_be_read_are_named() -> Result<()> {
    for (flag, name) in [
        ("--positions", "max_position_embeddings"),
        ("--hidden", "hidden_size"),
        ("--vocab", "vocab_size"),
    ] {
        let refused = setup::checkpoint(&setup::options(&[flag, "4294967296"]));
        let message = refused.err().map(|error| format!("{error:#}")).expect(flag);
        assert!(
            message.contains(&format!("{name} must be at most")) && message.contains("4294967296"),
            "{message}"
        );
    }
    // A model of 2 blocks of 32 in the defaults of these tests.
    for (flags, expected) in [
        (&["--vocab", "999999999"][..], "got 32000018560"),
        (
            &["--layers", "10000000"],
            "num_hidden_layers must be at most 4096, got 10000000",
        ),
        (
            &["--hidden", "1000000000", "--heads", "1", "--kv-heads", "1"],
            "a model of at most 4294967296 parameters is made, got 8000000709000000000",
        ),
        (
            &["--positions", "1073741824"],
            "at most 268435456, got 1073741824 x 8; lower --positions",
        ),
    ] {
        let refused = setup::checkpoint(&setup::options(flags));
        let message = refused
            .err()
            .map(|error| format!("{error:#}"))
            .expect(expected);
        assert!(message.contains(expected), "{message}");
    }
    let missing = Path::new("no/such/text.txt").to_path_buf();
    let refused = scratch::checkpoint(&setup::options(&[]), &[missing]).err();
    assert!(
        refused.is_some_and(|error| format!("{error:#}").contains("cannot read no/such/text.txt"))
    );
    Ok(())
}

#[test]
fn the_parameters_of_a_new_model_are_those_of_its_weights() -> Result<()> {
    let Checkpoint {
        config, weights, ..
    } = setup::checkpoint(&setup::options(&["--ffn", "80", "--kv-heads", "1"]))?;
    let numbers: usize = weights.values().map(Tensor::elem_count).sum();
    assert_eq!(scratch::parameters(&config), numbers as u128);
    // More tokens than the text can make are no reason to fail.
    let options = setup::options(&["--vocab", "1048576"]);
    let text = TempDir::new()?;
    let file = text.path().join("short.txt");
    fs::write(&file, "to be or not to be")?;
    let tokens = scratch::checkpoint(&options, &[file])?.config.vocab_size;
    assert!((257..280).contains(&tokens), "{tokens}");
    Ok(())
}

#[test]
fn the_losses_are_read_back_and_drawn() -> Result<()> {
    let options = setup::options(&[]);
    let checkpoint = setup::checkpoint(&options)?;
    let mut trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
    let mut rows = vec![];
    run::run(&mut trainer, &options, None, &mut rows, 4, |_| ())?;
    let read = losses::from_csv(&losses::to_csv(&rows))?;
    assert_eq!(read.len(), rows.len());
    for (read, row) in read.iter().zip(&rows) {
        assert_eq!(
            (read.step, read.held_out_loss),
            (row.step, row.held_out_loss)
        );
    }
    assert!(losses::from_csv("loss\n1").is_err());

    let folder = TempDir::new()?;
    let file = folder.path().join("loss.png");
    plot::draw(&file, &rows)?;
    let png = fs::read(&file)?;
    assert!(
        png.starts_with(b"\x89PNG") && png.len() > 5000,
        "{} bytes",
        png.len()
    );
    // The curves of the same losses as training's alone: between them, so that the axes are the same.
    let middle = rows.len() / 2;
    let drawn = |held_out: Option<f32>| -> Result<Vec<u8>> {
        let mut rows = rows.clone();
        for row in &mut rows {
            row.held_out_loss = None;
        }
        rows[middle].held_out_loss = held_out;
        plot::draw(&file, &rows)?;
        Ok(fs::read(&file)?)
    };
    let (low, high) = (rows[middle].step.loss, rows[0].step.loss);
    let curves = [None, Some(low), Some((low + high) / 2.)].map(drawn);
    let [none, low, between] = curves.map(|png| png.unwrap_or_default());
    assert!(none != low && low != between && none != between);
    assert!(plot::draw(&folder.path().join("none/loss.png"), &rows).is_err());
    assert!(plot::draw(&file, &[]).is_err());
    Ok(())
}

/// Fails when the largest difference is above `tolerance` times the largest element of `expected`.
fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f32) -> Result<()> {
    let of = |tensor: Tensor| tensor.abs()?.max_all()?.to_scalar::<f32>();
    let (difference, largest) = (of((got - expected)?)?, of(expected.clone())?);
    anyhow::ensure!(
        difference <= tolerance * largest,
        "off by {difference} of {largest}"
    );
    Ok(())
}
