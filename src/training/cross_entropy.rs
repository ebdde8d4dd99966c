//! Cross entropy.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::{Kept, check};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Computes the mean cross entropy of rows of logits, and never their softmax in memory.
///
/// `loss = mean over rows of lse - logits[target]`, where `lse = log(sum of exp(logits))`;
/// `dlogits = (exp(logits - lse) - [col == target]) * dloss / rows`.
///
/// # Arguments
///
/// * `logits`: `(.., vocab_size)`, of whichever dtype the model computes in.
/// * `targets`: `(..)`, the same dimensions, U32, each below `vocab_size`.
///
/// # Returns
///
/// The loss, without dimensions, F32 (F64 for F64); differentiable in `logits`, in their dtype.
///
/// # Errors
///
/// Logits without a row or without a column, targets of another shape or dtype or device, a
/// device or dtype without kernels; on the CPU a target that is no column. On CUDA such a target makes the loss
/// NaN, and the gradient of its row: to look at the targets would wait for the device.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    if logits.rank() == 0 || logits.elem_count() == 0 {
        bail!(
            "cross_entropy: logits must have at least one row and one column, got shape {:?}",
            logits.dims()
        );
    }
    let rows = &logits.dims()[..logits.rank() - 1];
    if targets.dims() != rows {
        bail!(
            "cross_entropy: targets must have one number for each row of logits, {rows:?}, got shape {:?}",
            targets.dims()
        );
    }
    check::indices("cross_entropy", ("targets", targets), ("logits", logits))?;
    check::has_kernel("cross_entropy", logits)?;
    let op = CrossEntropy {
        targets: targets.contiguous()?,
        lse: Kept::default(),
    };
    logits.contiguous()?.apply_op1(op)
}

struct CrossEntropy {
    targets: Tensor,
    /// Of each row, in the type of the arithmetic.
    lse: Kept,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (loss, lse) = cpu::training::cross_entropy::forward((logits, layout), &self.targets)?;
        self.lse.fill(lse);
        Ok((loss, ().into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (loss, lse) = cuda::training::cross_entropy::forward((logits, layout), &self.targets)?;
        self.lse.fill(lse);
        Ok((loss, ().into()))
    }

    fn bwd(&self, logits: &Tensor, _loss: &Tensor, dloss: &Tensor) -> Result<Option<Tensor>> {
        let (targets, lse) = (&self.targets, self.lse.get()?);
        let device = logits.device();
        let dlogits = on_device!(device, cross_entropy::backward(logits, targets, lse, dloss))?;
        Ok(Some(dlogits))
    }
}
