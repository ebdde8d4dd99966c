//! Inputs that have broken backward passes elsewhere; see the table in `cases.rs`.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_flash_gqa::{AttnOptions, flash_attn_with, reference};

use crate::support::compare::{close, close_to, finite, identical};
use crate::support::device::{for_each_device, for_each_dtype};
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, full, host, normal};
use crate::support::verify;

#[test]
fn case_25_one_query_and_one_key() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        let problem = Problem::new(1, [1, 1], [1, 1], 16);
        let mut inputs = Inputs::scaled(&problem, [3.; 3], dtype, device, 25)?;
        inputs.dout = full(&problem.q_dims(), 1., dtype, device)?;
        let passes = run::forward_backward(&problem, &inputs)?;
        identical("out", &passes.out, &inputs.v)?;
        identical("dv", &passes.grads.dv, &inputs.dout)?;
        // Zero up to the rounding of dout · v against dout · out.
        for (name, grad) in [("dq", &passes.grads.dq), ("dk", &passes.grads.dk)] {
            close(name, grad, &[0.; 16], 1e-4)?;
        }
        Ok(())
    })
}

#[test]
fn case_26_many_rows_on_one_key() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for (seqlen_q, heads, head_dim) in [
            (76, 1, 16),
            (34, 1, 32),
            (146, 1, 64),
            (76, 5, 64),
            (34, 5, 16),
            (146, 5, 32),
        ] {
            for causal in [false, true] {
                let problem =
                    Problem::new(1, [seqlen_q, 1], [heads, heads], head_dim).with_causal(causal);
                let inputs = Inputs::scaled(&problem, [3.; 3], dtype, device, 26)?;
                let passes = run::forward_backward(&problem, &inputs)?;
                for (name, tensor) in passes.grads.named() {
                    finite(name, tensor)?;
                }
                let count = seqlen_q * heads * head_dim;
                close("dq", &passes.grads.dq, &vec![0.; count], 1e-3)?;
                let dk = vec![0.; heads * head_dim];
                close("dk", &passes.grads.dk, &dk, 1e-3 * seqlen_q as f64)?;
                let first = if causal { seqlen_q - 1 } else { 0 };
                let seen = inputs.dout.narrow(1, first, seqlen_q - first)?;
                let dv = seen.to_dtype(DType::F64)?.sum_keepdim(1)?;
                let rounding = 64. * verify::unit_roundoff(dtype).max(2e-7);
                close("dv", &passes.grads.dv, &host(&dv)?, rounding)?;
            }
        }
        Ok(())
    })
}

fn large_valued(seqlen: usize, head_dim: usize) -> Result<()> {
    for_each_dtype(head_dim, |device, dtype| {
        for causal in [false, true] {
            let problem = Problem::new(2, [seqlen; 2], [5, 5], head_dim).with_causal(causal);
            let inputs = Inputs::scaled(&problem, [5., 3., 3.], dtype, device, 27)?;
            verify::both_of_large(&problem, &inputs)?;
        }
        Ok(())
    })
}

const LENGTHS: [usize; 11] = [1, 2, 31, 63, 65, 97, 113, 127, 129, 200, 257];
const HEAD_DIMS: [usize; 4] = [16, 32, 64, 128];

/// Every length at one head_dim, every head_dim at several lengths.
#[test]
fn case_27_large_values_at_lengths_around_the_tiles() -> Result<()> {
    for (i, seqlen) in LENGTHS.into_iter().enumerate() {
        large_valued(seqlen, HEAD_DIMS[(i + 2) % HEAD_DIMS.len()])?;
    }
    Ok(())
}

#[test]
#[ignore = "the full product: minutes without optimisation"]
fn case_27_large_values_at_every_length_and_head_dim() -> Result<()> {
    for seqlen in LENGTHS {
        for head_dim in HEAD_DIMS {
            large_valued(seqlen, head_dim)?;
        }
    }
    Ok(())
}

#[test]
fn case_28_large_values_over_1024_causal_rows() -> Result<()> {
    for_each_device(|device| {
        let problem = Problem::new(1, [1024, 1024], [1, 1], 128).causal();
        let inputs = Inputs::scaled(&problem, [3.; 3], DType::F16, device, 28)?;
        let passes = verify::both_of_large(&problem, &inputs)?;
        for (name, grad) in passes.grads.named() {
            finite(name, grad)?;
        }
        Ok(())
    })
}

/// The tail of one head must not run into the first rows of the next.
#[test]
fn case_29_tails_of_heads() -> Result<()> {
    for seqlen in [65, 100, 127] {
        for (kv_heads, head_dim) in [(4, 64), (2, 128)] {
            for_each_dtype(head_dim, |device, dtype| {
                let problem = Problem::new(1, [seqlen; 2], [4, kv_heads], head_dim);
                let inputs = Inputs::normal(&problem, dtype, device, 29)?;
                verify::passes(&problem, &inputs)?;
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// q, k and v are one projection of x. The rows that see nothing must not reach its weight.
#[test]
fn case_30_rows_that_see_nothing_leave_a_shared_weight_alone() -> Result<()> {
    for head_dim in [4, 8] {
        for_each_dtype(head_dim, |device, dtype| {
            let width = 2 * head_dim;
            let weight = normal(&[width, width], 0.5, dtype, device, 30)?;
            let x = normal(&[6, width], 1., dtype, device, 31)?;
            let gradient =
                |attention, first| weight_gradient(&weight, &x, first, head_dim, attention);
            let with_blind_rows = gradient(flash_attn_with, 0)?;
            finite("weight", &with_blind_rows)?;
            ensure!(host(&with_blind_rows)?.iter().any(|&x| x != 0.));
            let without = gradient(flash_attn_with, 3)?;
            if dtype == DType::F64 {
                return close_to("weight", &with_blind_rows, &without, 1e-13);
            }
            let [weight, x] =
                [&weight, &x].map(|x| x.to_device(&Device::Cpu)?.to_dtype(DType::F64));
            let truth = host(&weight_gradient(&weight?, &x?, 3, head_dim, reference)?)?;
            let plain = gradient(reference, 3)?;
            verify::gradient("weight", &with_blind_rows, &plain, &truth)?;
            verify::gradient("weight, without", &without, &plain, &truth)
        })?;
    }
    Ok(())
}

type Attention = fn(&Tensor, &Tensor, &Tensor, &AttnOptions) -> candle_core::Result<Tensor>;

/// The gradient of a loss of the query rows from `first` on, of 6, on keys 3..6. q, k and v are `x` times the
/// weight.
fn weight_gradient(
    weight: &Tensor,
    x: &Tensor,
    first: usize,
    head_dim: usize,
    attention: Attention,
) -> Result<Tensor> {
    let weight = Var::from_tensor(weight)?;
    let hidden = x.matmul(&weight)?;
    let heads = |rows: Tensor| rows.reshape((1, rows.dim(0)?, 2, head_dim));
    let q = heads(hidden.narrow(0, first, 6 - first)?)?;
    let kv = heads(hidden.narrow(0, 3, 3)?)?;
    let problem = Problem::new(1, [6 - first, 3], [2, 2], head_dim).causal();
    let out = attention(&q, &kv, &kv, &problem.options(x.device())?)?;
    let last_3 = out.narrow(1, 3 - first, 3)?;
    let grads = last_3.sqr()?.sum_all()?.backward()?;
    grads.get(&weight).cloned().context("no gradient")
}
