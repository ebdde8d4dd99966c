//! Linear maps, norms and rotary positions, on the ops of [`candle_flash_gqa::training`]: the same ones in
//! training and inference.

use std::f32::consts::PI;

use candle_core::{DType, Device, Result, Tensor};
use candle_flash_gqa::training::{
    linear, linear_from_heads, linear_to_heads, rms_norm, swiglu, swiglu_linear,
};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Config, Llama3RopeConfig, Llama3RopeType};

/// A matrix without bias, with a low-rank adapter beside it where the weights hold one.
pub struct Projection {
    weight: Tensor, // (out, in)
    /// `lora_a` `(rank, in)` and `lora_b` `(out, rank)`: adds `lora_b · lora_a` to the matrix.
    adapter: Option<(Tensor, Tensor)>,
}

impl Projection {
    pub fn from_weight(weight: Tensor) -> Self {
        Self {
            weight,
            adapter: None,
        }
    }

    pub fn load(size_out: usize, size_in: usize, vb: VarBuilder) -> Result<Self> {
        let mut projection = Self::from_weight(vb.get((size_out, size_in), "weight")?);
        if vb.contains_tensor("lora_a") {
            let lora_a = vb.get_unchecked("lora_a")?;
            let lora_b = vb.get_unchecked("lora_b")?;
            projection.adapter = Some((lora_a, lora_b));
        }
        Ok(projection)
    }

    /// `(.., in)` to `(.., out)`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let out = linear(x, &self.weight)?;
        match &self.adapter {
            None => Ok(out),
            Some((lora_a, lora_b)) => out + linear(&linear(x, lora_a)?, lora_b)?,
        }
    }

    /// `(.., in)` to `(.., out / head_dim, head_dim)`.
    pub fn forward_to_heads(&self, x: &Tensor, head_dim: usize) -> Result<Tensor> {
        let out = linear_to_heads(x, &self.weight, head_dim)?;
        match &self.adapter {
            None => Ok(out),
            Some((lora_a, lora_b)) => out + linear_to_heads(&linear(x, lora_a)?, lora_b, head_dim)?,
        }
    }

    /// `(.., in / head_dim, head_dim)` to `(.., out)`.
    pub fn forward_from_heads(&self, x: &Tensor) -> Result<Tensor> {
        let out = linear_from_heads(x, &self.weight)?;
        match &self.adapter {
            None => Ok(out),
            Some((lora_a, lora_b)) => out + linear(&linear_from_heads(x, lora_a)?, lora_b)?,
        }
    }
}

/// SwiGLU of two projections, one op unless there is an adapter.
pub fn gated(gate: &Projection, up: &Projection, x: &Tensor) -> Result<Tensor> {
    match (&gate.adapter, &up.adapter) {
        (None, None) => swiglu_linear(x, &gate.weight, &up.weight),
        _ => swiglu(&gate.forward(x)?, &up.forward(x)?),
    }
}

/// Divides by the root mean square over the last dimension, then scales.
pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self {
            weight,
            eps: eps as f32,
        }
    }

    pub fn load(config: &Config, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get(config.hidden_size, "weight")?;
        Ok(Self::new(weight, config.rms_norm_eps))
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &self.weight, self.eps)
    }
}

/// Cosines and sines of every position, `(max_position_embeddings, head_dim / 2)`.
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    pub fn new(config: &Config, dtype: DType, device: &Device) -> Result<Self> {
        let positions = config.max_position_embeddings;
        let frequencies = Tensor::new(frequencies(config), device)?.unsqueeze(0)?;
        let angles = Tensor::arange(0, positions as u32, device)?
            .to_dtype(DType::F32)?
            .unsqueeze(1)?
            .matmul(&frequencies)?;
        Ok(Self {
            cos: angles.cos()?.to_dtype(dtype)?,
            sin: angles.sin()?.to_dtype(dtype)?,
        })
    }

    /// The rows of `seqlen` tokens from `position` on.
    pub fn at(&self, position: usize, seqlen: usize) -> Result<(Tensor, Tensor)> {
        let positions = self.cos.dim(0)?;
        if position + seqlen > positions {
            candle_core::bail!(
                "the model has {positions} positions (max_position_embeddings), got {}",
                position + seqlen
            );
        }
        Ok((
            self.cos.narrow(0, position, seqlen)?,
            self.sin.narrow(0, position, seqlen)?,
        ))
    }
}

/// The angle per position of each pair, with the scaling of Llama 3.1 where the model asks for it:
/// wavelengths longer than the trained context are stretched by `factor`, short ones kept, those
/// between interpolated.
fn frequencies(config: &Config) -> Vec<f32> {
    let head_dim = config.hidden_size / config.num_attention_heads;
    let plain =
        (0..head_dim / 2).map(|i| 1. / config.rope_theta.powf((2 * i) as f32 / head_dim as f32));
    match &config.rope_scaling {
        Some(scaling) if matches!(scaling.rope_type, Llama3RopeType::Llama3) => {
            plain.map(|frequency| stretch(frequency, scaling)).collect()
        }
        _ => plain.collect(),
    }
}

fn stretch(frequency: f32, scaling: &Llama3RopeConfig) -> f32 {
    // How often the pair turns within the context that the model was first trained on.
    let turns = scaling.original_max_position_embeddings as f32 * frequency / (2. * PI);
    let kept = ((turns - scaling.low_freq_factor)
        / (scaling.high_freq_factor - scaling.low_freq_factor))
        .clamp(0., 1.);
    kept * frequency + (1. - kept) * frequency / scaling.factor
}

/// Half types to F32, others as they are.
pub fn widen(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}
