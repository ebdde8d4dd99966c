//! Views, offsets, and gradients of any layout; operands that are tracked or not.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor, Var};

use super::case::{Case, Passes, dout, for_each_dtype, gradients, variables};
use super::ops;
use crate::support::compare::identical;
use crate::support::layout::Layout;
use crate::support::tensors::full;

/// The same values with the last two dimensions swapped in the storage.
fn transposed(tensor: &Tensor) -> Result<Tensor> {
    match tensor.rank() {
        0 | 1 => Ok(tensor.clone()),
        rank => Ok(tensor
            .transpose(rank - 2, rank - 1)?
            .contiguous()?
            .transpose(rank - 2, rank - 1)?),
    }
}

/// The same values from the second number of a storage on, and followed by more.
fn offset(tensor: &Tensor) -> Result<Tensor> {
    let flat = tensor.flatten_all()?;
    let (first, last) = match tensor.dtype().is_float() {
        true => {
            let nan = full(&[1], f64::NAN, tensor.dtype(), tensor.device())?;
            (nan.clone(), nan)
        }
        false => {
            let large = Tensor::new(&[u32::MAX], tensor.device())?;
            (large.clone(), large)
        }
    };
    let longer = Tensor::cat(&[&first, &flat, &last], 0)?;
    Ok(longer
        .narrow(0, 1, flat.elem_count())?
        .reshape(tensor.dims())?)
}

/// The same values, every other of a storage along the last dimension.
fn interleaved(tensor: &Tensor) -> Result<Tensor> {
    let rank = tensor.rank();
    let twice = Tensor::stack(&[tensor, &tensor.ones_like()?], rank)?;
    Ok(twice.narrow(rank, 0, 1)?.squeeze(rank)?)
}

#[test]
fn views_are_taken_as_they_are() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for case in ops::all(dtype, device)? {
            for (how, view) in [
                ("transposed", transposed as fn(&Tensor) -> Result<Tensor>),
                ("offset", offset),
                ("interleaved", interleaved),
            ] {
                let views =
                    |tensors: &[Tensor]| tensors.iter().map(view).collect::<Result<Vec<_>>>();
                let vars = variables(&case.operands)?;
                // Gradients go back through candle's view nodes.
                let operands: Vec<Tensor> =
                    vars.iter().map(|var| var.as_tensor().clone()).collect();
                let out = (case.op.fused)(&views(&operands)?, &views(&case.constants)?)?;
                let grads = (&out * dout(&out)?)?.sum_all()?.backward()?;
                let grads = gradients(&grads, &vars)?;
                let name = || format!("{how} {}", case.op.name);
                case.check(&Passes { out, grads }).with_context(name)?;
            }
        }
        Ok(())
    })
}

#[test]
fn rope_reads_any_storage_order() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for dims in [[2, 5, 3, 16], [2, 4, 3, 6]] {
            let case = ops::rope(dims, true, dtype, device)?;
            for layout in [
                Layout::BHSD,
                Layout::SBHD,
                Layout::BSDH,
                Layout::ODD_ROWS,
                Layout::CACHE,
                Layout::FUSED,
                Layout::STRIDED_LAST,
                Layout::WILD,
            ] {
                let var = Var::from_tensor(&layout.store(&case.operands[0])?)?;
                let x = layout.view(&var)?;
                let out = (case.op.fused)(&[x], &case.constants)?;
                let grads = (&out * dout(&out)?)?.sum_all()?.backward()?;
                let ours = Passes {
                    out,
                    grads: vec![layout.view(grads.get(&var).context("no gradient")?)?],
                };
                case.check(&ours).with_context(|| format!("{layout:?}"))?;
            }
        }
        Ok(())
    })
}

/// A loss of an output.
type Loss = fn(&Tensor) -> candle_core::Result<Tensor>;

/// Each the sum of the output, whose gradient arrives expanded, transposed, or alone.
const LOSSES: [(&str, Loss); 4] = [
    ("product", |out| (out * out.ones_like()?)?.sum_all()),
    ("sum", |out| out.sum_all()),
    ("root", |out| Ok(out.clone())),
    ("transposed", |out| match out.rank() {
        0 => Ok(out.clone()),
        rank => (out.transpose(rank - 2, rank - 1)? * 1.)?.sum_all(),
    }),
];

#[test]
fn the_gradient_of_the_output_may_have_any_layout() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for case in ops::all(dtype, device)? {
            let vars = variables(&case.operands)?;
            let operands: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            let mut expected: Option<Vec<Tensor>> = None;
            for (name, loss) in LOSSES {
                let out = (case.op.fused)(&operands, &case.constants)?;
                let grads = gradients(&loss(&out)?.backward()?, &vars)?;
                let expected = expected.get_or_insert_with(|| grads.clone());
                for (i, (grad, expected)) in grads.iter().zip(expected).enumerate() {
                    let name = format!("gradient {i} of {} through {name}", case.op.name);
                    identical(&name, grad, expected)?;
                }
            }
        }
        Ok(())
    })
}

/// Each operand a variable, a result, or a constant.
#[test]
fn tracked_operands_get_their_gradients_whatever_the_others_are() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for case in ops::all(dtype, device)? {
            let expected = case.passes()?.grads;
            let count = case.operands.len() as u32;
            for kinds in 0..3usize.pow(count) {
                let kind = |i: usize| kinds / 3usize.pow(i as u32) % 3;
                let vars = variables(&case.operands)?;
                let operands = vars.iter().enumerate().map(|(i, var)| match kind(i) {
                    0 => Ok(var.as_tensor().clone()),
                    1 => var.as_tensor() * 1.,
                    _ => Ok(var.as_detached_tensor()),
                });
                let operands: Vec<Tensor> = operands.collect::<candle_core::Result<_>>()?;
                let out = (case.op.fused)(&operands, &case.constants)?;
                let name = format!("{} of kinds {kinds}", case.op.name);
                ensure!(
                    out.track_op() == (0..vars.len()).any(|i| kind(i) < 2),
                    "{name}"
                );
                let grads = (&out * dout(&out)?)?.sum_all()?.backward()?;
                for (i, (var, expected)) in vars.iter().zip(&expected).enumerate() {
                    match (kind(i), grads.get(var)) {
                        (2, grad) => ensure!(grad.is_none(), "{name}: a gradient of a constant"),
                        (_, grad) => {
                            identical(&name, grad.with_context(|| name.clone())?, expected)?
                        }
                    }
                }
            }
        }
        Ok(())
    })
}

#[test]
fn no_rows_give_no_rows() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let empty = |case: Case| -> Result<Case> {
            // CUDA has no allocation of nothing: a view.
            let mut case = case;
            case.operands[0] = case.operands[0].narrow(0, 0, 0)?;
            Ok(case)
        };
        let mut embedding = ops::embedding([7, 8], &[2, 6], dtype, device)?;
        embedding.constants[0] = embedding.constants[0].narrow(0, 0, 0)?;
        let mut swiglu = empty(ops::swiglu(&[2, 3], dtype, device)?)?;
        swiglu.operands[1] = swiglu.operands[1].narrow(0, 0, 0)?;
        for (case, dims) in [
            (empty(ops::rms_norm(&[2, 8], dtype, device)?)?, &[0, 8][..]),
            (
                empty(ops::rope([2, 3, 2, 8], false, dtype, device)?)?,
                &[0, 3, 2, 8],
            ),
            (empty(ops::linear(&[2, 8], 5, dtype, device)?)?, &[0, 5]),
            (
                empty(ops::linear_to_heads(&[2, 8], 3, dtype, device)?)?,
                &[0, 3, 6],
            ),
            (
                empty(ops::linear_from_heads(&[2, 3, 4], 5, dtype, device)?)?,
                &[0, 5],
            ),
            (
                empty(ops::swiglu_linear(&[2, 8], 5, dtype, device)?)?,
                &[0, 5],
            ),
            (swiglu, &[0, 3]),
            (embedding, &[0, 6, 8]),
        ] {
            let out = (case.op.fused)(&case.operands, &case.constants)?;
            ensure!(out.dims() == dims, "{}: {:?}", case.op.name, out.dims());
        }
        Ok(())
    })
}

#[test]
fn the_output_has_the_dtype_of_the_operands_but_a_loss_is_f32() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for case in ops::all(dtype, device)? {
            let out = (case.op.fused)(&case.operands, &case.constants)?;
            let expected = match (case.op.name, dtype) {
                ("cross_entropy", DType::F16 | DType::BF16) => DType::F32,
                _ => dtype,
            };
            ensure!(
                out.dtype() == expected,
                "{}: {:?}",
                case.op.name,
                out.dtype()
            );
        }
        Ok(())
    })
}
