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
