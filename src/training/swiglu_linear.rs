//! SwiGLU of two projections.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};

use super::linear::{check_rows, matrix, product};
use super::{Kept, check, if_tracked};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Multiplies two projections of the same rows, one of them the gate: `out = silu(x · gate_weightᵀ) * (x · up_weightᵀ)`,
/// the inner half of a Llama's MLP.
///
/// It is [`swiglu`](super::swiglu) of two [`linear`](super::linear)s, to the same bits, as one node of the graph: the
/// gradients of the projections stay inside, where candle would add each to zeros first.
///
/// # Arguments
///
/// * `x`: `(.., size_in)`, at least one dimension.
/// * `gate_weight`, `up_weight`: `(size_out, size_in)`.
///
/// # Returns
///
/// `(.., size_out)`, contiguous; differentiable in all three.
///
/// # Errors
///
/// Shapes that do not match, dtypes or devices that differ, a device or dtype without kernels.
///
/// # References
///
/// N. Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.
pub fn swiglu_linear(x: &Tensor, gate_weight: &Tensor, up_weight: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu_linear";
    let (gate, up) = (("gate_weight", gate_weight), ("up_weight", up_weight));
    let [size_out, size_in] = matrix(OP, gate)?;
    check::same_shape(OP, gate, up)?;
    check_rows(OP, x, size_in)?;
    check::alike(OP, ("x", x), &[gate, up])?;
    check::has_kernel(OP, x)?;
    let leading = &x.dims()[..x.rank() - 1];
    let op = SwigluLinear {
        rows: leading.iter().product(),
        shape: Shape::from(leading).extend(&[size_out]),
        gate: Kept::default(),
        up: Kept::default(),
    };
    x.contiguous()?
        .apply_op3(&gate_weight.contiguous()?, &up_weight.contiguous()?, op)
}

struct SwigluLinear {
    rows: usize,
    /// Of the output.
    shape: Shape,
    gate: Kept,
    up: Kept,
}

/// The forward of either backend.
macro_rules! forward {
    ($backend:ident, $op:ident, $x:expr, $gate_weight:expr, $up_weight:expr) => {{
        let gate = product($x, $gate_weight, $op.rows)?;
        let up = product($x, $up_weight, $op.rows)?;
        let layout = Layout::contiguous($op.shape.clone());
        let out = $backend::training::swiglu::forward((&gate, &layout), (&up, &layout))?;
        $op.gate.fill($backend::training::tensor(gate, &$op.shape));
        $op.up.fill($backend::training::tensor(up, &$op.shape));
        Ok((out, $op.shape.clone()))
    }};
}

impl CustomOp3 for SwigluLinear {
    fn name(&self) -> &'static str {
        "swiglu-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        forward!(
            cpu,
            self,
            (x, x_layout),
            (gate, gate_layout),
            (up, up_layout)
        )
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        gate: &CudaStorage,
        gate_layout: &Layout,
        up: &CudaStorage,
        up_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        forward!(
            cuda,
            self,
            (x, x_layout),
            (gate, gate_layout),
            (up, up_layout)
        )
    }

    fn bwd(
        &self,
        x: &Tensor,
        gate_weight: &Tensor,
        up_weight: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (gate, up, dout) = (self.gate.get()?, self.up.get()?, &dout.contiguous()?);
        let [dgate, dup] = on_device!(x.device(), swiglu::backward(gate, up, dout))?;
        let (size_out, size_in) = gate_weight.dims2()?;
        let dgate = dgate.reshape((self.rows, size_out))?;
        let dup = dup.reshape((self.rows, size_out))?;
        let dx = || {
            let through_gate = dgate.matmul(&gate_weight.detach())?;
            let through_up = dup.matmul(&up_weight.detach())?;
            (through_gate + through_up)?.reshape(x.shape())
        };
        let dweight = |dout: &Tensor| dout.t()?.matmul(&x.detach().reshape((self.rows, size_in))?);
        Ok((
            if_tracked(x, dx)?,
            if_tracked(gate_weight, || dweight(&dgate))?,
            if_tracked(up_weight, || dweight(&dup))?,
        ))
    }
}
