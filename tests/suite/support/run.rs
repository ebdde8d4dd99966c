//! The op and the plain formula, with their gradients.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor, Var};
use candle_flash_gqa::{flash_attn_with_lse, reference};

use super::compare::finite;
use super::problem::Problem;
use super::tensors::Inputs;

/// What a forward and a backward of the op give.
pub struct Passes {
    pub out: Tensor,
    pub lse: Tensor,
    pub grads: Gradients,
}

pub struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
}

impl Passes {
    /// Everything, with its name.
    pub fn named(&self) -> [(&'static str, &Tensor); 5] {
        let [dq, dk, dv] = self.grads.named();
        [("out", &self.out), ("lse", &self.lse), dq, dk, dv]
    }
}

impl Gradients {
    pub fn named(&self) -> [(&'static str, &Tensor); 3] {
        [("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)]
    }
}

/// out and lse of the op when nothing is tracked.
pub fn forward(problem: &Problem, inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    let options = problem.options(inputs.q.device())?;
    Ok(flash_attn_with_lse(
        &inputs.q, &inputs.k, &inputs.v, &options,
    )?)
}

/// The op, forward and backward.
pub fn forward_backward(problem: &Problem, inputs: &Inputs) -> Result<Passes> {
    let sources = [&inputs.q, &inputs.k, &inputs.v];
    through_views(
        problem,
        sources,
        |_, source| Ok(source.clone()),
        &inputs.dout,
    )
}

/// [`forward_backward`] for calls that queue up on the device: nothing is copied to it, which could wait for
/// it, provided that there is no alibi.
pub fn queued(problem: &Problem, inputs: &Inputs) -> Result<Passes> {
    let sources = [&inputs.q, &inputs.k, &inputs.v];
    let view = |_, source: &Tensor| Ok(source.clone());
    passes(problem, sources, view, &inputs.dout, |product| {
        Ok(product.clone())
    })
}

/// The op on `view(0, sources[0])`, and so on, as q, k and v. The gradients are those of the views.
pub fn through_views(
    problem: &Problem,
    sources: [&Tensor; 3],
    view: impl Fn(usize, &Tensor) -> Result<Tensor>,
    dout: &Tensor,
) -> Result<Passes> {
    passes(problem, sources, view, dout, Tensor::sum_all)
}

fn passes(
    problem: &Problem,
    sources: [&Tensor; 3],
    view: impl Fn(usize, &Tensor) -> Result<Tensor>,
    dout: &Tensor,
    loss: Loss,
) -> Result<Passes> {
    let options = problem.options(sources[0].device())?;
    let mut lse = None;
    let (out, grads) = differentiate(sources, view, dout, loss, |q, k, v| {
        let (out, row_lse) = flash_attn_with_lse(q, k, v, &options)?;
        lse = Some(row_lse);
        Ok(out)
    })?;
    let lse = lse.context("no lse")?;
    Ok(Passes { out, lse, grads })
}

/// The output of [`plain`] alone, and without a graph.
pub fn plain_forward(problem: &Problem, inputs: &Inputs) -> Result<Tensor> {
    let options = problem.options(inputs.q.device())?;
    let out = reference(&inputs.q, &inputs.k, &inputs.v, &options)?;
    match finite("", &out) {
        Ok(()) => Ok(out),
        Err(_) => Ok(plain(problem, inputs)?.0),
    }
}

/// The plain formula in the dtype of the inputs, through candle's own autograd. Where it overflows a
/// half type: the plain formula in f32, rounded at the end.
pub fn plain(problem: &Problem, inputs: &Inputs) -> Result<(Tensor, Gradients)> {
    let (out, grads) = plain_as_it_is(problem, inputs)?;
    let dtype = out.dtype();
    let [dq, dk, dv] = grads.named().map(|(_, grad)| grad);
    let is_half = matches!(dtype, DType::F16 | DType::BF16);
    if !is_half || [&out, dq, dk, dv].iter().all(|x| finite("", x).is_ok()) {
        return Ok((out, grads));
    }
    let wide = Inputs {
        q: inputs.q.to_dtype(DType::F32)?,
        k: inputs.k.to_dtype(DType::F32)?,
        v: inputs.v.to_dtype(DType::F32)?,
        dout: inputs.dout.to_dtype(DType::F32)?,
    };
    let (out, grads) = plain_as_it_is(problem, &wide)?;
    let grads = Gradients {
        dq: grads.dq.to_dtype(dtype)?,
        dk: grads.dk.to_dtype(dtype)?,
        dv: grads.dv.to_dtype(dtype)?,
    };
    Ok((out.to_dtype(dtype)?, grads))
}

/// [`plain`] where nothing overflows.
pub(super) fn plain_as_it_is(problem: &Problem, inputs: &Inputs) -> Result<(Tensor, Gradients)> {
    let options = problem.options(inputs.q.device())?;
    let sources = [&inputs.q, &inputs.k, &inputs.v];
    let view = |_, source: &Tensor| Ok(source.clone());
    differentiate(sources, view, &inputs.dout, Tensor::sum_all, |q, k, v| {
        Ok(reference(q, k, v, &options)?)
    })
}

/// What of `out * dout` is differentiated: its sum, or itself, which has the same gradient.
type Loss = fn(&Tensor) -> candle_core::Result<Tensor>;

fn differentiate(
    sources: [&Tensor; 3],
    view: impl Fn(usize, &Tensor) -> Result<Tensor>,
    dout: &Tensor,
    loss: Loss,
    attention: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<(Tensor, Gradients)> {
    let [q, k, v] = sources.map(Var::from_tensor);
    let vars = [q?, k?, v?];
    let out = attention(
        &view(0, &vars[0])?,
        &view(1, &vars[1])?,
        &view(2, &vars[2])?,
    )?;
    let grads = loss(&(&out * dout)?)?.backward()?;
    let grad = |i: usize| -> Result<Tensor> {
        let grad = grads.get(&vars[i]).context("an input without gradient")?;
        view(i, grad)
    };
    let grads = Gradients {
        dq: grad(0)?,
        dk: grad(1)?,
        dv: grad(2)?,
    };
    Ok((out, grads))
}
