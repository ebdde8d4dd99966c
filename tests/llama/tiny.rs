//! Tiny models with random weights, and how close two results are.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::llama::{Config, Llama3RopeConfig, Llama3RopeType};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::model::weight_shapes;

/// A model of three layers whose heads come in groups of three.
pub fn config() -> Config {
    Config {
        hidden_size: 48,
        intermediate_size: 80,
        vocab_size: 64,
        num_hidden_layers: 3,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 512,
        tie_word_embeddings: true,
    }
}

/// The rotary scaling of Llama 3.1, for a short trained context so that it shows at once.
pub fn llama3_scaling() -> Llama3RopeConfig {
    Llama3RopeConfig {
        factor: 8.,
        low_freq_factor: 1.,
        high_freq_factor: 4.,
        original_max_position_embeddings: 64,
        rope_type: Llama3RopeType::Llama3,
    }
}

/// Random weights, large enough for attention to be far from uniform.
pub fn weights(config: &Config, dtype: DType) -> Result<HashMap<String, Tensor>> {
    let mut rng = StdRng::seed_from_u64(7);
    weight_shapes(config)
        .into_iter()
        .map(|(name, shape)| {
            let (middle, spread) = if shape.len() == 1 {
                (1., 0.3)
            } else {
                (0., 0.3)
            };
            let count = shape.iter().product();
            let values: Vec<f32> = (0..count)
                .map(|_| middle + spread * rng.random_range(-1f32..1.))
                .collect();
            let weight = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?;
            Ok((name, weight))
        })
        .collect()
}

/// The types that every device has kernels for.
pub const HALF_TYPES: [DType; 2] = [DType::F16, DType::BF16];

/// The same weights in another type or on another device.
pub fn converted(
    weights: &HashMap<String, Tensor>,
    dtype: DType,
    device: &Device,
) -> Result<HashMap<String, Tensor>> {
    weights
        .iter()
        .map(|(name, weight)| Ok((name.clone(), weight.to_dtype(dtype)?.to_device(device)?)))
        .collect()
}

/// `count` token ids below `config.vocab_size`.
pub fn tokens(config: &Config, count: usize) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(11);
    (0..count)
        .map(|_| rng.random_range(0..config.vocab_size as u32))
        .collect()
}

/// Fails when the largest difference is above `tolerance` times the largest element of `expected`.
pub fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64, what: &str) -> Result<()> {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let of = |tensor: &Tensor| -> Result<f64> {
        tensor.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar()
    };
    let (difference, largest) = (of(&(got - expected)?)?, of(expected)?);
    assert!(
        difference <= tolerance * largest,
        "{what}: off by {difference:.2e}, the largest element is {largest:.2e}"
    );
    Ok(())
}

/// Fails when `got` is further from the truth than `factor` times `plain`, which has the same dtype and device, and
/// one rounding of the largest element.
pub fn assert_as_good(
    got: &Tensor,
    plain: &Tensor,
    truth: &Tensor,
    factor: f64,
    what: &str,
) -> Result<()> {
    assert_eq!(got.dtype(), plain.dtype(), "{what}");
    let exact = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    let largest = |tensor: &Tensor| tensor.abs()?.max_all()?.to_scalar::<f64>();
    let truth = exact(truth)?;
    let error = |tensor: &Tensor| -> Result<f64> {
        assert_eq!(tensor.dims(), truth.dims(), "{what}");
        largest(&(exact(tensor)? - &truth)?)
    };
    let roundoff = match got.dtype() {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        dtype => panic!("{what}: half types only, got {dtype:?}"),
    };
    let (ours, plain) = (error(got)?, error(plain)?);
    let limit = factor * plain + roundoff * largest(&truth)?;
    assert!(
        ours <= limit,
        "{what}: off by {ours:.3e}, plain attention by {plain:.3e}, limit {limit:.3e}"
    );
    Ok(())
}
