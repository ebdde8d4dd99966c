//! The op under load: queued behind other work, in memory that was NaN before, on streams and devices of its own,
//! and where the device refuses. Several threads at once are in `determinism.rs`.
//!
//! Between the calls nothing waits for the device. Each test ends with one trivial operation that is waited for,
//! since a failed launch that was swallowed shows in the next one.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_flash_gqa::{AttnOptions, flash_attn_with};

use crate::support::compare::{finite, identical, identical_passes};
use crate::support::device::{check_still_works, dtypes, for_each_device, for_each_stream, gpu};
use crate::support::problem::Problem;
use crate::support::run::{self, Passes};
use crate::support::tensors::{Inputs, normal};
use crate::support::verify;

/// A matrix whose powers neither grow nor vanish, large enough to keep the device busy.
fn work(device: &Device) -> Result<Tensor> {
    let (size, dtype) = if device.is_cpu() {
        (32, DType::F32)
    } else {
        (2048, DType::BF16)
    };
    normal(&[size, size], 1. / (size as f64).sqrt(), dtype, device, 70)
}

/// `x` times the matrix, several times over.
fn multiply(x: &Tensor, matrix: &Tensor, times: usize) -> Result<Tensor> {
    let mut product = x.clone();
    for _ in 0..times {
        product = product.matmul(matrix)?;
    }
    Ok(product)
}

#[test]
fn case_70_calls_queued_behind_other_work_give_the_same_bits() -> Result<()> {
    for_each_stream(|device| {
        let cases = if device.is_cpu() {
            vec![([130, 130], 64), ([5, 300], 32)]
        } else {
            vec![
                ([1024, 1024], 64),
                ([2048, 2048], 128),
                ([1, 4000], 128),
                ([300, 700], 72),
                ([500, 500], 256),
            ]
        };
        for (seqlens, head_dim) in cases {
            for heads in [[4, 4], [8, 1]] {
                for causal in [false, true] {
                    let problem = Problem::new(1, seqlens, heads, head_dim).with_causal(causal);
                    for dtype in dtypes(device, head_dim) {
                        check_queued(&problem, device, dtype)?;
                    }
                }
            }
        }
        check_still_works(device)
    })
}

fn check_queued(problem: &Problem, device: &Device, dtype: DType) -> Result<()> {
    let repetitions = if device.is_cpu() { 3 } else { 30 };
    let matrix = work(device)?;
    let inputs = Inputs::normal(problem, dtype, device, 70)?;
    for problem in variants(problem, device) {
        let mut queue = Vec::new();
        let mut product = matrix.clone();
        for _ in 0..repetitions {
            product = multiply(&product, &matrix, 2)?;
            queue.push(run::queued(&problem, &inputs)?);
        }
        finite("other work", &product)?;
        for (repetition, passes) in queue.iter().enumerate() {
            let how = format!("in repetition {repetition}");
            identical_passes(&how, &problem, passes, &queue[0])?;
            finite("dq", &passes.grads.dq)?;
        }
    }
    Ok(())
}

/// With the bits of dq left open and not, where that makes a difference.
fn variants(problem: &Problem, device: &Device) -> Vec<Problem> {
    let mut variants = vec![problem.clone().deterministic()];
    if !device.is_cpu() {
        variants.push(problem.clone());
    }
    variants
}

/// Many pieces of work of different sizes, each with several tiles of keys: on Hopper blocks take them one after the
/// other, and which block takes which is left to chance.
#[test]
fn pieces_of_work_from_a_counter_give_the_same_bits() -> Result<()> {
    for_each_device(|device| {
        let (batch, seqlen, heads, repetitions) = if device.is_cpu() {
            (2, 70, [8, 2], 2)
        } else {
            (4, 300, [32, 8], 10)
        };
        for head_dim in [64, 96, 128, 192, 256] {
            let problem = Problem::new(batch, [seqlen; 2], heads, head_dim).causal();
            let inputs = Inputs::normal(&problem, DType::BF16, device, 75)?;
            for problem in variants(&problem, device) {
                let first = run::queued(&problem, &inputs)?;
                for repetition in 1..repetitions {
                    let how = format!("in repetition {repetition}");
                    let again = run::queued(&problem, &inputs)?;
                    identical_passes(&how, &problem, &again, &first)?;
                }
                verify::last_group(&problem, &inputs, &first)?;
            }
        }
        check_still_works(device)
    })
}

/// Every buffer of the op is written where it is read: tails of tiles, rows that see nothing and keys that nobody
/// sees, columns beyond head_dim, parts of a group, turns of dq.
fn problems_with_tails() -> Vec<Problem> {
    vec![
        Problem::new(1, [97, 97], [4, 2], 64),
        Problem::new(2, [150, 70], [4, 2], 64).causal(),
        Problem::new(1, [70, 200], [2, 2], 72).window(Some(10), Some(5)),
        Problem::new(1, [129, 193], [8, 1], 128).causal(),
        Problem::new(1, [1, 300], [8, 2], 128),
        Problem::new(1, [33, 65], [6, 1], 8).softcap(3.),
        Problem::new(1, [65, 130], [2, 1], 192).causal(),
        Problem::new(1, [100, 31], [4, 1], 256).alibi(),
    ]
}

#[test]
fn case_24_freed_memory_full_of_nan() -> Result<()> {
    for_each_stream(|device| {
        for problem in problems_with_tails() {
            for dtype in dtypes(device, problem.head_dim) {
                for problem in variants(&problem, device) {
                    check_in_poisoned_memory(&problem, device, dtype)?;
                }
            }
        }
        check_still_works(device)
    })
}

fn check_in_poisoned_memory(problem: &Problem, device: &Device, dtype: DType) -> Result<()> {
    let inputs = Inputs::normal(problem, dtype, device, 24)?;
    let first = verify::passes(problem, &inputs)?;
    let (out, lse) = run::forward(problem, &inputs)?;
    let repetitions = if device.is_cpu() { 3 } else { 20 };
    for repetition in 0..repetitions {
        let how = format!("in poisoned memory, repetition {repetition}");
        poison_freed_memory(problem, device, dtype)?;
        let (again_out, again_lse) = run::forward(problem, &inputs)?;
        identical(
            &format!("untracked out {how} of {problem:?}"),
            &again_out,
            &out,
        )?;
        identical(
            &format!("untracked lse {how} of {problem:?}"),
            &again_lse,
            &lse,
        )?;
        poison_freed_memory(problem, device, dtype)?;
        let again = run::queued(problem, &inputs)?;
        identical_passes(&how, problem, &again, &first)?;
        finite(&format!("dq {how} of {problem:?}"), &again.grads.dq)?;
    }
    Ok(())
}

/// Leaves NaN of every type in the memory that the op's buffers get.
fn poison_freed_memory(problem: &Problem, device: &Device, dtype: DType) -> Result<()> {
    let &Problem {
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = problem;
    // The widest kernel, and rows padded as the workspace has them.
    let padded = |seqlen: usize| seqlen.next_multiple_of(128);
    let (q_rows, k_rows) = (
        batch * num_heads * padded(seqlen_q),
        batch * num_kv_heads * padded(seqlen_k),
    );
    let group_size = num_heads / num_kv_heads;
    let results = [
        batch * seqlen_q * num_heads,
        batch * seqlen_k * num_kv_heads,
    ]
    .map(|rows| rows * head_dim * dtype.size_in_bytes());
    let workspace = [
        q_rows,
        2 * q_rows,
        256 * q_rows,
        2 * 256 * group_size * k_rows,
    ]
    .map(|count| 4 * count);
    // What was freed before goes back to the driver, so that what follows is all that there is.
    device.synchronize()?;
    let buffers: Vec<Tensor> = results
        .iter()
        .chain(&results)
        .chain(&workspace)
        .map(|bytes| poison(bytes.div_ceil(4), device))
        .collect::<Result<_>>()?;
    drop(buffers);
    Ok(())
}

/// All bits 1: a NaN in every float type.
fn poison(count: usize, device: &Device) -> Result<Tensor> {
    Ok(Tensor::full(u32::MAX, count, device)?)
}

/// Else the test above would prove nothing.
#[test]
fn a_gpu_hands_out_freed_memory_as_it_was() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    const COUNT: usize = 1 << 18;
    // Other tests may get the memory in between.
    let is_poisoned = || -> Result<bool> {
        device.synchronize()?;
        drop(poison(COUNT, &device)?);
        // SAFETY: every pattern of bits is a u32, and the device's memory has one.
        let handed_out = unsafe { Tensor::empty(COUNT, DType::U32, &device)? };
        Ok(handed_out
            .to_vec1::<u32>()?
            .iter()
            .all(|&bits| bits == u32::MAX))
    };
    for _ in 0..20 {
        if is_poisoned()? {
            return Ok(());
        }
    }
    anyhow::bail!("none of 20 allocations had what was freed before")
}

/// What a model has around the op: a long product that makes q, k and v, and a product of out and dq.
struct Neighbours {
    matrix: Tensor,
    problem: Problem,
    dout: Tensor,
}

/// Powers of the matrix that the producer makes: with 2048 rows, a fraction of a millisecond.
const POWERS: usize = 20;

impl Neighbours {
    fn new(device: &Device) -> Result<Self> {
        let matrix = work(device)?;
        // Rows as wide as the matrix.
        let (seqlen, head_dim) = if device.is_cpu() { (32, 8) } else { (256, 64) };
        let heads = matrix.dim(1)? / head_dim;
        let problem = Problem::new(1, [seqlen; 2], [heads; 2], head_dim)
            .causal()
            .deterministic();
        let dout = normal(&problem.q_dims(), 1., matrix.dtype(), device, 67)?;
        Ok(Self {
            matrix,
            problem,
            dout,
        })
    }

    /// One round; with `wait` the device is waited for after each step.
    fn round(&self, number: usize, wait: bool) -> Result<(Passes, Tensor)> {
        let device = self.matrix.device();
        let step = || match wait {
            true => device.synchronize(),
            false => Ok(()),
        };
        // Numbers around 1, other ones in each round.
        let factor = (0.5 + number as f64 / 50.) * (self.matrix.dim(0)? as f64).sqrt();
        let first = (&self.matrix * factor)?;
        let x = multiply(&first, &self.matrix, POWERS)?.narrow(0, 0, self.problem.seqlen_q)?;
        step()?;
        let mut parts = Vec::new();
        for times in 1..=3 {
            let part = multiply(&x, &self.matrix, times)?;
            parts.push(part.reshape(&self.problem.q_dims())?);
            step()?;
        }
        let inputs = Inputs {
            q: parts[0].clone(),
            k: parts[1].clone(),
            v: parts[2].clone(),
            dout: self.dout.clone(),
        };
        let passes = run::queued(&self.problem, &inputs)?;
        step()?;
        let flat = |x: &Tensor| x.flatten_from(2)?.squeeze(0);
        let consumed = (multiply(&flat(&passes.out)?, &self.matrix, 1)? + flat(&passes.grads.dq)?)?;
        step()?;
        Ok((passes, consumed))
    }
}

#[test]
fn case_67_a_producer_and_a_consumer_need_no_wait() -> Result<()> {
    for_each_stream(|device| {
        let neighbours = Neighbours::new(device)?;
        let rounds = if device.is_cpu() { 5 } else { 100 };
        let queued = (0..rounds).map(|number| neighbours.round(number, false));
        let queued = queued.collect::<Result<Vec<_>>>()?;
        for (number, (passes, consumed)) in queued.iter().enumerate() {
            let (expected, expected_consumed) = neighbours.round(number, true)?;
            let how = format!("in round {number}");
            identical_passes(&how, &neighbours.problem, passes, &expected)?;
            identical(&format!("consumed {how}"), consumed, &expected_consumed)?;
            finite("consumed", consumed)?;
        }
        check_still_works(device)
    })
}

#[test]
fn case_66_two_gpus_in_turn() -> Result<()> {
    let Some(first) = gpu() else { return Ok(()) };
    let second = match Device::new_cuda(1) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: there is no second GPU ({error})");
            return Ok(());
        }
    };
    let devices = [first, second];
    for problem in problems_with_tails() {
        let problem = problem.deterministic();
        for dtype in dtypes(&devices[0], problem.head_dim) {
            let inputs = [&devices[0], &devices[1]]
                .map(|device| Inputs::normal(&problem, dtype, device, 66));
            let [a, b] = inputs;
            let inputs = [a?, b?];
            let mut queue = Vec::new();
            for _ in 0..5 {
                // The second first, so that it is never the device of the call before.
                for number in [1, 0] {
                    queue.push((number, run::forward_backward(&problem, &inputs[number])?));
                }
            }
            for (number, passes) in &queue {
                let (_, first) = &queue[1 - number];
                identical_passes(&format!("in turn on GPU {number}"), &problem, passes, first)?;
            }
            for (number, passes) in &queue[..2] {
                verify::results(&problem, &inputs[*number], passes)?;
                ensure!(passes.grads.dk.device().same_device(&devices[*number]));
            }
        }
    }
    devices.iter().try_for_each(check_still_works)
}

/// candle takes two devices of one GPU for two devices.
#[test]
fn case_66_two_devices_of_one_gpu_do_not_mix() -> Result<()> {
    let Some(first) = gpu() else { return Ok(()) };
    let problem = Problem::new(1, [70, 70], [4, 2], 64)
        .causal()
        .deterministic();
    let inputs = Inputs::normal(&problem, DType::BF16, &first, 66)?;
    let expected = run::forward_backward(&problem, &inputs)?;
    first.synchronize()?;
    for second in [Device::new_cuda(0)?, Device::new_cuda_with_stream(0)?] {
        let moved = inputs.to_device(&second)?;
        let options = problem.options(&first)?;
        for (q, k, v) in [
            (&inputs.q, &moved.k, &inputs.v),
            (&inputs.q, &inputs.k, &moved.v),
            (&moved.q, &inputs.k, &inputs.v),
        ] {
            let message = refusal(q, k, v, &options)?;
            ensure!(message.contains("must be on the same device"), "{message}");
        }
        let ours = run::forward_backward(&problem, &moved)?;
        second.synchronize()?;
        identical_passes("on another device", &problem, &ours, &expected)?;
        check_still_works(&second)?;
    }
    check_still_works(&first)
}

/// The message of a forward that must fail.
fn refusal(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttnOptions) -> Result<String> {
    let error = flash_attn_with(q, k, v, options).err();
    Ok(error.context("the call did not fail")?.to_string())
}

/// One row, seen as so many: takes no memory, but what comes of it does.
fn expanded(dims: [usize; 4], device: &Device) -> Result<Tensor> {
    let row = Tensor::ones((1, 1, 1, dims[3]), DType::BF16, device)?;
    Ok(row.broadcast_as(&dims)?)
}

/// After an error the same call as before gives the same bits.
fn check_unharmed(device: &Device, attempt: impl Fn() -> Result<()>) -> Result<()> {
    let problem = Problem::new(1, [200, 200], [4, 2], 64)
        .causal()
        .deterministic();
    let inputs = Inputs::normal(&problem, DType::BF16, device, 59)?;
    let before = verify::passes(&problem, &inputs)?;
    attempt()?;
    let after = run::forward_backward(&problem, &inputs)?;
    identical_passes("after an error", &problem, &after, &before)?;
    check_still_works(device)
}

#[test]
fn case_59_an_output_that_does_not_fit_is_an_error_of_that_call() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    check_unharmed(&device, || {
        // 16 TiB.
        let q = expanded([1 << 20, 1, 1 << 20, 8], &device)?;
        let kv = expanded([1 << 20, 1, 1, 8], &device)?;
        let message = refusal(&q, &kv, &kv, &AttnOptions::default())?;
        ensure!(is_out_of_memory(&message), "{message}");
        Ok(())
    })
}

#[test]
fn case_59_gradients_that_do_not_fit_are_an_error_of_that_backward() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    check_unharmed(&device, || {
        let q = Var::from_tensor(&expanded([1 << 20, 1, 1, 8], &device)?)?;
        // dk would be 1 TiB. Of the keys each row sees one.
        let k = Tensor::ones((1, 1 << 16, 1, 8), DType::BF16, &device)?;
        let k = k.broadcast_as((1 << 20, 1 << 16, 1, 8))?;
        let options = AttnOptions {
            causal: true,
            window_left: Some(0),
            ..AttnOptions::default()
        };
        let out = flash_attn_with(&q, &k, &k, &options)?;
        let error = out.backward().err().context("the backward did not fail")?;
        ensure!(is_out_of_memory(&error.to_string()), "{error}");
        Ok(())
    })
}

fn is_out_of_memory(message: &str) -> bool {
    message
        .to_lowercase()
        .replace('_', " ")
        .contains("out of memory")
}

#[test]
fn case_59_lengths_that_the_kernels_cannot_count_are_refused() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    check_unharmed(&device, || {
        let one = expanded([1, 1, 1, 8], &device)?;
        let many = expanded([1, 1 << 30, 1, 8], &device)?;
        let message = refusal(&one, &many, &many, &AttnOptions::default())?;
        for part in ["flash_attn: seqlen_k", "below 1073741824", "got 1073741824"] {
            ensure!(message.contains(part), "{message:?} without {part:?}");
        }
        Ok(())
    })
}

#[test]
#[ignore = "43 GB of the GPU's memory"]
fn case_59_a_grid_that_cannot_be_launched_is_an_error_of_that_call() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    check_unharmed(&device, || {
        // A piece of work for each head: one more than the launchers take, or than a grid may have blocks.
        let q = expanded([1 << 16, 1, 1 << 15, 8], &device)?;
        let kv = expanded([1 << 16, 1, 1, 8], &device)?;
        let message = refusal(&q, &kv, &kv, &AttnOptions::default())?;
        for part in [
            "flash_attn: flash_fwd_",
            "batch 65536, seqlen_q 1, seqlen_k 1, num_heads 32768, num_kv_heads 1, head_dim 8",
            "invalid configuration argument",
            "cudaError 9",
        ] {
            ensure!(message.contains(part), "{message:?} without {part:?}");
        }
        Ok(())
    })
}
