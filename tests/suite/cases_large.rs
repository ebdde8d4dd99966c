//! Inputs whose size has broken attention kernels elsewhere, at the real size where that takes seconds;
//! else as a smaller twin, with the real size behind `--ignored`. See the table in `cases.rs`.
//!
//! Most have constant inputs, so the right result is known without another computation.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};

use crate::support::compare::{close, finite, identical, identical_passes};
use crate::support::device::{
    for_each_device, for_each_device_with, for_each_dtype, for_each_usual_dtype, on_the_gpu,
};
use crate::support::problem::Problem;
use crate::support::run::{self, Gradients, Passes};
use crate::support::tensors::{Inputs, from_host, full, host, normal};
use crate::support::verify::{self, unit_roundoff};

#[test]
fn case_06_fwd_and_bwd_of_2048_causal_rows_on_1024_keys() -> Result<()> {
    for_each_usual_dtype(8, |device, dtype| {
        let twin = Problem::new(1, [5, 2], [1, 1], 8).causal();
        verify::passes(&twin, &Inputs::normal(&twin, dtype, device, 6)?)?;
        let problem = Problem::new(1, [2048, 1024], [1, 1], 32).causal();
        let inputs = Inputs::normal(&problem, dtype, device, 6)?;
        verify::passes(&problem, &inputs)?;
        Ok(())
    })
}

#[test]
fn case_16_fwd_of_large_values_on_65536_keys() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for seqlen_q in [1, 20] {
            let problem = Problem::new(1, [seqlen_q, 65536], [1, 1], 64);
            let noise = normal(&problem.kv_dims(), 500., dtype, device, 16)?;
            let inputs = Inputs {
                v: (noise + 3e4)?,
                ..Inputs::constant(&problem, [0., 1., 0., 1.], dtype, device)?
            };
            let mean = inputs.v.to_dtype(DType::F64)?.mean(1)?;
            let mean = mean.broadcast_as((seqlen_q, 1, 64))?;
            let (out, _) = run::forward(&problem, &inputs)?;
            let limit = 3e4 * (unit_roundoff(dtype) + 1e-6);
            close("out", &out, &host(&mean)?, limit)?;
        }
        Ok(())
    })
}

fn ones(seqlens: [usize; 2], device: &Device, dtype: DType) -> Result<()> {
    let problem = Problem::new(1, seqlens, [1, 1], 8);
    let inputs = Inputs::constant(&problem, [0., 0., 1., 1.], dtype, device)?;
    let (out, _) = run::forward(&problem, &inputs)?;
    let expected = vec![1.; seqlens[0] * 8];
    close(&format!("out of {seqlens:?}"), &out, &expected, 0.)
}

#[test]
fn case_17_fwd_of_ones_on_lengths_around_powers_of_two() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        for seqlen_k in [32767, 32768, 33728, 65535, 65536, 65537] {
            ones([1, seqlen_k], device, dtype)?;
            ones([30, seqlen_k], device, dtype)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "the full size: a minute without optimisation"]
fn case_17_fwd_of_ones_at_33728_squared() -> Result<()> {
    for_each_dtype(8, |device, dtype| ones([33728, 33728], device, dtype))
}

/// Where lse is kept in f32 it can't tell such scores apart, so this is for the CPU; case 14 has what others can.
#[test]
fn case_20_scores_of_a_million_and_more() -> Result<()> {
    for_each_device_with(DType::F32, 64, |device| {
        for value in [1e3, 1e4] {
            let problem = Problem::new(32, [50, 50], [16, 16], 64);
            let inputs = Inputs::constant(&problem, [value, value, value, 1.], DType::F32, device)?;
            let passes = run::forward_backward(&problem, &inputs)?;
            let count = inputs.q.elem_count();
            close("out", &passes.out, &vec![value; count], 1e-6 * value)?;
            close("dv", &passes.grads.dv, &vec![1.; count], 1e-5)?;
            // dout · v is 64 * value.
            let limit = 1e-6 * (64. * value) * value / 8.;
            close("dq", &passes.grads.dq, &vec![0.; count], limit)?;
            close("dk", &passes.grads.dk, &vec![0.; count], 50. * limit)?;
        }
        Ok(())
    })
}

#[test]
fn case_48_head_dim_63_over_32_heads() -> Result<()> {
    for_each_device_with(DType::BF16, 63, |device| {
        let problem = Problem::new(2, [100, 101], [32, 32], 63);
        let inputs = Inputs::normal(&problem, DType::BF16, device, 48)?;
        verify::forward(&problem, &inputs)
    })
}

#[test]
#[ignore = "the full size: minutes, and 137 GFLOP of plain attention"]
fn case_48_head_dim_63_over_4096_rows() -> Result<()> {
    for (seqlen, head_dim) in [(4096, 63), (4095, 64)] {
        for_each_usual_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(2, [seqlen; 2], [32, 32], head_dim);
            let inputs = Inputs::normal(&problem, dtype, device, 48)?;
            let (out, lse) = run::forward(&problem, &inputs)?;
            finite("out", &out)?;
            // The last head of the last item.
            let last = |x: &Tensor| x.narrow(0, 1, 1)?.narrow(2, 31, 1)?.contiguous();
            let alone = Problem::new(1, [seqlen; 2], [1, 1], head_dim);
            let inputs = Inputs {
                q: last(&inputs.q)?,
                k: last(&inputs.k)?,
                v: last(&inputs.v)?,
                dout: last(&inputs.dout)?,
            };
            verify::forward(&alone, &inputs)?;
            let lse = lse.narrow(0, 1, 1)?.narrow(1, 31, 1)?;
            verify::forward_results(&alone, &inputs, &last(&out)?, &lse)
        })?;
    }
    Ok(())
}

#[test]
fn case_54_bwd_of_8300_sequences_of_one_token() -> Result<()> {
    for_each_device(|device| {
        let problem = Problem::new(8300, [1, 1], [16, 16], 128);
        let inputs = Inputs::constant(&problem, [0.5, 2., 3., 1.], DType::BF16, device)?;
        let passes = run::forward_backward(&problem, &inputs)?;
        let count = inputs.q.elem_count();
        close("out", &passes.out, &vec![3.; count], 0.)?;
        close("dq", &passes.grads.dq, &vec![0.; count], 0.)?;
        close("dk", &passes.grads.dk, &vec![0.; count], 0.)?;
        close("dv", &passes.grads.dv, &vec![1.; count], 0.)
    })
}

/// `count` indices from `first` on of dimension `dim`.
fn part(inputs: &Inputs, dim: usize, first: usize, count: usize) -> Result<Inputs> {
    let part = |x: &Tensor| x.narrow(dim, first, count)?.contiguous();
    Ok(Inputs {
        q: part(&inputs.q)?,
        k: part(&inputs.k)?,
        v: part(&inputs.v)?,
        dout: part(&inputs.dout)?,
    })
}

/// The items from `first` on must be what they are alone.
fn last_items(problem: &Problem, first: usize, device: &Device, dtype: DType) -> Result<()> {
    last_items_of(problem, &Inputs::normal(problem, dtype, device, 55)?, first)
}

fn last_items_of(problem: &Problem, inputs: &Inputs, first: usize) -> Result<()> {
    let device = inputs.q.device();
    let passes = run::forward_backward(problem, inputs)?;
    let count = problem.batch - first;
    let last = part(inputs, 0, first, count)?;
    let alone = Problem {
        batch: count,
        ..problem.clone()
    };
    let items = |x: &Tensor| x.narrow(0, first, count)?.contiguous();
    let passes = Passes {
        out: items(&passes.out)?,
        lse: items(&passes.lse)?,
        grads: Gradients {
            dq: items(&passes.grads.dq)?,
            dk: items(&passes.grads.dk)?,
            dv: items(&passes.grads.dv)?,
        },
    };
    verify::results(&alone, &last, &passes)?;
    if !device.is_cpu() && problem.num_heads > problem.num_kv_heads {
        // Few blocks share out the heads of a group, so dk and dv are other sums.
        return Ok(());
    }
    let expected = verify::passes(&alone, &last)?;
    let how = format!("as the last of {}", problem.batch);
    // A single tile of keys has no order in which it could add to dq.
    identical_passes(&how, &alone.deterministic(), &passes, &expected)
}

/// The real case has 28800 sequences, 1 GB a tensor.
#[test]
fn case_55_bwd_of_many_short_sequences() -> Result<()> {
    for_each_device(|device| {
        let problem = Problem::new(700, [15, 15], [16, 16], 72);
        last_items(&problem, 697, device, DType::BF16)
    })
}

#[test]
#[ignore = "the full size: 12 GB"]
fn case_55_bwd_of_28800_short_sequences() -> Result<()> {
    for_each_device(|device| {
        let problem = Problem::new(28800, [15, 15], [16, 16], 72);
        last_items(&problem, 28797, device, DType::BF16)
    })
}

/// The real case has 32 items of 350000 keys, 17 GB a tensor; below, ten.
#[test]
fn case_56_fwd_of_a_batch_on_long_caches() -> Result<()> {
    for_each_device(|device| {
        let problem = Problem::new(2, [5, 20000], [4, 4], 64);
        let inputs = Inputs::normal(&problem, DType::BF16, device, 56)?;
        verify::forward(&problem, &inputs)
    })
}

/// `batch` different items from one of normal numbers: on a device drawing them all would take minutes.
fn items_from_one(
    batch: usize,
    dims: [usize; 3],
    dtype: DType,
    device: &Device,
    seed: u64,
) -> Result<Tensor> {
    let [seqlen, heads, head_dim] = dims;
    let one = normal(&[1, seqlen, heads, head_dim], 1., dtype, device, seed)?;
    let factors: Vec<f64> = (0..batch)
        .map(|item| 0.5 + (item % 61) as f64 / 61.)
        .collect();
    let factors = from_host(&factors, &[batch, 1, 1, 1], dtype, device)?;
    Ok(one.broadcast_mul(&factors)?)
}

/// More than 2^31 numbers in each of K and V.
#[test]
#[ignore = "12 GB of the GPU's memory"]
fn case_56_fwd_of_ten_items_on_350000_keys() -> Result<()> {
    on_the_gpu(|device| {
        let problem = Problem::new(10, [500, 350_000], [12, 12], 64);
        let draw = |seqlen, seed| {
            items_from_one(problem.batch, [seqlen, 12, 64], DType::BF16, device, seed)
        };
        let q = draw(problem.seqlen_q, 1)?;
        let inputs = Inputs {
            dout: q.clone(),
            q,
            k: draw(problem.seqlen_k, 2)?,
            v: draw(problem.seqlen_k, 3)?,
        };
        ensure!(inputs.k.elem_count() > 1 << 31);
        let (out, lse) = run::forward(&problem, &inputs)?;
        for item in [0, 9] {
            let one = Problem {
                batch: 1,
                ..problem.clone()
            };
            let (expected_out, expected_lse) = run::forward(&one, &part(&inputs, 0, item, 1)?)?;
            identical("out", &out.narrow(0, item, 1)?, &expected_out)?;
            identical("lse", &lse.narrow(0, item, 1)?, &expected_lse)?;
        }
        Ok(())
    })
}

/// More than 2^31 numbers in each of q, out and dq.
#[test]
#[ignore = "50 GB of the GPU's memory"]
fn passes_with_outputs_of_more_than_2_to_the_31_numbers() -> Result<()> {
    on_the_gpu(|device| {
        let problem = Problem::new(2100, [64, 64], [64, 1], 256).causal();
        let draw = |heads, seed| items_from_one(2100, [64, heads, 256], DType::BF16, device, seed);
        let inputs = Inputs {
            q: draw(64, 1)?,
            k: draw(1, 2)?,
            v: draw(1, 3)?,
            dout: draw(64, 4)?,
        };
        ensure!(inputs.q.elem_count() > 1 << 31);
        last_items_of(&problem, &inputs, 2098)
    })
}

/// The real case has 2048 rows on 2^22 keys, 2 TFLOP.
#[test]
fn case_57_fwd_of_causal_rows_on_a_very_long_cache() -> Result<()> {
    for_each_device(|device| {
        let problem = Problem::new(1, [16, 1 << 16], [1, 1], 128).causal();
        let inputs = Inputs::normal(&problem, DType::BF16, device, 57)?;
        verify::forward(&problem, &inputs)
    })
}

#[test]
#[ignore = "the full number of keys: 2 GB"]
fn case_57_fwd_of_causal_rows_on_4_million_keys() -> Result<()> {
    for_each_device(|device| {
        let problem = Problem::new(1, [20, 1 << 22], [1, 1], 128).causal();
        let inputs = Inputs::normal(&problem, DType::BF16, device, 57)?;
        verify::forward(&problem, &inputs)
    })
}

#[test]
fn case_58_more_items_than_16_bits_count() -> Result<()> {
    for_each_usual_dtype(16, |device, dtype| {
        for problem in [
            Problem::new(65540, [1, 1], [1, 1], 16),
            Problem::new(10923, [3, 3], [6, 3], 16).causal(),
            Problem::new(80000, [16, 16], [1, 1], 8).causal(),
        ] {
            last_items(&problem, problem.batch - 3, device, dtype)?;
        }
        Ok(())
    })
}

#[test]
fn case_58_more_heads_than_16_bits_count() -> Result<()> {
    for_each_usual_dtype(16, |device, dtype| {
        let problem = Problem::new(1, [10, 10], [65536, 65536], 16);
        let inputs = Inputs::normal(&problem, dtype, device, 58)?;
        let passes = run::forward_backward(&problem, &inputs)?;
        let last = part(&inputs, 2, 65533, 3)?;
        let alone = Problem::new(1, [10, 10], [3, 3], 16);
        let expected = verify::passes(&alone, &last)?;
        for ((name, all), (_, last)) in passes.named().into_iter().zip(expected.named()) {
            let dim = if name == "lse" { 1 } else { 2 };
            identical(name, &all.narrow(dim, 65533, 3)?, last)?;
        }
        Ok(())
    })
}

/// The same with one key/value head: 65536 rows of a single group.
#[test]
fn case_58_a_group_of_more_heads_than_16_bits_count() -> Result<()> {
    for_each_usual_dtype(8, |device, dtype| {
        let problem = Problem::new(1, [1, 3], [65537, 1], 8);
        let inputs = Inputs {
            v: full(&problem.kv_dims(), 2., dtype, device)?,
            ..Inputs::normal(&problem, dtype, device, 59)?
        };
        let passes = run::forward_backward(&problem, &inputs)?;
        // The plain formula is for the CPU: not every cuBLAS takes a batch of so many.
        verify::results(&problem, &inputs.to_device(&Device::Cpu)?, &passes)?;
        let twos = vec![2.; inputs.q.elem_count()];
        close(
            "out",
            &passes.out,
            &twos,
            (4. * unit_roundoff(dtype)).max(1e-6),
        )?;
        if dtype == DType::F32 {
            let dv = passes.grads.dv.sum(1)?;
            let dout = inputs.dout.to_dtype(DType::F64)?.sum(2)?;
            close("sum of dv", &dv, &host(&dout)?, 0.05)?;
        }
        Ok(())
    })
}
