//! The slow twin: the formula in plain tensor operations, which defines what the op computes.

use candle_core::{DType, Result, Tensor};

use crate::api::AttnOptions;
use crate::params::AttnParams;

/// Computes what [`flash_attn_with`](crate::flash_attn_with) computes, in plain tensor operations.
///
/// It holds the whole `(seqlen_q, seqlen_k)` score matrix, works in the dtype of its inputs, and is
/// differentiable through candle's own operations. It is meant for tests and for reading.
///
/// Unlike the op it multiplies hidden keys by 0, so a NaN at a hidden key spreads.
///
/// # Arguments
///
/// Those of [`flash_attn_with`](crate::flash_attn_with).
///
/// # Returns
///
/// The attention of shape and dtype of `q`, contiguous.
///
/// # Errors
///
/// Those of [`flash_attn_with`](crate::flash_attn_with), but for a device, dtype or head_dim without a kernel.
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttnOptions) -> Result<Tensor> {
    let params = AttnParams::without_kernel(q, k, v, options)?;
    let AttnParams {
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = params;
    if batch == 0 || seqlen_q == 0 || seqlen_k == 0 {
        // Zeros, by differences that keep the inputs in the graph: without keys, q still gets a gradient of
        // zeros.
        let nothing = (k.sub(k)?.sum_all()? + v.sub(v)?.sum_all()?)?;
        return q.sub(q)?.broadcast_add(&nothing);
    }
    let group_size = params.group_size();

    // (batch, num_kv_heads, group_size, seqlen_q, ...): K and V broadcast over the group.
    let q = q.transpose(1, 2)?.contiguous()?.reshape((
        batch,
        num_kv_heads,
        group_size * seqlen_q,
        head_dim,
    ))?;
    let k = k.transpose(1, 2)?.contiguous()?;
    let v = v.transpose(1, 2)?.contiguous()?;

    let mut scores = (q.matmul(&k.t()?)? * params.softmax_scale)?.reshape((
        batch,
        num_kv_heads,
        group_size,
        seqlen_q,
        seqlen_k,
    ))?;
    if let Some(softcap) = params.softcap {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    if let Some(slopes) = &options.alibi_slopes {
        scores = scores.broadcast_add(&alibi_bias(&params, slopes, &scores)?)?;
    }
    let visible = visible_keys(&params, &scores)?;
    let minus_infinity = Tensor::new(f32::NEG_INFINITY, scores.device())?
        .to_dtype(scores.dtype())?
        .broadcast_as(scores.shape())?;
    let scores = visible
        .broadcast_as(scores.shape())?
        .where_cond(&scores, &minus_infinity)?;

    // A row without keys has maximum -inf and sum 0; 0 and 1 in their place make its output 0.
    let row_max = scores.max_keepdim(4)?.detach();
    let is_blind = visible
        .max_keepdim(1)?
        .eq(0u8)?
        .reshape((1, 1, 1, seqlen_q, 1))?
        .broadcast_as(row_max.shape())?;
    let row_max = is_blind.where_cond(&row_max.zeros_like()?, &row_max)?;
    let exponentials = scores.broadcast_sub(&row_max)?.exp()?;
    let row_sum = exponentials.sum_keepdim(4)?;
    let row_sum = is_blind.where_cond(&row_sum.ones_like()?, &row_sum)?;
    let probs = exponentials.broadcast_div(&row_sum)?;

    probs
        .reshape((batch, num_kv_heads, group_size * seqlen_q, seqlen_k))?
        .matmul(&v)?
        .reshape((batch, num_heads, seqlen_q, head_dim))?
        .transpose(1, 2)?
        .contiguous()
}

/// 1 where row `i` sees key `j`, `(seqlen_q, seqlen_k)`.
fn visible_keys(params: &AttnParams, scores: &Tensor) -> Result<Tensor> {
    let mut visible = vec![0u8; params.seqlen_q * params.seqlen_k];
    for (row, keys) in visible.chunks_exact_mut(params.seqlen_k).enumerate() {
        keys[params.mask.keys_of_row(row)].fill(1);
    }
    Tensor::from_vec(visible, (params.seqlen_q, params.seqlen_k), scores.device())
}

/// `-slope * |i + seqlen_k - seqlen_q - j|`, `(batch, num_kv_heads, group_size, seqlen_q, seqlen_k)`.
fn alibi_bias(params: &AttnParams, slopes: &Tensor, scores: &Tensor) -> Result<Tensor> {
    let (seqlen_q, seqlen_k) = (params.seqlen_q as i64, params.seqlen_k as i64);
    let distance: Vec<f64> = (0..seqlen_q)
        .flat_map(|i| (0..seqlen_k).map(move |j| (i + seqlen_k - seqlen_q - j).abs() as f64))
        .collect();
    let distance = Tensor::from_vec(
        distance,
        (1, 1, 1, params.seqlen_q, params.seqlen_k),
        scores.device(),
    )?;
    let slopes = slopes
        .broadcast_as((params.batch, params.num_heads))?
        .reshape((params.batch, params.num_kv_heads, params.group_size(), 1, 1))?
        .detach();
    slopes
        .to_dtype(DType::F64)?
        .neg()?
        .broadcast_mul(&distance)?
        .to_dtype(scores.dtype())
}
