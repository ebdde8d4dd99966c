//! One step of AdamW.

use candle_core::backend::BackendStorage;
use candle_core::{DType, Result, Tensor, bail};

use super::ffi::{self, AdamWParams};
use super::{Operands, Updated, cuda_storage, element};
use crate::training::adamw::Coefficients;

/// Updates master and moments, and what follows them with the rounded master.
pub(crate) fn step(
    mut state: Vec<Updated<'_>>,
    grad: &Tensor,
    coefficients: &Coefficients,
) -> Result<()> {
    let [master, first_moment, second_moment, rounded @ ..] = &mut state[..] else {
        bail!("adamw_step: expected a master and its moments");
    };
    let len = grad.elem_count();
    let (grad, grad_layout) = grad.storage_and_layout();
    let grad = cuda_storage(&grad)?;
    let stream = grad.device().cuda_stream();
    let mut operands = Operands::new(&stream);
    let (rounded_element, rounded) = match rounded {
        [] => (element(DType::BF16)?, std::ptr::null_mut()),
        [rounded, ..] => (element(rounded.0.dtype())?, operands.update(rounded)?),
    };
    let params = AdamWParams {
        grad: operands.read((grad, grad_layout))?,
        rounded,
        master: operands.update(master)?,
        first_moment: operands.update(first_moment)?,
        second_moment: operands.update(second_moment)?,
        len: len as i64,
        grad_scale: coefficients.grad_scale as f32,
        beta1: coefficients.beta1 as f32,
        beta2: coefficients.beta2 as f32,
        new1: (1. - coefficients.beta1) as f32,
        new2: (1. - coefficients.beta2) as f32,
        eps: coefficients.eps as f32,
        kept: coefficients.kept as f32,
        step_size: coefficients.step_size as f32,
        second_scale: coefficients.second_scale as f32,
        grad_element: element(grad.dtype())?,
        rounded_element,
    };
    // SAFETY: contiguous tensors of this size and of these types, as the op has checked.
    unsafe { operands.launch("flash_adamw", ffi::flash_adamw, params) }
}
