//! One step of AdamW.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{Element, Float, PIECE, Real, cpu_storage, for_dtype, numbers, numbers_mut};
use crate::training::adamw::Coefficients;

/// Updates master and moments, then rounds master into what follows them.
pub(crate) fn step(
    mut state: Vec<(&mut CpuStorage, &Layout)>,
    grad: &Tensor,
    coefficients: &Coefficients,
) -> Result<()> {
    let [master, first, second, rounded @ ..] = &mut state[..] else {
        bail!("adamw_step: expected a master and its moments");
    };
    for_dtype!(
        grad.dtype(),
        update([&mut *master, first, second], grad, coefficients)
    )?;
    for rounded in rounded {
        let dtype = rounded.0.dtype();
        for_dtype!(dtype, round((&*master.0, master.1), rounded))?;
    }
    Ok(())
}

fn update<E: Element<Acc: Float + Element>>(
    state: [&mut (&mut CpuStorage, &Layout); 3],
    grad: &Tensor,
    coefficients: &Coefficients,
) -> Result<()> {
    let [master, first, second] = state;
    let master = numbers_mut::<E::Acc>(master)?;
    let first = numbers_mut::<E::Acc>(first)?;
    let second = numbers_mut::<E::Acc>(second)?;
    let (grad, layout) = grad.storage_and_layout();
    let grad = numbers::<E>((cpu_storage(&grad)?, layout))?;

    let number = E::Acc::from_f64;
    let (beta1, beta2) = (number(coefficients.beta1), number(coefficients.beta2));
    let new1 = number(1. - coefficients.beta1);
    let new2 = number(1. - coefficients.beta2);
    let (grad_scale, eps) = (number(coefficients.grad_scale), number(coefficients.eps));
    let (kept, step_size) = (number(coefficients.kept), number(coefficients.step_size));
    let second_scale = number(coefficients.second_scale);
    master
        .par_chunks_mut(PIECE)
        .zip(first.par_chunks_mut(PIECE))
        .zip(second.par_chunks_mut(PIECE))
        .zip(grad.par_chunks(PIECE))
        .for_each(|(((master, first), second), grad)| {
            let all = master.iter_mut().zip(first).zip(second).zip(grad);
            for (((master, first), second), grad) in all {
                let grad = grad.to_acc() * grad_scale;
                *first = beta1 * *first + new1 * grad;
                *second = beta2 * *second + new2 * grad * grad;
                let direction = *first / ((*second * second_scale).sqrt() + eps);
                *master = kept * *master - step_size * direction;
            }
        });
    Ok(())
}

fn round<E: Element<Acc: Element>>(
    master: (&CpuStorage, &Layout),
    rounded: &mut (&mut CpuStorage, &Layout),
) -> Result<()> {
    let master = numbers::<E::Acc>(master)?;
    numbers_mut::<E>(rounded)?
        .par_chunks_mut(PIECE)
        .zip(master.par_chunks(PIECE))
        .for_each(|(rounded, master)| E::narrow(master, rounded));
    Ok(())
}
