//! Random shapes, strides and options against f64 on the host.

use anyhow::{Result, anyhow};
use candle_core::{DType, Device};
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

const LARGE_CASES: u32 = 60;

/// Batch, seqlen_q, seqlen_k, num_kv_heads, heads of a group, head_dim.
type Shape = (usize, usize, usize, usize, usize, usize);

/// Shapes within a tile, of all kinds.
fn small() -> impl Strategy<Value = Shape> {
    (
        1..=3usize,
        1..=40usize,
        1..=60usize,
        1..=3usize,
        1..=4usize,
        1..=20usize,
    )
}

/// Up to 8 rows a key/value head, the few-row kernel's, on keys that are split into parts.
fn decode() -> impl Strategy<Value = Shape> {
    let rows = (1..=8usize).prop_flat_map(|group| (1..=8 / group, Just(group)));
    (1..=2usize, rows, 256..=1300usize, 1..=2usize, 1..=80usize).prop_map(
        |(batch, (seqlen_q, group), seqlen_k, num_kv_heads, head_dim)| {
            (batch, seqlen_q, seqlen_k, num_kv_heads, group, head_dim)
        },
    )
}

/// Rows around the limit of the few-row kernel. Tiles split keys from 1024 on.
fn few_positions() -> impl Strategy<Value = Shape> {
    (
        1..=2usize,
        1..=12usize,
        1..=1300usize,
        1..=2usize,
        1..=9usize,
        1..=80usize,
    )
}

/// Several tiles of rows and of keys.
fn prefill() -> impl Strategy<Value = Shape> {
    (
        Just(1),
        13..=260usize,
        1..=700usize,
        1..=2usize,
        1..=3usize,
        1..=80usize,
    )
}

/// Windows of up to `max_window` keys on a side.
fn problems(
    shapes: impl Strategy<Value = Shape>,
    max_window: usize,
) -> impl Strategy<Value = Problem> {
    let window = move || prop::option::weighted(0.4, 0..=max_window);
    let scores = (
        prop::option::weighted(0.3, -0.5..1f32),
        prop::option::weighted(0.3, 0.5..20f32),
        0..3usize,
    );
    let flags = (any::<bool>(), any::<bool>());
    (shapes, flags, window(), window(), scores).prop_map(
        |(
            (batch, seqlen_q, seqlen_k, num_kv_heads, group, head_dim),
            (causal, deterministic),
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
                deterministic,
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
fn check_all<T: std::fmt::Debug>(
    dtype: DType,
    cases: u32,
    strategy: impl Strategy<Value = T>,
    test: impl Fn(T, &Device) -> Result<()>,
) -> Result<()> {
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    for_each_device(|device| {
        if !is_supported(device, dtype, 8) {
            return Ok(());
        }
        let result = TestRunner::new_with_rng(config.clone(), rng.clone()).run(&strategy, |case| {
            test(case, device).map_err(|error| TestCaseError::fail(format!("{error:#}")))
        });
        result.map_err(|error| anyhow!("{error}"))
    })
}

/// The problem, or that of the next head_dim that the device takes.
fn with_a_kernel(problem: Problem, dtype: DType, device: &Device) -> Problem {
    if is_supported(device, dtype, problem.head_dim) {
        return problem;
    }
    Problem {
        head_dim: problem.head_dim.next_multiple_of(8),
        ..problem
    }
}

fn check(dtype: DType) -> Result<()> {
    let strategy = (
        problems(small(), 30),
        prop::array::uniform3(layouts()),
        any::<u32>(),
    );
    check_all(
        dtype,
        CASES,
        strategy,
        |(problem, layouts, seed), device| {
            let problem = with_a_kernel(problem, dtype, device);
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
        },
    )
}

/// Shapes whose rows or keys need more than one tile or part.
fn check_large(dtype: DType) -> Result<()> {
    let problems = prop_oneof![
        2 => problems(decode(), 1300),
        1 => problems(few_positions(), 1300),
        1 => problems(prefill(), 700),
    ];
    let strategy = (problems, any::<u32>());
    check_all(dtype, LARGE_CASES, strategy, |(problem, seed), device| {
        let problem = with_a_kernel(problem, dtype, device);
        let inputs = Inputs::normal(&problem, dtype, device, seed.into())?;
        verify::both(&problem, &inputs)?;
        Ok(())
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
fn random_problems_in_f16() -> Result<()> {
    check(DType::F16)
}

#[test]
fn random_problems_in_bf16() -> Result<()> {
    check(DType::BF16)
}

#[test]
fn random_large_problems_in_f64() -> Result<()> {
    check_large(DType::F64)
}

#[test]
fn random_large_problems_in_f32() -> Result<()> {
    check_large(DType::F32)
}

#[test]
fn random_large_problems_in_f16() -> Result<()> {
    check_large(DType::F16)
}

#[test]
fn random_large_problems_in_bf16() -> Result<()> {
    check_large(DType::BF16)
}
