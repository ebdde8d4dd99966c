//! Inputs that have broken attention kernels elsewhere, one test for each: alignment, softmax numerics,
//! head dims, tiny sizes, batches. The large ones are in `cases_large.rs`, those of the backward in
//! `cases_backward.rs`.
//!
//! The numbers are those of the project's list of cases. Where each is tested:
//!
//! | cases | test |
//! | --- | --- |
//! | 1, 2 (keep mask), 8 - 12, 23 | `mask.rs` |
//! | 2, 3, 5, 7, 13 - 15, 21, 22, 48 - 50, 52, 53, 65, 69, 71, 73 | here |
//! | 25 - 30 | `cases_backward.rs` |
//! | 6, 16, 17, 20, 48, 54 - 58 | `cases_large.rs` |
//! | 18 | `nan.rs` |
//! | 31, 47, 69 (mixed dtypes) | `params.rs` |
//! | 32 (the op alone), 33 | `op.rs` |
//! | 34 - 41, 51, 72 | `strides.rs` |
//! | 42 - 46 | `gqa.rs` |
//! | 24, 59, 66, 67 | `stress.rs` |
//! | 70 | `determinism.rs`, `stress.rs` |
//! | 4, 5, 32 as models | `tests/llama`, `tests/finetune` |
//!
//! Not applicable: 19 (no explicit mask is offered), 60 - 64 (packed sequences of different lengths are not
//! offered). 68 (an older GPU) is a test of `src/cuda/dispatch.rs`.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::support::compare::{close, close_to, identical};
use crate::support::device::for_each_dtype;
use crate::support::layout::Layout;
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, fill, from_host, full, host, normal, padded_rows};
use crate::support::verify::{self, unit_roundoff, within_one_ulp};

#[test]
fn case_02_causal_rows_on_a_longer_cache() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        let problem = Problem::new(4, [32, 1024], [12, 12], 64).causal();
        let mut inputs = Inputs::normal(&problem, dtype, device, 2)?;
        for tensor in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
            *tensor = Layout::BHSD.view(&Layout::BHSD.store(tensor)?)?;
        }
        verify::forward(&problem, &inputs)
    })
}

/// A chunk of queries on the cache of all keys gives the rows of one full pass.
fn check_chunks(seqlen: usize, chunks: &[usize], device: &Device, dtype: DType) -> Result<()> {
    let full = Problem::new(1, [seqlen; 2], [4, 2], 64).causal();
    let inputs = Inputs::normal(&full, dtype, device, 3)?;
    let (out, lse) = run::forward(&full, &inputs)?;
    let mut end = 0;
    for &chunk in chunks {
        end += chunk;
        let part = Problem::new(1, [chunk, end], [4, 2], 64).causal();
        let start = end - chunk;
        let part_inputs = Inputs {
            q: inputs.q.narrow(1, start, chunk)?,
            k: inputs.k.narrow(1, 0, end)?,
            v: inputs.v.narrow(1, 0, end)?,
            dout: inputs.dout.narrow(1, start, chunk)?,
        };
        let (part_out, part_lse) = run::forward(&part, &part_inputs)?;
        let name = format!("rows {start}..{end} of {seqlen}");
        let largest = host(&out)?.iter().fold(1f64, |max, x| max.max(x.abs()));
        // An output ulp: both sums are exact before they are rounded to the half types.
        let limit = largest * (2. * unit_roundoff(dtype)).max(1e-6);
        close_to(&name, &part_out, &out.narrow(1, start, chunk)?, limit)?;
        close_to(&name, &part_lse, &lse.narrow(2, start, chunk)?, 1e-5)?;
    }
    assert_eq!(end, seqlen);
    Ok(())
}

#[test]
fn case_03_a_new_chunk_sees_the_whole_cache() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for cached in [1, 7, 64, 100] {
            check_chunks(16 + cached, &[cached, 16], device, dtype)?;
        }
        Ok(())
    })
}

#[test]
fn case_05_a_prompt_in_chunks_equals_the_prompt_at_once() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        check_chunks(256, &[128, 128], device, dtype)?;
        check_chunks(39, &[4, 4, 4, 4, 4, 4, 4, 4, 4, 3], device, dtype)?;
        // Case 4: two tokens at once, and one by one.
        check_chunks(52, &[50, 2], device, dtype)?;
        check_chunks(52, &[50, 1, 1], device, dtype)
    })
}

#[test]
fn case_07_a_row_alone_equals_the_last_row_of_its_prompt() -> Result<()> {
    for_each_dtype(128, |device, dtype| {
        let whole = Problem::new(1, [777, 777], [1, 1], 128).causal();
        let inputs = Inputs::normal(&whole, dtype, device, 7)?;
        let (out, _) = run::forward(&whole, &inputs)?;
        let alone = Problem::new(1, [1, 777], [1, 1], 128).causal();
        let last = Inputs {
            q: inputs.q.narrow(1, 776, 1)?,
            ..inputs
        };
        let (row, _) = run::forward(&alone, &last)?;
        within_one_ulp("row 776", &row, &out.narrow(1, 776, 1)?)
    })
}

#[test]
fn case_13_masked_winner() -> Result<()> {
    for head_dim in [1, 8] {
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(1, [2, 2], [1, 1], head_dim).causal().scale(1.);
            let column =
                |values: [f64; 2]| padded_rows(&values.map(|x| [x]), head_dim, dtype, device);
            let inputs = Inputs {
                q: column([-20000., 0.])?,
                k: column([1., 0.])?,
                v: column([1., 100.])?,
                dout: column([1., 1.])?,
            };
            let (out, _) = run::forward(&problem, &inputs)?;
            let tracked = run::forward_backward(&problem, &inputs)?.out;
            for out in [out, tracked] {
                close("out", &out.narrow(1, 0, 1)?.narrow(3, 0, 1)?, &[1.], 0.)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn case_14_scores_far_below_zero() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        let problem = Problem::new(1, [40, 128], [2, 2], 64);
        let mut inputs = Inputs::constant(&problem, [200., -8., 0., 1.], dtype, device)?;
        inputs.v = normal(&problem.kv_dims(), 1., dtype, device, 14)?;
        let passes = verify::both_of_large(&problem, &inputs)?;
        let score = -200. * 8. * 64. / 8.;
        let lse = vec![score + 128f64.ln(); 2 * 40];
        close("lse", &passes.lse, &lse, 2e-3)?;

        let noise = |dims: &[usize], deviation, seed| normal(dims, deviation, dtype, device, seed);
        inputs.q = (inputs.q + noise(&problem.q_dims(), 2., 15)?)?;
        inputs.k = (inputs.k + noise(&problem.kv_dims(), 0.05, 16)?)?;
        if dtype == DType::F16 {
            return verify::both_of_overflowing(&problem, &inputs);
        }
        verify::both_of_large(&problem, &inputs)?;
        Ok(())
    })
}

/// The raw scores are 115200, more than f16 holds.
#[test]
fn case_15_scores_beyond_the_range_of_f16() -> Result<()> {
    for_each_dtype(128, |device, dtype| {
        let problem = Problem::new(1, [33, 65], [1, 1], 128);
        let mut inputs = Inputs::constant(&problem, [30., 30., 0., 1.], dtype, device)?;
        inputs.v = normal(&problem.kv_dims(), 1., dtype, device, 15)?;
        if dtype != DType::F16 || device.is_cpu() {
            verify::both_of_large(&problem, &inputs)?;
        }
        // Rows that differ, for an error that is that of many roundings and not of one.
        inputs.dout = normal(&problem.q_dims(), 1., dtype, device, 18)?;
        check_of_overflowing(&problem, &inputs)?;
        let noise = |dims: &[usize], seed| normal(dims, 0.1, dtype, device, seed);
        inputs.q = (inputs.q + noise(&problem.q_dims(), 16)?)?;
        inputs.k = (inputs.k + noise(&problem.kv_dims(), 17)?)?;
        check_of_overflowing(&problem, &inputs)
    })
}

/// By the rule for large inputs; in f16 the plain formula needs smaller ones.
fn check_of_overflowing(problem: &Problem, inputs: &Inputs) -> Result<()> {
    if inputs.q.dtype() == DType::F16 {
        return verify::both_of_overflowing(problem, inputs);
    }
    verify::both_of_large(problem, inputs)?;
    Ok(())
}

#[test]
fn case_21_four_rows_of_head_dim_4() -> Result<()> {
    // Twice the numbers at half the scale: the same scores.
    for (head_dim, scale) in [(4, 0.5), (8, 0.25)] {
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(1, [4, 4], [1, 1], head_dim).scale(scale);
            let columns = |rows: [f64; 4]| {
                rows.iter()
                    .flat_map(|&x| vec![x; head_dim])
                    .collect::<Vec<_>>()
            };
            let rows = columns([0.1, 0.1, 0.3, 0.1]);
            let x = from_host(&rows, &problem.q_dims(), dtype, device)?;
            let inputs = Inputs {
                q: x.clone(),
                k: x.clone(),
                v: x.clone(),
                dout: x,
            };
            let (out, _) = run::forward(&problem, &inputs)?;
            let expected = columns([0.1515, 0.1515, 0.1546, 0.1515]);
            close("out", &out, &expected, 1e-3)
        })?;
    }
    Ok(())
}

#[test]
fn case_22_error_of_256_rows_and_of_one_head_of_256() -> Result<()> {
    for problem in [
        Problem::new(2, [256, 256], [2, 2], 64),
        Problem::new(1, [100, 100], [4, 1], 256),
    ] {
        for_each_dtype(problem.head_dim, |device, dtype| {
            let inputs = Inputs::normal(&problem, dtype, device, 22)?;
            verify::both(&problem, &inputs)?;
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn case_48_head_dims_that_no_vector_divides() -> Result<()> {
    for head_dim in [1, 3, 59, 63, 111] {
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(2, [64, 63], [2, 2], head_dim).causal();
            let inputs = Inputs::normal(&problem, dtype, device, 48)?;
            verify::both(&problem, &inputs)?;
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn case_49_every_column_matters() -> Result<()> {
    for_each_dtype(128, |device, dtype| {
        let problem = Problem::new(1, [70, 70], [2, 2], 128);
        let inputs = Inputs::normal(&problem, dtype, device, 49)?;
        let (out, _) = run::forward(&problem, &inputs)?;
        for column in [0, 63, 64, 100, 127] {
            let narrow = |x: &Tensor| host(&x.narrow(3, column, 1)?);
            let changed = Inputs {
                q: fill(&inputs.q, 3, column..column + 1, 3.)?,
                ..inputs.clone()
            };
            let (changed_out, _) = run::forward(&problem, &changed)?;
            assert_ne!(host(&changed_out)?, host(&out)?, "column {column} of q");
            let changed = Inputs {
                v: fill(&inputs.v, 3, column..column + 1, 3.)?,
                ..inputs.clone()
            };
            let (changed_out, _) = run::forward(&problem, &changed)?;
            assert_ne!(narrow(&changed_out)?, narrow(&out)?, "column {column} of v");
        }
        let mut distinct = inputs.clone();
        for column in 64..128 {
            let value = column as f64 / 16.;
            distinct.v = fill(&distinct.v, 3, column..column + 1, value)?;
        }
        verify::forward(&problem, &distinct)
    })
}

#[test]
fn case_50_head_dim_16() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        for seqlen in [1, 128, 200] {
            let problem = Problem::new(1, [seqlen; 2], [2, 2], 16);
            verify::forward(&problem, &Inputs::normal(&problem, dtype, device, 50)?)?;
        }
        Ok(())
    })
}

#[test]
fn case_52_no_keys() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for causal in [false, true] {
            let problem = Problem::new(2, [4, 0], [4, 2], 64).with_causal(causal);
            let inputs = Inputs::normal(&problem, dtype, device, 52)?;
            let passes = run::forward_backward(&problem, &inputs)?;
            let zeros = vec![0.; 2 * 4 * 4 * 64];
            close("out", &passes.out, &zeros, 0.)?;
            close("dq", &passes.grads.dq, &zeros, 0.)?;
            close("lse", &passes.lse, &[f64::NEG_INFINITY; 2 * 4 * 4], 0.)?;
            assert_eq!(passes.grads.dk.dims(), [2, 0, 2, 64]);
            assert_eq!(passes.grads.dv.dims(), [2, 0, 2, 64]);
        }
        Ok(())
    })
}

#[test]
fn case_53_no_queries_or_no_sequences() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for (batch, seqlen_q) in [(2, 0), (0, 5), (0, 0)] {
            for causal in [false, true] {
                let problem = Problem::new(batch, [seqlen_q, 16], [4, 2], 64).with_causal(causal);
                let inputs = Inputs::normal(&problem, dtype, device, 53)?;
                let (out, lse) = run::forward(&problem, &inputs)?;
                assert_eq!(out.dims(), problem.q_dims());
                assert_eq!(lse.dims(), [batch, 4, seqlen_q]);
                let passes = run::forward_backward(&problem, &inputs)?;
                assert_eq!(passes.grads.dq.dims(), problem.q_dims());
                for grad in [&passes.grads.dk, &passes.grads.dv] {
                    let zeros = full(&problem.kv_dims(), 0., dtype, device)?;
                    identical("dk, dv", grad, &zeros)?;
                }
            }
        }
        Ok(())
    })
}

#[test]
fn case_65_an_item_of_a_batch_equals_the_item_alone() -> Result<()> {
    for_each_dtype(32, |device, dtype| {
        for seqlens in [[7, 7], [1, 1100], [130, 200]] {
            let problem = Problem::new(4, seqlens, [4, 2], 32).causal();
            let inputs = Inputs::normal(&problem, dtype, device, 65)?;
            let passes = run::forward_backward(&problem, &inputs)?;
            for item in 0..4 {
                let part = |x: &Tensor| x.narrow(0, item, 1)?.contiguous();
                let alone = Inputs {
                    q: part(&inputs.q)?,
                    k: part(&inputs.k)?,
                    v: part(&inputs.v)?,
                    dout: part(&inputs.dout)?,
                };
                let alone = run::forward_backward(
                    &Problem {
                        batch: 1,
                        ..problem.clone()
                    },
                    &alone,
                )?;
                let limit = 8. * unit_roundoff(dtype).max(1e-7);
                for ((name, all), (_, one)) in passes.named().into_iter().zip(alone.named()) {
                    close_to(&format!("{name} of item {item}"), &part(all)?, one, limit)?;
                }
            }
        }
        Ok(())
    })
}

#[test]
fn case_69_six_rows_of_forty_heads() -> Result<()> {
    for_each_dtype(128, |device, dtype| {
        let problem = Problem::new(1, [6, 6], [40, 40], 128).causal();
        let inputs = Inputs::normal(&problem, dtype, device, 69)?;
        verify::both(&problem, &inputs)?;
        Ok(())
    })
}

#[test]
fn case_71_softcaps_of_10_15_and_50_and_such_that_are_far_above_the_scores() -> Result<()> {
    for_each_dtype(128, |device, dtype| {
        for softcap in [10., 15., 50., 1e4, 1e6, 1e20] {
            let problem = Problem::new(2, [130, 130], [2, 2], 128)
                .causal()
                .softcap(softcap);
            // Scores of about 25, so that the caps bite.
            let inputs = Inputs::scaled(&problem, [5., 5., 1.], dtype, device, 71)?;
            verify::both_of_large(&problem, &inputs)?;
        }
        Ok(())
    })
}

/// q = [1, 0], k = [[0, 0], [2, 0]], v = [[0, 1], [1, 0]], scale 1, softcap 2: the scores are 0 and
/// 2 tanh(1) = 1.5231883; weights 0.1789925 and 0.8210075, whose product 0.1469540 times
/// 1 - tanh(1)^2 = 0.4199743 is 0.0617170.
#[test]
fn case_71_softcap_of_numbers_that_a_pencil_verifies() -> Result<()> {
    for head_dim in [2, 8] {
        for_each_dtype(head_dim, |device, dtype| {
            let tensor = |rows: &[[f64; 2]]| padded_rows(rows, head_dim, dtype, device);
            let problem = Problem::new(1, [1, 2], [1, 1], head_dim)
                .scale(1.)
                .softcap(2.);
            let inputs = Inputs {
                q: tensor(&[[1., 0.]])?,
                k: tensor(&[[0., 0.], [2., 0.]])?,
                v: tensor(&[[0., 1.], [1., 0.]])?,
                dout: tensor(&[[1., 0.]])?,
            };
            let passes = run::forward_backward(&problem, &inputs)?;
            let limit = (4. * unit_roundoff(dtype)).max(1e-6);
            let check = |name: &str, ours: &Tensor, rows: &[[f64; 2]]| {
                close(name, &ours.narrow(3, 0, 2)?, rows.as_flattened(), limit)
            };
            check("out", &passes.out, &[[0.821_007_5, 0.178_992_5]])?;
            check("dq", &passes.grads.dq, &[[2. * 0.061_717, 0.]])?;
            check("dk", &passes.grads.dk, &[[-0.146_954, 0.], [0.061_717, 0.]])?;
            check(
                "dv",
                &passes.grads.dv,
                &[[0.178_992_5, 0.], [0.821_007_5, 0.]],
            )
        })?;
    }
    Ok(())
}

#[test]
fn case_73_one_item_and_two_equal_items() -> Result<()> {
    for_each_dtype(32, |device, dtype| {
        let one = Problem::new(1, [2, 5], [2, 1], 32).causal();
        let inputs = Inputs::normal(&one, dtype, device, 73)?;
        let twice = |x: &Tensor| Tensor::cat(&[x, x], 0);
        let two = Inputs {
            q: twice(&inputs.q)?,
            k: twice(&inputs.k)?,
            v: twice(&inputs.v)?,
            dout: twice(&inputs.dout)?,
        };
        let (one_out, _) = run::forward(&one, &inputs)?;
        let (two_out, _) = run::forward(&Problem { batch: 2, ..one }, &two)?;
        for item in 0..2 {
            let out = two_out.narrow(0, item, 1)?.contiguous()?;
            identical("item", &out, &one_out)?;
        }
        Ok(())
    })
}
