//! A matrix on the last dimension: candle's own products, without the views that autograd would have to undo.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::{check, if_tracked};

/// Multiplies the last dimension with a matrix: `out = x · weightᵀ`.
///
/// The gradients are `dx = dout · weight` and `dweight = doutᵀ · x`, each one product into the layout of its
/// operand. (`x` reshaped to a matrix and times `weight.t()` is the same product, but candle's backward passes
/// each gradient on through the reshapes and the transpose, and adds it to zeros every time.)
///
/// # Arguments
///
/// * `x`: `(.., size_in)`, at least one dimension.
/// * `weight`: `(size_out, size_in)`.
///
/// # Returns
///
/// `(.., size_out)`, contiguous; differentiable in both.
///
/// # Errors
///
/// Shapes that do not match, dtypes or devices that differ, a device or dtype that candle has no product for.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let &[_, size_in] = weight.dims() else {
        bail!(
            "linear: weight must have 2 dimensions (size_out, size_in), got shape {:?}",
            weight.dims()
        );
    };
    if x.dims().last() != Some(&size_in) {
        bail!(
            "linear: x must have rows of the size_in of weight ({size_in}), got shape {:?}",
            x.dims()
        );
    }
    check::alike("linear", ("x", x), &[("weight", weight)])?;
    x.contiguous()?.apply_op2(&weight.contiguous()?, Linear)
}

struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        forward(x, x_layout, weight, weight_layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        forward(x, x_layout, weight, weight_layout)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (size_out, size_in) = weight.dims2()?;
        let rows = dout.elem_count() / size_out.max(1);
        let dout = dout.reshape((rows, size_out))?;
        let dx = || dout.matmul(&weight.detach())?.reshape(x.shape());
        let dweight = || dout.t()?.matmul(&x.detach().reshape((rows, size_in))?);
        Ok((if_tracked(x, dx)?, if_tracked(weight, dweight)?))
    }
}

fn forward<S: BackendStorage<Device: BackendDevice<Storage = S>>>(
    x: &S,
    x_layout: &Layout,
    weight: &S,
    weight_layout: &Layout,
) -> Result<(S, Shape)> {
    let (size_out, size_in) = weight_layout.shape().dims2()?;
    let (_, leading) = x_layout.dims().split_last().unwrap_or((&0, &[]));
    let shape = Shape::from(leading).extend(&[size_out]);
    let rows: usize = leading.iter().product();
    if rows * size_out * size_in == 0 {
        // CUDA has no allocation of nothing.
        let storage = Shape::from(shape.elem_count().max(1));
        return Ok((x.device().zeros_impl(&storage, x.dtype())?, shape));
    }
    let matrix = Layout::contiguous_with_offset((rows, size_in), x_layout.start_offset());
    let sizes = (1, rows, size_out, size_in);
    let out = x.matmul(weight, sizes, &matrix, &weight_layout.transpose(0, 1)?)?;
    Ok((out, shape))
}
