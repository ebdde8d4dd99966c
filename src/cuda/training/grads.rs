//! Sums and norms of gradients.

use candle_core::backend::BackendStorage;
use candle_core::{DType, Result, Tensor, bail};

use super::ffi::{self, AddGradParams, GradNormParams, NUMBERS_TOGETHER};
use super::{Operands, Updated, cuda_storage, element, tensor, uninit};

/// Adds a gradient to the only tensor of `sum`.
pub(crate) fn add(mut sum: Vec<Updated<'_>>, grad: &Tensor) -> Result<()> {
    let [sum] = &mut sum[..] else {
        bail!("add_grad: expected one sum");
    };
    let len = grad.elem_count();
    let (grad, grad_layout) = grad.storage_and_layout();
    let grad = cuda_storage(&grad)?;
    let stream = grad.device().cuda_stream();
    let mut operands = Operands::new(&stream);
    let params = AddGradParams {
        grad: operands.read((grad, grad_layout))?,
        sum: operands.update(sum)?,
        len: len as i64,
        element: element(grad.dtype())?,
    };
    // SAFETY: contiguous tensors of this size, the sum F32, as the op has checked.
    unsafe { operands.launch("flash_add_grad", ffi::flash_add_grad, params) }
}

/// The norm of all gradients, which are of one dtype.
pub(crate) fn norm(grads: &[Tensor]) -> Result<Tensor> {
    let guards: Vec<_> = grads.iter().map(Tensor::storage_and_layout).collect();
    let first = cuda_storage(&guards[0].0)?;
    let (device, element) = (first.device(), element(first.dtype())?);
    let stream = device.cuda_stream();
    let pieces = |len: usize| len.div_ceil(NUMBERS_TOGETHER);
    let count: usize = grads.iter().map(|grad| pieces(grad.elem_count())).sum();
    // SAFETY: the launches for each gradient write all of squares, the last one norm.
    let (mut squares, mut norm) = unsafe {
        (
            uninit(device, count, DType::F32)?,
            uninit(device, 1, DType::F32)?,
        )
    };
    let mut done = 0;
    for grad in &guards {
        let len = grad.1.shape().elem_count();
        let mut operands = Operands::new(&stream);
        let params = GradNormParams {
            grad: operands.read_tensor(grad)?,
            squares: operands.write::<f32>(&mut squares)?.wrapping_add(done),
            len: len as i64,
            element,
            ..Default::default()
        };
        // SAFETY: a contiguous gradient of this size; squares has room for the pieces of all.
        unsafe { operands.launch("flash_grad_squares", ffi::flash_grad_squares, params)? };
        done += pieces(len);
    }
    let mut operands = Operands::new(&stream);
    let params = GradNormParams {
        squares: operands.write(&mut squares)?,
        norm: operands.write(&mut norm)?,
        len: count as i64,
        ..Default::default()
    };
    // SAFETY: as many squares as were written.
    unsafe { operands.launch("flash_grad_norm", ffi::flash_grad_norm, params)? };
    Ok(tensor(norm, ()))
}
