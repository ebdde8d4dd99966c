//! Rows of a table, and the table's gradient.

use bytemuck::zeroed_vec;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    Element, Input, Real, cols, cpu_storage, fill, for_dtype, numbers, rows_together, tensor,
};

pub(crate) fn forward(weight: Input<'_>, ids: &Tensor) -> Result<CpuStorage> {
    for_dtype!(weight.0.dtype(), forward_typed(weight, ids))
}

fn forward_typed<E: Element>(weight: Input<'_>, ids: &Tensor) -> Result<CpuStorage> {
    let cols = cols(weight.1);
    let weight = numbers::<E>(weight)?;
    let vocab_size = weight.len() / cols;
    let (ids, layout) = ids.storage_and_layout();
    let ids = numbers::<u32>((cpu_storage(&ids)?, layout))?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        bail!("embedding: id {id} is not below vocab_size {vocab_size}");
    }
    let mut out: Vec<E> = zeroed_vec(ids.len() * cols);
    out.par_chunks_mut(cols)
        .zip(ids)
        .with_min_len(rows_together(cols))
        .for_each(|(out, &id)| out.copy_from_slice(&weight[id as usize * cols..][..cols]));
    Ok(E::to_cpu_storage_owned(out))
}

/// The gradient of `weight` from `dout` `(.., cols)`.
pub(crate) fn backward(weight: &Tensor, ids: &Tensor, dout: &Tensor) -> Result<Tensor> {
    for_dtype!(weight.dtype(), backward_typed(weight, ids, dout))
}

fn backward_typed<E: Element>(weight: &Tensor, ids: &Tensor, dout: &Tensor) -> Result<Tensor> {
    let guards = [ids, dout].map(Tensor::storage_and_layout);
    let [ids, dout] = &guards;
    let (vocab_size, cols) = weight.dims2()?;
    let ids = numbers::<u32>((cpu_storage(&ids.0)?, ids.1))?;
    let dout = numbers::<E>((cpu_storage(&dout.0)?, dout.1))?;
    // The tokens of each id side by side, in their order.
    let mut tokens: Vec<usize> = (0..ids.len()).collect();
    tokens.sort_by_key(|&token| ids[token]);

    let mut dweight: Vec<E> = zeroed_vec(vocab_size * cols);
    dweight
        .par_chunks_mut(cols)
        .with_min_len(rows_together(cols))
        .enumerate()
        .for_each(|(row, dweight)| {
            let first = tokens.partition_point(|&token| (ids[token] as usize) < row);
            let after = tokens.partition_point(|&token| ids[token] as usize <= row);
            let tokens = &tokens[first..after];
            if !tokens.is_empty() {
                let column = |i: usize| tokens.iter().map(move |token| dout[token * cols + i]);
                fill(dweight, |i| {
                    E::Acc::from_f64(column(i).map(|x| x.to_acc().to_f64()).sum())
                });
            }
        });
    Ok(tensor(E::to_cpu_storage_owned(dweight), weight.shape()))
}
