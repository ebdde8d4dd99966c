//! The same bits whatever the number of threads, and on every run.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_flash_gqa::{AttnOptions, flash_attn_with};

use crate::support::compare::identical;
use crate::support::device::{
    check_still_works, dtypes, for_each_device, for_each_dtype, for_each_stream, on_the_gpu,
};
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::Inputs;

/// out and lse of the untracked forward, then those of the tracked one and the gradients; all are there when
/// it returns, for whatever thread reads them.
fn everything(problem: &Problem, inputs: &Inputs) -> Result<Vec<(String, Tensor)>> {
    let problem = &problem.clone().deterministic();
    let (out, lse) = run::forward(problem, inputs)?;
    let mut results = vec![("untracked out".into(), out), ("untracked lse".into(), lse)];
    for (name, tensor) in run::forward_backward(problem, inputs)?.named() {
        results.push((name.into(), tensor.clone()));
    }
    inputs.q.device().synchronize()?;
    Ok(results)
}

fn check_identical(
    how: &str,
    problem: &Problem,
    ours: &[(String, Tensor)],
    first: &[(String, Tensor)],
) -> Result<()> {
    for ((name, ours), (_, first)) in ours.iter().zip(first) {
        identical(&format!("{name} {how} of {problem:?}"), ours, first)?;
    }
    Ok(())
}

/// Large enough, all of them, to be worth several threads.
fn problems() -> [Problem; 7] {
    [
        // Groups, causal, several tiles of rows and keys.
        Problem::new(2, [300, 300], [6, 2], 32).causal(),
        // One head: every key tile adds to every query tile's dq.
        Problem::new(1, [400, 600], [1, 1], 64),
        Problem::new(1, [500, 500], [2, 1], 40).window(Some(60), Some(33)),
        // Few rows, keys split.
        Problem::new(1, [1, 9000], [8, 2], 64).causal(),
        Problem::new(1, [30, 5000], [2, 1], 64).causal().softcap(5.),
        // A group that doesn't fit a tile.
        Problem::new(1, [12, 300], [250, 1], 64).alibi(),
        // Rows that see nothing.
        Problem::new(3, [400, 250], [4, 4], 32).causal(),
    ]
}

#[test]
fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for problem in problems() {
            let inputs = Inputs::normal(&problem, dtype, device, 70)?;
            device.synchronize()?;
            let mut first = None;
            for threads in [1, 2, 3, 7] {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()?;
                let results = pool.install(|| everything(&problem, &inputs))?;
                let first = first.get_or_insert_with(|| results.clone());
                let how = format!("on {threads} threads");
                check_identical(&how, &problem, &results, first)?;
            }
        }
        Ok(())
    })
}

fn check_repeated(
    problem: &Problem,
    repetitions: usize,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let inputs = Inputs::normal(problem, dtype, device, 71)?;
    let first = everything(problem, &inputs)?;
    for repetition in 1..repetitions {
        let how = format!("in repetition {repetition}");
        check_identical(&how, problem, &everything(problem, &inputs)?, &first)?;
    }
    Ok(())
}

#[test]
fn case_70_thirty_runs_give_the_same_bits() -> Result<()> {
    for_each_device(|device| {
        for heads in [[4, 4], [8, 1]] {
            for causal in [false, true] {
                let problem = Problem::new(1, [260, 260], heads, 64).with_causal(causal);
                check_repeated(&problem, 30, DType::F16, device)?;
            }
        }
        Ok(())
    })
}

fn check_full_size(device: &Device) -> Result<()> {
    for (seqlen, head_dim) in [(1024, 64), (2048, 128)] {
        for heads in [[16, 16], [16, 2]] {
            for causal in [false, true] {
                let problem = Problem::new(1, [seqlen; 2], heads, head_dim).with_causal(causal);
                check_repeated(&problem, 30, DType::BF16, device)?;
            }
        }
    }
    Ok(())
}

#[test]
fn case_70_thirty_runs_give_the_same_bits_at_1024_and_2048() -> Result<()> {
    on_the_gpu(check_full_size)
}

#[test]
#[ignore = "the full size: minutes on a CPU"]
fn case_70_thirty_runs_give_the_same_bits_at_1024_and_2048_on_the_cpu() -> Result<()> {
    check_full_size(&Device::Cpu)
}

/// On the CPU dq is deterministic anyway, and the option costs nothing.
#[test]
fn the_deterministic_option_gives_the_same_bits() -> Result<()> {
    for_each_dtype(32, |device, dtype| {
        let problem = Problem::new(1, [200, 300], [4, 2], 32).causal();
        let inputs = Inputs::normal(&problem, dtype, device, 74)?;
        let gradient = |deterministic| -> Result<Tensor> {
            let options = AttnOptions {
                deterministic,
                ..problem.options(device)?
            };
            let q = Var::from_tensor(&inputs.q)?;
            let out = flash_attn_with(&q, &inputs.k, &inputs.v, &options)?;
            let grads = (out * &inputs.dout)?.sum_all()?.backward()?;
            grads.get(&q).cloned().context("no gradient")
        };
        let dq = gradient(true)?;
        identical("dq again", &gradient(true)?, &dq)?;
        if device.is_cpu() {
            identical("dq without the option", &gradient(false)?, &dq)?;
        }
        Ok(())
    })
}

/// Other work on the same threads must not change anything, nor keep the backward from ending.
#[test]
fn calls_from_several_threads_at_once_give_the_same_bits() -> Result<()> {
    for_each_stream(|device| {
        for dtype in dtypes(device, 32) {
            let problem = Problem::new(1, [300, 300], [4, 2], 32).causal();
            let inputs = Inputs::normal(&problem, dtype, device, 72)?;
            let first = everything(&problem, &inputs)?;
            let results = std::thread::scope(|scope| {
                let call = || -> Result<Vec<_>> {
                    (0..3).map(|_| everything(&problem, &inputs)).collect()
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(call)).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join())
                    .collect::<Vec<_>>()
            });
            for results in results {
                for results in results.expect("a thread panicked")? {
                    check_identical("beside others", &problem, &results, &first)?;
                }
            }
            check_still_works(device)?;
        }
        Ok(())
    })
}

/// A call from inside a rayon task, whose pool is busy with other such calls.
#[test]
fn calls_from_inside_a_pool_give_the_same_bits() -> Result<()> {
    use rayon::prelude::*;
    for_each_dtype(32, |device, dtype| {
        let problem = Problem::new(1, [300, 300], [4, 2], 32).causal();
        let inputs = Inputs::normal(&problem, dtype, device, 73)?;
        let first = everything(&problem, &inputs)?;
        let results: Result<Vec<_>> = (0..6)
            .into_par_iter()
            .map(|_| everything(&problem, &inputs))
            .collect();
        for results in results? {
            check_identical("inside a pool", &problem, &results, &first)?;
        }
        Ok(())
    })
}
