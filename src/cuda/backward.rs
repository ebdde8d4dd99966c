//! dq, dk and dv: fills `BwdParams` and calls delta, main and convert in order.
//!
//! The workspace: dq in f32 with rows padded to the kernel's head_dim and a multiple of [`ROW_PADDING`]
//! rows, lse and delta of the padded rows, and, where the heads of a group are shared out, dk and dv in f32
//! for each part; a counter of pieces of work, and of turns for each 32 rows where additions are in order.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::{DType, Result, Tensor, bail};
use half::{bf16, f16};

use super::dispatch::{self, Chosen, Gpu};
use super::ffi::{self, BwdParams, ConvertParams, ROW_PADDING, ROWS_PER_TURN};
use super::{
    Element, Rows, alloc, check, cuda_storage, for_dtype, optional_pointer, problem, slopes_pointer,
};
use crate::params::AttnParams;

/// (batch, kv head, part) triples whose tiles are worked on side by side, so that their q, dout and dq share L2.
/// Measured on an H200 with the sm_80 kernels (causal, 2 x 8192, head_dim 128, 32/8 heads): 287 TFLOP/s with 1, 317
/// with 2, 320 with 4, 317 with 8, 313 with all 16.
const TOGETHER: usize = 4;
/// With Hopper's kernels half as many from so many rows on. Measured on an H200 (causal, TFLOP/s with 1, 2, 4): head_dim
/// 128, 32/8 heads, 1 x 131072: 594, 591, 573; 1 x 32768: 590, 593, 581; 16/16, 1 x 16384: 596, 593, 589; but 32/1,
/// 2 x 8192: 509, 566, 573.
const LONG: usize = 32768;
/// In order, with Hopper's kernels: steps from where one key tile of a triple begins to where the next does, when all
/// multiprocessors are busy. A tile waits for the one before it, and to pass a turn on takes about a step; triples that
/// are far apart no longer share L2. With a diagonal a tile begins one step later of itself. Measured on an H200
/// (deterministic, 16384 tokens, TFLOP/s with 1/2, 1, 2, 4 steps and a diagonal, with 2, 4, 8, 16 without): head_dim
/// 256, 1024 rows 259, 257, 190, 155 and 339, 246, 183, 169; 4096 rows 353, 375, 303, 208 and 394, 392, 382, 225;
/// head_dim 64, 1024 rows 270, 286, 285, 251 and 390, 388, 305, 299; the same to 5 % at 16384 rows but for 4 steps and
/// a diagonal.
const STEPS_APART: usize = 2;
const STEPS_APART_WITH_DIAGONAL: usize = 1;

/// Pieces of work for each multiprocessor from which sharing out a group's heads gains nothing: with a diagonal they
/// differ in length and more of them are needed to even out. Measured on an H200 when each block had one of them (causal,
/// with the sums of the parts): 9/3 heads, 64, 4 x 4096: 373 TFLOP/s in 1 part, 384 in 3; 32/1, 128, 2 x 8192: 273 in 1,
/// 520 in 4, 539 in 8, 548 in 16, 506 in 32; 32/8, 128, 8 x 2048: 436 in 1, 407 in 2.
const ROUNDS: usize = 3;
const ROUNDS_WITH_DIAGONAL: usize = 7;
/// Visible keys from which on Hopper's kernels, in order and with a diagonal, give each head of a group to blocks of its
/// own, and half as many heads with half as many keys. A block that begins with the next head waits for those that have
/// not; the sums of dk and dv take less of the time the more keys there are. Measured on an H200, when each block had
/// one piece of work (deterministic, causal, head_dim 128 but for the 4096 keys, 64; TFLOP/s by parts): 2048 keys, 32/8
/// heads 368 in 1, 373 in 2, 341 in 4; 4096, 32/8 388, 390, 369; 8192, 32/8 389, 453, 468; 8192, 64/8 352, 382, 469 and
/// 479 in 8; 8192, 32/1 343 in 4, 393 in 8, 468 in 16 and in 32; 32768, 32/8 358, 373, 419. The last doublings would
/// gain 2 to 3 % at 8192 keys, for twice the memory.
const KEYS_FOR_ALL_PARTS: usize = 16384;
/// Copies of dk and dv in f32 that sharing out may take at most.
const MAX_GROUP_PARTS: usize = 64;

/// Computes dq, dk and dv, contiguous. `lse` is `(batch, num_heads, seqlen_q)`, F32.
pub(crate) fn backward(
    params: &AttnParams,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    dout: &Tensor,
    lse: &Tensor,
) -> Result<[Tensor; 3]> {
    for_dtype!(
        q.dtype(),
        backward_typed,
        (params, [q, k, v, out, dout], lse)
    )
}

fn backward_typed<E: Element>(
    params: &AttnParams,
    tensors: [&Tensor; 5],
    lse: &Tensor,
) -> Result<[Tensor; 3]> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let (lse_guard, _) = lse.storage_and_layout();
    let inputs = guards.each_ref();
    let device = cuda_storage(&inputs[0].0)?.device();
    let stream = device.cuda_stream();
    let gpu = Gpu::of(device)?;
    let Some(chosen) = dispatch::backward(&gpu, params) else {
        bail!(
            "flash_attn: no CUDA kernel for head_dim {}",
            params.head_dim
        );
    };
    let group_parts = group_parts(params, &gpu, &chosen);
    let triples = params.batch * params.num_kv_heads * group_parts;
    let together = together(params, &gpu, &chosen, group_parts);
    let problem = problem::<E>(params, together.min(triples))?;

    let padded = |rows: usize| rows.next_multiple_of(ROW_PADDING);
    let q_rows = params.batch * params.num_heads * params.seqlen_q;
    let k_rows = params.batch * params.num_kv_heads * params.seqlen_k;
    let stat_rows = params.batch * params.num_heads * padded(params.seqlen_q);
    let dkv_acc_len = match group_parts {
        1 => 0,
        parts => {
            parts * params.batch * params.num_kv_heads * padded(params.seqlen_k) * chosen.head_dim
        }
    };
    // SAFETY: delta writes all of lse_log2 and delta; main all of dk_acc and dv_acc that convert reads, and dk
    // and dv; convert all of dq, and dk and dv where there are parts. Without rows nothing is read.
    let (mut dq, mut dk, mut dv, mut stats, mut dkv_acc) = unsafe {
        (
            alloc::<E>(device, q_rows * params.head_dim)?,
            alloc::<E>(device, k_rows * params.head_dim)?,
            alloc::<E>(device, k_rows * params.head_dim)?,
            alloc::<f32>(device, 2 * stat_rows)?,
            alloc::<f32>(device, 2 * dkv_acc_len)?,
        )
    };
    // And the counter of pieces of work, which is zeroed with it: four bytes of zero as well.
    let dq_acc_len = stat_rows * chosen.head_dim;
    let mut dq_acc: CudaSlice<f32> = device.alloc_zeros(dq_acc_len + 1)?;
    let mut dq_turns: Option<CudaSlice<i32>> = match params.deterministic {
        true => Some(device.alloc_zeros((stat_rows / ROWS_PER_TURN).max(1))?),
        false => None,
    };

    if q_rows + k_rows > 0 {
        let rows = |i: usize| {
            let (storage, layout) = inputs[i];
            Rows::<E>::new((cuda_storage(storage)?, layout), chosen.sm90)
        };
        let [q, k, v, out, dout] = [rows(0)?, rows(1)?, rows(2)?, rows(3)?, rows(4)?];
        let slopes = params
            .alibi_slopes_on_device()
            .map(Tensor::storage_and_layout);
        let (q_pointer, _q_read) = q.pointer(&stream)?;
        let (k_pointer, _k_read) = k.pointer(&stream)?;
        let (v_pointer, _v_read) = v.pointer(&stream)?;
        let (out_pointer, _out_read) = out.pointer(&stream)?;
        let (dout_pointer, _dout_read) = dout.pointer(&stream)?;
        let (alibi_slopes, _slopes_read) = slopes_pointer!(&slopes, &stream);
        let lse = cuda_storage(&lse_guard)?.as_cuda_slice::<f32>()?;
        let (lse_address, _lse_read) = lse.device_ptr(&stream);
        let (dq_address, _dq_write) = dq.device_ptr_mut(&stream);
        let (dk_address, _dk_write) = dk.device_ptr_mut(&stream);
        let (dv_address, _dv_write) = dv.device_ptr_mut(&stream);
        let (stats_address, _stats_write) = stats.device_ptr_mut(&stream);
        let (dq_acc_address, _dq_acc_write) = dq_acc.device_ptr_mut(&stream);
        let (dkv_acc_address, _dkv_acc_write) = dkv_acc.device_ptr_mut(&stream);
        let (dq_turn, _turns_write) = optional_pointer(&mut dq_turns, &stream);

        let stats = stats_address as *mut f32;
        let dk_acc = dkv_acc_address as *mut f32;
        let or_null = |is_used, pointer: *mut f32| {
            if is_used {
                pointer
            } else {
                std::ptr::null_mut()
            }
        };
        let arguments = BwdParams {
            problem: ffi::AttnProblem {
                q: q_pointer,
                k: k_pointer,
                v: v_pointer,
                alibi_slopes,
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                ..problem
            },
            out: out_pointer,
            dout: dout_pointer,
            dout_strides: dout.strides,
            lse: lse_address as *const f32,
            dq: dq_address as *mut _,
            dk: dk_address as *mut _,
            dv: dv_address as *mut _,
            lse_log2: stats,
            delta: stats.wrapping_add(stat_rows),
            dq_acc: dq_acc_address as *mut f32,
            dk_acc: or_null(group_parts > 1, dk_acc),
            dv_acc: or_null(group_parts > 1, dk_acc.wrapping_add(dkv_acc_len)),
            dq_turn,
            next_piece: match chosen.sm90 {
                true => (dq_acc_address as *mut u32).wrapping_add(dq_acc_len),
                false => std::ptr::null_mut(),
            },
            group_parts: group_parts as i32,
        };
        let convert =
            |acc: *const f32, out: u64, parts: usize, kv: bool, scale: f64| ConvertParams {
                acc,
                out: out as *mut _,
                parts: parts as i32,
                batch: problem.batch,
                seqlen: if kv {
                    problem.seqlen_k
                } else {
                    problem.seqlen_q
                },
                num_heads: if kv {
                    params.num_kv_heads as i32
                } else {
                    problem.num_heads
                },
                head_dim: problem.head_dim,
                acc_cols: chosen.head_dim as i32,
                scale: scale as f32,
                element: problem.element,
            };
        let stream_handle = stream.cu_stream();
        stream.context().bind_to_thread().w()?;
        // SAFETY, of all launches: the context is current. The pointers are to live allocations of its device,
        // whose guards are held until after the last launch, on the stream that they were made ready for;
        // every index that the strides and sizes allow lies within them, since candle's layouts do; the
        // workspace has the sizes that kernels/params.h states.
        let run_convert = |arguments: ConvertParams| -> Result<()> {
            // SAFETY: as above.
            let status = unsafe { ffi::flash_bwd_convert(&arguments, stream_handle) };
            check(status, "flash_bwd_convert", params)
        };
        // SAFETY: as above.
        let status = unsafe { ffi::flash_bwd_delta(&arguments, stream_handle) };
        check(status, "flash_bwd_delta", params)?;
        // SAFETY: as above.
        let status = unsafe { (chosen.kernel.launch)(&arguments, stream_handle) };
        check(status, chosen.name, params)?;
        run_convert(convert(
            arguments.dq_acc,
            dq_address,
            1,
            false,
            params.softmax_scale,
        ))?;
        if group_parts > 1 {
            run_convert(convert(
                arguments.dk_acc,
                dk_address,
                group_parts,
                true,
                params.softmax_scale,
            ))?;
            run_convert(convert(arguments.dv_acc, dv_address, group_parts, true, 1.))?;
        }
    }
    Ok([
        super::tensor(dq, device, tensors[0].shape()),
        super::tensor(dk, device, tensors[1].shape()),
        super::tensor(dv, device, tensors[2].shape()),
    ])
}

/// How many triples are worked on side by side.
fn together(
    params: &AttnParams,
    gpu: &Gpu,
    chosen: &Chosen<BwdParams>,
    group_parts: usize,
) -> usize {
    if !chosen.sm90 {
        return TOGETHER;
    }
    if !params.deterministic {
        return if params.seqlen_q < LONG {
            TOGETHER
        } else {
            TOGETHER / 2
        };
    }
    let apart = match params.mask.window_right() {
        Some(_) => STEPS_APART_WITH_DIAGONAL,
        None => STEPS_APART,
    };
    // Of the tile in the middle, which has as many as all have on average.
    let middle = params.seqlen_k / 2;
    let end = params.seqlen_k.min(middle + chosen.kernel.tile_n as usize);
    let rows = params.mask.rows_of_keys(middle..end).len();
    let heads = params.group_size() / group_parts;
    let steps = (heads * rows.div_ceil(chosen.kernel.tile_m as usize)).max(1);
    ((apart * gpu.multiprocessors + steps / 2) / steps).max(1)
}

/// How many pieces of work share the query heads of a group: one, unless there are too few to fill the GPU, or those that
/// there are would wait for each other. Sharing costs a sum of dk and dv in f32 for each part, in memory and time.
fn group_parts(params: &AttnParams, gpu: &Gpu, chosen: &Chosen<BwdParams>) -> usize {
    let blocks = params.batch
        * params.num_kv_heads
        * params.seqlen_k.div_ceil(chosen.kernel.tile_n as usize);
    let (left, right) = (params.mask.window_left(), params.mask.window_right());
    let rounds = match right {
        Some(_) => ROUNDS_WITH_DIAGONAL,
        None => ROUNDS,
    };
    let wanted = gpu.multiprocessors * chosen.kernel.blocks_per_sm as usize * rounds;
    let group_size = params.group_size();
    // The kernels multiply a part's number and the group's size in 32 bits.
    let most = MAX_GROUP_PARTS.min(i32::MAX as usize / group_size);
    let divisors = || (1..=most.min(group_size)).filter(|parts| group_size.is_multiple_of(*parts));
    let least = match right {
        Some(right) if params.deterministic && chosen.sm90 => {
            let visible = left.map_or(usize::MAX, |left| left.saturating_add(right));
            let keys = params.seqlen_k.min(visible).min(KEYS_FOR_ALL_PARTS);
            group_size * keys / KEYS_FOR_ALL_PARTS
        }
        _ => 1,
    };
    divisors()
        .find(|&parts| parts >= least && blocks * parts >= wanted)
        .or_else(|| divisors().next_back())
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::dispatch::Sm90;
    use super::*;
    use crate::mask::Mask;

    fn problem(shape: [usize; 5], deterministic: bool, causal: bool) -> AttnParams {
        let [batch, seqlen, num_heads, num_kv_heads, head_dim] = shape;
        AttnParams {
            batch,
            seqlen_q: seqlen,
            seqlen_k: seqlen,
            num_heads,
            num_kv_heads,
            head_dim,
            softmax_scale: 1.,
            softcap: None,
            alibi_slopes: None,
            deterministic,
            mask: Mask::new(seqlen, seqlen, causal, None, None),
        }
    }

    /// An H200, with its own kernels or without.
    fn h200(sm90: bool) -> Gpu {
        Gpu {
            compute_capability: (9, 0),
            multiprocessors: 132,
            shared_kib: 227,
            sm90: match sm90 {
                true => Sm90::WhereFaster,
                false => Sm90::Nowhere,
            },
        }
    }

    fn parts(shape: [usize; 5], deterministic: bool, causal: bool, sm90: bool) -> usize {
        let params = problem(shape, deterministic, causal);
        let gpu = h200(sm90);
        group_parts(&params, &gpu, &dispatch::backward(&gpu, &params).unwrap())
    }

    fn side_by_side(shape: [usize; 5], deterministic: bool, causal: bool, sm90: bool) -> usize {
        let params = problem(shape, deterministic, causal);
        let gpu = h200(sm90);
        let chosen = dispatch::backward(&gpu, &params).unwrap();
        let parts = group_parts(&params, &gpu, &chosen);
        together(&params, &gpu, &chosen, parts)
    }

    #[test]
    fn heads_of_a_group_are_shared_out_as_measured() {
        for (shape, any_order, in_order) in [
            ([8, 2048, 32, 8, 128], 1, 1),
            ([4, 4096, 9, 3, 64], 3, 3),
            ([4, 4096, 32, 8, 64], 1, 1),
            ([2, 8192, 32, 8, 128], 1, 2),
            ([1, 32768, 32, 8, 128], 1, 4),
            ([2, 8192, 64, 8, 128], 1, 4),
            ([2, 8192, 32, 1, 128], 8, 16),
        ] {
            assert_eq!(parts(shape, false, true, true), any_order, "{shape:?}");
            assert_eq!(parts(shape, true, true, true), in_order, "{shape:?}");
            // Measured with Hopper's kernels alone, and with a diagonal.
            for [causal, sm90] in [[true, false], [false, true], [false, false]] {
                let any_order = parts(shape, false, causal, sm90);
                assert_eq!(parts(shape, true, causal, sm90), any_order, "{shape:?}");
            }
        }
    }

    #[test]
    fn triples_are_side_by_side_as_measured() {
        for (shape, full, causal) in [
            ([16, 1024, 8, 8, 256], 17, 17),
            ([4, 4096, 8, 8, 256], 4, 4),
            ([1, 16384, 8, 8, 256], 1, 1),
            ([16, 1024, 32, 32, 64], 33, 33),
            ([4, 4096, 16, 16, 128], 4, 4),
            // Two heads, one after the other, and eight.
            ([2, 8192, 32, 8, 128], 1, 1),
            ([2, 8192, 64, 8, 128], 1, 1),
        ] {
            assert_eq!(side_by_side(shape, true, false, true), full, "{shape:?}");
            assert_eq!(side_by_side(shape, true, true, true), causal, "{shape:?}");
            for [deterministic, sm90] in [[false, true], [true, false], [false, false]] {
                for causal in [false, true] {
                    let any_order = side_by_side(shape, deterministic, causal, sm90);
                    assert_eq!(any_order, TOGETHER, "{shape:?}");
                }
            }
        }
    }

    #[test]
    fn fewer_long_triples_are_side_by_side() {
        for (seqlen, count) in [(32767, TOGETHER), (32768, 2), (131072, 2)] {
            let shape = [1, seqlen, 32, 8, 128];
            assert_eq!(side_by_side(shape, false, true, true), count, "{seqlen}");
        }
    }

    #[test]
    fn copies_of_dk_and_dv_are_few() {
        for heads in [1, 7, 64, 127, 128, 1000, 1 << 20] {
            let parts = parts([1, 1 << 17, heads, 1, 64], true, true, true);
            assert!(
                parts <= MAX_GROUP_PARTS && heads.is_multiple_of(parts),
                "{heads}: {parts}"
            );
        }
    }
}
