//! Rotary positions, and back.

use bytemuck::zeroed_vec;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{Element, Input, Real, cpu_storage, fill, for_dtype, numbers, rows_together, tensor};
use crate::training::rope::{Angles, Direction};

/// `x` turned, contiguous; its last dimension is, its others may have any strides.
pub(crate) fn forward(x: Input<'_>, angles: &Angles, direction: Direction) -> Result<CpuStorage> {
    for_dtype!(x.0.dtype(), forward_typed(x, angles, direction))
}

/// [`forward`] of a tensor.
pub(crate) fn turn(x: &Tensor, angles: &Angles, direction: Direction) -> Result<Tensor> {
    let (storage, layout) = x.storage_and_layout();
    let out = forward((cpu_storage(&storage)?, layout), angles, direction)?;
    Ok(tensor(out, x.shape()))
}

fn forward_typed<E: Element>(
    (x, layout): Input<'_>,
    angles: &Angles,
    direction: Direction,
) -> Result<CpuStorage> {
    let (_, seqlen, num_heads, head_dim) = layout.shape().dims4()?;
    let half = head_dim / 2;
    let strides = layout.stride();
    // An empty tensor may start at the very end of its storage.
    let x = &x.as_slice::<E>()?[layout.start_offset()..];
    let guards = [&angles.cos, &angles.sin].map(Tensor::storage_and_layout);
    let [cos, sin] = &guards;
    let (cos_stride, sin_stride) = (Angles::batch_stride(cos.1), Angles::batch_stride(sin.1));
    let cos = numbers::<E>((cpu_storage(&cos.0)?, cos.1))?;
    let sin = numbers::<E>((cpu_storage(&sin.0)?, sin.1))?;
    let sign = E::Acc::from_f64(f64::from(direction as i32));

    let mut out: Vec<E> = zeroed_vec(layout.shape().elem_count());
    let token = num_heads * head_dim;
    out.par_chunks_mut(token.max(1))
        .with_min_len(rows_together(token))
        .enumerate()
        .for_each(|(index, out)| {
            let (batch, row) = (index / seqlen, index % seqlen);
            let cos = &cos[batch * cos_stride + row * half..][..half];
            let sin = &sin[batch * sin_stride + row * half..][..half];
            for (head, out) in out.chunks_mut(head_dim).enumerate() {
                let start = batch * strides[0] + row * strides[1] + head * strides[2];
                let (first, second) = x[start..][..head_dim].split_at(half);
                let turned = |i: usize| {
                    let (cos, sin) = (cos[i].to_acc(), sin[i].to_acc() * sign);
                    let (a, b) = (first[i].to_acc(), second[i].to_acc());
                    (a * cos - b * sin, b * cos + a * sin)
                };
                let (out_first, out_second) = out.split_at_mut(half);
                fill(out_first, |i| turned(i).0);
                fill(out_second, |i| turned(i).1);
            }
        });
    Ok(E::to_cpu_storage_owned(out))
}
