//! RMSNorm and its gradients.

use bytemuck::zeroed_vec;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    Element, Input, Real, cols, cpu_storage, fill, for_dtype, numbers, rows_together, tensor,
};

/// Rows whose contributions to dweight are summed by one thread before the threads' sums are.
const ROWS_TOGETHER: usize = 128;

/// `out`, and rstd of each row.
pub(crate) fn forward(x: Input<'_>, weight: Input<'_>, eps: f32) -> Result<(CpuStorage, Tensor)> {
    for_dtype!(x.0.dtype(), forward_typed(x, weight, eps))
}

fn forward_typed<E: Element>(
    x: Input<'_>,
    weight: Input<'_>,
    eps: f32,
) -> Result<(CpuStorage, Tensor)> {
    let cols = cols(x.1);
    let (x, weight) = (numbers::<E>(x)?, numbers::<E>(weight)?);
    let rows = x.len() / cols;
    let mut out: Vec<E> = zeroed_vec(x.len());
    let mut rstd = vec![E::Acc::ZERO; rows];
    out.par_chunks_mut(cols)
        .zip(&mut rstd)
        .zip(x.par_chunks(cols))
        .with_min_len(rows_together(cols))
        .for_each(|((out, rstd), x)| {
            let squares: f64 = x.iter().map(|x| square(x.to_acc().to_f64())).sum();
            let scale = E::Acc::from_f64((squares / cols as f64 + f64::from(eps)).sqrt().recip());
            fill(out, |i| x[i].to_acc() * scale * weight[i].to_acc());
            *rstd = scale;
        });
    let rstd = tensor(E::acc_storage(rstd), rows);
    Ok((E::to_cpu_storage_owned(out), rstd))
}

fn square(x: f64) -> f64 {
    x * x
}

pub(crate) fn dx(x: &Tensor, weight: &Tensor, rstd: &Tensor, dout: &Tensor) -> Result<Tensor> {
    for_dtype!(x.dtype(), dx_typed([x, weight, dout], rstd))
}

fn dx_typed<E: Element>(tensors: [&Tensor; 3], rstd: &Tensor) -> Result<Tensor> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let [x, weight, dout] = &guards;
    let cols = cols(x.1);
    let x = numbers::<E>((cpu_storage(&x.0)?, x.1))?;
    let weight = numbers::<E>((cpu_storage(&weight.0)?, weight.1))?;
    let dout = numbers::<E>((cpu_storage(&dout.0)?, dout.1))?;
    let (rstd, _) = rstd.storage_and_layout();
    let rstd = E::acc_slice(cpu_storage(&rstd)?)?;
    let mut dx: Vec<E> = zeroed_vec(x.len());
    dx.par_chunks_mut(cols)
        .zip(x.par_chunks(cols))
        .zip(dout.par_chunks(cols))
        .zip(rstd)
        .with_min_len(rows_together(cols))
        .for_each(|(((dx, x), dout), &rstd)| {
            let scaled = |i: usize| weight[i].to_acc() * dout[i].to_acc();
            let normed = |i: usize| x[i].to_acc() * rstd;
            let dot: f64 = (0..cols).map(|i| (scaled(i) * normed(i)).to_f64()).sum();
            let mean = E::Acc::from_f64(dot / cols as f64);
            fill(dx, |i| rstd * (scaled(i) - normed(i) * mean));
        });
    Ok(tensor(E::to_cpu_storage_owned(dx), tensors[0].shape()))
}

pub(crate) fn dweight(x: &Tensor, rstd: &Tensor, dout: &Tensor) -> Result<Tensor> {
    for_dtype!(x.dtype(), dweight_typed([x, dout], rstd))
}

fn dweight_typed<E: Element>(tensors: [&Tensor; 2], rstd: &Tensor) -> Result<Tensor> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let [x, dout] = &guards;
    let cols = cols(x.1);
    let x = numbers::<E>((cpu_storage(&x.0)?, x.1))?;
    let dout = numbers::<E>((cpu_storage(&dout.0)?, dout.1))?;
    let (rstd, _) = rstd.storage_and_layout();
    let rstd = E::acc_slice(cpu_storage(&rstd)?)?;
    let blocks: Vec<Vec<f64>> = x
        .par_chunks(cols * ROWS_TOGETHER)
        .zip(dout.par_chunks(cols * ROWS_TOGETHER))
        .zip(rstd.par_chunks(ROWS_TOGETHER))
        .map(|((x, dout), rstd)| {
            let mut sums = vec![0.; cols];
            for ((x, dout), &rstd) in x.chunks(cols).zip(dout.chunks(cols)).zip(rstd) {
                for ((sum, x), dout) in sums.iter_mut().zip(x).zip(dout) {
                    *sum += (dout.to_acc() * (x.to_acc() * rstd)).to_f64();
                }
            }
            sums
        })
        .collect();
    let mut dweight: Vec<E> = zeroed_vec(cols);
    fill(&mut dweight, |i| {
        E::Acc::from_f64(blocks.iter().map(|sums| sums[i]).sum())
    });
    Ok(tensor(E::to_cpu_storage_owned(dweight), cols))
}
