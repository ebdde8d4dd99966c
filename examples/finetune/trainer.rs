//! The training loop's inside: one step, one measurement, and the state between them.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use candle_transformers::models::llama::Config;

use crate::batches::Batches;
use crate::model::{Attention, Llama};
use crate::options::Options;
use crate::training::loss::next_token_loss;
use crate::training::{AdamW, Gradients};
use crate::weights::Weights;

pub struct Trainer {
    options: Options,
    weights: Weights,
    model: Llama,
    measured: Llama,
    optimizer: AdamW,
    batches: Batches,
    /// Of the text, and of the weights that adapters adapt (0 without).
    checksums: [u32; 2],
    /// Steps taken.
    step: usize,
}

/// What one step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Counted from 1.
    pub step: usize,
    /// Before the update.
    pub loss: f32,
    pub learning_rate: f64,
    /// Before clipping.
    pub gradient_norm: f64,
}

/// A loss, or a gradient, that is no longer a number.
#[derive(Debug)]
pub enum NotFinite {
    Step(Step),
    HeldOut { step: usize, loss: f32 },
}

/// What to do about [`NotFinite`] where nothing was saved.
pub const LOWER_RATE: &str = "start again with a lower --lr or --clip";

impl NotFinite {
    /// Puts what to do before an error of this kind, and leaves others as they are.
    pub fn advise(error: anyhow::Error, advice: impl FnOnce() -> String) -> anyhow::Error {
        match error.is::<Self>() {
            true => error.context(advice()),
            false => error,
        }
    }
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step(step) => write!(
                f,
                "step {}: the loss is {} and the gradient's norm {}",
                step.step, step.loss, step.gradient_norm
            ),
            Self::HeldOut { step, loss } => {
                write!(f, "step {step}: the held-out loss is {loss}")
            }
        }
    }
}

impl Error for NotFinite {}

impl Trainer {
    /// Starts from `weights`, of which it makes its own copies on the device of `batches`. The model
    /// computes in `dtype`; what the optimiser keeps is F32.
    pub fn new(
        options: &Options,
        config: &Config,
        weights: &HashMap<String, Tensor>,
        batches: Batches,
        attention: Attention,
        dtype: DType,
    ) -> Result<Self> {
        let positions = config.max_position_embeddings;
        ensure!(
            options.seqlen <= positions,
            "--seqlen {} is more than the model's {positions} positions",
            options.seqlen
        );
        let device = batches.device();
        let of_base = match options.lora {
            Some(_) => checksum(weights)?,
            None => 0,
        };
        let checksums = [batches.checksum(), of_base];
        let weights = match options.lora {
            Some(rank) => {
                let projections = options.lora_on.names();
                Weights::lora(weights, rank, projections, options.seed, dtype, device)?
            }
            None => Weights::all(weights, dtype, device)?,
        };
        let model = weights.model(config, attention)?;
        Ok(Self {
            options: options.clone(),
            model: model.with_recomputation(options.recompute),
            measured: weights.untracked(config, attention)?,
            optimizer: AdamW::new(weights.parameters(), options.weight_decay)?,
            weights,
            batches,
            checksums,
            step: 0,
        })
    }

    /// Runs the model forward and backward on the next micro-batches and updates the variables. A loss or
    /// gradient that is not finite is an error and changes nothing.
    pub fn step(&mut self) -> Result<Step> {
        let mut gradients = Gradients::default();
        for micro_batch in 0..self.options.accumulate {
            let loss = self.loss(micro_batch)?;
            gradients.add(&self.model, loss, self.weights.parameters().vars())?;
        }
        let (loss, gradient_norm) = gradients.loss_and_norm()?;
        let step = Step {
            step: self.step + 1,
            loss,
            learning_rate: self.options.learning_rate(self.step),
            gradient_norm,
        };
        if !step.loss.is_finite() || !step.gradient_norm.is_finite() {
            return Err(NotFinite::Step(step).into());
        }
        let clip = (self.options.clip / step.gradient_norm).min(1.);
        self.optimizer.update(
            self.weights.parameters(),
            &gradients,
            self.step,
            step.learning_rate,
            clip,
        )?;
        self.step += 1;
        Ok(step)
    }

    /// The loss of one of the next step's micro-batches.
    pub fn loss(&self, micro_batch: usize) -> Result<Tensor> {
        let (input, target) = self.batches.train(self.step, micro_batch)?;
        Ok(next_token_loss(&self.model, &input, &target)?)
    }

    /// Mean loss on the held-out text.
    pub fn held_out_loss(&self) -> Result<f32> {
        let losses = self
            .batches
            .held_out()
            .map(|sequence| {
                let (input, target) = sequence?;
                next_token_loss(&self.measured, &input, &target)?.to_scalar::<f32>()
            })
            .collect::<candle_core::Result<Vec<_>>>()?;
        Ok(losses.iter().sum::<f32>() / losses.len() as f32)
    }

    pub fn steps_taken(&self) -> usize {
        self.step
    }

    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Masters, moments and the number of steps: all that [`Trainer::restore`] needs, whatever the device
    /// and the type that the model computes in. The next step changes them.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        let mut state: HashMap<_, _> = self.optimizer.state().collect();
        for (name, master) in self.weights.parameters().masters() {
            state.insert(name.clone(), master.as_detached_tensor());
        }
        let step = Tensor::new(self.step as i64, self.batches.device())?;
        state.insert("steps_taken".to_string(), step);
        let checksums = Tensor::new(&self.checksums, self.batches.device())?;
        state.insert("checksums".to_string(), checksums);
        Ok(state)
    }

    /// Continues from a [`Trainer::state`], to the same bits as if never interrupted. Another text, and another model
    /// below adapters, are refused.
    pub fn restore(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let step = state.get("steps_taken").context("steps_taken is missing")?;
        let step = step.to_dtype(DType::I64)?.to_scalar::<i64>()?;
        let steps = self.options.steps;
        let step = usize::try_from(step)
            .ok()
            .filter(|step| *step <= steps)
            .with_context(|| format!("{step} steps are said to be taken, of {steps}"))?;
        let checksums = state.get("checksums").context("checksums are missing")?;
        let saved = checksums.to_vec1::<u32>()?;
        // The model first: one with another tokenizer makes other tokens of the same text.
        ensure!(
            saved.get(1) == self.checksums.get(1),
            "the model below the adapters is not what the run was started on"
        );
        ensure!(
            saved.first() == self.checksums.first(),
            "the text is not what the run was started on"
        );
        self.weights.parameters().restore(state)?;
        self.optimizer.restore(state)?;
        self.step = step;
        Ok(())
    }
}

/// Of weights with their names.
fn checksum(weights: &HashMap<String, Tensor>) -> Result<u32> {
    let mut names: Vec<&String> = weights.keys().collect();
    names.sort();
    let mut hasher = crc32fast::Hasher::new();
    for name in names {
        hasher.update(name.as_bytes());
        let numbers = weights[name].flatten_all()?.to_dtype(DType::F32)?;
        hasher.update(bytemuck::cast_slice(&numbers.to_vec1::<f32>()?));
    }
    Ok(hasher.finalize())
}
