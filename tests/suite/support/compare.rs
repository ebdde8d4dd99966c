//! Where two results differ, and by how much.

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Tensor, WithDType};
use half::{bf16, f16};

use super::device::watch;
use super::problem::Problem;
use super::run::Passes;
use super::tensors::host;

/// Fails unless every number is within `limit` of the truth.
///
/// A NaN on either side fails, an infinity passes only against the same infinity. The message has the
/// coordinates and values of the worst number, and the share that passes.
pub fn close(name: &str, ours: &Tensor, truth: &[f64], limit: f64) -> Result<()> {
    let values = host(ours)?;
    ensure!(
        values.len() == truth.len(),
        "{name}: {} numbers of shape {:?}, expected {}",
        values.len(),
        ours.dims(),
        truth.len()
    );
    let mut failing = 0;
    let mut worst = (0., 0);
    for (i, (&x, &t)) in values.iter().zip(truth).enumerate() {
        let distance = distance(x, t);
        if distance > limit {
            failing += 1;
        }
        if distance > worst.0 {
            worst = (distance, i);
        }
    }
    if failing > 0 {
        let (distance, i) = worst;
        bail!(
            "{name} of shape {:?}: got {:e} at {:?}, expected {:e}: off by {distance:.3e}, {:.3e} of the value; \
             limit {limit:.3e}; {failing} of {} numbers fail ({:.2} % pass)",
            ours.dims(),
            values[i],
            coordinates(i, ours.dims()),
            truth[i],
            distance / truth[i].abs(),
            values.len(),
            100. - 100. * failing as f64 / values.len() as f64,
        );
    }
    Ok(())
}

/// [`close`], with a tensor as the truth.
pub fn close_to(name: &str, ours: &Tensor, truth: &Tensor, limit: f64) -> Result<()> {
    ensure!(
        ours.dims() == truth.dims(),
        "{name}: shape {:?}, expected {:?}",
        ours.dims(),
        truth.dims()
    );
    close(name, ours, &host(truth)?, limit)
}

/// Fails unless both tensors are the same numbers, bit for bit, NaN included.
pub fn identical(name: &str, ours: &Tensor, theirs: &Tensor) -> Result<()> {
    ensure!(
        ours.dims() == theirs.dims() && ours.dtype() == theirs.dtype(),
        "{name}: {:?} {:?} against {:?} {:?}",
        ours.dtype(),
        ours.dims(),
        theirs.dtype(),
        theirs.dims()
    );
    let differing = differing(ours, theirs)?;
    if let (Some(&first), Some(&last)) = (differing.first(), differing.last()) {
        bail!(
            "{name} of shape {:?}: {:e} and {:e} at {:?}; {} of {} numbers differ, the last at {:?}",
            ours.dims(),
            host(ours)?[first],
            host(theirs)?[first],
            coordinates(first, ours.dims()),
            differing.len(),
            ours.elem_count(),
            coordinates(last, ours.dims()),
        );
    }
    Ok(())
}

/// Where, in row-major order, the bits of two tensors of one shape and type differ.
fn differing(ours: &Tensor, theirs: &Tensor) -> Result<Vec<usize>> {
    match ours.dtype() {
        DType::F16 => unequal_by(ours, theirs, f16::to_bits),
        DType::BF16 => unequal_by(ours, theirs, bf16::to_bits),
        DType::F32 => unequal_by(ours, theirs, f32::to_bits),
        // Exact in f64, so equal bits there are equal bits here.
        _ => unequal_by(
            &ours.to_dtype(DType::F64)?,
            &theirs.to_dtype(DType::F64)?,
            f64::to_bits,
        ),
    }
}

fn unequal_by<T: WithDType, B: PartialEq>(
    ours: &Tensor,
    theirs: &Tensor,
    bits: impl Fn(T) -> B,
) -> Result<Vec<usize>> {
    let a = ours.flatten_all()?.to_vec1::<T>()?;
    let b = theirs.flatten_all()?.to_vec1::<T>()?;
    watch::sign_of_life();
    Ok((0..a.len()).filter(|&i| bits(a[i]) != bits(b[i])).collect())
}

/// [`identical`] for all that a call gives. On a GPU dq may differ unless the problem asks for the same bits.
pub fn identical_passes(
    how: &str,
    problem: &Problem,
    ours: &Passes,
    theirs: &Passes,
) -> Result<()> {
    for ((of, ours), (_, theirs)) in ours.named().into_iter().zip(theirs.named()) {
        if of != "dq" || problem.deterministic || ours.device().is_cpu() {
            identical(&format!("{of} {how} of {problem:?}"), ours, theirs)?;
        }
    }
    Ok(())
}

/// [`close`], where a NaN of the truth demands a NaN, and an infinity the same infinity.
pub fn same_pattern(name: &str, ours: &Tensor, truth: &[f64], limit: f64) -> Result<()> {
    let values = host(ours)?;
    ensure!(values.len() == truth.len(), "{name}: {:?}", ours.dims());
    for (i, (&x, &t)) in values.iter().zip(truth).enumerate() {
        ensure!(
            x.is_nan() == t.is_nan() && (x.is_nan() || distance(x, t) <= limit),
            "{name}: got {x:e} at {:?}, expected {t:e}, limit {limit:.3e}",
            coordinates(i, ours.dims())
        );
    }
    Ok(())
}

/// Fails unless every number is finite.
pub fn finite(name: &str, ours: &Tensor) -> Result<()> {
    for (i, x) in host(ours)?.into_iter().enumerate() {
        ensure!(
            x.is_finite(),
            "{name}: got {x:e} at {:?}",
            coordinates(i, ours.dims())
        );
    }
    Ok(())
}

/// The largest distance; infinite if there is a NaN on either side.
pub fn max_distance(a: &[f64], b: &[f64]) -> f64 {
    let distances = a.iter().zip(b).map(|(&a, &b)| distance(a, b));
    distances.fold(0., f64::max)
}

fn distance(a: f64, b: f64) -> f64 {
    if a == b {
        0.
    } else if a.is_nan() || b.is_nan() {
        f64::INFINITY
    } else {
        (a - b).abs()
    }
}

fn coordinates(mut index: usize, dims: &[usize]) -> Vec<usize> {
    let mut at = vec![0; dims.len()];
    for (at, &dim) in at.iter_mut().zip(dims).rev() {
        *at = index % dim;
        index /= dim;
    }
    at
}

#[test]
fn a_nan_on_either_side_fails_a_comparison() -> Result<()> {
    let device = &candle_core::Device::Cpu;
    let nan = Tensor::new(&[1f32, f32::NAN], device)?;
    let numbers = Tensor::new(&[1f32, 2.], device)?;
    assert!(close("ours", &nan, &[1., 2.], 1e9).is_err());
    assert!(close("truth", &numbers, &[1., f64::NAN], 1e9).is_err());
    assert!(close("both", &nan, &[1., f64::NAN], 1e9).is_err());
    assert!(close_to("equal", &numbers, &numbers, 0.).is_ok());
    assert!(identical("bits", &nan, &nan).is_ok());
    assert!(identical("bits", &nan, &numbers).is_err());
    Ok(())
}

#[test]
fn a_failing_comparison_says_where_and_by_how_much() -> Result<()> {
    let ours = Tensor::new(&[[1f32, 2., 3.], [4., 5., 7.]], &candle_core::Device::Cpu)?;
    let message = close("out", &ours, &[1., 2., 3., 4., 5., 6.], 0.5)
        .unwrap_err()
        .to_string();
    for part in ["out", "[1, 2]", "7e0", "6e0", "1.000e0", "83.33 %"] {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
    Ok(())
}
