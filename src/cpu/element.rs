//! The element types in storage, and how they become accumulation types and back.

use bytemuck::Pod;
use candle_core::{CpuStorage, Result, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::Simd;
use rayon::prelude::*;

use super::simd::Real;
#[cfg(target_arch = "x86_64")]
use super::simd::avx512;
use super::zeros;

/// A type that tensors hold. Arithmetic is done in `Acc`.
pub(crate) trait Element: WithDType + Pod {
    /// f32, or f64 for f64.
    type Acc: Real;

    /// Converts a row to the accumulation type; lengths are equal.
    fn widen(row: &[Self], out: &mut [Self::Acc]);
    /// Converts as many numbers as a vector has lanes.
    #[inline(always)]
    fn widen_vector<S: Simd>(simd: S, numbers: &[Self]) -> <Self::Acc as Real>::Vector<S> {
        let mut vector = Self::Acc::splat(simd, Self::Acc::ZERO);
        Self::widen(numbers, Self::Acc::lanes_mut::<S>(&mut vector));
        vector
    }
    /// Rounds a row to the storage type; lengths are equal.
    fn narrow(row: &[Self::Acc], out: &mut [Self]);
    /// Rounds a whole gradient; the identity where `Acc` is the storage type.
    fn narrow_all(values: Vec<Self::Acc>) -> Result<Vec<Self>>;
    /// Converts one number.
    fn to_acc(self) -> Self::Acc;
    /// Wraps a vector of accumulators as storage of their own type.
    fn acc_storage(values: Vec<Self::Acc>) -> CpuStorage;
    /// The accumulators that [`Element::acc_storage`] wrapped.
    fn acc_slice(storage: &CpuStorage) -> Result<&[Self::Acc]>;
}

macro_rules! impl_element {
    ($element:ty, $acc:ty, $storage:ident, widen: $widen:expr, narrow: $narrow:expr, narrow_all: $narrow_all:expr, to_acc: $to_acc:expr
     $(, $method:item)?) => {
        impl Element for $element {
            type Acc = $acc;

            #[inline(always)]
            fn widen(row: &[Self], out: &mut [Self::Acc]) {
                let widen: fn(&[Self], &mut [Self::Acc]) = $widen;
                widen(row, out)
            }
            #[inline(always)]
            fn narrow(row: &[Self::Acc], out: &mut [Self]) {
                let narrow: fn(&[Self::Acc], &mut [Self]) = $narrow;
                narrow(row, out)
            }
            fn narrow_all(values: Vec<Self::Acc>) -> Result<Vec<Self>> {
                let narrow_all: fn(Vec<Self::Acc>) -> Result<Vec<Self>> = $narrow_all;
                narrow_all(values)
            }
            #[inline(always)]
            fn to_acc(self) -> Self::Acc {
                let to_acc: fn(Self) -> Self::Acc = $to_acc;
                to_acc(self)
            }
            fn acc_storage(values: Vec<Self::Acc>) -> CpuStorage {
                CpuStorage::$storage(values)
            }
            fn acc_slice(storage: &CpuStorage) -> Result<&[Self::Acc]> {
                storage.as_slice()
            }
            $($method)?
        }
    };
}

impl_element!(f32, f32, F32,
    widen: |row, out| out.copy_from_slice(row),
    narrow: |row, out| out.copy_from_slice(row),
    narrow_all: Ok,
    to_acc: |x| x);
impl_element!(f64, f64, F64,
    widen: |row, out| out.copy_from_slice(row),
    narrow: |row, out| out.copy_from_slice(row),
    narrow_all: Ok,
    to_acc: |x| x);
impl_element!(f16, f32, F32,
widen: |row, out| {
    for (x, out) in row.iter().zip(out) {
        *out = f16_to_f32(*x);
    }
},
narrow: |row, out| out.convert_from_f32_slice(row),
narrow_all: narrow_in_parallel,
to_acc: |x| f16_to_f32(x),
#[inline(always)]
fn widen_vector<S: Simd>(simd: S, numbers: &[Self]) -> S::f32s {
    #[cfg(target_arch = "x86_64")]
    if let (Some(simd), Ok(&numbers)) = (avx512(simd), <&[f16; 16]>::try_from(numbers)) {
        return bytemuck::cast(simd.avx512f._mm512_cvtph_ps(bytemuck::cast(numbers)));
    }
    let mut vector = simd.splat_f32s(0.);
    Self::widen(numbers, f32::lanes_mut::<S>(&mut vector));
    vector
});
impl_element!(bf16, f32, F32,
    widen: |row, out| {
        for (x, out) in row.iter().zip(out) {
            *out = bf16_to_f32(*x);
        }
    },
    narrow: |row, out| out.convert_from_f32_slice(row),
    narrow_all: narrow_in_parallel,
    to_acc: |x| bf16_to_f32(x));

/// `x` as f32, in integer operations without a branch: loops of it vectorise for the instruction set of
/// the caller, which half's conversions, a call for each eight numbers, do not.
#[inline(always)]
fn f16_to_f32(x: f16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    const REBIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(x.to_bits());
    let magnitude = (bits & 0x7fff) << 13;
    let exponent = magnitude & EXPONENT;
    // Infinity and NaN keep the highest exponent.
    let special = if exponent == EXPONENT { REBIAS } else { 0 };
    let normal = magnitude + REBIAS + special;
    // A subnormal number counts from the smallest normal one, whose exponent is 1.
    let smallest = REBIAS + (1 << 23);
    let subnormal = f32::from_bits(magnitude + smallest) - f32::from_bits(smallest);
    let magnitude = if exponent == 0 {
        subnormal.to_bits()
    } else {
        normal
    };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// `x` as f32: a shift, for the same reason.
#[inline(always)]
fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds on all threads of the current rayon pool.
fn narrow_in_parallel<E: Element>(values: Vec<E::Acc>) -> Result<Vec<E>> {
    const CHUNK: usize = 1 << 16;
    let mut out: Vec<E> = zeros("the rounded dq", values.len())?;
    out.par_chunks_mut(CHUNK)
        .zip(values.par_chunks(CHUNK))
        .for_each(|(out, values)| E::narrow(values, out));
    Ok(out)
}
