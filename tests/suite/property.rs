//! Random shapes, strides and options against f64 on the host.

use anyhow::Result;
use candle_core::DType;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::support::device::for_each_device;
use crate::support::layout::Layout;
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::Inputs;
use crate::support::verify;
use candle_flash_gqa::is_supported;

const CASES: u32 = 300;

fn problems() -> impl Strategy<Value = Problem> {
    let shapes = (
        1..=3usize,
        1..=40usize,
        1..=60usize,
        1..=3usize,
        1..=4usize,
        1..=20usize,
    );
    let window = || prop::option::weighted(0.4, 0..=30usize);
    let scores = (
        prop::option::weighted(0.3, -0.5..1f32),
        prop::option::weighted(0.3, 0.5..20f32),
        0..3usize,
    );
    (shapes, any::<bool>(), window(), window(), scores).prop_map(
        |(
            (batch, seqlen_q, seqlen_k, num_kv_heads, group, head_dim),
            causal,
            window_left,
            window_right,
            (softmax_scale, softcap, alibi),
        )| {
            let heads = [num_kv_heads * group, num_kv_heads];
            let problem = Problem {
                softmax_scale,
                causal,
                window_left,
                window_right,
                softcap,
                ..Problem::new(batch, [seqlen_q, seqlen_k], heads, head_dim)
            };
            match alibi {
                0 => problem,
                1 => problem.alibi(),
                _ => problem.alibi_of_batch(),
            }
        },
    )
}

fn layouts() -> impl Strategy<Value = Layout> {
    let order = Just([0, 1, 2, 3]).prop_shuffle();
    let gaps = prop::array::uniform4(prop::array::uniform2(0..=2usize));
    (order, gaps, prop::bool::weighted(0.2)).prop_map(|(order, gaps, interleaved)| Layout {
        order,
        gaps,
        interleaved,
    })
}

/// The same cases on every run; a failure is shrunk and reported, not stored.
fn check(dtype: DType) -> Result<()> {
    let config = Config {
        cases: CASES,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    for_each_device(|device| {
        if !is_supported(device, dtype, 1) {
            return Ok(());
        }
        let strategy = (problems(), prop::array::uniform3(layouts()), any::<u32>());
        let test = |(problem, layouts, seed): (Problem, [Layout; 3], u32)| -> Result<()> {
            let inputs = Inputs::normal(&problem, dtype, device, seed.into())?;
            verify::forward(&problem, &inputs)?;
            let sources = [
                &layouts[0].store(&inputs.q)?,
                &layouts[1].store(&inputs.k)?,
                &layouts[2].store(&inputs.v)?,
            ];
            let view = |i: usize, source: &_| layouts[i].view(source);
            let passes = run::through_views(&problem, sources, view, &inputs.dout)?;
            verify::results(&problem, &inputs, &passes)
        };
        let result = TestRunner::new_with_rng(config.clone(), rng.clone()).run(&strategy, |case| {
            test(case).map_err(|error| TestCaseError::fail(format!("{error:#}")))
        });
        Ok(result?)
    })
}

#[test]
fn random_problems_in_f64() -> Result<()> {
    check(DType::F64)
}

#[test]
fn random_problems_in_f32() -> Result<()> {
    check(DType::F32)
}

#[test]
fn random_problems_in_bf16() -> Result<()> {
    check(DType::BF16)
}
