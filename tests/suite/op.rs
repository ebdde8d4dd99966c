//! The op in candle's graph: which inputs are tracked, what gradient arrives, what is kept for it.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_flash_gqa::{flash_attn_with, flash_attn_with_lse, reference};

use crate::support::compare::{close_to, identical};
use crate::support::device::{for_each_device_with, for_each_dtype};
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, host, normal};
use crate::support::verify;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Variable,
    Intermediate,
    Constant,
}

/// An input of some kind, and the variable behind it.
fn input(kind: Kind, tensor: &Tensor) -> Result<(Tensor, Option<Var>)> {
    let var = Var::from_tensor(tensor)?;
    Ok(match kind {
        Kind::Variable => (var.as_tensor().clone(), Some(var)),
        Kind::Intermediate => ((var.as_tensor() * 1.)?, Some(var)),
        Kind::Constant => (tensor.clone(), None),
    })
}

#[test]
fn case_33_variables_intermediates_and_constants_in_all_27_combinations() -> Result<()> {
    const KINDS: [Kind; 3] = [Kind::Variable, Kind::Intermediate, Kind::Constant];
    let problem = Problem::new(1, [9, 12], [4, 2], 8).causal();
    for_each_dtype(8, |device, dtype| {
        let inputs = Inputs::normal(&problem, dtype, device, 33)?;
        let expected = run::forward_backward(&problem, &inputs)?.grads;
        let options = problem.options(device)?;
        for kinds in (0..27).map(|i| [KINDS[i / 9], KINDS[i / 3 % 3], KINDS[i % 3]]) {
            let (q, q_var) = input(kinds[0], &inputs.q)?;
            let (k, k_var) = input(kinds[1], &inputs.k)?;
            let (v, v_var) = input(kinds[2], &inputs.v)?;
            let out = flash_attn_with(&q, &k, &v, &options)?;
            let tracked = kinds.iter().any(|&kind| kind != Kind::Constant);
            ensure!(out.track_op() == tracked, "{kinds:?}");
            let grads = (out * &inputs.dout)?.sum_all()?.backward()?;
            for (var, (name, expected)) in [q_var, k_var, v_var].iter().zip(expected.named()) {
                if let Some(var) = var {
                    let grad = grads
                        .get(var)
                        .with_context(|| format!("{name}: {kinds:?}"))?;
                    identical(&format!("{name} of {kinds:?}"), grad, expected)?;
                }
            }
        }
        Ok(())
    })
}

#[test]
fn q_k_and_v_may_be_the_same_tensor() -> Result<()> {
    let problem = Problem::new(2, [30, 30], [3, 3], 16).causal();
    for_each_dtype(16, |device, dtype| {
        let x = Var::from_tensor(&normal(&problem.q_dims(), 1., dtype, device, 1)?)?;
        let dout = normal(&problem.q_dims(), 1., dtype, device, 2)?;
        let options = problem.options(device)?;
        let out = flash_attn_with(&x, &x, &x, &options)?;
        let grads = (out * &dout)?.sum_all()?.backward()?;
        let inputs = Inputs {
            q: x.as_detached_tensor(),
            k: x.as_detached_tensor(),
            v: x.as_detached_tensor(),
            dout,
        };
        let apart = run::forward_backward(&problem, &inputs)?.grads;
        let sum = ((apart.dq + apart.dk)? + apart.dv)?;
        close_to("dx", grads.get(&x).context("dx")?, &sum, sum_limit(&sum)?)
    })
}

/// What candle may lose by adding up the gradients in another order.
fn sum_limit(sum: &Tensor) -> Result<f64> {
    let largest = host(sum)?.iter().fold(0f64, |max, x| max.max(x.abs()));
    Ok((4. * verify::unit_roundoff(sum.dtype()) * largest).max(1e-5))
}

#[test]
fn k_and_v_may_be_the_same_tensor() -> Result<()> {
    let problem = Problem::new(1, [20, 30], [4, 2], 16);
    for_each_dtype(16, |device, dtype| {
        let mut inputs = Inputs::normal(&problem, dtype, device, 2)?;
        inputs.v = inputs.k.clone();
        let apart = run::forward_backward(&problem, &inputs)?.grads;
        let (q, kv) = (Var::from_tensor(&inputs.q)?, Var::from_tensor(&inputs.k)?);
        let out = flash_attn_with(&q, &kv, &kv, &problem.options(device)?)?;
        let grads = (out * &inputs.dout)?.sum_all()?.backward()?;
        identical("dq", grads.get(&q).context("dq")?, &apart.dq)?;
        let sum = (apart.dk + apart.dv)?;
        close_to(
            "dkv",
            grads.get(&kv).context("dkv")?,
            &sum,
            sum_limit(&sum)?,
        )
    })
}

/// A loss, and the gradient of the output that it means.
type Loss = (
    &'static str,
    fn(&Tensor) -> candle_core::Result<Tensor>,
    fn(&Tensor) -> candle_core::Result<Tensor>,
);

/// Gradients that arrive expanded, transposed, narrowed or in part.
const LOSSES: [Loss; 7] = [
    ("sum", |out| out.sum_all(), |out| out.ones_like()),
    ("root", |out| Ok(out.clone()), |out| out.ones_like()),
    (
        "mean over the heads",
        |out| out.mean_keepdim(2)?.sum_all(),
        |out| out.ones_like()? / 4.,
    ),
    (
        "transposed",
        |out| {
            out.transpose(1, 2)?
                .mul(&ramp(&out.transpose(1, 2)?)?)?
                .sum_all()
        },
        |out| ramp(&out.transpose(1, 2)?)?.transpose(1, 2)?.contiguous(),
    ),
    (
        "every second row",
        |out| pairs(out)?.narrow(2, 0, 1)?.sum_all(),
        |out| {
            let ones = pairs(out)?.narrow(2, 0, 1)?.ones_like()?;
            let both = Tensor::cat(&[&ones, &ones.zeros_like()?], 2)?;
            both.reshape(out.dims())
        },
    ),
    (
        "last row alone",
        |out| out.narrow(1, out.dim(1)? - 1, 1)?.sum_all(),
        |out| {
            let last = out.narrow(1, out.dim(1)? - 1, 1)?.ones_like()?;
            last.pad_with_zeros(1, out.dim(1)? - 1, 0)
        },
    ),
    (
        "heads flattened",
        |out| {
            let flat = out.flatten_from(2)?;
            flat.mul(&ramp(&flat)?)?.sum_all()
        },
        |out| ramp(&out.flatten_from(2)?)?.reshape(out.dims()),
    ),
];

/// Different numbers between -1 and 1.
fn ramp(like: &Tensor) -> candle_core::Result<Tensor> {
    let steps = Tensor::arange(0u32, like.elem_count() as u32, like.device())?;
    let numbers = (steps.to_dtype(DType::F64)? * 0.7)?.sin()?;
    numbers.reshape(like.dims())?.to_dtype(like.dtype())
}

/// (batch, seqlen / 2, 2, ...).
fn pairs(out: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, seqlen, heads, head_dim) = out.dims4()?;
    out.reshape((batch, seqlen / 2, 2, heads * head_dim))
}

#[test]
fn the_output_gradient_may_come_from_any_loss() -> Result<()> {
    let problem = Problem::new(2, [34, 50], [4, 2], 16).causal();
    for_each_dtype(16, |device, dtype| {
        let inputs = Inputs::normal(&problem, dtype, device, 35)?;
        let options = problem.options(device)?;
        for (name, loss, dout) in LOSSES {
            let vars = [&inputs.q, &inputs.k, &inputs.v].map(Var::from_tensor);
            let [q, k, v] = vars;
            let (q, k, v) = (q?, k?, v?);
            let out = flash_attn_with(&q, &k, &v, &options)?;
            let grads = loss(&out)?.backward()?;
            let explicit = Inputs {
                dout: dout(&out.detach())?.contiguous()?,
                ..inputs.clone()
            };
            let expected = run::forward_backward(&problem, &explicit)?.grads;
            for (var, (of, expected)) in [q, k, v].iter().zip(expected.named()) {
                let grad = grads.get(var).context("no gradient")?;
                close_to(&format!("{of} of the loss {name}"), grad, expected, 1e-6)?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_backward_may_be_repeated() -> Result<()> {
    let problem = Problem::new(1, [70, 90], [4, 2], 32).causal();
    for_each_dtype(32, |device, dtype| {
        let inputs = Inputs::normal(&problem, dtype, device, 3)?;
        let q = Var::from_tensor(&inputs.q)?;
        let k = Var::from_tensor(&inputs.k)?;
        let v = Var::from_tensor(&inputs.v)?;
        let out = flash_attn_with(&q, &k, &v, &problem.options(device)?)?;
        let loss = (out * &inputs.dout)?.sum_all()?;
        let (first, second) = (loss.backward()?, loss.backward()?);
        for var in [&q, &k, &v] {
            let (first, second) = (first.get(var), second.get(var));
            identical("again", first.context("1")?, second.context("2")?)?;
        }
        Ok(())
    })
}

/// Each call keeps what its own backward needs.
#[test]
fn calls_whose_backwards_interleave_do_not_mix() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        let problem = Problem::new(1, [40, 40], [2, 1], 16);
        let options = problem.options(device)?;
        let calls = [1, 2, 3].map(|seed| Inputs::normal(&problem, dtype, device, seed));
        let mut losses = Vec::new();
        for inputs in calls {
            let inputs = inputs?;
            let q = Var::from_tensor(&inputs.q)?;
            let out = flash_attn_with(&q, &inputs.k, &inputs.v, &options)?;
            let loss = (out * &inputs.dout)?.sum_all()?;
            losses.push((inputs, q, loss));
        }
        for (inputs, q, loss) in losses.iter().rev() {
            let expected = run::forward_backward(&problem, inputs)?.grads;
            let grads = loss.backward()?;
            identical("dq", grads.get(q).context("dq")?, &expected.dq)?;
        }
        Ok(())
    })
}

/// Two layers: the output of one call is q, k and v of the next.
#[test]
fn gradients_flow_through_stacked_calls() -> Result<()> {
    let problem = Problem::new(1, [17, 17], [2, 2], 8).causal();
    for_each_dtype(8, |device, dtype| {
        let x = normal(&problem.q_dims(), 1., dtype, device, 4)?;
        let options = problem.options(device)?;
        let stacked = |attention: fn(
            &Tensor,
            &Tensor,
            &Tensor,
            &candle_flash_gqa::AttnOptions,
        ) -> candle_core::Result<Tensor>,
                       x: &Tensor| {
            let x = Var::from_tensor(x)?;
            let hidden = attention(&x, &x, &x, &options)?;
            let grads = attention(&hidden, &x, &hidden, &options)?
                .sqr()?
                .sum_all()?
                .backward()?;
            grads.get(&x).cloned().context("dx")
        };
        let ours = stacked(flash_attn_with, &x)?;
        let plain = stacked(reference, &x)?;
        let exact = x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        verify::gradient("dx", &ours, &plain, &host(&stacked(reference, &exact)?)?)
    })
}

#[test]
fn lse_is_a_constant_to_the_backward() -> Result<()> {
    let problem = Problem::new(1, [12, 15], [2, 2], 8);
    for_each_dtype(8, |device, dtype| {
        let inputs = Inputs::normal(&problem, dtype, device, 5)?;
        let expected = run::forward_backward(&problem, &inputs)?.grads;
        let q = Var::from_tensor(&inputs.q)?;
        let options = problem.options(device)?;
        let (out, lse) = flash_attn_with_lse(&q, &inputs.k, &inputs.v, &options)?;
        ensure!(!lse.track_op(), "lse is tracked");
        let from_lse = lse.to_dtype(dtype)?.sum_all()?;
        let grads = ((out * &inputs.dout)?.sum_all()? + from_lse)?.backward()?;
        identical("dq", grads.get(&q).context("dq")?, &expected.dq)
    })
}

#[test]
fn out_is_contiguous_and_of_the_dtype_of_q() -> Result<()> {
    let problem = Problem::new(2, [49, 49], [2, 2], 32);
    for_each_dtype(32, |device, dtype| {
        let inputs = Inputs::normal(&problem, dtype, device, 6)?;
        for tracked in [false, true] {
            let q = if tracked {
                Var::from_tensor(&inputs.q)?.into_inner()
            } else {
                inputs.q.clone()
            };
            let out = flash_attn_with(&q, &inputs.k, &inputs.v, &problem.options(device)?)?;
            ensure!(out.dtype() == dtype && out.dims() == problem.q_dims());
            ensure!(out.is_contiguous() && out.layout().start_offset() == 0);
        }
        Ok(())
    })
}

/// The tracked and the untracked forward may sum in another order; neither may be worse.
#[test]
fn out_and_lse_are_as_good_with_tracking_as_without() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for seqlens in [[1, 300], [4, 1500], [80, 80]] {
            let problem = Problem::new(1, seqlens, [2, 1], 64);
            let inputs = Inputs::normal(&problem, dtype, device, 7)?;
            verify::both(&problem, &inputs)?;
        }
        Ok(())
    })
}

/// The plain formula keeps its inputs in the graph when there are no keys. (candle itself drops an empty
/// output's inputs.)
#[test]
fn the_plain_formula_gives_gradients_of_zeros_without_keys() -> Result<()> {
    for_each_device_with(DType::F32, 8, |device| {
        let problem = Problem::new(2, [4, 0], [4, 2], 8);
        let inputs = Inputs::normal(&problem, DType::F32, device, 52)?;
        let (out, grads) = run::plain(&problem, &inputs)?;
        for (name, tensor) in [("out", &out)].into_iter().chain(grads.named()) {
            identical(name, tensor, &tensor.zeros_like()?)?;
        }
        Ok(())
    })
}

/// A graph may be built on one thread and walked on another.
#[test]
fn a_backward_may_run_on_another_thread() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        let problem = Problem::new(1, [64, 64], [2, 1], 16);
        let inputs = Inputs::normal(&problem, dtype, device, 8)?;
        let expected = run::forward_backward(&problem, &inputs)?.grads;
        let q = Var::from_tensor(&inputs.q)?;
        let options = problem.options(device)?;
        let out = flash_attn_with(&q, &inputs.k, &inputs.v, &options)?;
        let loss = (out * &inputs.dout)?.sum_all()?;
        // Each thread has its own stream.
        device.synchronize()?;
        let backward = || {
            let grads = loss.backward()?;
            device.synchronize()?;
            Ok::<_, candle_core::Error>(grads)
        };
        let grads = std::thread::scope(|scope| scope.spawn(backward).join());
        let grads = grads.expect("the thread panicked")?;
        identical("dq", grads.get(&q).context("dq")?, &expected.dq)
    })
}
