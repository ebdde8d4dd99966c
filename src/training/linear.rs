//! A matrix on the last dimension, or on heads: candle's own products, without the views that autograd would have to
//! undo.

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
    let [size_out, size_in] = matrix("linear", ("weight", weight))?;
    check_rows("linear", x, size_in)?;
    apply("linear", x, weight, 1, &[size_out])
}

/// [`linear`], from hidden states straight to heads: no reshape stands between a projection and
/// [`rope`](super::rope) or the attention, for autograd to undo.
///
/// # Arguments
///
/// * `x`: `(.., size_in)`, at least one dimension.
/// * `weight`: `(num_heads * head_dim, size_in)`.
///
/// # Returns
///
/// `(.., num_heads, head_dim)`, contiguous; differentiable in both.
///
/// # Errors
///
/// Those of [`linear`], and a `head_dim` that does not divide the rows of `weight`.
pub fn linear_to_heads(x: &Tensor, weight: &Tensor, head_dim: usize) -> Result<Tensor> {
    let [size_out, size_in] = matrix("linear_to_heads", ("weight", weight))?;
    if head_dim == 0 || !size_out.is_multiple_of(head_dim) {
        bail!(
            "linear_to_heads: weight must have a multiple of head_dim {head_dim} rows, got {size_out}"
        );
    }
    check_rows("linear_to_heads", x, size_in)?;
    apply(
        "linear_to_heads",
        x,
        weight,
        1,
        &[size_out / head_dim, head_dim],
    )
}

/// [`linear`], from heads to hidden states: its rows are all heads of a token side by side.
///
/// # Arguments
///
/// * `x`: `(.., num_heads, head_dim)`.
/// * `weight`: `(size_out, num_heads * head_dim)`.
///
/// # Returns
///
/// `(.., size_out)`, contiguous; differentiable in both.
///
/// # Errors
///
/// Those of [`linear`].
pub fn linear_from_heads(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let [size_out, size_in] = matrix("linear_from_heads", ("weight", weight))?;
    match x.dims() {
        [.., num_heads, head_dim] if num_heads * head_dim == size_in => (),
        dims => bail!(
            "linear_from_heads: x must have heads that make up the size_in of weight ({size_in}), got shape {dims:?}"
        ),
    }
    apply("linear_from_heads", x, weight, 2, &[size_out])
}

/// The sizes of a weight, `[size_out, size_in]`.
pub(super) fn matrix(op: &str, (name, weight): check::Named<'_>) -> Result<[usize; 2]> {
    match *weight.dims() {
        [size_out, size_in] => Ok([size_out, size_in]),
        ref dims => {
            bail!("{op}: {name} must have 2 dimensions (size_out, size_in), got shape {dims:?}")
        }
    }
}

/// Refuses rows that a weight cannot be multiplied with.
pub(super) fn check_rows(op: &str, x: &Tensor, size_in: usize) -> Result<()> {
    if x.dims().last() != Some(&size_in) {
        bail!(
            "{op}: x must have rows of the size_in of weight ({size_in}), got shape {:?}",
            x.dims()
        );
    }
    Ok(())
}

/// The product on the last `from` dimensions of `x`, which become `to`.
fn apply(op: &str, x: &Tensor, weight: &Tensor, from: usize, to: &[usize]) -> Result<Tensor> {
    check::alike(op, ("x", x), &[("weight", weight)])?;
    let leading = &x.dims()[..x.rank() - from];
    let op = Linear {
        rows: leading.iter().product(),
        shape: Shape::from(leading).extend(to),
    };
    x.contiguous()?.apply_op2(&weight.contiguous()?, op)
}

struct Linear {
    rows: usize,
    /// Of the output.
    shape: Shape,
}

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
        let out = product((x, x_layout), (weight, weight_layout), self.rows)?;
        Ok((out, self.shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = product((x, x_layout), (weight, weight_layout), self.rows)?;
        Ok((out, self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (size_out, size_in) = weight.dims2()?;
        let dout = dout.reshape((self.rows, size_out))?;
        let dx = || dout.matmul(&weight.detach())?.reshape(x.shape());
        let dweight = || dout.t()?.matmul(&x.detach().reshape((self.rows, size_in))?);
        Ok((if_tracked(x, dx)?, if_tracked(weight, dweight)?))
    }
}

/// `(rows, size_in)` times `(size_out, size_in)` transposed; both contiguous.
pub(super) fn product<S: BackendStorage<Device: BackendDevice<Storage = S>>>(
    (x, x_layout): (&S, &Layout),
    (weight, weight_layout): (&S, &Layout),
    rows: usize,
) -> Result<S> {
    let (size_out, size_in) = weight_layout.shape().dims2()?;
    if rows * size_out * size_in == 0 {
        // CUDA has no allocation of nothing.
        let storage = Shape::from((rows * size_out).max(1));
        return x.device().zeros_impl(&storage, x.dtype());
    }
    let matrix = Layout::contiguous_with_offset((rows, size_in), x_layout.start_offset());
    let sizes = (1, rows, size_out, size_in);
    x.matmul(weight, sizes, &matrix, &weight_layout.transpose(0, 1)?)
}
