//! Where NaN and infinity go, and where they don't.
//!
//! The host implementation knows a hidden key only as absent, so what is NaN or infinite in its result
//! is what must be in ours: no more and no less. On CUDA a NaN at a key that is in range but hidden may
//! reach the rows of its own edge tile, so those tests are for the CPU.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};

use crate::support::compare::{finite, identical, same_pattern};
use crate::support::device::{for_each_dtype, for_each_usual_dtype};
use crate::support::layout::Layout;
use crate::support::naive;
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, fill, full, host, set};
use crate::support::verify::unit_roundoff;

/// Compares out, lse and gradients with the host, NaN for NaN and infinity for infinity.
fn check(name: &str, problem: &Problem, inputs: &Inputs) -> Result<()> {
    let (q, k, v) = (host(&inputs.q)?, host(&inputs.k)?, host(&inputs.v)?);
    let forward = naive::forward(problem, &q, &k, &v);
    let grads = naive::backward(problem, &q, &k, &v, &host(&inputs.dout)?);
    let truth = [forward.out, forward.lse, grads.dq, grads.dk, grads.dv];
    let check = |of: &str, ours: &Tensor, truth: &[f64]| {
        let name = format!("{of} with {name} in {problem:?}");
        let largest = truth.iter().filter(|x| x.is_finite());
        let largest = largest.fold(1f64, |max, x| max.max(x.abs()));
        let roundoff = unit_roundoff(inputs.q.dtype()).max(unit_roundoff(DType::F32));
        same_pattern(&name, ours, truth, 32. * roundoff * largest)
    };
    let (out, lse) = run::forward(problem, inputs)?;
    check("untracked out", &out, &truth[0])?;
    check("untracked lse", &lse, &truth[1])?;
    let passes = run::forward_backward(problem, inputs)?;
    for ((of, ours), truth) in passes.named().into_iter().zip(&truth) {
        check(of, ours, truth)?;
    }
    Ok(())
}

/// Inputs with `value` at one position of one of the tensors, all batches and heads.
fn poisoned(inputs: &Inputs, tensor: &str, position: usize, value: f64) -> Result<Inputs> {
    let mut inputs = inputs.clone();
    let target = inputs.get_mut(tensor);
    *target = fill(target, 1, position..position + 1, value)?;
    Ok(inputs)
}

/// Positions at the ends, in the middle and around the edges of tiles.
fn positions(seqlen: usize) -> Vec<usize> {
    let mut positions = vec![0, 1, 47, 48, 63, 64, 95, 96, seqlen / 2, seqlen - 1];
    positions.retain(|&position| position < seqlen);
    positions.sort_unstable();
    positions.dedup();
    positions
}

fn check_everywhere(problem: &Problem, device: &Device, dtype: DType) -> Result<()> {
    let inputs = Inputs::normal(problem, dtype, device, 18)?;
    for (tensor, seqlen) in [
        ("q", problem.seqlen_q),
        ("dout", problem.seqlen_q),
        ("k", problem.seqlen_k),
        ("v", problem.seqlen_k),
    ] {
        for position in positions(seqlen) {
            let name = format!("NaN at {position} of {tensor}");
            check(
                &name,
                problem,
                &poisoned(&inputs, tensor, position, f64::NAN)?,
            )?;
        }
    }
    Ok(())
}

#[test]
fn nan_reaches_every_row_when_all_are_visible() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        check_everywhere(&Problem::new(1, [100, 130], [2, 1], 8), device, dtype)?;
        check_everywhere(&Problem::new(1, [1, 130], [2, 1], 8), device, dtype)
    })
}

#[test]
fn nan_reaches_exactly_the_rows_that_see_it() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        let causal = Problem::new(1, [110, 110], [4, 2], 8).causal();
        check_everywhere(&causal, device, dtype)?;
        let window = Problem::new(1, [100, 140], [2, 2], 8).window(Some(20), Some(9));
        check_everywhere(&window, device, dtype)?;
        let blind = Problem::new(1, [100, 70], [2, 1], 8).causal();
        check_everywhere(&blind, device, dtype)
    })
}

#[test]
fn nan_reaches_exactly_the_rows_that_see_it_with_softcap_and_alibi() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        let problem = Problem::new(1, [70, 70], [2, 1], 8).causal();
        check_everywhere(&problem.softcap(2.).alibi(), device, dtype)
    })
}

/// Few rows on many keys: the kernel for decoding, with and without split keys.
#[test]
fn nan_reaches_exactly_the_rows_that_see_it_in_decode() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        let causal = Problem::new(1, [3, 100], [2, 1], 8).causal();
        check_everywhere(&causal, device, dtype)?;
        let split = Problem::new(1, [3, 1500], [2, 1], 8).window(Some(700), Some(1));
        let inputs = Inputs::normal(&split, dtype, device, 18)?;
        for position in [0, 700, 790, 1100, 1498, 1499] {
            for tensor in ["k", "v"] {
                let name = format!("NaN at {position} of {tensor}");
                check(
                    &name,
                    &split,
                    &poisoned(&inputs, tensor, position, f64::NAN)?,
                )?;
            }
        }
        Ok(())
    })
}

/// One number of one head: a NaN in V stays in its column, and no other head sees it.
#[test]
fn nan_in_one_number_stays_in_its_head_and_column() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        let problem = Problem::new(2, [40, 60], [4, 2], 8);
        let inputs = Inputs::normal(&problem, dtype, device, 19)?;
        let one_number = |x: &Tensor| set(x, [1, 33, 1, 5], f64::NAN);
        for tensor in ["q", "k", "v", "dout"] {
            let mut poisoned = inputs.clone();
            let target = poisoned.get_mut(tensor);
            *target = one_number(target)?;
            check(&format!("one NaN in {tensor}"), &problem, &poisoned)?;
        }
        Ok(())
    })
}

#[test]
fn infinity_goes_where_the_definition_sends_it() -> Result<()> {
    for_each_dtype(1, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        for problem in [
            Problem::new(1, [90, 110], [2, 1], 1).causal(),
            Problem::new(1, [3, 110], [2, 1], 1).causal(),
        ] {
            let inputs = Inputs::normal(&problem, dtype, device, 20)?;
            for value in [f64::INFINITY, f64::NEG_INFINITY] {
                for position in [1, 50, 108, 109] {
                    for tensor in ["k", "v"] {
                        let inputs = poisoned(&inputs, tensor, position, value)?;
                        let name = format!("{value} at {position} of {tensor}");
                        check(&name, &problem, &inputs)?;
                    }
                }
            }
        }
        Ok(())
    })
}

/// Form 1: K and V after row r are NaN. Nothing up to row r changes, not even by a bit.
#[test]
fn case_18_keys_of_the_future_are_nan() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        for seqlen in [2, 3, 17, 48, 49, 96, 97, 130, 193, 299] {
            let problem = Problem::new(1, [seqlen; 2], [4, 2], 16).causal();
            let inputs = Inputs::normal(&problem, dtype, device, seqlen as u64)?;
            let clean = run::forward_backward(&problem, &inputs)?;
            for row in [0, seqlen / 3, seqlen - 2] {
                let poisoned = Inputs {
                    k: fill(&inputs.k, 1, row + 1..seqlen, f64::NAN)?,
                    v: fill(&inputs.v, 1, row + 1..seqlen, f64::NAN)?,
                    ..inputs.clone()
                };
                let passes = run::forward_backward(&problem, &poisoned)?;
                let rows = |x: &Tensor| x.narrow(1, 0, row + 1)?.contiguous();
                for (name, ours, clean) in [
                    ("out", &passes.out, &clean.out),
                    ("dq", &passes.grads.dq, &clean.grads.dq),
                ] {
                    let name = format!("{name} up to row {row} of {seqlen}");
                    finite(&name, &rows(ours)?)?;
                    identical(&name, &rows(ours)?, &rows(clean)?)?;
                }
                let (out, _) = run::forward(&problem, &poisoned)?;
                finite("untracked out", &rows(&out)?)?;
            }
        }
        Ok(())
    })
}

/// Form 1 where the keys of the future start at the edge of a tile, of whatever size: a multiple of 64, 80, 96, 128,
/// 160 and 192.
#[test]
fn case_18_keys_beyond_the_tile_of_a_row_are_nan() -> Result<()> {
    const EDGE: usize = 1920;
    for_each_usual_dtype(16, |device, dtype| {
        let problem = Problem::new(1, [EDGE + 20; 2], [2, 1], 16)
            .causal()
            .deterministic();
        let inputs = Inputs::normal(&problem, dtype, device, 18)?;
        let poisoned = Inputs {
            k: fill(&inputs.k, 1, EDGE..EDGE + 20, f64::NAN)?,
            v: fill(&inputs.v, 1, EDGE..EDGE + 20, f64::NAN)?,
            ..inputs.clone()
        };
        let clean = run::forward_backward(&problem, &inputs)?;
        let passes = run::forward_backward(&problem, &poisoned)?;
        for (name, ours, clean) in [
            ("out", &passes.out, &clean.out),
            ("dq", &passes.grads.dq, &clean.grads.dq),
        ] {
            let rows = |x: &Tensor| x.narrow(1, 0, EDGE);
            finite(name, &rows(ours)?)?;
            identical(name, &rows(ours)?, &rows(clean)?)?;
        }
        Ok(())
    })
}

/// Form 2: K and V are the first 65 keys of a cache of 128 whose tail is NaN.
#[test]
fn case_18_the_tail_of_a_cache_is_nan() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        let cache = Layout {
            gaps: [[0; 2], [0, 63], [0; 2], [0; 2]],
            ..Layout::CONTIGUOUS
        };
        for seqlen_q in [1, 5, 65, 100] {
            let problem = Problem::new(2, [seqlen_q, 65], [4, 2], 64).causal();
            let inputs = Inputs::normal(&problem, dtype, device, 21)?;
            let clean = run::forward_backward(&problem, &inputs)?;
            let sources = [
                &inputs.q,
                &cache.store(&inputs.k)?,
                &cache.store(&inputs.v)?,
            ];
            let view = |i: usize, source: &Tensor| match i {
                0 => Ok(source.clone()),
                _ => cache.view(source),
            };
            let passes = run::through_views(&problem, sources, view, &inputs.dout)?;
            for ((name, ours), (_, clean)) in passes.named().into_iter().zip(clean.named()) {
                if name != "lse" {
                    finite(name, ours)?;
                }
                identical(name, &ours.contiguous()?, clean)?;
            }
        }
        Ok(())
    })
}

/// The gradient of a row that sees nothing is 0 even where the output's gradient is NaN.
#[test]
fn nan_in_the_output_gradient_of_a_blind_row_reaches_nothing() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        let problem = Problem::new(1, [60, 40], [2, 1], 8).causal();
        let inputs = Inputs::normal(&problem, dtype, device, 22)?;
        let poisoned = Inputs {
            q: fill(&inputs.q, 1, 0..20, f64::NAN)?,
            dout: fill(&inputs.dout, 1, 0..20, f64::NAN)?,
            ..inputs.clone()
        };
        let (clean, ours) = (
            run::forward_backward(&problem, &inputs)?,
            run::forward_backward(&problem, &poisoned)?,
        );
        for ((name, ours), (_, clean)) in ours.named().into_iter().zip(clean.named()) {
            identical(name, ours, clean)?;
        }
        ensure!(
            host(&ours.grads.dq.narrow(1, 0, 20)?)?
                .iter()
                .all(|&x| x == 0.)
        );
        Ok(())
    })
}

/// Where every score that a row sees is -inf, the definition says `exp(-inf - -inf)`: NaN, in out and
/// in lse. Not so where a row sees no key.
fn unseen_or_nan(problem: &Problem) -> (Vec<f64>, Vec<f64>) {
    let p = problem;
    let row = |i: usize, sees_none: f64| match p.visible(i).is_empty() {
        true => sees_none,
        false => f64::NAN,
    };
    let numbers = p.num_heads * p.head_dim;
    let out = (0..p.batch * p.seqlen_q * numbers).map(|n| row(n / numbers % p.seqlen_q, 0.));
    let rows = 0..p.batch * p.num_heads * p.seqlen_q;
    let lse = rows.map(|n| row(n % p.seqlen_q, f64::NEG_INFINITY));
    (out.collect(), lse.collect())
}

/// Few rows, few rows on split keys, tiles, and tiles on split keys; some rows see nothing.
fn shapes_of_every_kernel() -> Vec<Problem> {
    vec![
        Problem::new(1, [1, 1], [1, 1], 8),
        Problem::new(2, [3, 100], [4, 2], 8).causal(),
        Problem::new(1, [6, 3], [1, 1], 8).causal(),
        Problem::new(1, [3, 1500], [2, 1], 8),
        Problem::new(1, [3, 1500], [2, 1], 8)
            .window(Some(700), Some(1))
            .alibi(),
        Problem::new(2, [100, 130], [2, 1], 8),
        Problem::new(1, [100, 70], [2, 1], 8).causal().alibi(),
        Problem::new(1, [90, 300], [2, 1], 8).window(Some(20), Some(5)),
        Problem::new(1, [20, 1500], [2, 1], 8).causal(),
    ]
}

/// Both forwards, against `(out, lse)`.
fn check_forwards(
    name: &str,
    problem: &Problem,
    inputs: &Inputs,
    (out, lse): (&[f64], &[f64]),
) -> Result<()> {
    let untracked = run::forward(problem, inputs)?;
    let tracked = run::forward_backward(problem, inputs)?;
    for (pass, ours_out, ours_lse) in [
        ("untracked", &untracked.0, &untracked.1),
        ("tracked", &tracked.out, &tracked.lse),
    ] {
        let limit = 4. * unit_roundoff(inputs.q.dtype()).max(1e-6);
        let name = format!("with {name} in {problem:?}");
        same_pattern(&format!("{pass} out {name}"), ours_out, out, limit)?;
        same_pattern(&format!("{pass} lse {name}"), ours_lse, lse, 1e-5)?;
    }
    Ok(())
}

#[test]
fn rows_whose_scores_are_all_minus_infinity_are_nan() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        for problem in shapes_of_every_kernel() {
            let (out, lse) = unseen_or_nan(&problem);
            let normal = Inputs::normal(&problem, dtype, device, 23)?;
            // f16 has no finite numbers whose product f32 can't hold.
            let (q, k) = match dtype {
                DType::F16 => (1., f64::NEG_INFINITY),
                DType::F64 => (1e200, -1e200),
                _ => (1e30, -1e30),
            };
            for (q, k) in [(q, k), (1., f64::NEG_INFINITY)] {
                for v in [None, Some(f64::NAN)] {
                    let constant = [q, k, v.unwrap_or(0.), 1.];
                    let mut inputs = Inputs::constant(&problem, constant, dtype, device)?;
                    if v.is_none() {
                        inputs.v = normal.v.clone();
                    }
                    let name = format!("q {q}, k {k}, v {v:?}");
                    check_forwards(&name, &problem, &inputs, (&out, &lse))?;
                }
            }
        }
        Ok(())
    })
}

/// The gradients too: NaN exactly where the definition has it.
#[test]
fn keys_of_minus_infinity_give_the_gradients_of_the_definition() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        for problem in shapes_of_every_kernel() {
            let mut inputs = Inputs::normal(&problem, dtype, device, 24)?;
            inputs.q = inputs.q.abs()?;
            inputs.k = full(&problem.kv_dims(), f64::NEG_INFINITY, dtype, device)?;
            check("every key -inf", &problem, &inputs)?;
        }
        Ok(())
    })
}

/// A row of zeros among them has scores of 0: the mean of V, whatever its neighbours are.
#[test]
fn rows_of_finite_scores_beside_rows_of_minus_infinity_are_finite() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        let (q, k) = match dtype {
            DType::F16 => return Ok(()),
            DType::F64 => (1e200, -1e200),
            _ => (1e30, -1e30),
        };
        for mut problem in shapes_of_every_kernel() {
            // The slopes would not cancel.
            problem.alibi = None;
            let mut inputs = Inputs::normal(&problem, dtype, device, 25)?;
            inputs.q = full(&problem.q_dims(), 0., dtype, device)?;
            inputs.k = full(&problem.kv_dims(), k, dtype, device)?;
            let (zeros, keys) = (host(&inputs.q)?, host(&inputs.k)?);
            let mean = naive::forward(&problem, &zeros, &keys, &host(&inputs.v)?);
            let (mut out, mut lse) = unseen_or_nan(&problem);
            let numbers = problem.num_heads * problem.head_dim;
            for (n, x) in out.iter_mut().enumerate() {
                if n / numbers % problem.seqlen_q % 3 != 0 {
                    *x = mean.out[n];
                }
            }
            for (n, x) in lse.iter_mut().enumerate() {
                if n % problem.seqlen_q % 3 != 0 {
                    *x = mean.lse[n];
                }
            }
            for i in (0..problem.seqlen_q).step_by(3) {
                inputs.q = fill(&inputs.q, 1, i..i + 1, q)?;
            }
            check_forwards("q 0 in part", &problem, &inputs, (&out, &lse))?;
        }
        Ok(())
    })
}

/// -inf in some of the keys: of whole tiles and of whole parts, but not of all that a row sees.
#[test]
fn keys_of_minus_infinity_among_others_weigh_nothing() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        if !device.is_cpu() {
            return Ok(());
        }
        for problem in shapes_of_every_kernel() {
            let seqlen = problem.seqlen_k;
            for hidden in [0..seqlen / 2, seqlen / 2..seqlen - 1, 1..seqlen] {
                if hidden.is_empty() {
                    continue;
                }
                let mut inputs = Inputs::normal(&problem, dtype, device, 26)?;
                inputs.q = inputs.q.abs()?;
                inputs.k = fill(&inputs.k, 1, hidden.clone(), f64::NEG_INFINITY)?;
                check(&format!("keys {hidden:?} -inf"), &problem, &inputs)?;
                // Their weight is 0, and 0 * NaN is NaN.
                inputs.v = fill(&inputs.v, 1, hidden.clone(), f64::NAN)?;
                check(&format!("keys {hidden:?} -inf, V NaN"), &problem, &inputs)?;
            }
        }
        Ok(())
    })
}
