//! A model on random weights, and one training step of it.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::Config;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::model::{Attention, Llama, weight_shapes};
use crate::training::loss::next_token_loss;
use crate::training::{AdamW, Gradients, Parameters};

/// What training holds.
pub struct Step {
    pub model: Llama,
    pub parameters: Parameters,
    optimizer: AdamW,
    steps: usize,
}

impl Step {
    /// Draws the weights on the device, on a GPU the same on every run. BF16 on a GPU, F32 on the CPU.
    pub fn new(
        config: &Config,
        attention: Attention,
        recompute: bool,
        device: &Device,
    ) -> Result<Self> {
        let dtype = match device {
            Device::Cpu => DType::F32,
            _ => DType::BF16,
        };
        if device.is_cuda() {
            device.set_seed(1)?;
        }
        let weights = weight_shapes(config).into_iter().map(|(name, shape)| {
            let weight = match shape[..] {
                [_] => Tensor::ones(shape, DType::F32, device),
                _ => Tensor::randn(0f32, 0.02, shape, device),
            };
            weight.map(|weight| (name, weight))
        });
        let weights = weights.collect::<candle_core::Result<Vec<_>>>()?;
        let parameters = Parameters::new(weights, dtype)?;
        let tensors = parameters.vars().iter();
        let tensors = tensors.map(|(name, var)| (name.clone(), var.as_tensor().clone()));
        let model = Llama::new(tensors.collect(), config, attention)?;
        Ok(Self {
            model: model.with_recomputation(recompute),
            optimizer: AdamW::new(&parameters, 0.1)?,
            parameters,
            steps: 0,
        })
    }

    /// Weights of all matrices.
    pub fn matrix_weights(&self) -> usize {
        let vars = self.parameters.vars().values();
        vars.filter(|var| var.rank() > 1)
            .map(|var| var.elem_count())
            .sum()
    }

    /// The loss of one micro-batch, `(batch, seqlen + 1)`.
    pub fn loss(&self, tokens: &Tensor) -> Result<Tensor> {
        let seqlen = tokens.dim(1)? - 1;
        let (input, target) = (tokens.narrow(1, 0, seqlen)?, tokens.narrow(1, 1, seqlen)?);
        Ok(next_token_loss(&self.model, &input, &target)?)
    }

    /// Norm, clipping and AdamW; returns the loss.
    pub fn update(&mut self, gradients: &Gradients) -> Result<f32> {
        let (loss, norm) = gradients.loss_and_norm()?;
        ensure!(
            loss.is_finite() && norm.is_finite(),
            "the loss is {loss} and the gradient's norm {norm}"
        );
        let clip = (1. / norm).min(1.);
        self.optimizer
            .update(&self.parameters, gradients, self.steps, 1e-4, clip)?;
        self.steps += 1;
        Ok(loss)
    }

    /// A whole step on micro-batches.
    pub fn take(&mut self, micro_batches: &[Tensor]) -> Result<f32> {
        let mut gradients = Gradients::default();
        for tokens in micro_batches {
            gradients.add(&self.model, self.loss(tokens)?, self.parameters.vars())?;
        }
        self.update(&gradients)
    }
}

/// Random tokens `(batch, seqlen + 1)`, the same on every run.
pub fn random_tokens(
    config: &Config,
    batch: usize,
    seqlen: usize,
    device: &Device,
) -> Result<Tensor> {
    let mut rng = StdRng::seed_from_u64(1);
    let tokens: Vec<u32> = (0..batch * (seqlen + 1))
        .map(|_| rng.random_range(0..config.vocab_size as u32))
        .collect();
    Ok(Tensor::from_vec(tokens, (batch, seqlen + 1), device)?)
}
