//! Peak memory of a forward and backward on long sequences: nothing that grows with their product.
//!
//! A test target of its own, because it counts every allocation of its process. What candle's autograd
//! holds is counted too: the gradient of the output, and while it adds up the gradients of q, k and v
//! four tensors more. So the peak is compared with that of an op that does nothing but allocate its
//! results, and the bound is what our op may hold beyond it.
//!
//! And that of a backward with recomputation: nothing of a block but its input and its weights' gradients.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use candle_core::{CpuStorage, CustomOp3, DType, Device, Shape, Tensor, Var};
use candle_flash_gqa::training::Recompute;
use candle_flash_gqa::{AttnOptions, flash_attn_with};

/// The system's allocator, which counts the bytes in use and remembers the most.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let in_use = IN_USE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(in_use, Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged; the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's obligations are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        grow(new_size);
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SEQLEN: usize = 16384;
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const MIB: usize = 1 << 20;
/// What the op may hold beyond inputs, outputs, gradients and lse.
const LIMIT: usize = 64 * MIB;

/// Allocates an output and three gradients of the shapes that attention has, and computes nothing.
struct Nothing;

impl CustomOp3 for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        layout: &candle_core::Layout,
        _: &CpuStorage,
        _: &candle_core::Layout,
        _: &CpuStorage,
        _: &candle_core::Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let count = layout.shape().elem_count();
        let out = match q {
            CpuStorage::F32(_) => CpuStorage::F32(vec![0.; count]),
            CpuStorage::BF16(_) => CpuStorage::BF16(vec![half::bf16::ZERO; count]),
            _ => candle_core::bail!("only F32 and BF16"),
        };
        Ok((out, layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((
            Some(q.zeros_like()?),
            Some(k.zeros_like()?),
            Some(v.zeros_like()?),
        ))
    }
}

/// One test at a time, since all allocations of the process are counted.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The most bytes that one forward, and one forward and backward, hold beyond their inputs.
fn peaks(
    dtype: DType,
    attention: impl Fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<[usize; 2]> {
    let dims = (1, SEQLEN, HEADS, HEAD_DIM);
    let input = || Var::from_tensor(&Tensor::randn(0f32, 1., dims, &Device::Cpu)?.to_dtype(dtype)?);
    let (q, k, v) = (input()?, input()?, input()?);
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let out = attention(&q, &k, &v)?;
    let forward = PEAK.load(Ordering::Relaxed) - before;
    let grads = out.backward()?;
    let both = PEAK.load(Ordering::Relaxed) - before;
    for var in [&q, &k, &v] {
        ensure!(grads.get(var).context("no gradient")?.dims() == var.dims());
    }
    Ok([forward, both])
}

/// The op's peaks may differ from those of an op that does nothing by lse and the limit.
fn check(options: &AttnOptions) -> Result<()> {
    let _alone = alone();
    let lse = SEQLEN * HEADS * size_of::<f32>();
    for dtype in [DType::F32, DType::BF16] {
        let nothing = peaks(dtype, |q, k, v| q.apply_op3(k, v, Nothing))?;
        let ours = peaks(dtype, |q, k, v| flash_attn_with(q, k, v, options))?;
        for (pass, ours, nothing) in [
            ("a forward", ours[0], nothing[0]),
            ("a forward and backward", ours[1], nothing[1]),
        ] {
            let message = format!(
                "{dtype:?}: {pass} holds {} MiB beyond its inputs, an op that does nothing {} MiB",
                ours / MIB,
                nothing / MIB
            );
            println!("{message}");
            ensure!(ours <= nothing + lse + LIMIT, "{message}");
        }
    }
    Ok(())
}

/// A window makes it quick; what is allocated does not depend on it.
#[test]
fn fwd_and_bwd_hold_nothing_that_grows_with_the_product_of_the_lengths() -> Result<()> {
    check(&AttnOptions {
        causal: true,
        window_left: Some(511),
        ..AttnOptions::default()
    })
}

#[test]
#[ignore = "all keys: a minute without optimisation"]
fn fwd_and_bwd_over_all_keys_hold_nothing_that_grows_with_the_product_of_the_lengths() -> Result<()>
{
    check(&AttnOptions {
        causal: true,
        ..AttnOptions::default()
    })
}

/// Rows and columns of what goes from block to block.
const ROWS: usize = 1024;
const COLS: usize = 512;

/// The most bytes that a forward and backward of recomputed blocks holds. The blocks are made of candle's own operations,
/// whose gradients carry graphs, and of a mask, which has a gradient although it is a constant.
fn peak_of_blocks(blocks: usize) -> Result<usize> {
    let device = Device::Cpu;
    let weights = (0..blocks)
        .map(|_| Var::randn(0f32, 0.05, (COLS, COLS), &device))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let mask = Tensor::ones((ROWS, COLS), DType::U8, &device)?;
    let hidden = Tensor::zeros((ROWS, COLS), DType::F32, &device)?;
    let mut x = Tensor::randn(0f32, 1., (ROWS, COLS), &device)?;
    let recompute = Recompute::default();
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    for weight in &weights {
        let (weight, mask, hidden) = (weight.as_tensor().clone(), mask.clone(), hidden.clone());
        x = recompute.run(&x, move |x| {
            let mut x = x.clone();
            for _ in 0..4 {
                x = mask.where_cond(&x.matmul(&weight)?.silu()?, &hidden)?;
            }
            Ok(x)
        })?;
    }
    let grads = recompute.backward(&x.sqr()?.mean_all()?)?;
    let peak = PEAK.load(Ordering::Relaxed) - before;
    for weight in &weights {
        ensure!(grads.get(weight).context("no gradient")?.dims() == weight.dims());
    }
    // One more for the first input, which the op takes for a variable.
    let count = grads.get_ids().count();
    ensure!(count <= blocks + 1, "{count} gradients of {blocks} weights");
    Ok(peak)
}

#[test]
fn recomputed_blocks_hold_their_inputs_and_gradients_alone() -> Result<()> {
    let _alone = alone();
    let (few, many) = (2, 10);
    let added = peak_of_blocks(many)?.saturating_sub(peak_of_blocks(few)?) / (many - few);
    let (input, grad) = (
        ROWS * COLS * size_of::<f32>(),
        COLS * COLS * size_of::<f32>(),
    );
    ensure!(
        added <= input + grad + input / 8,
        "a block adds {} KiB to the peak: its input has {} KiB, the gradient of its weight {} KiB",
        added >> 10,
        input >> 10,
        grad >> 10
    );
    Ok(())
}
