//! The gradients of a whole model: their sum over micro-batches, their norm.

use candle_core::{DType, Result, Tensor, bail};

use super::{check, in_place};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Adds a gradient to a sum of gradients, in place.
///
/// # Arguments
///
/// * `sum`: contiguous, F32 (F64 for an F64 gradient).
/// * `grad`: of the same shape; F16, BF16 or F32, on the CPU F64 too.
///
/// # Errors
///
/// Shapes or devices that differ, other dtypes, a sum that is not contiguous or shares its storage with `grad`, a
/// device without kernels.
pub fn add_grad(sum: &Tensor, grad: &Tensor) -> Result<()> {
    check::has_kernel("add_grad", grad)?;
    let wide = match grad.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    check::dtype("add_grad", ("sum", sum), &[wide])?;
    check::same_shape("add_grad", ("sum", sum), ("grad", grad))?;
    check::same_device("add_grad", ("sum", sum), ("grad", grad))?;
    in_place::check("add_grad", &[("sum", sum)], ("grad", grad))?;
    let grad = grad.contiguous()?;
    in_place::lock("add_grad", &[sum], |locked| match grad.device() {
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => cuda::training::grads::add(locked.cuda, &grad),
        _ => cpu::training::grads::add(locked.cpu, &grad),
    })
}

/// Computes the norm of all gradients of a model, taken as one vector: `sqrt(sum of squares)`.
///
/// It stays on the device, so that whoever reads it can read the loss at the same time: a step then waits for the
/// device once.
///
/// # Arguments
///
/// * `grads`: at least one, of any shapes, one dtype and one device.
///
/// # Returns
///
/// The norm, without dimensions, F32 (F64 for F64). It is not differentiable.
///
/// # Errors
///
/// No gradient, dtypes or devices that differ, a device or dtype without kernels.
pub fn grad_norm(grads: &[&Tensor]) -> Result<Tensor> {
    let [first, others @ ..] = grads else {
        bail!("grad_norm: at least one gradient is needed, got none");
    };
    let others: Vec<_> = others
        .iter()
        .map(|&grad| ("another gradient", grad))
        .collect();
    check::alike("grad_norm", ("the first gradient", first), &others)?;
    check::has_kernel("grad_norm", first)?;
    let device = first.device();
    let grads = grads
        .iter()
        .map(|grad| grad.contiguous())
        .collect::<Result<Vec<_>>>()?;
    on_device!(device, grads::norm(&grads))
}
