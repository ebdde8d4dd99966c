//! Cross entropy and its gradient.

use bytemuck::zeroed_vec;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{Element, Float, Input, Real, cols, cpu_storage, fill, for_dtype, numbers, tensor};

/// The mean loss, and lse of each row.
pub(crate) fn forward(logits: Input<'_>, targets: &Tensor) -> Result<(CpuStorage, Tensor)> {
    for_dtype!(logits.0.dtype(), forward_typed(logits, targets))
}

fn forward_typed<E: Element<Acc: Float>>(
    logits: Input<'_>,
    targets: &Tensor,
) -> Result<(CpuStorage, Tensor)> {
    let cols = cols(logits.1);
    let logits = numbers::<E>(logits)?;
    let (targets, layout) = targets.storage_and_layout();
    let targets = numbers::<u32>((cpu_storage(&targets)?, layout))?;
    if let Some(row) = targets.iter().position(|&target| target as usize >= cols) {
        bail!(
            "cross_entropy: target {} of row {row} is not below vocab_size {cols}",
            targets[row]
        );
    }
    let rows = targets.len();
    let (lse, losses): (Vec<E::Acc>, Vec<f64>) = logits
        .par_chunks(cols)
        .zip(targets)
        .map(|(logits, &target)| {
            let max = logits
                .iter()
                .map(|x| x.to_acc())
                .fold(E::Acc::NEG_INFINITY, |max, x| if x > max { x } else { max });
            let sum: f64 = logits
                .iter()
                .map(|x| (x.to_acc() - max).exp().to_f64())
                .sum();
            let lse = max.to_f64() + sum.ln();
            let loss = lse - logits[target as usize].to_acc().to_f64();
            (E::Acc::from_f64(lse), loss)
        })
        .unzip();
    let loss = E::Acc::from_f64(losses.iter().sum::<f64>() / rows as f64);
    let lse = tensor(E::acc_storage(lse), rows);
    Ok((E::acc_storage(vec![loss]), lse))
}

pub(crate) fn backward(
    logits: &Tensor,
    targets: &Tensor,
    lse: &Tensor,
    dloss: &Tensor,
) -> Result<Tensor> {
    for_dtype!(logits.dtype(), backward_typed(logits, targets, lse, dloss))
}

fn backward_typed<E: Element<Acc: Float>>(
    logits: &Tensor,
    targets: &Tensor,
    lse: &Tensor,
    dloss: &Tensor,
) -> Result<Tensor> {
    let guards = [logits, targets, lse].map(Tensor::storage_and_layout);
    let [logits_in, targets, lse] = &guards;
    let cols = cols(logits_in.1);
    let numbers_in = numbers::<E>((cpu_storage(&logits_in.0)?, logits_in.1))?;
    let targets = numbers::<u32>((cpu_storage(&targets.0)?, targets.1))?;
    let lse = E::acc_slice(cpu_storage(&lse.0)?)?;
    let dloss = dloss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    let scale = E::Acc::from_f64(dloss / targets.len() as f64);
    let mut dlogits: Vec<E> = zeroed_vec(numbers_in.len());
    dlogits
        .par_chunks_mut(cols)
        .zip(numbers_in.par_chunks(cols))
        .zip(targets)
        .zip(lse)
        .for_each(|(((dlogits, logits), &target), &lse)| {
            fill(dlogits, |i| {
                let prob = (logits[i].to_acc() - lse).exp();
                let hit = if i == target as usize {
                    E::Acc::ONE
                } else {
                    E::Acc::ZERO
                };
                (prob - hit) * scale
            });
        });
    Ok(tensor(E::to_cpu_storage_owned(dlogits), logits.shape()))
}
