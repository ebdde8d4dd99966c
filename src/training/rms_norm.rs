//! RMSNorm.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::{Kept, check, if_tracked};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Divides by the root mean square over the last dimension, then scales.
///
/// `out = x / sqrt(mean(x^2) + eps) * weight`
///
/// # Arguments
///
/// * `x`: `(.., cols)`, at least one dimension.
/// * `weight`: `(cols)`.
/// * `eps`: keeps a row of zeros from a division by 0; finite and at least 0.
///
/// # Returns
///
/// Shape and dtype of `x`, contiguous; differentiable in `x` and `weight`.
///
/// # Errors
///
/// A last dimension that is 0 or absent, a `weight` of another shape, dtypes or devices that differ, a device
/// or dtype without kernels, an `eps` out of its range.
///
/// # References
///
/// B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let cols = match x.dims() {
        [.., cols] if *cols > 0 => *cols,
        dims => bail!("rms_norm: x must have columns, got shape {dims:?}"),
    };
    if weight.dims() != [cols] {
        bail!(
            "rms_norm: weight must have the shape of a row of x, [{cols}], got {:?}",
            weight.dims()
        );
    }
    check::alike("rms_norm", ("x", x), &[("weight", weight)])?;
    check::has_kernel("rms_norm", x)?;
    if !(eps >= 0. && eps.is_finite()) {
        bail!("rms_norm: eps must be finite and at least 0, got {eps:e}");
    }
    let op = RmsNorm {
        eps,
        rstd: Kept::default(),
    };
    x.contiguous()?.apply_op2(&weight.contiguous()?, op)
}

struct RmsNorm {
    eps: f32,
    /// `1 / sqrt(mean(x^2) + eps)` of each row, in the type of the arithmetic.
    rstd: Kept,
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (out, rstd) =
            cpu::training::rms_norm::forward((x, x_layout), (weight, weight_layout), self.eps)?;
        self.rstd.fill(rstd);
        Ok((out, x_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (out, rstd) =
            cuda::training::rms_norm::forward((x, x_layout), (weight, weight_layout), self.eps)?;
        self.rstd.fill(rstd);
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let rstd = self.rstd.get()?;
        let dout = &dout.contiguous()?;
        let dx = || on_device!(x.device(), rms_norm::dx(x, weight, rstd, dout));
        let dweight = || on_device!(x.device(), rms_norm::dweight(x, rstd, dout));
        Ok((if_tracked(x, dx)?, if_tracked(weight, dweight)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn an_eps_that_is_negative_or_not_finite_is_refused() -> Result<()> {
        let (x, weight) = (
            Tensor::ones((2, 8), DType::F32, &Device::Cpu)?,
            Tensor::ones(8, DType::F32, &Device::Cpu)?,
        );
        for eps in [-1e-6, f32::NAN, f32::INFINITY] {
            let message = rms_norm(&x, &weight, eps).unwrap_err().to_string();
            let expected = format!("eps must be finite and at least 0, got {eps:e}");
            assert!(message.contains(&expected), "{message}");
        }
        rms_norm(&x, &weight, 0.).map(|_| ())
    }
}
