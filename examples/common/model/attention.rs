//! The two attentions that the examples compare.

use std::fmt;

use candle_core::{D, Device, Result, Tensor};
use candle_flash_gqa::flash_attn;
use candle_nn::ops;
use candle_transformers::utils::{build_causal_mask, repeat_kv};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::layers::widen;

/// Which attention a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Attention {
    /// This crate's: one call, K and V as they are, no score matrix.
    Flash,
    /// Tensor operations, as candle-transformers does it: K and V repeated to `num_heads`, the
    /// `(seqlen_q, seqlen_k)` scores in memory.
    Plain,
}

impl Attention {
    /// The mask that [`Attention::forward`] wants for `seqlen` new tokens after `position` old ones.
    pub fn mask(self, seqlen: usize, position: usize, device: &Device) -> Result<Option<Tensor>> {
        match self {
            Self::Plain if seqlen > 1 => build_causal_mask(seqlen, position, device).map(Some),
            _ => Ok(None),
        }
    }

    /// Causal attention aligned bottom right: the last query sees every key.
    ///
    /// # Arguments
    ///
    /// * `q`: `(batch, seqlen_q, num_heads, head_dim)`.
    /// * `k`, `v`: `(batch, seqlen_k, num_kv_heads, head_dim)`.
    /// * `mask`: what [`Attention::mask`] returned.
    pub fn forward(
        self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let softmax_scale = 1. / (q.dim(D::Minus1)? as f64).sqrt();
        match self {
            Self::Flash => flash_attn(q, k, v, softmax_scale as f32, true),
            Self::Plain => plain(q, k, v, softmax_scale, mask),
        }
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Flash => "flash",
            Self::Plain => "plain",
        })
    }
}

fn plain(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f64,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    let group_size = q.dim(2)? / k.dim(2)?;
    let dtype = q.dtype();
    let q = heads_first(q)?;
    let k = repeat_kv(heads_first(k)?, group_size)?;
    let v = repeat_kv(heads_first(v)?, group_size)?;

    let mut scores = (q.matmul(&k.t()?)? * softmax_scale)?;
    if let Some(hidden) = mask {
        let minus_infinity =
            Tensor::new(f32::NEG_INFINITY, scores.device())?.to_dtype(scores.dtype())?;
        scores = hidden
            .broadcast_as(scores.shape())?
            .where_cond(&minus_infinity.broadcast_as(scores.shape())?, &scores)?;
    }
    let probs = if scores.track_op() {
        ops::softmax(&scores, D::Minus1)?
    } else {
        ops::softmax_last_dim(&scores)?
    };
    probs
        .matmul(&v)?
        .transpose(1, 2)?
        .contiguous()?
        .to_dtype(dtype)
}

/// `(batch, seqlen, heads, head_dim)` to `(batch, heads, seqlen, head_dim)`, contiguous, at least F32.
fn heads_first(x: &Tensor) -> Result<Tensor> {
    widen(&x.transpose(1, 2)?.contiguous()?)
}
