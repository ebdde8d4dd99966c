//! The CPU kernels: storage to views, and the split of the work over threads.
//!
//! * [`forward`]: out and the softmax statistics, a query tile against all its keys ([`forward_tile`]), or
//!   a handful of query rows, bound by reading K and V ([`decode`]); [`online_softmax`] is what they
//!   share, [`parts`] how they end.
//! * [`backward`]: dq, dk and dv, a key tile against all its query rows ([`backward_tile`]); [`delta`]
//!   comes before it, and [`turns`] keeps dq's sum in order.
//! * [`rows`]: which (position, head) pairs share a tile, and loading them.
//! * [`training`]: the ops beside the attention.
//! * [`matmul`], [`simd`], [`buffer`], [`element`]: what these are written in.

mod backward;
mod backward_tile;
mod buffer;
mod decode;
mod delta;
mod element;
mod forward;
mod forward_tile;
mod matmul;
mod online_softmax;
mod parts;
mod rows;
mod simd;
pub(crate) mod training;
mod turns;

use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::Zeroable;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use crate::params::AttnParams;
use element::Element;
use rows::View;

/// Runs `$call::<E>($args)` for the element type of a storage that `AttnParams` has admitted.
macro_rules! for_dtype {
    ($dtype:expr, $call:ident($($args:expr),*)) => {
        match $dtype {
            DType::F16 => $call::<f16>($($args),*),
            DType::BF16 => $call::<bf16>($($args),*),
            DType::F32 => $call::<f32>($($args),*),
            DType::F64 => $call::<f64>($($args),*),
            dtype => bail!("flash_attn: no CPU kernel for dtype {dtype:?}"),
        }
    };
}
use for_dtype;

/// A storage with the layout of the tensor that is seen in it.
pub(crate) type Input<'a> = (&'a CpuStorage, &'a Layout);

/// What a forward pass leaves behind.
pub(crate) struct ForwardOutput {
    /// `(batch, seqlen_q, num_heads, head_dim)`, contiguous.
    pub(crate) out: CpuStorage,
    /// `(2, batch, num_heads, seqlen_q)` in the accumulation type: the largest score of each row in
    /// base 2, and the base-2 logarithm of the sum of the exponentials of the scores less it.
    pub(crate) stats: CpuStorage,
}

/// Computes out and the softmax statistics.
///
/// With `for_backward` the scores are summed in the very order in which the backward will sum them
/// again, so that their differences from the row's maximum are exact whatever their size.
pub(crate) fn forward(
    params: &AttnParams,
    q: Input<'_>,
    k: Input<'_>,
    v: Input<'_>,
    for_backward: bool,
) -> Result<ForwardOutput> {
    simd::check_variable()?;
    for_dtype!(q.0.dtype(), forward_typed(params, q, k, v, for_backward))
}

fn forward_typed<E: Element>(
    params: &AttnParams,
    q: Input<'_>,
    k: Input<'_>,
    v: Input<'_>,
    for_backward: bool,
) -> Result<ForwardOutput> {
    let (out, stats) = forward::forward::<E>(
        params,
        View::new(q)?,
        View::new(k)?,
        View::new(v)?,
        for_backward,
    )?;
    Ok(ForwardOutput {
        out: E::to_cpu_storage_owned(out),
        stats: E::acc_storage(stats),
    })
}

/// Computes the statistics alone, for a backward that finds none.
pub(crate) fn stats(params: &AttnParams, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<CpuStorage> {
    let guards = [q, k, v].map(Tensor::storage_and_layout);
    let [q, k, v] = &guards;
    let output = forward(
        params,
        (cpu_storage(&q.0)?, q.1),
        (cpu_storage(&k.0)?, k.1),
        (cpu_storage(&v.0)?, v.1),
        true,
    )?;
    Ok(output.stats)
}

/// Computes dq, dk and dv, contiguous.
pub(crate) fn backward(
    params: &AttnParams,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    dout: &Tensor,
    stats: &Tensor,
) -> Result<[Tensor; 3]> {
    simd::check_variable()?;
    for_dtype!(
        q.dtype(),
        backward_typed(params, [q, k, v, out, dout], stats)
    )
}

fn backward_typed<E: Element>(
    params: &AttnParams,
    tensors: [&Tensor; 5],
    stats: &Tensor,
) -> Result<[Tensor; 3]> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let [q, k, v, out, dout] = &guards;
    let (stats, _) = stats.storage_and_layout();
    let grads = backward::backward::<E>(
        params,
        View::new((cpu_storage(&q.0)?, q.1))?,
        View::new((cpu_storage(&k.0)?, k.1))?,
        View::new((cpu_storage(&v.0)?, v.1))?,
        View::new((cpu_storage(&out.0)?, out.1))?,
        View::new((cpu_storage(&dout.0)?, dout.1))?,
        E::acc_slice(cpu_storage(&stats)?)?,
    )?;
    let [dq, dk, dv] = grads;
    let device = tensors[0].device();
    Ok([
        Tensor::from_vec(dq, tensors[0].shape(), device)?,
        Tensor::from_vec(dk, tensors[1].shape(), device)?,
        Tensor::from_vec(dv, tensors[2].shape(), device)?,
    ])
}

pub(crate) fn cpu_storage(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => bail!(
            "flash_attn: expected a tensor on the CPU, got one on {:?}",
            other.device().location()
        ),
    }
}

/// `count` zeros to become `name`. Inputs that are expanded take little memory, so what comes of them can be more than
/// there is.
fn zeros<T: Zeroable>(name: &str, count: usize) -> Result<Vec<T>> {
    match bytemuck::try_zeroed_vec(count) {
        Ok(zeros) => Ok(zeros),
        Err(()) => bail!(
            "flash_attn: cannot allocate {} bytes for {name}",
            count.saturating_mul(size_of::<T>())
        ),
    }
}

/// Multiply-adds below which waking other threads costs more than it saves (about 10 microseconds).
const SERIAL_WORK: usize = 1 << 20;

/// Of `products` products of rows with keys; expanded tensors can have more than a `usize` counts.
fn multiply_adds(rows: usize, keys: usize, head_dim: usize, products: usize) -> usize {
    rows.saturating_mul(keys)
        .saturating_mul(head_dim * products)
}

/// Runs `work(scratch, item)` for all items below `count`, on as many threads as the current rayon pool
/// has, each with one scratch of its own.
///
/// Items are claimed in ascending order, so an item may wait for a lower one: that one is running or
/// done. `total_work` is a count of multiply-adds; little work stays on the calling thread.
fn for_each_item<Scratch>(
    count: usize,
    total_work: usize,
    new_scratch: impl Fn() -> Scratch + Sync,
    work: impl Fn(&mut Scratch, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut scratch = new_scratch();
        loop {
            // Relaxed: the counter only hands out indices; the scope's end publishes the results.
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= count {
                break;
            }
            work(&mut scratch, item);
        }
    };
    let threads = if total_work < SERIAL_WORK {
        1
    } else {
        rayon::current_num_threads().min(count)
    };
    // The calling thread works too, so that nothing waits for another one to wake up.
    rayon::in_place_scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| run());
        }
        run();
    });
}

/// A slice whose elements are written by several threads, each its own.
#[derive(Clone, Copy)]
struct SharedSlice<T> {
    data: *mut T,
    len: usize,
}

// SAFETY: a SharedSlice only gives access through `slice_mut`, whose caller vouches that no two threads
// hold the same elements at the same time; T itself may be sent between threads.
unsafe impl<T: Send> Send for SharedSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<T> {}

impl<T> SharedSlice<T> {
    fn new(slice: &mut [T]) -> Self {
        Self {
            data: slice.as_mut_ptr(),
            len: slice.len(),
        }
    }

    /// `len` elements from `start`.
    ///
    /// # Safety
    ///
    /// The slice that this was made from must outlive `'a`, and nobody else may hold a reference to
    /// these elements during `'a`.
    unsafe fn slice_mut<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start + len <= self.len);
        // SAFETY: in bounds by the assert; alive and exclusive by the contract above.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::{AttnOptions, flash_attn_with};

    /// The largest tensors that the op admits: more memory than a process can address.
    const MOST_NUMBERS: usize = 1 << 44;

    #[test]
    fn an_output_without_memory_is_an_error() -> Result<()> {
        let row = Tensor::ones((1, 1, 1, 2048), DType::F64, &Device::Cpu)?;
        let q = row.broadcast_as((1, (1 << 22) - 1, 2048, 2048))?;
        let out = flash_attn_with(&q, &row, &row, &AttnOptions::default());
        let expected = format!(
            "cannot allocate {} bytes for out",
            8 * (MOST_NUMBERS - (1 << 22))
        );
        let message = out.unwrap_err().to_string();
        assert!(message.contains(&expected), "{message}");
        Ok(())
    }

    #[test]
    fn a_gradient_without_memory_is_an_error() -> Result<()> {
        let row = Var::ones((1, 1, 1, 2048), DType::F64, &Device::Cpu)?;
        let k = row.broadcast_as((1, (1 << 33) - 1, 1, 2048))?;
        // Of all keys the row sees the last.
        let options = AttnOptions {
            causal: true,
            window_left: Some(0),
            ..AttnOptions::default()
        };
        let grads = flash_attn_with(&row, &k, &k, &options)?.backward();
        let expected = format!("cannot allocate {} bytes for dk", 8 * (MOST_NUMBERS - 2048));
        let message = grads.map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(&expected), "{message}");
        Ok(())
    }
}
