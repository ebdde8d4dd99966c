//! Rows of a table.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::check;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Takes a row of a table for each id.
///
/// The gradient of a row is the sum of the gradients of all its copies, taken in f32 in their order and rounded
/// once. On CUDA that compares every id with every row of the table: quick, since ids are few, and without
/// sorting or atomic additions.
///
/// # Arguments
///
/// * `weight`: `(vocab_size, hidden_size)`.
/// * `ids`: any shape, U32, each below `vocab_size`.
///
/// # Returns
///
/// `(.., hidden_size)`, where `..` is the shape of `ids`, contiguous; differentiable in `weight`.
///
/// # Errors
///
/// A `weight` that is not a matrix with columns, ids of another dtype or device, a device or dtype without
/// kernels; on the CPU an id that is no row. On CUDA such an id gives a row of NaN and takes no gradient: to look
/// at the ids would wait for the device.
pub fn embedding(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    match weight.dims() {
        [_, hidden_size] if *hidden_size > 0 => (),
        dims => bail!(
            "embedding: weight must have 2 dimensions (vocab_size, hidden_size), got shape {dims:?}"
        ),
    }
    check::indices("embedding", ("ids", ids), ("weight", weight))?;
    check::has_kernel("embedding", weight)?;
    let ids = ids.contiguous()?;
    weight.contiguous()?.apply_op1(Embedding { ids })
}

struct Embedding {
    ids: Tensor,
}

impl Embedding {
    fn shape(&self, weight: &Layout) -> Shape {
        self.ids.shape().clone().extend(&weight.dims()[1..])
    }
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = cpu::training::embedding::forward((weight, layout), &self.ids)?;
        Ok((out, self.shape(layout)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, weight: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let out = cuda::training::embedding::forward((weight, layout), &self.ids)?;
        Ok((out, self.shape(layout)))
    }

    fn bwd(&self, weight: &Tensor, _out: &Tensor, dout: &Tensor) -> Result<Option<Tensor>> {
        let dout = &dout.contiguous()?;
        let device = weight.device();
        let dweight = on_device!(device, embedding::backward(weight, &self.ids, dout))?;
        Ok(Some(dweight))
    }
}
