//! Views of every kind: the result has the bits of the same call on contiguous copies.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor, Var};
use candle_flash_gqa::flash_attn_with;

use crate::support::compare::{close_to, identical, identical_passes};
use crate::support::device::{for_each_dtype, on_the_gpu};
use crate::support::layout::Layout;
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, normal};

/// Stores q, k and v in these layouts, between NaN, and compares with contiguous copies.
fn check_layouts(
    problem: &Problem,
    layouts: [Layout; 3],
    dtype: DType,
    device: &candle_core::Device,
) -> Result<()> {
    let problem = &problem.clone().deterministic();
    let how = format!("in {layouts:?}");
    let name = format!("{layouts:?} in {problem:?}");
    let inputs = Inputs::normal(problem, dtype, device, 37)?;
    let q = layouts[0].store(&inputs.q)?;
    let k = layouts[1].store(&inputs.k)?;
    let v = layouts[2].store(&inputs.v)?;
    let view = |i: usize, storage: &Tensor| layouts[i].view(storage);

    let (out, lse) = run::forward(problem, &inputs)?;
    let viewed = Inputs {
        q: view(0, &q)?,
        k: view(1, &k)?,
        v: view(2, &v)?,
        ..inputs.clone()
    };
    let (viewed_out, viewed_lse) = run::forward(problem, &viewed)?;
    identical(&format!("out of {name}"), &viewed_out, &out)?;
    identical(&format!("lse of {name}"), &viewed_lse, &lse)?;

    let contiguous = run::forward_backward(problem, &inputs)?;
    let viewed = run::through_views(problem, [&q, &k, &v], view, &inputs.dout)?;
    identical_passes(&how, problem, &viewed, &contiguous)
}

#[test]
fn case_37_heads_outside_the_sequence_at_every_head_dim() -> Result<()> {
    for head_dim in [1, 8, 40, 63, 64, 80, 96, 128, 192, 256] {
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(2, [130, 130], [4, 2], head_dim).causal();
            check_layouts(&problem, [Layout::BHSD; 3], dtype, device)
        })?;
    }
    Ok(())
}

#[test]
fn case_38_all_storage_orders_give_the_same_bits() -> Result<()> {
    const ORDERS: [Layout; 4] = [Layout::CONTIGUOUS, Layout::BHSD, Layout::SBHD, Layout::BSDH];
    for_each_dtype(32, |device, dtype| {
        let problem = Problem::new(2, [50, 50], [3, 3], 32);
        for q in ORDERS {
            for kv in ORDERS {
                check_layouts(&problem, [q, kv, q], dtype, device)?;
            }
        }
        Ok(())
    })
}

#[test]
fn case_36_a_strided_head_dim() -> Result<()> {
    for_each_dtype(32, |device, dtype| {
        let problem = Problem::new(2, [64, 64], [4, 4], 32).causal();
        check_layouts(&problem, [Layout::BSDH; 3], dtype, device)?;
        check_layouts(&problem, [Layout::STRIDED_LAST; 3], dtype, device)?;
        let decode = Problem::new(1, [1, 1200], [4, 4], 32);
        check_layouts(&decode, [Layout::STRIDED_LAST; 3], dtype, device)
    })
}

#[test]
fn case_51_odd_offsets_and_odd_row_strides() -> Result<()> {
    for head_dim in [46, 64] {
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(1, [33, 70], [2, 1], head_dim);
            check_layouts(&problem, [Layout::ODD_ROWS; 3], dtype, device)
        })?;
    }
    Ok(())
}

#[test]
fn views_with_gaps_on_every_side() -> Result<()> {
    for head_dim in [20, 24] {
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(2, [41, 67], [4, 2], head_dim).causal();
            for layouts in [
                [Layout::WILD; 3],
                [Layout::FUSED, Layout::CACHE, Layout::CACHE],
                [Layout::CONTIGUOUS, Layout::WILD, Layout::ODD_ROWS],
                [Layout::STRIDED_LAST, Layout::SBHD, Layout::WILD],
            ] {
                check_layouts(&problem, layouts, dtype, device)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// A projection `(batch, seqlen, (num_heads + 2 * num_kv_heads) * head_dim)` cut into q, k and v.
#[test]
fn case_40_parts_of_a_fused_projection() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        let problem = Problem::new(2, [37, 37], [6, 2], 16).causal();
        let [batch, seqlen, heads, head_dim] = problem.q_dims();
        let dims = [batch, seqlen, (heads + 4) * head_dim];
        let fused = normal(&dims, 1., dtype, device, 40)?;
        let dout = normal(&problem.q_dims(), 1., dtype, device, 41)?;
        let part = |fused: &Tensor, first: usize, heads: usize| -> Result<Tensor> {
            let part = fused.narrow(2, first * head_dim, heads * head_dim)?;
            // Splits the last dimension of a view without a copy.
            let dims = (batch, seqlen, 10, head_dim);
            let view = fused.reshape(dims)?.narrow(2, first, heads)?;
            identical("part", &part.reshape(view.dims())?, &view.contiguous()?)?;
            Ok(view)
        };
        let parts = |fused: &Tensor| -> Result<[Tensor; 3]> {
            Ok([part(fused, 0, 6)?, part(fused, 6, 2)?, part(fused, 8, 2)?])
        };

        let var = Var::from_tensor(&fused)?;
        let [q, k, v] = parts(&var)?;
        ensure!(!q.is_contiguous() && v.layout().start_offset() > 0);
        let out = flash_attn_with(&q, &k, &v, &problem.options(device)?)?;
        let grads = (&out * &dout)?.sum_all()?.backward()?;
        let [dq, dk, dv] = parts(grads.get(&var).context("no gradient")?)?;

        let [q, k, v] = parts(&fused)?;
        let inputs = Inputs {
            q: q.contiguous()?,
            k: k.contiguous()?,
            v: v.contiguous()?,
            dout,
        };
        let expected = run::forward_backward(&problem, &inputs)?;
        identical("out", &out, &expected.out)?;
        for (grad, (name, expected)) in [dq, dk, dv].iter().zip(expected.grads.named()) {
            identical(name, &grad.contiguous()?, expected)?;
        }
        Ok(())
    })
}

#[test]
fn case_40_narrowed_caches_at_any_offset() -> Result<()> {
    for_each_dtype(32, |device, dtype| {
        for [seqlen_q, seqlen_k] in [[1, 65], [7, 65], [1, 1500], [65, 65]] {
            for [before, after] in [[0, 63], [5, 58], [5, 0]] {
                let cache = Layout {
                    gaps: [[0; 2], [before, after], [0; 2], [0; 2]],
                    ..Layout::BHSD
                };
                let problem = Problem::new(2, [seqlen_q, seqlen_k], [4, 2], 32).causal();
                check_layouts(&problem, [Layout::CONTIGUOUS, cache, cache], dtype, device)?;
            }
        }
        Ok(())
    })
}

/// Row strides of 9728 numbers, as in case 41; below, strides beyond 32 bits.
#[test]
fn case_41_rows_that_lie_far_apart() -> Result<()> {
    for_each_dtype(96, |device, dtype| {
        let problem = Problem::new(1, [43, 43], [16, 16], 96).causal();
        let wide = Layout {
            gaps: [[0; 2], [0; 2], [0; 2], [0, 512]],
            ..Layout::CONTIGUOUS
        };
        check_layouts(&problem, [wide; 3], dtype, device)
    })
}

/// Views of q, k and v in one storage of more than 2^31 numbers: the last row begins where 32 bits do not reach, and the
/// gradients go back there.
#[test]
#[ignore = "40 GB of the GPU's memory"]
fn case_41_rows_that_lie_millions_apart() -> Result<()> {
    const HEADS: usize = 60_000;
    on_the_gpu(|device| {
        for head_dim in [64, 128] {
            let seqlen = 300 * 64 / head_dim;
            let problem = Problem::new(2, [seqlen; 2], [4, 2], head_dim)
                .causal()
                .deterministic();
            let inputs = Inputs::normal(&problem, DType::BF16, device, 41)?;
            let contiguous = run::forward_backward(&problem, &inputs)?;
            let storage = Tensor::zeros((2, seqlen, HEADS, head_dim), DType::BF16, device)?;
            ensure!(storage.elem_count() > 1 << 31);
            // The last heads of each row.
            let places = [(HEADS - 8, 4), (HEADS - 4, 2), (HEADS - 2, 2)];
            for (tensor, (first, _)) in [&inputs.q, &inputs.k, &inputs.v].into_iter().zip(places) {
                storage.slice_set(tensor, 2, first)?;
            }
            let storage = Var::from_tensor(&storage)?;
            let [q, k, v] = places.map(|(first, count)| storage.narrow(2, first, count));
            let options = problem.options(device)?;
            let out = flash_attn_with(&q?, &k?, &v?, &options)?;
            identical("out", &out, &contiguous.out)?;
            let grads = (out * &inputs.dout)?.sum_all()?.backward()?;
            let grad = grads.get(&storage).context("no gradient")?;
            let expected = &contiguous.grads;
            for ((name, expected), (first, count)) in [
                ("dq", &expected.dq),
                ("dk", &expected.dk),
                ("dv", &expected.dv),
            ]
            .into_iter()
            .zip(places)
            {
                identical(name, &grad.narrow(2, first, count)?.contiguous()?, expected)?;
            }
        }
        Ok(())
    })
}

/// Dimensions of stride 0: their gradient is the sum over what was expanded.
#[test]
fn expanded_batches_heads_and_sequences() -> Result<()> {
    for_each_dtype(24, |device, dtype| {
        let problem = Problem::new(3, [31, 53], [4, 4], 24);
        let inputs = Inputs::normal(&problem, dtype, device, 39)?;
        for dim in 0..4 {
            let sources = [&inputs.q, &inputs.k, &inputs.v].map(|x| x.narrow(dim, 0, 1));
            let [q, k, v] = sources;
            let sources = [q?.contiguous()?, k?.contiguous()?, v?.contiguous()?];
            let dims = [problem.q_dims(), problem.kv_dims(), problem.kv_dims()];
            let expand = |i: usize| sources[i].broadcast_as(&dims[i]);
            let expanded = Inputs {
                q: expand(0)?,
                k: expand(1)?,
                v: expand(2)?,
                ..inputs.clone()
            };
            let copies = Inputs {
                q: expanded.q.contiguous()?,
                k: expanded.k.contiguous()?,
                v: expanded.v.contiguous()?,
                ..inputs.clone()
            };
            let (out, lse) = run::forward(&problem, &expanded)?;
            let (copied_out, copied_lse) = run::forward(&problem, &copies)?;
            identical(&format!("out, dim {dim}"), &out, &copied_out)?;
            identical(&format!("lse, dim {dim}"), &lse, &copied_lse)?;

            let vars = [
                Var::from_tensor(&sources[0])?,
                Var::from_tensor(&sources[1])?,
                Var::from_tensor(&sources[2])?,
            ];
            let [q, k, v] = [0, 1, 2].map(|i| vars[i].broadcast_as(&dims[i]));
            let out = flash_attn_with(&q?, &k?, &v?, &problem.options(device)?)?;
            let grads = (out * &inputs.dout)?.sum_all()?.backward()?;
            let expected = run::forward_backward(&problem, &copies)?.grads;
            for (var, (name, expected)) in vars.iter().zip(expected.named()) {
                let grad = grads.get(var).context("no gradient")?;
                let sum = expected.sum_keepdim(dim)?;
                identical(&format!("{name}, dim {dim}"), grad, &sum)?;
            }
        }
        Ok(())
    })
}

/// candle gives size-1 dimensions whatever stride the storage has; a narrow leaves a large one.
#[test]
fn case_39_strides_of_size_1_dimensions_do_not_matter() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        let batch_1 = Layout {
            gaps: [[2, 1], [0; 2], [0; 2], [0; 2]],
            ..Layout::SBHD
        };
        let head_1 = Layout {
            gaps: [[0; 2], [0; 2], [1, 3], [0; 2]],
            ..Layout::BHSD
        };
        let single = Problem::new(1, [33, 40], [1, 1], 16).causal();
        check_layouts(&single, [batch_1, head_1, batch_1], dtype, device)?;
        let row = Problem::new(1, [1, 1], [1, 1], 16);
        check_layouts(&row, [Layout::WILD, head_1, batch_1], dtype, device)?;
        let several = Problem::new(4, [33, 40], [2, 1], 16).causal();
        check_layouts(&several, [Layout::CONTIGUOUS; 3], dtype, device)
    })
}

/// dO from a loss on the output transposed to `(seqlen, batch, num_heads, head_dim)`, where it is every
/// second batch of a larger tensor.
#[test]
fn case_34_output_gradients_out_of_a_larger_tensor() -> Result<()> {
    for seqlen in [97, 128, 200, 256] {
        let head_dim = if seqlen > 128 { 64 } else { 128 };
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(5, [seqlen; 2], [2, 2], head_dim).deterministic();
            let inputs = Inputs::normal(&problem, dtype, device, 34)?;
            let dims = [seqlen, 5, 2, 2 * head_dim];
            let larger = normal(&dims, 1., dtype, device, 35)?;
            let dout = larger
                .reshape((seqlen, 5, 2, 2, head_dim))?
                .narrow(2, 0, 1)?
                .squeeze(2)?;
            let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(Var::from_tensor);
            let (q, k, v) = (q?, k?, v?);
            let out = flash_attn_with(&q, &k, &v, &problem.options(device)?)?;
            let loss = (out.transpose(0, 1)? * &dout)?.sum_all()?;
            let grads = loss.backward()?;
            let dout = dout.transpose(0, 1)?.contiguous()?;
            let expected = run::forward_backward(&problem, &Inputs { dout, ..inputs })?;
            for (var, (name, expected)) in [q, k, v].iter().zip(expected.grads.named()) {
                identical(name, grads.get(var).context("no gradient")?, expected)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// dV of a plain sum: each query row hands out a weight of 1 in all.
#[test]
fn case_35_gradients_of_a_sum() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        let problem = Problem::new(1, [5, 5], [2, 2], 8).causal();
        let inputs = Inputs::normal(&problem, dtype, device, 35)?;
        let v = Var::from_tensor(&inputs.v)?;
        let out = flash_attn_with(&inputs.q, &inputs.k, &v, &problem.options(device)?)?;
        let grads = out.sum_all()?.backward()?;
        let dv = grads.get(&v).context("dv")?.to_dtype(DType::F64)?;
        let rows = Tensor::full(5., (1, 2, 8), device)?;
        close_to("sum of dv", &dv.sum(1)?, &rows.to_dtype(DType::F64)?, 0.03)
    })
}

#[test]
fn case_72_out_may_be_flattened_and_its_gradient_comes_back_so() -> Result<()> {
    for_each_dtype(32, |device, dtype| {
        let problem = Problem::new(2, [49, 49], [2, 2], 32);
        let inputs = Inputs::normal(&problem, dtype, device, 72)?;
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(Var::from_tensor);
        let (q, k, v) = (q?, k?, v?);
        let out = flash_attn_with(&q, &k, &v, &problem.options(device)?)?;
        ensure!(out.stride() == [49 * 64, 64, 32, 1], "{:?}", out.stride());
        // Heads outside the sequence, as some models have it.
        let swapped = out.transpose(1, 2)?.flatten_from(1)?;
        let weights = inputs.dout.transpose(1, 2)?.flatten_from(1)?;
        let grads = (swapped * weights)?.sum_all()?.backward()?;
        let expected = run::forward_backward(&problem, &inputs)?;
        for (var, (name, expected)) in [q, k, v].iter().zip(expected.grads.named()) {
            identical(name, grads.get(var).context("no gradient")?, expected)?;
        }
        Ok(())
    })
}
