//! The training loop's inside: one step, one measurement, and the state between them.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Tensor};
use candle_nn::loss::cross_entropy;
use candle_transformers::models::llama::Config;

use crate::batches::Batches;
use crate::model::{Attention, Llama};
use crate::optimizer::{AdamW, gradient_norm};
use crate::options::Options;
use crate::weights::Weights;

pub struct Trainer {
    options: Options,
    weights: Weights,
    model: Llama,
    measured: Llama,
    optimizer: AdamW,
    batches: Batches,
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

impl Trainer {
    /// Starts from `weights`, of which it makes its own copies.
    pub fn new(
        options: &Options,
        config: &Config,
        weights: &HashMap<String, Tensor>,
        batches: Batches,
        attention: Attention,
    ) -> Result<Self> {
        let positions = config.max_position_embeddings;
        ensure!(
            options.seqlen <= positions,
            "--seqlen {} is more than the model's {positions} positions",
            options.seqlen
        );
        let weights = match options.lora {
            Some(rank) => Weights::lora(weights, rank, options.lora_on.names(), options.seed)?,
            None => Weights::all(weights)?,
        };
        Ok(Self {
            options: options.clone(),
            model: weights.model(config, attention)?,
            measured: weights.untracked(config, attention)?,
            optimizer: AdamW::new(&weights.vars, options.weight_decay)?,
            weights,
            batches,
            step: 0,
        })
    }

    /// Runs the model forward and backward on the next batch and updates the variables. A loss or
    /// gradient that is not finite is an error and changes nothing.
    pub fn step(&mut self) -> Result<Step> {
        let (input, target) = self.batches.train(self.step)?;
        let loss = loss(&self.model, &input, &target)?;
        let grads = loss.backward()?;
        let step = Step {
            step: self.step + 1,
            loss: loss.to_scalar()?,
            learning_rate: self.options.learning_rate(self.step),
            gradient_norm: gradient_norm(&self.weights.vars, &grads)?,
        };
        if !step.loss.is_finite() || !step.gradient_norm.is_finite() {
            bail!(
                "step {}: the loss is {} and the gradient's norm {}; lower --lr or --clip",
                step.step,
                step.loss,
                step.gradient_norm
            );
        }
        let scale = (self.options.clip / step.gradient_norm).min(1.);
        self.optimizer.update(
            &self.weights.vars,
            &grads,
            self.step,
            step.learning_rate,
            scale,
        )?;
        self.step += 1;
        Ok(step)
    }

    /// Mean loss on the held-out text.
    pub fn held_out_loss(&self) -> Result<f32> {
        let losses = self
            .batches
            .held_out()
            .map(|sequence| {
                let (input, target) = sequence?;
                loss(&self.measured, &input, &target)?.to_scalar::<f32>()
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

    /// Variables, moments and the number of steps: all that [`Trainer::restore`] needs.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        let mut state: HashMap<_, _> = self.optimizer.state().collect();
        for (name, var) in &self.weights.vars {
            state.insert(name.clone(), var.copy()?.detach());
        }
        let step = Tensor::new(self.step as i64, self.batches.device())?;
        state.insert("steps_taken".to_string(), step);
        Ok(state)
    }

    /// Continues from a [`Trainer::state`], to the same bits as if never interrupted.
    pub fn restore(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        for (name, var) in &self.weights.vars {
            let saved = state
                .get(name)
                .with_context(|| format!("{name} is missing; it is the state of another model"))?;
            var.set(saved)?;
        }
        self.optimizer.restore(state)?;
        let step = state.get("steps_taken").context("steps_taken is missing")?;
        self.step = step.to_dtype(DType::I64)?.to_scalar::<i64>()? as usize;
        Ok(())
    }
}

/// Mean cross-entropy of the next token.
fn loss(model: &Llama, input: &Tensor, target: &Tensor) -> candle_core::Result<Tensor> {
    let logits = model.logits(&model.hidden(input, None)?)?;
    cross_entropy(&logits.flatten_to(1)?, &target.flatten_all()?)
}
