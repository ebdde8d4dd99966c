//! One step, against its formula: the mean over micro-batches, clipping, AdamW with its decay and bias correction; and its speed.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};

use crate::checkpoint::Checkpoint;
use crate::model::{Attention, Llama};
use crate::options::Options;
use crate::run;
use crate::setup;
use crate::trainer::Trainer;
use crate::training::loss::loss_of;
use crate::weights::Weights;

/// A tensor's numbers in f64.
type Numbers = BTreeMap<String, Vec<f64>>;

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

fn masters(trainer: &Trainer) -> Result<Numbers> {
    let masters = trainer.weights().parameters().masters().iter();
    masters
        .map(|(name, master)| Ok((name.clone(), numbers(master)?)))
        .collect()
}

/// The gradient of the mean loss over both halves of a step's sequences, taken as one batch, at the trainer's weights.
fn gradient_of_one_batch(
    trainer: &Trainer,
    checkpoint: &Checkpoint,
    sequences: &[(Tensor, Tensor)],
) -> Result<(f32, Numbers)> {
    let weights: HashMap<String, Tensor> = trainer
        .weights()
        .parameters()
        .masters()
        .iter()
        .map(|(name, master)| Ok((name.clone(), master.as_detached_tensor().copy()?)))
        .collect::<Result<_>>()?;
    let copy = Weights::all(&weights, DType::F32, &Device::Cpu)?;
    let model = copy.model(&checkpoint.config, Attention::Plain)?;
    let joined = |part: fn(&(Tensor, Tensor)) -> &Tensor| {
        Tensor::cat(&sequences.iter().map(part).collect::<Vec<_>>(), 0)
    };
    let loss = loss(
        &model,
        &joined(|(input, _)| input)?,
        &joined(|(_, target)| target)?,
    )?;
    let grads = model.backward(&loss)?;
    let vars = copy.parameters().vars().iter();
    let gradient = vars.map(|(name, var)| {
        let grad = grads.get(var).with_context(|| name.clone())?;
        Ok((name.clone(), numbers(grad)?))
    });
    Ok((loss.to_scalar()?, gradient.collect::<Result<_>>()?))
}

/// The plain formula.
fn loss(model: &Llama, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let logits = model.output(&model.hidden(input, None)?)?;
    let logits = logits.flatten_to(1)?;
    Ok(candle_nn::loss::cross_entropy(
        &logits,
        &target.flatten_all()?,
    )?)
}

#[test]
fn steps_follow_the_formula_of_adamw_on_clipped_means_over_micro_batches() -> Result<()> {
    const BETAS: [f64; 2] = [0.9, 0.95];
    const EPS: f64 = 1e-8;
    let options = setup::options(&[
        "--accumulate",
        "2",
        "--clip",
        "0.5",
        "--weight-decay",
        "0.3",
        "--lr",
        "1e-2",
        "--warmup",
        "2",
    ]);
    let checkpoint = setup::checkpoint(&options)?;
    let batches = setup::batches(&options, &checkpoint, &Device::Cpu)?;
    let mut trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
    let mut moments: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
    for step in 0..3 {
        let sequences = [batches.train(step, 0)?, batches.train(step, 1)?];
        let (loss, gradient) = gradient_of_one_batch(&trainer, &checkpoint, &sequences)?;
        let norm = gradient
            .values()
            .flatten()
            .map(|x| x * x)
            .sum::<f64>()
            .sqrt();
        let mut expected = masters(&trainer)?;
        let taken = trainer.step()?;
        ensure!(
            (taken.loss - loss).abs() < 1e-5,
            "loss {} and {loss}",
            taken.loss
        );
        ensure!(
            (taken.gradient_norm - norm).abs() < 1e-4 * norm,
            "norm {} and {norm}",
            taken.gradient_norm
        );
        ensure!(norm > options.clip, "nothing to clip: {norm}");
        let shapes = trainer.weights().parameters().masters();
        for (name, weights) in &mut expected {
            let decay = match shapes[name].rank() {
                1 => 0.,
                _ => options.weight_decay,
            };
            let moments = moments
                .entry(name.clone())
                .or_insert_with(|| vec![[0.; 2]; weights.len()]);
            for ((weight, grad), moment) in weights.iter_mut().zip(&gradient[name]).zip(moments) {
                let grad = grad * options.clip / norm;
                for (i, power) in [grad, grad * grad].into_iter().enumerate() {
                    moment[i] = BETAS[i] * moment[i] + (1. - BETAS[i]) * power;
                }
                let corrected = |i: usize| moment[i] / (1. - BETAS[i].powi(step as i32 + 1));
                let rate = taken.learning_rate;
                *weight -=
                    rate * decay * *weight + rate * corrected(0) / (corrected(1).sqrt() + EPS);
            }
        }
        // Where a gradient is almost 0 its sign, and with it the whole update, is a matter of rounding.
        for (name, got) in masters(&trainer)? {
            let differ = got.iter().zip(&expected[&name]);
            let far = differ.filter(|(got, expected)| (*got - *expected).abs() > 2e-5);
            let share = far.count() as f64 / got.len() as f64;
            ensure!(share < 0.01, "step {step}: {share} of {name} differ");
        }
    }
    Ok(())
}

#[test]
fn each_micro_batch_has_its_own_sequences() -> Result<()> {
    let options = setup::options(&["--accumulate", "3"]);
    let checkpoint = setup::checkpoint(&options)?;
    let batches = setup::batches(&options, &checkpoint, &Device::Cpu)?;
    let mut seen = vec![];
    for step in 0..3 {
        for micro_batch in 0..options.accumulate {
            let (input, target) = batches.train(step, micro_batch)?;
            let (input, target) = (input.to_vec2::<u32>()?, target.to_vec2::<u32>()?);
            for (input, target) in input.iter().zip(&target) {
                assert_eq!(input[1..], target[..target.len() - 1]);
            }
            assert!(!seen.contains(&input), "step {step}, {micro_batch}");
            seen.push(input);
        }
    }
    Ok(())
}

#[test]
fn a_loss_in_pieces_is_the_loss() -> Result<()> {
    let options: Options = setup::options(&[]);
    let checkpoint = setup::checkpoint(&options)?;
    let trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
    let model = trainer
        .weights()
        .model(&checkpoint.config, Attention::Flash)?;
    let (input, target) = setup::batches(&options, &checkpoint, &Device::Cpu)?.train(0, 0)?;
    let rows = target.elem_count();
    let table = &trainer.weights().parameters().vars()["model.embed_tokens.weight"];
    let of_pieces = |rows_at_once: usize| -> Result<(f32, Vec<f32>)> {
        let hidden = model.hidden(&input, None)?;
        let loss = loss_of(&model, &hidden, &target, rows_at_once * model.vocab_size())?;
        let grads = model.backward(&loss)?;
        let grad = grads.get(table).context("no gradient")?;
        Ok((loss.to_scalar()?, grad.flatten_all()?.to_vec1()?))
    };
    let (whole, gradient) = of_pieces(rows)?;
    // As many rows as divide them, a rest, and fewer logits than one row has.
    for rows_at_once in [rows / 2, rows / 2 + 3, 1, 0] {
        let (loss, pieces) = of_pieces(rows_at_once)?;
        ensure!((loss - whole).abs() < 1e-5, "{loss} and {whole}");
        for (got, expected) in pieces.iter().zip(&gradient) {
            ensure!((got - expected).abs() < 1e-6, "{got} and {expected}");
        }
    }
    Ok(())
}

#[test]
fn the_speed_counts_every_sequence_of_a_step() -> Result<()> {
    let options = setup::options(&["--accumulate", "3", "--batch", "5", "--steps", "4"]);
    let rate = run::tokens_per_second(&options, Duration::from_millis(500));
    assert_eq!(rate, 2. * 3. * 5. * 32.);
    // No step can have taken longer than all of them did.
    let checkpoint = setup::checkpoint(&options)?;
    let mut trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
    let mut rows = vec![];
    let start = Instant::now();
    run::run(&mut trainer, &options, None, &mut rows, 4, |_| ())?;
    let elapsed = start.elapsed().as_secs_f64();
    let seconds = rows.iter().map(|row| 3. * 5. * 32. / row.tokens_per_second);
    let seconds: f64 = seconds.sum();
    assert!(seconds <= elapsed, "{seconds} of {elapsed} s");
    Ok(())
}
