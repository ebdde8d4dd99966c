//! The public surface: two functions to compute, one that also returns lse, one to ask.

use candle_core::{DType, Device, Result, Tensor};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::op::FlashAttn;
use crate::params::AttnParams;

/// Everything about a call that is not a tensor of keys, values or queries.
///
/// The default is full attention with `softmax_scale = 1 / sqrt(head_dim)`.
///
/// ```
/// use candle_flash_gqa::AttnOptions;
/// let options = AttnOptions { causal: true, window_left: Some(4095), ..Default::default() };
/// # assert!(options.softcap.is_none());
/// ```
#[derive(Debug, Clone, Default)]
pub struct AttnOptions {
    /// Factor on `q·k` (natural base). Absent means `1 / sqrt(head_dim)`. At most 1e30 in magnitude.
    pub softmax_scale: Option<f32>,
    /// Row `i` sees no key beyond `i + seqlen_k - seqlen_q`. The same as `window_right = Some(0)`,
    /// and stronger than any other `window_right`.
    pub causal: bool,
    /// Keys visible to the left of the diagonal, not counting the diagonal itself: a sliding window
    /// of `W` keys is `causal` with `window_left = Some(W - 1)`. Absent means unbounded.
    pub window_left: Option<usize>,
    /// Keys visible to the right of the diagonal. Absent means unbounded.
    pub window_right: Option<usize>,
    /// Replaces each scaled score `s` by `softcap * tanh(s / softcap)`. Absent means off, and so does
    /// anything above 1e30. Must be finite and above 0.
    pub softcap: Option<f32>,
    /// Adds `-slope * |i + seqlen_k - seqlen_q - j|` to the score of row `i` and key `j`, after
    /// `softcap`. F32, shape `(num_heads)` or `(batch, num_heads)`, on the device of q. The slopes are
    /// constants: they receive no gradient.
    pub alibi_slopes: Option<Tensor>,
    /// Asks for the same bits of dQ on every run. out, lse, dK and dV always are; on the CPU so is
    /// dQ, whatever this says.
    pub deterministic: bool,
}

/// Computes `softmax(softmax_scale * q·kᵀ) · v`, with the signature of candle-flash-attn.
///
/// # Arguments
///
/// * `q`: `(batch, seqlen_q, num_heads, head_dim)`; F16, BF16 and, on the CPU, F32 or F64.
/// * `k`, `v`: `(batch, seqlen_k, num_kv_heads, head_dim)`, of the same dtype; query head `h` reads head
///   `h / (num_heads / num_kv_heads)`.
/// * `softmax_scale`: factor on `q·k`, usually `1 / sqrt(head_dim)`.
/// * `causal`: hides the keys to the right of the diagonal, which is anchored at the bottom right.
///
/// # Returns
///
/// The attention of shape and dtype of `q`, contiguous. It is differentiable in q, k and v.
///
/// # Errors
///
/// Those of [`flash_attn_with`].
///
/// # Example
///
/// ```
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (1, 128, 8, 64), &Device::Cpu)?;
/// let k = Tensor::randn(0f32, 1., (1, 128, 2, 64), &Device::Cpu)?;
/// let v = Tensor::randn(0f32, 1., (1, 128, 2, 64), &Device::Cpu)?;
/// let out = candle_flash_gqa::flash_attn(&q, &k, &v, 0.125, true)?;
/// assert_eq!(out.dims(), q.dims());
/// # Ok(())
/// # }
/// ```
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let options = AttnOptions {
        softmax_scale: Some(softmax_scale),
        causal,
        ..AttnOptions::default()
    };
    flash_attn_with(q, k, v, &options)
}

/// Computes attention with every option.
///
/// `scores = softmax_scale * q·kᵀ`, then `softcap`, then the alibi bias, then the mask;
/// `out = softmax(scores) · v`. A row that sees no key is 0.
///
/// # Arguments
///
/// * `q`: `(batch, seqlen_q, num_heads, head_dim)`; `k`, `v`: `(batch, seqlen_k, num_kv_heads,
///   head_dim)`. F16, BF16 and, on the CPU, F32 or F64, all the same; any strides and offsets. Half types
///   accumulate in f32. On CUDA `head_dim` is a multiple of 8 up to 256, and rows that are not 16-byte
///   aligned are copied.
/// * `options`: see [`AttnOptions`].
///
/// # Returns
///
/// The attention of shape and dtype of `q`, contiguous. It is differentiable in q, k and v.
///
/// # Errors
///
/// Checked in this order, before any work is done: rank, shapes that do not match, head counts that do
/// not divide, `head_dim` 0, tensors of 2^44 numbers or more, dtypes that differ, devices that differ, a
/// device, dtype or head_dim without a kernel ([`is_supported`]), a `softmax_scale` that is not finite or
/// above 1e30, a `softcap` that is not finite and positive or so small that `softmax_scale / softcap` is
/// above 1e30, `alibi_slopes` of another dtype, device or shape or, on the CPU, with a value that is not
/// finite or above 1e30 (on CUDA that would wait for the device). On CUDA also, after these: a batch, length
/// or number of heads from 2^30 on, and whatever the device reports. On the CPU an output for which there is no memory.
///
/// # Example
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_flash_gqa::{AttnOptions, flash_attn_with};
/// # fn main() -> candle_core::Result<()> {
/// let q = Var::randn(0f32, 1., (1, 16, 4, 32), &Device::Cpu)?;
/// let k = Var::randn(0f32, 1., (1, 16, 2, 32), &Device::Cpu)?;
/// let v = Var::randn(0f32, 1., (1, 16, 2, 32), &Device::Cpu)?;
/// let options = AttnOptions { causal: true, window_left: Some(7), ..Default::default() };
/// let out = flash_attn_with(&q, &k, &v, &options)?;
/// let grads = out.sum_all()?.backward()?;
/// assert_eq!(grads.get(&k).unwrap().dims(), k.dims());
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// T. Dao, "FlashAttention-2", 2023, arXiv 2307.08691, Algorithms 1 and 2.
pub fn flash_attn_with(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttnOptions,
) -> Result<Tensor> {
    let params = AttnParams::new(q, k, v, options)?;
    q.apply_op3(k, v, FlashAttn::new(params, is_tracked(q, k, v), false))
}

/// Computes attention and the log-sum-exp of each row.
///
/// # Arguments
///
/// Those of [`flash_attn_with`].
///
/// # Returns
///
/// The output of [`flash_attn_with`], and `lse` of shape `(batch, num_heads, seqlen_q)`, F32: the
/// natural logarithm of the sum of the exponentials of the row's visible scores, negative infinity
/// where there is none. `lse` is a constant to candle's backward: no gradient flows through it.
///
/// # Errors
///
/// Those of [`flash_attn_with`].
pub fn flash_attn_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttnOptions,
) -> Result<(Tensor, Tensor)> {
    let params = AttnParams::new(q, k, v, options)?;
    let op = FlashAttn::new(params, is_tracked(q, k, v), true);
    let stats = op.stats();
    let out = q.apply_op3(k, v, op)?;
    Ok((out, stats.lse()?))
}

/// Whether a backward may follow.
fn is_tracked(q: &Tensor, k: &Tensor, v: &Tensor) -> bool {
    q.track_op() || k.track_op() || v.track_op()
}

/// Tells whether the calls above have a kernel for this device, dtype and head_dim.
///
/// On a CUDA device it also asks for the device's compute capability, which must be 8.0 or more.
///
/// ```
/// use candle_core::{DType, Device};
/// assert!(candle_flash_gqa::is_supported(&Device::Cpu, DType::BF16, 128));
/// assert!(!candle_flash_gqa::is_supported(&Device::Cpu, DType::U8, 128));
/// ```
pub fn is_supported(device: &Device, dtype: DType, head_dim: usize) -> bool {
    match device {
        Device::Cpu => head_dim > 0 && CPU_DTYPES.contains(&dtype),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::dispatch::Gpu::of(device)
            .is_ok_and(|gpu| cuda::dispatch::is_supported(&gpu, dtype, head_dim)),
        _ => false,
    }
}

/// The element types of the CPU kernels.
const CPU_DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// What [`is_supported`] admits on a device, for error messages.
pub(crate) fn describe_supported(device: &Device) -> String {
    match device {
        Device::Cpu => format!("{CPU_DTYPES:?} with any head_dim from 1"),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let kernels = format!(
                "{:?} with a head_dim that is a multiple of {} up to {}",
                cuda::dispatch::DTYPES,
                cuda::dispatch::HEAD_DIM_MULTIPLE,
                cuda::dispatch::max_head_dim()
            );
            match cuda::dispatch::Gpu::of(device) {
                Ok(gpu) if gpu.compute_capability < (8, 0) => {
                    let (major, minor) = gpu.compute_capability;
                    format!(
                        "nothing, since its compute capability is {major}.{minor}; from 8.0 on, {kernels}"
                    )
                }
                Ok(_) => kernels,
                Err(error) => format!("unknown: {error}"),
            }
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => {
            "nothing (this build has CPU kernels only; the feature `cuda` adds those for CUDA)"
                .to_string()
        }
        _ => "nothing".to_string(),
    }
}
