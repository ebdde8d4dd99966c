//! The ops of training on the CPU: loops over rows, shared out to the threads of the current rayon pool.
//!
//! One file an op, as in `cuda::training`. Inputs are contiguous unless said otherwise, and checked. Arithmetic
//! is in the accumulation type; what is summed over a row or over rows is summed in f64, in a fixed order.

pub(crate) mod adamw;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
pub(crate) mod grads;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod swiglu;

use bytemuck::Pod;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, WithDType, bail};

use super::element::Element;
use super::simd::Real;
use super::{Input, cpu_storage, for_dtype};

/// Numbers of one piece of work where rows do not matter.
const PIECE: usize = 1 << 12;

/// The functions of an accumulation type.
trait Float: Real {
    fn exp(self) -> Self;
    fn sqrt(self) -> Self;
}

impl Float for f32 {
    fn exp(self) -> Self {
        self.exp()
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
}

impl Float for f64 {
    fn exp(self) -> Self {
        self.exp()
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
}

/// The numbers of a contiguous tensor.
fn numbers<E: WithDType>((storage, layout): Input<'_>) -> Result<&[E]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice()?[start..end]),
        None => bail!("expected a contiguous tensor, got {layout:?}"),
    }
}

/// The numbers of a contiguous tensor, to write to.
fn numbers_mut<'a, T: WithDType + Pod>(
    (storage, layout): &'a mut (&mut CpuStorage, &Layout),
) -> Result<&'a mut [T]> {
    let all: &mut [T] = match (T::DTYPE, &mut **storage) {
        (DType::F16, CpuStorage::F16(numbers)) => bytemuck::cast_slice_mut(numbers),
        (DType::BF16, CpuStorage::BF16(numbers)) => bytemuck::cast_slice_mut(numbers),
        (DType::F32, CpuStorage::F32(numbers)) => bytemuck::cast_slice_mut(numbers),
        (DType::F64, CpuStorage::F64(numbers)) => bytemuck::cast_slice_mut(numbers),
        (dtype, storage) => bail!("expected {dtype:?}, got {:?}", storage.dtype()),
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&mut all[start..end]),
        None => bail!("expected a contiguous tensor, got {layout:?}"),
    }
}

/// A contiguous tensor.
pub(crate) fn tensor(storage: CpuStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
}

/// The length of a tensor's rows along its last dimension.
fn cols(layout: &Layout) -> usize {
    layout.dims().last().copied().unwrap_or(1)
}

/// Fills a row with rounded numbers.
fn fill<E: Element>(row: &mut [E], number: impl Fn(usize) -> E::Acc) {
    const CHUNK: usize = 64;
    let mut exact = [E::Acc::ZERO; CHUNK];
    for (i, chunk) in row.chunks_mut(CHUNK).enumerate() {
        let exact = &mut exact[..chunk.len()];
        for (j, x) in exact.iter_mut().enumerate() {
            *x = number(i * CHUNK + j);
        }
        E::narrow(exact, chunk);
    }
}

/// How many rows one piece of work has at least, so that threads are not woken for less than it takes to wake
/// them.
fn rows_together(cols: usize) -> usize {
    const NUMBERS: usize = 1 << 13;
    NUMBERS.div_ceil(cols.max(1))
}
