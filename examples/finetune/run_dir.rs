//! The folder of a run: a checkpoint that `--example llama` loads, and what `--resume` needs.
//!
//! * `config.json`, `tokenizer.json`, `model.safetensors`: the model, adapters merged.
//! * `training.json`: the options; `training.safetensors`: variables, moments, steps taken.
//! * `losses.csv`: one row for each step.
//!
//! Each file is written under another name and then renamed, so it is there in full or as it was.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_transformers::models::llama::{Config, Llama3RopeType, LlamaEosToks};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::checkpoint::Checkpoint;
use crate::losses::{self, Row};
use crate::options::{Options, SaveDtype};
use crate::trainer::Trainer;

pub struct RunDir(PathBuf);

impl RunDir {
    /// Makes the folder and writes what stays the same from step to step. A folder that holds a model
    /// or a run is left as it is; one in which a run was started but saved nothing is taken over.
    pub fn create(
        path: &Path,
        options: &Options,
        config: &Config,
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        let dir = Self(path.to_path_buf());
        if let Some(found) = dir.not_to_overwrite() {
            bail!(
                "--out {} holds {found} already, which is not overwritten; choose another --out, or continue a run with --resume DIR",
                path.display()
            );
        }
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        // First, since by it a start is told from somebody else's model.
        let json = serde_json::to_string_pretty(options)?;
        dir.write_text("training.json", &format!("{json}\n"))?;
        dir.write_text(
            "config.json",
            &format!("{:#}\n", to_json(config, options.save_dtype)),
        )?;
        dir.write("tokenizer.json", |file| {
            tokenizer
                .save(file, false)
                .map_err(|error| anyhow!("{error}"))
        })?;
        Ok(dir)
    }

    /// Opens the folder of an earlier run and returns its options.
    pub fn open(path: &Path) -> Result<(Self, Options)> {
        let dir = Self(path.to_path_buf());
        let file = dir.file("training.json");
        let text = fs::read_to_string(&file).with_context(|| {
            format!(
                "cannot read {}; --resume takes the --out of an earlier run",
                file.display()
            )
        })?;
        let options: Options =
            serde_json::from_str(&text).with_context(|| dir.cannot_resume(&file))?;
        options.check().with_context(|| dir.cannot_resume(&file))?;
        dir.saved_state()?;
        Ok((dir, options))
    }

    /// The model that the last save wrote, F32, on the CPU.
    pub fn model(&self) -> Result<Checkpoint> {
        let file = self.file("model.safetensors");
        let broken = |what: &str| {
            format!(
                "cannot resume from {}, which {what}; put back a copy of it, or start the run again with another --out",
                file.display()
            )
        };
        ensure!(file.exists(), broken("does not exist"));
        let opened = Checkpoint::open(&self.0.display().to_string(), DType::F32, &Device::Cpu);
        // Of a damaged file it would be said to fetch it, but this one was made here.
        opened.or_else(|error| match safetensors::load(&file, &Device::Cpu) {
            Err(damage) => Err(damage).with_context(|| broken("is damaged")),
            Ok(_) => Err(error),
        })
    }

    /// Writes the model, the record and the state.
    pub fn save(&self, trainer: &Trainer, rows: &[Row], options: &Options) -> Result<()> {
        let mut weights = trainer.weights().merged()?;
        for weight in weights.values_mut() {
            *weight = weight.to_dtype(options.save_dtype.dtype())?;
        }
        self.write_tensors("model.safetensors", &weights)?;
        self.write_text("losses.csv", &losses::to_csv(rows))?;
        self.write_tensors("training.safetensors", &trainer.state()?)
    }

    /// Puts the trainer where the last [`RunDir::save`] left it and returns the rows up to there.
    pub fn restore(&self, trainer: &mut Trainer, device: &Device) -> Result<Vec<Row>> {
        let file = self.saved_state()?;
        safetensors::load(&file, device)
            .map_err(anyhow::Error::from)
            .and_then(|state| trainer.restore(&state))
            .with_context(|| self.cannot_resume(&file))?;
        let file = self.file("losses.csv");
        let csv = fs::read_to_string(&file)
            .map_err(anyhow::Error::from)
            .and_then(|csv| losses::from_csv(&csv));
        let mut rows = csv.with_context(|| self.cannot_resume(&file))?;
        // A save that was cut short has written the record already.
        let steps = trainer.steps_taken();
        rows.retain(|row| row.step.step <= steps);
        ensure!(
            rows.len() == steps,
            "{}: {} rows for {steps} steps taken",
            self.cannot_resume(&file),
            rows.len()
        );
        Ok(rows)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// What to say of a file that is damaged.
    fn cannot_resume(&self, file: &Path) -> String {
        format!(
            "cannot resume from {}, which is damaged or of another run; put back a copy of it, or start a new run from the model saved beside it with --model {} and another --out",
            file.display(),
            self.0.display()
        )
    }

    /// The file that a save writes last.
    fn saved_state(&self) -> Result<PathBuf> {
        let file = self.file("training.safetensors");
        ensure!(
            file.exists(),
            "cannot resume from {}, which has no training.safetensors: no save was completed; start the run again with {}",
            self.0.display(),
            // A save that was cut short has written the model already.
            match self.file("model.safetensors").exists() {
                true => "another --out, or remove the folder first",
                false => "--out",
            }
        );
        Ok(file)
    }

    /// A file of a model or of a run, unless it is a start without a save.
    fn not_to_overwrite(&self) -> Option<&'static str> {
        let weights = [
            "training.safetensors",
            "model.safetensors",
            "model.safetensors.index.json",
        ];
        let rewritten_by_a_start = ["config.json", "tokenizer.json"];
        let exists = |name: &&'static str| self.file(name).exists();
        let found = weights.into_iter().find(exists);
        if found.is_some() || self.file("training.json").exists() {
            return found;
        }
        rewritten_by_a_start.into_iter().find(exists)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write_text(&self, name: &str, text: &str) -> Result<()> {
        self.write(name, |file| Ok(fs::write(file, text)?))
    }

    fn write_tensors(&self, name: &str, tensors: &HashMap<String, Tensor>) -> Result<()> {
        self.write(name, |file| Ok(safetensors::save(tensors, file)?))
    }

    /// Lets `write` fill a file beside `name`, then puts it in its place.
    fn write(&self, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let (file, temporary) = (self.file(name), self.file(&format!("{name}.tmp")));
        write(&temporary)
            .and_then(|()| Ok(File::open(&temporary)?.sync_all()?))
            .and_then(|()| Ok(fs::rename(&temporary, &file)?))
            .with_context(|| format!("cannot write {}", file.display()))
    }
}

/// The text of `config.json`.
fn to_json(config: &Config, dtype: SaveDtype) -> Value {
    let mut json = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype.torch_name(),
        "vocab_size": config.vocab_size,
    });
    if let Some(id) = config.bos_token_id {
        json["bos_token_id"] = json!(id);
    }
    match &config.eos_token_id {
        None => {}
        Some(LlamaEosToks::Single(id)) => json["eos_token_id"] = json!(id),
        Some(LlamaEosToks::Multiple(ids)) => json["eos_token_id"] = json!(ids),
    }
    if let Some(scaling) = &config.rope_scaling {
        json["rope_scaling"] = json!({
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "rope_type": match scaling.rope_type {
                Llama3RopeType::Llama3 => "llama3",
                Llama3RopeType::Default => "default",
            },
        });
    }
    json
}
