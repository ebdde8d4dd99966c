//! `AttnParams`: a checked description of the problem. Every user error is raised here, before any
//! work is done, with what was got and what was expected.

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::api::{AttnOptions, describe_supported, is_supported};
use crate::mask::Mask;

/// The largest factor that is taken: its products with numbers of any usual size stay in f32's range.
const LARGEST_FACTOR: f32 = 1e30;

/// Numbers in a tensor from which it is refused. With a workspace of at most 2^19 bytes for each number, padding and
/// parts included, the size of every buffer fits 63 bits. Only expanded tensors can be so large.
const TOO_MANY_NUMBERS: u128 = 1 << 44;

/// One attention problem whose inputs have been checked against each other.
#[derive(Debug, Clone)]
pub(crate) struct AttnParams {
    pub(crate) batch: usize,
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_k: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) softmax_scale: f64,
    /// `softcap * tanh(score / softcap)`; absent means off.
    pub(crate) softcap: Option<f64>,
    /// Absent means off.
    pub(crate) alibi_slopes: Option<AlibiSlopes>,
    /// Whether dq has to be the same bits on every run.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "on the CPU it always is")
    )]
    pub(crate) deterministic: bool,
    pub(crate) mask: Mask,
}

impl AttnParams {
    /// Checks the call and derives everything that the kernels read.
    ///
    /// The order of the checks is the order of the `# Errors` section of
    /// [`flash_attn_with`](crate::flash_attn_with).
    pub(crate) fn new(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttnOptions) -> Result<Self> {
        Self::check(q, k, v, options, true)
    }

    /// [`AttnParams::new`] for plain tensor operations, which need no kernel.
    pub(crate) fn without_kernel(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttnOptions,
    ) -> Result<Self> {
        Self::check(q, k, v, options, false)
    }

    fn check(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttnOptions,
        needs_kernel: bool,
    ) -> Result<Self> {
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            if tensor.rank() != 4 {
                bail!(
                    "flash_attn: {name} must have 4 dimensions (batch, seqlen, num_heads, head_dim), got shape {:?}",
                    tensor.dims()
                );
            }
        }
        let (batch, seqlen_q, num_heads, head_dim) = q.dims4()?;
        let (_, seqlen_k, num_kv_heads, _) = k.dims4()?;
        if k.dims() != v.dims() {
            bail!(
                "flash_attn: k and v must have the same shape, got k {:?} and v {:?}",
                k.dims(),
                v.dims()
            );
        }
        if k.dims()[0] != batch {
            bail!(
                "flash_attn: k and v must have the batch size of q ({batch}), got {}",
                k.dims()[0]
            );
        }
        if k.dims()[3] != head_dim {
            bail!(
                "flash_attn: k and v must have the head_dim of q ({head_dim}), got {}",
                k.dims()[3]
            );
        }
        if num_heads == 0 || num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            bail!(
                "flash_attn: num_heads must be a positive multiple of num_kv_heads, got num_heads {num_heads} and num_kv_heads {num_kv_heads}"
            );
        }
        if head_dim == 0 {
            bail!("flash_attn: head_dim must be at least 1, got 0");
        }
        for (name, tensor) in [("q", q), ("k", k)] {
            // Products of some dimensions have to fit too where another is 0.
            let dims = tensor.dims().iter().map(|&dim| dim.max(1) as u128);
            if dims.fold(1, u128::saturating_mul) >= TOO_MANY_NUMBERS {
                bail!(
                    "flash_attn: {name} must have fewer than 2^44 numbers, a dimension of 0 counted as 1, got shape {:?}",
                    tensor.dims()
                );
            }
        }
        if q.dtype() != k.dtype() || q.dtype() != v.dtype() {
            bail!(
                "flash_attn: q, k and v must have the same dtype, got q {:?}, k {:?} and v {:?}",
                q.dtype(),
                k.dtype(),
                v.dtype()
            );
        }
        for (name, tensor) in [("k", k), ("v", v)] {
            if !tensor.device().same_device(q.device()) {
                bail!(
                    "flash_attn: q, k and v must be on the same device, got q on {:?} and {name} on {:?}",
                    q.device().location(),
                    tensor.device().location()
                );
            }
        }
        // The formula in plain operations takes on any device what the CPU kernels take.
        let device = if needs_kernel {
            q.device()
        } else {
            &Device::Cpu
        };
        if !is_supported(device, q.dtype(), head_dim) {
            bail!(
                "flash_attn: no kernel for dtype {:?} and head_dim {head_dim} on {:?}; available there: {}",
                q.dtype(),
                device.location(),
                describe_supported(device)
            );
        }

        let softmax_scale = match options.softmax_scale {
            None => 1. / (head_dim as f64).sqrt(),
            Some(scale) if scale.abs() <= LARGEST_FACTOR => f64::from(scale),
            Some(scale) => bail!(
                "flash_attn: softmax_scale must be finite and at most {LARGEST_FACTOR:e} in magnitude, got {scale:e}"
            ),
        };
        let softcap = match options.softcap {
            None => None,
            Some(cap) if !(cap.is_finite() && cap > 0.) => {
                bail!("flash_attn: softcap must be finite and above 0, got {cap:e}")
            }
            // Beyond this it changes no score that f32 can hold.
            Some(cap) if cap > LARGEST_FACTOR => None,
            Some(cap) if softmax_scale.abs() / f64::from(cap) <= f64::from(LARGEST_FACTOR) => {
                Some(f64::from(cap))
            }
            Some(cap) => bail!(
                "flash_attn: softmax_scale / softcap must be at most {LARGEST_FACTOR:e}, got {softmax_scale:e} / {cap:e}"
            ),
        };
        let alibi_slopes = options
            .alibi_slopes
            .as_ref()
            .map(|slopes| read_alibi_slopes(slopes, q.device(), batch, num_heads))
            .transpose()?
            .flatten();

        Ok(Self {
            batch,
            seqlen_q,
            seqlen_k,
            num_heads,
            num_kv_heads,
            head_dim,
            softmax_scale,
            softcap,
            alibi_slopes,
            deterministic: options.deterministic,
            mask: Mask::new(
                seqlen_q,
                seqlen_k,
                options.causal,
                options.window_left,
                options.window_right,
            ),
        })
    }

    /// Query heads that share one key/value head.
    pub(crate) fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

/// One slope for each (batch, head), row-major, where the kernels read them.
#[derive(Debug, Clone)]
pub(crate) enum AlibiSlopes {
    Host(Vec<f32>),
    /// `(batch, num_heads)`, F32, contiguous.
    #[cfg(feature = "cuda")]
    Device(Tensor),
}

impl AttnParams {
    /// The slopes of a problem on the CPU.
    pub(crate) fn alibi_slopes_on_host(&self) -> Option<&[f32]> {
        match &self.alibi_slopes {
            Some(AlibiSlopes::Host(slopes)) => Some(slopes),
            #[cfg(feature = "cuda")]
            Some(AlibiSlopes::Device(_)) => None,
            None => None,
        }
    }

    /// The slopes of a problem on another device.
    #[cfg(feature = "cuda")]
    pub(crate) fn alibi_slopes_on_device(&self) -> Option<&Tensor> {
        match &self.alibi_slopes {
            Some(AlibiSlopes::Device(slopes)) => Some(slopes),
            _ => None,
        }
    }
}

fn read_alibi_slopes(
    slopes: &Tensor,
    device: &Device,
    batch: usize,
    num_heads: usize,
) -> Result<Option<AlibiSlopes>> {
    if slopes.dtype() != DType::F32 {
        bail!(
            "flash_attn: alibi_slopes must be F32, got {:?}",
            slopes.dtype()
        );
    }
    if !slopes.device().same_device(device) {
        bail!(
            "flash_attn: alibi_slopes must be on the device of q ({:?}), got {:?}",
            device.location(),
            slopes.device().location()
        );
    }
    if slopes.dims() != [num_heads] && slopes.dims() != [batch, num_heads] {
        bail!(
            "flash_attn: alibi_slopes must have shape ({num_heads}) or ({batch}, {num_heads}), got {:?}",
            slopes.dims()
        );
    }
    let slopes = slopes.broadcast_as((batch, num_heads))?;
    if !device.is_cpu() {
        // To look at the values would be to wait for the device.
        #[cfg(feature = "cuda")]
        return Ok(Some(AlibiSlopes::Device(slopes.contiguous()?)));
        #[cfg(not(feature = "cuda"))]
        return Ok(None);
    }
    let values = slopes.flatten_all()?.to_vec1::<f32>()?;
    let is_usable = |slope: &&f32| slope.abs() <= LARGEST_FACTOR;
    if let Some(slope) = values.iter().find(|slope| !is_usable(slope)) {
        bail!(
            "flash_attn: alibi_slopes must be finite and at most {LARGEST_FACTOR:e} in magnitude, got {slope:e}"
        );
    }
    Ok(Some(AlibiSlopes::Host(values)))
}
