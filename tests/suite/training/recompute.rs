//! Gradients with and without recomputation are the same bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_flash_gqa::training::*;
use candle_flash_gqa::{AttnOptions, flash_attn_with};

use super::case::{gradients, variables};
use crate::support::compare::identical;
use crate::support::device::for_each_dtype;
use crate::support::tensors::normal;

const HEAD_DIM: usize = 16;
const HIDDEN: usize = 64;
const VOCAB: usize = 40;

/// How a part of a model is run.
type Run<'a> = &'a dyn Fn(&Tensor, Part) -> candle_core::Result<Tensor>;
type Part = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync>;

/// Norm, projections, attention, output, residual.
fn attend(x: &Tensor, weights: &[Tensor]) -> candle_core::Result<Tensor> {
    let normed = rms_norm(x, &weights[0], 1e-5)?;
    let heads = |weight| linear_to_heads(&normed, weight, HEAD_DIM);
    let (q, k, v) = (
        heads(&weights[1])?,
        heads(&weights[2])?,
        heads(&weights[3])?,
    );
    let options = AttnOptions {
        causal: true,
        deterministic: true,
        ..Default::default()
    };
    x + linear_from_heads(&flash_attn_with(&q, &k, &v, &options)?, &weights[4])?
}

/// SwiGLU, output, residual.
fn mlp(x: &Tensor, weights: &[Tensor]) -> candle_core::Result<Tensor> {
    x + linear(&swiglu_linear(x, &weights[0], &weights[1])?, &weights[2])?
}

struct Model {
    table: Var,
    /// Of two blocks.
    vars: Vec<Var>,
    ids: Tensor,
}

impl Model {
    fn new(dtype: DType, device: &Device) -> Result<Self> {
        let kv = HIDDEN / 2;
        let block = [
            &[HIDDEN][..],
            &[HIDDEN, HIDDEN],
            &[kv, HIDDEN],
            &[kv, HIDDEN],
            &[HIDDEN, HIDDEN],
            &[96, HIDDEN],
            &[96, HIDDEN],
            &[HIDDEN, 96],
        ];
        let weight = |(i, dims): (usize, &&[usize])| normal(dims, 0.2, dtype, device, i as u64);
        let weights = block.iter().chain(&block).enumerate().map(weight);
        let ids: Vec<u32> = (0..2 * 70).map(|i| i * i % VOCAB as u32).collect();
        Ok(Self {
            table: Var::from_tensor(&normal(&[VOCAB, HIDDEN], 1., dtype, device, 99)?)?,
            vars: variables(&weights.collect::<Result<Vec<_>>>()?)?,
            ids: Tensor::from_vec(ids, (2, 70), device)?,
        })
    }

    /// The loss of both blocks, on an embedding that is trained or not.
    fn loss(&self, embed: &Tensor, run: Run<'_>) -> candle_core::Result<Tensor> {
        let mut x = embedding(embed, &self.ids)?;
        for block in self.vars.chunks(8) {
            let block: Vec<Tensor> = block.iter().map(|var| var.as_tensor().clone()).collect();
            let forward = move |x: &Tensor| mlp(&attend(x, &block[..5])?, &block[5..]);
            x = run(&x, Box::new(forward))?;
        }
        cross_entropy(&linear(&x, &self.table.as_detached_tensor())?, &self.ids)
    }

    fn same_gradients(&self, ours: &GradStore, expected: &GradStore) -> Result<()> {
        let grads = |grads| gradients(grads, &self.vars);
        for (i, (ours, expected)) in grads(ours)?.iter().zip(grads(expected)?).enumerate() {
            identical(&format!("gradient of weight {i}"), ours, &expected)?;
        }
        Ok(())
    }
}

fn kept(x: &Tensor, part: Part) -> candle_core::Result<Tensor> {
    part(x)
}

#[test]
fn recomputed_gradients_are_the_same_bits() -> Result<()> {
    for_each_dtype(HEAD_DIM, |device, dtype| {
        let model = Model::new(dtype, device)?;
        let table = model.table.as_tensor();
        let loss = model.loss(table, &kept)?;
        let expected = loss.backward()?;

        let recompute = Recompute::default();
        let recomputed = model.loss(table, &|x, part| recompute.run(x, part))?;
        identical("loss", &recomputed, &loss)?;
        let grads = recompute.backward(&recomputed)?;
        model.same_gradients(&grads, &expected)?;
        let of_table = |grads: &GradStore| grads.get(table).cloned().context("no gradient");
        identical("table", &of_table(&grads)?, &of_table(&expected)?)?;

        // A second backward finds nothing of the first.
        let again = model.loss(table, &|x, part| recompute.run(x, part))?;
        model.same_gradients(&recompute.backward(&again)?, &expected)
    })
}

/// Gradients of parts that nobody has taken are not part of the next ones.
#[test]
fn a_backward_of_the_loss_alone_leaves_nothing_behind() -> Result<()> {
    for_each_dtype(HEAD_DIM, |device, dtype| {
        let model = Model::new(dtype, device)?;
        let table = model.table.as_tensor();
        let expected = model.loss(table, &kept)?.backward()?;
        let recompute = Recompute::default();
        let loss = || model.loss(table, &|x, part| recompute.run(x, part));
        loss()?.backward()?;
        model.same_gradients(&recompute.backward(&loss()?)?, &expected)
    })
}

/// As with adapters on a frozen model: what the first block reads is not tracked.
#[test]
fn the_first_part_may_read_a_constant() -> Result<()> {
    for_each_dtype(HEAD_DIM, |device, dtype| {
        let model = Model::new(dtype, device)?;
        let table = model.table.as_detached_tensor();
        let expected = model.loss(&table, &kept)?.backward()?;
        let recompute = Recompute::default();
        let loss = model.loss(&table, &|x, part| recompute.run(x, part))?;
        model.same_gradients(&recompute.backward(&loss)?, &expected)
    })
}

#[test]
fn parts_may_be_inside_of_parts() -> Result<()> {
    for_each_dtype(HEAD_DIM, |device, dtype| {
        let model = Model::new(dtype, device)?;
        let table = model.table.as_tensor();
        let expected = model.loss(table, &kept)?.backward()?;
        let recompute = Recompute::default();
        let loss = model.loss(table, &|x, part| {
            let (inner, part) = (recompute.clone(), Arc::new(part));
            recompute.run(x, move |x| {
                let part = part.clone();
                inner.run(x, move |x| part(x))
            })
        })?;
        model.same_gradients(&recompute.backward(&loss)?, &expected)
    })
}

#[test]
fn a_part_runs_once_forward_and_once_backward() -> Result<()> {
    let runs = Arc::new(AtomicUsize::new(0));
    let recompute = Recompute::default();
    let x = Var::new(&[2f32, 3.], &Device::Cpu)?;
    let counted = |runs: &Arc<AtomicUsize>| {
        let runs = runs.clone();
        move |x: &Tensor| {
            runs.fetch_add(1, Ordering::Relaxed);
            // A view, which begins behind the start of its storage.
            x.sqr()?.narrow(0, 1, 1)
        }
    };
    let out = recompute.run(&x, counted(&runs))?;
    ensure!(out.to_vec1::<f32>()? == [9.]);
    ensure!(runs.load(Ordering::Relaxed) == 1);
    let grads = recompute.backward(&out.sum_all()?)?;
    ensure!(runs.load(Ordering::Relaxed) == 2);
    ensure!(grads.get(&x).context("no gradient")?.to_vec1::<f32>()? == [0., 6.]);

    // Without anything to differentiate there is nothing to run again.
    let out = recompute.run(&x.as_detached_tensor(), counted(&runs))?;
    ensure!(!out.track_op() && runs.load(Ordering::Relaxed) == 3);
    Ok(())
}

#[test]
fn an_error_of_a_part_is_an_error_of_the_pass_and_leaves_nothing_behind() -> Result<()> {
    let recompute = Recompute::default();
    let x = Var::new(&[2f32], &Device::Cpu)?;
    let refused = recompute.run(&x, |_| candle_core::bail!("no forward"));
    ensure!(refused.is_err());

    let runs = AtomicUsize::new(0);
    let weight = Var::new(&[5f32], &Device::Cpu)?;
    let used = weight.as_tensor().clone();
    let once = recompute.run(&x, move |x| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => Ok(x.clone()),
        _ => candle_core::bail!("no second forward"),
    })?;
    let loss = recompute.run(&once, move |x| x * &used)?.sum_all()?;
    let message = recompute.backward(&loss).unwrap_err().to_string();
    ensure!(message.contains("no second forward"), "{message}");
    let grads = recompute.backward(&x.sum_all()?)?;
    ensure!(grads.get(&weight).is_none());
    Ok(())
}
