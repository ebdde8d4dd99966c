//! SwiGLU and its gradients.

use bytemuck::zeroed_vec;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{Element, Float, Input, PIECE, Real, cpu_storage, fill, for_dtype, numbers, tensor};

pub(crate) fn forward(gate: Input<'_>, up: Input<'_>) -> Result<CpuStorage> {
    for_dtype!(gate.0.dtype(), forward_typed(gate, up))
}

fn forward_typed<E: Element<Acc: Float>>(gate: Input<'_>, up: Input<'_>) -> Result<CpuStorage> {
    let (gate, up) = (numbers::<E>(gate)?, numbers::<E>(up)?);
    let mut out: Vec<E> = zeroed_vec(gate.len());
    out.par_chunks_mut(PIECE)
        .zip(gate.par_chunks(PIECE))
        .zip(up.par_chunks(PIECE))
        .for_each(|((out, gate), up)| {
            fill(out, |i| {
                let x = gate[i].to_acc();
                x * sigmoid(x) * up[i].to_acc()
            });
        });
    Ok(E::to_cpu_storage_owned(out))
}

/// dgate and dup.
pub(crate) fn backward(gate: &Tensor, up: &Tensor, dout: &Tensor) -> Result<[Tensor; 2]> {
    for_dtype!(gate.dtype(), backward_typed([gate, up, dout]))
}

fn backward_typed<E: Element<Acc: Float>>(tensors: [&Tensor; 3]) -> Result<[Tensor; 2]> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let [gate, up, dout] = &guards;
    let gate = numbers::<E>((cpu_storage(&gate.0)?, gate.1))?;
    let up = numbers::<E>((cpu_storage(&up.0)?, up.1))?;
    let dout = numbers::<E>((cpu_storage(&dout.0)?, dout.1))?;
    let (mut dgate, mut dup): (Vec<E>, Vec<E>) = (zeroed_vec(gate.len()), zeroed_vec(gate.len()));
    dgate
        .par_chunks_mut(PIECE)
        .zip(dup.par_chunks_mut(PIECE))
        .zip(gate.par_chunks(PIECE))
        .zip(up.par_chunks(PIECE))
        .zip(dout.par_chunks(PIECE))
        .for_each(|((((dgate, dup), gate), up), dout)| {
            let one = E::Acc::ONE;
            fill(dgate, |i| {
                let x = gate[i].to_acc();
                let s = sigmoid(x);
                dout[i].to_acc() * up[i].to_acc() * s * (one + x * (one - s))
            });
            fill(dup, |i| {
                let x = gate[i].to_acc();
                dout[i].to_acc() * x * sigmoid(x)
            });
        });
    let shape = tensors[0].shape();
    Ok([dgate, dup].map(|grad| tensor(E::to_cpu_storage_owned(grad), shape)))
}

fn sigmoid<T: Float>(x: T) -> T {
    T::ONE / (T::ONE + (T::ZERO - x).exp())
}
