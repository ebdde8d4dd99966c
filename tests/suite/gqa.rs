//! Grouped and single key/value heads: equal to repeated heads, with gradients summed over the group.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_flash_gqa::is_supported;

use crate::support::compare::{close, close_to, identical};
use crate::support::device::{check_still_works, for_each_device, for_each_dtype, on_the_gpu};
use crate::support::problem::Problem;
use crate::support::run::{self, Passes};
use crate::support::tensors::{Inputs, from_host, full};
use crate::support::verify;

/// Each head `group` times in a row: `repeat_interleave` along the heads.
fn repeat_heads(tensor: &Tensor, group: usize) -> Result<Tensor> {
    let (batch, seqlen, heads, head_dim) = tensor.dims4()?;
    let repeated = tensor
        .unsqueeze(3)?
        .broadcast_as((batch, seqlen, heads, group, head_dim))?;
    Ok(repeated.reshape((batch, seqlen, heads * group, head_dim))?)
}

/// Sums each `group` heads.
fn sum_groups(tensor: &Tensor, group: usize) -> Result<Tensor> {
    let (batch, seqlen, heads, head_dim) = tensor.dims4()?;
    let groups = tensor.reshape((batch, seqlen, heads / group, group, head_dim))?;
    Ok(groups.sum(3)?)
}

/// Compares with the op on repeated heads, in f64, where hardly anything is lost to rounding.
fn equals_repeated_heads(problem: &Problem, device: &Device) -> Result<()> {
    if !is_supported(device, DType::F64, problem.head_dim) {
        return Ok(());
    }
    let group = problem.num_heads / problem.num_kv_heads;
    let inputs = Inputs::normal(problem, DType::F64, device, 42)?;
    let repeated = Inputs {
        k: repeat_heads(&inputs.k, group)?,
        v: repeat_heads(&inputs.v, group)?,
        ..inputs.clone()
    };
    let repeated_problem = Problem {
        num_kv_heads: problem.num_heads,
        ..problem.clone()
    };
    let ours = run::forward_backward(problem, &inputs)?;
    let theirs = run::forward_backward(&repeated_problem, &repeated)?;
    let name = |of: &str| format!("{of} of {problem:?}");
    close_to(&name("out"), &ours.out, &theirs.out, 1e-13)?;
    close_to(&name("lse"), &ours.lse, &theirs.lse, 1e-6)?;
    let [dk, dv] = [&theirs.grads.dk, &theirs.grads.dv].map(|grad| sum_groups(grad, group));
    close_to(&name("dq"), &ours.grads.dq, &theirs.grads.dq, 1e-12)?;
    close_to(&name("dk"), &ours.grads.dk, &dk?, 1e-11)?;
    close_to(&name("dv"), &ours.grads.dv, &dv?, 1e-11)
}

/// The definition's heads, on the devices that have no f64.
fn holds_in_half_types(problem: &Problem, device: &Device) -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        if !device.is_cpu() && is_supported(device, dtype, problem.head_dim) {
            verify::both(problem, &Inputs::normal(problem, dtype, device, 42)?)?;
        }
    }
    Ok(())
}

#[test]
fn case_42_head_h_reads_key_value_head_h_over_group() -> Result<()> {
    const HEADS: [[usize; 2]; 8] = [
        [8, 8],
        [6, 2],
        [6, 3],
        [12, 4],
        [32, 8],
        [40, 4],
        [71, 1],
        [5, 1],
    ];
    for_each_device(|device| {
        for heads in HEADS {
            for causal in [false, true] {
                let problem = Problem::new(2, [19, 37], heads, 16).with_causal(causal);
                equals_repeated_heads(&problem, device)?;
                holds_in_half_types(&problem, device)?;
            }
        }
        Ok(())
    })
}

#[test]
fn case_43_gradients_have_the_key_value_heads() -> Result<()> {
    let problem = Problem::new(1, [65, 65], [8, 2], 64);
    for_each_device(|device| equals_repeated_heads(&problem, device))?;
    for_each_dtype(64, |device, dtype| {
        let inputs = Inputs::normal(&problem, dtype, device, 43)?;
        let passes = verify::passes(&problem, &inputs)?;
        ensure!(passes.grads.dk.dims() == [1, 65, 2, 64]);
        ensure!(passes.grads.dv.dims() == [1, 65, 2, 64]);
        Ok(())
    })
}

/// With one key the weights are 1 and dv is the sum of dout over the group: 256 + 4 x 1 = 260 is a
/// bf16 number, but 256 + 1 is not, so a sum that rounds on its way stays at 256.
#[test]
fn case_43_gradients_are_summed_over_the_group_before_they_are_rounded() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        let problem = Problem::new(1, [1, 1], [5, 1], 8);
        let dout: Vec<f64> = (0..5 * 8).map(|i| if i < 8 { 256. } else { 1. }).collect();
        let inputs = Inputs {
            dout: from_host(&dout, &problem.q_dims(), dtype, device)?,
            ..Inputs::normal(&problem, dtype, device, 43)?
        };
        let passes = run::forward_backward(&problem, &inputs)?;
        identical(
            "dv",
            &passes.grads.dv,
            &full(&[1, 1, 1, 8], 260., dtype, device)?,
        )
    })
}

#[test]
fn case_44_causal_groups_equal_repeated_heads() -> Result<()> {
    for_each_device(|device| {
        for seqlen in [2, 64, 200, 513] {
            let head_dim = if seqlen > 200 { 16 } else { 64 };
            let problem = Problem::new(1, [seqlen; 2], [8, 2], head_dim).causal();
            equals_repeated_heads(&problem, device)?;
            holds_in_half_types(&problem, device)?;
        }
        Ok(())
    })
}

#[test]
fn case_45_groups_of_3_5_6_7_10_and_12_heads() -> Result<()> {
    for_each_dtype(24, |device, dtype| {
        for heads in [[3, 1], [10, 2], [6, 1], [14, 2], [40, 4], [12, 1]] {
            for seqlens in [[1, 77], [100, 100]] {
                let problem = Problem::new(1, seqlens, heads, 24).causal();
                let inputs = Inputs::normal(&problem, dtype, device, 45)?;
                verify::both(&problem, &inputs)?;
            }
        }
        Ok(())
    })
}

#[test]
fn case_46_decode_of_two_sequences_with_lse() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        let problem = Problem::new(2, [1, 128], [8, 2], 64);
        let inputs = Inputs::normal(&problem, dtype, device, 46)?;
        verify::forward(&problem, &inputs)?;
        let (out, lse) = run::forward(&problem, &inputs)?;
        ensure!(out.dims() == [2, 1, 8, 64] && out.stride() == [512, 512, 64, 1]);
        ensure!(lse.dims() == [2, 8, 1] && lse.dtype() == DType::F32);

        let repeated = Inputs {
            k: repeat_heads(&inputs.k, 4)?,
            v: repeat_heads(&inputs.v, 4)?,
            ..inputs.clone()
        };
        let problem = Problem::new(2, [1, 128], [8, 8], 64);
        let (repeated_out, repeated_lse) = run::forward(&problem, &repeated)?;
        close_to(
            "out",
            &out,
            &repeated_out,
            4. * verify::unit_roundoff(dtype),
        )?;
        close_to("lse", &lse, &repeated_lse, 1e-5)
    })
}

/// A change to one key/value head reaches the heads of its group and no other.
#[test]
fn a_key_value_head_is_read_by_its_group_alone() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        for seqlens in [[1, 40], [60, 100]] {
            let problem = Problem::new(1, seqlens, [9, 3], 8);
            let inputs = Inputs::normal(&problem, dtype, device, 47)?;
            let (out, _) = run::forward(&problem, &inputs)?;
            for kv_head in 0..3 {
                let change =
                    |x: &Tensor| crate::support::tensors::fill(x, 2, kv_head..kv_head + 1, 3.);
                let changed = Inputs {
                    k: change(&inputs.k)?,
                    v: change(&inputs.v)?,
                    ..inputs.clone()
                };
                let (changed, _) = run::forward(&problem, &changed)?;
                for head in 0..9 {
                    let part = |x: &Tensor| x.narrow(2, head, 1)?.contiguous();
                    if head / 3 == kv_head {
                        let all_3 = vec![3.; seqlens[0] * 8];
                        close("changed", &part(&changed)?, &all_3, 0.05)?;
                    } else {
                        identical("unchanged", &part(&changed)?, &part(&out)?)?;
                    }
                }
            }
        }
        Ok(())
    })
}

/// Problems with so many key tiles that a block sums several heads of a group: with fewer each head gets blocks of its own
/// (`group_parts` of src/cuda/backward.rs). A tile has 64 keys at head_dim 192 and 256, else 128. On 108 to 144
/// multiprocessors, with a diagonal and without:
///
/// * groups of 3 are one part: 2048 >= 144 * 2 * 7 and 896 >= 144 * 2 * 3 tiles for multiprocessors, blocks of each, rounds;
/// * groups of 4 are two parts of two heads: 512 < 108 * 7 and 256 < 108 * 3, but 2 * 512 >= 144 * 7 and 2 * 256 >= 144 * 3,
///   with one block a multiprocessor, as Hopper's kernels have.
///
/// The last problem's 2048 tiles are one part, but in order two there, since `4 * 8192 / KEYS_FOR_ALL_PARTS` is 2.
fn problems_of_several_heads_a_block() -> Vec<Problem> {
    const SEQLEN: usize = 200;
    let mut problems = Vec::new();
    for head_dim in [64, 96, 128, 192, 256] {
        let tiles_of_head = SEQLEN.div_ceil(if head_dim > 128 { 64 } else { 128 });
        for (heads, causal, tiles) in [
            ([24, 8], true, 2048),
            ([24, 8], false, 896),
            ([32, 8], true, 512),
            ([32, 8], false, 256),
        ] {
            let batch = tiles / (tiles_of_head * heads[1]);
            problems.push(Problem::new(batch, [SEQLEN; 2], heads, head_dim).with_causal(causal));
        }
    }
    problems.push(Problem::new(4, [65, 8192], [32, 8], 128).causal());
    problems
}

#[test]
fn heads_that_a_block_sums() -> Result<()> {
    on_the_gpu(|device| {
        for problem in problems_of_several_heads_a_block() {
            // Two sequences, again and again.
            let two = Problem {
                batch: 2,
                ..problem.clone()
            };
            let two = Inputs::normal(&two, DType::BF16, device, 49)?;
            let again = |x: &Tensor| x.repeat((problem.batch / 2, 1, 1, 1));
            let inputs = Inputs {
                q: again(&two.q)?,
                k: again(&two.k)?,
                v: again(&two.v)?,
                dout: again(&two.dout)?,
            };
            for problem in [problem.clone().deterministic(), problem] {
                let passes = run::queued(&problem, &inputs)?;
                check_again(&problem, &passes).with_context(|| format!("{problem:?}"))?;
                verify::last_group(&problem, &inputs, &passes)?;
            }
        }
        check_still_works(device)
    })
}

/// Each sequence has the bits of the one two before, but in dq without an order.
fn check_again(problem: &Problem, passes: &Passes) -> Result<()> {
    let rest = problem.batch - 2;
    for (name, x) in passes.named() {
        if name == "dq" && !problem.deterministic {
            continue;
        }
        let differs = x.narrow(0, 2, rest)?.ne(&x.narrow(0, 0, rest)?)?;
        let differs = differs.flatten_from(1)?.max(1)?.to_vec1::<u8>()?;
        let differing = differs.iter().filter(|&&differs| differs != 0).count();
        ensure!(
            differing == 0,
            "{name} differs in {differing} of {rest} sequences"
        );
    }
    Ok(())
}
