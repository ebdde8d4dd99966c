//! SwiGLU.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::check;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Multiplies with a gate: `out = silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`.
///
/// # Arguments
///
/// * `gate`, `up`: of one shape.
///
/// # Returns
///
/// Shape and dtype of `gate`, contiguous; differentiable in both.
///
/// # Errors
///
/// Shapes, dtypes or devices that differ, a device or dtype without kernels.
///
/// # References
///
/// N. Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check::same_shape("swiglu", ("gate", gate), ("up", up))?;
    check::alike("swiglu", ("gate", gate), &[("up", up)])?;
    check::has_kernel("swiglu", gate)?;
    gate.contiguous()?.apply_op2(&up.contiguous()?, Swiglu)
}

struct Swiglu;

impl CustomOp2 for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = cpu::training::swiglu::forward((gate, gate_layout), (up, up_layout))?;
        Ok((out, gate_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        gate: &CudaStorage,
        gate_layout: &Layout,
        up: &CudaStorage,
        up_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = cuda::training::swiglu::forward((gate, gate_layout), (up, up_layout))?;
        Ok((out, gate_layout.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dout = &dout.contiguous()?;
        let [dgate, dup] = on_device!(gate.device(), swiglu::backward(gate, up, dout))?;
        Ok((Some(dgate), Some(dup)))
    }
}
