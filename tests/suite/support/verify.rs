//! The error rule: `err(ours) <= factor * err(plain formula in the same dtype) + atol`, where `err` is
//! the largest distance from the f64 host implementation on the inputs as rounded to the dtype.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};

use super::compare::{close, max_distance};
use super::naive;
use super::problem::Problem;
use super::run::{self, Gradients, Passes};
use super::tensors::{Inputs, host};

/// How far off a result may be.
#[derive(Debug, Clone, Copy)]
struct Rule {
    forward_factor: f64,
    backward_factor: f64,
    /// In f64 the host implementation is no better than we are: a multiple of the largest number.
    atol_f64: f64,
}

const RULE: Rule = Rule {
    forward_factor: 2.,
    backward_factor: 3.,
    atol_f64: 1e-12,
};

/// For inputs that are large on purpose: scores of 10^4 have lost four digits before the softmax.
const RULE_OF_LARGE: Rule = Rule {
    backward_factor: 5.,
    atol_f64: 1e-9,
    ..RULE
};

/// Checks out and lse of the op when nothing is tracked.
pub fn forward(problem: &Problem, inputs: &Inputs) -> Result<()> {
    check_forward(problem, inputs, RULE)
}

/// Checks out, lse and the gradients of the op when q, k and v are variables.
pub fn passes(problem: &Problem, inputs: &Inputs) -> Result<Passes> {
    let passes = run::forward_backward(problem, inputs)?;
    check_passes(problem, inputs, &passes, RULE)?;
    Ok(passes)
}

/// [`forward`] and [`passes`].
pub fn both(problem: &Problem, inputs: &Inputs) -> Result<Passes> {
    forward(problem, inputs)?;
    passes(problem, inputs)
}

/// [`forward`] for inputs that are large on purpose.
pub fn forward_of_large(problem: &Problem, inputs: &Inputs) -> Result<()> {
    check_forward(problem, inputs, RULE_OF_LARGE)
}

/// [`both`] for inputs that are large on purpose.
pub fn both_of_large(problem: &Problem, inputs: &Inputs) -> Result<Passes> {
    forward_of_large(problem, inputs)?;
    let passes = run::forward_backward(problem, inputs)?;
    check_passes(problem, inputs, &passes, RULE_OF_LARGE)?;
    Ok(passes)
}

/// [`both_of_large`] where the plain formula's `q·k` overflows f16. It gets `q / 16` and 16 times the scale: the
/// same problem, since powers of two are exact.
pub fn both_of_overflowing(problem: &Problem, inputs: &Inputs) -> Result<()> {
    const FACTOR: f32 = 16.;
    forward_of_large(problem, inputs)?;
    let scale = problem.softmax_scale;
    let scale = scale.unwrap_or((problem.head_dim as f32).sqrt().recip());
    let smaller = Inputs {
        q: (&inputs.q / f64::from(FACTOR))?,
        ..inputs.clone()
    };
    let (_, mut plain) = run::plain_as_it_is(&problem.clone().scale(FACTOR * scale), &smaller)?;
    plain.dq = (plain.dq / f64::from(FACTOR))?;
    let ours = run::forward_backward(problem, inputs)?;
    let truth = Truth::forward(problem, inputs)?;
    let plain_out = run::plain_forward(problem, inputs)?;
    truth.check_forward(problem, &ours.out, &ours.lse, &plain_out, RULE_OF_LARGE)?;
    truth.check_backward(problem, inputs, &ours.grads, &plain, RULE_OF_LARGE)
}

/// Checks one gradient of whatever computation against the truth and the plain computation in the same dtype.
pub fn gradient(name: &str, ours: &Tensor, plain: &Tensor, truth: &[f64]) -> Result<()> {
    check_gradient(name, ours, plain, truth, RULE)
}

/// Checks results that were computed from these inputs in whatever way.
pub fn results(problem: &Problem, inputs: &Inputs, passes: &Passes) -> Result<()> {
    check_passes(problem, inputs, passes, RULE)
}

/// Checks what the last key/value head of the last sequence has a part in.
pub fn last_group(problem: &Problem, inputs: &Inputs, passes: &Passes) -> Result<()> {
    let group_size = problem.num_heads / problem.num_kv_heads;
    // Heads are dimension 2, in lse 1.
    let last = |x: &Tensor, dim: usize, heads: usize| -> Result<Tensor> {
        let sequence = x.narrow(0, problem.batch - 1, 1)?;
        let group = sequence.narrow(dim, x.dim(dim)? - heads, heads)?;
        Ok(group.contiguous()?)
    };
    let of_group = Problem {
        batch: 1,
        num_heads: group_size,
        num_kv_heads: 1,
        ..problem.clone()
    };
    let inputs = Inputs {
        q: last(&inputs.q, 2, group_size)?,
        k: last(&inputs.k, 2, 1)?,
        v: last(&inputs.v, 2, 1)?,
        dout: last(&inputs.dout, 2, group_size)?,
    };
    let passes = Passes {
        out: last(&passes.out, 2, group_size)?,
        lse: last(&passes.lse, 1, group_size)?,
        grads: Gradients {
            dq: last(&passes.grads.dq, 2, group_size)?,
            dk: last(&passes.grads.dk, 2, 1)?,
            dv: last(&passes.grads.dv, 2, 1)?,
        },
    };
    results(&of_group, &inputs, &passes)
}

/// Checks out and lse that were computed from these inputs in whatever way.
pub fn forward_results(
    problem: &Problem,
    inputs: &Inputs,
    out: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    check_forward_results(problem, inputs, out, lse, RULE)
}

fn check_forward(problem: &Problem, inputs: &Inputs, rule: Rule) -> Result<()> {
    let (out, lse) = run::forward(problem, inputs)?;
    check_forward_results(problem, inputs, &out, &lse, rule)
}

fn check_forward_results(
    problem: &Problem,
    inputs: &Inputs,
    out: &Tensor,
    lse: &Tensor,
    rule: Rule,
) -> Result<()> {
    let truth = Truth::forward(problem, inputs)?;
    let plain = run::plain_forward(problem, inputs)?;
    truth.check_forward(problem, out, lse, &plain, rule)
}

fn check_passes(problem: &Problem, inputs: &Inputs, ours: &Passes, rule: Rule) -> Result<()> {
    let truth = Truth::forward(problem, inputs)?;
    let (plain_out, plain_grads) = run::plain(problem, inputs)?;
    truth.check_forward(problem, &ours.out, &ours.lse, &plain_out, rule)?;
    truth.check_backward(problem, inputs, &ours.grads, &plain_grads, rule)
}

struct Truth {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl Truth {
    fn forward(problem: &Problem, inputs: &Inputs) -> Result<Self> {
        let (q, k, v) = (host(&inputs.q)?, host(&inputs.k)?, host(&inputs.v)?);
        let naive::Forward { out, lse } = naive::forward(problem, &q, &k, &v);
        Ok(Self { q, k, v, out, lse })
    }

    fn check_forward(
        &self,
        problem: &Problem,
        out: &Tensor,
        lse: &Tensor,
        plain: &Tensor,
        rule: Rule,
    ) -> Result<()> {
        let shape_of_lse = [problem.batch, problem.num_heads, problem.seqlen_q];
        ensure!(out.dims() == problem.q_dims(), "out: {:?}", out.dims());
        ensure!(out.is_contiguous(), "out is not contiguous");
        ensure!(lse.dims() == shape_of_lse, "lse: {:?}", lse.dims());
        ensure!(lse.dtype() == DType::F32, "lse: {:?}", lse.dtype());

        let atol = match plain.dtype() {
            DType::F64 => rule.atol_f64 * largest(&self.out).max(1.),
            _ => 1e-5,
        };
        let limit = limit(plain, &self.out, rule.forward_factor, atol)?;
        close("out", out, &self.out, limit).with_context(|| format!("{problem:?}"))?;
        let largest = largest(&self.lse).max(1.);
        close("lse", lse, &self.lse, 2e-6 * largest).with_context(|| format!("{problem:?}"))?;
        check_blind_rows(problem, "out", out)
    }

    fn check_backward(
        &self,
        problem: &Problem,
        inputs: &Inputs,
        ours: &Gradients,
        plain: &Gradients,
        rule: Rule,
    ) -> Result<()> {
        let truth = naive::backward(problem, &self.q, &self.k, &self.v, &host(&inputs.dout)?);
        let truth = [truth.dq, truth.dk, truth.dv];
        for (((name, ours), (_, plain)), truth) in ours.named().iter().zip(plain.named()).zip(truth)
        {
            check_gradient(name, ours, plain, &truth, rule)
                .with_context(|| format!("{problem:?}"))?;
        }
        check_blind_rows(problem, "dq", &ours.dq)?;
        for (name, grad) in [("dk", &ours.dk), ("dv", &ours.dv)] {
            check_unseen_keys(problem, name, grad)?;
        }
        Ok(())
    }
}

fn check_gradient(
    name: &str,
    ours: &Tensor,
    plain: &Tensor,
    truth: &[f64],
    rule: Rule,
) -> Result<()> {
    ensure!(ours.dims() == plain.dims(), "{name}: {:?}", ours.dims());
    ensure!(ours.dtype() == plain.dtype(), "{name}: {:?}", ours.dtype());
    // The half types need the whole absolute term that the rule grants, f32 less.
    let largest = largest(truth).max(1.);
    let atol = match ours.dtype() {
        DType::F64 => rule.atol_f64 * largest,
        DType::F32 => (5e-5 * largest).min(1e-3),
        _ => 1e-3,
    };
    let limit = limit(plain, truth, rule.backward_factor, atol)?;
    close(name, ours, truth, limit)
}

/// What a result of the dtype of `plain` may be off.
fn limit(plain: &Tensor, truth: &[f64], factor: f64, atol: f64) -> Result<f64> {
    let error = max_distance(&host(plain)?, truth);
    ensure!(error.is_finite(), "the plain formula is not finite");
    Ok(factor * error + atol)
}

/// Half the distance from 1 to the next number.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 => 2f64.powi(-24),
        _ => 2f64.powi(-53),
    }
}

/// Fails unless each number is within one step of its dtype, at its own size, of the other.
///
/// Before the rounding both are sums of terms of about 1, so next to 0 an absolute term is left.
pub fn within_one_ulp(name: &str, ours: &Tensor, theirs: &Tensor) -> Result<()> {
    let dtype = ours.dtype();
    ensure!(
        ours.dims() == theirs.dims() && dtype == theirs.dtype(),
        "{name}: {dtype:?} {:?} against {:?} {:?}",
        ours.dims(),
        theirs.dtype(),
        theirs.dims()
    );
    let floor = if dtype == DType::F64 { 1e-15 } else { 2e-7 };
    for (i, (a, b)) in host(ours)?.into_iter().zip(host(theirs)?).enumerate() {
        let size = a.abs().max(b.abs()).max(f64::MIN_POSITIVE);
        let limit = 2. * unit_roundoff(dtype) * size.log2().floor().exp2() + floor;
        ensure!(
            (a - b).abs() <= limit,
            "{name}: {a:e} and {b:e} at number {i} of {:?}, limit {limit:.3e}",
            ours.dims()
        );
    }
    Ok(())
}

fn largest(values: &[f64]) -> f64 {
    let finite = values.iter().filter(|x| x.is_finite());
    finite.fold(0., |largest, x| largest.max(x.abs()))
}

/// A row that sees no key is exactly 0 in out and dq.
fn check_blind_rows(problem: &Problem, name: &str, tensor: &Tensor) -> Result<()> {
    for i in 0..problem.seqlen_q {
        if !(0..problem.seqlen_k).any(|j| problem.sees(i, j)) {
            check_zero(name, tensor, i).with_context(|| format!("{problem:?}"))?;
        }
    }
    Ok(())
}

/// A key that no row sees is exactly 0 in dk and dv.
fn check_unseen_keys(problem: &Problem, name: &str, tensor: &Tensor) -> Result<()> {
    for j in 0..problem.seqlen_k {
        if !(0..problem.seqlen_q).any(|i| problem.sees(i, j)) {
            check_zero(name, tensor, j).with_context(|| format!("{problem:?}"))?;
        }
    }
    Ok(())
}

fn check_zero(name: &str, tensor: &Tensor, position: usize) -> Result<()> {
    let values = host(&tensor.narrow(1, position, 1)?)?;
    ensure!(
        values.iter().all(|&x| x == 0.),
        "{name} at position {position} must be exactly 0"
    );
    Ok(())
}
