//! Sums and norms of gradients.

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{Element, PIECE, Real, cpu_storage, for_dtype, numbers, numbers_mut, tensor};

/// Adds a gradient to the only tensor of `sum`.
pub(crate) fn add(mut sum: Vec<(&mut CpuStorage, &Layout)>, grad: &Tensor) -> Result<()> {
    let [sum] = &mut sum[..] else {
        bail!("add_grad: expected one sum");
    };
    for_dtype!(grad.dtype(), add_typed(sum, grad))
}

fn add_typed<E: Element<Acc: Element>>(
    sum: &mut (&mut CpuStorage, &Layout),
    grad: &Tensor,
) -> Result<()> {
    let (grad, layout) = grad.storage_and_layout();
    let grad = numbers::<E>((cpu_storage(&grad)?, layout))?;
    numbers_mut::<E::Acc>(sum)?
        .par_chunks_mut(PIECE)
        .zip(grad.par_chunks(PIECE))
        .for_each(|(sum, grad)| {
            for (sum, grad) in sum.iter_mut().zip(grad) {
                *sum += grad.to_acc();
            }
        });
    Ok(())
}

/// The norm of all gradients, which are of one dtype.
pub(crate) fn norm(grads: &[Tensor]) -> Result<Tensor> {
    for_dtype!(grads[0].dtype(), norm_typed(grads))
}

fn norm_typed<E: Element>(grads: &[Tensor]) -> Result<Tensor> {
    let mut square = 0.;
    for grad in grads {
        let (grad, layout) = grad.storage_and_layout();
        let grad = numbers::<E>((cpu_storage(&grad)?, layout))?;
        let pieces: Vec<f64> = grad
            .par_chunks(PIECE)
            .map(|piece| piece.iter().map(|x| x.to_acc().to_f64().powi(2)).sum())
            .collect();
        square += pieces.iter().sum::<f64>();
    }
    let norm = E::Acc::from_f64(square.sqrt());
    Ok(tensor(E::acc_storage(vec![norm]), ()))
}
