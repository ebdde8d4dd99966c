//! The keys and values of the tokens seen so far, one pair of tensors for each layer.

use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::llama::Config;

/// A cache of fixed capacity: appending writes the new rows and moves none of the old ones.
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>, // (batch, capacity, num_kv_heads, head_dim)
    len: usize,
}

impl KvCache {
    /// Allocates room for `capacity` tokens.
    pub fn new(
        config: &Config,
        batch: usize,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let head_dim = config.hidden_size / config.num_attention_heads;
        let shape = (batch, capacity, config.num_key_value_heads, head_dim);
        let layers = (0..config.num_hidden_layers)
            .map(|_| {
                Ok((
                    Tensor::zeros(shape, dtype, device)?,
                    Tensor::zeros(shape, dtype, device)?,
                ))
            })
            .collect::<Result<_>>()?;
        Ok(Self { layers, len: 0 })
    }

    /// Tokens held by every layer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Writes the new keys and values of one layer behind the old ones and returns views of all.
    pub(super) fn append(
        &mut self,
        layer: usize,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let (cache_k, cache_v) = &self.layers[layer];
        let seqlen_k = self.len + k.dim(1)?;
        if seqlen_k > cache_k.dim(1)? {
            candle_core::bail!(
                "the KV cache has room for {} tokens, got {seqlen_k}",
                cache_k.dim(1)?
            );
        }
        cache_k.slice_set(&k.contiguous()?, 1, self.len)?;
        cache_v.slice_set(&v.contiguous()?, 1, self.len)?;
        Ok((
            cache_k.narrow(1, 0, seqlen_k)?,
            cache_v.narrow(1, 0, seqlen_k)?,
        ))
    }

    /// Counts the tokens that every layer has appended.
    pub(super) fn advance(&mut self, seqlen: usize) {
        self.len += seqlen;
    }
}
