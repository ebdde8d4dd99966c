//! Every weight is reached by the backward pass, with the right gradient.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::loss::cross_entropy;
use candle_transformers::models::llama::Config;

use crate::device::for_each_device_with;
use crate::model::{Attention, Llama};
use crate::tiny;

type Vars = BTreeMap<String, Var>;

/// The tiny model's weights as variables, which makes the model differentiable.
fn vars(config: &Config, dtype: DType) -> Result<Vars> {
    variables(tiny::weights(config, dtype)?)
}

fn variables(weights: HashMap<String, Tensor>) -> Result<Vars> {
    let weights = weights.into_iter();
    weights
        .map(|(name, weight)| Ok((name, Var::from_tensor(&weight)?)))
        .collect()
}

/// Logits of two sequences, `(2, 19, vocab_size)`, and the tokens that follow.
fn logits(vars: &Vars, config: &Config, attention: Attention) -> Result<(Tensor, Tensor)> {
    let weights: HashMap<_, _> = vars
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect();
    let device = vars["model.embed_tokens.weight"].device();
    let tokens = Tensor::from_vec(tiny::tokens(config, 2 * 20), (2, 20), device)?;
    let model = Llama::new(weights, config, attention)?;
    let logits = model.logits(&model.hidden(&tokens.narrow(1, 0, 19)?, None)?)?;
    Ok((logits, tokens.narrow(1, 1, 19)?))
}

/// Mean cross-entropy of the next token.
fn loss(vars: &Vars, config: &Config, attention: Attention) -> Result<Tensor> {
    let (logits, target) = logits(vars, config, attention)?;
    Ok(cross_entropy(
        &logits.flatten_to(1)?,
        &target.flatten_all()?,
    )?)
}

/// The gradient of every weight.
fn gradients(
    vars: &Vars,
    config: &Config,
    attention: Attention,
) -> Result<BTreeMap<String, Tensor>> {
    let grads = loss(vars, config, attention)?.backward()?;
    vars.iter()
        .map(|(name, var)| {
            let grad = grads
                .get(var)
                .with_context(|| format!("{name} has no gradient"))?;
            Ok((name.clone(), grad.clone()))
        })
        .collect()
}

#[test]
fn every_weight_gets_a_gradient_that_agrees_with_finite_differences() -> Result<()> {
    const STEP: f64 = 1e-5;
    let config = Config {
        tie_word_embeddings: false,
        num_hidden_layers: 2,
        ..tiny::config()
    };
    let vars = vars(&config, DType::F64)?;
    for (name, grad) in gradients(&vars, &config, Attention::Flash)? {
        let grad = grad.flatten_all()?.to_vec1::<f64>()?;
        assert!(
            grad.iter().all(|value| value.is_finite()),
            "{name}: not finite"
        );
        let largest = (0..grad.len())
            .max_by(|&a, &b| grad[a].abs().total_cmp(&grad[b].abs()))
            .context("no elements")?;
        assert!(grad[largest] != 0., "{name}: only zeros");

        let var = &vars[&name];
        let values = var.flatten_all()?.to_vec1::<f64>()?;
        for entry in [largest, grad.len() / 3] {
            let loss_at = |moved: f64| -> Result<f64> {
                let mut values = values.clone();
                values[entry] += moved;
                var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
                Ok(loss(&vars, &config, Attention::Flash)?.to_scalar()?)
            };
            let difference = (loss_at(STEP)? - loss_at(-STEP)?) / (2. * STEP);
            loss_at(0.)?;
            // The square of the step times a third derivative, and f64's 1e-16 over the step.
            assert!(
                (difference - grad[entry]).abs() <= 1e-6 * difference.abs() + 1e-8,
                "{name}[{entry}]: gradient {}, finite difference {difference}",
                grad[entry]
            );
        }
    }
    Ok(())
}

#[test]
fn gradients_match_those_of_plain_attention() -> Result<()> {
    for tie_word_embeddings in [false, true] {
        let config = Config {
            tie_word_embeddings,
            ..tiny::config()
        };
        let vars = vars(&config, DType::F32)?;
        let flash = gradients(&vars, &config, Attention::Flash)?;
        for (name, expected) in gradients(&vars, &config, Attention::Plain)? {
            // A hundred roundings at f32's 6e-8.
            tiny::assert_close(&flash[&name], &expected, 1e-5, &name)?;
        }
    }
    Ok(())
}

/// Against f64 with the same weights.
#[test]
fn gradients_in_half_types_are_as_good_as_those_of_plain_attention() -> Result<()> {
    for (dtype, tie_word_embeddings) in tiny::HALF_TYPES
        .into_iter()
        .flat_map(|dtype| [(dtype, false), (dtype, true)])
    {
        let config = Config {
            tie_word_embeddings,
            ..tiny::config()
        };
        let weights = tiny::weights(&config, dtype)?;
        let exact = variables(tiny::converted(&weights, DType::F64, &Device::Cpu)?)?;
        let truth = gradients(&exact, &config, Attention::Plain)?;
        let head_dim = config.hidden_size / config.num_attention_heads;
        for_each_device_with(dtype, head_dim, |device| {
            let vars = variables(tiny::converted(&weights, dtype, device)?)?;
            let flash = gradients(&vars, &config, Attention::Flash)?;
            let plain = gradients(&vars, &config, Attention::Plain)?;
            for (name, truth) in &truth {
                let name = name.as_str();
                let values = flash[name]
                    .to_dtype(DType::F32)?
                    .flatten_all()?
                    .to_vec1::<f32>()?;
                assert!(values.iter().all(|x| x.is_finite()), "{name}: not finite");
                assert!(values.iter().any(|&x| x != 0.), "{name}: only zeros");
                tiny::assert_as_good(&flash[name], &plain[name], truth, 3., name)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn the_differentiable_operations_compute_what_the_fused_ones_do() -> Result<()> {
    let config = tiny::config();
    let (tracked, _) = logits(&vars(&config, DType::F32)?, &config, Attention::Flash)?;
    let model = Llama::new(
        tiny::weights(&config, DType::F32)?,
        &config,
        Attention::Flash,
    )?;
    let tokens = Tensor::from_vec(tiny::tokens(&config, 2 * 20), (2, 20), &Device::Cpu)?;
    let fused = model.logits(&model.hidden(&tokens.narrow(1, 0, 19)?, None)?)?;
    assert!(tracked.track_op() && !fused.track_op());
    Ok(tiny::assert_close(&tracked, &fused, 1e-5, "logits")?)
}
