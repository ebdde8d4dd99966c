//! Steps and their losses.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::batches::Batches;
use crate::model::Attention;
use crate::options::Options;
use crate::setup;
use crate::trainer::{Step, Trainer};
use crate::training::Gradients;

fn steps(trainer: &mut Trainer, count: usize) -> Result<Vec<Step>> {
    (0..count).map(|_| trainer.step()).collect()
}

fn assert_same_curve(options: &Options) -> Result<()> {
    let checkpoint = setup::checkpoint(options)?;
    let mut flash = setup::trainer(options, &checkpoint, Attention::Flash)?;
    let mut plain = setup::trainer(options, &checkpoint, Attention::Plain)?;
    let before = flash.held_out_loss()?;
    for (flash, plain) in steps(&mut flash, options.steps)?
        .iter()
        .zip(steps(&mut plain, options.steps)?)
    {
        // The loss is a mean near 6 of f32's with a unit of 5e-7. Each update passes a difference of
        // rounding on to the next step, so it grows with the steps.
        let tolerance = 2e-6 * flash.step as f32;
        assert!(
            (flash.loss - plain.loss).abs() <= tolerance,
            "{flash:?} and {plain:?}"
        );
        let (flash, plain) = (flash.gradient_norm, plain.gradient_norm);
        assert!((flash - plain).abs() <= 1e-3 * plain, "{flash} and {plain}");
    }
    let after = flash.held_out_loss()?;
    assert!(after < before, "held-out loss {before} to {after}");
    Ok(())
}

#[test]
fn the_loss_curve_lies_on_that_of_plain_attention() -> Result<()> {
    assert_same_curve(&setup::options(&[]))
}

#[test]
fn the_loss_curve_of_adapters_lies_on_that_of_plain_attention() -> Result<()> {
    let mut options = setup::options(&["--lr", "3e-2"]);
    options.lora = Some(4);
    assert_same_curve(&options)
}

#[test]
fn recomputed_activations_change_no_bit_of_the_curve() -> Result<()> {
    for lora in [None, Some(2)] {
        let mut options = setup::options(&["--accumulate", "2", "--steps", "4"]);
        options.lora = lora;
        let checkpoint = setup::checkpoint(&options)?;
        let mut kept = setup::trainer(&options, &checkpoint, Attention::Flash)?;
        options.recompute = true;
        let mut recomputed = setup::trainer(&options, &checkpoint, Attention::Flash)?;
        assert_eq!(steps(&mut recomputed, 4)?, steps(&mut kept, 4)?);
        assert_eq!(recomputed.held_out_loss()?, kept.held_out_loss()?);
    }
    Ok(())
}

/// The graph of a loss then has one node for each block in place of all that a block keeps.
#[test]
fn recomputing_keeps_no_activations_of_blocks() -> Result<()> {
    let mut options = setup::options(&[]);
    let checkpoint = setup::checkpoint(&options)?;
    let mut nodes = |recompute| -> Result<usize> {
        options.recompute = recompute;
        let trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
        Ok(trainer.loss(0)?.sorted_nodes().len())
    };
    let (kept, recomputed) = (nodes(false)?, nodes(true)?);
    assert!(2 * recomputed < kept, "{recomputed} nodes, {kept} without");
    Ok(())
}

#[test]
fn a_gradient_that_is_missing_is_an_error() -> Result<()> {
    // Not a norm without it.
    let options = setup::options(&[]);
    let checkpoint = setup::checkpoint(&options)?;
    let trainer = setup::trainer(&options, &checkpoint, Attention::Flash)?;
    let unrelated = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    let weights = trainer.weights();
    let model = weights.model(&checkpoint.config, Attention::Flash)?;
    let vars = weights.parameters().vars();
    assert!(Gradients::default().add(&model, unrelated, vars).is_err());
    Ok(())
}

#[test]
fn the_learning_rate_rises_then_falls_to_a_tenth() {
    let options = setup::options(&["--steps", "100", "--warmup", "10", "--lr", "1"]);
    let rates: Vec<f64> = (0..100).map(|step| options.learning_rate(step)).collect();
    assert_eq!((rates[0], rates[4], rates[9]), (0.1, 0.5, 1.));
    assert_eq!(rates[10], 1.);
    assert!((rates[55] - 0.55).abs() < 1e-12);
    assert!(rates[99] > 0.1 && rates[99] < 0.101);
    assert!(rates[10..].is_sorted_by(|a, b| a > b));
}

#[test]
fn batches_follow_from_the_seed_and_hold_some_text_out() -> Result<()> {
    let text: Vec<u32> = (0..1000).collect();
    let options = setup::options(&["--held-out", "0.2"]);
    let batches = Batches::new(&[text.clone(), text], &options, &Device::Cpu)?;
    assert_eq!(batches.train_tokens(), 1600);
    assert_eq!(batches.held_out_prompt()[..3], [800, 801, 802]);
    assert!(batches.device().is_cpu());
    let (input, target) = batches.train(3, 0)?;
    assert_eq!(input.dims(), [2, 32]);
    assert_eq!(
        input.narrow(1, 1, 31)?.to_vec2::<u32>()?,
        target.narrow(1, 0, 31)?.to_vec2::<u32>()?
    );
    let again = batches.train(3, 0)?.0.to_vec2::<u32>()?;
    let other = batches.train(4, 0)?.0.to_vec2::<u32>()?;
    assert_eq!(again, input.to_vec2::<u32>()?);
    assert_ne!(other, again);
    assert_eq!(batches.held_out().count(), 8);
    Ok(())
}

fn train_inputs(options: &Options) -> Result<Vec<Vec<Vec<u32>>>> {
    let text: Vec<u32> = (0..1000).collect();
    let batches = Batches::new(&[text], options, &Device::Cpu)?;
    (0..4)
        .map(|step| Ok(batches.train(step, 0)?.0.to_vec2()?))
        .collect()
}

#[test]
fn each_seed_has_its_own_batches() -> Result<()> {
    let seeds = ["1", "2", "3", "4294967297"];
    let all: Vec<_> = seeds
        .iter()
        .map(|seed| train_inputs(&setup::options(&["--seed", seed])))
        .collect::<Result<_>>()?;
    for (i, one) in all.iter().enumerate() {
        assert_eq!(one, &train_inputs(&setup::options(&["--seed", seeds[i]]))?);
        for other in &all[..i] {
            for (step, batch) in one.iter().enumerate() {
                assert_ne!(batch, &other[step], "seed {}, step {step}", seeds[i]);
            }
        }
    }
    Ok(())
}

#[test]
fn measuring_and_training_read_their_own_part_of_each_text() -> Result<()> {
    let options = setup::options(&["--held-out", "0.2", "--batch", "8"]);
    let texts = [(0..1000).collect(), (1000..2000).collect()];
    let batches = Batches::new(&texts, &options, &Device::Cpu)?;
    let is_held_out = |token: &u32| token % 1000 >= 800;
    let (mut first, mut last) = (u32::MAX, 0);
    for sequence in batches.held_out() {
        for tokens in <[Tensor; 2]>::from(sequence?) {
            let tokens = tokens.flatten_all()?.to_vec1()?;
            assert!(tokens.iter().all(is_held_out), "{tokens:?}");
            first = tokens.iter().copied().fold(first, u32::min);
            last = tokens.iter().copied().fold(last, u32::max);
        }
    }
    assert_eq!((first, last), (800, 1999));
    for step in 0..8 {
        for tokens in <[Tensor; 2]>::from(batches.train(step, 0)?) {
            let tokens = tokens.flatten_all()?.to_vec1()?;
            assert!(!tokens.iter().any(is_held_out), "{tokens:?}");
        }
    }
    Ok(())
}

#[test]
fn values_that_no_run_can_have_are_refused() {
    // The command line refuses these, a training.json may hold them.
    type Change = fn(&mut Options);
    let cases: [(Change, &str); 3] = [
        (|options| options.seqlen = 0, "--seqlen must be at least 1"),
        (|options| options.batch = 0, "--batch must be at least 1"),
        (|options| options.steps = 0, "--steps must be at least 1"),
    ];
    for (change, expected) in cases {
        let mut options = setup::options(&[]);
        change(&mut options);
        let message = options.check().expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }

    let cases = [
        (["--lr", "nan"], "--lr must be a number above 0"),
        (["--clip", "0"], "--clip must be a number above 0"),
        (["--weight-decay", "1"], "--weight-decay must be"),
        (["--held-out", "0"], "--held-out must be between 0 and 1"),
    ];
    for (flags, expected) in cases {
        let message = setup::options(&flags)
            .check()
            .expect_err(expected)
            .to_string();
        assert!(message.contains(expected), "{message}");
    }

    let cases: [(&[&str], &str); 5] = [
        (&["--seqlen", "65"], "more than the model's 64 positions"),
        (&["--vocab", "256"], "--vocab must be above 256"),
        (
            &["--heads", "3"],
            "must be an even multiple of num_attention_heads 3",
        ),
        (
            &["--kv-heads", "3"],
            "must be a multiple of num_key_value_heads 3",
        ),
        (&["--held-out", "1e-4"], "the held-out part of the text has"),
    ];
    for (flags, expected) in cases {
        let options = setup::options(flags);
        let trainer = setup::checkpoint(&options)
            .and_then(|checkpoint| setup::trainer(&options, &checkpoint, Attention::Flash));
        let message = format!("{:#}", trainer.err().expect(expected));
        assert!(message.contains(expected), "{message}");
    }
}
