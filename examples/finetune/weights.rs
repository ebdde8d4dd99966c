//! Which tensors a run trains, and what they become.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_transformers::models::llama::Config;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

use crate::model::{Attention, Llama, weight_shapes};
use crate::training::Parameters;

/// Trained and frozen tensors by the names that [`Llama::new`] asks for.
pub struct Weights {
    parameters: Parameters,
    /// In the type and on the device that the model computes in.
    frozen: HashMap<String, Tensor>,
    /// The same in F32 as they were read, to merge adapters into.
    original: HashMap<String, Tensor>,
}

impl Weights {
    /// Trains every weight.
    pub fn all(
        weights: &HashMap<String, Tensor>,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Self> {
        let weights = weights
            .iter()
            .map(|(name, weight)| Ok((name.clone(), weight.to_device(device)?)))
            .collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Self {
            parameters: Parameters::new(weights, dtype)?,
            frozen: HashMap::new(),
            original: HashMap::new(),
        })
    }

    /// Freezes every weight and trains `lora_b · lora_a` beside each of the named projections. `lora_b`
    /// starts at 0, so that the model starts as it is.
    pub fn lora(
        weights: &HashMap<String, Tensor>,
        rank: usize,
        projections: &[&str],
        seed: u64,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut adapters = vec![];
        let names: BTreeMap<_, _> = weights.iter().collect(); // in an order that never changes
        for (name, weight) in names {
            let Some((projection, last)) = projection_of(name) else {
                continue;
            };
            if !projections.contains(&last) {
                continue;
            }
            let (size_out, size_in) = weight.dims2()?;
            ensure!(
                rank <= size_out.min(size_in),
                "--lora {rank} is above the rank of {name}, {size_out} x {size_in}"
            );
            let std = 1. / (size_in as f64).sqrt();
            let lora_a = normal(&[rank, size_in], std, &mut rng, device)?;
            let lora_b = Tensor::zeros((size_out, rank), DType::F32, device)?;
            adapters.push((format!("{projection}.lora_a"), lora_a));
            adapters.push((format!("{projection}.lora_b"), lora_b));
        }
        let frozen = weights
            .iter()
            .map(|(name, weight)| {
                let weight = weight.to_device(device)?.to_dtype(dtype)?;
                Ok((name.clone(), weight))
            })
            .collect::<candle_core::Result<_>>()?;
        Ok(Self {
            parameters: Parameters::new(adapters, dtype)?,
            frozen,
            original: weights.clone(),
        })
    }

    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// A model whose variables autograd tracks.
    pub fn model(&self, config: &Config, attention: Attention) -> candle_core::Result<Llama> {
        self.build(config, attention, |var| var.as_tensor().clone())
    }

    /// A model that follows the variables' values without being tracked, for measuring.
    pub fn untracked(&self, config: &Config, attention: Attention) -> candle_core::Result<Llama> {
        self.build(config, attention, |var| var.as_detached_tensor())
    }

    fn build(
        &self,
        config: &Config,
        attention: Attention,
        tensor_of: impl Fn(&Var) -> Tensor,
    ) -> candle_core::Result<Llama> {
        let mut tensors = self.frozen.clone();
        let vars = self.parameters.vars().iter();
        tensors.extend(vars.map(|(name, var)| (name.clone(), tensor_of(var))));
        Llama::new(tensors, config, attention)
    }

    /// Plain weights without adapters, F32, on the CPU: what `--example llama` loads.
    pub fn merged(&self) -> candle_core::Result<HashMap<String, Tensor>> {
        let masters = self.parameters.masters();
        let mut merged = self.original.clone();
        for (name, master) in masters {
            match name.strip_suffix(".lora_a") {
                Some(projection) => {
                    let lora_b = &masters[&format!("{projection}.lora_b")];
                    let product = lora_b.matmul(master)?.detach().to_device(&Device::Cpu)?;
                    let weight = format!("{projection}.weight");
                    let sum = (&merged[&weight] + product)?;
                    merged.insert(weight, sum);
                }
                None if name.ends_with(".lora_b") => {}
                None => {
                    let weight = master.as_detached_tensor().to_device(&Device::Cpu)?;
                    merged.insert(name.clone(), weight);
                }
            }
        }
        Ok(merged)
    }
}

/// Random weights: normal, those that write into the residual narrower the deeper the model, norms 1.
/// On the CPU.
pub fn random(config: &Config, seed: u64) -> Result<HashMap<String, Tensor>> {
    let device = &Device::Cpu;
    let mut rng = StdRng::seed_from_u64(seed);
    let residual = 0.02 / (2. * config.num_hidden_layers as f64).sqrt();
    weight_shapes(config)
        .into_iter()
        .map(|(name, shape)| {
            let weight = if shape.len() == 1 {
                Tensor::ones(shape, DType::F32, device)?
            } else if name.contains("o_proj") || name.contains("down_proj") {
                normal(&shape, residual, &mut rng, device)?
            } else {
                normal(&shape, 0.02, &mut rng, device)?
            };
            Ok((name, weight))
        })
        .collect()
}

fn normal(shape: &[usize], std: f64, rng: &mut StdRng, device: &Device) -> Result<Tensor> {
    let normal = Normal::new(0., std)?;
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| normal.sample(rng) as f32).collect();
    Ok(Tensor::from_vec(values, shape, device)?)
}

/// `model.layers.0.self_attn.q_proj.weight` to its path without `.weight` and `q_proj`; nothing for the
/// weights outside the blocks.
fn projection_of(name: &str) -> Option<(&str, &str)> {
    let projection = name.strip_suffix(".weight")?;
    let (path, last) = projection.rsplit_once('.')?;
    path.starts_with("model.layers.")
        .then_some((projection, last))
}
